// FlashAttention-3 backward (Shah et al. 2024, algorithm 3), for Hopper.
//
// One CTA per SM takes one KV tile after another; its inner loop goes over the Q tiles that see the
// KV tile, for each query head of the group in turn. Everything is computed transposed, rows are
// keys, as in backward_tile.cuh. Its warpgroups have roles:
//
//   producer       four threads: Q and lse; dO and delta; additions to dQ; the choice of the next
//                  KV tile and its K and V
//   two consumers  each owns 64 keys: S^T, dP^T, and the gradients dK and dV in registers
//
// A consumer's step, in the order in which it starts things; primes belong to the next Q tile:
//
//     S'^T  = K Q'^T               wgmma, asynchronous
//     dV   += P^T dO               wgmma, asynchronous; P^T from registers
//     dK   += dS^T Q               wgmma, asynchronous; dS^T from registers, where they hold it
//     dP'^T = V dO'^T - delta'     wgmma, asynchronous, when these are done
//     P'    = 2^(S' scale - lse')  while dP' runs
//     dS'   = P' * dP'             when dP' is there
//     dQ    = dS K                 wgmma, asynchronous
//
// Beside what has no matmul of its own runs the other consumer's; up to head dim 64 they begin
// their steps by turns for that. dQ sums over the keys of both consumers, so dS^T goes through
// shared memory, and each consumer computes a half of dQ: at head dim 128 half of its columns, as
// dQ^T, which takes the registers of S, at 32 and 64 half of its rows. dQ is summed over CTAs in
// float32 in HBM: a consumer leaves its part in shared memory, in fragment order, and a producer
// adds it by the copy engine. A pass before the kernel makes lse, delta and zeros of it, a pass
// behind converts it, head by head on the SMs that have no more tiles. Short sequences need no
// zeros: the first KV tile of each head comes well before the others, and stores.
//
// Shared memory: K, V; rings of Q and dO tiles with lse and delta; dS^T, twice; each consumer's
// part of dQ; a ring of KV tiles' descriptions (KeyTile).
//
//   barrier               arrives                      waits
//   full(Q, dO, K, V)     TMA, by bytes                consumers, before the matmul that reads it
//   empty(Q, dO, K, V)    each consumer thread, when   producer, before it loads the next
//                         the matmul is done
//   full, empty(tiles)    producer; all readers        all readers; producer
//   draw                  producer of Q, before the    producer of tiles
//                         last load of a tile
//   dS (of each slot)     each consumer warp, when     consumers, before dQ
//                         its rows are written and
//                         its dQ of the step before
//                         is done
//   full(dQ)              each warp of the consumer    producer, before it adds
//   empty(dQ)             producer, when it is read    that consumer, before the next dQ
//   turn (named)          the other consumer, when     consumers, before they start S
//                         its dP is started
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/fa3/backward_passes.cuh"
#include "kernels/fa3/tiles.cuh"
#include "plan/tuning.h"
#include "plan/workspace_rows.cuh"
#include "problem/score.cuh"
#include "problem/sequences.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/uniform.cuh"
#include "schedule/tile_numbers.cuh"
#include "schedule/tile_order.cuh"
#include "tile/wgmma.cuh"

namespace flash_ext {

template <class Element_, int kHeadDim_, int kHeadDimV_, Features kFeatures,
          tuning::Fa3Backward kTuning>
struct Fa3BackwardConfig {
    using Element = Element_;
    static constexpr bool kGeneral = kFeatures == Features::kGeneral;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kConsumers = 2;
    static constexpr int kThreads = (kConsumers + 1) * 128;
    static constexpr int kBlockQ = kTuning.block_q;
    static constexpr int kBlockKV = 64 * kConsumers;
    static constexpr bool kTurns = kTuning.turns;
    static constexpr int kProducerRegisters = 24;
    static constexpr int kConsumerRegisters = 240;

    using QTile = SharedTile<kBlockQ, kHeadDim>;
    using DOTile = SharedTile<kBlockQ, kHeadDimV>;
    using KTile = SharedTile<kBlockKV, kHeadDim>;
    using VTile = SharedTile<kBlockKV, kHeadDimV>;
    using DSTile = SharedTile<kBlockKV, kBlockQ>;
    using QRing = TmaRing<kTuning.q_stages, QTile::kBytes>;
    using DORing = TmaRing<kTuning.do_stages, DOTile::kBytes>;
    using KRing = TmaRing<1, KTile::kBytes>;
    using VRing = TmaRing<1, VTile::kBytes>;
    using DQRing = TmaRing<1, kBlockQ * kHeadDim * 4 / kConsumers>;  // of a consumer
    static constexpr int kWorkspaceBlock = workspace_block(kBlockQ);

