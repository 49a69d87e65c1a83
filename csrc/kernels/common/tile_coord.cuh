// The tile coordinates of a CTA, stored in shared memory. What the loop needs briefly, or only the
// epilogue, would otherwise hold registers that the matmuls need.
#pragma once

#include "problem/sequences.cuh"

namespace flash_ext {

struct TileCoord {
    Sequence sequence;
    int head;
    int first_row;  // of the CTA's tile within the sequence
};

}  // namespace flash_ext
