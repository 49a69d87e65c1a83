// FlashAttention-3 backward for wide heads, part two: dQ. For Hopper. Part one, and why there are
// two, is fa3/backward_keys.cuh.
//
// One CTA per SM takes one Q tile after another, whichever is next
// (dynamic_persistent_scheduler.cuh), and goes over the KV tiles that it sees. Its warpgroups have
// roles:
//
//   producer       four threads: K; V; Q and dO; the choice of Q tiles
//   two consumers  each owns 64 queries, with dQ in registers
//
// A consumer's step, in the order in which it starts things; primes belong to the next KV tile:
//
//     dQ  += dS K                  wgmma, asynchronous
//     S'   = Q K'^T                wgmma, asynchronous
//     dP'  = dO V'^T               wgmma, asynchronous, when dQ is done
//     P'   = 2^(S' scale - lse)    when S' is there, while dP' runs
//     dS'  = P' * (dP' - delta)    when dP' is there, beside the other consumer's matmuls
//
// They take turns at starting their matmuls, so that one's arithmetic runs beside the other's.
// dS goes from the registers into dQ.
//
// Shared memory: Q and dO, with lse and delta; rings of K and V tiles, and of Q tiles' descriptions
// (QueryTile).
//
//   barrier              arrives                       waits
//   full(Q, dO, K, V)    TMA, by bytes                 consumers, before the matmul that reads it
//   empty(K, V)          each consumer warp, when      its producer, before it loads the next
//                        the matmul is done
//   empty(Q, dO)         each warp of the consumer     its producer
//                        whose rows they are
//   turn (named)         the other consumer, when      consumers, before they start theirs
//                        its matmuls are started
//   full, empty(tiles)   producer; all readers         all readers; producer
//   fetch                producer of K, before a       producer of tiles
//                        tile's last loads
#pragma once

#include "kernels/fa3/backward_keys.cuh"
#include "plan/workspace_rows.cuh"
#include "problem/sequences.cuh"
#include "schedule/packed_gqa.h"
#include "schedule/tile_order.cuh"

namespace flash_ext {

template <class Element_, int kHeadDim_, int kHeadDimV_, Features kFeatures, int kStagesK,
          int kStagesV>
struct Fa3BackwardQueriesConfig {
    using Element = Element_;
    static constexpr bool kGeneral = kFeatures == Features::kGeneral;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kConsumers = 2;
    static constexpr int kThreads = (kConsumers + 1) * 128;
    static constexpr int kBlockQ = kConsumers * 64;
    static constexpr int kBlockKV = 64;
    static constexpr int kFetchAhead = 2;
    // As many for the consumers as they need.
    static constexpr int kProducerRegisters = kHeadDim == 256 ? 24 : 40;
    static constexpr int kConsumerRegisters = kHeadDim == 256 ? 240 : 232;

    // A consumer's.
    using QTile = SharedTile<64, kHeadDim>;
    using DOTile = SharedTile<64, kHeadDimV>;
    using KTile = SharedTile<kBlockKV, kHeadDim>;
    using VTile = SharedTile<kBlockKV, kHeadDimV>;
    using QRing = TmaRing<1, QTile::kBytes>;
    using DORing = TmaRing<1, DOTile::kBytes>;
    using KRing = TmaRing<kStagesK, KTile::kBytes>;
    using VRing = TmaRing<kStagesV, VTile::kBytes>;
    static_assert(kStagesK >= 2);  // of this step and of the next

    static constexpr int kQ = 0;
    static constexpr int kDO = kQ + kConsumers * QTile::kBytes;
    static constexpr int kK = kDO + kConsumers * DOTile::kBytes;
    static constexpr int kV = kK + KRing::kSlots * KTile::kBytes;
    static constexpr int kStatisticsBytes = 64 * 4;  // a consumer's
    static constexpr int kLse = kV + VRing::kSlots * VTile::kBytes;
    static constexpr int kDelta = kLse + kConsumers * kStatisticsBytes;
    static constexpr int kTiles = kDelta + kConsumers * kStatisticsBytes;
    using Tiles = TileQueue<QueryTile, kTiles>;
    static constexpr int kQBarriers = kTiles + Tiles::kBytes;
    static constexpr int kDOBarriers = kQBarriers + kConsumers * QRing::kBarrierBytes;
    static constexpr int kKBarriers = kDOBarriers + kConsumers * DORing::kBarrierBytes;
    static constexpr int kVBarriers = kKBarriers + KRing::kBarrierBytes;
    static constexpr int kTileBarriers = kVBarriers + VRing::kBarrierBytes;
    static constexpr int kSharedBytes = kTileBarriers + Tiles::kBarrierBytes;
    static_assert(kSharedBytes <= 227 * 1024);
};

template <class Config>
struct Fa3BackwardQueries {
    using Element = typename Config::Element;
    using QTile = typename Config::QTile;
    using DOTile = typename Config::DOTile;
    using KTile = typename Config::KTile;
    using VTile = typename Config::VTile;
    using QRing = typename Config::QRing;
    using DORing = typename Config::DORing;
    using KCursor = typename Config::KRing::Cursor;
    using TileCursor_ = typename Config::Tiles::Cursor;
    using Scores = RegisterTile<16, Config::kBlockKV>;
    using Operand = RegisterOperand<Config::kBlockKV>;
    using DQ = RegisterTile<16, Config::kHeadDim>;

