// FlashAttention-2 forward (Dao 2023, algorithm 1).
//
// Loop order: one CTA per (Q tile, head, batch); inner loop over KV tiles, last to first, so that
// the tiles which need masking at the diagonal come first.
// Warps: each owns kRowsPerWarp rows of the Q tile and sees all of K and V (split-Q): S, P and O of
// a row never leave the warp, and the warps exchange nothing.
//
//     for each KV tile j:
//         S = Q K_j^T                           tensor cores, S in registers
//         m_new = max(m, rowmax(S))             quad shuffles
//         P = 2^(S scale - m_new scale)
//         l = 2^((m - m_new) scale) l + rowsum(P)
//         O = 2^((m - m_new) scale) O + P V_j   P from registers
//     O = O / l,  lse = m scale + log(l)        one rescale, at the end
//
// m need not be the maximum, only near it: it may lag until P would pass 2^8 (OnlineSoftmax::kLag),
// which saves most rescalings of O and changes no result, since l and O share the same m.
//
// Shared memory: Q [kBlockQ][D], then kStages x (K [kBlockKV][D], V [kBlockKV][D]), swizzled.
// Barriers: one __syncthreads per KV tile (and one after the last). It says that tile j has landed
// for all threads, and that all warps have left tile j + 1, whose stage the next copy overwrites.
#pragma once

#include "../mask.cuh"
#include "../scheduler.cuh"
#include "../score.cuh"
#include "../softmax.cuh"
#include "../tile/copy.cuh"
#include "../tile/gemm.cuh"
#include "../tuning.h"
#include "launch.cuh"
#include "packed.cuh"

namespace flash_ext {

template <class Element_, int kHeadDim_, int kHeadDimV_, Features kFeatures>
struct Fa2ForwardConfig {
    using Element = Element_;
    static constexpr auto kTuning = tuning::fa2_forward({kHeadDim_, kHeadDimV_}, kFeatures);
    static constexpr bool kGeneral = kFeatures == Features::kGeneral;
    static constexpr bool kMayBePacked = kFeatures != Features::kPlain;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kRowsPerWarp = kTuning.rows_per_warp;
    static constexpr int kThreads = kTuning.warps * 32;
    static constexpr int kBlockQ = kTuning.warps * kRowsPerWarp;
    static constexpr int kBlockKV = kTuning.block_kv;
    static constexpr int kStages = 2;  // the loop loads one tile ahead
    static constexpr bool kQInRegisters = kTuning.q_in_registers;
    static constexpr int kCtasPerSm = kTuning.ctas_per_sm;

    using QTile = SharedTile<kBlockQ, kHeadDim>;
    using KTile = SharedTile<kBlockKV, kHeadDim>;
    using VTile = SharedTile<kBlockKV, kHeadDimV>;
    using OTile = SharedTile<kBlockQ, kHeadDimV>;
    static constexpr int kStageBytes = KTile::kBytes + VTile::kBytes;
    static constexpr int kQBytes = max_of(QTile::kBytes, OTile::kBytes);
    static constexpr int kSharedBytes = kQBytes + kStages * kStageBytes;

    static_assert(kBlockKV % 16 == 0 && kRowsPerWarp % 16 == 0);
};

template <class Config>
struct Fa2Forward {
    using Element = typename Config::Element;
    using QTile = typename Config::QTile;
    using KTile = typename Config::KTile;
    using VTile = typename Config::VTile;
    using OTile = typename Config::OTile;
    using Scores = RegisterTile<Config::kRowsPerWarp, Config::kBlockKV>;
    using Output = RegisterTile<Config::kRowsPerWarp, Config::kHeadDimV>;
    static constexpr bool kGeneral = Config::kGeneral;

    const ForwardParams& params;
    int head;
    int head_k;
    Sequence sequence;
    BandMask mask;
    int first_query;  // of the CTA
    int warp_row;     // the warp's first row within the Q tile
    uint32_t sQ;
    uint32_t stages;  // of K and V: each stage is a K tile followed by a V tile