    // A consumer's part of dQ has wgmma's 64 rows: of dQ^T, which are columns of dQ, at head dim
    // 128, and then it may have any 8 n queries; of the queries at 32 and 64.
    static constexpr bool kTransposeDQ = kHeadDim == 64 * kConsumers;
    static_assert(kTransposeDQ || kBlockQ == 64 * kConsumers);
    using DQ = RegisterTile<16, kTransposeDQ ? kBlockQ : kHeadDim>;
    // Do registers hold dS^T until dK takes it? Otherwise it comes from shared memory.
    static constexpr bool kHoldDS = kBlockQ <= 80 || kHeadDim <= 32;
    // Does dQ take the registers of S? Gradients of 32 columns leave room for both.
    static constexpr bool kDQTakesScores = kHeadDim > 32;

    static constexpr int kStatisticsBytes = kBlockQ * 4;
    static constexpr int kK = 0;
    static constexpr int kV = kK + KTile::kBytes;
    static constexpr int kQ = kV + VTile::kBytes;
    static constexpr int kDO = kQ + QRing::kSlots * QTile::kBytes;
    static constexpr int kDS = kDO + DORing::kSlots * DOTile::kBytes;
    static constexpr int kDQ = kDS + 2 * DSTile::kBytes;
    static constexpr int kLse = kDQ + kConsumers * DQRing::kSlotBytes;
    static constexpr int kDelta = kLse + QRing::kSlots * kStatisticsBytes;
    static constexpr int kTiles = kDelta + DORing::kSlots * kStatisticsBytes;
    using Tiles = TileQueue<KeyTile, kTiles>;
    static constexpr int kQBarriers = kTiles + Tiles::kBytes;
    static constexpr int kDOBarriers = kQBarriers + QRing::kBarrierBytes;
    static constexpr int kKBarriers = kDOBarriers + DORing::kBarrierBytes;
    static constexpr int kVBarriers = kKBarriers + KRing::kBarrierBytes;
    static constexpr int kTileBarriers = kVBarriers + VRing::kBarrierBytes;
    static constexpr int kDQBarriers = kTileBarriers + Tiles::kBarrierBytes;
    static constexpr int kDSBarriers = kDQBarriers + kConsumers * DQRing::kBarrierBytes;
    static constexpr int kSharedBytes = kDSBarriers + 2 * 8;
    static_assert(kSharedBytes <= 227 * 1024);
};

struct Fa3BackwardMaps : BackwardParams {
    CUtensorMap q_map;
    CUtensorMap do_map;
    CUtensorMap k_map;
    CUtensorMap v_map;

    template <class Config>
    cudaError_t encode() {
        for (cudaError_t status :
             {encode_tensor_map<typename Config::QTile>(q_map, q, element_type, head_dim),
              encode_tensor_map<typename Config::DOTile>(do_map, dout, element_type, head_dim_v),
              encode_tensor_map<typename Config::KTile>(k_map, k, element_type, head_dim),
              encode_tensor_map<typename Config::VTile>(v_map, v, element_type, head_dim_v)})
            if (status != cudaSuccess) return status;
        return cudaSuccess;
    }
};

struct Fa3BackwardParams : Fa3BackwardMaps {
    // Heads (of all batches) by which a head's first KV tile comes before its others. 0: no tile
    // does.
    int lead;
};

// The inner loop's place: Q tile and query head.
struct QTileStep {
    int q_tile;
    int head;

