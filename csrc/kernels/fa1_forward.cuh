// FlashAttention-1 forward (Dao et al. 2022, algorithm 2).
//
// Loop order: one CTA per (batch, head); outer loop over KV tiles, inner loop over Q tiles. O (in
// float32), l and m live in HBM and are read and written at every step; O is kept normalised.
// Warps: kWarpsQ x kWarpsKV. K and V are split across the kWarpsKV warps (split-K): each computes
// the scores of its own keys and a partial product with its own rows of V, so the row maxima, the
// row sums and the partial products must all be exchanged through shared memory, which is what
// FlashAttention-2 does away with.
//
//     for each KV tile j:
//         for each Q tile i that sees it:
//             S = Q_i K_j^T                          each warp: its keys
//             m~ = rowmax(S)                         exchanged
//             P = 2^(S scale - m~),  l~ = rowsum(P)  exchanged
//             m_new = max(m_i, m~)
//             l_new = 2^(m_i - m_new) l_i + 2^(m~ - m_new) l~
//             O_i = (l_i 2^(m_i - m_new) O_i + 2^(m~ - m_new) P V_j) / l_new   P V_j exchanged
//             l_i = l_new,  m_i = m_new
//
// m is kept in base 2: scale log2(e) times the maximal score.
//
// Shared memory: K, V [kBlockKV][D]; two stages of Q [kBlockQ][D]; the partial products
// [kWarpsKV][kBlockQ][kExchangeCols], a few columns at a time; maxima and sums [kWarpsKV][kBlockQ].
// Barriers are commented where they stand.
#pragma once

#include "../mask.cuh"
#include "../scheduler.cuh"
#include "../score.cuh"
#include "../softmax.cuh"
#include "../tile/copy.cuh"
#include "../tile/gemm.cuh"
#include "../tuning.h"
#include "launch.cuh"

namespace flash_ext {

template <class Element_, int kHeadDim_, Features kFeatures, int kBlockKV_>
struct Fa1ForwardConfig {
    using Element = Element_;
    static constexpr auto kTuning = tuning::fa1_forward(kHeadDim_);
    static constexpr bool kGeneral = kFeatures == Features::kGeneral;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kRowsPerWarp = kTuning.rows_per_warp;
    static constexpr int kWarpsQ = kTuning.warps_q;
    static constexpr int kWarpsKV = 4;
    static constexpr int kThreads = 32 * kWarpsQ * kWarpsKV;
    static constexpr int kBlockQ = kRowsPerWarp * kWarpsQ;
    static constexpr int kBlockKV = kBlockKV_;
    static constexpr int kKeysPerWarp = kBlockKV / kWarpsKV;

    using QTile = SharedTile<kBlockQ, kHeadDim>;
    using KVTile = SharedTile<kBlockKV, kHeadDim>;

    // Columns of the partial products exchanged at a time, and how the threads share their sum:
    // four columns of a row each.
    static constexpr int kExchangeCols = QTile::kPanelCols;
    static constexpr int kThreadsPerRow = kExchangeCols / 4;
    static constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
    static constexpr int kPasses = kBlockQ / kRowsPerPass;
    // Partial rows are padded so that the four rows a warp stores to differ in their banks.
    static constexpr int kExchangePitch = kExchangeCols + 8;
    static constexpr int kPartialFloats = kBlockQ * kExchangePitch;

    // Offsets in shared memory.
    static constexpr int kK = 0;
    static constexpr int kV = kK + KVTile::kBytes;
    static constexpr int kQ = kV + KVTile::kBytes;
    static constexpr int kPartial = kQ + 2 * QTile::kBytes;
    static constexpr int kMax = kPartial + kWarpsKV * kPartialFloats * 4;
    static constexpr int kSum = kMax + kWarpsKV * kBlockQ * 4;
    static constexpr int kSharedBytes = kSum + kWarpsKV * kBlockQ * 4;

