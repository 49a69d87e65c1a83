// FlashAttention-3 backward for wide heads, first kernel: dK and dV (dKdV). For Hopper.
//
// At these head dims dK and dV of 64 keys fill the registers. A KV tile cannot be larger, and
// adding dQ in HBM would take longer than the matmuls: 4 D bytes for every 64 keys and query. So dQ
// has a kernel of its own. Where there is a workspace for dS, this kernel stores dS there, and dQ
// is one matmul (backward_dq_gemm.cuh). Otherwise S and dP are computed again (backward_dq.cuh):
// seven matmuls instead of five. In both cases nothing is summed in HBM, so results do not depend
// on the order of tiles.
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
//   full(pool, K, V)    1: its producer; and TMA's bytes     the consumers that use it, before the
//                                                            matmul
//   empty(pool)         256: each consumer thread, when its  its producer, before the next load
//                       matmuls and arithmetic that read it
//                       are complete
//   empty(K)            4: each warp of consumer dV, after   producer of K and V
//                       the last S of the tile
//   empty(V)            4: each warp of consumer dK, after   producer of K and V
//                       the last dP of the tile
//   full(work tiles)    1: producer of KV tiles              other producers, consumers
//   empty(work tiles)   2: other producers; 8: each          producer of KV tiles, before it
//                       consumer warp. When they have        describes another tile
//                       finished the tile
//   fetch               1: producer of Q and dO, before the  producer of KV tiles, before it
//                       last loads of a tile                 fetches the next
//   full(P)             128: each thread of consumer dV      consumer dK, before dS
//   empty(P)            128: each thread of consumer dK      consumer dV, before it writes to the
//                                                            stage
//   ping-pong (named)   128: the other consumer, when its    a consumer (its 128 threads count
//                       matmuls are started                  too), before it starts its own
#pragma once

#include "kernels/fa3/backward_common.cuh"
#include "kernels/fa3/cta.cuh"
#include "plan/ds_workspace.cuh"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/shared.cuh"
#include "ptx/uniform.cuh"
#include "schedule/dynamic_persistent_scheduler.cuh"
#include "schedule/tile_numbers.cuh"
#include "schedule/tile_order.cuh"
#include "tile/tma_load.cuh"
#include "tile/wgmma.cuh"

namespace flash_ext {

// The state of an iteration in the pool, whose stages are pairs for Q and dO. The dO of an
// iteration is released before its Q, and the Q of a later iteration is needed before its dO. So in
// every other pass through the pairs Q and dO exchange their stages.
template <int kPairs>
struct PoolState : PipelineState<kPairs> {
    __device__ __forceinline__ uint32_t q() const { return 2 * this->stage + this->phase; }
    __device__ __forceinline__ uint32_t dout() const { return 2 * this->stage + (this->phase ^ 1); }
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
    __device__ __forceinline__ char* tile(const AttentionParams& params, int batch, int head_q,
                                          int q_tile, int kv_tile) const {
        const int group = params.heads_q / params.heads_k;
        const int head = batch * params.heads_q + head_q - first_head * group;
        return data + (head * tiles.first(tiles.q_tiles) + tiles.first(q_tile) + kv_tile) *
                          DSTile<Element>::kBytes;
    }
};
static_assert(DSTile<__half>::kBytes == DSWorkspaceTiles::kElements * sizeof(__half));

struct Fa3BackwardWideParams : Fa3BackwardMaps {
    DynamicPersistentScheduler scheduler;
};

struct Fa3BackwardStoringParams : Fa3BackwardWideParams {
    DSWorkspace ds_workspace;
};

template <class Element_, int kHeadDim_, int kHeadDimV_, Features kFeatures, int kPairs_,
          bool kStoresDS_>
struct Fa3BackwardDKDVConfig {
    using Element = Element_;
    using Params = Fa3BackwardStoringParams;
    static constexpr bool kStoresDS = kStoresDS_;  // a general kernel decides for each call
    static constexpr bool kGeneral = kFeatures == Features::kGeneral;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kPairs = kPairs_;
    static constexpr int kThreads = 3 * 128;
    static constexpr int kBlockQ = 64;
    static constexpr int kBlockKV = 64;
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
    using WorkTiles = WorkTilePipeline<KeyTile>;

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
        typename WorkTiles::Storage work_tiles;
    };
};

