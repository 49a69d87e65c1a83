#include "kernels/common/sanitize_cu_seqlens.cuh"
