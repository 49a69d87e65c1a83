#include "../kernels/combine.cuh"
