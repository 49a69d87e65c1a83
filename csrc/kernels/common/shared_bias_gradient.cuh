// Gradient of a bias that batch elements or heads share, in tiles of 16 bits (has_bias_tiles): a
// tile of dbias is the sum of one tile of dS of each of them, to which one tile of the bias was
// added.
//
// A CTA walks over the batch elements and heads of one tile of dbias, and keeps the bias in shared
// memory and the sum in registers. Several CTAs may share the walk: each stores its sum in the
// workspace, and a second kernel adds these in the order of the CTAs. No atomics: the same bits
// every time. lse and delta come from the workspace of the variant's backward.
//
//     for each batch element and head:
//         S^T  = K Q^T          P^T  = 2^(S^T scale + bias - lse)
//         dP^T = V dO^T         sum += P^T * (dP^T - delta)
//
// Shared memory: K, V [kBlockKV][D], Q, dO [kBlockQ][D], one of each; the bias [kBlockQ][kBlockKV];
// two stages of lse, delta and reference. In the end the sums [kBlockQ][kBlockKV].
//
// Barriers: K and Q of the next step are fetched beside dP^T, V and dO beside its S^T. Before a
// matmul its tiles have landed for all threads, after it all warps have left them.
#pragma once

#include "kernels/common/backward_tile.cuh"
#include "plan/tuning_backward.h"
#include "schedule/dbias_tiles.cuh"

namespace flash_ext {

// A tile of dbias from the warps' sums, through shared memory as [query][key]. Or, if others share
// it, to these sums in place of dbias.
template <class Tile>
FLASH_DEVICE void store_dbias_sums(const BackwardParams& params, typename Tile::Scores& sum,
                                   const DBiasTile& own, float* sums = nullptr) {
    static_assert(Tile::kSharedBytes >= Tile::kBlockQ * Tile::kBlockKV * int{sizeof(float)});
    auto* sSum = reinterpret_cast<float*>(dynamic_shared());
    const int first_key = warp_id() % Tile::kWarpsKV * Tile::kKeysPerWarp + lane_row();
    const int first_query = warp_id() / Tile::kWarpsKV * Tile::Scores::kCols + lane_col();
    sum.for_each([&](float x, int key, int query) {
        sSum[(first_query + query) * Tile::kBlockKV + first_key + key] = x;
    });
    __syncthreads();  // the sums of all warps are complete

    const Bias& bias = params.bias;
    const int queries = bias.sizes[2] == 1 ? 1 : Tile::kBlockQ;
    const int keys = bias.sizes[3] == 1 ? 1 : Tile::kBlockKV;
    for (int element = threadIdx.x; element < queries * keys; element += Tile::kThreads) {
        const int query = element / keys;
        const int key = element % keys;
        const int row = own.q_tile * Tile::kBlockQ + query;
        const int col = own.kv_tile * Tile::kBlockKV + key;
        if (row >= bias.sizes[2] || col >= bias.sizes[3]) continue;
        float total = 0.f;
        for (int i = query; i < Tile::kBlockQ; i += queries)
            for (int j = key; j < Tile::kBlockKV; j += keys) total += sSum[i * Tile::kBlockKV + j];
        const int64_t matrix = int64_t{own.batch} * bias.sizes[1] + own.head;
        const int64_t index = (matrix * bias.sizes[2] + row) * bias.sizes[3] + col;
        if (sums != nullptr) {
            sums[index] = total;
        } else {
            store_dbias<typename Tile::Element>(params, index, total * params.dbias_factor);
        }
    }
}

struct SharedBiasParams : BackwardParams {
    int ctas_per_dbias;
    float* dbias_sums;  // (ctas_per_dbias, dbias), if these are several
};

FLASH_HOST_DEVICE int64_t dbias_elements(const Bias& bias) {
    return int64_t{bias.sizes[0]} * bias.sizes[1] * bias.sizes[2] * bias.sizes[3];
}

// A place in the walk. Counted on, since to divide costs as much as a few elements.
struct SharedBiasStep {
    int left;  // steps, this one included
    int batch;
    int head;
};

template <class Tile>
struct SharedBiasGradient {
    using Walk = typename Tile::Walk;

