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
//                                                    P V_j exchanged
//             l_i = l_new,  m_i = m_new           (scale in base 2)
//
// Warps: two teams of four share the KV tile and alternate over the Q tiles, so that one team's
// matmuls overlap with the other's memory traffic. Within a team K and V are split across the warps
// (split-K): each computes the scores of its own keys and a partial product with its own rows of V.
// So row maxima, row sums and partial products must be exchanged through shared memory, which
// FlashAttention-2 avoids. Each warp sums and owns a quarter of the columns of every swizzle atom
// of O; O_i in HBM has the layout of its owners' fragments.
//
// Warp w visits the columns of an atom in its own order: the t-th quarter belongs to warp (w ^ t).
// So its own quarter is the first, and the code of the exchange is the same in every warp.
//
// Barriers (of a team, except those of the KV tiles) are explained in the code. cp.async groups are
// committed in the order Q with m and l, O chunk 0, O chunk 1, ... of each iteration, so that the
// number of pending groups tells what has landed.
//
// All that an iteration needs from HBM goes through cp.async, even what only one lane uses. A load
// to a register would stall the matmuls: a warp has few scoreboards for loads, so waiting for an
// operand from shared memory may mean waiting for HBM.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/common/softmax.cuh"
#include "kernels/common/varlen.cuh"
#include "plan/tuning.h"
#include "plan/workspace_rows.cuh"
#include "problem/key_rows.cuh"
#include "problem/mask.cuh"
#include "problem/score.cuh"
#include "problem/sequences.cuh"
#include "ptx/barrier.cuh"
#include "schedule/tile_numbers.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"

namespace flash_ext {

template <class Element_, int kHeadDim_, int kHeadDimV_, OptionSet kOptions_, int kBlockKV_>
struct Fa1ForwardConfig {
    using Element = Element_;
    static constexpr auto kTuning = row_of(tuning::kFa1Forward, {kHeadDim_, kHeadDimV_});
    static constexpr OptionSet kOptions = kOptions_;
    static constexpr bool kGeneral = changes_scores(kOptions);
    static constexpr bool kMayBeVarlen = contains(kOptions, OptionSet::kVarlen);
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kTeams = 2;
    static constexpr int kTeamWarps = 4;
    static constexpr int kTeamThreads = 32 * kTeamWarps;
    static constexpr int kThreads = kTeams * kTeamThreads;
    static constexpr int kBlockQ = kTuning.block_q;
    static constexpr int kBlockKV = kBlockKV_;
    static constexpr int kKeysPerWarp = kBlockKV / kTeamWarps;
    static constexpr bool kForLessMemory = kBlockKV != kTuning.block_kv;

    using QTile = SharedTile<Element, kBlockQ, kHeadDim>;
    using KTile = SharedTile<Element, kBlockKV, kHeadDim>;
    using VTile = SharedTile<Element, kBlockKV, kHeadDimV>;

    // Columns of the partial products that are exchanged at a time, an atom, and a warp's own
    // columns of them.
    static constexpr int kExchangeCols = VTile::kAtomCols;
    static constexpr int kChunks = VTile::kAtoms;
    using Owned = RegisterTile<kBlockQ, kExchangeCols / kTeamWarps>;
    static constexpr int kOwnedBytes = Owned::kM * Owned::kN * 32 * 16;

