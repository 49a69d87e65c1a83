// The backward for short sequences (tile.cuh). All of a head is one tile, so S, P, dP and dS are
// computed once, and only the bias's gradient is summed over CTAs.
//
//     for each head of the walk, rows are queries:
//         delta = rowsum(dO * O) - dlse       before the matmuls: no preprocess pass
//         S  = Q K^T                          P  = 2^(S scale - lse)
//         dP = dO V^T                         dS = P * (dP - delta)
//         dbias += dS                         in registers, over all heads of the walk
//         dQ = dS K                           dS from registers
//         dV = P^T dO,  dK = dS^T Q           a warp has 16 keys; P and dS from shared memory
//
// A row whose lse is large (large_lse.cuh) gets its reference and the relative lse here, from its
// scores.
//
// dbias: CTAs of the same bias store their sums in the workspace, and a second kernel adds them in
// the order of the CTAs. A single CTA adds what a broadcast row or column of the bias sums up.
//
// Shared memory: kStages x (Q, K, V, dO, O [64][D]); P, dS [64][64]; the bias, at the end the sums.
// dQ leaves through O's rows, dK and dV through K's and V's.
//
// Barriers, beside the walk's: P and dS are complete, and all warps have left K and V.
#pragma once

#include "kernels/common/backward_math.cuh"
#include "kernels/common/large_lse.cuh"
#include "kernels/short/tile.cuh"
#include "schedule/dbias_tiles.cuh"

namespace flash_ext {

struct ShortBackwardParams : ShortParams<BackwardParams> {
    float* dbias_sums;  // (biases, ctas_per_bias, 64, 64), if ctas_per_bias > 1
};

// An element of tile `bias` of dbias, from the sums of its scores.
template <class Element>
FLASH_DEVICE void sum_dbias(const ShortBackwardParams& params, int bias, int own_row, int own_col,
                            const float* sums) {
    constexpr int kBlock = tuning::kShortBlock;
    const int queries = params.bias.sizes[2], keys = params.bias.sizes[3];
    const Interval rows = contributing(queries, own_row, params.seqlen_q);
    const Interval cols = contributing(keys, own_col, params.seqlen_k);
    float total = 0.f;
    for (int row = rows.begin; row < rows.end; ++row)
        for (int col = cols.begin; col < cols.end; ++col)
#pragma unroll 8
            for (int cta = 0; cta < params.ctas_per_bias; ++cta)
                total += sums[(cta * kBlock + row) * kBlock + col];
    store_dbias<Element>(params, (int64_t{bias} * queries + own_row) * keys + own_col,
                         total * params.dbias_factor);
}

template <class Element, int kHeadDim, OptionSet kOptions>
struct ShortBackward : ShortTile<Element, kHeadDim, kOptions, ShortBackwardParams, false> {
    using Base = ShortTile<Element, kHeadDim, kOptions, ShortBackwardParams, false>;
    using Base::kBlock, Base::kHasBias, Base::kRows, Base::kThreads, Base::params, Base::warp_row;
    using typename Base::Head, typename Base::Output, typename Base::Scores, typename Base::Tile;

    static constexpr tuning::ShortShape kTuning =
        row_of(tuning::kShort, {kHeadDim, kHeadDim}).backward;
    static constexpr int kStages = kTuning.stages;
    static constexpr int kCtasPerSm = kTuning.ctas_per_sm;
    static constexpr bool kChangesScores = changes_scores(kOptions);

    using PTile = SharedTile<Element, kBlock, kBlock>;
    struct SharedStorage {
        char stages[kStages][5][Tile::kBytes];
        char p[PTile::kBytes];
        char ds[PTile::kBytes];
        typename Base::BiasStorage bias;
    };
    static constexpr int kSharedBytes = sizeof(SharedStorage);
    static_assert(kSharedBytes <= tuning::short_shared_bytes({kHeadDim, kHeadDim}, true));

    struct None {};
    std::conditional_t<kHasBias, Scores, None> dbias;  // of this CTA

    FLASH_DEVICE explicit ShortBackward(const ShortBackwardParams& p) : Base(p) {
        if constexpr (kHasBias) dbias.clear();
    }

    static FLASH_DEVICE SharedStorage& storage() { return shared_storage<SharedStorage>(); }
    FLASH_DEVICE uint32_t stage(int n) const {
        return ptx::shared_address(storage().stages[n % kStages]);
    }
    static FLASH_DEVICE uint32_t sQ(uint32_t stage) { return stage; }
    static FLASH_DEVICE uint32_t sK(uint32_t stage) { return stage + Tile::kBytes; }
    static FLASH_DEVICE uint32_t sV(uint32_t stage) { return stage + 2 * Tile::kBytes; }
    static FLASH_DEVICE uint32_t sDO(uint32_t stage) { return stage + 3 * Tile::kBytes; }
    static FLASH_DEVICE uint32_t sO(uint32_t stage) { return stage + 4 * Tile::kBytes; }

