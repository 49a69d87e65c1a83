// How the FA3 forward stores O and lse: as results, or as those of splits, which the last one may
// combine.
#pragma once

#include "kernels/common/combine_row.cuh"
#include "kernels/fa3/forward.cuh"

namespace flash_ext {

// How many splits have stored the rows of this consumer.
template <class Config>
__device__ __forceinline__ EpochCounter Fa3Forward<Config>::stored_splits(const QueryTile& tile,
                                                                          int of_consumer) const {
    return {params.counters + tile.number * Config::kConsumers + of_consumer,
            params.scheduler.fetched.epoch};
}

// After store(). A warp combines every fourth row. A consumer without rows may come here, too:
// its count was not started, and it has nothing to combine.
template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::combine_if_last(const QueryTile& tile) const {
    ptx::barrier_sync(kSplitStored + consumer, 128);
    bool last = false;
    if (threadIdx.x % 128 == 0) {
        ptx::mbarrier_wait(arrivals_barrier(), 0);
        constexpr bool kOrdered = true;  // what all threads have stored before the barrier
        last = stored_splits(tile, consumer).template next<kOrdered>(params.num_splits) ==
               params.num_splits - 1;
    }
    if (!ptx::barrier_any(kSplitStored + consumer, 128, last)) return;
    const Sequence& s = tile.sequence;
#pragma unroll 1
    for (int i = warp_id() % 4; i < 64; i += 4) {
        const int row = consumer * 64 + i;
        const int query = query_of(tile, row), head = head_of(row);
        if (query >= s.seqlen_q) return;
        if (head >= group()) continue;
        const int64_t at = statistics_offset(params, s, tile.head + head) + query;
        constexpr bool kMayBeMarked = !Config::kGeneral && !kFp8;
        if constexpr (!kFp8) {
            combine_row<Element, Config::kHeadDimV, kMayBeMarked>(params, at);
        } else if (params.out_type == ElementType::kFloat16) {
            combine_row<__half, Config::kHeadDimV, kMayBeMarked>(params, at);
        } else {
            combine_row<__nv_bfloat16, Config::kHeadDimV, kMayBeMarked>(params, at);
        }
    }
}

// Stores O / l and lse to HBM, or the results of a split.
template <class Config>
__device__ __forceinline__ void Fa3Forward<Config>::store(Output& rO, Softmax& softmax,
                                                          const QueryTile& tile) const {
    softmax.finish();
    const Sequence& s = tile.sequence;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float factor = softmax.inverse_sum(0, i);
#pragma unroll
        for (int n = 0; n < Output::kN; ++n) {
            rO.v[0][n][2 * i] *= factor;
            rO.v[0][n][2 * i + 1] *= factor;
        }
    }
    if constexpr (kFp8) descale_output(rO, tile);
    // A logarithm takes a hundred cycles: of the four lanes of two rows, two compute one each.
    const int i = lane_id() % 2;
    const int row = lane_row() + 8 * i;
    const bool has_row = lane_id() % 4 < 2;
    const int64_t statistics = statistics_offset(params, s, tile.head);
    if (has_splits()) {
        const int64_t split = tile.split * statistics_rows(params) + statistics;
        const int first_row = warp_row();
        const auto index_of = [&](int row) -> int64_t {
            const int query = query_of(tile, first_row + row);
            const int head = head_of(first_row + row);
            if (query >= s.seqlen_q || head >= group()) return -1;
            return split + int64_t{head} * params.seqlen_q + query;
        };
        const int64_t index = index_of(row);
        float max = softmax.max(0, i);
        if (is_to_be_marked(max, softmax.lse(0, i, exponent_scale()))) max = mark_of(0);
        if (has_row && index >= 0) params.statistics_partial[index] = {max, softmax.sum(0, i)};
        store_rows(params.o_partial, rO, index_of);
    } else {
        const int first_row = tile.first_query + warp_row();
        const int rows = s.seqlen_q - first_row;
        float lse = softmax.lse(0, i, exponent_scale());
        if (is_to_be_marked(softmax.max(0, i), lse)) [[unlikely]] {
            lse = mark_of(warp_number());
            has_marked() = true;
        }
        if (has_row && row < rows) params.lse[statistics + first_row + row] = lse;
        const auto store_as = [&](auto element) {
            store_rows(global_tile<decltype(element)>(params.out, s.batch, s.q_begin + first_row,
                                                      tile.head, rows, params.head_dim_v),
                       rO);
        };
        if constexpr (!kFp8) {
            store_as(Element{});
        } else if (params.out_type == ElementType::kFloat16) {
            store_as(__half{});
        } else {
            store_as(__nv_bfloat16{});
        }
    }
}

}  // namespace flash_ext
