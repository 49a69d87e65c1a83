// Gradient of the bias for Hopper: dbias = dS, summed over the dimensions in which the bias is
// broadcast (size 1). It reads lse and delta from the workspace of the backward, whichever variant
// ran it. kernels/common/bias_gradient.cuh does the same on other GPUs, and with other options.
//
// A cluster of 1 to 8 CTAs owns a tile of dbias and goes over the tiles of scores that it is summed
// over, its walk (schedule/dbias_tiles.cuh): each CTA has a run of it. So few tiles of dbias fill
// the GPU, without atomics or memory for partial sums, and the result is the same bits every time.
// The warpgroups of a CTA have roles:
//
//   producer       two threads: Q and dO with lse and delta, and the description of the step; K
//                  and V
//   two consumers  each owns 64 queries of the tile, or, of tiles of 64 queries, every second step;
//                  rows are queries
//
// A consumer's step, in the order in which it starts the operations:
//
//     S    = Q K^T                       wgmma, asynchronous
//     dP   = dO V^T                      wgmma, asynchronous
//     P    = 2^(S scale + bias - lse)    when S is complete, while dP runs
//     sum += P * (dP - delta)            when dP is complete, beside the other consumer's matmuls
//
// The bias of the tile is the same for all steps. Each consumer thread loads its own elements of it
// once, from any address, and keeps them in shared memory in float32 in fragment order: no thread
// reads what another one has written, so that needs no barrier. The elements are those given, and
// not times log2(e): then S scale + bias has the bits that the forward and large_lse.cuh have.
//
// At the end a thread's sums take the place of its bias. The CTAs of the cluster share the elements
// and add each over the CTAs, through distributed shared memory, in the order of their ranks.
//
// What limits it at head dims from 64 on is the L2: a step loads four tiles and reuses none.
//
// Shared memory: a pipeline of stages, each with Q, dO, K, V, lse, delta and the step's
// description; the bias.
//
//   barrier               arrivals per phase                   who waits
//   full(stages)          2: producers; and TMA's bytes,       consumers, before the matmuls
//                         unless there are no more steps
//   empty(stages)         256: each consumer thread, when its  producers, before the next loads
//                         matmuls are complete and it has
//                         read lse and delta
//   sums (named)          256: consumers of a single CTA       consumers, before they add, and end
//
// Of tiles of 64 queries these are the 128 threads of the consumer whose step it is. At the end all
// threads of a cluster wait for each other twice, by its hardware barrier: before the consumers add
// over the CTAs, and before they end.
#pragma once

#include "kernels/fa3/backward_common.cuh"
#include "kernels/fa3/cta.cuh"
#include "plan/launchers.h"
#include "plan/tuning_backward.h"
#include "ptx/cluster.cuh"
#include "schedule/dbias_tiles.cuh"
#include "schedule/split_kv.cuh"
#include "tile/tma_load.cuh"

namespace flash_ext {

struct Fa3BiasGradientParams : Fa3BackwardMaps {
    int ctas;  // of a cluster
};

template <class Element, int kHeadDim, int kHeadDimV, tuning::Fa3BiasGradientShape kTuning>
struct Fa3BiasGradient {
    using Params = Fa3BiasGradientParams;
    static constexpr int kBlockQ = kTuning.block_q;
    static constexpr int kBlockKV = kTuning.block_kv;
    static constexpr int kConsumers = 2;
    static constexpr int kConsumerThreads = kConsumers * 128;
    static constexpr int kSumsBarrier = 1;
    static constexpr int kThreads = 128 + kConsumerThreads;
    // Of tiles of 64 queries a consumer takes every second step.
    static constexpr bool kAlternate = kBlockQ == 64;
    static constexpr int kStages = kTuning.stages;
    static_assert(kBlockQ == 64 || kBlockQ == 128);
    static_assert(!kAlternate || kStages % 2 == 0);
    static constexpr int kProducerRegisters = 40;
    static constexpr int kConsumerRegisters = 232;