template <class Config_>
struct Fa3BackwardDKDV : Fa3Cta<Config_> {
    using Config = Config_;
    using Element = typename Config::Element;
    using QTile = typename Config::QTile;
    using DOTile = typename Config::DOTile;
    using KTile = typename Config::KTile;
    using VTile = typename Config::VTile;
    using Pool = typename Config::Pool;
    using KPipeline = typename Config::KPipeline;
    using VPipeline = typename Config::VPipeline;
    using PPipeline = typename Config::PPipeline;
    using Scores = RegisterTile<16, Config::kBlockQ>;
    using Operand = RegisterOperand<Config::kBlockQ>;
    using GradientK = RegisterTile<16, Config::kHeadDim>;
    using GradientV = RegisterTile<16, Config::kHeadDimV>;
    using IterationState = PoolState<Config::kPairs>;
    using PState = typename PPipeline::State;
    using Order = PingPong<2>;
    using Cta = Fa3Cta<Config>;
    using Cta::end_work_tile, Cta::group, Cta::params, Cta::release_and_advance, Cta::storage,
        Cta::work_tiles;
    using typename Cta::WorkTileState;

    int warp_key;  // first row of this thread's warp within the KV tile
    Pool pool;
    KPipeline k_pipeline;
    VPipeline v_pipeline;
    PPipeline p_pipeline;

    __device__ __forceinline__ explicit Fa3BackwardDKDV(const Fa3BackwardStoringParams& p)
        : Cta(p),
          warp_key(ptx::warp_uniform(threadIdx.x / 32) % 4 * 16),
          pool(storage.pool, storage.pool_barriers),
          k_pipeline(storage.k, storage.k_barriers),
          v_pipeline(storage.v, storage.v_barriers),
          p_pipeline(storage.p, storage.p_barriers) {}

    __device__ __forceinline__ void init() const {
        pool.init(2 * 128);  // all threads, since all read lse or delta
        k_pipeline.init(4);
        v_pipeline.init(4);
        work_tiles.init(8 + 2);  // and the producers that load
        p_pipeline.init(128, 128);
    }

    __device__ __forceinline__ void begin() const {
        ptx::wait_for_grid_before();  // lse and delta are complete
        ptx::launch_dependents();
    }

    __device__ __forceinline__ bool stores_ds() const {
        return Config::kStoresDS && (!Config::kGeneral || params.ds_workspace.heads > 0);
    }

    // --- Producer ---

    // Fetches the KV tiles.
    __device__ __forceinline__ void produce_tiles() const {
        this->fetch_work_tiles([&](KeyTile& tile, int linear) {
            WorkTile work = work_tile(linear, params.schedule);
            if (stores_ds()) {
                const int flat_head = params.ds_workspace.first_head + work.head;
                work.head = flat_head % params.heads_k;
                work.batch = flat_head / params.heads_k;
            }
            describe<Config>(tile, params, work);
            tile.large_lse = params.large_lse.is_raised();
        });
    }

    __device__ __forceinline__ void produce_q_do() const {
        IterationState at;
        work_tiles.for_each([&](const KeyTile& tile) {
            if (tile.q_tiles.empty()) {
                work_tiles.allow_fetch();
                return;
            }
            const Sequence& s = tile.sequence;
            for (int left = group() - 1; left >= 0; --left) {
                const int head = (tile.head + 1) * group() - 1 - left;
                const TensorRows q_rows = this->query_rows(params.q, s, head);
                const TensorRows do_rows = this->query_rows(params.dout, s, head);
                const int64_t statistics = workspace_row(params, s, head, 0);
                for (int i = tile.q_tiles.begin; i < tile.q_tiles.end; ++i) {
                    if (left == 0 && i == tile.q_tiles.end - 1) work_tiles.allow_fetch();
                    const int row = tile.q_tiles.tile(i) * Config::kBlockQ;
                    const int stored = stored_rows<Config::kBlockQ>(s, row);
                    load<QTile>(at.q(), at.phase, params.q_map, q_rows, row, params.lse_log2,
                                statistics, stored);
                    load<DOTile>(at.dout(), at.phase, params.do_map, do_rows, row, params.delta,
                                 statistics, stored);
                    at.advance();
                }
            }
        });
    }