    struct alignas(1024) TeamStorage {  // which swizzled tiles start on
        char q[QTile::kBytes];
        char partial[kTeamWarps][kTeamWarps - 1][kOwnedBytes];  // products, [to warp][t - 1]
        char old[kTeamWarps][kChunks][kOwnedBytes];             // O_i, fetched ahead
        float max[kTeamWarps][kBlockQ];
        float sum[kTeamWarps][kBlockQ];
    };
    struct Statistics {
        float row_max[kBlockQ];
        float row_sum[kBlockQ];
    };
    struct SharedStorage {
        char k[KTile::kBytes];
        char v[VTile::kBytes];
        TeamStorage teams[kTeams];
        Statistics statistics[kTeams];  // m_i and l_i, fetched ahead
    };
    static constexpr int kSharedBytes =  // without the padding at the end
        offsetof(SharedStorage, statistics) + kTeams * sizeof(Statistics);
};

template <class Config>
struct Fa1Forward {
    using Element = typename Config::Element;
    using QTile = typename Config::QTile;
    using KTile = typename Config::KTile;
    using VTile = typename Config::VTile;
    using Scores = RegisterTile<Config::kBlockQ, Config::kKeysPerWarp>;
    using Weights = AInRegisters<Config::kBlockQ, Config::kKeysPerWarp>;
    using Product = RegisterTile<Config::kBlockQ, Config::kExchangeCols>;
    using Owned = typename Config::Owned;
    using SharedStorage = typename Config::SharedStorage;
    using TeamStorage = typename Config::TeamStorage;
    static constexpr bool kGeneral = Config::kGeneral;
    static constexpr bool kUnaligned = contains(Config::kOptions, OptionSet::kUnaligned);
    static constexpr int kM = Scores::kM;

    // Per row that this lane holds elements of.
    struct RowValues {
        float v[kM][2];
    };

    const ForwardParams& params;
    int head;
    Sequence sequence;
    BandMask mask;
    float first_max;  // m of a row that has seen no key
    int team;
    int warp;  // within the team: which part of the keys, and which columns of O, are its own
    TeamStorage& storage;
    int64_t first_tile;  // the number of Q tile 0 in the workspaces
    uint32_t sK;
    uint32_t sV;
    uint32_t sQ;

    __device__ __forceinline__ Fa1Forward(const ForwardParams& p, int flat_head)
        : params(p),
          head(flat_head % p.heads_q),
          sequence(warp_uniform<Config::kMayBeVarlen>(
              sequence_of<Config::kMayBeVarlen>(p, flat_head / p.heads_q))),
          mask(mask_of(p, sequence)),
          first_max(params.sink != nullptr && sequence.is_owned(params) ? params.sink[head] * kLog2e
                                                                        : -INFINITY),
          team(warp_id() / Config::kTeamWarps),
          warp(warp_id() % Config::kTeamWarps),
          storage(shared_storage<SharedStorage>().teams[team]),
          first_tile(workspace_tile(p, sequence, head, 0,
                                    tile_numbers(p, p.seqlen_q, Config::kBlockQ), Config::kBlockQ)),
          sK(ptx::shared_address(shared_storage<SharedStorage>().k)),
          sV(ptx::shared_address(shared_storage<SharedStorage>().v)),
          sQ(ptx::shared_address(storage.q)) {}

    __device__ __forceinline__ void team_barrier() const {
        ptx::barrier_sync(1 + team, Config::kTeamThreads);
    }

    __device__ __forceinline__ void load_kv(int kv_tile) const {
        const int first_key = kv_tile * Config::kBlockKV;
        const int head_k = key_head(params, head);
        const KeyRows keys = key_rows(params, sequence);
        load_tile<KTile, Config::kThreads, kUnaligned>(
            sK, keys.tile<Element>(params.k, head_k, first_key, params.head_dim), params.aligned);
        load_tile<VTile, Config::kThreads, kUnaligned>(
            sV, keys.tile<Element>(params.v, head_k, first_key, params.head_dim_v), params.aligned);
    }

    __device__ __forceinline__ void load_q(int q_tile) const {
        const int first_query = q_tile * Config::kBlockQ;
        const auto gQ =
            global_tile<const Element>(params.q, sequence.batch, sequence.q_begin + first_query,
                                       head, sequence.seqlen_q - first_query, params.head_dim);
        load_tile<QTile, Config::kTeamThreads, kUnaligned>(sQ, gQ, params.aligned);
    }