    const SharedBiasParams& params;
    DBiasTile own;

    FLASH_DEVICE bool shares_heads() const { return params.bias.sizes[1] == 1; }
    FLASH_DEVICE int heads() const { return shares_heads() ? params.heads_q : 1; }
    FLASH_DEVICE int first_key() const { return own.kv_tile * Tile::kBlockKV; }

    FLASH_DEVICE Sequence sequence(const SharedBiasStep& step) const {
        return warp_uniform<true>(sequence_of<true>(params, step.batch));
    }
    FLASH_DEVICE Walk walk(const SharedBiasStep& step, int stage) const {
        Walk walk({own.q_tile, own.q_tile + 1}, step.head, 1);
        walk.stage = stage;
        return walk;
    }
    FLASH_DEVICE bool is_visible(const SharedBiasStep& step) const {
        return !VisibleTiles::of_queries(mask_of(params, sequence(step)),
                                         tile_interval(own.q_tile, Tile::kBlockQ), Tile::kBlockKV)
                    .within({own.kv_tile, own.kv_tile + 1})
                    .empty();
    }
    FLASH_DEVICE SharedBiasStep first(int n, int end) const {
        return {end - n, params.bias.sizes[0] == 1 ? n / heads() : own.batch,
                shares_heads() ? n % heads() : own.head};
    }
    FLASH_DEVICE SharedBiasStep after(SharedBiasStep step) const {
        --step.left;
        if (!shares_heads()) {
            ++step.batch;
        } else if (++step.head == params.heads_q) {
            step.head = 0;
            ++step.batch;
        }
        return step;
    }
    // This step or the first one after it of which the mask shows the tile.
    FLASH_DEVICE SharedBiasStep visible(SharedBiasStep step) const {
        while (step.left > 0 && !is_visible(step)) step = after(step);
        return step;
    }

    FLASH_DEVICE void load_k_q(const Tile& cta, const Walk& walk) const {
        cta.load_k(first_key());
        cta.load_q(walk);
        cta.load_statistics(walk);
    }
    FLASH_DEVICE void load_v_do(const Tile& cta, const Walk& walk) const {
        cta.load_v(first_key());
        cta.load_do(walk);
    }

