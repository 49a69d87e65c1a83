// FlashAttention-3 backward for wide heads, part one: dK and dV. For Hopper.
//
// Where dK and dV of 64 keys fill the registers, a KV tile cannot be larger, and adding dQ to
// memory would take longer than the matmuls: 4 D bytes for every 64 keys and query. So dQ has a
// kernel of its own. Where there is memory for dS, this one keeps it there, and that is one matmul
// (fa3/backward_product.cuh); else S and dP are computed again (fa3/backward_queries.cuh), seven
// matmuls instead of five. Either way there is no sum in memory, and results do not depend on any
// order.
//
// One CTA per SM takes one KV tile of 64 keys after another; its inner loop goes over the Q tiles
// that see the KV tile, for each query head of the group in turn. Everything is computed
// transposed: rows are keys. Its warpgroups have roles:
//
//   producer   three threads: Q and dO with their statistics; K and V; the choice of KV tiles
//   values     S^T = K Q^T, P^T = 2^(S^T scale - lse), and dV += P^T dO in registers
//   keys       dP^T = V dO^T, dS^T = P^T * (dP^T - delta), and dK += dS^T Q in registers
//
// P^T goes from the one to the other through shared memory, in float32 and in the order of the
// registers. In the order in which things are started; primes belong to the next step:
//
//     values                                     keys
//     dV   += P^T dO     wgmma, asynchronous     dK    += dS^T Q     wgmma, asynchronous
//     S'^T  = K Q'^T     wgmma, asynchronous     dP'^T  = V dO'^T    wgmma, asynchronous
//     P'                 when both are done      dS'                 when P' is there as well
//
// They take turns at starting their matmuls, so that each one's arithmetic has the other's matmuls
// beside it.
//
// Shared memory: K and V; a pool of pairs of Q and dO tiles (PoolCursor); rings of P^T and of KV
// tiles' descriptions (KeyTile).
//
//   barrier              arrives                    waits
//   full(pool, K, V)     TMA, by bytes              consumers, before the matmul that reads it
//   empty(pool)          each consumer thread, when producer, before it loads the next
//                        its matmuls and its
//                        arithmetic are done
//   empty(K), empty(V)   each warp of "values", of  producer
//                        "keys"
//   full, empty(tiles)   producer; all readers      all readers; producer
//   fetch                producer of Q, before the  producer of tiles
//                        last load of a tile
//   full(P)              each thread of "values"    "keys", before dS
//   empty(P)             each thread of "keys"      "values", before it writes the next
//   turn (named)         the other consumer, when   consumers, before they start theirs
//                        its matmuls are started
#pragma once

#include "kernels/fa3/backward.cuh"
#include "plan/ds_workspace.cuh"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"
#include "ptx/grid_dependency.cuh"
#include "schedule/dynamic_persistent_scheduler.cuh"
#include "schedule/tile_numbers.cuh"
#include "schedule/tile_order.cuh"

namespace flash_ext {

// A step's place in the pool, whose slots are pairs for Q and dO. dO of a step is done with before
// its Q is, and Q of a later step needed before its dO: so Q comes to lie where dO was and dO where
// Q was, at every round through the pairs.
template <int kPairs>
struct PoolCursor {
    uint32_t pair = 0;
    uint32_t round = 0;  // parity

    __device__ __forceinline__ void advance() {
        if (++pair == kPairs) {
            pair = 0;
            round ^= 1;
        }
    }
    __device__ __forceinline__ uint32_t q() const { return 2 * pair + round; }
    __device__ __forceinline__ uint32_t dout() const { return 2 * pair + (round ^ 1); }
};

// A part of dS^T: 64 keys, 64 queries.
using DSTile = SharedTile<64, 64>;

// Memory in which dS^T is kept for fa3/backward_product.cuh, tile by tile as in shared memory: of
// some of the heads (of K and V, of all batches, flattened).
struct DSWorkspace {
    char* data = nullptr;
    int first_head = 0;
    int heads = 0;
    DSWorkspaceTiles tiles;

