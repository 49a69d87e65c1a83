// What follows the last KV tile of a Q tile in the FA3 forward kernels: the stores of O and lse, or
// of a split's results.
#pragma once

#include "kernels/fa3/forward_tiles.cuh"

namespace flash_ext {

template <class Element, class QKElement, int kHeadDim, int kHeadDimV, OptionSet kOptions,
          tuning::Fa3ForwardShape kTuning>
struct Fa3ForwardResults
    : Fa3ForwardTiles<Element, QKElement, kHeadDim, kHeadDimV, kOptions, kTuning> {
    using Tiles = typename Fa3ForwardResults::Fa3ForwardTiles;
    using Tiles::consumer, Tiles::group, Tiles::has_fixed_splits, Tiles::head_of, Tiles::kConsumers,
        Tiles::kMayHaveSplits, Tiles::pack_gqa_log2, Tiles::params, Tiles::query_of,
        Tiles::warp_row;
    using typename Tiles::Output;

    using Tiles::Tiles;

    // O / l, with dropout times the factor of entries that are kept. With fixed splits O, since
    // merge_splits.cuh divides.
    template <class Softmax>
    FLASH_DEVICE void normalize(Output& rO, Softmax& softmax) const {
        softmax.finish();
        const float factor = late_factor<kOptions>(params);
        if (has_fixed_splits()) return;
        RowRescaling{true, {factor * softmax.inverse_sum(0, 0), factor * softmax.inverse_sum(0, 1)}}
            .apply(rO);
    }

    // Calls store(element of out).
    template <class Store>
    FLASH_DEVICE void with_out_type(Store store) const {
        if constexpr (sizeof(Element) == 2) {
            store(Element{});
        } else if (params.out_type == ElementType::kFloat16) {
            store(__half{});
        } else {
            store(__nv_bfloat16{});
        }
    }

    template <class Softmax>
    FLASH_DEVICE bool merge_fixed_splits(Output& rO, Softmax& softmax,
                                         const QueryTile& tile) const {
        return MergedSplits<Output>(params.o_partial, kConsumers, consumer)
            .merge(rO, softmax, {tile.first_split, tile.end_split}, tile.split);
    }

    // Stores O / l and lse to HBM, or the results of a split. kLast: it is the CTA's last tile.
    // Only then may the heads of a group be written to out: in the loop the test would cost splits
    // time. kMerged: it has all splits.
    template <bool kLast, bool kMerged = false, class Softmax>
    FLASH_DEVICE void store_tile(const Output& rO, const Softmax& softmax,
                                 const QueryTile& tile) const {
        const Sequence& s = tile.sequence;
        // A logarithm takes a hundred cycles: of the four lanes of two rows, two compute one each.
        const int i = lane_id() % 2;
        int row = lane_row() + 8 * i;
        if constexpr (kMayHaveSplits) row = ptx::not_hoisted(row);
        const bool has_row = lane_id() % 4 < 2;
        const int64_t statistics = statistics_offset(params, s, tile.head);
        const int first_row = warp_row();
        // Of the rows from `first` on: the index of a row of the warp, or -1 if it has none.
        const auto index_from = [&](int64_t first, int row) -> int64_t {
            const int query = query_of(tile, first_row + row);
            const int head = head_of(first_row + row);
            if (query >= s.seqlen_q || head >= group()) return -1;
            return first + int64_t{head} * params.seqlen_q + query;
        };
        // Of the kernels for splits, only one with options may have neither splits nor groups.
        constexpr bool kForSplits = kMayHaveSplits && !visits_elements(kOptions);
        constexpr bool kSplits = kForSplits && !kLast, kGroup = kForSplits && kLast;
        if (!kMerged && (kSplits || (kMayHaveSplits && params.o_partial != nullptr))) {
            const int64_t first = tile.split * statistics_rows(params) + statistics;
            const int64_t index = index_from(first, row);
            if (has_row && index >= 0) {
                params.statistics_partial[index] = {softmax.max(0, i), softmax.sum(0, i)};
                if (has_fixed_splits())
                    store_without_keys(params, {tile.first_split, tile.end_split}, tile.split,
                                       index);
            }
            store_rows(params.o_partial, rO, [&](int row) { return index_from(first, row); });
        } else if (kGroup || (kLast && pack_gqa_log2() > 0)) {
            const float lse = softmax.lse(0, i);
            const int64_t index = index_from(statistics, row);
            if (has_row && index >= 0) params.lse[index] = lse;
            with_out_type([&](auto element) {
                store_apart(rO, params.head_dim_v, [&](int row) {
                    auto* out = row_pointer<decltype(element)>(
                        params.out, s.batch, s.q_begin + query_of(tile, first_row + row),
                        tile.head + head_of(first_row + row));
                    return index_from(statistics, row) < 0 ? nullptr : out;
                });
            });
        } else {
            const int first_query = tile.first_query + first_row;
            const int rows = s.seqlen_q - first_query;
            const float lse = softmax.lse(0, i);
            if (has_row && row < rows) params.lse[statistics + first_query + row] = lse;
            with_out_type([&](auto element) {
                store_rows(
                    global_tile<decltype(element)>(params.out, s.batch, s.q_begin + first_query,
                                                   tile.head, rows, params.head_dim_v),
                    rO);
            });
        }
    }
};

}  // namespace flash_ext
