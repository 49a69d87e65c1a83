// One (Q tile, KV tile) step of the backward pass, shared by FA1 (algorithm 4) and FA2 (algorithm
// 2), which differ in their loops and in how dQ reaches HBM.
//
// Everything is computed transposed, rows are keys:
//     S^T  = K Q^T                 P^T  = 2^(S^T scale - lse), scale and lse in base 2
//     dP^T = V dO^T                dS^T = P^T * (dP^T - delta)
//     dV  += P^T dO                dK  += dS^T Q
//     dQ   = dS K
// so that P^T and dS^T come out of the tensor cores in the layout in which dV and dK take them as
// operands. Only dS goes through shared memory for everyone, because dQ sums over keys.
//
// Warps: kWarpsKV x kWarpsD. A warp owns kKeysPerWarp rows of the KV tile and every kWarpsD-th
// 16-column block of their dK and dV, in registers. With kWarpsD = 1, P^T and dS^T never leave the
// warp. With kWarpsD = 2 (large head dims, where a row of dK and dV does not fit one warp) the two
// warps of a row group compute half of the queries each and exchange P^T and dS^T through shared
// memory. For dQ the warps are regrouped kWarpsM x kWarpsN over (queries, columns).
//
// Shared memory: K, V [kBlockKV][D]; kStages x (Q, dO [kBlockQ][D], lse, delta [kBlockQ]);
// dS^T and, for kWarpsD = 2, P^T [kBlockKV][kBlockQ]. dV and dK leave through the K and V tiles.
#pragma once

#include "../mask.cuh"
#include "../ptx/memory.cuh"
#include "../scheduler.cuh"
#include "../score.cuh"
#include "../softmax.cuh"
#include "../tile/copy.cuh"
#include "../tile/gemm.cuh"
#include "../tuning.h"
#include "launch.cuh"

namespace flash_ext {

template <class Element_, int kHeadDim_, Features kFeatures, tuning::Backward kTuning>
struct BackwardConfig {
    using Element = Element_;
    static constexpr bool kGeneral = kFeatures == Features::kGeneral;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kKeysPerWarp = kTuning.keys_per_warp;
    static constexpr int kWarpsKV = kTuning.warps_kv;
    static constexpr int kWarpsD = kTuning.warps_d;
    static constexpr int kWarps = kWarpsKV * kWarpsD;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kBlockQ = kTuning.block_q;
    static constexpr int kBlockKV = kKeysPerWarp * kWarpsKV;
    static constexpr int kCtasPerSm = kTuning.ctas_per_sm;
    static constexpr int kStages = 2;

    using QTile = SharedTile<kBlockQ, kHeadDim>;
    using KVTile = SharedTile<kBlockKV, kHeadDim>;
    using PTile = SharedTile<kBlockKV, kBlockQ>;

    static constexpr int kWarpsN = KVTile::kBlocksPerPanel;
    static constexpr int kWarpsM = kWarps / kWarpsN;

    // Offsets in shared memory.
    static constexpr int kK = 0;
    static constexpr int kV = kK + KVTile::kBytes;
    static constexpr int kDS = kV + KVTile::kBytes;
    static constexpr int kP = kDS + PTile::kBytes;
    static constexpr int kQ = kP + (kWarpsD > 1 ? PTile::kBytes : 0);
    static constexpr int kDO = kQ + kStages * QTile::kBytes;
    static constexpr int kLse = kDO + kStages * QTile::kBytes;
    static constexpr int kDelta = kLse + kStages * kBlockQ * 4;
    static constexpr int kTicket = kDelta + kStages * kBlockQ * 4;
    static constexpr int kSharedBytes = kTicket + 16;

    // dQ is computed in parts, where a warp's columns of it do not fit its registers beside dK and
    // dV. A tile of dq_accum is in fragment order: [warp][part][m][n][lane][4].
    static constexpr int kDQParts = kTuning.dq_parts;
    using DQ = RegisterTile<kBlockQ / kWarpsM, kHeadDim / kWarpsN / kDQParts>;
    static constexpr int kDQTileFloats = kBlockQ * kHeadDim;