    static_assert(kBlockQ % kRowsPerPass == 0 && kKeysPerWarp % 16 == 0);
};

template <class Config>
struct Fa1Forward {
    using Element = typename Config::Element;
    using QTile = typename Config::QTile;
    using KVTile = typename Config::KVTile;
    using Scores = RegisterTile<Config::kRowsPerWarp, Config::kKeysPerWarp>;
    using Output = RegisterTile<Config::kRowsPerWarp, Config::kHeadDim>;
    static constexpr bool kGeneral = Config::kGeneral;

    const ForwardParams& params;
    int head;
    int batch;
    Sequence sequence;
    BandMask mask;
    int warp_row;  // the warp's first row within the Q tile
    int warp_kv;   // which part of the keys is its own
    uint32_t smem;

    __device__ __forceinline__ explicit Fa1Forward(const ForwardParams& p)
        : params(p),
          head(blockIdx.x % p.heads_q),
          batch(blockIdx.x / p.heads_q),
          sequence(sequence_of<kGeneral>(p, batch)),
          mask{sequence.seqlen_q, sequence.seqlen_k, p.window_left, p.window_right},
          warp_row(warp_id() / Config::kWarpsKV * Config::kRowsPerWarp),
          warp_kv(warp_id() % Config::kWarpsKV),
          smem(ptx::shared_address(dynamic_shared())) {}

    __device__ __forceinline__ float* maxima() const {
        return reinterpret_cast<float*>(dynamic_shared() + Config::kMax);
    }
    __device__ __forceinline__ float* sums() const {
        return reinterpret_cast<float*>(dynamic_shared() + Config::kSum);
    }
    __device__ __forceinline__ float* partials() const {
        return reinterpret_cast<float*>(dynamic_shared() + Config::kPartial);
    }

    __device__ __forceinline__ void load_kv(int kv_tile) const {
        const int first_key = kv_tile * Config::kBlockKV;
        const int head_k = head / (params.heads_q / params.heads_k);
        const int64_t row = sequence.k_begin + first_key;
        const int rows = sequence.seqlen_k - first_key;
        const GlobalTile<const Element> gK{
            row_pointer<const Element>(params.k, sequence.batch, row, head_k), params.k.row_stride,
            rows, params.head_dim};
        const GlobalTile<const Element> gV{
            row_pointer<const Element>(params.v, sequence.batch, row, head_k), params.v.row_stride,
            rows, params.head_dim_v};
        load_tile<KVTile, Config::kThreads, kGeneral>(smem + Config::kK, gK, params.aligned);
        load_tile<KVTile, Config::kThreads, kGeneral>(smem + Config::kV, gV, params.aligned);
    }

    __device__ __forceinline__ uint32_t q_stage(int q_tile) const {
        return smem + Config::kQ + q_tile % 2 * QTile::kBytes;
    }

    __device__ __forceinline__ void load_q(int q_tile) const {
        const int first_query = q_tile * Config::kBlockQ;
        const GlobalTile<const Element> gQ{
            row_pointer<const Element>(params.q, sequence.batch, sequence.q_begin + first_query,
                                       head),
            params.q.row_stride, sequence.seqlen_q - first_query, params.head_dim};
        load_tile<QTile, Config::kThreads, kGeneral>(q_stage(q_tile), gQ, params.aligned);
    }

