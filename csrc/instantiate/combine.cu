#include "kernels/common/combine.cuh"
