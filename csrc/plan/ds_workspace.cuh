// The workspace for dS in the backward of wide heads.
#pragma once

#include <cstdint>

#include "problem/mask.cuh"
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
    DSWorkspaceTiles(const AttentionParams& params, const MaskSummary& mask)
        : q_tiles(ceil_div(params.seqlen_q, 64)),
          kv_tiles(ceil_div(params.seqlen_k, 64)),
          triangle(mask.is_triangle) {}

    FLASH_HOST_DEVICE constexpr int of_row(int q_tile) const {
        return triangle ? q_tile + 1 : kv_tiles;
    }
    // The number of a Q tile's first tile; first(q_tiles) is the number of all tiles.
    FLASH_HOST_DEVICE constexpr int64_t first(int q_tile) const {
        return triangle ? int64_t{q_tile} * (q_tile + 1) / 2 : int64_t{q_tile} * kv_tiles;
    }
};

// The dS of a head of K and V, or of a part: of all its query heads.
inline int64_t ds_head_bytes(const AttentionParams& params, const DSWorkspaceTiles& tiles) {
    return max_of<int64_t>(tiles.first(tiles.q_tiles) * DSWorkspaceTiles::kElements *
                               element_bytes(params.element_type) *
                               (params.heads_q / params.heads_k),
                           1);
}

}  // namespace flash_ext