    // A Q or dO tile and its lse or delta.
    template <class Tile>
    __device__ __forceinline__ void load(uint32_t stage, uint32_t phase, const CUtensorMap& map,
                                         const TensorRows& rows, int first_row, const float* source,
                                         int64_t workspace, int stored) const {
        load_tile<Tile>(pool, {stage, phase}, map, rows, first_row, [&] {
            return RowStatisticsLoad<float, Config::kBlockQ>{storage.statistics[stage],
                                                             source + workspace + first_row,
                                                             source + params.padding_row, stored};
        });
    }

    __device__ __forceinline__ void produce_kv() const {
        typename KPipeline::State k;
        typename VPipeline::State v;
        work_tiles.for_each([&](const KeyTile& tile) {
            if (tile.q_tiles.empty()) return;
            const Sequence& s = tile.sequence;
            const TensorRows k_rows = shared_key_rows<Element>(params, params.k, s, tile.head);
            load_tile<KTile>(k_pipeline, k, params.k_map, k_rows, tile.first_key);
            k.advance();
            const TensorRows v_rows = shared_key_rows<Element>(params, params.v, s, tile.head);
            load_tile<VTile>(v_pipeline, v, params.v_map, v_rows, tile.first_key);
            v.advance();
        });
    }

    __device__ __forceinline__ void produce() const {
        switch (warp_id()) {
            case 0:
                return produce_q_do();
            case 1:
                return produce_kv();
            case 2:
                return produce_tiles();
        }
    }

    // --- Consumers ---

    enum Consumer { kDV, kDK };

    __device__ __forceinline__ void wait(uint32_t stage, const IterationState& at) const {
        pool.consumer_wait({stage, at.phase});
    }
    // By all threads, since all read lse or delta.
    __device__ __forceinline__ void release(uint32_t stage) const {
        pool.consumer_release({stage, 0});
    }

