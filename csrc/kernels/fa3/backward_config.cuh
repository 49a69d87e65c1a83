// The parameters of the FA3 backward, and its config: tiles, schedule, pipelines and shared memory.
#pragma once

#include <type_traits>

#include "kernels/fa3/backward_common.cuh"
#include "kernels/fa3/cta.cuh"
#include "plan/tuning.h"

namespace flash_ext {

// A part of a Q tile of dq_accum.
struct DQHalf {
    int first;  // its first float within the tile
    int floats;
};

struct Fa3BackwardParams : Fa3BackwardMaps {
    // The number of heads (of all batches) by which a head's first KV tile comes before its other
    // tiles. 0: all tiles of a head are in order.
    int lead;
};

template <class Element_, int kHeadDim_, int kHeadDimV_, Features kFeatures,
          tuning::Fa3Backward kTuning>
struct Fa3BackwardConfig {
    using Element = Element_;
    using Params = Fa3BackwardParams;
    static constexpr bool kGeneral = kFeatures == Features::kGeneral;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kConsumers = 2;
    static constexpr int kThreads = (kConsumers + 1) * 128;
    static constexpr int kBlockQ = kTuning.block_q;
    static constexpr int kBlockKV = 64 * kConsumers;
    static constexpr bool kPingPong = kTuning.steps().ping_pong;
    static constexpr bool kByMatmul = kTuning.steps().by_matmul;
    static constexpr bool kEarlyExponentials = kTuning.steps().early_exponentials;
    static constexpr bool kLateFences = kTuning.steps().late_fences;
    static constexpr bool kTransposeDQ = kTuning.transpose_dq;
    static constexpr bool kHoldDS = kTuning.hold_ds;
    static constexpr bool kDQTakesScores = kTuning.dq_takes_scores;
    static_assert(!(kByMatmul && kGeneral));
    using Statistic = std::conditional_t<kByMatmul, StatisticsRow, float>;
    static constexpr int kProducerRegisters = 24;
    static constexpr int kConsumerRegisters = 240;

    using QTile = SharedTile<Element, kBlockQ, kHeadDim>;
    using DOTile = SharedTile<Element, kBlockQ, kHeadDimV>;
    using KTile = SharedTile<Element, kBlockKV, kHeadDim>;
    using VTile = SharedTile<Element, kBlockKV, kHeadDimV>;
    using QPipeline = Pipeline<kTuning.q_stages, QTile::kBytes>;
    using DOPipeline = Pipeline<kTuning.do_stages, DOTile::kBytes>;
    using KPipeline = Pipeline<1, KTile::kBytes>;
    using VPipeline = Pipeline<1, VTile::kBytes>;
    using WorkTiles = WorkTilePipeline<KeyTile>;

    // A consumer's half of dQ has the 64 rows of a wgmma: queries, or with kTransposeDQ rows of
    // dQ^T, which are columns of dQ. The number of queries can then be any multiple of 8. At head
    // dim 96 the last 32 columns do not exist: wgmma reads what follows K in shared memory, and
    // the warps that get the result do not store it.
    static_assert(kTransposeDQ ? kHeadDim > 64 : kBlockQ == 64 * kConsumers);
    // dQ^T takes dS^T as B. Rows are then queries: the keys of a consumer fill atoms of 128 bytes.
    using DSTile = std::conditional_t<kTransposeDQ, SharedTile<Element, kBlockQ, kBlockKV>,
                                      SharedTile<Element, kBlockKV, kBlockQ>>;
    using DQ = RegisterTile<16, kTransposeDQ ? kBlockQ : kHeadDim>;
    static constexpr int kDQWarps = kTransposeDQ ? kHeadDim / 16 : kBlockQ / 16;  // that store dQ
    using DQPipeline = Pipeline<1, 4 * 16 * DQ::kCols * 4>;  // one per consumer

    // Where consumer i's half of dQ lies in a Q tile of dq_accum of which `rows` rows are stored.
    static __device__ __forceinline__ DQHalf dq_half(int i, int rows) {
        if constexpr (kTransposeDQ) {
            const int cols = i == 0 ? 64 : kHeadDim - 64;
            return {i * 64 * rows, cols * rows};
        } else {
            return {i * 64 * kHeadDim, clamp(rows - i * 64, 0, 64) * kHeadDim};
        }
    }
    // Fragments are in the order of 8 queries each, so that the tile ends with its last query:
    // [8 queries][warp of the consumer][lane][4] of dQ^T, or [8 queries][8 columns][lane][2].
    static __device__ __forceinline__ int dq_warps(int consumer) {
        return kDQWarps == 8 || consumer == 0 ? 4 : kDQWarps - 4;
    }

    struct SharedStorage {
        typename KPipeline::Stages k;
        typename VPipeline::Stages v;  // after K: see kTransposeDQ
        typename QPipeline::Stages q;
        typename DOPipeline::Stages dout;
        char ds[2][DSTile::kBytes];
        // Not last: compute-sanitizer takes a RowNumbers operand for twice as long as it is.
        Statistic lse[QPipeline::kStages][kBlockQ];
        Statistic delta[DOPipeline::kStages][kBlockQ];
        typename DQPipeline::Stages dq[kConsumers];
        typename QPipeline::Barriers q_barriers;
        typename DOPipeline::Barriers do_barriers;
        typename KPipeline::Barriers k_barriers;
        typename VPipeline::Barriers v_barriers;
        typename DQPipeline::Barriers dq_barriers[kConsumers];
        uint64_t ds_barriers[2];
        typename WorkTiles::Storage work_tiles;
    };
};

}  // namespace flash_ext
