// FlashAttention-1 forward (Dao et al. 2022, algorithm 2).
//
// Loop order: one CTA per (batch, head); outer loop over KV tiles, inner loop over Q tiles. O (in
// float32), l and m are in HBM and are read and written at every iteration; O is always normalized.
//
//     for each KV tile j:
//         for each Q tile i that sees it:
//             S = Q_i K_j^T                          each warp: its keys
//             m~ = rowmax(S) scale                   exchanged
//             P = 2^(S scale - m~),  l~ = rowsum(P)  exchanged
//             m_new = max(m_i, m~)
//             l_new = 2^(m_i - m_new) l_i + 2^(m~ - m_new) l~
//             O_i = (l_i 2^(m_i - m_new) O_i + 2^(m~ - m_new) P V_j) / l_new
//                                                    each warp: its columns
//             l_i = l_new,  m_i = m_new           (scale in base 2)
//
// Warps: K is split across the four warps of a team (split-K): each computes the scores of its own
// keys. So row maxima, row sums and P must be exchanged through shared memory, which
// FlashAttention-2 avoids. Then each warp computes its own columns of O; O_i in HBM has the layout
// of its owners' fragments. Teams share the KV tile and take turns at the Q tiles, so that one
// team's matmuls overlap with the barriers and the memory traffic of the others.
//
// Barriers, per Q tile and team: the comments in the loop say what each is for. cp.async groups are
// committed in the order O_i, m_i and l_i; then the next Q tile.
//
// All that an iteration needs from HBM goes through cp.async, even what only one lane uses. A load
// to a register would stall the matmuls: a warp has few scoreboards for loads, so waiting for an
// operand from shared memory may mean waiting for HBM.
//
// With a mask of tiles the inner loop leaves out the Q tiles that see no key of the KV tile: that
// is block-sparse FlashAttention (algorithm 5).
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/common/softmax.cuh"
#include "kernels/common/varlen.cuh"
#include "plan/workspace_rows.cuh"
#include "problem/hide_by_words.cuh"
#include "problem/key_rows.cuh"
#include "problem/mask.cuh"
#include "problem/score.cuh"
#include "problem/sequences.cuh"
#include "ptx/barrier.cuh"
#include "schedule/tile_numbers.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"

namespace flash_ext {

// A larger KV tile means fewer passes of O through HBM; what fits depends on the GPU.
template <class Element, int kHeadDim, int kHeadDimV, OptionSet kOptions, bool kLessMemory>
struct Fa1Forward {
    static constexpr auto kTuning = row_of(tuning::kFa1Forward, {kHeadDim, kHeadDimV});
    static constexpr bool kForLessMemory = kLessMemory;
    static constexpr bool kMayBeVarlen = contains(kOptions, OptionSet::kVarlen);
    static constexpr bool kUnaligned = contains(kOptions, OptionSet::kUnaligned);
    static constexpr bool kMayHaveMask = contains(kOptions, OptionSet::kMask);  // of tiles
    static constexpr int kBlockQ = kTuning.block_q;
    // With a mask of tiles a KV tile is at most one of its blocks.
    static constexpr int kBlockKV = kLessMemory    ? kTuning.small_block_kv
                                    : kMayHaveMask ? min_of(kTuning.block_kv, kMaskBlock)
                                                   : kTuning.block_kv;
    static constexpr int kTeamWarps = 4;
    static constexpr int kKeysPerWarp = kBlockKV / kTeamWarps;
    // ptxas 13.0: the registers of three teams, 168 a thread, do not hold all options' values and
    // 64 keys a warp.
    static constexpr int kTeams =
        kLessMemory || (kUnaligned && kKeysPerWarp == 64) ? 2 : kTuning.teams;
    static constexpr int kTeamThreads = 32 * kTeamWarps;
    static constexpr int kThreads = kTeams * kTeamThreads;

