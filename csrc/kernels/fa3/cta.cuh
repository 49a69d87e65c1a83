// The skeleton of an FA3 CTA, which all FA3 kernels share. The grid is persistent: at most one CTA
// per SM, which works on one tile after another. The first warpgroup has the producers, lane 0 of
// up to four warps: they fetch tiles, load operands by TMA and, in backward.cuh, add to dQ in HBM.
// The other warpgroups are the consumers. setmaxnreg gives them registers of the first one.
//
// A kernel is a struct that derives from Fa3Cta and has
//
//     SharedStorage     of which work_tiles is a member
//     kProducerRegisters, kConsumerRegisters
//     init()            by thread 0, before anything else: initializes the barriers
//     produce()         by lane 0 of each warp of the first warpgroup
//     consume()         by all threads of the other warpgroups
//     produce_by_warps()  by all lanes of the first warpgroup, before produce(); by default it does
//                       nothing
//     begin(), end()    by all threads, before and after these; by default they do nothing. With
//                       programmatic dependent launch (PDL) they wait for the previous kernel in
//                       the stream, unless only produce() has to
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/fa3/work_tiles.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/wgmma.cuh"
#include "schedule/epoch_counter.cuh"
#include "tile/tma_load.cuh"

namespace flash_ext {

// The named barriers. __syncthreads() uses barrier 0.
enum NamedBarrier : int {
    kPingPongBarrier = 1,  // one for each consumer
    kDSStoredBarrier = 5,  // one for each consumer: all its warps have stored dS
};

// Ping-pong: consumers start their matmuls alternately, so that the softmax of one runs beside the
// matmuls of another. A consumer waits for the one before it. The last consumer calls signal_next()
// once in advance, so that consumer 0 can start.
template <int kConsumers, bool kEnabled = true>
struct PingPong {
    static_assert(!kEnabled || kConsumers <= kDSStoredBarrier - kPingPongBarrier);

    static FLASH_DEVICE void wait(int consumer) {
        if constexpr (kEnabled) ptx::barrier_sync(kPingPongBarrier + consumer, 256);
    }
    // Lets the next consumer start.
    static FLASH_DEVICE void signal_next(int consumer) {
        const int next = kConsumers == 2 ? 1 - consumer : (consumer + 1) % kConsumers;
        if constexpr (kEnabled) ptx::barrier_arrive(kPingPongBarrier + next, 256);
    }
};

// Tile: what a CTA works on, QueryTile or KeyTile.
template <class Params_, class Tile, int kConsumers_ = 2>
struct Fa3Cta {
    using Params = Params_;
    static constexpr int kConsumers = kConsumers_;
    static constexpr int kThreads = (kConsumers + 1) * 128;
    using WorkTiles = WorkTilePipeline<Tile>;
    using WorkTileState = typename WorkTiles::State;

    const Params& params;
    bool elected;  // is this lane 0 of its warp?
    WorkTiles work_tiles;

    FLASH_DEVICE Fa3Cta(const Params& p, typename WorkTiles::Storage& storage)
        : params(p), elected(lane_id() == 0), work_tiles(storage) {}

    FLASH_DEVICE void begin() const {}
    FLASH_DEVICE void end() const {}
    FLASH_DEVICE void produce_by_warps() const {}

    // The number of query heads that share a head of K and V.
    FLASH_DEVICE int group() const { return group_of(params); }

    // By all lanes of a warp that has finished reading a stage. With four consumers a softmax
    // follows at once, and a branch that one lane takes would delay it.
    template <class Pipeline>
    FLASH_DEVICE void release(const Pipeline& pipeline,
                              const typename Pipeline::State& state) const {
        if constexpr (kConsumers == 4) {
            pipeline.consumer_release_if(elected, state);
        } else {
            if (elected) pipeline.consumer_release(state);
        }
    }
    template <class Pipeline>
    FLASH_DEVICE void release_and_advance(const Pipeline& pipeline,
                                          typename Pipeline::State& state) const {
        release(pipeline, state);
        state.advance();
    }

    // The operand in a stage: the one in the first stage, moved, if there are registers for its
    // descriptor. That is one instruction from a full barrier to the matmul, and not five.
    template <class Operand, class Pipeline, class... FirstRow>
    static FLASH_DEVICE Operand operand(const Pipeline& pipeline,
                                        const typename Pipeline::State& state,
                                        FirstRow... first_row) {
        if constexpr (kConsumers > 2) {
            Operand first(pipeline.stages, first_row...);
            first.move(state.stage * Pipeline::kStageBytes);
            return first;
        } else {
            return Operand(pipeline.stage(state), first_row...);
        }
    }

    // For a producer that does nothing else: fetches tiles by the dynamic persistent scheduler when
    // another producer allows it. `describe` as for WorkTilePipeline::produce().
    template <class Describe>
    FLASH_DEVICE void fetch_work_tiles(Describe describe) const {
        params.scheduler.start();
        const int total = work_tile_count(params.tile_order);
        const auto fetch = [&] { return params.scheduler.fetch(total); };
        work_tiles.produce(blockIdx.x, total, fetch, describe,
                           [&](const auto&, const WorkTileState& t) {
                               work_tiles.wait_to_fetch(t);
                               return fetch();
                           });
    }

    // By one thread. producers: their threads that read the descriptions of tiles.
    FLASH_DEVICE void init_work_tiles(int producers) const {
        work_tiles.init(kConsumers * 128 + producers);
    }
    // By each thread that reads the description of a tile, after its last read.
    FLASH_DEVICE void end_work_tile(WorkTileState& t) const {
        work_tiles.descriptions.consumer_release(t);
        t.advance();
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    fa3_kernel(const __grid_constant__ typename Kernel::Params params) {
    static_assert(sizeof(typename Kernel::SharedStorage) <= 227 * 1024);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a
    const Kernel kernel(params);
    if (threadIdx.x == 0) {
        kernel.init();
        ptx::mbarrier_fence_init();
    }
    __syncthreads();  // the barriers are initialized
    kernel.begin();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<Kernel::kProducerRegisters>();
        kernel.produce_by_warps();
        if (lane_id() == 0) kernel.produce();
    } else {
        ptx::setmaxnreg_inc<Kernel::kConsumerRegisters>();
        kernel.consume();
    }
    kernel.end();
#else
    __trap();  // never launched on other GPUs
#endif
}

}  // namespace flash_ext
