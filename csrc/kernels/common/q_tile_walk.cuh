// The order of the inner loop of FA1's and FA2's backward: the Q tiles that see a KV tile, for one
// query head of the group after another.
#pragma once

#include "problem/hide_by_words.cuh"
#include "problem/mask.cuh"
#include "problem/sequences.cuh"
#include "problem/tile_mask.cuh"

namespace flash_ext {

// In kernels without masks of tiles.
struct QTileWalk {
    VisibleTiles q_tiles;
    int last_head;
    int head;
    int i;          // in q_tiles
    int stage = 0;  // in shared memory, modulo kStages

    FLASH_DEVICE QTileWalk(VisibleTiles q_tiles_, int first_head, int heads)
        : q_tiles(q_tiles_),
          last_head(q_tiles_.empty() ? first_head - 1 : first_head + heads - 1),
          head(first_head),
          i(q_tiles_.begin) {}

    FLASH_DEVICE bool done() const { return head > last_head; }
    FLASH_DEVICE int q_tile() const { return q_tiles.tile(i); }

    FLASH_DEVICE QTileWalk next() const {
        QTileWalk after = *this;
        after.stage ^= 1;
        if (++after.i == q_tiles.end) {
            after.i = q_tiles.begin;
            ++after.head;
        }
        return after;
    }
};

// In kernels that may have them one thread looks two tiles ahead, and leaves in shared memory what
// it finds: registers are short over the loop.
struct ListedQTileWalk {
    static constexpr int kPlaces = 4;  // while one is written, threads read the two before it

    int head;
    int tile;
    bool partial;   // does the mask show the tile in part?
    int stage = 0;  // the number of the iteration; in shared memory, modulo kStages

    FLASH_DEVICE bool done() const { return head < 0; }
    FLASH_DEVICE int q_tile() const { return tile; }

    // By all threads.
    template <class List>
    static FLASH_DEVICE ListedQTileWalk first(ListedQTile (&places)[kPlaces], const List& list) {
        if (threadIdx.x == 0) {
            places[0] = list.first();
            places[1] = list.next(places[0]);
        }
        __syncthreads();  // both places are written
        return at(places, 0);
    }

    // The next tile. A barrier must come between two calls.
    template <class List>
    FLASH_DEVICE ListedQTileWalk next(ListedQTile (&places)[kPlaces], const List& list) const {
        if (threadIdx.x == 0)
            places[(stage + 2) % kPlaces] = list.next(places[(stage + 1) % kPlaces]);
        return at(places, stage + 1);
    }

 private:
    static FLASH_DEVICE ListedQTileWalk at(const ListedQTile (&places)[kPlaces], int stage) {
        const ListedQTile& place = places[stage % kPlaces];
        return {place.head, place.tile, place.partial, stage};
    }
};

// A member of SharedStorage, empty in kernels without such masks: the words of a Q tile's queries.
template <bool kMask, int kStages, int kBlockQ>
struct QTileMaskStorage {
    alignas(16) MaskWords words[kStages][kBlockQ];
    ListedQTile q_tiles[ListedQTileWalk::kPlaces];
};
template <int kStages, int kBlockQ>
struct QTileMaskStorage<false, kStages, kBlockQ> {};

}  // namespace flash_ext
