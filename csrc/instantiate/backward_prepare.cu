#include "kernels/common/backward_prepare.cuh"
