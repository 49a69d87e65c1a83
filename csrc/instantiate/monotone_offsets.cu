#include "kernels/common/monotone_offsets.cuh"