    static FLASH_DEVICE uint32_t sP() { return ptx::shared_address(storage().p); }
    static FLASH_DEVICE uint32_t sDS() { return ptx::shared_address(storage().ds); }

    // P and dS of queries past the sequence stay zero.
    FLASH_DEVICE void begin() const {
        Base::load_bias(storage().bias);
        Scores zeros;
        zeros.clear();
        for (const uint32_t shared : {sP(), sDS()})
            store_to_shared<Element, PTile>(shared, zeros, warp_row());
    }

    FLASH_DEVICE void load(const Head& x, uint32_t stage) const {
        Base::load_queries(sQ(stage), params.q, x, params.head_dim);
        Base::load_keys(sK(stage), params.k, x, params.head_dim);
        Base::load_keys(sV(stage), params.v, x, params.head_dim_v);
        Base::load_queries(sDO(stage), params.dout, x, params.head_dim_v);
        Base::load_queries(sO(stage), params.out, x, params.head_dim_v);
    }

    // Of this lane's rows. Four lanes share a row, and its chunks.
    FLASH_DEVICE void load_statistics(RowStatistics (&of_rows)[2], const Head& x,
                                      uint32_t stage) const {
        const int64_t first = statistics_offset(params, x.sequence, x.head);
        for_each_row<kRows>([&](int, int i, int row_of_warp) {
            const int row = warp_row() + row_of_warp;
            const bool exists = row < x.sequence.seqlen_q;
            const float lse = exists ? params.lse[first + row] : -INFINITY;
            const float dlse = exists && params.dlse != nullptr ? params.dlse[first + row] : 0.f;
            float sum = 0.f;
#pragma unroll
            for (int chunk = lane_id() % 4; chunk < kHeadDim / 8; chunk += 4) {
                const int offset = Tile::offset(row, chunk);
                uint32_t o[4], d_o[4];
                ptx::ld_shared_v4(o, sO(stage) + offset);
                ptx::ld_shared_v4(d_o, sDO(stage) + offset);
                sum += dot<Element>({o[0], o[1], o[2], o[3]}, {d_o[0], d_o[1], d_o[2], d_o[3]});
            }
            of_rows[i] = statistics_of(quad_sum(sum), lse, dlse, params.inverse_ds_factor);
        });
    }

    // S becomes P.
    FLASH_DEVICE void exponentiate(Scores& s, const RowStatistics (&of_rows)[2]) const {
        const auto scale = exponent_scale<kOptions>(params);
        for_each_row<kRows>([&](int m, int i, int) {
            float lse = of_rows[i].lse_log2;
            const bool large = is_large_lse(lse);
            if (__any_sync(0xffffffff, large)) [[unlikely]] {
                const float max = finite_max(s.row_max(m, i));
                const float reference = large ? max : 0.f;
                float sum = 0.f;
                s.map_row(m, i, [&](float x) {
                    sum += ptx::ex2((x - reference) * scale);
                    return x - reference;
                });
                sum = quad_sum(sum);
                if (large) lse = log2f(sum);
            }
            s.map_row(m, i, [&](float x) { return ptx::ex2(x * scale - lse); });
        });
    }

    FLASH_DEVICE void compute(const Head& x, uint32_t stage) {
        if (warp_row() < params.seqlen_q) compute_queries(x, stage);
        __syncthreads();  // P and dS are complete; all warps have left K and V
        if (warp_row() < params.seqlen_k) compute_keys(x, stage);
    }

    // P and dS of the warp's queries, and dQ.
    FLASH_DEVICE void compute_queries(const Head& x, uint32_t stage) {
        RowStatistics of_rows[2];
        load_statistics(of_rows, x, stage);
        Scores rP, rdS;
        Base::score(rP, sQ(stage), sK(stage), storage().bias);
        exponentiate(rP, of_rows);
        rdS.clear();  // dP first
        gemm<Element, kHeadDim>(rdS, AFromRows<Tile>(sDO(stage), warp_row()),
                                BFromRows<Tile>(sV(stage)));
        for_each_row<kRows>([&](int m, int i, int) {
#pragma unroll
            for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
                for (int e = 2 * i; e < 2 * i + 2; ++e)
                    rdS.v[m][n][e] = rP.v[m][n][e] * (rdS.v[m][n][e] - of_rows[i].delta);
        });
        if constexpr (kHasBias) dbias.map([](float sum, float ds) { return sum + ds; }, rdS);

        store_to_shared<Element, PTile>(sP(), rP, warp_row());
        store_to_shared<Element, PTile>(sDS(), rdS, warp_row());
        Output rdQ;
        rdQ.clear();
        gemm<Element, kBlock>(rdQ, AFromRegisters<Element, Scores>{rdS},
                              BFromColumns<Tile>(sK(stage)));
        rdQ.scale(params.gradient_scale);
        Base::store(query_rows<Element>(params.dq, x.sequence, x.head, warp_row(), params.head_dim),
                    rdQ, sO(stage));
    }