    __device__ __forceinline__ Fa2Forward(const ForwardParams& p, const Sequence& sequence_,
                                          int head_, int q_tile)
        : params(p),
          head(head_),
          head_k(head_ / (p.heads_q / p.heads_k)),
          sequence(sequence_),
          mask{sequence.seqlen_q, sequence.seqlen_k, p.window_left, p.window_right},
          first_query(q_tile * Config::kBlockQ),
          warp_row(warp_id() * Config::kRowsPerWarp),
          sQ(ptx::shared_address(dynamic_shared())),
          stages(sQ + Config::kQBytes) {}

    __device__ __forceinline__ void load_q() const {
        const auto gQ =
            global_tile<const Element>(params.q, sequence.batch, sequence.q_begin + first_query,
                                       head, sequence.seqlen_q - first_query, params.head_dim);
        load_tile<QTile, Config::kThreads, kGeneral>(sQ, gQ, params.aligned);
    }

    __device__ __forceinline__ void load_kv(int kv_tile, uint32_t sK) const {
        const int first_key = kv_tile * Config::kBlockKV;
        const int head_k = this->head_k;
        const int64_t row = sequence.k_begin + first_key;
        const int rows = sequence.seqlen_k - first_key;
        const auto gK = global_tile<const Element>(params.k, sequence.batch, row, head_k, rows,
                                                   params.head_dim);
        const auto gV = global_tile<const Element>(params.v, sequence.batch, row, head_k, rows,
                                                   params.head_dim_v);
        load_tile<KTile, Config::kThreads, kGeneral>(sK, gK, params.aligned);
        load_tile<VTile, Config::kThreads, kGeneral>(sK + KTile::kBytes, gV, params.aligned);
    }

    // One KV tile: S, its softmax, O.
    template <class QOperand>
    __device__ __forceinline__ void attend(const QOperand& q, int kv_tile, uint32_t sK,
                                           OnlineSoftmax<Config::kRowsPerWarp>& softmax, Output& rO,
                                           float exponent_scale) const {
        Scores rS;
        rS.clear();
        gemm<Element, Config::kHeadDim>(rS, q, BFromRows<KTile>(sK));

        const Interval queries{first_query, first_query + Config::kBlockQ};
        const Interval keys = tile_interval(kv_tile, Config::kBlockKV);
        if constexpr (kGeneral)
            ScoreFunction<Element, Rows::kQueries>{params, sequence, head}.apply(
                rS, first_query + warp_row, keys.begin);
        if (!mask.is_full(queries, keys)) {
            mask_scores(rS, keys.begin,
                        [&](int row) { return mask.key_range(first_query + warp_row + row); });
        }
        softmax.update(rS, rO, exponent_scale);
        if constexpr (kGeneral) {
            if (params.rng_state != nullptr) {
                for_each_keep<Scores>(dropout_mask(params, sequence, head), first_query + warp_row,
                                      keys.begin, [&](int m, int n, int i, bool keep) {
                                          if (!keep) rS.v[m][n][i] = 0.f;
                                      });
            }
        }
        gemm<Element, Config::kBlockKV>(rO, AFromRegisters<Element, Scores>{rS},
                                        BFromColumns<VTile>(sK + KTile::kBytes));
    }