    __device__ __forceinline__ char* tile(const AttentionParams& params, int batch, int head_q,
                                          int q_tile, int kv_tile) const {
        const int group = params.heads_q / params.heads_k;
        const int head = batch * params.heads_q + head_q - first_head * group;
        return data + (head * tiles.first(tiles.q_tiles) + tiles.first(q_tile) + kv_tile) *
                          DSWorkspaceTiles::kBytes;
    }
};
static_assert(DSTile::kBytes == DSWorkspaceTiles::kBytes);

struct Fa3BackwardWideParams : Fa3BackwardMaps {
    DynamicPersistentScheduler scheduler;
};

struct Fa3BackwardStoringParams : Fa3BackwardWideParams {
    DSWorkspace ds_workspace;
};

template <class Element_, int kHeadDim_, int kHeadDimV_, Features kFeatures, int kPairs_,
          bool kStoresDS_>
struct Fa3BackwardKeysConfig {
    using Element = Element_;
    static constexpr bool kStoresDS = kStoresDS_;
    static constexpr bool kGeneral = kFeatures == Features::kGeneral;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kPairs = kPairs_;
    static constexpr int kThreads = 3 * 128;
    static constexpr int kBlockQ = 64;
    static constexpr int kBlockKV = 64;
    static constexpr int kProducerRegisters = 40;
    static constexpr int kConsumerRegisters = 232;

    using QTile = SharedTile<kBlockQ, kHeadDim>;
    using DOTile = SharedTile<kBlockQ, kHeadDimV>;
    using KTile = SharedTile<kBlockKV, kHeadDim>;
    using VTile = SharedTile<kBlockKV, kHeadDimV>;
    using Pool = TmaRing<2 * kPairs, max_of(QTile::kBytes, DOTile::kBytes)>;
    using KRing = TmaRing<1, KTile::kBytes>;
    using VRing = TmaRing<1, VTile::kBytes>;
    using PRing = TmaRing<2, kBlockKV * kBlockQ * 4>;  // from "values" to "keys"
    static_assert(kWorkspaceRows % kBlockQ == 0);

    static constexpr int kStatisticsBytes = kBlockQ * 4;
    static constexpr int kK = 0;
    static constexpr int kV = kK + KTile::kBytes;
    static constexpr int kPool = kV + VTile::kBytes;
    static constexpr int kP = kPool + Pool::kSlots * Pool::kSlotBytes;
    static constexpr int kStatistics =
        kP + PRing::kSlots * PRing::kSlotBytes;  // of each of the pool's slots
    static constexpr int kTiles = kStatistics + Pool::kSlots * kStatisticsBytes;
    using Tiles = TileQueue<KeyTile, kTiles>;
    static constexpr int kPoolBarriers = kTiles + Tiles::kBytes;
    static constexpr int kKBarriers = kPoolBarriers + Pool::kBarrierBytes;
    static constexpr int kVBarriers = kKBarriers + KRing::kBarrierBytes;
    static constexpr int kTileBarriers = kVBarriers + VRing::kBarrierBytes;
    static constexpr int kPBarriers = kTileBarriers + Tiles::kBarrierBytes;
    static constexpr int kSharedBytes = kPBarriers + PRing::kBarrierBytes;
    static_assert(kSharedBytes <= 227 * 1024);
};

template <class Config>
struct Fa3BackwardKeys {
    using Element = typename Config::Element;
    using QTile = typename Config::QTile;
    using DOTile = typename Config::DOTile;
    using KTile = typename Config::KTile;
    using VTile = typename Config::VTile;
    using Pool = typename Config::Pool;
    using Scores = RegisterTile<16, Config::kBlockQ>;
    using Operand = RegisterOperand<Config::kBlockQ>;
    using GradientK = RegisterTile<16, Config::kHeadDim>;
    using GradientV = RegisterTile<16, Config::kHeadDimV>;
    using PoolPosition = PoolCursor<Config::kPairs>;
    using TileCursor_ = typename Config::Tiles::Cursor;
    using PCursor = typename Config::PRing::Cursor;

    const Fa3BackwardStoringParams& params;
    uint32_t shared;
    int warp_key;     // first row of this thread's warp within the KV tile
    bool leads_warp;  // is it its warp's first?
    Pool pool;
    typename Config::KRing k_ring;
    typename Config::VRing v_ring;
    typename Config::PRing p_ring;
    typename Config::Tiles tiles;

