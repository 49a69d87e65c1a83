// FlashAttention-3 backward for wide heads, first kernel: dK and dV (dKdV). For Hopper.
//
// At these head dims dK and dV of 64 keys fill the registers. A KV tile cannot be larger, and
// adding dQ in HBM would take longer than the matmuls: 4 D bytes for every 64 keys and query. So dQ
// has a kernel of its own. Where there is a workspace for dS, this kernel stores dS there, and dQ
// is one matmul (backward_dq_gemm.cuh). Otherwise S and dP are computed again (backward_dq.cuh):
// seven matmuls instead of five. In both cases nothing is summed in HBM: results are deterministic.
//
// The grid has at most one CTA per SM. Each CTA fetches KV tiles of 64 keys until none is left; its
// inner loop goes over the Q tiles that see the KV tile, for each query head of the group.
// Everything is computed transposed: rows are keys. Its warpgroups have roles:
//
//   producer   three threads: Q and dO with lse and delta; K and V; the KV tiles, fetched and
//              described
//   dV         S^T = K Q^T, P^T = 2^(S^T scale - lse), and dV += P^T dO in registers
//   dK         dP^T = V dO^T, dS^T = P^T * (dP^T - delta), and dK += dS^T Q in registers
//
// P^T goes from consumer dV to consumer dK through shared memory, in float32 and in fragment order.
// An iteration, in the order in which operations are started; primes belong to the next Q tile:
//
//     consumer dV                                consumer dK
//     dV   += P^T dO     wgmma, asynchronous     dK    += dS^T Q     wgmma, asynchronous
//     S'^T  = K Q'^T     wgmma, asynchronous     dP'^T  = V dO'^T    wgmma, asynchronous
//     P'                 when both are complete  dS'                 when both are complete and P'
//                                                                    has arrived
//
// They use ping-pong: the arithmetic of one runs beside the matmuls of the other.
//
// Shared memory: K and V; a pool of pairs of Q and dO tiles (PoolState) with lse and delta;
// pipelines of P^T and of work tiles (KeyTile).
//
//   barrier             arrivals per phase                   who waits
//   full(pool, K, V)    1: its producer; and TMA's bytes     consumers, before the matmul
//   empty(pool)         256: each consumer thread, after     its producer, before the next load
//                       all that reads it
//   empty(K)            4: each warp of consumer dV, after   producer of K and V
//                       the last S of the tile
//   empty(V)            4: each warp of consumer dK, after   producer of K and V
//                       the last dP of the tile
//   full(work tiles)    1: producer of KV tiles              other producers, consumers
//   empty(work tiles)   2: other producers; 256: each        producer of KV tiles, before it
//                       consumer thread, after the tile      describes another
//   fetch               1: producer of Q and dO, before the  producer of KV tiles, before it
//                       last loads of a tile                 fetches the next
//   full(P)             128: each thread of consumer dV      consumer dK, before dS
//   empty(P)            128: each thread of consumer dK      consumer dV, before it stores a P
//   ping-pong (named)   128: the other consumer, when its    a consumer (its 128 threads count
//                       matmuls are started                  too), before it starts its own
#pragma once

#include <type_traits>

#include "kernels/fa3/backward_common.cuh"
#include "kernels/fa3/cta.cuh"
#include "plan/tuning_backward.h"
#include "plan/workspace_rows.cuh"

namespace flash_ext {

// The state of an iteration in the pool, whose stages are pairs for Q and dO. The dO of an
// iteration is released before its Q, and the Q of a later iteration is needed before its dO. So in
// every other pass through the pairs Q and dO exchange their stages.
template <int kPairs>
struct PoolState : PipelineState<kPairs> {
    using Stage = PipelineState<2 * kPairs>;  // of the pool
    FLASH_DEVICE Stage q() const { return {2 * this->stage + this->phase, this->phase}; }
    FLASH_DEVICE Stage dout() const { return {2 * this->stage + (this->phase ^ 1), this->phase}; }
};

// A tile of dS^T: 64 keys, 64 queries.
template <class Element>
using DSTile = SharedTile<Element, 64, 64>;

// The dS workspace, from which backward_dq_gemm.cuh reads dS^T: for some of the heads (of K and V,
// of all batches, flattened), in tiles that are swizzled as in shared memory.
struct DSWorkspace {
    char* data = nullptr;
    int first_head = 0;
    int heads = 0;
    DSWorkspaceTiles tiles;

