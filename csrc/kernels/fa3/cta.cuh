// The skeleton of an FA3 CTA, which all FA3 kernels share. One CTA per SM takes one tile after
// another. Its first warpgroup produces: a few of its threads, each in a warp of its own, choose
// the tiles and load them by TMA. The other warpgroups consume, and get its registers.
//
// A kernel is a struct that derives from Fa3Cta and has
//
//     init()       by one thread: its barriers
//     produce()    by the producers, one thread of each warp
//     consume()    by the consumers
//     begin(), end()    by all, where it must wait for the kernel before it in the stream
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/fa3/work_tiles.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/uniform.cuh"
#include "schedule/tile_order.cuh"

namespace flash_ext {

// The named barriers. 0 is that of __syncthreads().
enum NamedBarrier : int {
    kPingPong = 1,  // one for each consumer
    kDSStored = 5,  // one for each consumer: its warps have stored their dS
};

// Consumers start their matmuls by turns, so that one's softmax runs beside the other's matmuls.
// Somebody must pass the first turn.
template <int kConsumers, bool kEnabled = true>
struct PingPong {
    static_assert(!kEnabled || kConsumers <= kDSStored - kPingPong);

    static __device__ __forceinline__ void wait_for_turn(int consumer) {
        if constexpr (kEnabled) ptx::barrier_sync(kPingPong + consumer, 256);
    }
    // To the next one.
    static __device__ __forceinline__ void pass_turn(int consumer) {
        const int next = kConsumers == 2 ? 1 - consumer : (consumer + 1) % kConsumers;
        if constexpr (kEnabled) ptx::barrier_arrive(kPingPong + next, 256);
    }
};

template <class Config>
struct Fa3Cta {
    using SharedStorage = typename Config::SharedStorage;
    using WorkTiles = typename Config::WorkTiles;
    using WorkTileState = typename WorkTiles::State;

    const typename Config::Params& params;
    SharedStorage& storage;
    bool elected;  // one thread of each warp
    WorkTiles work_tiles;

    __device__ __forceinline__ explicit Fa3Cta(const typename Config::Params& p)
        : params(p),
          storage(shared_storage<SharedStorage>()),
          elected(lane_id() == 0),
          work_tiles(storage.work_tiles) {}

    __device__ __forceinline__ void begin() const {}
    __device__ __forceinline__ void end() const {}

    // Query heads that share a head of K and V.
    __device__ __forceinline__ int group() const { return params.heads_q / params.heads_k; }

    // By a warp that is done with a stage.
    template <class Pipeline>
    __device__ __forceinline__ void release(const Pipeline& pipeline,
                                            const typename Pipeline::State& state) const {
        if (elected) pipeline.consumer_release(state);
    }
    template <class Pipeline>
    __device__ __forceinline__ void release_and_advance(const Pipeline& pipeline,
                                                        typename Pipeline::State& state) const {
        release(pipeline, state);
        state.advance();
    }
    // By a warp whose lanes have all read the description of a tile for the last time.
    __device__ __forceinline__ void end_work_tile(WorkTileState& t) const {
        __syncwarp();
        release_and_advance(work_tiles.descriptions, t);
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, 1)
    fa3_kernel(const __grid_constant__ typename Kernel::Config::Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a
    using Config = typename Kernel::Config;
    const Kernel kernel(params);
    if (threadIdx.x == 0) {
        kernel.init();
        ptx::mbarrier_fence_init();
    }
    __syncthreads();  // the barriers are there
    kernel.begin();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<Config::kProducerRegisters>();
        if (lane_id() == 0) kernel.produce();
    } else {
        ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
        kernel.consume();
    }
    kernel.end();
#else
    __trap();  // not to be run elsewhere
#endif
}

// `pdl` as for launch_kernel().
template <class Kernel>
cudaError_t launch_fa3(const typename Kernel::Config::Params& params, int tiles,
                       cudaStream_t stream, bool pdl) {
    using Config = typename Kernel::Config;
    static_assert(sizeof(typename Config::SharedStorage) <= 227 * 1024);
    return launch_kernel<fa3_kernel<Kernel>>(min_of(tiles, multiprocessors()), Config::kThreads,
                                             sizeof(typename Config::SharedStorage), params, stream,
                                             pdl);
}

}  // namespace flash_ext
