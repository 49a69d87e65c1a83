#include "../kernels/monotone_offsets.cuh"