    static_assert(kWarpsM * kWarpsN == kWarps && kBlockQ % (16 * kWarpsM) == 0);
    static_assert((DQ::kM & (DQ::kM - 1)) == 0, "operands of dQ start at an XOR of their blocks");
    static_assert(kHeadDim % (16 * kWarpsN * kDQParts) == 0 && kBlockQ % (16 * kWarpsD) == 0);
};

// This lane's first four floats of a part of a Q tile's dq_accum; fragment (m, n) is dq_fragment()
// floats on.
template <class Config>
__device__ __forceinline__ float* dq_accum_part(const BackwardParams& params, int batch, int head,
                                                int q_tile, int part) {
    const int64_t tile = q_tile_number(params, batch, head, q_tile);
    constexpr int kPartFloats = Config::DQ::kM * Config::DQ::kN * 128;
    return params.dq_accum + tile * Config::kDQTileFloats +
           (warp_id() * Config::kDQParts + part) * kPartFloats + lane_id() * 4;
}

template <class Config>
__device__ __forceinline__ constexpr int dq_fragment(int m, int n) {
    return (m * Config::DQ::kN + n) * 128;
}

// The inner loop's order: the Q tiles that see the KV tile, for each query head of the group in
// turn.
struct QTileWalk {
    Interval q_tiles;
    int last_head;
    int head;
    int q_tile;
    int stage = 0;  // where in shared memory: alternating

    __device__ __forceinline__ QTileWalk(Interval q_tiles_, int first_head, int heads)
        : q_tiles(q_tiles_),
          last_head(q_tiles_.empty() ? first_head - 1 : first_head + heads - 1),
          head(first_head),
          q_tile(q_tiles_.begin) {}

    __device__ __forceinline__ bool done() const { return head > last_head; }

    __device__ __forceinline__ QTileWalk next() const {
        QTileWalk after = *this;
        after.stage ^= 1;
        if (++after.q_tile == q_tiles.end) {
            after.q_tile = q_tiles.begin;
            ++after.head;
        }
        return after;
    }
};

template <class Config>
struct BackwardTile {
    using Element = typename Config::Element;
    using QTile = typename Config::QTile;
    using KVTile = typename Config::KVTile;
    using PTile = typename Config::PTile;
    using Scores = RegisterTile<Config::kKeysPerWarp, Config::kBlockQ / Config::kWarpsD>;
    using Gradient = RegisterTile<Config::kKeysPerWarp, Config::kHeadDim / Config::kWarpsD>;
    using DQ = typename Config::DQ;
    static constexpr bool kGeneral = Config::kGeneral;

    const BackwardParams& params;
    int batch;
    int head_k;
    Sequence sequence;
    BandMask mask;
    int warp_key;  // the warp's first row within the KV tile
    int warp_d;    // 0 .. kWarpsD - 1
    uint32_t smem;

    __device__ __forceinline__ BackwardTile(const BackwardParams& p, int batch_, int head_k_)
        : params(p),
          batch(batch_),
          head_k(head_k_),
          sequence(sequence_of<kGeneral>(p, batch_)),
          mask{sequence.seqlen_q, sequence.seqlen_k, p.window_left, p.window_right},
          warp_key(warp_id() % Config::kWarpsKV * Config::kKeysPerWarp),
          warp_d(warp_id() / Config::kWarpsKV),
          smem(ptx::shared_address(dynamic_shared())) {}

    __device__ __forceinline__ void load_kv(int first_key) const {
        const int64_t row = sequence.k_begin + first_key;
        const int rows = sequence.seqlen_k - first_key;
        const auto gK = global_tile<const Element>(params.k, sequence.batch, row, head_k, rows,
                                                   params.head_dim);
        const auto gV = global_tile<const Element>(params.v, sequence.batch, row, head_k, rows,
                                                   params.head_dim_v);
        load_tile<KVTile, Config::kThreads, kGeneral>(smem + Config::kK, gK, params.aligned);
        load_tile<KVTile, Config::kThreads, kGeneral>(smem + Config::kV, gV, params.aligned);
    }

    __device__ __forceinline__ void load_q_do(int head_q, int q_tile, int stage) const {
        const int first_query = q_tile * Config::kBlockQ;
        const int64_t row = sequence.q_begin + first_query;
        const int rows = sequence.seqlen_q - first_query;
        const auto gQ = global_tile<const Element>(params.q, sequence.batch, row, head_q, rows,
                                                   params.head_dim);
        const auto gDO = global_tile<const Element>(params.dout, sequence.batch, row, head_q, rows,
                                                    params.head_dim_v);
        load_tile<QTile, Config::kThreads, kGeneral>(smem + Config::kQ + stage * QTile::kBytes, gQ,
                                                     params.aligned);
        load_tile<QTile, Config::kThreads, kGeneral>(smem + Config::kDO + stage * QTile::kBytes,
                                                     gDO, params.aligned);
    }

    __device__ __forceinline__ float* lse_log2(int stage) const {
        return reinterpret_cast<float*>(dynamic_shared() + Config::kLse) + stage * Config::kBlockQ;
    }

    __device__ __forceinline__ float* delta(int stage) const {
        return reinterpret_cast<float*>(dynamic_shared() + Config::kDelta) +
               stage * Config::kBlockQ;
    }