    const Fa3BackwardWideParams& params;
    uint32_t shared;
    bool leads_warp;  // is it its warp's first?
    typename Config::KRing k_ring;
    typename Config::VRing v_ring;
    typename Config::Tiles tiles;

    __device__ __forceinline__ Fa3BackwardQueries(const Fa3BackwardWideParams& p, uint32_t shared_)
        : params(p),
          shared(shared_),
          leads_warp(lane_id() == 0),
          k_ring{shared + Config::kK, shared + Config::kKBarriers},
          v_ring{shared + Config::kV, shared + Config::kVBarriers},
          tiles(shared, Config::kTileBarriers) {}

    __device__ __forceinline__ QRing q_ring(int of) const {
        return {shared + Config::kQ + of * QTile::kBytes,
                shared + Config::kQBarriers + of * QRing::kBarrierBytes};
    }
    __device__ __forceinline__ DORing do_ring(int of) const {
        return {shared + Config::kDO + of * DOTile::kBytes,
                shared + Config::kDOBarriers + of * DORing::kBarrierBytes};
    }

    __device__ __forceinline__ void init() const {
        constexpr int kReaders = Config::kConsumers * 4;
        for (int i = 0; i < Config::kConsumers; ++i) {
            q_ring(i).init(4);
            do_ring(i).init(128);  // all threads, since all read the statistics
        }
        k_ring.init(kReaders);
        v_ring.init(kReaders);
        tiles.init(kReaders + 3);  // and the other producers
        ptx::mbarrier_fence_init();
    }

    // --- Producer ---

    // Chooses the Q tiles.
    __device__ __forceinline__ void produce_tiles() const {
        params.scheduler.start();
        const int total = cta_count(params.schedule);
        tiles.produce(
            blockIdx.x, total, [&] { return params.scheduler.fetch(total); },
            [&](QueryTile& tile, int linear) {
                describe<Config>(tile, params, work_tile(linear, params.schedule));
                tile.large_lse = params.large_lse.is_raised();
            },
            [](const QueryTile&, const TileCursor_&) {});
    }

    __device__ __forceinline__ void produce_k() const {
        KCursor k;
        tiles.for_each([&](const QueryTile& tile) {
            const Sequence& s = tile.sequence;
            const TensorRows rows(params.k, s.batch, head_k(tile), s.k_begin, s.seqlen_k);
            int first_key = tile.kv_tiles.begin * Config::kBlockKV;
            int left = tile.kv_tiles.end - tile.kv_tiles.begin;
            int until_fetch = max_of(left - 1 - Config::kFetchAhead, 0);
            if (left == 0) tiles.let_fetch();
            for (; left > 0; --left, --until_fetch, first_key += Config::kBlockKV) {
                if (until_fetch == 0) tiles.let_fetch();
                load_tile<KTile>(k_ring, k, params.k_map, rows, first_key);
                k.advance();
            }
        });
    }

    __device__ __forceinline__ void produce_v() const {
        typename Config::VRing::Cursor v;
        tiles.for_each([&](const QueryTile& tile) {
            const Sequence& s = tile.sequence;
            const TensorRows rows(params.v, s.batch, head_k(tile), s.k_begin, s.seqlen_k);
            for (int i = tile.kv_tiles.begin; i < tile.kv_tiles.end; ++i, v.advance())
                load_tile<VTile>(v_ring, v, params.v_map, rows, i * Config::kBlockKV);
        });
    }