    using QTile = SharedTile<Element, kBlockQ, kHeadDim>;
    using KTile = SharedTile<Element, kBlockKV, kHeadDim>;
    using VTile = SharedTile<Element, kBlockKV, kHeadDimV>;
    using PTile = SharedTile<Element, kBlockQ, kBlockKV>;
    using OTile = SharedTile<Element, kBlockQ, kHeadDimV>;

    struct Statistics {
        float row_max[kBlockQ];
        float row_sum[kBlockQ];
    };
    struct alignas(1024) TeamStorage {  // which swizzled tiles start on
        char q[QTile::kBytes];
        char p[max_of(PTile::kBytes, OTile::kBytes)];  // at last O_i leaves through it
        char o[kBlockQ * kHeadDimV * sizeof(float)];   // O_i as in HBM, ...
        Statistics statistics;                         // ... m_i and l_i
        Statistics of_warps[kTeamWarps];               // m~ and l~ of each warp's keys
    };
    struct SharedStorage {
        char k[KTile::kBytes];
        char v[VTile::kBytes];
        TeamStorage teams[kTeams];
    };
    static constexpr int kSharedBytes = sizeof(SharedStorage);

    using Scores = RegisterTile<kBlockQ, kKeysPerWarp>;
    using Output = RegisterTile<kBlockQ, kHeadDimV / kTeamWarps>;
    static constexpr int kFragments = Output::kM * Output::kN;  // of four floats of a lane

    // Per row that this lane holds elements of: m_i and l_i.
    using RowValues = float[Scores::kM][2];
    struct RowState {
        RowValues max;
        RowValues sum;
    };

    const ForwardParams& params;
    int head;
    Sequence sequence;
    BandMask mask;
    float first_max;  // m of a row that has seen no key, and l: a sink counts as a key ...
    float first_sum;  // ... with the value 0
    int team;
    int warp;  // within the team: which of the keys, and which columns of O, are its own
    SharedStorage& shared;
    TeamStorage& storage;
    int64_t first_tile;  // the number of Q tile 0 in the workspaces

    FLASH_DEVICE Fa1Forward(const ForwardParams& p, int flat_head)
        : params(p),
          head(flat_head % p.heads_q),
          sequence(warp_uniform<kMayBeVarlen>(sequence_of<kMayBeVarlen>(p, flat_head / p.heads_q))),
          mask(mask_of(p, sequence)),
          first_max(params.sink != nullptr && sequence.is_owned(params) ? params.sink[head] * kLog2e
                                                                        : -INFINITY),
          first_sum(first_max == -INFINITY ? 0.f : 1.f),
          team(warp_id() / kTeamWarps),
          warp(warp_id() % kTeamWarps),
          shared(shared_storage<SharedStorage>()),
          storage(shared.teams[team]),
          first_tile(workspace_tile(p, sequence, head, 0, tile_numbers(p, p.seqlen_q, kBlockQ),
                                    kBlockQ)) {}

    FLASH_DEVICE void team_barrier() const { ptx::barrier_sync(1 + team, kTeamThreads); }

    // The KV tiles that a Q tile sees, of a mask of tiles the first one to the last one. They tell
    // its first visit and its last.
    FLASH_DEVICE VisibleTiles seen_by(int q_tile) const {
        if constexpr (kMayHaveMask)
            if (has_tile_mask()) {
                const Interval keys = blocks_hull(runs_of(q_tile));
                return {keys.begin * kMaskBlock / kBlockKV,
                        ceil_div(min_of(keys.end * kMaskBlock, sequence.seqlen_k), kBlockKV)};
            }
        return VisibleTiles::of_queries(mask, tile_interval(q_tile, kBlockQ), kBlockKV);
    }