    // dV += P^T dO and dK += dS^T Q; leaves dS^T in shared memory for dQ. Before it, a barrier must
    // have made the stage visible and dS free; it contains the barrier after which dS is complete.
    // Padded queries are not masked: their lse is +inf, which makes their P zero.
    __device__ __forceinline__ void accumulate_dk_dv(Gradient& rdK, Gradient& rdV, int head_q,
                                                     int q_tile, int first_key, int stage) const {
        const uint32_t sQ = smem + Config::kQ + stage * QTile::kBytes;
        const uint32_t sdO = smem + Config::kDO + stage * QTile::kBytes;
        const int warp_query = warp_d * Scores::kCols;
        const int first_query = q_tile * Config::kBlockQ + warp_query;

        Scores rP;
        rP.clear();
        gemm<Element, Config::kHeadDim>(rP, AFromRows<KVTile>(smem + Config::kK, warp_key),
                                        BFromRows<QTile>(sQ, warp_query));
        if constexpr (kGeneral) rP.scale(params.scale_log2);
        if (!mask.is_full(tile_interval(q_tile, Config::kBlockQ),
                          {first_key, first_key + Config::kBlockKV})) {
            mask_scores(rP, first_query,
                        [&](int row) { return mask.query_range(first_key + warp_key + row); });
        }
        exponentiate(rP, lse_log2(stage) + warp_query);

        Scores rdS;  // dP^T first
        rdS.clear();
        gemm<Element, Config::kHeadDim>(rdS, AFromRows<KVTile>(smem + Config::kV, warp_key),
                                        BFromRows<QTile>(sdO, warp_query));
        if constexpr (kGeneral) {
            if (params.rng_state != nullptr) {
                // dS = P * (Z dP - delta), dV = (P Z)^T dO; the factor of dV waits until its end.
                const float keep_scale = params.keep_scale;
                uint32_t dropped[Scores::kM][ceil_div(Scores::kN, 8)] = {};
                for_each_keep_transposed<Scores>(
                    dropout_mask(params, batch, head_q), first_key + warp_key, first_query,
                    [&](int m, int n, int i, bool keep) {
                        rdS.v[m][n][i] = keep ? rdS.v[m][n][i] * keep_scale : 0.f;
                        dropped[m][n / 8] |= static_cast<uint32_t>(!keep) << (n % 8 * 4 + i);
                    });
                softmax_gradient(rdS, rP, delta(stage) + warp_query);
#pragma unroll
                for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
                    for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (dropped[m][n / 8] >> (n % 8 * 4 + i) & 1) rP.v[m][n][i] = 0.f;
            } else {
                softmax_gradient(rdS, rP, delta(stage) + warp_query);
            }
        } else {
            softmax_gradient(rdS, rP, delta(stage) + warp_query);
        }

        store_to_shared<Element, PTile>(smem + Config::kDS, rdS, warp_key, warp_query / 16);
        const BFromColumns<QTile, Config::kWarpsD> dO_columns(sdO, 0, warp_d);
        const BFromColumns<QTile, Config::kWarpsD> q_columns(sQ, 0, warp_d);
        if constexpr (Config::kWarpsD == 1) {
            gemm<Element, Config::kBlockQ>(rdV, AFromRegisters<Element, Scores>{rP}, dO_columns);
            gemm<Element, Config::kBlockQ>(rdK, AFromRegisters<Element, Scores>{rdS}, q_columns);
            __syncthreads();  // dS^T is complete
        } else {
            store_to_shared<Element, PTile>(smem + Config::kP, rP, warp_key, warp_query / 16);
            __syncthreads();  // P^T and dS^T are complete
            gemm<Element, Config::kBlockQ>(rdV, AFromRows<PTile>(smem + Config::kP, warp_key),
                                           dO_columns);
            gemm<Element, Config::kBlockQ>(rdK, AFromRows<PTile>(smem + Config::kDS, warp_key),
                                           q_columns);
        }
    }

    // dQ of this step, without the factor scale: dS K over all keys of the tile.
    // use(part of dQ, where it belongs in dq_accum) is called once per part. A barrier must follow
    // before dS is overwritten.
    template <class Use>
    __device__ __forceinline__ void compute_dq(int head_q, int q_tile, Use use) const {
        const int warp_m = warp_id() / Config::kWarpsN;
        const int warp_n = warp_id() % Config::kWarpsN;
        using KColumns = BFromColumns<KVTile, Config::kWarpsN>;
        const AFromColumns<PTile> dS(smem + Config::kDS, 0, warp_m * DQ::kM);
        const KColumns k(smem + Config::kK, 0, warp_n);
        compile_time_for<Config::kDQParts>([&](auto part) {
            DQ rdQ;
            rdQ.clear();
            gemm<Element, Config::kBlockKV>(rdQ, dS, BSkipping<KColumns, part*(DQ::kN / 2)>{k});
            use(rdQ, dq_accum_part<Config>(params, batch, head_q, q_tile, part));
        });
    }