    __device__ __forceinline__ void produce_q_do() const {
        uint32_t round = 0;
        tiles.for_each([&](const QueryTile& tile) {
            if (tile.kv_tiles.empty()) return;
            const Sequence& s = tile.sequence;
            {
                const TensorRows rows(params.q, s.batch, tile.head, s.q_begin, s.seqlen_q);
                for (int i = 0; i < Config::kConsumers; ++i)
                    load_tile<QTile>(q_ring(i), {0, round}, params.q_map, rows,
                                     tile.first_query + i * 64);
            }
            const TensorRows rows(params.dout, s.batch, tile.head, s.q_begin, s.seqlen_q);
            for (int i = 0; i < Config::kConsumers; ++i) {
                const int first_query = tile.first_query + i * 64;
                const DORing ring = do_ring(i);
                const typename DORing::Cursor d{0, round};
                ring.acquire(d);
                ptx::mbarrier_arrive_expect(ring.full(d),
                                            DOTile::kBytes + 2 * Config::kStatisticsBytes);
                const auto load_statistics = [&](int offset, const float* source) {
                    ptx::bulk_load(shared + offset + i * Config::kStatisticsBytes,
                                   source + workspace_row(params, s, tile.head, first_query),
                                   Config::kStatisticsBytes, ring.full(d));
                };
                load_statistics(Config::kLse, params.lse_log2);
                load_statistics(Config::kDelta, params.delta);
                rows.load<DOTile>(params.do_map, ring.tile(d), ring.full(d), first_query);
            }
            round ^= 1;
        });
    }

    __device__ __forceinline__ int head_k(const QueryTile& tile) const {
        return tile.head / (params.heads_q / params.heads_k);
    }

    __device__ __forceinline__ void produce() const {
        if (lane_id() != 0) return;
        switch (warp_id()) {
            case 0:
                return produce_k();
            case 1:
                return produce_v();
            case 2:
                return produce_q_do();
            case 3:
                return produce_tiles();
        }
    }

    // --- Consumers ---

    // The number of this thread's warpgroup, and the first row of its warp within the Q tile; not
    // kept in registers over the loop.
    __device__ __forceinline__ int consumer() const {
        return ptx::not_hoisted(threadIdx.x) / 128 - 1;
    }
    __device__ __forceinline__ int warp_row() const {
        return (ptx::not_hoisted(threadIdx.x) / 32 - 4) * 16;
    }

    template <class Ring>
    __device__ __forceinline__ void release(const Ring& ring, typename Ring::Cursor& cursor) const {
        if (leads_warp) ring.release(cursor);
        cursor.advance();
    }

    // Consumers take turns at starting their matmuls, one for each KV tile.
    __device__ __forceinline__ void take_turn() const { ptx::barrier_sync(1 + consumer(), 256); }
    __device__ __forceinline__ void pass_turn() const { ptx::barrier_arrive(2 - consumer(), 256); }

    // Lets go of KV tiles that it has no use for.
    __device__ __forceinline__ void skip(KCursor& k, typename Config::VRing::Cursor& v,
                                         int tiles) const {
        for (; tiles > 0; --tiles) {
            take_turn();
            pass_turn();
            k_ring.wait(k);  // or its writer would count this reader twice
            release(k_ring, k);
            v_ring.wait(v);
            release(v_ring, v);
        }
    }

    // A consumer's way through the Q tiles: where its scores are.
    struct Walk {
        TileCursor_ tile;
        int kv_tile;
        int last;  // of its KV tiles
    };

    // The next Q tile that has KV tiles; dQ of those that have none is written as zeros.
    __device__ __forceinline__ bool find_tile(Walk& walk) const {
        for (;; end_tile(walk)) {
            tiles.ring.wait(walk.tile);
            const QueryTile& tile = tiles[walk.tile];
            if (ptx::warp_uniform(tile.first_query) < 0) return false;
            const Interval kv{ptx::warp_uniform(tile.kv_tiles.begin),
                              ptx::warp_uniform(tile.kv_tiles.end)};
            if (!kv.empty()) {
                const int first_query = tile.first_query + consumer() * 64;
                const Interval own = tiles_of(
                    mask_of(params, tile.sequence).keys_of({first_query, first_query + 64}),
                    Config::kBlockKV);
                // At least one, even if it is hidden.
                walk.kv_tile = ptx::warp_uniform(clamp(own.begin, kv.begin, kv.end - 1));
                walk.last = ptx::warp_uniform(clamp(own.end - 1, walk.kv_tile, kv.end - 1));
                return true;
            }
            store_zeros(gradient_rows(tile));
        }
    }