    __device__ __forceinline__ Fa3BackwardKeys(const Fa3BackwardStoringParams& p, uint32_t shared_)
        : params(p),
          shared(shared_),
          warp_key(ptx::warp_uniform(threadIdx.x / 32) % 4 * 16),
          leads_warp(lane_id() == 0),
          pool{shared + Config::kPool, shared + Config::kPoolBarriers},
          k_ring{shared + Config::kK, shared + Config::kKBarriers},
          v_ring{shared + Config::kV, shared + Config::kVBarriers},
          p_ring{shared + Config::kP, shared + Config::kPBarriers},
          tiles(shared, Config::kTileBarriers) {}

    __device__ __forceinline__ void init() const {
        pool.init(2 * 128);  // all threads, since all read the statistics
        k_ring.init(4);
        v_ring.init(4);
        tiles.init(8 + 2);  // and the producers that load
        p_ring.init(128, 128);
        ptx::mbarrier_fence_init();
    }

    // --- Producer ---

    __device__ __forceinline__ int group() const { return params.heads_q / params.heads_k; }

    // Chooses the KV tiles.
    __device__ __forceinline__ void produce_tiles() const {
        params.scheduler.start();
        const int total = cta_count(params.schedule);
        tiles.produce(
            blockIdx.x, total, [&] { return params.scheduler.fetch(total); },
            [&](KeyTile& tile, int linear) {
                WorkTile work = work_tile(linear, params.schedule);
                if constexpr (Config::kStoresDS) {
                    const int flat_head = params.ds_workspace.first_head + work.head;
                    work.head = flat_head % params.heads_k;
                    work.batch = flat_head / params.heads_k;
                }
                describe<Config>(tile, params, work);
                tile.large_lse = params.large_lse.is_raised();
            },
            [](const KeyTile&, const TileCursor_&) {});
    }

    __device__ __forceinline__ void produce_q_do() const {
        PoolPosition at;
        tiles.for_each([&](const KeyTile& tile) {
            if (tile.q_tiles.empty()) {
                tiles.let_fetch();
                return;
            }
            const Sequence& s = tile.sequence;
            for (int left = group() - 1; left >= 0; --left) {
                const int head = (tile.head + 1) * group() - 1 - left;
                const TensorRows q_rows(params.q, s.batch, head, s.q_begin, s.seqlen_q);
                const TensorRows do_rows(params.dout, s.batch, head, s.q_begin, s.seqlen_q);
                const int64_t statistics = workspace_row(params, s, head, 0);
                for (int i = tile.q_tiles.begin; i < tile.q_tiles.end; ++i) {
                    if (left == 0 && i == tile.q_tiles.end - 1) tiles.let_fetch();
                    const int row = i * Config::kBlockQ;
                    load<QTile>(at.q(), at.round, params.q_map, q_rows, row,
                                params.lse_log2 + statistics);
                    load<DOTile>(at.dout(), at.round, params.do_map, do_rows, row,
                                 params.delta + statistics);
                    at.advance();
                }
            }
        });
    }

    // A Q or dO tile and its lse or delta.
    template <class Tile>
    __device__ __forceinline__ void load(uint32_t slot, uint32_t round, const CUtensorMap& map,
                                         const TensorRows& rows, int first_row,
                                         const float* statistics) const {
        load_tile<Tile>(pool, {slot, round}, map, rows, first_row,
                        shared + Config::kStatistics + slot * Config::kStatisticsBytes, statistics);
    }

    __device__ __forceinline__ void produce_kv() const {
        typename Config::KRing::Cursor k;
        typename Config::VRing::Cursor v;
        tiles.for_each([&](const KeyTile& tile) {
            if (tile.q_tiles.empty()) return;
            const Sequence& s = tile.sequence;
            const TensorRows k_rows(params.k, s.batch, tile.head, s.k_begin, s.seqlen_k);
            load_tile<KTile>(k_ring, k, params.k_map, k_rows, tile.first_key);
            k.advance();
            const TensorRows v_rows(params.v, s.batch, tile.head, s.k_begin, s.seqlen_k);
            load_tile<VTile>(v_ring, v, params.v_map, v_rows, tile.first_key);
            v.advance();
        });
    }

