#define FLASH_EXT_SHARED_PTX  // all targets have the same code
#include "kernels/common/combine_partial.cuh"
#include "kernels/common/flag_words.cuh"
#include "kernels/common/sanitize_cu_seqlens.cuh"
#include "kernels/common/sink_gradient.cuh"
#include "kernels/common/sum_parts.cuh"