    FLASH_DEVICE bool has_tile_mask() const { return params.tile_mask.kv_tiles != nullptr; }
    FLASH_DEVICE BlockRuns runs_of(int q_tile) const {
        static_assert(kMaskBlock % kBlockQ == 0);
        return runs_of_q_block(params, sequence.batch, head, q_tile * kBlockQ / kMaskBlock);
    }
    FLASH_DEVICE BlockKind kind_of_tile(int q_tile, int kv_tile) const {
        static_assert(!kMayHaveMask || kMaskBlock % kBlockKV == 0);
        return kind_of(runs_of(q_tile), kv_tile * kBlockKV / kMaskBlock);
    }
    // The first of the team's Q tiles from this one on of which some queries see the KV tile.
    FLASH_DEVICE int next_q_tile(int q_tile, int end, int kv_tile) const {
        if constexpr (kMayHaveMask)
            while (has_tile_mask() && q_tile < end &&
                   kind_of_tile(q_tile, kv_tile) == BlockKind::kHidden)
                q_tile += kTeams;
        return q_tile;
    }

    FLASH_DEVICE void load_kv(int kv_tile) const {
        const int first_key = kv_tile * kBlockKV;
        const int head_k = key_head(params, head);
        const KeyRows keys = key_rows(params, sequence);
        load_tile<KTile, kThreads, kUnaligned>(
            ptx::shared_address(shared.k),
            keys.tile<Element>(params.k, head_k, first_key, params.head_dim), params.aligned);
        load_tile<VTile, kThreads, kUnaligned>(
            ptx::shared_address(shared.v),
            keys.tile<Element>(params.v, head_k, first_key, params.head_dim_v), params.aligned);
    }

    FLASH_DEVICE void load_q(int q_tile) const {
        load_tile<QTile, kTeamThreads, kUnaligned>(
            ptx::shared_address(storage.q),
            query_rows<const Element>(params.q, sequence, head, q_tile * kBlockQ, params.head_dim),
            params.aligned);
    }

    // Line 8: fetches O_i, m_i and l_i. At the first visit of a Q tile O_i is 0.
    FLASH_DEVICE void load_state(int q_tile, bool first_visit) const {
        const float4* o = o_in_hbm(q_tile);
#pragma unroll
        for (int f = 0; f < kFragments; ++f)
            ptx::cp_async_16(o_fragment(f), o + 32 * f, !first_visit);
        const int chunk = threadIdx.x % kTeamThreads;
        if (chunk < static_cast<int>(sizeof(Statistics) / 16))
            ptx::cp_async_16(ptx::shared_address(&storage.statistics) + chunk * 16,
                             reinterpret_cast<const float4*>(&statistics_in_hbm(q_tile)) + chunk,
                             !first_visit);
    }

    // Do some of the Q tile's queries see a key of the warp? If not, matmuls leave its keys out.
    FLASH_DEVICE bool sees_keys_of(int warp, int q_tile, int kv_tile) const {
        const Interval seen = mask.keys_of(tile_interval(q_tile, kBlockQ));
        const int first_key = kv_tile * kBlockKV + warp * kKeysPerWarp;
        return first_key < seen.end && first_key + kKeysPerWarp > seen.begin;
    }

    // Lines 9 to 11: the warp's scores, masked; its row maxima go to shared memory.
    FLASH_DEVICE void compute_scores(Scores& rS, int q_tile, int kv_tile) const {
        const Interval queries = tile_interval(q_tile, kBlockQ);
        const int warp_key = warp * kKeysPerWarp;
        const int first_key = kv_tile * kBlockKV + warp_key;
        rS.clear();
        if (sees_keys_of(warp, q_tile, kv_tile))
            gemm<Element, kHeadDim>(rS, AFromRows<QTile>(ptx::shared_address(storage.q)),
                                    BFromRows<KTile>(ptx::shared_address(shared.k), warp_key));
        if constexpr (changes_scores(kOptions))
            ScoreFunction<Element, Rows::kQueries, kOptions>{params, sequence, head}.apply(
                rS, queries.begin, first_key);
        if (!mask.is_full(queries, tile_interval(kv_tile, kBlockKV)))
            mask_scores(rS, first_key,
                        [&](int row) { return mask.key_range(queries.begin + row); });
        if constexpr (kMayHaveMask)
            if (has_tile_mask())
                hide_by_words(rS, params, sequence, head, queries.begin, first_key);
        for_each_row<kBlockQ>([&](int m, int i, int row) {
            const float x = rS.row_max(m, i);
            if (lane_col() == 0) storage.of_warps[warp].row_max[row] = x;
        });
    }

