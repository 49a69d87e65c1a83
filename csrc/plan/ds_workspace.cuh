// The workspace for dS in the backward of wide heads.
#pragma once

#include <cstdint>

#include "problem/params.h"
#include "tile/host_device.h"

namespace flash_ext {

// Where the dS of one query head of a dense batch lies in memory (fa3/backward_dq_gemm.cuh): in
// tiles of 64 x 64 elements, Q tile by Q tile. Tiles above the diagonal have no memory where a mask
// hides them all.
struct DSWorkspaceTiles {
    static constexpr int kElements = 64 * 64;

    int q_tiles = 0;
    int kv_tiles = 0;
    bool triangle = false;

    DSWorkspaceTiles() = default;
    FLASH_HOST_DEVICE constexpr explicit DSWorkspaceTiles(const AttentionParams& params)
        : q_tiles(ceil_div(params.seqlen_q, 64)),
          kv_tiles(ceil_div(params.seqlen_k, 64)),
          triangle(params.window_right <= params.seqlen_q - params.seqlen_k) {}

    FLASH_HOST_DEVICE constexpr int of_row(int q_tile) const {
        return triangle ? q_tile + 1 : kv_tiles;
    }
    // The number of a Q tile's first tile; first(q_tiles) is the number of all tiles.
    FLASH_HOST_DEVICE constexpr int64_t first(int q_tile) const {
        return triangle ? int64_t{q_tile} * (q_tile + 1) / 2 : int64_t{q_tile} * kv_tiles;
    }
};

// The dS of a head of K and V, and so of its group.
FLASH_HOST_DEVICE constexpr int64_t ds_group_bytes(const AttentionParams& params) {
    const DSWorkspaceTiles tiles(params);
    return max_of<int64_t>(tiles.first(tiles.q_tiles) * DSWorkspaceTiles::kElements *
                               element_bytes(params.element_type) *
                               (params.heads_q / params.heads_k),
                           1);
}

// The memory that a call takes for dS: that of all heads, or of an equal share of them. Its limit
// is two and a half times the size of q, out and their gradients, which is linear in the sequence
// length, or 576 MiB if that is less. 0 if one head exceeds it, or if sequences are packed: the
// host does not know their lengths.
FLASH_HOST_DEVICE constexpr int64_t ds_workspace_bytes(const AttentionParams& params) {
    constexpr int64_t kMost = int64_t{576} << 20;
    const int64_t heads_q = int64_t{params.heads_q} * params.batch;
    const int64_t most =
        min_of(kMost, heads_q * params.seqlen_q * (params.head_dim + params.head_dim_v) * 5 *
                          element_bytes(params.element_type));
    const int64_t bytes = ds_group_bytes(params);
    if (params.cu_seqlens_q != nullptr || bytes > most) return 0;
    const int64_t heads = max_of<int64_t>(int64_t{params.heads_k} * params.batch, 1);
    const int64_t passes = ceil_div(heads, min_of(most / bytes, heads));
    return ceil_div(heads, passes) * bytes;
}

}  // namespace flash_ext
