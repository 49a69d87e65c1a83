#include "../kernels/large_lse.cuh"
