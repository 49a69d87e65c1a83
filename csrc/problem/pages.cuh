// K and V in pages: where the rows of a sequence's keys are, and tiles of them, as cp.async and as
// TMA load them. The counterpart of KeyRows, for kernels with OptionSet::kPages.
//
// The table names a page for each run of `size` keys. A tile may begin within a page, and have
// several. So cp.async asks for each row of a tile where it is: a lane asks for one row, a tile
// ahead, and the lanes that load the row get the answer by shuffles. TMA loads a tile in boxes that
// divide both the tile and the pages: a lane asks for one and loads it. What follows a sequence's
// last key in its page is another sequence's past the bounds of a map that ends there
// (tile/tensor_map.cuh): so it arrives as zeros, whatever it holds.
#pragma once

#include "problem/params.h"
#include "problem/sequences.cuh"
#include "ptx/not_hoisted.cuh"
#include "tile/copy.cuh"
#include "tile/tensor_map.cuh"

namespace flash_ext {

// A stride in units of 16 bytes, as coordinates are. In these all is computed in 32 bits, modulo
// 2^32: producers have few registers.
template <class Element>
FLASH_DEVICE unsigned stride_units(int64_t stride) {
    return static_cast<unsigned>(stride * static_cast<int>(sizeof(Element)) / 16);
}

// The keys of a sequence.
struct PagedKeyRows {
    const Pages& pages;
    const int* table;  // of the sequence
    int rows;          // keys in use; what a tile has past them is loaded as zeros

    // A row of the tensors, with the page as the table has it.
    struct Place {
        int page;
        int row;
    };
    // Of a key, or any row if it is not in use.
    FLASH_DEVICE Place at(int key) const {
        if (static_cast<unsigned>(key) >= static_cast<unsigned>(rows)) return {0, 0};
        const int index = key / pages.by_size;  // of the page, among the sequence's
        return {table[index], key - index * pages.size};
    }
    FLASH_DEVICE int page_of(int entry) const { return clamp(entry, 0, pages.count - 1); }
    // From row 0 of page 0: in elements; of 8 bits in units of 16 bytes, which 32 bits hold, since
    // fa3 accepts rows of less than 32 GiB alone.
    template <class Element>
    FLASH_DEVICE auto offset(const TensorView& view, Place place) const {
        const int64_t elements =
            page_of(place.page) * view.batch_stride + place.row * view.row_stride;
        if constexpr (sizeof(Element) == 1) {
            return static_cast<unsigned>(elements >> 4);
        } else {
            return elements;
        }
    }
    // The rows of a key's page, as TMA loads them. `place`: of the key.
    template <class Element>
    FLASH_DEVICE TensorRows tensor_rows(const TensorView& view, int head, Place place,
                                        int key) const {
        const int in_use = clamp(rows - key + place.row, 0, pages.size);
        const unsigned offset = page_of(place.page) * stride_units<Element>(view.batch_stride) +
                                head * stride_units<Element>(view.head_stride) +
                                in_use * max_of(stride_units<Element>(view.row_stride), 1u);
        return {static_cast<int>(offset), kRowBound - in_use};
    }
};

FLASH_DEVICE PagedKeyRows paged_key_rows(const AttentionParams& params, const Sequence& s) {
    return {params.pages, params.pages.table + s.index() * params.pages.stride, s.seqlen_k};
}

// As KeyCursor (key_rows.cuh), from pages. All lanes of a warp call it.
template <class Tile, int kThreads, bool kMayBeUnaligned, class Element>
struct PagedKeyCursor {
    using Walk = ChunkWalk<Tile, kThreads>;
    static constexpr int kRowsOfWarp = 32 / Tile::kChunksPerRow;  // in a pass
    static_assert(kRowsOfWarp * Walk::kPasses <= 32);

    PagedKeyRows::Place place;  // of the row that this lane looks up, in the next tile