    // dK and dV to HBM by way of the K and V tiles. All warps have left the loop.
    __device__ __forceinline__ void store_dk_dv(Gradient& rdK, Gradient& rdV, int first_key) const {
        rdK.scale(params.scale);
        if constexpr (kGeneral) rdV.scale(params.keep_scale);
        store_to_shared<Element, KVTile, Config::kWarpsD>(smem + Config::kK, rdK, warp_key, warp_d);
        store_to_shared<Element, KVTile, Config::kWarpsD>(smem + Config::kV, rdV, warp_key, warp_d);
        __syncthreads();  // dK and dV are complete
        const int64_t row = sequence.k_begin + first_key;
        const int rows = sequence.seqlen_k - first_key;
        const auto gdK =
            global_tile<Element>(params.dk, sequence.batch, row, head_k, rows, params.head_dim);
        const auto gdV =
            global_tile<Element>(params.dv, sequence.batch, row, head_k, rows, params.head_dim_v);
        store_tile<KVTile, Config::kThreads, Config::kBlockKV, kGeneral>(gdK, smem + Config::kK, 0,
                                                                         params.aligned);
        store_tile<KVTile, Config::kThreads, Config::kBlockKV, kGeneral>(gdV, smem + Config::kV, 0,
                                                                         params.aligned);
    }

 private:
    // s = 2^(s scale - lse of its column's query); rows without keys have lse = +inf, so p = 0. The
    // general kernel has scaled the scores before masking them: a scale may be zero or negative.
    __device__ __forceinline__ void exponentiate(Scores& s, const float* lse_of_query) const {
        const float scale = kGeneral ? 1.f : params.scale_log2;
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float lse = lse_of_query[8 * n + lane_col() + e];
#pragma unroll
                for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& x = s.v[m][n][2 * i + e];
                        x = ptx::ex2(x * scale - lse);
                    }
            }
    }

    // dP becomes dS = P * (dP - delta of its column's query).
    static __device__ __forceinline__ void softmax_gradient(Scores& dp, const Scores& p,
                                                            const float* delta_of_query) {
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float delta = delta_of_query[8 * n + lane_col() + e];
#pragma unroll
                for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& x = dp.v[m][n][2 * i + e];
                        x = p.v[m][n][2 * i + e] * (x - delta);
                    }
            }
    }
};

// dq_accum to dQ: the factor scale, the element type, and rows in their order. One CTA per Q tile,
// its warps laid out as those that wrote the tile.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    backward_convert_dq_kernel(const __grid_constant__ BackwardParams params) {
    using Element = typename Config::Element;
    using QTile = typename Config::QTile;
    const auto [q_tile, head, batch] = q_tile_index(blockIdx.x, params);
    const Sequence sequence = sequence_of<Config::kGeneral>(params, batch);

    using DQ = typename Config::DQ;
    const uint32_t sdQ = ptx::shared_address(dynamic_shared());
#pragma unroll
    for (int part = 0; part < Config::kDQParts; ++part) {
        const float* accum = dq_accum_part<Config>(params, batch, head, q_tile, part);
        DQ rdQ;
#pragma unroll
        for (int m = 0; m < DQ::kM; ++m)
#pragma unroll
            for (int n = 0; n < DQ::kN; ++n) {
                const float4 x =
                    *reinterpret_cast<const float4*>(accum + dq_fragment<Config>(m, n));
                rdQ.v[m][n][0] = x.x;
                rdQ.v[m][n][1] = x.y;
                rdQ.v[m][n][2] = x.z;
                rdQ.v[m][n][3] = x.w;
            }
        rdQ.scale(params.scale);
        store_to_shared<Element, QTile, Config::kWarpsN>(
            sdQ, rdQ, warp_id() / Config::kWarpsN * DQ::kRows,
            warp_id() % Config::kWarpsN + part * (DQ::kN / 2) * Config::kWarpsN);
    }
    __syncthreads();  // the tile is complete
    const int first_query = q_tile * Config::kBlockQ;
    const auto gdQ = global_tile<Element>(params.dq, sequence.batch, sequence.q_begin + first_query,
                                          head, sequence.seqlen_q - first_query, params.head_dim);
    store_tile<QTile, Config::kThreads, Config::kBlockQ, Config::kGeneral>(gdQ, sdQ, 0,
                                                                           params.aligned);
}

template <class Config>
cudaError_t launch_convert_dq(const BackwardParams& params, cudaStream_t stream) {
    const int ctas = params.q_tiles * params.heads_q * params.batch;
    return launch_kernel<backward_convert_dq_kernel<Config>>(ctas, Config::kThreads,
                                                             Config::QTile::kBytes, params, stream);
}

}  // namespace flash_ext
