// The results of fixed splits (schedule/split_kv.cuh) in the FA3 forward kernels.
#pragma once

#include "kernels/common/merge_splits.cuh"
#include "kernels/fa3/work_tiles.cuh"
#include "ptx/not_hoisted.cuh"
#include "schedule/split_kv.cuh"
#include "tile/register_tile.cuh"

namespace flash_ext {

// A CTA's next split of a Q tile whose tiles kv_tiles are, as the tile's: `split`, or if that is
// negative the last one of number tile.split of the CTAs. If it has none, first_query becomes
// negative. Returns the split that follows, negative if another Q tile does.
FLASH_DEVICE int take_fixed_split(QueryTile& tile, int split, int split_tiles, int ctas) {
    if (tile.first_query < 0) return -1;
    const Interval splits = fixed_splits(tile.kv_tiles, split_tiles);
    if (split < 0) split = last_fixed_split(splits, tile.split, ctas);
    if (split < 0) {
        tile.first_query = -1;
        return -1;
    }
    tile.split = split;
    tile.first_split = splits.begin;
    tile.end_split = splits.end;
    tile.kv_tiles = tile.kv_tiles.within(tile_interval(split, split_tiles));
    return next_fixed_split(splits, split, ctas);
}

// What the splits of a Q tile so far add up to, if one CTA has them all: a consumer keeps it in
// memory of its own, which stays in L2, each thread what it has in registers.
template <class Output>
struct MergedSplits {
    static constexpr int kFours = Output::kN + 1;  // of a thread: O; max and sum of its two rows

    float4* kept;

    FLASH_DEVICE MergedSplits(float* memory, int consumers, int consumer)
        : kept(reinterpret_cast<float4*>(memory) +
               (static_cast<int>(blockIdx.x) * consumers + consumer) * kFours * 128 +
               ptx::not_hoisted(threadIdx.x) % 128) {}

    // Merges a split of the Q tile with those before, and keeps the result for the next one.
    // Returns false if it is the last one.
    template <class Softmax>
    FLASH_DEVICE bool merge(Output& o, Softmax& softmax, Interval splits, int split) const {
        const bool first = split == splits.end - 1, last = split == splits.begin;
        const float4 statistics = first ? float4{} : kept[Output::kN * 128];
        PartialStatistics all[2] = {{statistics.x, statistics.y}, {statistics.z, statistics.w}};
        MergeWeights merged[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            merged[i] = merge_statistics(all[i], {softmax.row_max[0][i], softmax.row_sum[0][i]});
            softmax.row_max[0][i] = all[i].max;
            softmax.row_sum[0][i] = all[i].sum;
        }
        if (!last) kept[Output::kN * 128] = {all[0].max, all[0].sum, all[1].max, all[1].sum};
#pragma unroll
        for (int n = 0; n < Output::kN; ++n) {
            const float4 before = first ? float4{} : kept[n * 128];
            float (&x)[4] = o.v[0][n];
            x[0] = merged[0](before.x, x[0]);
            x[1] = merged[0](before.y, x[1]);
            x[2] = merged[1](before.z, x[2]);
            x[3] = merged[1](before.w, x[3]);
            if (!last) kept[n * 128] = {x[0], x[1], x[2], x[3]};
        }
        return !last;
    }
};

// Statistics of splits without keys of the Q tile, whose splits with keys are `splits`: whoever has
// the last one of these writes them. `index`: of this row and split.
FLASH_DEVICE void store_without_keys(const ForwardParams& params, Interval splits, int split,
                                     int64_t index) {
    if (split != splits.end - 1) return;
    const int64_t rows = statistics_rows(params);
    for (int i = 0; i < params.num_splits; ++i)
        if (i < splits.begin || i >= splits.end)
            params.statistics_partial[index + (i - split) * rows] = {-INFINITY, 0.f};
}

}  // namespace flash_ext