    // The warp's part of P V_j; leaves its row maxima and sums in shared memory.
    __device__ __forceinline__ void partial_product(Output& rO, int q_tile, int kv_tile) const {
        const int warp_key = warp_kv * Config::kKeysPerWarp;
        const int first_query = q_tile * Config::kBlockQ;
        const int first_key = kv_tile * Config::kBlockKV;
        Scores rS;
        rS.clear();
        gemm<Element, Config::kHeadDim>(rS, AFromRows<QTile>(q_stage(q_tile), warp_row),
                                        BFromRows<KVTile>(smem + Config::kK, warp_key));
        scale_scores(rS, params.scale_log2);
        if (!mask.is_full(tile_interval(q_tile, Config::kBlockQ),
                          tile_interval(kv_tile, Config::kBlockKV))) {
            mask_scores(rS, first_key + warp_key,
                        [&](int row) { return mask.key_range(first_query + warp_row + row); });
        }
        for_each_row([&](int m, int i, int row) {
            float x = -INFINITY;
#pragma unroll
            for (int n = 0; n < Scores::kN; ++n)
                x = fmaxf(x, fmaxf(rS.v[m][n][2 * i], rS.v[m][n][2 * i + 1]));
            x = quad_max(x);
            if (lane_col() == 0) maxima()[warp_kv * Config::kBlockQ + row] = x;
        });
        __syncthreads();  // the maxima of all keys are there
        for_each_row([&](int m, int i, int row) {
            const float max = finite_max(tile_max(row));
            float sum = 0.f;
#pragma unroll
            for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = rS.v[m][n][2 * i + e];
                    x = ptx::ex2(x - max);
                    sum += x;
                }
            sum = quad_sum(sum);
            if (lane_col() == 0) sums()[warp_kv * Config::kBlockQ + row] = sum;
        });
        if constexpr (kGeneral) {
            if (params.rng_state != nullptr) {
                for_each_keep<Scores>(dropout_mask(params, batch, head), first_query + warp_row,
                                      first_key + warp_key, [&](int m, int n, int i, bool keep) {
                                          if (!keep) rS.v[m][n][i] = 0.f;
                                      });
            }
        }
        rO.clear();
        gemm<Element, Config::kKeysPerWarp>(rO, AFromRegisters<Element, Scores>{rS},
                                            BFromColumns<KVTile>(smem + Config::kV, warp_key));
    }

    // Lines 13 to 16: merges the step's product into O_i, l_i and m_i in HBM; after the last KV
    // tile that the Q tile sees, O and the logsumexp are final and leave in their own types.
    __device__ __forceinline__ void merge(const Output& rO, int q_tile, bool first_visit,
                                          bool last_visit) const {
        const int first_query = q_tile * Config::kBlockQ;
        const int thread_row = threadIdx.x / Config::kThreadsPerRow;
        const int thread_col = threadIdx.x % Config::kThreadsPerRow * 4;
        const int64_t statistics = statistics_offset(params, sequence, head) + first_query;
        const int rows = sequence.seqlen_q - first_query;
        float old_factor[Config::kPasses];
        float new_factor[Config::kPasses];
        float row_max[Config::kPasses];
        float row_sum[Config::kPasses];

#pragma unroll
        for (int chunk = 0; chunk < Config::kHeadDim / Config::kExchangeCols; ++chunk) {
            const int col = chunk * Config::kExchangeCols + thread_col;
            float4 old[Config::kPasses];
#pragma unroll
            for (int pass = 0; pass < Config::kPasses; ++pass) {
                const int row = thread_row + pass * Config::kRowsPerPass;
                old[pass] = make_float4(0.f, 0.f, 0.f, 0.f);
                if (!first_visit && row < rows)
                    old[pass] = *reinterpret_cast<const float4*>(
                        params.out_accum + (statistics + row) * Config::kHeadDim + col);
            }
            if (chunk > 0) __syncthreads();  // the chunk before has been summed
            store_partial(rO, chunk);
            __syncthreads();  // all partial products (and, the first time, sums) are there
            if (chunk == 0) {
#pragma unroll
                for (int pass = 0; pass < Config::kPasses; ++pass) {
                    const int row = thread_row + pass * Config::kRowsPerPass;
                    const bool has_old = !first_visit && row < rows;
                    const float m_i = has_old ? params.row_max[statistics + row] : -INFINITY;
                    const float l_i = has_old ? params.row_sum[statistics + row] : 0.f;
                    const float m_tile = tile_max(row);
                    const float m_new = fmaxf(m_i, m_tile);
                    const float keep_old = ptx::ex2(m_i - finite_max(m_new)) * l_i;
                    const float keep_new = ptx::ex2(m_tile - finite_max(m_new));
                    const float l_new = keep_old + keep_new * tile_sum(row);
                    const float inverse = l_new > 0.f ? 1.f / l_new : 0.f;
                    old_factor[pass] = keep_old * inverse;
                    new_factor[pass] = keep_new * inverse;
                    if constexpr (kGeneral) new_factor[pass] *= params.keep_scale;
                    row_max[pass] = m_new;
                    row_sum[pass] = l_new;
                }
            }
#pragma unroll
            for (int pass = 0; pass < Config::kPasses; ++pass) {
                const int row = thread_row + pass * Config::kRowsPerPass;
                float4 o = sum_partials(row, thread_col);
                o.x = old_factor[pass] * old[pass].x + new_factor[pass] * o.x;
                o.y = old_factor[pass] * old[pass].y + new_factor[pass] * o.y;
                o.z = old_factor[pass] * old[pass].z + new_factor[pass] * o.z;
                o.w = old_factor[pass] * old[pass].w + new_factor[pass] * o.w;
                if (row >= rows) continue;
                if (last_visit) {
                    store_out(first_query + row, col, o);
                } else {
                    *reinterpret_cast<float4*>(params.out_accum +
                                               (statistics + row) * Config::kHeadDim + col) = o;
                }
            }
        }
        // Every thread of a row has read m_i and l_i before the barrier below, the next of merge()
        // or of the loop; one of them writes.
        __syncthreads();  // m_i and l_i have been read, maxima and sums too
        if (thread_col != 0) return;
#pragma unroll
        for (int pass = 0; pass < Config::kPasses; ++pass) {
            const int row = thread_row + pass * Config::kRowsPerPass;
            if (row >= rows) continue;
            if (last_visit) {
                params.lse[statistics + row] =
                    row_sum[pass] > 0.f ? (row_max[pass] + log2f(row_sum[pass])) * kLn2 : -INFINITY;
            } else {
                params.row_max[statistics + row] = row_max[pass];
                params.row_sum[statistics + row] = row_sum[pass];
            }
        }
    }