    template <class Element>
    FLASH_DEVICE char* tile(const AttentionParams& params, int batch, int head_q, int q_tile,
                            int kv_tile) const {
        const int group = params.heads_q / params.heads_k;
        const int head = batch * params.heads_q + head_q - first_head * group;
        return data + (head * tiles.first(tiles.q_tiles) + tiles.first(q_tile) + kv_tile) *
                          DSTile<Element>::kBytes;
    }
};
static_assert(DSTile<__half>::kBytes == DSWorkspaceTiles::kElements * sizeof(__half));

// Of each of the kernels for wide heads.
struct Fa3BackwardWideParams : Fa3BackwardMaps {
    DynamicPersistentScheduler scheduler;
    DSWorkspace ds_workspace;
};

// kStoresDS: does it store dS for the dQ GEMM? With options it decides for each call.
template <class Element, int kHeadDim, int kHeadDimV, OptionSet kOptions, int kPairs,
          bool kStoresDS>
struct Fa3BackwardDKDV : Fa3Cta<Fa3BackwardWideParams, KeyTile> {
    static constexpr int kBlockQ = tuning::kFa3BackwardWideBlock;
    static constexpr int kBlockKV = tuning::kFa3BackwardWideBlock;
    static constexpr int kProducerRegisters = 40;
    static constexpr int kConsumerRegisters = 232;

    using QTile = SharedTile<Element, kBlockQ, kHeadDim>;
    using DOTile = SharedTile<Element, kBlockQ, kHeadDimV>;
    using KTile = SharedTile<Element, kBlockKV, kHeadDim>;
    using VTile = SharedTile<Element, kBlockKV, kHeadDimV>;
    using Pool = Pipeline<2 * kPairs, max_of(QTile::kBytes, DOTile::kBytes)>;
    using KPipeline = Pipeline<1, KTile::kBytes>;
    using VPipeline = Pipeline<1, VTile::kBytes>;
    using PPipeline = Pipeline<2, kBlockKV * kBlockQ * 4>;  // from consumer dV to consumer dK
    using PState = typename PPipeline::State;
    using IterationState = PoolState<kPairs>;
    using PoolStage = typename Pool::State;
    using Scores = RegisterTile<16, kBlockQ>;
    using Operand = RegisterOperand<kBlockQ>;
    using Order = PingPong<kConsumers>;

    struct SharedStorage {
        typename KPipeline::Stages k;
        typename VPipeline::Stages v;
        typename Pool::Stages pool;
        typename PPipeline::Stages p;
        float statistics[Pool::kStages][kBlockQ];  // lse with Q, delta with dO
        typename Pool::Barriers pool_barriers;
        typename KPipeline::Barriers k_barriers;
        typename VPipeline::Barriers v_barriers;
        typename PPipeline::Barriers p_barriers;
        WorkTiles::Storage work_tiles;
    };

    static constexpr int kTileCount = 0;
    static cudaError_t encode(Params& params) { return params.encode<Fa3BackwardDKDV>(); }

    SharedStorage& storage = shared_storage<SharedStorage>();
    // First row of this thread's warp within the KV tile.
    int warp_key = ptx::warp_uniform(threadIdx.x / 32) % 4 * 16;
    Pool pool{storage.pool, storage.pool_barriers};
    KPipeline k_pipeline{storage.k, storage.k_barriers};
    VPipeline v_pipeline{storage.v, storage.v_barriers};
    PPipeline p_pipeline{storage.p, storage.p_barriers};