    using QTile = SharedTile<Element, kBlockQ, kHeadDim>;
    using DOTile = SharedTile<Element, kBlockQ, kHeadDimV>;
    using KTile = SharedTile<Element, kBlockKV, kHeadDim>;
    using VTile = SharedTile<Element, kBlockKV, kHeadDimV>;
    static constexpr int kDO = QTile::kBytes;  // where the tiles of a stage are
    static constexpr int kK = kDO + DOTile::kBytes;
    static constexpr int kV = kK + KTile::kBytes;
    using Stages = Pipeline<kStages, kV + VTile::kBytes>;
    using State = typename Stages::State;
    using Scores = RegisterTile<16, kBlockKV>;

    enum StepKind : int {
        kEnd = -1,  // there are no more
        kPlain = 0,
        kMasked = 1,  // not all see each other, or a row of the call has a reference
    };
    struct Step {
        int kind;
        int first_query, first_key;
        int seqlen_q, seqlen_k;
        int row_group;  // of its first row, see plan/workspace_rows.cuh
    };
    struct SharedStorage {
        typename Stages::Stages stages;
        float4 bias[Scores::kN][kConsumerThreads];  // at the end the sums
        float lse[kStages][kBlockQ];
        float minus_delta[kStages][kBlockQ];
        Step steps[kStages];
        DBiasHead heads[2];  // of each producer
        typename Stages::Barriers barriers;
    };

    const Params& params;
    SharedStorage& storage = shared_storage<SharedStorage>();
    Stages pipeline{storage.stages, storage.barriers};

    FLASH_DEVICE explicit Fa3BiasGradient(const Params& p) : params(p) {}

    FLASH_DEVICE void init() const { pipeline.init(kAlternate ? 128 : kConsumerThreads, 2); }
    FLASH_DEVICE void begin() const {}
    FLASH_DEVICE void produce_by_warps() const {}
    // The producers have no share of the sums.
    FLASH_DEVICE void end() const {
        if (threadIdx.x >= 128) return;
        sync_cluster();
        sync_cluster();
    }
    // The consumers of all CTAs wait for each other. A warp arrives as one, also if its lanes come
    // from different places.
    FLASH_DEVICE void sync_cluster() const {
        __syncwarp();
        if (params.ctas > 1) {
            ptx::cluster_sync();
        } else if (threadIdx.x >= 128) {
            ptx::barrier_sync(kSumsBarrier, kConsumerThreads);
        }
    }

    FLASH_DEVICE DBiasTile own() const {
        return dbias_tile(params.bias, static_cast<int>(blockIdx.x) / params.ctas, kBlockQ,
                          kBlockKV);
    }

    // --- Producers ---

    template <class Visit>
    FLASH_DEVICE void for_each_step(DBiasHead& now, Visit visit) const {
        const int cta = static_cast<int>(blockIdx.x) % params.ctas;
        DBiasWalk<kBlockQ, kBlockKV>{params, now, cta, params.ctas}.for_each(own(), visit);
    }

    // After the last step. With alternating consumers one for each.
    FLASH_DEVICE void produce_end(State& s, bool describes) const {
        for (int i = 0; i < (kAlternate ? kConsumers : 1); ++i, s.advance()) {
            pipeline.producer_acquire(s);
            if (describes) storage.steps[s.stage].kind = kEnd;
            pipeline.producer_commit(s);
        }
    }