    // A Q tile that sees no key.
    __device__ __forceinline__ void store_empty(int q_tile) const {
        const int first_query = q_tile * Config::kBlockQ;
        const int rows = min_of(sequence.seqlen_q - first_query, Config::kBlockQ);
        for (int i = threadIdx.x; i < rows * (Config::kHeadDim / 4); i += Config::kThreads)
            store_out(first_query + i / (Config::kHeadDim / 4), i % (Config::kHeadDim / 4) * 4,
                      make_float4(0.f, 0.f, 0.f, 0.f));
        const int64_t statistics = statistics_offset(params, sequence, head) + first_query;
        for (int row = threadIdx.x; row < rows; row += Config::kThreads)
            params.lse[statistics + row] = -INFINITY;
    }

 private:
    // visit(m, i, row of the Q tile) for the rows that this lane holds elements of.
    template <class Visit>
    __device__ __forceinline__ void for_each_row(Visit visit) const {
#pragma unroll
        for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) visit(m, i, warp_row + 16 * m + lane_row() + 8 * i);
    }

    __device__ __forceinline__ float tile_max(int row) const {
        float x = maxima()[row];
#pragma unroll
        for (int w = 1; w < Config::kWarpsKV; ++w)
            x = fmaxf(x, maxima()[w * Config::kBlockQ + row]);
        return x;
    }

    __device__ __forceinline__ float tile_sum(int row) const {
        float x = 0.f;
#pragma unroll
        for (int w = 0; w < Config::kWarpsKV; ++w) x += sums()[w * Config::kBlockQ + row];
        return x;
    }

    __device__ __forceinline__ void store_partial(const Output& rO, int chunk) const {
        float* partial = partials() + warp_kv * Config::kPartialFloats;
        constexpr int kN = Config::kExchangeCols / 8;
        for_each_row([&](int m, int i, int row) {
#pragma unroll
            for (int n = 0; n < kN; ++n)
                *reinterpret_cast<float2*>(partial + row * Config::kExchangePitch + 8 * n +
                                           lane_col()) =
                    make_float2(rO.v[m][chunk * kN + n][2 * i], rO.v[m][chunk * kN + n][2 * i + 1]);
        });
    }

    __device__ __forceinline__ float4 sum_partials(int row, int col) const {
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < Config::kWarpsKV; ++w) {
            const float4 x = *reinterpret_cast<const float4*>(
                partials() + w * Config::kPartialFloats + row * Config::kExchangePitch + col);
            sum.x += x.x;
            sum.y += x.y;
            sum.z += x.z;
            sum.w += x.w;
        }
        return sum;
    }

    // Four columns of a row of the output.
    __device__ __forceinline__ void store_out(int query, int col, float4 o) const {
        Element* target =
            row_pointer<Element>(params.out, sequence.batch, sequence.q_begin + query, head) + col;
        const uint2 packed = {ptx::pack<Element>(o.x, o.y), ptx::pack<Element>(o.z, o.w)};
        if (!kGeneral || params.aligned) {
            if (col < params.head_dim_v) *reinterpret_cast<uint2*>(target) = packed;
            return;
        }
        auto* bits = reinterpret_cast<uint16_t*>(target);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (col + j < params.head_dim_v)
                bits[j] = static_cast<uint16_t>((j < 2 ? packed.x : packed.y) >> (16 * (j % 2)));
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fa1_forward_kernel(const __grid_constant__ ForwardParams params) {
    using Kernel = Fa1Forward<Config>;
    const Kernel cta(params);
    const int kv_tiles = ceil_div(cta.sequence.seqlen_k, Config::kBlockKV);

    for (int kv_tile = 0; kv_tile < kv_tiles; ++kv_tile) {
        const Interval q_tiles = tiles_of(
            cta.mask.queries_of(tile_interval(kv_tile, Config::kBlockKV)), Config::kBlockQ);
        if (q_tiles.empty()) continue;
        __syncthreads();  // all warps have left the KV tile before
        cta.load_kv(kv_tile);
        cta.load_q(q_tiles.begin);
        ptx::cp_async_commit();

        for (int q_tile = q_tiles.begin; q_tile < q_tiles.end; ++q_tile) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // the Q tile has landed; all warps have left the one before
            if (q_tile + 1 < q_tiles.end) cta.load_q(q_tile + 1);
            ptx::cp_async_commit();

            typename Kernel::Output rO;
            cta.partial_product(rO, q_tile, kv_tile);
            const Interval seen = tiles_of(cta.mask.keys_of(tile_interval(q_tile, Config::kBlockQ)),
                                           Config::kBlockKV);
            cta.merge(rO, q_tile, kv_tile == seen.begin, kv_tile == seen.end - 1);
        }
    }

    const int q_tiles = ceil_div(cta.sequence.seqlen_q, Config::kBlockQ);
    for (int q_tile = 0; q_tile < q_tiles; ++q_tile)
        if (cta.mask.keys_of(tile_interval(q_tile, Config::kBlockQ)).empty())
            cta.store_empty(q_tile);
}

// Shared memory that a CTA of this device can have.
inline int shared_memory_limit() {
    int device = 0;
    int bytes = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return bytes;
}

template <int kHeadDim>
cudaError_t fa1_forward(ForwardParams params, cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    dispatch_kernel(params, needs_general(params), [&](auto element, auto features) {
        constexpr auto kTuning = tuning::fa1_forward(kHeadDim);
        using Element = decltype(element);
        using Large = Fa1ForwardConfig<Element, kHeadDim, features.value, kTuning.block_kv>;
        using Small = Fa1ForwardConfig<Element, kHeadDim, features.value, kTuning.small_block_kv>;
        const auto launch = [&](auto config) {
            using Config = decltype(config);
            status = launch_kernel(fa1_forward_kernel<Config>, params.heads_q * params.batch,
                                   Config::kThreads, Config::kSharedBytes, params, stream);
        };
        // The larger the KV tile, the fewer times O goes through HBM; what fits depends on the GPU.
        if (Large::kSharedBytes <= shared_memory_limit()) {
            launch(Large{});
        } else {
            launch(Small{});
        }
    });
    return status;
}

}  // namespace flash_ext