    __device__ __forceinline__ void produce() const {
        if (lane_id() != 0) return;
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

    __device__ __forceinline__ void wait(uint32_t slot, const PoolPosition& at) const {
        pool.wait({slot, at.round});
    }
    __device__ __forceinline__ void release(uint32_t slot) const { pool.release({slot, 0}); }
    template <class Ring>
    __device__ __forceinline__ void release(const Ring& ring, typename Ring::Cursor& cursor) const {
        if (leads_warp) ring.release(cursor);
        cursor.advance();
    }

    // Consumers take turns at starting their matmuls.
    enum Consumer { kValues, kKeys };
    static __device__ __forceinline__ void take_turn(Consumer consumer) {
        ptx::barrier_sync(1 + consumer, 256);
    }
    static __device__ __forceinline__ void pass_turn(Consumer consumer) {
        ptx::barrier_arrive(1 + consumer, 256);
    }

    __device__ __forceinline__ const float* statistics(uint32_t slot) const {
        return reinterpret_cast<const float*>(dynamic_shared() + Config::kStatistics +
                                              slot * Config::kStatisticsBytes);
    }

    // dP^T to dS^T, as an operand, with P^T from shared memory.
    __device__ __forceinline__ void softmax_gradient(Scores& dp, Operand& rdS, const PCursor& at,
                                                     const PoolPosition& position) const {
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) {
            float p[4];
            ptx::ld_shared_v4(p, p_address(at, n));
            const float2 delta = column_pair(statistics(position.dout()), n);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float* x = &dp.v[0][n][2 * i];
                rdS.v[n / 2][n % 2 * 2 + i] = ptx::pack<Element>(p[2 * i] * (x[0] - delta.x),
                                                                 p[2 * i + 1] * (x[1] - delta.y));
            }
        }
    }