    // Fetches this lane's part of a chunk of O_i. No other lane uses it.
    __device__ __forceinline__ void load_old(int q_tile, int chunk) const {
        const float* global = old_global(q_tile, chunk);
        const uint32_t shared = ptx::shared_address(storage.old[warp][chunk]) + lane_id() * 16;
#pragma unroll
        for (int f = 0; f < Owned::kM * Owned::kN; ++f)
            ptx::cp_async_16(shared + f * 512, global + f * 128, true);
    }

    // l of a row that has seen no key: a sink counts as one, with the value 0.
    __device__ __forceinline__ float first_sum() const {
        return first_max == -INFINITY ? 0.f : 1.f;
    }

    // Fetches m_i and l_i for the team.
    __device__ __forceinline__ void load_statistics(int q_tile) const {
        const int chunk = threadIdx.x % Config::kTeamThreads;
        if (chunk < sizeof(typename Config::Statistics) / 16)
            ptx::cp_async_16(ptx::shared_address(&old_statistics()) + chunk * 16,
                             statistics_global(q_tile) + chunk * 4, true);
    }

    // m_i and l_i. At the first visit of a Q tile they were not fetched.
    __device__ __forceinline__ void read_statistics(bool first_visit, RowValues& row_max,
                                                    RowValues& row_sum) const {
        for_each_row<Scores::kRows>([&](int m, int i, int row) {
            row_max.v[m][i] = first_visit ? first_max : old_statistics().row_max[row];
            row_sum.v[m][i] = first_visit ? first_sum() : old_statistics().row_sum[row];
        });
    }

    // The factor from scores to exponents of 2. With options the kernel multiplies the scores at
    // once (its scale may be zero or negative), otherwise inside the exponent.
    __device__ __forceinline__ auto score_scale() const {
        if constexpr (kGeneral) {
            return Unscaled{};
        } else {
            return params.scale_log2;
        }
    }

    // The warp's scores, masked; its row maxima go to shared memory.
    __device__ __forceinline__ void compute_scores(Scores& rS, const VisibleTiles& q_tiles, int i,
                                                   int kv_tile) const {
        const int q_tile = q_tiles.tile(i);
        const int first_query = q_tile * Config::kBlockQ;
        const int warp_key = warp * Config::kKeysPerWarp;
        rS.clear();
        gemm<Element, Config::kHeadDim>(rS, AFromRows<QTile>(sQ), BFromRows<KTile>(sK, warp_key),
                                        params.element_type);
        if constexpr (kGeneral)
            ScoreFunction<Element, Rows::kQueries, Config::kOptions>{params, sequence, head}.apply(
                rS, first_query, kv_tile * Config::kBlockKV + warp_key);
        if (!q_tiles.is_full(i, mask, tile_interval(q_tile, Config::kBlockQ),
                             tile_interval(kv_tile, Config::kBlockKV))) {
            mask_scores(rS, kv_tile * Config::kBlockKV + warp_key,
                        [&](int row) { return mask.key_range(first_query + row); });
        }
        for_each_row<Scores::kRows>([&](int m, int i, int row) {
            const float x = rS.row_max(m, i);
            if (lane_col() == 0) storage.max[warp][row] = x;
        });
    }

    // P from S with the maxima of all keys; its row sums go to shared memory.
    __device__ __forceinline__ void exponentiate(Scores& rS, Weights& rP, RowValues& tile_max,
                                                 int q_tile, int kv_tile) const {
        for_each_row<Scores::kRows>([&](int m, int i, int row) {
            float x = storage.max[0][row];
#pragma unroll
            for (int w = 1; w < Config::kTeamWarps; ++w) x = fmaxf(x, storage.max[w][row]);
            tile_max.v[m][i] = round_up(x, score_scale());
        });
        for_each_row<Scores::kRows>([&](int m, int i, int row) {
            center_large(rS, m, i, tile_max.v[m][i], score_scale());
            const float max = subtrahend(tile_max.v[m][i]);
            float sum = 0.f;
#pragma unroll
            for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = rS.v[m][n][2 * i + e];
                    x = ptx::ex2(x * score_scale() - max);
                    sum += x;
                }
            sum = quad_sum(sum);
            if (lane_col() == 0) storage.sum[warp][row] = sum;
        });
        if constexpr (contains(Config::kOptions, OptionSet::kDropout)) {
            if (params.rng_state != nullptr) {
                for_each_keep<Scores>(dropout_mask(params, sequence, head),
                                      q_tile * Config::kBlockQ,
                                      kv_tile * Config::kBlockKV + warp * Config::kKeysPerWarp,
                                      [&](int m, int n, int i, bool keep) {
                                          float& x = rS.v[m][n][i];
                                          x = keep ? x * params.p_factor : 0.f;
                                      });
            }
        }
        with_element<Element>(params.element_type, [&](auto element) {
            rP.fetch(AFromRegisters<decltype(element), Scores>{rS});
        });
    }