    // From dP^T, and P^T in shared memory, to dS^T as an operand.
    __device__ __forceinline__ void softmax_gradient(Scores& dp, Operand& rdS, const PState& at,
                                                     const IterationState& state) const {
        Scores p;
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) ptx::ld_shared_v4(p.v[0][n], p_address(at, n));
        flash_ext::softmax_gradient<Rows::kKeys>(dp, p, storage.statistics[state.dout()]);
        rdS.template round<Element>(dp);
    }

    // Stores dS^T to the workspace. The four lanes that hold a row exchange pairs of columns, as a
    // 4 x 4 transpose, so that each has 16 contiguous bytes.
    __device__ __forceinline__ void store_ds(const Operand& rdS, char* ds) const {
        const int lane = lane_id() % 4;
        const auto exchange = [&](uint32_t& x, uint32_t& y, int bit) {
            const bool high = lane & bit;
            const uint32_t got = __shfl_xor_sync(0xffffffff, high ? x : y, bit);
            (high ? x : y) = got;
        };
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int k = 0; k < Config::kBlockQ / 16; k += 2) {
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

    // The address of this thread's four elements of 8 columns of P^T. The thread of the same index
    // in consumer dK reads them.
    __device__ __forceinline__ uint32_t p_address(const PState& at, int n) const {
        return p_pipeline.stage(at) + n * 2048 + threadIdx.x % 128 * 16;
    }

    __device__ __forceinline__ WarpScores<Element, Rows::kKeys, Config::kGeneral> warp_scores(
        const KeyTile& tile, const QTilePosition& at) const {
        return {params, tile.sequence, at.head, tile.first_key + warp_key,
                tile.q_tiles.tile(at.i) * Config::kBlockQ};
    }

    // Passes P^T to consumer dK. The derivative of softcap is applied here, since it needs lse.
    __device__ __forceinline__ void pass_p(const Scores& p, PState& at, const IterationState& state,
                                           const KeyTile& tile,
                                           const QTilePosition& position) const {
        Scores x = p;
        if (Config::kGeneral && params.softcap != 0.f)
            warp_scores(tile, position).softcap_gradient(x, p, [&](int col) {
                return storage.statistics[state.q()][col];
            });
        p_pipeline.producer_acquire(at);
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) ptx::st_shared_v4(p_address(at, n), x.v[0][n]);
        p_pipeline.producer_commit(at);
        at.advance();
    }

    __device__ __forceinline__ uint32_t tile_in(uint32_t stage) const {
        return pool.stage({stage, 0});
    }

    // A consumer's position in the KV tiles: that of its scores.
    struct Walk {
        WorkTileState tile;
        VisibleTiles q_tiles;
        QTilePosition at;
        int left;  // iterations of the tile after this one
    };

    // Goes on to the next KV tile that has iterations. Tiles without any get zeros as gradient.
    __device__ __forceinline__ bool find_tile(Walk& walk, const TensorView& view, int cols) const {
        for (;; end_work_tile(walk.tile)) {
            work_tiles.descriptions.consumer_wait(walk.tile);
            const KeyTile& tile = work_tiles[walk.tile];
            if (ptx::warp_uniform(tile.first_key) < 0) return false;
            walk.q_tiles = warp_uniform(tile.q_tiles);
            walk.at = {walk.q_tiles.begin, ptx::warp_uniform(tile.head) * group()};
            walk.left = walk.q_tiles.count() * group() - 1;
            if (!walk.q_tiles.empty()) return true;
            store_zero_gradient<Config::kHeadDim>(
                params, gradient_rows<Element>(view, tile, warp_key, cols));
        }
    }

    // S, P and dV.
    __device__ __forceinline__ void consume_dv() const {
        Walk walk;
        IterationState state;  // of the scores
        PState p;
        typename KPipeline::State k;
        VisibleTiles full{};
        Scores rS;
        Operand rP;
        GradientV rdV;

        // Descriptors are made where they are used: otherwise the compiler would keep those of
        // every 16 columns in registers throughout the loop.
        const auto issue_scores = [&] {
            const KMajor<KTile> k_rows(k_pipeline.stages);
            const KMajor<QTile> q_rows(tile_in(state.q()));
            gemm_async<Element, Config::kHeadDim>(rS, k_rows, q_rows, false);
        };
        const auto issue_gradient = [&](const IterationState& at, bool accumulate) {
            const MNMajor<DOTile> do_columns(tile_in(at.dout()));
            gemm_async<Element, Config::kBlockQ>(rdV, rP, do_columns, accumulate);
        };
        const auto probabilities = [&] {
            warpgroup_fence(rS);
            if (walk.left == 0) release_and_advance(k_pipeline, k);
            const KeyTile& tile = work_tiles[walk.tile];
            warp_scores(tile, walk.at)
                .probabilities(rS, storage.statistics[state.q()],
                               walk.at.i < full.begin || walk.at.i >= full.end, tile.large_lse);
            pass_p(rS, p, state, tile, walk.at);
            rP.template round<Element>(rS);
            release(state.q());
        };

        while (find_tile(walk, params.dv, params.head_dim_v)) {
            const KeyTile& tile = work_tiles[walk.tile];
            full =
                full_q_tiles(tile, mask_of(params, tile.sequence),
                             {tile.first_key, tile.first_key + Config::kBlockKV}, Config::kBlockQ);
            k_pipeline.consumer_wait(k);
            wait(state.q(), state);
            Order::wait(kDV);
            issue_scores();
            Order::signal_next(kDV);
            ptx::wgmma_wait<0>();
            probabilities();
            bool accumulate = false;
            for (; walk.left > 0; accumulate = true) {
                --walk.left;
                walk.at.advance(walk.q_tiles);
                const IterationState before = state;
                state.advance();
                wait(before.dout(), before);
                wait(state.q(), state);
                Order::wait(kDV);
                issue_gradient(before, accumulate);
                issue_scores();
                Order::signal_next(kDV);
                ptx::wgmma_wait<1>();
                warpgroup_fence(rdV);
                release(before.dout());
                ptx::wgmma_wait<0>();
                probabilities();
            }
            wait(state.dout(), state);
            Order::wait(kDV);
            issue_gradient(state, accumulate);
            Order::signal_next(kDV);
            ptx::wgmma_wait<0>();
            warpgroup_fence(rdV);
            release(state.dout());
            state.advance();
            store_gradient(
                params, gradient_rows<Element>(params.dv, tile, warp_key, params.head_dim_v), rdV);
            end_work_tile(walk.tile);
        }
    }

    // dP, dS and dK.
    __device__ __forceinline__ void consume_dk() const {
        Walk walk;
        IterationState state;  // of dP
        PState p;
        typename VPipeline::State v;
        Scores rdP;
        Operand rdS;
        GradientK rdK;

        const auto issue_dp = [&] {
            const KMajor<VTile> v_rows(v_pipeline.stages);
            const KMajor<DOTile> do_rows(tile_in(state.dout()));
            gemm_async<Element, Config::kHeadDimV>(rdP, v_rows, do_rows, false);
        };
        const auto issue_gradient = [&](const IterationState& at, bool accumulate) {
            const MNMajor<QTile> q_columns(tile_in(at.q()));
            gemm_async<Element, Config::kBlockQ>(rdK, rdS, q_columns, accumulate);
        };
        char* ds = nullptr;  // the current tile in the workspace
        const auto find_ds = [&] {
            const KeyTile& tile = work_tiles[walk.tile];
            ds = params.ds_workspace.template tile<Element>(
                params, tile.sequence.batch, walk.at.head, walk.q_tiles.tile(walk.at.i),
                tile.first_key / Config::kBlockKV);
        };
        const auto gradient_of_scores = [&] {
            warpgroup_fence(rdP);
            if (walk.left == 0) release_and_advance(v_pipeline, v);
            p_pipeline.consumer_wait(p);
            softmax_gradient(rdP, rdS, p, state);
            p_pipeline.consumer_release(p);
            p.advance();
            release(state.dout());
            if (stores_ds()) store_ds(rdS, ds);
        };

        Order::signal_next(kDK);  // consumer dV starts
        while (find_tile(walk, params.dk, params.head_dim)) {
            if (stores_ds()) find_ds();
            v_pipeline.consumer_wait(v);
            wait(state.dout(), state);
            Order::wait(kDK);
            issue_dp();
            Order::signal_next(kDK);
            ptx::wgmma_wait<0>();
            gradient_of_scores();
            bool accumulate = false;
            for (; walk.left > 0; accumulate = true) {
                --walk.left;
                if (stores_ds())
                    ds += params.ds_workspace.tiles.of_row(walk.q_tiles.tile(walk.at.i)) *
                          DSTile<Element>::kBytes;
                walk.at.advance(walk.q_tiles);
                if (stores_ds() &&
                    (walk.at.i == walk.q_tiles.begin || walk.q_tiles.distance(walk.at.i) != 1))
                    find_ds();  // of the next head
                const IterationState before = state;
                state.advance();
                wait(before.q(), before);
                wait(state.dout(), state);
                Order::wait(kDK);
                issue_gradient(before, accumulate);
                issue_dp();
                Order::signal_next(kDK);
                ptx::wgmma_wait<1>();
                warpgroup_fence(rdK);
                release(before.q());
                ptx::wgmma_wait<0>();
                gradient_of_scores();
            }
            wait(state.q(), state);
            Order::wait(kDK);
            issue_gradient(state, accumulate);
            Order::signal_next(kDK);
            ptx::wgmma_wait<0>();
            warpgroup_fence(rdK);
            release(state.q());
            state.advance();
            rdK.scale(params.scale);
            store_gradient(
                params,
                gradient_rows<Element>(params.dk, work_tiles[walk.tile], warp_key, params.head_dim),
                rdK);
            end_work_tile(walk.tile);
        }
    }

    __device__ __forceinline__ void consume() const {
        if (ptx::warp_uniform(threadIdx.x / 128) == 1) {
            consume_dv();
        } else {
            consume_dk();
        }
    }
};