    FLASH_DEVICE void produce_queries() const {
        State s;
        const bool large_lse = params.large_lse.is_raised();
        DBiasHead& now = storage.heads[0];
        const Sequence& sequence = now.sequence;
        for_each_step(now, [&](int first_query, int first_key) {
            const BandMask mask = mask_of(params, sequence);
            const int group = row_group(params, sequence, now.head) + first_query / kWorkspaceRows;
            // Of varlen sequences the bias may have elements, of any value, past the last query.
            const bool full =
                mask.is_full({first_query, first_query + kBlockQ},
                             {first_key, first_key + kBlockKV}) &&
                (first_query + kBlockQ <= sequence.seqlen_q || params.cu_seqlens_q == nullptr);
            pipeline.producer_acquire(s);
            storage.steps[s.stage] = {large_lse || !full ? kMasked : kPlain,
                                      first_query,
                                      first_key,
                                      sequence.seqlen_q,
                                      sequence.seqlen_k,
                                      group};
            using Statistics = RowStatisticsLoad<float, kBlockQ>;
            pipeline.producer_expect(s, kK + 2 * Statistics::kBytes);
            const uint32_t stage = pipeline.stage(s);
            const uint32_t full_barrier = pipeline.full(s);
            query_tensor_rows<Element>(params.q, sequence, now.head)
                .template load<QTile>(params.q_map, stage, full_barrier, first_query);
            query_tensor_rows<Element>(params.dout, sequence, now.head)
                .template load<DOTile>(params.do_map, stage + kDO, full_barrier, first_query);
            const int stored = stored_rows<kBlockQ>(sequence, first_query);
            const auto load = [&](float (&target)[kBlockQ], const float* source) {
                Statistics{target, source + int64_t{group} * kWorkspaceRows,
                           source + params.padding_row, stored}
                    .load(full_barrier);
            };
            load(storage.lse[s.stage], params.lse_log2);
            load(storage.minus_delta[s.stage], params.minus_delta);
            s.advance();
        });
        produce_end(s, /*describes=*/true);
    }

    FLASH_DEVICE void produce_keys() const {
        State s;
        DBiasHead& now = storage.heads[1];
        for_each_step(now, [&](int, int first_key) {
            const KeyRows keys = key_rows(params, now.sequence);
            const int head_k = now.head / (params.heads_q / params.heads_k);
            pipeline.producer_acquire(s);
            pipeline.producer_expect(s, KTile::kBytes + VTile::kBytes);
            const uint32_t stage = pipeline.stage(s);
            keys.tensor_rows<Element>(params.k, head_k)
                .template load<KTile>(params.k_map, stage + kK, pipeline.full(s), first_key);
            keys.tensor_rows<Element>(params.v, head_k)
                .template load<VTile>(params.v_map, stage + kV, pipeline.full(s), first_key);
            s.advance();
        });
        produce_end(s, /*describes=*/false);
    }

    FLASH_DEVICE void produce() const {
        if (warp_id() == 0) produce_queries();
        if (warp_id() == 1) produce_keys();
    }

    // --- Consumers ---

    FLASH_DEVICE int consumer_thread() const { return static_cast<int>(threadIdx.x) - 128; }
    FLASH_DEVICE int consumer() const { return ptx::warp_uniform(threadIdx.x / 128) - 1; }
    // The first row in the tile of the threads' warp.
    static FLASH_DEVICE int warp_row(int consumer_thread) {
        return consumer_thread / 32 * 16 % kBlockQ;
    }