    __device__ __forceinline__ void advance(const Interval& q_tiles) {
        if (++q_tile == q_tiles.end) {
            q_tile = q_tiles.begin;
            ++head;
        }
    }
};

// The Q tiles that see all of `keys`, and whose scores are used as they are. Queries past the
// sequence do not count.
__device__ __forceinline__ Interval full_q_tiles(const KeyTile& tile, const BandMask& mask,
                                                 const Interval& keys, int block_q) {
    if (tile.large_lse) return {0, 0};
    const Interval first = mask.query_range(keys.begin);
    const Interval last = mask.query_range(keys.end - 1);
    const int end = min_of(first.end, last.end);
    return {ceil_div(last.begin, block_q),
            end == mask.seqlen_q ? ceil_div(end, block_q) : end / block_q};
}

// Of a number for each column, those of this thread's two columns among eight.
__device__ __forceinline__ float2 column_pair(const float* of_columns, int n) {
    return *reinterpret_cast<const float2*>(of_columns + 8 * n + lane_col());
}

// S^T to P^T, of a warp's 16 keys and a Q tile of kBlockQ queries.
template <class Element, bool kGeneral, int kBlockQ, class Scores>
__device__ __forceinline__ void exponentiate(Scores& s, const BackwardParams& params,
                                             const KeyTile& tile, int head, int first_key,
                                             int first_query, bool masked, const float* lse) {
    const Sequence& sequence = tile.sequence;
    const auto references = [&] {
        return params.reference +
               workspace_row<workspace_block(kBlockQ)>(params, sequence, head, first_query);
    };
    if constexpr (kGeneral) {
        // A part at a time, since softcap takes registers.
        using Part = RegisterTile<16, 32>;
#pragma unroll
        for (int n = 0; n < Scores::kN; n += Part::kN)
            ScoreFunction<Element, Rows::kKeys, false>{params, sequence, head}.apply(
                reinterpret_cast<Part&>(s.v[0][n]), first_key, first_query + 8 * n);
    }
    if (masked) [[unlikely]] {
        if (!kGeneral && tile.large_lse) [[unlikely]]
            subtract_references<Rows::kKeys>(s, references());
        const BandMask mask = mask_of(params, sequence);
        mask_scores(s, first_query, [&](int row) { return mask.query_range(first_key + row); });
    }
    if (kGeneral && tile.large_lse) [[unlikely]]  // ptxas finds no registers for it above
        subtract_references<Rows::kKeys>(s, references());
    const float scale = kGeneral ? 1.f : params.scale_log2;
#pragma unroll
    for (int n = 0; n < Scores::kN; ++n) {
        const float2 x = column_pair(lse, n);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            s.v[0][n][2 * i] = ptx::ex2(s.v[0][n][2 * i] * scale - x.x);
            s.v[0][n][2 * i + 1] = ptx::ex2(s.v[0][n][2 * i + 1] * scale - x.y);
        }
    }
}

template <class Config>
struct Fa3Backward {
    using Element = typename Config::Element;
    using QTile = typename Config::QTile;
    using DOTile = typename Config::DOTile;
    using KTile = typename Config::KTile;
    using VTile = typename Config::VTile;
    using DSTile = typename Config::DSTile;
    using Scores = RegisterTile<16, Config::kBlockQ>;
    using Operand = RegisterOperand<Config::kBlockQ>;
    using GradientK = RegisterTile<16, Config::kHeadDim>;
    using GradientV = RegisterTile<16, Config::kHeadDimV>;
    using DQ = typename Config::DQ;
    using QCursor = typename Config::QRing::Cursor;
    using DOCursor = typename Config::DORing::Cursor;
    using TileCursor_ = typename Config::Tiles::Cursor;

    const Fa3BackwardParams& params;
    uint32_t shared;
    int consumer;     // number of this thread's warpgroup
    int warp_key;     // first row of its warp within the KV tile
    bool leads_warp;  // is it its warp's first?
    typename Config::QRing q_ring;
    typename Config::DORing do_ring;
    typename Config::KRing k_ring;
    typename Config::VRing v_ring;
    typename Config::Tiles tiles;

    __device__ __forceinline__ Fa3Backward(const Fa3BackwardParams& p, uint32_t shared_)
        : params(p),
          shared(shared_),
          consumer(ptx::warp_uniform(threadIdx.x / 128) - 1),
          warp_key((ptx::warp_uniform(threadIdx.x / 32) - 4) * 16),
          leads_warp(lane_id() == 0),
          q_ring{shared + Config::kQ, shared + Config::kQBarriers},
          do_ring{shared + Config::kDO, shared + Config::kDOBarriers},
          k_ring{shared + Config::kK, shared + Config::kKBarriers},
          v_ring{shared + Config::kV, shared + Config::kVBarriers},
          tiles(shared, Config::kTileBarriers) {}

    __device__ __forceinline__ void init() const {
        constexpr int kReaders = Config::kConsumers * 128;
        constexpr int kWarps = Config::kConsumers * 4;
        q_ring.init(kReaders);
        do_ring.init(kReaders);
        k_ring.init(kReaders);
        v_ring.init(kReaders);
        tiles.init(kWarps + 3);  // and the producers
        for (int i = 0; i < Config::kConsumers; ++i) dq_ring(i).init(1, 4);
        ptx::mbarrier_init(ds_barrier(0), kWarps);
        ptx::mbarrier_init(ds_barrier(1), kWarps);
        ptx::mbarrier_fence_init();
    }

    __device__ __forceinline__ typename Config::DQRing dq_ring(int i) const {
        return {shared + Config::kDQ + i * Config::DQRing::kSlotBytes,
                shared + Config::kDQBarriers + i * Config::DQRing::kBarrierBytes};
    }

    // --- Producer ---