    FLASH_DEVICE explicit Fa3BackwardDKDV(const Params& p)
        : Fa3Cta(p, shared_storage<SharedStorage>().work_tiles) {}

    FLASH_DEVICE void init() const {
        pool.init(2 * 128);  // all threads, since all read lse or delta
        k_pipeline.init(4);
        v_pipeline.init(4);
        init_work_tiles(2);  // which load
        p_pipeline.init(128, 128);
    }

    FLASH_DEVICE void begin() const {
        ptx::wait_for_grid_before();  // lse and delta are complete
        ptx::launch_dependents();
    }

    FLASH_DEVICE bool stores_ds() const {
        return kStoresDS && (!changes_scores(kOptions) || params.ds_workspace.heads > 0);
    }

    FLASH_DEVICE void produce_tiles() const {
        fetch_work_tiles([&](KeyTile& tile, int linear) {
            WorkTile work = work_tile(linear, params.tile_order);
            if (stores_ds()) {
                const int flat_head = params.ds_workspace.first_head + work.head;
                work.head = flat_head % params.heads_k;
                work.batch = flat_head / params.heads_k;
            }
            describe<Fa3BackwardDKDV>(tile, params, work);
            tile.large_lse = params.large_lse.is_raised();
        });
    }

    FLASH_DEVICE void produce_q_do() const {
        IterationState at;
        work_tiles.for_each([&](const KeyTile& tile) {
            if (tile.q_tiles.empty()) {
                work_tiles.allow_fetch();
                return;
            }
            const Sequence& s = tile.sequence;
            for (int left = group() - 1; left >= 0; --left) {
                const int head = (tile.head + 1) * group() - 1 - left;
                const TensorRows q_rows = query_tensor_rows<Element>(params.q, s, head);
                const TensorRows do_rows = query_tensor_rows<Element>(params.dout, s, head);
                const int64_t statistics = workspace_row(params, s, head, 0);
                for (int i = tile.q_tiles.begin; i < tile.q_tiles.end; ++i) {
                    if (left == 0 && i == tile.q_tiles.end - 1) work_tiles.allow_fetch();
                    const int row = tile.q_tiles.tile(i) * kBlockQ;
                    const int stored = stored_rows<kBlockQ>(s, row);
                    load<QTile>(at.q(), params.q_map, q_rows, row, params.lse_log2, statistics,
                                stored);
                    load<DOTile>(at.dout(), params.do_map, do_rows, row, params.minus_delta,
                                 statistics, stored);
                    at.advance();
                }
            }
        });
    }

    // A Q or dO tile and its lse or delta.
    template <class Tile>
    FLASH_DEVICE void load(const PoolStage& at, const CUtensorMap& map, const TensorRows& rows,
                           int first_row, const float* source, int64_t workspace,
                           int stored) const {
        load_tile<Tile>(pool, at, map, rows, first_row, [&] {
            return RowStatisticsLoad<float, kBlockQ>{storage.statistics[at.stage],
                                                     source + workspace + first_row,
                                                     source + params.padding_row, stored};
        });
    }

    FLASH_DEVICE void produce_kv() const {
        typename KPipeline::State k;
        typename VPipeline::State v;
        work_tiles.for_each([&](const KeyTile& tile) {
            if (tile.q_tiles.empty()) return;
            const auto rows = [&](const TensorView& view) {
                return key_rows(params, tile.sequence)
                    .template tensor_rows<Element>(view, tile.head / params.parts);
            };
            load_tile<KTile>(k_pipeline, k, params.k_map, rows(params.k), tile.first_key);
            k.advance();
            load_tile<VTile>(v_pipeline, v, params.v_map, rows(params.v), tile.first_key);
            v.advance();
        });
    }

    FLASH_DEVICE void produce() const {
        if (warp_id() == 0) produce_q_do();
        if (warp_id() == 1) produce_kv();
        if (warp_id() == 2) produce_tiles();
    }

    enum Consumer { kDV, kDK };