    // Line 12: P from S with the maxima of all keys; P and its row sums go to shared memory.
    FLASH_DEVICE void exponentiate(Scores& rS, RowValues& tile_max, int q_tile, int kv_tile) const {
        const auto scale = exponent_scale<kOptions>(params);
        for_each_row<kBlockQ>([&](int m, int i, int row) {
            float x = storage.of_warps[0].row_max[row];
#pragma unroll
            for (int w = 1; w < kTeamWarps; ++w) x = fmaxf(x, storage.of_warps[w].row_max[row]);
            tile_max[m][i] = round_up(x, scale);
        });
        for_each_row<kBlockQ>([&](int m, int i, int row) {
            center_large(rS, m, i, tile_max[m][i], scale);
            const float sum =
                quad_sum(exponentiate_row(rS, m, i, scale, subtrahend(tile_max[m][i]), 0.f));
            if (lane_col() == 0) storage.of_warps[warp].row_sum[row] = sum;
        });
        const int warp_key = warp * kKeysPerWarp;
        drop<kOptions>(rS, params, sequence, head, q_tile * kBlockQ, kv_tile * kBlockKV + warp_key);
        store_to_shared<Element, PTile>(ptx::shared_address(storage.p), rS, 0, warp_key / 16);
    }

    FLASH_DEVICE void multiply_v(Output& rO, int q_tile, int kv_tile) const {
        rO.clear();
        const AFromRows<PTile> p(ptx::shared_address(storage.p));
        const BFromColumns<VTile> v(ptx::shared_address(shared.v), 0, warp * (Output::kCols / 16));
        compile_time_for<kTeamWarps>([&](auto of) {
            if (sees_keys_of(of, q_tile, kv_tile))
                gemm<Element, (of + 1) * kKeysPerWarp, of * kKeysPerWarp>(rO, p, v);
        });
    }

    // m_i and l_i. At the first visit of a Q tile they were not fetched.
    FLASH_DEVICE RowState old_state(bool first_visit) const {
        RowState state;
        for_each_row<kBlockQ>([&](int m, int i, int row) {
            state.max[m][i] = first_visit ? first_max : storage.statistics.row_max[row];
            state.sum[m][i] = first_visit ? first_sum : storage.statistics.row_sum[row];
        });
        return state;
    }

    // Lines 13 and 15: m_new, l_new, and from P V_j the new O_i.
    FLASH_DEVICE void update(Output& rO, RowState& state, const RowValues& tile_max) const {
        RowValues old_factor, new_factor;
        for_each_row<kBlockQ>([&](int m, int i, int row) {
            float tile_sum = 0.f;
#pragma unroll
            for (int w = 0; w < kTeamWarps; ++w) tile_sum += storage.of_warps[w].row_sum[row];
            const float new_max = fmaxf(state.max[m][i], tile_max[m][i]);
            const auto factor = [&](float max) { return ptx::ex2(max - finite_max(new_max)); };
            const float old_share = factor(state.max[m][i]) * state.sum[m][i];
            const float new_share = factor(tile_max[m][i]);
            const float sum = old_share + new_share * tile_sum;
            const float inverse = sum == 0.f ? 0.f : ptx::rcp(sum);
            old_factor[m][i] = old_share * inverse;
            new_factor[m][i] = new_share * inverse * late_factor<kOptions>(params);
            state.max[m][i] = new_max;
            state.sum[m][i] = sum;
        });
        for_each_fragment(rO, [&](float (&x)[4], int f, int m) {
            float old[4];
            ptx::ld_shared_v4(old, o_fragment(f));
#pragma unroll
            for (int e = 0; e < 4; ++e)
                x[e] = new_factor[m][e / 2] * x[e] + old_factor[m][e / 2] * old[e];
        });
    }

