// The postprocess pass of a backward that sums dQ in HBM: from dq_accum, in float32 and in fragment
// order, to dQ. It has a CTA per Q tile.
#pragma once

#include "kernels/common/launch.cuh"
#include "plan/workspace_rows.cuh"
#include "problem/key_rows.cuh"

namespace flash_ext {

// DQ knows the order of dQ in dq_accum: fetch_dq() writes the tile to shared memory, as a QTile,
// with the factor scale.
template <class DQ>
__global__ void __launch_bounds__(DQ::kThreads)
    postprocess_dq_kernel(const __grid_constant__ BackwardParams params) {
    const auto [tile, head] = q_tile_index<DQ::kMayBeVarlen>(params, blockIdx.x, DQ::kBlockQ);
    const auto [sequence, q_tile] = tile;
    const uint32_t shared = ptx::shared_address(dynamic_shared());
    DQ::fetch_dq(params, sequence, head, q_tile, shared);
    __syncthreads();  // the tile is complete
    const auto dq = query_rows<typename DQ::Element>(params.dq, sequence, head,
                                                     q_tile * DQ::kBlockQ, params.head_dim);
    store_tile<typename DQ::QTile, DQ::kThreads, DQ::kBlockQ, DQ::kUnaligned>(dq, shared, 0,
                                                                              params.aligned);
}

template <class DQ>
cudaError_t postprocess_dq(const BackwardParams& params, cudaStream_t stream,
                           const LaunchOptions& options = {}) {
    return launch_kernel<postprocess_dq_kernel<DQ>>(q_tile_count(params, DQ::kBlockQ), DQ::kThreads,
                                                    DQ::QTile::kBytes, params, stream, options);
}

}  // namespace flash_ext