    // dV and dK of the warp's keys.
    FLASH_DEVICE void compute_keys(const Head& x, uint32_t stage) const {
        Output rdX;
        // A loop, lest both are computed at once, for which there are no registers.
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const bool is_dv = i == 0;
            rdX.clear();
            gemm<Element, kBlock>(rdX, AFromColumns<PTile>(is_dv ? sP() : sDS(), 0, warp_id()),
                                  BFromColumns<Tile>(is_dv ? sDO(stage) : sQ(stage)));
            rdX.scale(is_dv ? 1.f : params.gradient_scale);
            const Sequence& s = x.sequence;
            Base::store(global_tile<Element>(is_dv ? params.dv : params.dk, s.batch, warp_row(),
                                             x.head, s.seqlen_k - warp_row(),
                                             is_dv ? params.head_dim_v : params.head_dim),
                        rdX, is_dv ? sV(stage) : sK(stage));
        }
    }

    // The sums of the walk.
    FLASH_DEVICE void end() const {
        if constexpr (kHasBias) {
            if (params.dbias == nullptr) return;
            const bool alone = params.ctas_per_bias == 1;
            const int bias = Base::bias();
            float* const sums =
                alone
                    ? reinterpret_cast<float*>(storage().bias)
                    : params.dbias_sums + (int64_t{bias} * params.ctas_per_bias + Base::number()) *
                                              (kBlock * kBlock);
            __syncthreads();  // all warps have read the bias
            store_rows(GlobalTile<float>{sums + warp_row() * kBlock, kBlock, kRows, kBlock}, dbias);
            if (!alone) return;
            __syncthreads();  // the sums of all warps are there
            for (int row = warp_id(); row < params.bias.sizes[2]; row += kThreads / 32)
                for (int col = lane_id(); col < params.bias.sizes[3]; col += 32)
                    sum_dbias<Element>(params, bias, row, col, sums);
        }
    }
};

template <class Element>
__global__ void __launch_bounds__(tuning::kShortThreads)
    short_dbias_kernel(const __grid_constant__ ShortBackwardParams params) {
    constexpr int kSums = tuning::kShortBlock * tuning::kShortBlock;
    const int queries = params.bias.sizes[2], keys = params.bias.sizes[3];
    const int blocks = ceil_div(queries * keys, tuning::kShortThreads);  // of a tile of the bias
    const int block = static_cast<int>(blockIdx.x) % blocks;
    const int index = block * tuning::kShortThreads + static_cast<int>(threadIdx.x);
    const int bias = static_cast<int>(blockIdx.x) / blocks;
    if (index >= queries * keys) return;
    sum_dbias<Element>(params, bias, index / keys, index % keys,
                       params.dbias_sums + int64_t{bias} * params.ctas_per_bias * kSums);
}

template <int kHeadDim, int kHeadDimV>
cudaError_t short_backward(const BackwardParams& params, const BackwardKernel& kernel,
                           cudaStream_t stream) {
    constexpr OptionSets kSets = row_of(tuning::kShort, {kHeadDim, kHeadDimV}).options;
    return dispatch_kernel<kSets>(params, kernel, [&](auto element, auto options) {
        using Element = decltype(element);
        const ShortBackwardParams p{{params, kernel.ctas_per_bias}, kernel.dbias_sums};
        const cudaError_t status =
            launch_short<ShortBackward<Element, kHeadDim, options.value>>(p, stream);
        if (status != cudaSuccess || kernel.dbias_sums == nullptr) return status;
        const int (&sizes)[4] = params.bias.sizes;
        return launch_kernel<short_dbias_kernel<Element>>(
            int64_t{sizes[0]} * sizes[1] * ceil_div(sizes[2] * sizes[3], tuning::kShortThreads),
            tuning::kShortThreads, 0, p, stream);
    });
}

}  // namespace flash_ext