    // Lines 15 and 16: O_i, m_i and l_i to HBM. Every warp has m_i and l_i, one writes.
    FLASH_DEVICE void store_state(Output& rO, const RowState& state, int q_tile) const {
        float4* o = o_in_hbm(q_tile);
        for_each_fragment(rO, [&](float (&x)[4], int f, int) {
            o[32 * f] = make_float4(x[0], x[1], x[2], x[3]);
        });
        if (warp != 0 || lane_col() != 0) return;
        Statistics& statistics = statistics_in_hbm(q_tile);
        for_each_row<kBlockQ>([&](int m, int i, int row) {
            statistics.row_max[row] = state.max[m][i];
            statistics.row_sum[row] = state.sum[m][i];
        });
    }

    // At the last visit: the output, through the memory of P, and the logsumexp.
    FLASH_DEVICE void store_out(const Output& rO, const RowState& state, int q_tile) const {
        const uint32_t sO = ptx::shared_address(storage.p);
        team_barrier();  // all warps have read P
        store_to_shared<Element, OTile>(sO, rO, 0, warp * (Output::kCols / 16));
        team_barrier();  // O_i is complete
        store_tile<OTile, kTeamThreads, kBlockQ, kUnaligned>(
            query_rows<Element>(params.out, sequence, head, q_tile * kBlockQ, params.head_dim_v),
            sO, 0, params.aligned);
        if (warp != 0 || lane_col() != 0) return;
        float* lse = params.lse + statistics_offset(params, sequence, head);
        for_each_row<kBlockQ>([&](int m, int i, int row) {
            const int query = q_tile * kBlockQ + row;
            if (query < sequence.seqlen_q)
                lse[query] = log_sum_exp(state.max[m][i], state.sum[m][i]);
        });
    }

