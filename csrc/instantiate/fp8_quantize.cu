#include "kernels/fp8/columns.cuh"
#include "kernels/fp8/quantize.cuh"
