// FlashAttention-2 backward (Dao 2023, algorithm 2).
//
// Loop order: delta = rowsum(dO * O) in a pass of its own; then one CTA per (KV tile, KV head,
// batch), inner loop over the Q tiles that see the KV tile, for each query head of the group. dK
// and dV stay in registers; dQ is summed over CTAs in float32 in HBM by vector reductions; a last
// pass converts it. The steps, warps and shared memory are those of backward_tile.cuh.
//
// Barriers, per Q tile: the first says that its Q, dO, lse and delta have landed for all threads
// and that all warps have left the tile before, so that its stage and dS may be overwritten; the
// second (in accumulate_dk_dv) that dS is complete.
//
// Deterministic mode: KV tiles add their dQ in ascending order. turn[Q tile] counts those that
// have; a CTA waits for its turn. CTAs take their work by ticket, so all that a CTA waits for are
// already running and none waits forever.
#pragma once

#include "backward_delta.cuh"

namespace flash_ext {

// The order in which KV tiles add their dQ to a Q tile, in deterministic mode.
struct Turn {
    const BackwardParams& params;
    const WorkTile& work;
    int head;
    int q_tile;

    // The Q tile's counter of KV tiles that have added their dQ.
    __device__ __forceinline__ int* counter() const {
        return params.turn + 1 + q_tile_number(params, work.batch, head, q_tile);
    }

    // How many KV tiles see the Q tile and come before this CTA's.
    __device__ __forceinline__ int mine(const BandMask& mask, int block_q, int block_kv) const {
        return work.rank - mask.keys_of(tile_interval(q_tile, block_q)).begin / block_kv;
    }

    __device__ __forceinline__ void wait(const BandMask& mask, int block_q, int block_kv) const {
        if (threadIdx.x == 0)
            while (ptx::load_acquire(counter()) != mine(mask, block_q, block_kv)) __nanosleep(64);
        __syncthreads();  // what the earlier CTAs added is visible to all threads
    }

    __device__ __forceinline__ void end(const BandMask& mask, int block_q, int block_kv) const {
        __syncthreads();  // all threads have issued their additions
        if (threadIdx.x == 0) {
            __threadfence();
            ptx::store_release(counter(), mine(mask, block_q, block_kv) + 1);
        }
    }
};

template <class Config>
__device__ __forceinline__ void add_dq(const typename Config::DQ& rdQ, float* accum) {
#pragma unroll
    for (int m = 0; m < Config::DQ::kM; ++m)
#pragma unroll
        for (int n = 0; n < Config::DQ::kN; ++n) {
            const float (&x)[4] = rdQ.v[m][n];
            ptx::red_add_v4(accum + dq_fragment<Config>(m, n), x[0], x[1], x[2], x[3]);
        }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    fa2_backward_kernel(const __grid_constant__ BackwardParams params) {
    using Tile = BackwardTile<Config>;
    int linear = blockIdx.x;
    if (params.deterministic) {
        int* ticket = reinterpret_cast<int*>(dynamic_shared() + Config::kTicket);
        if (threadIdx.x == 0) *ticket = atomicAdd(params.turn, 1);
        __syncthreads();  // the ticket is drawn
        linear = *ticket;
    }
    const WorkTile work = work_tile(linear, params.schedule);  // ascending KV tiles: longest first
    const Tile cta(params, work.batch, work.head);
    const int first_key = work.rank * Config::kBlockKV;
    const Interval q_tiles =
        tiles_of(cta.mask.queries_of({first_key, first_key + Config::kBlockKV}), Config::kBlockQ);
    const int group = params.heads_q / params.heads_k;

    typename Tile::Gradient rdK;
    typename Tile::Gradient rdV;
    rdK.clear();
    rdV.clear();
    QTileWalk walk(q_tiles, work.head * group, group);
    cta.load_kv(first_key);
    if (!walk.done()) {
        cta.load_q_do(walk.head, walk.q_tile, walk.stage);
        load_statistics<Config>(cta, walk.head, walk.q_tile, walk.stage);
    }
    ptx::cp_async_commit();

    while (!walk.done()) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // this Q tile has landed; all warps have left the one before
        const QTileWalk next = walk.next();
        if (!next.done()) {
            cta.load_q_do(next.head, next.q_tile, next.stage);
            load_statistics<Config>(cta, next.head, next.q_tile, next.stage);
        }
        ptx::cp_async_commit();

        cta.accumulate_dk_dv(rdK, rdV, walk.head, walk.q_tile, first_key, walk.stage);
        const Turn turn{params, work, walk.head, walk.q_tile};
        cta.compute_dq(walk.head, walk.q_tile, [&](const auto& rdQ, float* accum) {
            if (params.deterministic) turn.wait(cta.mask, Config::kBlockQ, Config::kBlockKV);
            add_dq<Config>(rdQ, accum);
        });
        if (params.deterministic) turn.end(cta.mask, Config::kBlockQ, Config::kBlockKV);
        walk = next;
    }

    ptx::cp_async_wait<0>();
    __syncthreads();  // all warps have left the K and V tiles
    cta.store_dk_dv(rdK, rdV, first_key);
}

template <int kHeadDim>
int fa2_backward_shared_bytes() {
    return max_of(BackwardConfig<__half, kHeadDim, Features::kPlain,
                                 tuning::fa2_backward(kHeadDim, Features::kPlain)>::kSharedBytes,
                  BackwardConfig<__half, kHeadDim, Features::kGeneral,
                                 tuning::fa2_backward(kHeadDim, Features::kGeneral)>::kSharedBytes);
}

template <int kHeadDim>
cudaError_t fa2_backward(BackwardParams params, cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    dispatch_kernel(params, needs_general(params), [&](auto element, auto features) {
        using Config = BackwardConfig<decltype(element), kHeadDim, features.value,
                                      tuning::fa2_backward(kHeadDim, features.value)>;
        static_assert(Config::kBlockQ == tuning::backward_block_q(Variant::kFa2, kHeadDim));
        const int q_tile_count = params.q_tiles * params.heads_q * params.batch;
        const bool tiles_differ =
            params.window_right < params.seqlen_k || params.window_left < params.seqlen_q;
        params.schedule = make_schedule(
            ceil_div(params.seqlen_k, Config::kBlockKV), params.heads_k, params.batch, tiles_differ,
            int64_t{8} * kHeadDim * params.seqlen_q * (params.heads_q / params.heads_k));

        const int ctas = params.schedule.tiles * params.heads_k * params.batch;

        status = launch_kernel<backward_delta_kernel<Config>>(q_tile_count, Config::kThreads, 0,
                                                              params, stream);
        if (status == cudaSuccess && params.deterministic)
            status =
                cudaMemsetAsync(params.turn, 0, (1 + int64_t{q_tile_count}) * sizeof(int), stream);
        if (status == cudaSuccess)
            status = launch_kernel<fa2_backward_kernel<Config>>(
                ctas, Config::kThreads, Config::kSharedBytes, params, stream);
        if (status == cudaSuccess) status = launch_convert_dq<Config>(params, stream);
    });
    return status;
}

}  // namespace flash_ext
