// The parameters of the FA3 backward, and its config: tiles, schedule, pipelines and shared memory.
#pragma once

#include <type_traits>

#include "kernels/fa3/backward_common.cuh"
#include "kernels/fa3/backward_dq_tile.cuh"
#include "kernels/fa3/cta.cuh"
#include "plan/tuning.h"

namespace flash_ext {

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
    static constexpr int kBlockKV = tuning::fa3_backward_block_kv({kHeadDim, kHeadDimV});
    static_assert(kBlockKV == 64 * kConsumers);
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

    // dQ^T takes dS^T as B. Rows are then queries: the keys of a consumer fill atoms of 128 bytes.
    using DSTile = std::conditional_t<kTransposeDQ, SharedTile<Element, kBlockQ, kBlockKV>,
                                      SharedTile<Element, kBlockKV, kBlockQ>>;
    using DQTile = Fa3DQTile<Element, kHeadDim, kBlockQ, kTransposeDQ>;
    using DQPipeline =
        Pipeline<1, 4 * sizeof(typename DQTile::Fragments) * 32>;  // one per consumer

    struct SharedStorage {
        typename KPipeline::Stages k;
        typename VPipeline::Stages v;  // after K: see Fa3DQTile
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
