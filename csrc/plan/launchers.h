// The launchers, one per kernel, instantiated per head dim in instantiate/. Each fills in the
// schedule, picks element type and features, and launches on the stream without waiting.
#pragma once

#include <cuda_runtime_api.h>

#include "problem/params.h"

namespace flash_ext {

template <int kHeadDim, int kHeadDimV>
cudaError_t fa1_forward(ForwardParams params, cudaStream_t stream);
template <int kHeadDim, int kHeadDimV>
cudaError_t fa2_forward(ForwardParams params, cudaStream_t stream);
template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_forward(ForwardParams params, cudaStream_t stream);
template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_decode(ForwardParams params, cudaStream_t stream);
// With q and k in kFloat8 or kInt8, and v in kFloat8.
template <ElementType kQKType, int kHeadDim, int kHeadDimV>
cudaError_t fa3_forward_fp8(ForwardParams params, cudaStream_t stream);
template <int kHeadDim, int kHeadDimV>
cudaError_t fa1_backward(BackwardParams params, cudaStream_t stream);
template <int kHeadDim, int kHeadDimV>
cudaError_t fa2_backward(BackwardParams params, cudaStream_t stream);
template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_backward(BackwardParams params, cudaStream_t stream);
template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_backward_wide(BackwardParams params, cudaStream_t stream);

// After a forward with split keys. `pdl` as for launch_kernel(): only after FA3, since every GPU
// that runs FA3 has it.
cudaError_t combine_splits(ForwardParams params, cudaStream_t stream, bool pdl);

// Before a variant's backward, a CTA for each block_q rows; general: is its kernel the general one?
cudaError_t backward_preprocess(const BackwardParams& params, int block_q, bool general,
                                cudaStream_t stream);

// After a variant's backward, whose workspace they read.
cudaError_t bias_gradient(BackwardParams params, cudaStream_t stream);
cudaError_t sink_gradient(BackwardParams params, cudaStream_t stream);
// Of dk_parts and dv_parts.
cudaError_t sum_parts(BackwardParams params, cudaStream_t stream);

// Before a deterministic backward of packed sequences: offsets (B + 1) with which no CTA can wait
// forever.
cudaError_t sanitize_cu_seqlens(const BackwardParams& params, int* offsets_q, int* offsets_k,
                                cudaStream_t stream);

// Shared memory that a CTA of the kernel needs.
template <int kHeadDim, int kHeadDimV>
int fa1_forward_shared_bytes();
template <int kHeadDim, int kHeadDimV>
int fa2_forward_shared_bytes();
template <int kHeadDim, int kHeadDimV>
int fa1_backward_shared_bytes();
template <int kHeadDim, int kHeadDimV>
int fa2_backward_shared_bytes();

}  // namespace flash_ext
