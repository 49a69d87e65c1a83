// The tile coordinates of a CTA, stored in shared memory. What the loop needs briefly, or only the
// epilogue, would otherwise hold registers that the matmuls need.
#pragma once

#include "problem/sequences.cuh"
#include "tile/copy.cuh"

namespace flash_ext {

struct TileCoord {
    Sequence sequence;
    int head;
    int first_row;  // of the CTA's tile within the sequence
};

// At `offset` in shared memory. One thread writes it; a barrier must follow.
__device__ __forceinline__ TileCoord& shared_tile_coord(int offset) {
    return *reinterpret_cast<TileCoord*>(dynamic_shared() + offset);
}

}  // namespace flash_ext
