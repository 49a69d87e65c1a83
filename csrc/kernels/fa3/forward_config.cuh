// The parameters of the FA3 forward, and its config: tiles, registers, pipelines and shared memory.
#pragma once

#include "kernels/fa3/cta.cuh"
#include "plan/tuning.h"
#include "schedule/dynamic_persistent_scheduler.cuh"

namespace flash_ext {

struct Fa3ForwardParams : ForwardParams {
    DynamicPersistentScheduler scheduler;
    CUtensorMap q_map;
    CUtensorMap k_map;
    CUtensorMap v_map;
};

// With packed GQA TMA loads the heads of a query as rows.
FLASH_HOST_DEVICE TensorView with_heads_as_rows(const TensorView& q) {
    return {q.data, q.batch_stride, q.head_stride, q.row_stride};
}

// The pipeline of V tiles as TMA loads them, where they are then transposed; and how far each
// consumer thread has cooled its two rows (fp8_softmax.cuh), in powers of two.
template <class RowMajorVPipeline, int kConsumers, bool kFp8>
struct Fp8Storage {};
template <class RowMajorVPipeline, int kConsumers>
struct Fp8Storage<RowMajorVPipeline, kConsumers, true> {
    typename RowMajorVPipeline::Barriers barriers;
    uint8_t cooling[kConsumers * 128][2];
    alignas(1024) typename RowMajorVPipeline::Stages stages;
};

template <class Element_, int kHeadDim_, int kHeadDimV_, Features kFeatures,
          tuning::Fa3Forward kTuning, bool kMayHaveSplits_, class QKElement_ = Element_>
struct Fa3ForwardConfig {
    using Element = Element_;      // of V
    using QKElement = QKElement_;  // of Q and K; both have the same size
    static_assert(sizeof(Element) == sizeof(QKElement));
    using Params = Fa3ForwardParams;
    static constexpr bool kMayHaveSplits = kMayHaveSplits_;  // and packed GQA
    static constexpr bool kGeneral = kFeatures == Features::kGeneral;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kConsumers = kTuning.consumers;
    static constexpr int kThreads = (kConsumers + 1) * 128;
    static constexpr int kBlockQ = kConsumers * 64;
    static_assert(kBlockQ >= tuning::kForwardBlockQ);
    static_assert(!kMayHaveSplits || kBlockQ == tuning::kForwardBlockQ);
    static constexpr int kBlockKV = kTuning.block_kv;
    static constexpr bool kPingPong = kTuning.ping_pong;
    static constexpr bool kFp8 = sizeof(Element) == 1;
    static constexpr bool kInt8 = std::is_same_v<QKElement, Int8>;
    // Does a consumer's softmax run beside its own P V? This takes two P. Four consumers have no
    // registers for that: the softmax of one runs beside the matmuls of the others.
    static constexpr bool kOverlap = kConsumers < 4 && !kFp8;
    static constexpr int kFetchAhead = 2;  // K tiles still to follow when a Q tile is fetched
    // What the launch gives a CTA of this size, divided again by setmaxnreg. The warps that
    // transpose V need more than producers.
    static constexpr int kProducerRegisters = kFp8             ? kTuning.transposer_registers
                                              : kConsumers > 2 ? 32
                                                               : 40;
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
    static constexpr int kConsumerRegisters =
        (kLaunchRegisters * (kConsumers + 1) - kProducerRegisters) / kConsumers / 8 * 8;
    // FP8: warps of the first warpgroup that transpose V; columns of O that one P V computes.
    static constexpr int kTransposers = 2;
    static constexpr int kPartialCols = kTuning.partial_cols;

    using QTile = SharedTile<QKElement, kBlockQ, kHeadDim>;
    using KTile = SharedTile<QKElement, kBlockKV, kHeadDim>;
    using VTile = SharedTile<Element, kBlockKV, kHeadDimV>;
    using TransposedVTile = SharedTile<Element, kHeadDimV, kBlockKV>;
    // Rows of a TMA box. A row of K or V should be requested as a whole, not one swizzle atom of
    // all rows first: decoding, which is bound by memory, is slower otherwise
    // (docs/notes/009-fa3-forward.md).
    static constexpr int kQBoxRows = kMayHaveSplits ? 8 : kBlockQ;  // adjacent rows
    static constexpr int kKVBoxRows = KTile::kAtoms == 1 ? kBlockKV : kBlockKV % 32 == 0 ? 32 : 16;
    using QPipeline = Pipeline<kTuning.q_stages, QTile::kBytes>;
    using KPipeline = Pipeline<kTuning.k_stages, KTile::kBytes>;
    using VPipeline = Pipeline<kTuning.v_stages, VTile::kBytes>;
    // What TMA loads; FP8 is transposed from here to a stage of VPipeline.
    using RowMajorVPipeline = Pipeline<kFp8 ? 2 : 1, kFp8 ? VTile::kBytes : 16>;
    using WorkTiles = WorkTilePipeline<QueryTile>;

    struct SharedStorage {
        typename QPipeline::Stages q;
        typename KPipeline::Stages k;
        typename VPipeline::Stages v;
        typename QPipeline::Barriers q_barriers;
        typename KPipeline::Barriers k_barriers;
        typename VPipeline::Barriers v_barriers;
        typename WorkTiles::Storage work_tiles;
        int has_marked[kConsumers * 4];  // of each warp: has it marked a row?
        Fp8Storage<RowMajorVPipeline, kConsumers, kFp8> fp8;
    };
    // matrix_descriptor() and the swizzle need aligned tiles.
    static_assert(QTile::kBytes % 1024 == 0 && KTile::kBytes % 1024 == 0 &&
                  VTile::kBytes % 1024 == 0);
};

}  // namespace flash_ext