    // The state of a consumer's loops. Consumer dV: scores are S, and the gradient dV takes P from
    // the operand. Consumer dK: dP, dK and dS. Matrices are only referenced, as in backward.cuh.
    template <Consumer kConsumer>
    struct State {
        using KVTile = std::conditional_t<kConsumer == kDV, KTile, VTile>;
        using ScoresTile = std::conditional_t<kConsumer == kDV, QTile, DOTile>;
        using GradientTile = std::conditional_t<kConsumer == kDV, DOTile, QTile>;
        using Gradient = RegisterTile<16, GradientTile::kCols>;

        Scores& scores;
        Operand& operand;
        Gradient& gradient;

        WorkTileState tile{};
        IterationState pool{};  // of the scores
        PState p{};
        PipelineState<1> keys{};  // of K or V
        VisibleTiles q_tiles{};
        QTilePosition at{};
        int left = 0;             // iterations of the tile after this one
        bool accumulate = false;  // has the gradient a sum already?
        Interval full{};          // consumer dV: indices
        char* ds = nullptr;       // consumer dK: the tile in the workspace

        static FLASH_DEVICE PoolStage scores_stage(const IterationState& at) {
            return kConsumer == kDV ? at.q() : at.dout();
        }
        static FLASH_DEVICE PoolStage gradient_stage(const IterationState& at) {
            return kConsumer == kDV ? at.dout() : at.q();
        }
    };
    using DV = State<kDV>;
    using DK = State<kDK>;

    FLASH_DEVICE const KPipeline& keys(const DV&) const { return k_pipeline; }
    FLASH_DEVICE const VPipeline& keys(const DK&) const { return v_pipeline; }

    template <Consumer kConsumer>
    FLASH_DEVICE GlobalTile<Element> gradient_tile(const State<kConsumer>& s) const {
        return gradient_rows<Element>(kConsumer == kDV ? params.dv : params.dk, work_tiles[s.tile],
                                      warp_key,
                                      kConsumer == kDV ? params.head_dim_v : params.head_dim);
    }

    // Descriptors are made where they are used: otherwise the compiler would keep the descriptors
    // of every 16 columns in registers throughout the loop.

    // S^T = K Q^T, or dP^T = V dO^T
    template <Consumer kConsumer>
    FLASH_DEVICE void issue_scores(State<kConsumer>& s) const {
        using S = State<kConsumer>;
        const KMajor<typename S::KVTile> key_rows(keys(s).stages);
        const KMajor<typename S::ScoresTile> query_rows(pool.stage(S::scores_stage(s.pool)));
        gemm_async<Element, S::KVTile::kCols>(s.scores, key_rows, query_rows, false);
    }
    // dV += P^T dO, or dK += dS^T Q
    template <Consumer kConsumer>
    FLASH_DEVICE void issue_gradient(State<kConsumer>& s, const IterationState& at) const {
        using S = State<kConsumer>;
        const MNMajor<typename S::GradientTile> columns(pool.stage(S::gradient_stage(at)));
        gemm_async<Element, kBlockQ>(s.gradient, s.operand, columns, s.accumulate);
    }

    // The address of this thread's four elements of 8 columns of P^T. The thread of the same index
    // in consumer dK reads them.
    FLASH_DEVICE uint32_t p_address(const PState& at, int n) const {
        return p_pipeline.stage(at) + n * 2048 + threadIdx.x % 128 * 16;
    }