    // A chunk of the warp's partial product with its own rows of V.
    template <int kChunk>
    __device__ __forceinline__ void multiply_v(Product& rO, const Weights& rP) const {
        using VColumns = BFromColumns<VTile>;
        const VColumns v(sV, warp * Config::kKeysPerWarp, 0, warp * (Owned::kCols / 8));
        rO.clear();
        gemm<Element, Config::kKeysPerWarp>(
            rO, rP, BSkipping<VColumns, kChunk * Config::kExchangeCols / 16>{v},
            params.element_type);
    }

    // Gives a chunk of the partial product to the warps that own its columns; `own` receives this
    // warp's.
    __device__ __forceinline__ void exchange(const Product& rO, Owned& own) const {
#pragma unroll
        for (int t = 0; t < Config::kTeamWarps; ++t)
#pragma unroll
            for (int m = 0; m < Owned::kM; ++m)
#pragma unroll
                for (int n = 0; n < Owned::kN; ++n) {
                    const float (&x)[4] = rO.v[m][t * Owned::kN + n];
                    if (t == 0) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) own.v[m][n][e] = x[e];
                    } else {
                        *fragment(storage.partial[warp ^ t][t - 1], m, n) =
                            make_float4(x[0], x[1], x[2], x[3]);
                    }
                }
    }

    // Adds what the other warps have given to `own`.
    __device__ __forceinline__ void collect(Owned& own) const {
#pragma unroll
        for (int t = 1; t < Config::kTeamWarps; ++t)
            add(own, storage.partial[warp][t - 1],
                [](float sum, float x, int, int) { return sum + x; });
    }

    // own = old_factor O_i + new_factor own, for each row.
    __device__ __forceinline__ void merge_old(Owned& own, int chunk, bool first_visit,
                                              const RowValues& old_factor,
                                              const RowValues& new_factor) const {
        if (first_visit) {
#pragma unroll
            for (int m = 0; m < Owned::kM; ++m)
#pragma unroll
                for (int n = 0; n < Owned::kN; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) own.v[m][n][e] *= new_factor.v[m][e / 2];
        } else {
            add(own, storage.old[warp][chunk], [&](float product, float old, int m, int i) {
                return new_factor.v[m][i] * product + old_factor.v[m][i] * old;
            });
        }
    }

    __device__ __forceinline__ void store_old(const Owned& own, int q_tile, int chunk) const {
        float* global = old_global(q_tile, chunk);
#pragma unroll
        for (int m = 0; m < Owned::kM; ++m)
#pragma unroll
            for (int n = 0; n < Owned::kN; ++n) {
                const float (&x)[4] = own.v[m][n];
                *reinterpret_cast<float4*>(global + (m * Owned::kN + n) * 128) =
                    make_float4(x[0], x[1], x[2], x[3]);
            }
    }

    // A chunk of the final output.
    __device__ __forceinline__ void store_out(const Owned& own, int q_tile, int chunk) const {
        const int first_col = chunk * Config::kExchangeCols + warp * Owned::kCols + lane_col();
        for_each_row<Scores::kRows>([&](int m, int i, int row) {
            const int query = q_tile * Config::kBlockQ + row;
            if (query >= sequence.seqlen_q) return;
            Element* target =
                row_pointer<Element>(params.out, sequence.batch, sequence.q_begin + query, head);
#pragma unroll
            for (int n = 0; n < Owned::kN; ++n)
                store_pair(target, first_col + 8 * n, own.v[m][n][2 * i], own.v[m][n][2 * i + 1]);
        });
    }

    // Lines 13 and 16: the factors of the old O_i and of this iteration's product; updates m_i and
    // l_i.
    __device__ __forceinline__ void update_statistics(const RowValues& tile_max, RowValues& row_max,
                                                      RowValues& row_sum, RowValues& old_factor,
                                                      RowValues& new_factor) const {
        for_each_row<Scores::kRows>([&](int m, int i, int row) {
            float tile_sum = 0.f;
#pragma unroll
            for (int w = 0; w < Config::kTeamWarps; ++w) tile_sum += storage.sum[w][row];
            const float new_max = fmaxf(row_max.v[m][i], tile_max.v[m][i]);
            const auto factor = [&](float max) { return ptx::ex2(max - finite_max(new_max)); };
            const float old_share = factor(row_max.v[m][i]) * row_sum.v[m][i];
            const float new_share = factor(tile_max.v[m][i]);
            const float sum = old_share + new_share * tile_sum;
            const float inverse = sum == 0.f ? 0.f : ptx::rcp(sum);
            old_factor.v[m][i] = old_share * inverse;
            new_factor.v[m][i] =
                new_share * inverse *
                (contains(Config::kOptions, OptionSet::kDropout) ? params.late_factor : 1.f);
            row_max.v[m][i] = new_max;
            row_sum.v[m][i] = sum;
        });
    }

    // m_i and l_i to HBM; at the last visit the logsumexp. Every warp has them, one writes.
    __device__ __forceinline__ void store_statistics(int q_tile, bool last_visit,
                                                     const RowValues& row_max,
                                                     const RowValues& row_sum) const {
        if (warp != 0 || lane_col() != 0) return;
        if (last_visit) {
            float* lse = params.lse + statistics_offset(params, sequence, head);
            for_each_row<Scores::kRows>([&](int m, int i, int row) {
                const int query = q_tile * Config::kBlockQ + row;
                if (query < sequence.seqlen_q)
                    lse[query] = log_sum_exp(row_max.v[m][i], row_sum.v[m][i]);
            });
        } else {
            float* statistics = statistics_global(q_tile);
            for_each_row<Scores::kRows>([&](int m, int i, int row) {
                statistics[row] = row_max.v[m][i];
                statistics[Config::kBlockQ + row] = row_sum.v[m][i];
            });
        }
    }

    // A Q tile that sees no key.
    __device__ __forceinline__ void store_empty(int q_tile) const {
        Owned zero;
        zero.clear();
#pragma unroll
        for (int chunk = 0; chunk < Config::kChunks; ++chunk) store_out(zero, q_tile, chunk);
        const int query = q_tile * Config::kBlockQ + lane_id();
        if (warp == 0 && lane_id() < Config::kBlockQ && query < sequence.seqlen_q)
            params.lse[statistics_offset(params, sequence, head) + query] =
                log_sum_exp(first_max, first_sum());
    }

 private:
    // This warp's part of a chunk of O_i in HBM, where this lane's begins.
    __device__ __forceinline__ float* old_global(int q_tile, int chunk) const {
        return params.out_accum + (first_tile + q_tile) * (Config::kBlockQ * Config::kHeadDimV) +
               (warp * Config::kChunks + chunk) * (Config::kOwnedBytes / 4) + lane_id() * 4;
    }

    // m_i and l_i: fetched ahead, and in HBM.
    __device__ __forceinline__ typename Config::Statistics& old_statistics() const {
        return shared_storage<SharedStorage>().statistics[team];
    }
    __device__ __forceinline__ float* statistics_global(int q_tile) const {
        return params.row_statistics + (first_tile + q_tile) * (2 * Config::kBlockQ);
    }

    static __device__ __forceinline__ float4* fragment(char* owned, int m, int n) {
        return reinterpret_cast<float4*>(owned + (m * Owned::kN + n) * 512 + lane_id() * 16);
    }

    // own = combine(own, element in shared memory, m, i) for each element.
    template <class Combine>
    static __device__ __forceinline__ void add(Owned& own, char* shared, Combine combine) {
#pragma unroll
        for (int m = 0; m < Owned::kM; ++m)
#pragma unroll
            for (int n = 0; n < Owned::kN; ++n) {
                const float4 quad = *fragment(shared, m, n);
                const float x[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    own.v[m][n][e] = combine(own.v[m][n][e], x[e], m, e / 2);
            }
    }

    // Columns col and col + 1 of a row of the output.
    __device__ __forceinline__ void store_pair(Element* row, int col, float x, float y) const {
        const uint32_t packed = pack<Element>(x, y, params.element_type);
        if (!kUnaligned || params.aligned) {
            if (col < params.head_dim_v) *reinterpret_cast<uint32_t*>(row + col) = packed;
            return;
        }
        auto* bits = reinterpret_cast<uint16_t*>(row);
        if (col < params.head_dim_v) bits[col] = static_cast<uint16_t>(packed);
        if (col + 1 < params.head_dim_v) bits[col + 1] = static_cast<uint16_t>(packed >> 16);
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fa1_forward_kernel(const __grid_constant__ ForwardParams params) {
    if (!may_run<Config>()) return __trap();
    using Kernel = Fa1Forward<Config>;
    using RowValues = typename Kernel::RowValues;
    const Kernel cta(params, blockIdx.x);
    const int kv_tiles = ceil_div(cta.sequence.seqlen_k, Config::kBlockKV);

    for (int kv_tile = 0; kv_tile < kv_tiles; ++kv_tile) {
        const VisibleTiles q_tiles = VisibleTiles::of_keys<false>(
            cta.mask, tile_interval(kv_tile, Config::kBlockKV), Config::kBlockQ);
        // The KV tiles that a Q tile sees, which tells the first visit and the last.
        const auto seen_by = [&](int q_tile) {
            return VisibleTiles::of_queries(cta.mask, tile_interval(q_tile, Config::kBlockQ),
                                            Config::kBlockKV);
        };
        if (q_tiles.empty()) continue;
        __syncthreads();  // all warps have left the previous KV tile; its O, m and l are written
        cta.load_kv(kv_tile);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncthreads();  // the KV tile has landed

        int i = q_tiles.begin + cta.team;
        const bool first_has_old = i < q_tiles.end && seen_by(q_tiles.tile(i)).first() != kv_tile;
        if (i < q_tiles.end) cta.load_q(q_tiles.tile(i));
        if (first_has_old) cta.load_statistics(q_tiles.tile(i));
        ptx::cp_async_commit();
        for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
            if (first_has_old) cta.load_old(q_tiles.tile(i), chunk);
            ptx::cp_async_commit();
        }

        for (; i < q_tiles.end; i += Config::kTeams) {
            const int q_tile = q_tiles.tile(i);
            const int next = i + Config::kTeams;
            ptx::cp_async_wait<Config::kChunks>();  // all but O's chunks
            cta.team_barrier();  // Q, m, l have landed; the exchange buffers, maxima, sums are free

            const VisibleTiles seen = seen_by(q_tile);
            const bool first_visit = kv_tile == seen.first();
            const bool last_visit = kv_tile == seen.last();
            const bool next_has_old =
                next < q_tiles.end && seen_by(q_tiles.tile(next)).first() != kv_tile;
            typename Kernel::Scores rS;
            RowValues tile_max, row_max, row_sum, old_factor, new_factor;
            cta.read_statistics(first_visit, row_max, row_sum);
            cta.compute_scores(rS, q_tiles, i, kv_tile);
            cta.team_barrier();  // the maxima of all keys are complete; Q, m and l have been read
            if (next < q_tiles.end) cta.load_q(q_tiles.tile(next));
            if (next_has_old) cta.load_statistics(q_tiles.tile(next));
            ptx::cp_async_commit();
            typename Kernel::Weights rP;
            cta.exponentiate(rS, rP, tile_max, q_tile, kv_tile);
            compile_time_for<Config::kChunks>([&](auto chunk) {
                typename Kernel::Product rO;
                typename Config::Owned own;
                cta.template multiply_v<chunk>(rO, rP);
                if (chunk > 0) cta.team_barrier();  // the previous chunk has been collected
                cta.exchange(rO, own);
                cta.team_barrier();  // all partial products, and the sums, are complete
                if (chunk == 0)
                    cta.update_statistics(tile_max, row_max, row_sum, old_factor, new_factor);
                cta.collect(own);
                ptx::cp_async_wait<Config::kChunks>();  // this chunk of O, the oldest group
                cta.merge_old(own, chunk, first_visit, old_factor, new_factor);
                if (last_visit) {
                    cta.store_out(own, q_tile, chunk);
                } else {
                    cta.store_old(own, q_tile, chunk);
                }
                if (next_has_old) cta.load_old(q_tiles.tile(next), chunk);
                ptx::cp_async_commit();
            });
            cta.store_statistics(q_tile, last_visit, row_max, row_sum);
        }
    }

    const int q_tiles = ceil_div(cta.sequence.seqlen_q, Config::kBlockQ);
    for (int q_tile = cta.team; q_tile < q_tiles; q_tile += Config::kTeams)
        if (cta.mask.keys_of(tile_interval(q_tile, Config::kBlockQ)).empty())
            cta.store_empty(q_tile);
}

template <int kHeadDim, int kHeadDimV>
int Fa1<kHeadDim, kHeadDimV>::forward_shared_bytes() {
    constexpr int kBlockKV = row_of(tuning::kFa1Forward, {kHeadDim, kHeadDimV}).small_block_kv;
    constexpr int kBytes =  // with any options
        Fa1ForwardConfig<__half, kHeadDim, kHeadDimV, tuning::kDense, kBlockKV>::kSharedBytes;
    static_assert(kHeadDim > 64 || kBytes <= 99 * 1024, "compute capability 8.6, 8.9 and 12.x");
    return kBytes;
}

template <int kHeadDim, int kHeadDimV>
cudaError_t Fa1<kHeadDim, kHeadDimV>::forward(const ForwardParams& params,
                                              const ForwardKernel& kernel, cudaStream_t stream) {
    constexpr OptionSets kSets = row_of(tuning::kFa1Forward, {kHeadDim, kHeadDimV}).options;
    return dispatch_kernel<kSets>(params, kernel, [&](auto given, auto options) {
        constexpr tuning::Fa1Forward kTuning = row_of(tuning::kFa1Forward, {kHeadDim, kHeadDimV});
        // At 256 the branches of AnyHalf cost 5 to 7 % (note 023).
        constexpr bool kForBoth = changes_scores(options.value) && kHeadDim <= 128;
        using Element = std::conditional_t<kForBoth, AnyHalf, decltype(given)>;
        using Large =
            Fa1ForwardConfig<Element, kHeadDim, kHeadDimV, options.value, kTuning.block_kv>;
        using Small =
            Fa1ForwardConfig<Element, kHeadDim, kHeadDimV, options.value, kTuning.small_block_kv>;
        // A larger KV tile means fewer passes of O through HBM; what fits depends on the GPU.
        return launch_fitting<Large, Small>(kernel.gpu, [&](auto config) {
            using Config = decltype(config);
            return launch_kernel<fa1_forward_kernel<Config>>(
                params.heads_q * sequence_count(params), Config::kThreads, Config::kSharedBytes,
                params, stream);
        });
    });
}

}  // namespace flash_ext