 private:
    // This lane's fragments of O_i: no other lane uses them. visit(floats, index, m).
    template <class Visit>
    static FLASH_DEVICE void for_each_fragment(Output& rO, Visit visit) {
#pragma unroll
        for (int f = 0; f < kFragments; ++f)
            visit(rO.v[f / Output::kN][f % Output::kN], f, f / Output::kN);
    }
    FLASH_DEVICE uint32_t o_fragment(int f) const {
        return ptx::shared_address(storage.o) + ((warp * kFragments + f) * 32 + lane_id()) * 16;
    }
    FLASH_DEVICE float4* o_in_hbm(int q_tile) const {
        return reinterpret_cast<float4*>(params.out_accum +
                                         (first_tile + q_tile) * (kBlockQ * kHeadDimV)) +
               warp * kFragments * 32 + lane_id();
    }
    FLASH_DEVICE Statistics& statistics_in_hbm(int q_tile) const {
        return reinterpret_cast<Statistics*>(params.row_statistics)[first_tile + q_tile];
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    fa1_forward_kernel(const __grid_constant__ ForwardParams params) {
    if (!may_run<Kernel>()) return __trap();
    const Kernel cta(params, blockIdx.x);
    const int kv_tiles = ceil_div(cta.sequence.seqlen_k, Kernel::kBlockKV);

    for (int kv_tile = 0; kv_tile < kv_tiles; ++kv_tile) {
        const VisibleTiles q_tiles = VisibleTiles::of_keys<false>(
            cta.mask, tile_interval(kv_tile, Kernel::kBlockKV), Kernel::kBlockQ);
        if (q_tiles.empty()) continue;
        int q_tile = cta.next_q_tile(q_tiles.begin + cta.team, q_tiles.end, kv_tile);
        __syncthreads();  // all warps have left the previous KV tile; its O, m and l are written
        cta.load_kv(kv_tile);
        if (q_tile < q_tiles.end) cta.load_q(q_tile);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncthreads();  // the KV tile has landed

        for (int next; q_tile < q_tiles.end; q_tile = next) {
            next = cta.next_q_tile(q_tile + Kernel::kTeams, q_tiles.end, kv_tile);
            const VisibleTiles seen = cta.seen_by(q_tile);
            const bool first_visit = kv_tile == seen.begin;
            ptx::cp_async_wait<0>();
            cta.team_barrier();  // Q_i has landed; the team's other memory is free
            cta.load_state(q_tile, first_visit);
            ptx::cp_async_commit();

            typename Kernel::Scores rS;
            cta.compute_scores(rS, q_tile, kv_tile);
            cta.team_barrier();  // the maxima of all keys are complete; all warps have left Q_i
            if (next < q_tiles.end) cta.load_q(next);
            ptx::cp_async_commit();

            typename Kernel::RowValues tile_max;
            cta.exponentiate(rS, tile_max, q_tile, kv_tile);
            ptx::cp_async_wait<1>();
            cta.team_barrier();  // P and its sums are complete; O_i, m_i and l_i have landed

            typename Kernel::Output rO;
            cta.multiply_v(rO, q_tile, kv_tile);
            typename Kernel::RowState state = cta.old_state(first_visit);
            cta.update(rO, state, tile_max);
            if (kv_tile == seen.end - 1) {
                cta.store_out(rO, state, q_tile);
            } else {
                cta.store_state(rO, state, q_tile);
            }
        }
        // For racecheck: without it the tool reports at d 64, at times, that the next V is written
        // before all warps have read this one, although __syncthreads() comes between. Why is not
        // known (docs/notes/004-fa1-forward.md).
        cta.team_barrier();
    }

    typename Kernel::Output zero;  // of Q tiles that see no key
    zero.clear();
    const int q_tiles = ceil_div(cta.sequence.seqlen_q, Kernel::kBlockQ);
    for (int q_tile = cta.team; q_tile < q_tiles; q_tile += Kernel::kTeams)
        if (cta.seen_by(q_tile).empty()) cta.store_out(zero, cta.old_state(true), q_tile);
}

template <int kHeadDim, int kHeadDimV>
int Fa1<kHeadDim, kHeadDimV>::forward_shared_bytes() {
    constexpr int kBytes =  // with any options
        Fa1Forward<__half, kHeadDim, kHeadDimV, tuning::kDense, true>::kSharedBytes;
    static_assert(kHeadDim > 64 || kBytes <= 99 * 1024, "compute capability 8.6, 8.9 and 12.x");
    return kBytes;
}

template <int kHeadDim, int kHeadDimV>
cudaError_t Fa1<kHeadDim, kHeadDimV>::forward(const ForwardParams& params,
                                              const ForwardKernel& kernel, cudaStream_t stream) {
    constexpr OptionSets kSets = row_of(tuning::kFa1Forward, {kHeadDim, kHeadDimV}).options;
    return dispatch_kernel<kSets>(params, kernel, [&](auto element, auto options) {
        using Element = decltype(element);
        using Large = Fa1Forward<Element, kHeadDim, kHeadDimV, options.value, false>;
        using Small = Fa1Forward<Element, kHeadDim, kHeadDimV, options.value, true>;
        return launch_fitting<Large, Small>(kernel.gpu, [&](auto chosen) {
            using Kernel = typename decltype(chosen)::type;
            return launch_kernel<fa1_forward_kernel<Kernel>>(
                params.heads_q * sequence_count(params), Kernel::kThreads, Kernel::kSharedBytes,
                params, stream);
        });
    });
}

}  // namespace flash_ext
