#include "kernels/common/backward_preprocess.cuh"