    __device__ __forceinline__ void end_tile(Walk& walk) const {
        __syncwarp();
        if (leads_warp) tiles.ring.release(walk.tile);
        walk.tile.advance();
    }

    // KV tiles of the Q tile that this consumer does not see, where it is at its first, at its
    // last.
    __device__ __forceinline__ int hidden_before(const Walk& walk) const {
        return walk.kv_tile - ptx::warp_uniform(tiles[walk.tile].kv_tiles.begin);
    }
    __device__ __forceinline__ int hidden_behind(const Walk& walk) const {
        return ptx::warp_uniform(tiles[walk.tile].kv_tiles.end) - 1 - walk.last;
    }

    // The statistics of this thread's two rows, which came with dO.
    struct Statistics {
        float x[2];
    };
    __device__ __forceinline__ Statistics statistics(int offset) const {
        const auto* x =
            reinterpret_cast<const float*>(dynamic_shared() + offset) + warp_row() + lane_row();
        return {{x[0], x[8]}};
    }

    // S to P.
    __device__ __forceinline__ void exponentiate(Scores& s, const Walk& walk) const {
        const QueryTile& tile = tiles[walk.tile];
        const int first_key = walk.kv_tile * Config::kBlockKV;
        if constexpr (Config::kGeneral) {
            // A part at a time, since softcap takes registers.
            using Part = RegisterTile<16, 32>;
#pragma unroll
            for (int n = 0; n < Scores::kN; n += Part::kN)
                ScoreFunction<Element, Rows::kQueries, false>{params, tile.sequence, tile.head}
                    .apply(reinterpret_cast<Part&>(s.v[0][n]), tile.first_query + warp_row(),
                           first_key + 8 * n);
        }
        const BandMask mask = mask_of(params, tile.sequence);
        const int first_query = tile.first_query + warp_row();
        if (tile.large_lse || !mask.is_full({first_query, first_query + 16},
                                            {first_key, first_key + Config::kBlockKV}))
            [[unlikely]] {
            mask_scores(s, first_key, [&](int row) { return mask.key_range(first_query + row); });
            if (tile.large_lse)
                subtract_references<Rows::kQueries>(
                    s, params.reference + workspace_row<workspace_block(Config::kBlockQ)>(
                                              params, tile.sequence, tile.head, first_query));
        }
        const float scale = Config::kGeneral ? 1.f : params.scale_log2;
        const Statistics lse = statistics(Config::kLse);
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                s.v[0][n][i] = ptx::ex2(s.v[0][n][i] * scale - lse.x[i / 2]);
    }

    // P and dP to dS, as an operand.
    __device__ __forceinline__ void softmax_gradient(const Scores& p, Scores& dp, Operand& rdS,
                                                     const Walk& walk) const {
        const Statistics delta = statistics(Config::kDelta);
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                dp.v[0][n][i] = p.v[0][n][i] * (dp.v[0][n][i] - delta.x[i / 2]);
        if constexpr (Config::kGeneral)
            if (params.softcap != 0.f) {
                const QueryTile& tile = tiles[walk.tile];
                const Statistics lse = statistics(Config::kLse);
                ScoreFunction<Element, Rows::kQueries, false>{params, tile.sequence, tile.head}
                    .softcap_gradient(dp, p, tile.first_query + warp_row(),
                                      walk.kv_tile * Config::kBlockKV,
                                      [&](int row) { return row < 8 ? lse.x[0] : lse.x[1]; });
            }
        rdS.template round<Element>(dp);
    }

    // Keeps the compiler from moving P's arithmetic behind a wait that follows, where no matmul
    // would run beside it: by a branch on P, which has no negative numbers.
    static __device__ __forceinline__ void compute_here(const Scores& p) {
        uint32_t bits = 0;
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) bits |= __float_as_uint(p.v[0][n][i]);
        if (__any_sync(0xffffffff, static_cast<int>(bits) < 0)) [[unlikely]]
            __nanosleep(1);
    }

    // Where this warp's rows of dQ go.
    __device__ __forceinline__ GlobalTile<Element> gradient_rows(const QueryTile& tile) const {
        const Sequence& s = tile.sequence;
        const int first_row = tile.first_query + warp_row();
        return global_tile<Element>(params.dq, s.batch, s.q_begin + first_row, tile.head,
                                    s.seqlen_q - first_row, params.head_dim);
    }