    __device__ __forceinline__ void describe_next(KeyTile& tile, int linear) const {
        WorkTile work;
        if (params.lead == 0) {
            work = work_tile(linear, params.schedule);
        } else {
            const int rank = linear % params.schedule.tiles;
            const int head = linear / params.schedule.tiles - (rank == 0 ? 0 : params.lead);
            if (head < 0 || head >= params.schedule.heads * params.schedule.batch) return;
            work = {rank, head % params.schedule.heads, head / params.schedule.heads};
        }
        describe<Config>(tile, params, work);
        tile.large_lse = params.large_lse.is_raised();
    }

    __device__ __forceinline__ int group() const { return params.heads_q / params.heads_k; }

    // visit(query head, its first row in the workspace, first row, is it the last?) for all steps
    // of a KV tile, whose description stays in shared memory: this warpgroup has few registers.
    template <class Visit>
    __device__ __forceinline__ void for_each_step(const KeyTile& tile, Visit visit) const {
        if (tile.q_tiles.empty()) return;
        for (int left = group() - 1; left >= 0; --left) {
            const int head = (tile.head + 1) * group() - 1 - left;
            const int block = static_cast<int>(
                workspace_row<Config::kWorkspaceBlock>(params, tile.sequence, head, 0) /
                Config::kWorkspaceBlock);
            for (int row = tile.q_tiles.begin * Config::kBlockQ;
                 row < tile.q_tiles.end * Config::kBlockQ; row += Config::kBlockQ)
                visit(head, int64_t{block} * Config::kWorkspaceBlock, row,
                      left == 0 && row + Config::kBlockQ == tile.q_tiles.end * Config::kBlockQ);
        }
    }

    // Chooses the KV tiles, by ticket: so all that a CTA waits for in add_dq() are running. And
    // loads K and V.
    __device__ __forceinline__ void produce_tiles() const {
        ptx::launch_dependents();  // for which an SM has room when this CTA has left
        const auto draw = [&] { return atomicAdd(params.turn, 1); };
        const int total = cta_count(params.schedule) + params.lead * params.schedule.tiles;
        tiles.produce(
            draw(), total, draw, [&](KeyTile& tile, int linear) { describe_next(tile, linear); },
            [&](const KeyTile& tile, const TileCursor_& t) {
                load_keys<VTile>(v_ring, t, params.v_map, params.v, tile);
                load_keys<KTile>(k_ring, t, params.k_map, params.k, tile);
            });
    }

    template <class Tile, class Ring>
    __device__ __forceinline__ void load_keys(const Ring& ring, const TileCursor_& t,
                                              const CUtensorMap& map, const TensorView& view,
                                              const KeyTile& tile) const {
        const Sequence& s = tile.sequence;
        load_tile<Tile>(ring, {0, tiles.parity(t)}, map,
                        TensorRows(view, s.batch, tile.head, s.k_begin, s.seqlen_k),
                        tile.first_key);
    }

    __device__ __forceinline__ void produce_q() const {
        QCursor q;
        tiles.for_each([&](const KeyTile& tile) {
            if (tile.q_tiles.empty()) tiles.let_draw();
            for_each_step(tile, [&](int head, int64_t workspace, int first_row, bool last) {
                if (last) tiles.let_draw();
                load_queries<QTile>(q_ring, q, params.q_map, params.q, tile, head, first_row,
                                    Config::kLse, params.lse_log2 + workspace);
            });
        });
    }

    __device__ __forceinline__ void produce_do() const {
        DOCursor d;
        tiles.for_each([&](const KeyTile& tile) {
            for_each_step(tile, [&](int head, int64_t workspace, int first_row, bool) {
                load_queries<DOTile>(do_ring, d, params.do_map, params.dout, tile, head, first_row,
                                     Config::kDelta, params.delta + workspace);
            });
        });
    }

    // A Q or dO tile and its lse or delta.
    template <class Tile, class Ring>
    __device__ __forceinline__ void load_queries(const Ring& ring, typename Ring::Cursor& cursor,
                                                 const CUtensorMap& map, const TensorView& view,
                                                 const KeyTile& tile, int head, int first_row,
                                                 int statistics, const float* source) const {
        const Sequence& s = tile.sequence;
        load_tile<Tile>(ring, cursor, map, TensorRows(view, s.batch, head, s.q_begin, s.seqlen_q),
                        first_row, shared + statistics + cursor.slot * Config::kStatisticsBytes,
                        source);
        cursor.advance();
    }