    // This thread's elements of the bias. What is outside it is hidden.
    template <class BiasElement>
    FLASH_DEVICE void load_bias() const {
        const Bias& bias = params.bias;
        const DBiasTile tile = own();
        const int first_row = tile.q_tile * kBlockQ + warp_row(consumer_thread()) + lane_row();
        const int first_col = tile.kv_tile * kBlockKV + lane_col();
        const auto* first = static_cast<const BiasElement*>(bias.data) +
                            tile.batch * bias.strides[0] + tile.head * bias.strides[1] +
                            first_row * bias.strides[2] + first_col * bias.strides[3];
        const int rows = bias.sizes[2] == 1 ? kBlockQ : bias.sizes[2] - first_row;
        const int cols = bias.sizes[3] == 1 ? kBlockKV : bias.sizes[3] - first_col;
#pragma unroll 4
        for (int n = 0; n < Scores::kN; ++n) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i / 2 * 8;
                const int col = 8 * n + i % 2;
                x[i] = row < rows && col < cols
                           ? ptx::to_float(first[row * bias.strides[2] + col * bias.strides[3]])
                           : -INFINITY;
            }
            storage.bias[n][consumer_thread()] = {x[0], x[1], x[2], x[3]};
        }
    }

    // Operands in the first stage.
    struct Operands {
        KMajorBy32Bits<QTile> q;
        KMajorBy32Bits<DOTile> dout;
        KMajorBy32Bits<KTile> k;
        KMajorBy32Bits<VTile> v;

        FLASH_DEVICE Operands(uint32_t stages, int first_row)
            : q(stages, first_row), dout(stages + kDO, first_row), k(stages + kK), v(stages + kV) {}
    };

    FLASH_DEVICE void issue(Scores& rS, Scores& rdP, Operands x, const State& s) const {
        const uint32_t bytes = s.stage * Stages::kStageBytes;
        x.q.move(bytes);
        x.dout.move(bytes);
        x.k.move(bytes);
        x.v.move(bytes);
        gemm_async<Element, kHeadDim>(rS, x.q, x.k, false);
        gemm_async<Element, kHeadDimV>(rdP, x.dout, x.v, false);
    }

    FLASH_DEVICE void probabilities(Scores& rS, const State& s, int kind, int row) const {
        const float scale = params.scale_log2;
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) {
            const float4 bias = storage.bias[n][consumer_thread()];
            const float of_bias[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = rS.v[0][n][i];
                // Rounded as in ScoreFunction.
                x = __fmaf_rz(kLog2e, of_bias[i], x * scale);
            }
        }
        if (kind == kMasked) [[unlikely]]
            mask(rS, storage.steps[s.stage], row);
        exponentiate<Rows::kQueries>(rS, storage.lse[s.stage] + row, Unscaled{});
    }
    FLASH_DEVICE void mask(Scores& rS, const Step& step, int row) const {
        if (params.large_lse.is_raised())
            subtract_references<Rows::kQueries>(
                rS, params.reference + int64_t{step.row_group} * kWorkspaceRows + row);
        Sequence sequence{};
        sequence.seqlen_q = step.seqlen_q;
        sequence.seqlen_k = step.seqlen_k;
        const BandMask mask = mask_of(params, sequence);
        mask_scores(rS, step.first_key, [&](int i) {
            const int query = step.first_query + row + i;
            return query < step.seqlen_q ? mask.key_range(query) : Interval{0, 0};
        });
    }

    // Sums over the rows and columns of this warp's part of the tile for which the bias has one
    // element: they end in its first row or column.
    FLASH_DEVICE void sum_broadcast(Scores& sum) const {
        if (params.bias.sizes[3] == 1) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float total = 0.f;
                sum.for_each_pair_of_row(0, i, [&](float x, float y, int) { total += x + y; });
                sum.v[0][0][2 * i] = quad_sum(total);
            }
        }
        if (params.bias.sizes[2] == 1) {
#pragma unroll
            for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float total = sum.v[0][n][e] + sum.v[0][n][2 + e];
#pragma unroll
                    for (int lanes = 4; lanes < 32; lanes *= 2)
                        total += __shfl_xor_sync(0xffffffff, total, lanes);
                    sum.v[0][n][e] = total;
                }
        }
    }

    FLASH_DEVICE void store(int64_t matrix, int row, int col, float x) const {
        const Bias& bias = params.bias;
        if (row >= bias.sizes[2] || col >= bias.sizes[3]) return;
        const int64_t index = (matrix * bias.sizes[2] + row) * bias.sizes[3] + col;
        store_dbias<Element>(params, index, x * params.dbias_factor);
    }

    // Four elements of dbias: of the fragment of column block n and thread `thread`, over the CTAs,
    // and within each over the parts `step` threads apart, which are sums of the same elements.
    FLASH_DEVICE float4 sum_over_ctas(int n, int thread, int step) const {
        float4 total{};
#pragma unroll 1
        for (int part = thread; part < kConsumerThreads; part += step) {
            const uint32_t address = ptx::shared_address(&storage.bias[n][part]);
            float4 x[kMaxClusterSplits];
#pragma unroll
            for (int i = 0; i < kMaxClusterSplits; ++i) {  // all loads before their first use
                x[i] = {};
                if (i < params.ctas) ptx::ld_cluster(x[i], ptx::address_in_cta(address, i));
            }
#pragma unroll
            for (int i = 0; i < kMaxClusterSplits; ++i) {
                total.x += x[i].x;
                total.y += x[i].y;
                total.z += x[i].z;
                total.w += x[i].w;
            }
        }
        return total;
    }

    // This CTA's share of the tile of dbias.
    FLASH_DEVICE void store_share() const {
        const Bias& bias = params.bias;
        const DBiasTile tile = own();
        const int64_t matrix = int64_t{tile.batch} * bias.sizes[1] + tile.head;
        const int blocks = bias.sizes[3] == 1 ? 1 : Scores::kN;
        const int threads = bias.sizes[2] == 1 ? 32 : 2 * kBlockQ;  // that have different elements
        const int cta = static_cast<int>(blockIdx.x) % params.ctas;
        for (int i = cta * kConsumerThreads + consumer_thread(); i < blocks * threads;
             i += params.ctas * kConsumerThreads) {
            const int n = i / threads;
            const int thread = i % threads;
            const float4 x = sum_over_ctas(n, thread, threads);
            const int row = tile.q_tile * kBlockQ + warp_row(thread) + thread % 32 / 4;
            const int col = tile.kv_tile * kBlockKV + 8 * n + thread % 4 * 2;
            store(matrix, row, col, x.x);
            store(matrix, row, col + 1, x.y);
            store(matrix, row + 8, col, x.z);
            store(matrix, row + 8, col + 1, x.w);
        }
    }

    FLASH_DEVICE void consume() const {
        if (params.bias.type == BiasType::kFloat32) {
            load_bias<float>();
        } else {
            load_bias<Element>();
        }
        const int row = warp_row(consumer_thread());
        const Operands operands(pipeline.stages, kAlternate ? 0 : consumer() * 64);
        Scores rS, rdP, sum;
        sum.clear();
        State s;
        if (kAlternate && consumer() == 1) s.advance();
        while (true) {
            pipeline.consumer_wait(s);
            const int kind = ptx::warp_uniform(storage.steps[s.stage].kind);
            if (kind == kEnd) break;
            issue(rS, rdP, operands, s);
            finish<1>(rS);
            probabilities(rS, s, kind, row);
            finish(rdP);
            float minus_delta[2];
            for_each_row<16>(
                [&](int, int i, int r) { minus_delta[i] = storage.minus_delta[s.stage][row + r]; });
            pipeline.consumer_release(s);
#pragma unroll
            for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sum.v[0][n][i] += rS.v[0][n][i] * (rdP.v[0][n][i] + minus_delta[i / 2]);
            s.advance();
            if constexpr (kAlternate) s.advance();
        }
        sum_broadcast(sum);
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) {
            const float (&x)[4] = sum.v[0][n];
            storage.bias[n][consumer_thread()] = {x[0], x[1], x[2], x[3]};
        }
        sync_cluster();  // the sums of all CTAs are complete
        store_share();
        sync_cluster();  // no CTA ends before others have read its sums
    }
};

