// Where the rows of K, V and of queries lie. All loads of K and V ask here, for an address or for
// coordinates of TMA, and how many keys are left. Rows of dense and of varlen tensors are adjacent.
// Those of pages are not: pages.cuh has the same for them.
#pragma once

#include "problem/pages.cuh"
#include "problem/params.h"
#include "problem/sequences.cuh"
#include "tile/copy.cuh"
#include "tile/tensor_map.cuh"

namespace flash_ext {

// The keys of a sequence.
struct KeyRows {
    int batch;  // of the tensors
    int begin;  // the row of key 0
    int rows;   // keys in use; what a tile has past them is loaded as zeros

    // A tile, as cp.async loads it.
    template <class Element>
    FLASH_DEVICE GlobalTile<const Element> tile(const TensorView& view, int head, int first_key,
                                                int cols) const {
        return global_tile<const Element>(view, batch, begin + first_key, head, rows - first_key,
                                          cols);
    }
    // All keys, as TMA loads tiles of them.
    template <class Element>
    FLASH_DEVICE TensorRows tensor_rows(const TensorView& view, int head) const {
        return flash_ext::tensor_rows<Element>(view, batch, head, begin, rows);
    }
};

FLASH_DEVICE KeyRows key_rows(const AttentionParams& /*params*/, const Sequence& s) {
    return {s.batch, s.k_begin, s.seqlen_k};
}

// The same for kernels of these options.
template <OptionSet kOptions>
FLASH_DEVICE auto key_rows(const AttentionParams& params, const Sequence& s) {
    if constexpr (contains(kOptions, OptionSet::kPages)) {
        return paged_key_rows(params, s);
    } else {
        return key_rows(params, s);
    }
}

// Loads tiles of K or V one after another, as TileCursor.
template <class Tile, int kThreads, bool kMayBeUnaligned, class Element>
struct KeyCursor {
    TileCursor<Tile, kThreads, kMayBeUnaligned, Element> cursor;

    FLASH_DEVICE void start(const KeyRows& keys, const TensorView& view, int head, int first_key) {
        cursor.start(keys.tile<Element>(view, head, first_key, 0));
    }
    // kAllRows: the tile ends within the sequence. The next one begins at next_key.
    template <bool kAllRows>
    FLASH_DEVICE void load(uint32_t shared, const KeyRows& keys, const TensorView& view,
                           int /*head*/, int cols, bool aligned, int key, int next_key) {
        cursor.template load<kAllRows>(shared, view.row_stride, keys.rows - key, cols, aligned,
                                       (next_key - key) * view.row_stride);
    }
};

template <OptionSet kOptions, class Tile, int kThreads, bool kMayBeUnaligned, class Element>
using KeyCursorOf = std::conditional_t<contains(kOptions, OptionSet::kPages),
                                       PagedKeyCursor<Tile, kThreads, kMayBeUnaligned, Element>,
                                       KeyCursor<Tile, kThreads, kMayBeUnaligned, Element>>;

// Rows of a tensor with a row for each query (Q, O, dO, dQ), from query `first` on.
template <class Element>
FLASH_DEVICE GlobalTile<Element> query_rows(const TensorView& view, const Sequence& s, int head,
                                            int first, int cols) {
    return global_tile<Element>(view, s.batch, s.q_begin + first, head, s.seqlen_q - first, cols);
}

}  // namespace flash_ext