    __device__ __forceinline__ void consume() const {
        Walk walk;
        typename QRing::Cursor q;  // and of dO
        KCursor k;                 // of the scores
        typename Config::VRing::Cursor v;
        Scores rS, rdP;
        Operand rdS;
        DQ rdQ;

        // Descriptors are made where they are used: the compiler would hold those of every 16
        // columns in registers over the loop.
        const auto start_scores = [&] {
            const AlongRows<QTile> q_rows(q_ring(consumer()).slots);
            const AlongRows<KTile> k_rows(k_ring.tile(k));
            start_gemm<Element, Config::kHeadDim>(rS, q_rows, k_rows, false);
        };
        const auto start_dp = [&](bool first) {
            if (first) do_ring(consumer()).wait({0, q.round});
            v_ring.wait(v);
            const AlongRows<DOTile> do_rows(do_ring(consumer()).slots);
            const AlongRows<VTile> v_rows(v_ring.tile(v));
            start_gemm<Element, Config::kHeadDimV>(rdP, do_rows, v_rows, false);
        };
        const auto start_gradient = [&](uint32_t k_slot, bool accumulate) {
            const AlongColumns<KTile> k_columns(k_ring.tile({k_slot, 0}));
            start_gemm<Element, Config::kBlockKV>(rdQ, rdS, k_columns, accumulate);
        };
        const auto probabilities = [&] {
            if (walk.kv_tile == walk.last && leads_warp) q_ring(consumer()).release(q);
            exponentiate(rS, walk);
            compute_here(rS);
        };
        const auto gradient_of_scores = [&] {
            finished(rdP);
            release(v_ring, v);
            softmax_gradient(rS, rdP, rdS, walk);
            if (walk.kv_tile == walk.last) {
                do_ring(consumer()).release({0, q.round});
                q.advance();
            }
        };
        const auto store = [&](const QueryTile& tile) {
            rdQ.scale(params.scale);
            store_rows(gradient_rows(tile), rdQ);
        };

        if (consumer() == 1) pass_turn();  // the first one's
        while (find_tile(walk)) {
            skip(k, v, hidden_before(walk));
            q_ring(consumer()).wait(q);
            k_ring.wait(k);
            take_turn();
            start_scores();
            start_dp(true);
            pass_turn();
            ptx::wgmma_wait<1>();
            finished(rS);
            probabilities();
            ptx::wgmma_wait<0>();
            gradient_of_scores();
            bool accumulate = false;
            for (; walk.kv_tile < walk.last; accumulate = true) {
                ++walk.kv_tile;
                const uint32_t k_slot = k.slot;
                k.advance();
                k_ring.wait(k);
                take_turn();
                start_gradient(k_slot, accumulate);
                start_scores();
                ptx::wgmma_wait<1>();
                finished(rdQ);
                if (leads_warp) k_ring.release({k_slot, 0});
                start_dp(false);
                pass_turn();
                ptx::wgmma_wait<1>();
                finished(rS);
                probabilities();
                ptx::wgmma_wait<0>();
                gradient_of_scores();
            }
            start_gradient(k.slot, accumulate);
            ptx::wgmma_wait<0>();
            finished(rdQ);
            release(k_ring, k);
            store(tiles[walk.tile]);
            skip(k, v, hidden_behind(walk));
            end_tile(walk);
        }
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fa3_backward_queries_kernel(const __grid_constant__ Fa3BackwardWideParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a
    const Fa3BackwardQueries<Config> kernel(params, ptx::shared_address(dynamic_shared()));
    if (threadIdx.x == 0) kernel.init();
    __syncthreads();  // the barriers are there
    run_roles<Config>(kernel);
    // Needs nothing of the kernel before but the statistics that this one had read, and so begins
    // while that one's last CTAs run; but what comes behind needs both.
    ptx::wait_for_grid_before();
#else
    __trap();  // not to be run elsewhere
#endif
}

template <class Config>
cudaError_t launch_fa3_backward_queries(const BackwardParams& call, cudaStream_t stream) {
    Fa3BackwardWideParams params{call};
    params.scheduler = make_dynamic_scheduler(call.tile_count_semaphore + 1);
    params.schedule = forward_schedule(params, {params.heads_q, Config::kBlockQ},
                                       Config::kHeadDim + Config::kHeadDimV, 1);
    if (cta_count(params.schedule) == 0) return cudaSuccess;
    const cudaError_t status = params.encode<Config>();
    if (status != cudaSuccess) return status;
    return launch_kernel<fa3_backward_queries_kernel<Config>>(
        min_of(cta_count(params.schedule), multiprocessors()), Config::kThreads,
        Config::kSharedBytes, params, stream, true);
}

}  // namespace flash_ext