    // P^T = 2^(S^T scale - lse), for consumer dK too. For it the derivative of softcap, which needs
    // lse, is a factor of P.
    FLASH_DEVICE void compute_operand(DV& s) const {
        const KeyTile& tile = work_tiles[s.tile];
        const WarpScores<Element, Rows::kKeys, kOptions> scores{params, tile.sequence, s.at.head,
                                                                tile.first_key + warp_key,
                                                                s.q_tiles.tile(s.at.i) * kBlockQ};
        const float* lse = storage.statistics[s.pool.q().stage];
        const bool masked = s.at.i < s.full.begin || s.at.i >= s.full.end;
        Scores p;
        if constexpr (only_softcap(kOptions)) {
            scores.cap(s.scores, masked);
            p.for_each([](float& x, int, int) { x = 1.f; });
            softcap_gradient<Rows::kKeys>(s.scores, p, lse, params.softcap_log2);
        } else {
            scores.probabilities(s.scores, lse, masked, tile.large_lse);
            p = s.scores;
            if (contains(kOptions, OptionSet::kSoftcap) && params.softcap != 0.f)
                scores.softcap_gradient(p, s.scores, [&](int col) { return lse[col]; });
        }
        p_pipeline.producer_acquire(s.p);
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) ptx::st_shared_v4(p_address(s.p, n), p.v[0][n]);
        p_pipeline.producer_commit(s.p);
        s.p.advance();
        s.operand.template round<Element>(s.scores);
        pool.consumer_release(s.pool.q());
    }

