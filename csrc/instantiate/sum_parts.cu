#include "kernels/common/sum_parts.cuh"
