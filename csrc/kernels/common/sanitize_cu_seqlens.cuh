// Makes the offsets of varlen sequences monotone: each at least as large as the one before, and
// inside the tensor. Valid offsets do not change.
//
// Other kernels need no such pass: with any offsets, they stay inside the tensors. But in the
// deterministic backward CTAs wait for each other: where sequences overlap or tiles are missing,
// one might wait forever.
#pragma once

#include <utility>

#include "kernels/common/launch.cuh"
#include "problem/sequences.cuh"
#include "tile/warp_prefix.cuh"

namespace flash_ext {

// A warp each for q and k: a running maximum, 32 offsets at a time.
__global__ void sanitize_cu_seqlens_kernel(const __grid_constant__ BackwardParams params,
                                           int* offsets_q, int* offsets_k) {
    const bool is_q = blockIdx.x == 0;
    const int* cu_seqlens = is_q ? params.cu_seqlens_q : params.cu_seqlens_k;
    const int total = is_q ? params.seqlen_q : params.seqlen_k;
    int* offsets = is_q ? offsets_q : offsets_k;
    int largest = 0;
    for (int first = 0; first <= params.batch; first += 32) {
        const int i = first + lane_id();  // of an offset
        const int own = i <= params.batch ? varlen_begin(cu_seqlens, i + 1, total) : 0;
        const int x = max_of(warp_prefix(own, max_of<int>), largest);
        if (i <= params.batch) offsets[i] = x;
        largest = __shfl_sync(0xffffffff, x, 31);
    }
}

cudaError_t sanitize_cu_seqlens(BackwardParams params, const int* given_q, const int* given_k,
                                cudaStream_t stream) {
    int* offsets_q = const_cast<int*>(std::exchange(params.cu_seqlens_q, given_q));
    int* offsets_k = const_cast<int*>(std::exchange(params.cu_seqlens_k, given_k));
    sanitize_cu_seqlens_kernel<<<2, 32, 0, stream>>>(params, offsets_q, offsets_k);
    return cudaGetLastError();
}

}  // namespace flash_ext