template <class Kernel>
cudaError_t launch_fa3_bias_gradient(const BackwardParams& call, int ctas, cudaStream_t stream) {
    Fa3BiasGradientParams params{{call}, ctas};
    const int64_t tiles = dbias_tile_count(call.bias, Kernel::kBlockQ, Kernel::kBlockKV);
    const cudaError_t status = params.encode<Kernel>();
    if (status != cudaSuccess) return status;
    return launch_kernel<fa3_kernel<Kernel>>(tiles * ctas, Kernel::kThreads,
                                             sizeof(typename Kernel::SharedStorage), params, stream,
                                             {.cluster = ctas});
}

template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_bias_gradient(const BackwardParams& params, const BackwardKernel& kernel,
                              cudaStream_t stream) {
    constexpr auto kRow = row_of(tuning::kFa3BiasGradient, {kHeadDim, kHeadDimV});
    return dispatch_element(params.element_type, [&](auto element) {
        return dispatch<false, true>(kernel.bias_gradient->small_tiles, [&](auto small) {
            using Kernel = Fa3BiasGradient<decltype(element), kHeadDim, kHeadDimV,
                                           small.value ? kRow.small : kRow.usual>;
            return launch_fa3_bias_gradient<Kernel>(params, kernel.bias_gradient->ctas, stream);
        });
    });
}

}  // namespace flash_ext