    // sum += dS of steps n to end - 1.
    FLASH_DEVICE void add(typename Tile::Scores& sum, int n, int end) const {
        const int group = params.heads_q / params.heads_k;
        const auto tile = [&](const SharedBiasStep& step) {
            return Tile(params, sequence(step), step.head / group);
        };
        SharedBiasStep step = visible(first(n, end));
        if (step.left == 0) return;
        const Tile begin = tile(step);
        begin.load_bias(walk(step, 0), first_key());
        load_k_q(begin, walk(step, 0));
        ptx::cp_async_commit();
        load_v_do(begin, walk(step, 0));
        ptx::cp_async_commit();
        for (int stage = 0; step.left > 0; stage ^= 1) {
            const SharedBiasStep next = visible(after(step));
            typename Tile::Scores rP, rdS;
            ptx::cp_async_wait<1>();
            __syncthreads();  // K, Q and the statistics have landed
            const Tile cta(params, sequence(step), 0);
            cta.compute_p(rP, walk(step, stage), first_key());
            __syncthreads();  // all warps have left K and Q
            if (next.left > 0) load_k_q(tile(next), walk(next, stage ^ 1));
            ptx::cp_async_commit();
            ptx::cp_async_wait<1>();
            __syncthreads();  // V and dO have landed
            cta.template compute_ds<false>(rdS, rP, walk(step, stage), first_key());
            sum.map([](float x, float ds) { return x + ds; }, rdS);
            __syncthreads();  // all warps have left V and dO
            if (next.left > 0) load_v_do(tile(next), walk(next, stage ^ 1));
            ptx::cp_async_commit();
            step = next;
        }
    }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    shared_bias_gradient_kernel(const __grid_constant__ SharedBiasParams params) {
    if (!may_run<Tile>()) return __trap();
    const int ctas = params.ctas_per_dbias;
    const auto own = [&](int block) {
        return dbias_tile(params.bias, block / ctas, Tile::kBlockQ, Tile::kBlockKV);
    };
    const SharedBiasGradient<Tile> gradient{params, own(blockIdx.x)};
    const int count = (params.bias.sizes[0] == 1 ? params.batch : 1) * gradient.heads();
    const int cta = blockIdx.x % ctas;
    typename Tile::Scores sum;
    sum.clear();
    gradient.add(sum, static_cast<int>(int64_t{count} * cta / ctas),
                 static_cast<int>(int64_t{count} * (cta + 1) / ctas));
    // Recomputed: over the loop they would take registers.
    const int block = ptx::not_hoisted(blockIdx.x);
    store_dbias_sums<Tile>(
        params, sum, own(block),
        ctas == 1 ? nullptr : params.dbias_sums + block % ctas * dbias_elements(params.bias));
}

inline constexpr int kDBiasThreads = 256;

// dbias from the sums of the CTAs, in their order.
template <class Element>
__global__ void __launch_bounds__(kDBiasThreads)
    shared_bias_sum_kernel(const __grid_constant__ SharedBiasParams params) {
    const int64_t elements = dbias_elements(params.bias);
    const int64_t index = int64_t{blockIdx.x} * kDBiasThreads + threadIdx.x;
    if (index >= elements) return;
    float sum = 0.f;
#pragma unroll 8
    for (int cta = 0; cta < params.ctas_per_dbias; ++cta)
        sum += params.dbias_sums[cta * elements + index];
    store_dbias<Element>(params, index, sum * params.dbias_factor);
}

template <class Element, int kHeadDim, bool kSmall>
using SharedBiasTile =
    BackwardTile<Element, kHeadDim, kHeadDim, tuning::kFa2Bias,
                 kSmall ? tuning::kSmallSharedBiasTile : tuning::kSharedBiasTile>;

inline cudaError_t shared_bias_gradient(const BackwardParams& call, const BackwardKernel& kernel,
                                        cudaStream_t stream) {
    const SharedBiasParams params{call, kernel.ctas_per_dbias, kernel.dbias_sums};
    const auto* row =
        tuning::find_row(tuning::kSharedBiasGradient, {params.head_dim, params.head_dim_v});
    if (row == nullptr) return kNoKernel;
    return dispatch_head_dims<tuning::kSharedBiasGradient>(row->head_dims, [&](auto dim, auto) {
        return dispatch_element(params.element_type, [&](auto element) {
            using Element = decltype(element);
            using Large = SharedBiasTile<Element, dim.value, false>;
            using Small = SharedBiasTile<Element, dim.value, true>;
            const cudaError_t status = launch_fitting<Large, Small>(kernel.gpu, [&](auto chosen) {
                using Tile = typename decltype(chosen)::type;
                const int64_t tiles = dbias_tile_count(params.bias, Tile::kBlockQ, Tile::kBlockKV);
                return launch_kernel<shared_bias_gradient_kernel<Tile>>(
                    tiles * params.ctas_per_dbias, Tile::kThreads, Tile::kSharedBytes, params,
                    stream);
            });
            if (status != cudaSuccess || params.ctas_per_dbias == 1) return status;
            return launch_kernel<shared_bias_sum_kernel<Element>>(
                ceil_div(dbias_elements(params.bias), int64_t{kDBiasThreads}), kDBiasThreads, 0,
                params, stream);
        });
    });
}

}  // namespace flash_ext
