// Dropout's words in the FA3 backward, in shared memory. A call of Philox decides 32 keys, of which
// a warp has 16. So two warps side by side make the calls of every second block of 16 queries each,
// for both.
#pragma once

#include "kernels/fa3/cta.cuh"
#include "problem/score.cuh"
#include "ptx/barrier.cuh"

namespace flash_ext {

// Two stages, in turns, as of dS: when a warp draws a stage again, it has waited for the dS that
// all warps made with that stage's words.
template <bool kDropout, int kWarps, int kBlocks>
struct DropoutWords {
    static_assert(kWarps % 2 == 0 && kBlocks % 2 == 0);
    // By (stage, warp whose keys they decide, block of queries, lane that has drawn them) the words
    // of an even and of an odd key.
    uint2 words[2][kWarps][kBlocks][32];

    // For tiles whose rows are keys: first_key is the first one of the two warps.
    FLASH_DEVICE void draw(uint32_t stage, int warp, const DropoutMask& mask, int first_key,
                           int first_query) {
        const int query = first_query + lane_col() + lane_row() % 2;
#pragma unroll
        for (int i = 0; i < kBlocks / 2; ++i) {
            const int block = 2 * i + warp % 2;
            const Philox4 random =
                mask.words(query + 16 * block, first_key + lane_row(), MulWide{});
            uint2(*of_pair)[kBlocks][32] = words[stage] + warp / 2 * 2;
            of_pair[0][block][lane_id()] = {random.v[0], random.v[1]};
            of_pair[1][block][lane_id()] = {random.v[2], random.v[3]};
        }
        ptx::barrier_sync(kDropoutBarrier + warp / 2, 64);
    }

    // The words of this lane's keys and of its queries 2 c and 2 c + 1, and those 8 further.
    FLASH_DEVICE void read(uint32_t (&pair)[2], uint32_t stage, int warp, int block) const {
        const uint2(&of_lanes)[32] = words[stage][warp][block];
        const int even = lane_id() & ~4;  // with an even row
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const auto* of_keys = reinterpret_cast<const uint32_t*>(&of_lanes[even + 4 * j]);
            pair[j] = of_keys[lane_row() % 2];
        }
    }
};
template <int kWarps, int kBlocks>
struct DropoutWords<false, kWarps, kBlocks> {};

}  // namespace flash_ext