    // O / l to HBM by way of the warp's own rows of the Q tile, and the logsumexp.
    __device__ __forceinline__ void store(Output& rO,
                                          const OnlineSoftmax<Config::kRowsPerWarp>& softmax,
                                          float exponent_scale) const {
        const int first_row = first_query + warp_row;
        float* lse = params.lse + statistics_offset(params, sequence, head);
#pragma unroll
        for (int m = 0; m < Output::kM; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float factor = softmax.inverse_sum(m, i);
                if constexpr (kGeneral) factor *= params.keep_scale;
#pragma unroll
                for (int n = 0; n < Output::kN; ++n) {
                    rO.v[m][n][2 * i] *= factor;
                    rO.v[m][n][2 * i + 1] *= factor;
                }
                const int row = first_row + 16 * m + lane_row() + 8 * i;
                if (lane_col() == 0 && row < sequence.seqlen_q)
                    lse[row] = softmax.lse(m, i, exponent_scale);
            }
        store_to_shared<Element, OTile>(sQ, rO, warp_row);
        __syncwarp();  // O's rows are complete
        const auto gO =
            global_tile<Element>(params.out, sequence.batch, sequence.q_begin + first_row, head,
                                 sequence.seqlen_q - first_row, params.head_dim_v);
        store_tile<OTile, 32, Config::kRowsPerWarp, kGeneral>(gO, sQ, warp_row, params.aligned);
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    fa2_forward_kernel(const __grid_constant__ ForwardParams params) {
    using Kernel = Fa2Forward<Config>;
    using QTile = typename Config::QTile;
    const WorkTile work = work_tile(blockIdx.x, params.schedule);
    const auto [sequence, tile] = warp_uniform<Config::kMayBePacked>(
        q_tile_of<Config::kMayBePacked>(params, work.batch, work.rank, Config::kBlockQ));
    // The last tile of a sequence comes first: under a causal mask it is the longest.
    const int q_tile = ceil_div(sequence.seqlen_q, Config::kBlockQ) - 1 - tile;
    if (Config::kMayBePacked && q_tile < 0) return;  // a spare number
    const Kernel cta(params, sequence, work.head, q_tile);

    const Interval kv_tiles = tiles_of(
        cta.mask.keys_of({cta.first_query, cta.first_query + Config::kBlockQ}), Config::kBlockKV);
    const auto stage_of = [&](int kv_tile) {
        return cta.stages + kv_tile % Config::kStages * Config::kStageBytes;
    };
    cta.load_q();
    if (!kv_tiles.empty()) cta.load_kv(kv_tiles.end - 1, stage_of(kv_tiles.end - 1));
    ptx::cp_async_commit();

    typename Kernel::Output rO;
    rO.clear();
    OnlineSoftmax<Config::kRowsPerWarp> softmax;
    // The general kernel scales the scores before it masks them; the others inside the exponent.
    const float exponent_scale = Config::kGeneral ? 1.f : params.scale_log2;
    if (params.sink != nullptr && cta.sequence.index() < params.batch)
        softmax.begin_with(params.sink[cta.head] * kLog2e / exponent_scale);

    const AFromRows<QTile> q_shared(cta.sQ, cta.warp_row);
    AInRegisters<Config::kRowsPerWarp, Config::kHeadDim> q_registers;

    for (int kv_tile = kv_tiles.end - 1; kv_tile >= kv_tiles.begin; --kv_tile) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // tile kv_tile has landed; all warps have left tile kv_tile + 1
        if (kv_tile > kv_tiles.begin) cta.load_kv(kv_tile - 1, stage_of(kv_tile - 1));
        ptx::cp_async_commit();

        if constexpr (Config::kQInRegisters) {
            if (kv_tile == kv_tiles.end - 1) q_registers.fetch(q_shared);
            cta.attend(q_registers, kv_tile, stage_of(kv_tile), softmax, rO, exponent_scale);
        } else {
            cta.attend(q_shared, kv_tile, stage_of(kv_tile), softmax, rO, exponent_scale);
        }
    }

    ptx::cp_async_wait<0>();
    __syncthreads();  // Q's copy is over even where there was no KV tile to wait for it
    softmax.finish();
    cta.store(rO, softmax, exponent_scale);
}

template <int kHeadDim, int kHeadDimV>
int fa2_forward_shared_bytes() {
    const auto bytes = [](auto features) {
        return Fa2ForwardConfig<__half, kHeadDim, kHeadDimV, features.value>::kSharedBytes;
    };
    return largest_of_forms<Features::kPlain, Features::kPacked, Features::kGeneral>(bytes);
}

template <int kHeadDim, int kHeadDimV>
cudaError_t fa2_forward(ForwardParams params, cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    dispatch_kernel<Features::kPlain, Features::kPacked, Features::kGeneral>(
        params, [&](auto element, auto features) {
            using Config = Fa2ForwardConfig<decltype(element), kHeadDim, kHeadDimV, features.value>;
            const bool tiles_differ =
                params.window_right < params.seqlen_k || params.cu_seqlens_q != nullptr;
            params.schedule = make_schedule(tile_numbers(params, params.seqlen_q, Config::kBlockQ),
                                            params.heads_q, tensor_batches(params), tiles_differ,
                                            int64_t{2} * (kHeadDim + kHeadDimV) * params.seqlen_k *
                                                params.heads_k / max_of(params.heads_q, 1));
            status = launch_kernel<fa2_forward_kernel<Config>>(
                cta_count(params.schedule), Config::kThreads, Config::kSharedBytes, params, stream);
        });
    return status;
}

}  // namespace flash_ext