    // dS^T = P^T * (dP^T - delta), with P^T in shared memory.
    FLASH_DEVICE void compute_operand(DK& s) const {
        p_pipeline.consumer_wait(s.p);
        const float* minus_delta = storage.statistics[s.pool.dout().stage];
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) {
            RegisterTile<16, 8> p;
            ptx::ld_shared_v4(p.v[0][0], p_address(s.p, n));
            auto& ds = s.scores.template columns<8>(8 * n);
            softmax_gradient<Rows::kKeys>(ds, p, minus_delta + 8 * n);
            s.operand.template round_columns<Element>(ds, 8 * n);
        }
        p_pipeline.consumer_release(s.p);
        s.p.advance();
        pool.consumer_release(s.pool.dout());
        if (stores_ds()) store_ds(s.operand, s.ds);
    }

    // Stores dS^T to the workspace. The four lanes that hold a row exchange pairs of columns, as a
    // 4 x 4 transpose, so that each has 16 contiguous bytes.
    FLASH_DEVICE void store_ds(const Operand& rdS, char* ds) const {
        const int lane = lane_id() % 4;
        const auto exchange = [&](uint32_t& x, uint32_t& y, int bit) {
            const bool high = lane & bit;
            const uint32_t got = __shfl_xor_sync(0xffffffff, high ? x : y, bit);
            (high ? x : y) = got;
        };
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int k = 0; k < kBlockQ / 16; k += 2) {
                uint32_t pairs[4] = {rdS.v[k][i], rdS.v[k][2 + i], rdS.v[k + 1][i],
                                     rdS.v[k + 1][2 + i]};
                exchange(pairs[0], pairs[1], 1);
                exchange(pairs[2], pairs[3], 1);
                exchange(pairs[0], pairs[2], 2);
                exchange(pairs[1], pairs[3], 2);
                *reinterpret_cast<uint4*>(
                    ds + DSTile<Element>::offset(warp_key + lane_row() + 8 * i, 2 * k + lane)) = {
                    pairs[0], pairs[1], pairs[2], pairs[3]};
            }
    }

    // Goes on to the next KV tile that has iterations. Tiles without any get zeros as gradient.
    template <class State>
    FLASH_DEVICE bool find_tile(State& s) const {
        for (;; end_work_tile(s.tile)) {
            work_tiles.descriptions.consumer_wait(s.tile);
            const KeyTile& tile = work_tiles[s.tile];
            if (ptx::warp_uniform(tile.first_key) < 0) return false;
            s.q_tiles = warp_uniform(tile.q_tiles);
            s.at = {s.q_tiles.begin, ptx::warp_uniform(tile.head) * group()};
            s.left = s.q_tiles.count() * group() - 1;
            if (!s.q_tiles.empty()) return true;
            store_zero_gradient<kHeadDim>(params, gradient_tile(s));
        }
    }

    FLASH_DEVICE void begin_tile(DV& s) const {
        const KeyTile& tile = work_tiles[s.tile];
        s.full = full_q_tiles(params, tile, tile.first_key, kBlockQ);
    }
    // The same for each query head.
    FLASH_DEVICE void begin_tile(DK& s) const {
        if (!stores_ds()) return;
        const KeyTile& tile = work_tiles[s.tile];
        s.ds = params.ds_workspace.template tile<Element>(params, tile.sequence.batch, s.at.head,
                                                          s.q_tiles.tile(s.at.i),
                                                          tile.first_key / kBlockKV);
    }

    FLASH_DEVICE void next_q_tile(DV& s) const { s.at.advance(s.q_tiles); }
    FLASH_DEVICE void next_q_tile(DK& s) const {
        if (stores_ds())
            s.ds +=
                params.ds_workspace.tiles.of_row(s.q_tiles.tile(s.at.i)) * DSTile<Element>::kBytes;
        s.at.advance(s.q_tiles);
        if (s.at.i == s.q_tiles.begin) begin_tile(s);  // of the next head
    }

    template <class State>
    FLASH_DEVICE void finish_scores(State& s) const {
        finish(s.scores);
        if (s.left == 0) release_and_advance(keys(s), s.keys);
        compute_operand(s);
    }

    // Both consumers, as in the header.
    template <Consumer kConsumer>
    FLASH_DEVICE void consume_as() const {
        Scores scores;
        Operand operand;
        typename State<kConsumer>::Gradient gradient;
        State<kConsumer> s{scores, operand, gradient};
        if (kConsumer == kDK) Order::signal_next(kDK);  // consumer dV starts
        while (find_tile(s)) {
            begin_tile(s);
            keys(s).consumer_wait(s.keys);
            pool.consumer_wait(s.scores_stage(s.pool));
            Order::wait(kConsumer);
            issue_scores(s);
            Order::signal_next(kConsumer);
            finish_scores(s);
            for (s.accumulate = false; s.left > 0; s.accumulate = true) {
                --s.left;
                next_q_tile(s);
                const IterationState before = s.pool;
                s.pool.advance();
                pool.consumer_wait(s.gradient_stage(before));
                pool.consumer_wait(s.scores_stage(s.pool));
                Order::wait(kConsumer);
                issue_gradient(s, before);
                issue_scores(s);
                Order::signal_next(kConsumer);
                finish<1>(s.gradient);
                pool.consumer_release(s.gradient_stage(before));
                finish_scores(s);
            }
            pool.consumer_wait(s.gradient_stage(s.pool));
            Order::wait(kConsumer);
            issue_gradient(s, s.pool);
            Order::signal_next(kConsumer);
            finish(s.gradient);
            pool.consumer_release(s.gradient_stage(s.pool));
            s.pool.advance();
            if (kConsumer == kDK) s.gradient.scale(params.scale);
            store_gradient(params, gradient_tile(s), s.gradient);
            end_work_tile(s.tile);
        }
    }

    FLASH_DEVICE void consume() const {
        if (ptx::warp_uniform(threadIdx.x / 128) == 1) {
            consume_as<kDV>();
        } else {
            consume_as<kDK>();
        }
    }
};

// One of the kernels for wide heads, with the tile_count_semaphore word kTileCount.
template <class Kernel>
cudaError_t launch_fa3_backward_pass(const BackwardParams& call, const DSWorkspace& ds_workspace,
                                     const TileOrder& order, int sms, cudaStream_t stream) {
    Fa3BackwardWideParams params{call};
    params.ds_workspace = ds_workspace;
    params.scheduler = make_dynamic_scheduler(call.tile_count_semaphore + Kernel::kTileCount);
    params.tile_order = order;
    if (work_tile_count(order) == 0) return cudaSuccess;
    const cudaError_t status = Kernel::encode(params);
    if (status != cudaSuccess) return status;
    return launch_kernel<fa3_kernel<Kernel>>(min_of(work_tile_count(order), sms), Kernel::kThreads,
                                             sizeof(typename Kernel::SharedStorage), params, stream,
                                             {.pdl = true});
}

}  // namespace flash_ext
