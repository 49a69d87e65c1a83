#include "kernels/common/combine_partial.cuh"