    FLASH_DEVICE void start(const PagedKeyRows& keys, const TensorView& /*view*/, int /*head*/,
                            int first_key) {
        look_up(keys, first_key);
    }

    template <bool kAllRows>
    FLASH_DEVICE void load(uint32_t shared, const PagedKeyRows& keys, const TensorView& view,
                           int head, int cols, bool aligned, int key, int next_key) {
        load_found<kAllRows>(shared, keys, view, head, cols, aligned, key);
        look_up(keys, next_key);
    }

    // The two steps of load(), for tensors whose tiles are looked up once.
    FLASH_DEVICE void look_up(const PagedKeyRows& keys, int key) {
        place = keys.at(key + row_of_lane());
    }
    template <bool kAllRows>
    FLASH_DEVICE void load_found(uint32_t shared, const PagedKeyRows& keys, const TensorView& view,
                                 int head, int cols, bool aligned, int key) {
        const auto* base = row_pointer<const Element>(view, 0, 0, head);
        // The entry is waited for here, not where it was asked for.
        const PagedKeyRows::Place here{ptx::not_hoisted(place.page), place.row};
        if (!kMayBeUnaligned || aligned) {
            load_rows<kAllRows>(shared, base, keys.offset<Element>(view, here), keys.rows - key,
                                cols);
        } else {
            load_unaligned(shared, base, keys, view, cols, key);
        }
    }

 private:
    static FLASH_DEVICE int row_of_lane() {
        const int warp = ptx::not_hoisted(threadIdx.x) % kThreads / 32;
        return lane_id() / kRowsOfWarp * Walk::kRowsPerPass + warp * kRowsOfWarp +
               lane_id() % kRowsOfWarp;
    }

    // `offset`: of the row that this lane has looked up.
    template <bool kAllRows, class Offset>
    static FLASH_DEVICE void load_rows(uint32_t shared, const Element* base, Offset offset,
                                       int rows, int cols) {
        constexpr int kUnit = sizeof(Element) == 1 ? 16 : 1;  // elements
        const Walk walk(ptx::not_hoisted(threadIdx.x) % kThreads);
        const int col = walk.chunk * Tile::kChunk;
#pragma unroll
        for (int pass = 0; pass < Walk::kPasses; ++pass) {
            const int row = walk.row + pass * Walk::kRowsPerPass;
            const Element* source =
                base + col +
                int64_t{__shfl_sync(0xffffffff, offset,
                                    pass * kRowsOfWarp + lane_id() / Tile::kChunksPerRow)} *
                    kUnit;
            if (Walk::kRagged && pass == Walk::kPasses - 1 && row >= Tile::kRows) continue;
#pragma unroll
            for (int atom = 0; atom < Tile::kAtoms; ++atom)
                ptx::cp_async_16(shared + atom * Tile::kAtomBytes + Tile::offset(row, walk.chunk),
                                 source + atom * Tile::kAtomCols,
                                 (kAllRows || row < rows) && atom * Tile::kAtomCols + col < cols);
        }
    }

    // Not unrolled, as in load_tile.
    static FLASH_DEVICE void load_unaligned(uint32_t shared, const Element* base,
                                            const PagedKeyRows& keys, const TensorView& view,
                                            int cols, int key) {
        const int row_chunks = Tile::kCols / Tile::kChunk;
#pragma unroll 1
        for (int i = threadIdx.x % kThreads; i < Tile::kRows * row_chunks; i += kThreads) {
            const int row = i / row_chunks;
            const int chunk = i % row_chunks;
            const int col = chunk * Tile::kChunk;
            const Element* source = base + keys.offset<Element>(view, keys.at(key + row)) + col;
            const uint4 x = load_8(source, key + row < keys.rows ? cols - col : 0);
            ptx::st_shared_v4(shared + Tile::offset(row, chunk), {x.x, x.y, x.z, x.w});
        }
    }
};

}  // namespace flash_ext
