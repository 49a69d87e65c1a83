// Sequences that were loaded from memory, in uniform registers or in shared memory: the loops of
// the kernels have no vector registers left for them.
#pragma once

#include "problem/sequences.cuh"
#include "ptx/uniform.cuh"
#include "schedule/tile_numbers.cuh"

namespace flash_ext {

// What a CTA keeps in shared memory over its loop.
struct TileCoord {
    Sequence sequence;
    int head;
    int first_row;  // of the CTA's tile within the sequence
};

template <bool kMayBeVarlen>
FLASH_DEVICE Sequence warp_uniform(const Sequence& s) {
    if constexpr (!kMayBeVarlen) return s;
    using ptx::warp_uniform;
    return {warp_uniform(s.batch),   warp_uniform(s.seq_idx),  warp_uniform(s.q_begin),
            warp_uniform(s.k_begin), warp_uniform(s.seqlen_q), warp_uniform(s.seqlen_k),
            warp_uniform(s.rows_k)};
}

template <bool kMayBeVarlen>
FLASH_DEVICE SequenceTile warp_uniform(const SequenceTile& tile) {
    if constexpr (!kMayBeVarlen) return tile;
    return {warp_uniform<true>(tile.sequence), ptx::warp_uniform(tile.tile)};
}

}  // namespace flash_ext