    // Adds the consumers' parts to dQ, in deterministic mode KV tiles in ascending order. Where
    // nothing made zeros of dQ, its first KV tile stores. params.turn counts those that have added,
    // where others wait for them: they were all drawn before. And tiles_done() counts KV tiles for
    // the pass behind.
    __device__ __forceinline__ void add_dq() const {
        typename Config::DQRing::Cursor c;
        tiles.for_each([&](const KeyTile& tile) {
            for_each_step(tile, [&](int, int64_t workspace, int first_row, bool) {
                float* accum = params.dq_accum + (workspace + first_row) * Config::kHeadDim;
                int* turn = params.turn + 1 + (workspace + first_row) / Config::kBlockQ;
                const Interval keys = mask_of(params, tile.sequence)
                                          .keys_of({first_row, first_row + Config::kBlockQ});
                const int before =
                    tile.first_key / Config::kBlockKV - keys.begin / Config::kBlockKV;
                const bool stores = before == 0 && !params.dq_zeros;
                const int awaited = params.deterministic ? before : !params.dq_zeros && before > 0;
                if (awaited > 0) {
                    ptx::wait_for_count(turn, awaited, 32);
                    ptx::fence_proxy_async_global();
                }
#pragma unroll 1
                for (int i = 0; i < Config::kConsumers; ++i) {
                    const typename Config::DQRing ring = dq_ring(i);
                    float* part = accum + i * (Config::DQRing::kSlotBytes / 4);
                    ring.wait(c);
                    if (stores) {
                        ptx::bulk_store(part, ring.tile(c), Config::DQRing::kSlotBytes);
                    } else {
                        ptx::bulk_add(part, ring.tile(c), Config::DQRing::kSlotBytes);
                    }
                    ptx::bulk_wait_read();
                    ring.release(c);
                }
                c.advance();
                if (stores || params.deterministic) count_added(turn);
            });
            count_added(tiles_done<Config::kBlockQ>(params, tile.sequence, tile.head));
        });
        ptx::bulk_wait();  // for nothing; without it ptxas schedules consumers worse (note 010)
    }

    // Counts, when all that this thread has added to dQ can be read.
    __device__ __forceinline__ void count_added(int* count) const {
        ptx::bulk_wait();
        ptx::fence_proxy_async_global();
        ptx::red_add_release(count, 1);
    }

    __device__ __forceinline__ void produce() const {
        if (lane_id() != 0) return;
        ptx::wait_for_grid_before();  // the pass that makes lse, delta and zeros
        switch (warp_id()) {
            case 0:
                return produce_q();
            case 1:
                return produce_do();
            case 2:
                return add_dq();
            case 3:
                return produce_tiles();
        }
    }

    // --- Consumers ---

    template <class Ring>
    __device__ __forceinline__ void release(const Ring& ring, typename Ring::Cursor& cursor) const {
        ring.release(cursor);
        cursor.advance();
    }

    // The Q tiles that see all of this consumer's keys.
    __device__ __forceinline__ Interval full_tiles(const KeyTile& tile) const {
        const int first_key = tile.first_key + consumer * 64;
        return full_q_tiles(tile, mask_of(params, tile.sequence), {first_key, first_key + 64},
                            Config::kBlockQ);
    }

    __device__ __forceinline__ const float* statistics(int offset, uint32_t slot) const {
        return reinterpret_cast<const float*>(dynamic_shared() + offset +
                                              slot * Config::kStatisticsBytes);
    }

