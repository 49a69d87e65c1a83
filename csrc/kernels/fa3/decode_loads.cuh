// How a warp of decode.cuh loads its blocks of K and V: every kWarps-th, one after another, each as
// a group of cp.async.
#pragma once

#include <type_traits>

#include "problem/key_rows.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/not_hoisted.cuh"

namespace flash_ext {

template <OptionSet kOptions>
using DecodeKeys = decltype(key_rows<kOptions>(std::declval<AttentionParams>(), Sequence{}));

template <class Key, OptionSet kOptions>
inline constexpr bool kPagesOfBytes = sizeof(Key) == 1 && contains(kOptions, OptionSet::kPages);

template <class Key, OptionSet kOptions>
FLASH_DEVICE DecodeKeys<kOptions> decode_keys(const AttentionParams& params, const Sequence& s) {
    DecodeKeys<kOptions> keys = key_rows<kOptions>(params, s);
    if constexpr (kPagesOfBytes<Key, kOptions>)  // unsigned saves a register
        keys.table = params.pages.table + static_cast<unsigned>(s.index()) * params.pages.stride;
    return keys;
}

// As KeyCursor, for bytes. A lane's first place in a tile stays in a register, from which the
// others are an XOR within the swizzle and an immediate offset: computed again, as it is where the
// matmuls need the registers, that is a third of all instructions.
template <class Tile>
struct ByteCursor {
    using Byte = typename Tile::Element;
    using Walk = ChunkWalk<Tile, 32>;
    static_assert(Tile::kRows % Walk::kRowsPerPass == 0);

    const Byte* source;
    uint32_t offset;  // of the lane's first chunk in a tile, and its row and column there
    int row, col;

    FLASH_DEVICE void start(const KeyRows& keys, const TensorView& view, int head, int first_key) {
        const Walk walk(lane_id());
        source = keys.tile<Byte>(view, head, first_key, 0).data + walk.row * view.row_stride +
                 walk.chunk * Tile::kChunk;
        // Not computed again.
        offset = ptx::not_hoisted(Tile::offset(walk.row, walk.chunk));
        row = ptx::not_hoisted(walk.row);
        col = ptx::not_hoisted(walk.chunk * Tile::kChunk);
    }
    template <bool kAllRows>
    FLASH_DEVICE void load(uint32_t shared, const KeyRows& keys, const TensorView& view,
                           int /*head*/, int cols, bool /*aligned*/, int key, int next_key) {
        const Byte* from = source;
#pragma unroll
        for (int pass = 0; pass < Walk::kPasses; ++pass) {
            const int first = pass * Walk::kRowsPerPass;
            const uint32_t target =
                ((shared + offset) ^ Tile::swizzle(first) * 16) + first * Tile::kPitch;
#pragma unroll
            for (int atom = 0; atom < Tile::kAtoms; ++atom)
                ptx::cp_async_16(target + atom * Tile::kAtomBytes, from + atom * Tile::kAtomCols,
                                 (kAllRows || row < keys.rows - key - first) &&
                                     atom * Tile::kAtomCols + col < cols);
            from += Walk::kRowsPerPass * view.row_stride;
        }
        source += (next_key - key) * view.row_stride;
    }
};

// Of one tensor. kSpareRegisters: registers are left for the addresses of bytes.
template <class Key, OptionSet kOptions, int kWarps, class Tile, bool kSpareRegisters>
struct BlockLoads {
    const TensorView& view;
    int cols;
    DecodeKeys<kOptions> keys;
    VisibleTiles blocks;
    int i;  // of the next block
    int head;
    std::conditional_t<kSpareRegisters, ByteCursor<Tile>,
                       KeyCursorOf<kOptions, Tile, 32, false, Key>>
        cursor;

    FLASH_DEVICE int first_key() const { return blocks.tile(i) * Tile::kRows; }

    FLASH_DEVICE void start() { cursor.start(keys, view, head, first_key()); }
    FLASH_DEVICE void load(uint32_t stage, int key) {
        const auto rows = [&](auto all) {
            cursor.template load<all>(stage, keys, view, head, cols, true, key, first_key());
        };
        if (kSpareRegisters && key + Tile::kRows <= keys.rows) {
            rows(std::true_type{});
        } else {
            rows(std::false_type{});
        }
    }
    FLASH_DEVICE void next(const char* stage) {
        const int key = first_key();
        const bool exists = i < blocks.end;
        i += kWarps;
        if (exists) load(ptx::shared_address(stage), key);
        ptx::cp_async_commit();
    }
};

template <class Key, OptionSet kOptions, int kWarps, class KTile, class VTile, bool kSpareRegisters>
struct SeparateLoads {
    BlockLoads<Key, kOptions, kWarps, KTile, kSpareRegisters> of_k;
    BlockLoads<Key, kOptions, kWarps, VTile, kSpareRegisters> of_v;

    FLASH_DEVICE SeparateLoads(const AttentionParams& p, const DecodeKeys<kOptions>& keys,
                               const VisibleTiles& blocks, int block, int head)
        : of_k{p.k, p.head_dim, keys, blocks, block, head},
          of_v{p.v, p.head_dim_v, keys, blocks, block, head} {
        of_k.start();
        of_v.start();
    }
    FLASH_DEVICE void next_k(const char* stage) { of_k.next(stage); }
    FLASH_DEVICE void next_v(const char* stage) { of_v.next(stage); }
};

// From pages, with 8 bits: a block of V is where its K is, so both are looked up once.
// ptxas 13.0: two lookups would be spilled.
template <class Key, OptionSet kOptions, int kWarps, class Tile>
struct PagedByteLoads {
    const AttentionParams& params;
    DecodeKeys<kOptions> keys;
    VisibleTiles blocks;
    int i;  // of the next block
    int head;
    KeyCursorOf<kOptions, Tile, 32, false, Key> cursor;

    FLASH_DEVICE PagedByteLoads(const AttentionParams& p, const DecodeKeys<kOptions>& k,
                                const VisibleTiles& all, int block, int head)
        : params(p), keys(k), blocks(all), i(block), head(head) {
        cursor.look_up(keys, first_key());
    }
    FLASH_DEVICE int first_key() const { return blocks.tile(i) * Tile::kRows; }
    FLASH_DEVICE void load(const char* stage, const TensorView& view, int cols) {
        if (i < blocks.end)
            cursor.template load_found<false>(ptx::shared_address(stage), keys, view,
                                              ptx::not_hoisted(head), cols, true, first_key());
    }
    FLASH_DEVICE void next_k(const char* stage) {
        load(stage, params.k, params.head_dim);
        ptx::cp_async_commit();
    }
    FLASH_DEVICE void next_v(const char* stage) {
        load(stage, params.v, params.head_dim_v);
        i += kWarps;
        cursor.look_up(keys, first_key());
        ptx::cp_async_commit();
    }
};

template <class Key, OptionSet kOptions, int kWarps, class KTile, class VTile, bool kSpareRegisters>
struct KeyLoadsOf {
    static_assert(!kPagesOfBytes<Key, kOptions> || std::is_same_v<KTile, VTile>);
    using Type =
        std::conditional_t<kPagesOfBytes<Key, kOptions>,
                           PagedByteLoads<Key, kOptions, kWarps, KTile>,
                           SeparateLoads<Key, kOptions, kWarps, KTile, VTile, kSpareRegisters>>;
};

}  // namespace flash_ext