template <class Config>
cudaError_t launch_fa3_backward_dkdv(const BackwardParams& call, const DSWorkspace& ds_workspace,
                                     cudaStream_t stream) {
    Fa3BackwardStoringParams params{call};
    params.ds_workspace = ds_workspace;
    params.scheduler = make_dynamic_scheduler(call.tile_count_semaphore);
    const bool masked = is_masked(params);
    const int group = group_of(params);
    params.schedule = make_schedule(tile_numbers(params, params.seqlen_k, Config::kBlockKV),
                                    ds_workspace.heads > 0 ? ds_workspace.heads : params.heads_k,
                                    ds_workspace.heads > 0 ? 1 : tensor_batches(params),
                                    masked || params.cu_seqlens_q != nullptr,
                                    int64_t{sizeof(typename Config::Element)} *
                                        (Config::kHeadDim + Config::kHeadDimV) * params.seqlen_q *
                                        group,  // Q and dO
                                    1, l2_group_waves(params, masked));
    if (cta_count(params.schedule) == 0) return cudaSuccess;
    const cudaError_t status = params.encode<Config>();
    if (status != cudaSuccess) return status;
    return launch_fa3<Fa3BackwardDKDV<Config>>(params, cta_count(params.schedule), stream,
                                               {.pdl = true});
}

}  // namespace flash_ext