    // dP^T begins with -delta.
    __device__ __forceinline__ void subtract_delta(Scores& dp, uint32_t slot) const {
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) {
            const float2 delta = column_pair(statistics(Config::kDelta, slot), n);
            dp.v[0][n][0] = dp.v[0][n][2] = -delta.x;
            dp.v[0][n][1] = dp.v[0][n][3] = -delta.y;
        }
    }

    // From P^T and dP^T - delta: P^T and dS^T as operands.
    __device__ __forceinline__ void softmax_gradient(const Scores& p, Scores& dp, Operand& rP,
                                                     Operand& rdS, uint32_t lse_slot,
                                                     const KeyTile& tile,
                                                     const QTileStep& at) const {
        const bool softcap = Config::kGeneral && params.softcap != 0.f;
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) {
            float (&ds)[4] = dp.v[0][n];
#pragma unroll
            for (int i = 0; i < 4; ++i) ds[i] *= p.v[0][n][i];
            if constexpr (Config::kGeneral)
                if (softcap)
                    ScoreFunction<Element, Rows::kKeys, false>{params, tile.sequence, at.head}
                        .softcap_gradient(reinterpret_cast<RegisterTile<16, 8>&>(ds),
                                          reinterpret_cast<const RegisterTile<16, 8>&>(p.v[0][n]),
                                          tile.first_key + warp_key,
                                          at.q_tile * Config::kBlockQ + 8 * n, [&](int col) {
                                              return statistics(Config::kLse,
                                                                lse_slot)[8 * n + col];
                                          });
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                rP.v[n / 2][n % 2 * 2 + i] =
                    ptx::pack<Element>(p.v[0][n][2 * i], p.v[0][n][2 * i + 1]);
                rdS.v[n / 2][n % 2 * 2 + i] = ptx::pack<Element>(ds[2 * i], ds[2 * i + 1]);
            }
        }
    }

    __device__ __forceinline__ void store_ds(const Operand& rdS, uint32_t slot) const {
        const int lane = lane_id();
        const uint32_t address = ds_tile(slot) + DSTile::offset(warp_key + lane % 16, lane / 16);
#pragma unroll
        for (int k = 0; k < Config::kBlockQ / 16; ++k)
            ptx::stmatrix_x4((address ^ (k % DSTile::kBlocksPerPanel * 32)) +
                                 k / DSTile::kBlocksPerPanel * DSTile::kPanelBytes,
                             rdS.v[k]);
        ptx::fence_proxy_async();
    }

    // An operand, moved from a ring's first slot to another.
    template <int kSlotBytes, class Operand_>
    static __device__ __forceinline__ Operand_ in_slot(Operand_ operand, uint32_t slot) {
        operand.descriptor += slot * (kSlotBytes / 16);
        return operand;
    }

    // A consumer's part of dQ to shared memory, for the producer that adds it.
    __device__ __forceinline__ void store_dq(const DQ& rdQ,
                                             typename Config::DQRing::Cursor& c) const {
        const auto ring = dq_ring(consumer);
        auto* slot = reinterpret_cast<float4*>(dynamic_shared() + (ring.tile(c) - shared)) +
                     (threadIdx.x / 32 % 4) * (DQ::kN * 32) + lane_id();
#pragma unroll
        for (int n = 0; n < DQ::kN; ++n) {
            const float (&x)[4] = rdQ.v[0][n];
            slot[n * 32] = make_float4(x[0], x[1], x[2], x[3]);
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (leads_warp) ring.publish(c);
        c.advance();
    }

    // Consumers that fall into step have their matmuls at the same time, and none beside the
    // exponentials. So one begins a step when the other has started the last matmul before its own.
    __device__ __forceinline__ void take_turn() const {
        if constexpr (Config::kTurns) ptx::barrier_sync(3 + consumer, Config::kConsumers * 128);
    }
    __device__ __forceinline__ void pass_turn() const {
        if constexpr (Config::kTurns) ptx::barrier_arrive(4 - consumer, Config::kConsumers * 128);
    }

    __device__ __forceinline__ void consume() const {
        if (consumer == 1) pass_turn();  // the first one's
        QCursor q;                       // of the scores, or, where dK is behind them, ...
        QCursor q_done;                  // of dK
        DOCursor d, d_done;              // the same of dP and dV
        TileCursor_ t;
        typename Config::DQRing::Cursor part;  // of dQ
        uint32_t ds = 0;                       // slot of dS
        uint32_t ds_parity = 0;                // of dQ's slot
        GradientK rdK;
        GradientV rdV;
        // Operands in shared memory, of rings in their first slots.
        const AlongRows<KTile> k_rows(shared + Config::kK, consumer * 64);
        const AlongRows<VTile> v_rows(shared + Config::kV, consumer * 64);
        const AlongRows<QTile> q_rows(shared + Config::kQ);
        const AlongRows<DOTile> do_rows(shared + Config::kDO);
        const AlongColumns<QTile> q_columns(shared + Config::kQ);
        const AlongColumns<DOTile> do_columns(shared + Config::kDO);
        const AlongRows<DSTile> ds_rows(ds_tile(0), consumer * 64);
        const AlongColumns<DSTile> ds_columns(
            ds_tile(0) + (Config::kTransposeDQ ? 0 : consumer * DSTile::kPanelBytes));
        const AlongColumns<KTile> k_columns(
            shared + Config::kK + (Config::kTransposeDQ ? consumer * KTile::kPanelBytes : 0));

        for (;; t.advance()) {
            tiles.ring.wait(t);
            const KeyTile& tile = tiles[t];
            if (ptx::warp_uniform(tile.first_key) < 0) return;
            const Interval q_tiles{ptx::warp_uniform(tile.q_tiles.begin),
                                   ptx::warp_uniform(tile.q_tiles.end)};
            typename Config::KRing::Cursor k{0, tiles.parity(t)};
            typename Config::VRing::Cursor v{0, tiles.parity(t)};
            if (q_tiles.empty()) [[unlikely]] {
                k_ring.wait(k);
                v_ring.wait(v);
                release(k_ring, k);
                release(v_ring, v);
                store_zeros(gradient_rows<Element>(params.dk, tile, warp_key, params.head_dim));
                store_zeros(gradient_rows<Element>(params.dv, tile, warp_key, params.head_dim_v));
            } else {
                const Interval full = full_tiles(tile);
                int steps = (q_tiles.end - q_tiles.begin) * group();
                QTileStep at{q_tiles.begin, ptx::warp_uniform(tile.head) * group()};
                Scores rS, rdP;
                Operand rP, rdS;
                DQ own_rdQ;
                auto& rdQ = Config::kDQTakesScores ? reinterpret_cast<DQ&>(rS) : own_rdQ;

                const auto start_scores = [&] {
                    q_ring.wait(q);
                    start_gemm<Element, Config::kHeadDim>(
                        rS, k_rows, in_slot<QTile::kBytes>(q_rows, q.slot), false);
                };
                const auto start_dp = [&] {
                    do_ring.wait(d);
                    subtract_delta(rdP, d.slot);
                    start_gemm<Element, Config::kHeadDimV>(
                        rdP, v_rows, in_slot<DOTile::kBytes>(do_rows, d.slot), true);
                };
                const auto probabilities = [&] {
                    exponentiate<Element, Config::kGeneral, Config::kBlockQ>(
                        rS, params, tile, at.head, tile.first_key + warp_key,
                        at.q_tile * Config::kBlockQ,
                        at.q_tile < full.begin || at.q_tile >= full.end,
                        statistics(Config::kLse, q.slot));
                };
                const auto start_dv_dk = [&](bool accumulate) {
                    start_gemm<Element, Config::kBlockQ>(
                        rdV, rP, in_slot<DOTile::kBytes>(do_columns, d_done.slot), accumulate);
                    const auto Q = in_slot<QTile::kBytes>(q_columns, q_done.slot);
                    if constexpr (Config::kHoldDS) {
                        start_gemm<Element, Config::kBlockQ>(rdK, rdS, Q, accumulate);
                    } else {
                        ptx::barrier_sync(1 + consumer, 128);  // all of its dS is there
                        start_gemm<Element, Config::kBlockQ>(
                            rdK, in_slot<DSTile::kBytes>(ds_rows, ds), Q, accumulate);
                    }
                };
                // This consumer's part of dQ.
                const auto start_dq = [&] {
                    dq_ring(consumer).acquire(part);
                    const auto dS = in_slot<DSTile::kBytes>(ds_columns, ds);
                    if constexpr (Config::kTransposeDQ) {
                        start_gemm_columns<Element, Config::kBlockKV>(rdQ, k_columns, dS, false);
                    } else {
                        start_gemm_columns<Element, Config::kBlockKV>(rdQ, dS, k_columns, false);
                    }
                };
                const auto finish_dv_dk = [&] {
                    ptx::wgmma_wait<0>();
                    finished(rdV);
                    finished(rdK);
                    release(q_ring, q_done);
                    release(do_ring, d_done);
                };
                const auto finish_dp = [&] {
                    ptx::wgmma_wait<0>();
                    finished(rdP);
                };
                // Both consumers' dS is there, and their dQ of the step before done.
                const auto wait_ds = [&] { ptx::mbarrier_wait(ds_barrier(ds), ds_parity); };
                const auto publish_ds = [&] {
                    __syncwarp();
                    if (leads_warp) ptx::mbarrier_arrive(ds_barrier(ds));
                };
                const auto next_ds = [&] {
                    ds_parity ^= ds;
                    ds ^= 1;
                };

                k_ring.wait(k);
                take_turn();
                start_scores();
                ptx::wgmma_wait<0>();
                finished(rS);
                v_ring.wait(v);
                start_dp();
                pass_turn();
                probabilities();
                finish_dp();
                softmax_gradient(rS, rdP, rP, rdS, q.slot, tile, at);
                store_ds(rdS, ds);
                publish_ds();
                bool accumulate = false;

                while (--steps > 0) {
                    q.advance();
                    d.advance();
                    at.advance(q_tiles);
                    take_turn();
                    start_scores();
                    start_dv_dk(accumulate);
                    accumulate = true;
                    finish_dv_dk();
                    finished(rS);
                    start_dp();
                    pass_turn();
                    probabilities();
                    finish_dp();
                    wait_ds();
                    softmax_gradient(rS, rdP, rP, rdS, q.slot, tile, at);
                    store_ds(rdS, ds ^ 1);
                    start_dq();
                    ptx::wgmma_wait<0>();
                    finished(rdQ);
                    next_ds();
                    publish_ds();
                    store_dq(rdQ, part);
                }

                release(v_ring, v);
                start_dv_dk(accumulate);
                wait_ds();
                start_dq();
                finish_dv_dk();
                finished(rdQ);
                next_ds();
                release(k_ring, k);
                q.advance();
                d.advance();
                store_dq(rdQ, part);
                rdK.scale(params.scale);
                store_rows(gradient_rows<Element>(params.dv, tile, warp_key, params.head_dim_v),
                           rdV);
                store_rows(gradient_rows<Element>(params.dk, tile, warp_key, params.head_dim), rdK);
            }
            __syncwarp();
            if (leads_warp) tiles.ring.release(t);
        }
    }

 private:
    __device__ __forceinline__ uint32_t ds_tile(uint32_t slot) const {
        return shared + Config::kDS + slot * DSTile::kBytes;
    }
    __device__ __forceinline__ uint32_t ds_barrier(uint32_t slot) const {
        return shared + Config::kDSBarriers + 8 * slot;
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fa3_backward_kernel(const __grid_constant__ Fa3BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a
    const Fa3Backward<Config> kernel(params, ptx::shared_address(dynamic_shared()));
    if (threadIdx.x == 0) kernel.init();
    __syncthreads();  // the barriers are there
    run_roles<Config>(kernel);
#else
    __trap();  // not to be run elsewhere
#endif
}

// A first KV tile is to be done when the others of its head begin: so as many tiles lie between as
// CTAs run, more under a mask, where it has 2 tiles / (tiles + 1) times the mean's steps. Not for
// long sequences, which zeros cost little, nor where the heads between do not fit in L2 or are most
// of all (note 010).
inline int lead_of(const BackwardParams& params, bool masked, int64_t bytes_per_head) {
    constexpr int kMaxTiles = 16;
    constexpr int64_t kL2Share = int64_t{67} << 19;  // 33.5 MB
    const Schedule& schedule = params.schedule;
    if (params.deterministic || params.cu_seqlens_q != nullptr || schedule.tiles < 2 ||
        schedule.tiles > kMaxTiles)
        return 0;
    const int lead = masked ? ceil_div(2 * multiprocessors(), schedule.tiles + 1)
                            : ceil_div(multiprocessors(), schedule.tiles);
    const bool fits = lead * bytes_per_head <= kL2Share;
    return fits && 4 * lead <= schedule.heads * schedule.batch ? lead : 0;
}

template <class Config>
cudaError_t launch_fa3_backward(const BackwardParams& call, cudaStream_t stream) {
    Fa3BackwardParams params{{call}};
    const bool masked = is_masked(params);
    // Q, dO and dQ.
    const int64_t bytes_per_head = int64_t{6 * Config::kHeadDim + 2 * Config::kHeadDimV} *
                                   params.seqlen_q * (params.heads_q / params.heads_k);
    params.schedule = make_schedule(
        tile_numbers(params, params.seqlen_k, Config::kBlockKV), params.heads_k,
        tensor_batches(params), masked || params.cu_seqlens_q != nullptr || params.deterministic,
        // Deterministic mode interleaves all heads, as in fa2/backward.cuh.
        params.deterministic ? 0 : bytes_per_head, 1, section_fillings(params, masked));
    params.lead = lead_of(params, masked, bytes_per_head);
    params.dq_zeros = params.lead == 0 && !params.deterministic;
    cudaError_t status = params.encode<Config>();
    if (status == cudaSuccess)
        status = launch_prepare<typename Config::Element, Config::kGeneral, Config::kBlockQ,
                                Config::kHeadDimV, Config::kHeadDim>(params, stream);
    if (status == cudaSuccess)
        status = launch_kernel<fa3_backward_kernel<Config>>(
            min_of(cta_count(params.schedule), multiprocessors()), Config::kThreads,
            Config::kSharedBytes, params, stream, true);
    if (status == cudaSuccess) status = launch_fa3_convert_dq<Config>(params, stream);
    return status;
}

template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_backward(BackwardParams params, cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    dispatch_kernel<Features::kPacked, Features::kGeneral>(params, [&](auto element,
                                                                       auto features) {
        const bool many_queries = tuning::many_queries(features_of(params), mean_queries(params));
        dispatch<false, true>(many_queries, [&](auto many) {
            constexpr bool kMany = many && features.value != Features::kGeneral;
            using Config = Fa3BackwardConfig<decltype(element), kHeadDim, kHeadDimV, features.value,
                                             tuning::fa3_backward({kHeadDim, kHeadDimV}, kMany)>;
            status = launch_fa3_backward<Config>(params, stream);
        });
    });
    return status;
}

}  // namespace flash_ext