    // To memory for fa3/backward_product.cuh. The four lanes that hold a row exchange what they
    // have of it, 4 x 4 pairs of columns, until each has 16 bytes.
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
                    ds + DSTile::offset(warp_key + lane_row() + 8 * i, 2 * k + lane)) = {
                    pairs[0], pairs[1], pairs[2], pairs[3]};
            }
    }

    // Where this thread's part of 8 of P's columns lies, for the thread of its number in "keys".
    __device__ __forceinline__ uint32_t p_address(const PCursor& at, int n) const {
        return p_ring.tile(at) + n * 2048 + threadIdx.x % 128 * 16;
    }

    // Softcap's derivative goes with P: "values" has the lse that it takes.
    __device__ __forceinline__ void pass_p(const Scores& p, PCursor& at,
                                           const PoolPosition& position, const KeyTile& tile,
                                           const QTileStep& step) const {
        Scores x = p;
        if constexpr (Config::kGeneral)
            if (params.softcap != 0.f)
                ScoreFunction<Element, Rows::kKeys, false>{params, tile.sequence, step.head}
                    .softcap_gradient(x, p, tile.first_key + warp_key,
                                      step.q_tile * Config::kBlockQ,
                                      [&](int col) { return statistics(position.q())[col]; });
        p_ring.acquire(at);
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) ptx::st_shared_v4(p_address(at, n), x.v[0][n]);
        p_ring.publish(at);
        at.advance();
    }

    __device__ __forceinline__ uint32_t tile_in(uint32_t slot) const {
        return pool.tile({slot, 0});
    }

    // A consumer's way through the KV tiles: where its scores are.
    struct Walk {
        TileCursor_ tile;
        Interval q_tiles;
        QTileStep at;
        int left;  // steps of the tile behind this one
    };

    // The next KV tile that has steps; a gradient of those that have none is written as zeros.
    __device__ __forceinline__ bool find_tile(Walk& walk, const TensorView& view, int cols) const {
        for (;; end_tile(walk)) {
            tiles.ring.wait(walk.tile);
            const KeyTile& tile = tiles[walk.tile];
            if (ptx::warp_uniform(tile.first_key) < 0) return false;
            walk.q_tiles = {ptx::warp_uniform(tile.q_tiles.begin),
                            ptx::warp_uniform(tile.q_tiles.end)};
            walk.at = {walk.q_tiles.begin, ptx::warp_uniform(tile.head) * group()};
            walk.left = (walk.q_tiles.end - walk.q_tiles.begin) * group() - 1;
            if (!walk.q_tiles.empty()) return true;
            store_zeros(gradient_rows<Element>(view, tile, warp_key, cols));
        }
    }

    __device__ __forceinline__ void end_tile(Walk& walk) const {
        __syncwarp();
        if (leads_warp) tiles.ring.release(walk.tile);
        walk.tile.advance();
    }

    // S, P and dV.
    __device__ __forceinline__ void consume_values() const {
        Walk walk;
        PoolPosition position;  // of the scores
        PCursor p;
        typename Config::KRing::Cursor k;
        Interval full{};
        Scores rS;
        Operand rP;
        GradientV rdV;

        // Descriptors are made where they are used: the compiler would hold those of every 16
        // columns in registers over the loop.
        const auto start_scores = [&] {
            const AlongRows<KTile> k_rows(shared + Config::kK);
            const AlongRows<QTile> q_rows(tile_in(position.q()));
            start_gemm<Element, Config::kHeadDim>(rS, k_rows, q_rows, false);
        };
        const auto start_gradient = [&](const PoolPosition& at, bool accumulate) {
            const AlongColumns<DOTile> do_columns(tile_in(at.dout()));
            start_gemm<Element, Config::kBlockQ>(rdV, rP, do_columns, accumulate);
        };
        const auto probabilities = [&] {
            finished(rS);
            if (walk.left == 0) release(k_ring, k);
            const KeyTile& tile = tiles[walk.tile];
            exponentiate<Element, Config::kGeneral, Config::kBlockQ>(
                rS, params, tile, walk.at.head, tile.first_key + warp_key,
                walk.at.q_tile * Config::kBlockQ,
                walk.at.q_tile < full.begin || walk.at.q_tile >= full.end,
                statistics(position.q()));
            pass_p(rS, p, position, tile, walk.at);
            rP.template round<Element>(rS);
            release(position.q());
        };

        while (find_tile(walk, params.dv, params.head_dim_v)) {
            const KeyTile& tile = tiles[walk.tile];
            full =
                full_q_tiles(tile, mask_of(params, tile.sequence),
                             {tile.first_key, tile.first_key + Config::kBlockKV}, Config::kBlockQ);
            k_ring.wait(k);
            wait(position.q(), position);
            take_turn(kValues);
            start_scores();
            pass_turn(kKeys);
            ptx::wgmma_wait<0>();
            probabilities();
            bool accumulate = false;
            for (; walk.left > 0; accumulate = true) {
                --walk.left;
                walk.at.advance(walk.q_tiles);
                const PoolPosition before = position;
                position.advance();
                wait(before.dout(), before);
                wait(position.q(), position);
                take_turn(kValues);
                start_gradient(before, accumulate);
                start_scores();
                pass_turn(kKeys);
                ptx::wgmma_wait<1>();
                finished(rdV);
                release(before.dout());
                ptx::wgmma_wait<0>();
                probabilities();
            }
            wait(position.dout(), position);
            take_turn(kValues);
            start_gradient(position, accumulate);
            pass_turn(kKeys);
            ptx::wgmma_wait<0>();
            finished(rdV);
            release(position.dout());
            position.advance();
            store_rows(gradient_rows<Element>(params.dv, tile, warp_key, params.head_dim_v), rdV);
            end_tile(walk);
        }
    }

    // dP, dS and dK.
    __device__ __forceinline__ void consume_keys() const {
        Walk walk;
        PoolPosition position;  // of dP
        PCursor p;
        typename Config::VRing::Cursor v;
        Scores rdP;
        Operand rdS;
        GradientK rdK;

        const auto start_dp = [&] {
            const AlongRows<VTile> v_rows(shared + Config::kV);
            const AlongRows<DOTile> do_rows(tile_in(position.dout()));
            start_gemm<Element, Config::kHeadDimV>(rdP, v_rows, do_rows, false);
        };
        const auto start_gradient = [&](const PoolPosition& at, bool accumulate) {
            const AlongColumns<QTile> q_columns(tile_in(at.q()));
            start_gemm<Element, Config::kBlockQ>(rdK, rdS, q_columns, accumulate);
        };
        char* ds = nullptr;  // where it is kept
        const auto find_ds = [&] {
            const KeyTile& tile = tiles[walk.tile];
            ds = params.ds_workspace.tile(params, tile.sequence.batch, walk.at.head, walk.at.q_tile,
                                          tile.first_key / Config::kBlockKV);
        };
        const auto gradient_of_scores = [&] {
            finished(rdP);
            if (walk.left == 0) release(v_ring, v);
            p_ring.wait(p);
            softmax_gradient(rdP, rdS, p, position);
            p_ring.release(p);
            p.advance();
            release(position.dout());
            if constexpr (Config::kStoresDS) store_ds(rdS, ds);
        };

        pass_turn(kValues);  // the first one's
        while (find_tile(walk, params.dk, params.head_dim)) {
            if constexpr (Config::kStoresDS) find_ds();
            v_ring.wait(v);
            wait(position.dout(), position);
            take_turn(kKeys);
            start_dp();
            pass_turn(kValues);
            ptx::wgmma_wait<0>();
            gradient_of_scores();
            bool accumulate = false;
            for (; walk.left > 0; accumulate = true) {
                --walk.left;
                if constexpr (Config::kStoresDS)
                    ds +=
                        params.ds_workspace.tiles.of_row(walk.at.q_tile) * DSWorkspaceTiles::kBytes;
                walk.at.advance(walk.q_tiles);
                if constexpr (Config::kStoresDS)
                    if (walk.at.q_tile == walk.q_tiles.begin) find_ds();  // of the next head
                const PoolPosition before = position;
                position.advance();
                wait(before.q(), before);
                wait(position.dout(), position);
                take_turn(kKeys);
                start_gradient(before, accumulate);
                start_dp();
                pass_turn(kValues);
                ptx::wgmma_wait<1>();
                finished(rdK);
                release(before.q());
                ptx::wgmma_wait<0>();
                gradient_of_scores();
            }
            wait(position.q(), position);
            take_turn(kKeys);
            start_gradient(position, accumulate);
            pass_turn(kValues);
            ptx::wgmma_wait<0>();
            finished(rdK);
            release(position.q());
            position.advance();
            rdK.scale(params.scale);
            store_rows(
                gradient_rows<Element>(params.dk, tiles[walk.tile], warp_key, params.head_dim),
                rdK);
            end_tile(walk);
        }
    }

    __device__ __forceinline__ void consume() const {
        if (ptx::warp_uniform(threadIdx.x / 128) == 1) {
            consume_values();
        } else {
            consume_keys();
        }
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fa3_backward_keys_kernel(const __grid_constant__ Fa3BackwardStoringParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a
    const Fa3BackwardKeys<Config> kernel(params, ptx::shared_address(dynamic_shared()));
    if (threadIdx.x == 0) kernel.init();
    __syncthreads();              // the barriers are there
    ptx::wait_for_grid_before();  // the statistics are there
    ptx::launch_dependents();
    run_roles<Config>(kernel);
#else
    __trap();  // not to be run elsewhere
#endif
}

template <class Config>
cudaError_t launch_fa3_backward_keys(const BackwardParams& call, const DSWorkspace& ds_workspace,
                                     cudaStream_t stream) {
    Fa3BackwardStoringParams params{call};
    params.ds_workspace = ds_workspace;
    params.scheduler = make_dynamic_scheduler(call.tile_count_semaphore);
    const bool masked = is_masked(params);
    const int group = params.heads_q / params.heads_k;
    params.schedule = make_schedule(
        tile_numbers(params, params.seqlen_k, Config::kBlockKV),
        Config::kStoresDS ? ds_workspace.heads : params.heads_k,
        Config::kStoresDS ? 1 : tensor_batches(params), masked || params.cu_seqlens_q != nullptr,
        int64_t{2} * (Config::kHeadDim + Config::kHeadDimV) * params.seqlen_q * group,  // Q and dO
        1, l2_group_waves(params, masked));
    if (cta_count(params.schedule) == 0) return cudaSuccess;
    const cudaError_t status = params.encode<Config>();
    if (status != cudaSuccess) return status;
    return launch_kernel<fa3_backward_keys_kernel<Config>>(
        min_of(cta_count(params.schedule), multiprocessors()), Config::kThreads,
        Config::kSharedBytes, params, stream, true);
}

}  // namespace flash_ext
