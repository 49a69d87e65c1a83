// FlashAttention-3 backward for wide heads, part two where there is memory for dS: dQ = dS K, with
// the dS that fa3/backward_keys.cuh has left. For Hopper.
//
// One CTA per SM takes one Q tile of 128 rows after another. Its warpgroups have roles:
//
//   producer       three threads: dS and K; the choice of Q tiles
//   two consumers  each owns 64 queries, with dQ in registers
//
// Shared memory: a ring of stages, each the dS of both consumers and K for 64 keys; a ring of Q
// tiles' descriptions (QueryTile).
//
//   barrier              arrives                       waits
//   full(stages)         TMA, by bytes                 consumers, before the matmul
//   empty(stages)        each consumer warp, when      producer, before it loads the next
//                        the matmul is done
//   full, empty(tiles)   producer; all readers         all readers; producer
//   fetch                producer of stages, before a  producer of tiles
//                        tile's last loads
#pragma once

#include "kernels/fa3/backward_keys.cuh"
#include "problem/sequences.cuh"
#include "schedule/tile_order.cuh"

namespace flash_ext {

template <class Element_, int kHeadDim_, int kStages>
struct Fa3BackwardProductConfig {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kConsumers = 2;
    static constexpr int kThreads = (kConsumers + 1) * 128;
    static constexpr int kBlockQ = kConsumers * 64;
    static constexpr int kBlockKV = 64;
    static constexpr int kFetchAhead = 3;
    static constexpr int kProducerRegisters = 40;
    static constexpr int kConsumerRegisters = 232;

    using KTile = SharedTile<kBlockKV, kHeadDim>;
    using Ring = TmaRing<kStages, KTile::kBytes + kConsumers * DSTile::kBytes>;

    static constexpr int kTiles = kStages * Ring::kSlotBytes;
    using Tiles = TileQueue<QueryTile, kTiles>;
    static constexpr int kBarriers = kTiles + Tiles::kBytes;
    static constexpr int kTileBarriers = kBarriers + Ring::kBarrierBytes;
    static constexpr int kSharedBytes = kTileBarriers + Tiles::kBarrierBytes;
    static_assert(kSharedBytes <= 227 * 1024);
};

template <class Config>
struct Fa3BackwardProduct {
    using Element = typename Config::Element;
    using KTile = typename Config::KTile;
    using Cursor = typename Config::Ring::Cursor;
    using TileCursor_ = typename Config::Tiles::Cursor;
    using DQ = RegisterTile<16, Config::kHeadDim>;

    const Fa3BackwardWideParams& params;
    const DSWorkspace& ds_workspace;
    uint32_t shared;
    bool leads_warp;  // is it its warp's first?
    typename Config::Ring ring;
    typename Config::Tiles tiles;

    __device__ __forceinline__ Fa3BackwardProduct(const Fa3BackwardWideParams& p,
                                                  const DSWorkspace& ds_workspace_,
                                                  uint32_t shared_)
        : params(p),
          ds_workspace(ds_workspace_),
          shared(shared_),
          leads_warp(lane_id() == 0),
          ring{shared, shared + Config::kBarriers},
          tiles(shared, Config::kTileBarriers) {}

    __device__ __forceinline__ void init() const {
        ring.init(Config::kConsumers * 4);
        tiles.init(Config::kConsumers * 4 + 1);  // and the producer of stages
        ptx::mbarrier_fence_init();
    }

    // --- Producer ---

    __device__ __forceinline__ int group() const { return params.heads_q / params.heads_k; }

    __device__ __forceinline__ void produce_tiles() const {
        params.scheduler.start();
        const int total = cta_count(params.schedule);
        tiles.produce(
            blockIdx.x, total, [&] { return params.scheduler.fetch(total); },
            [&](QueryTile& tile, int linear) {
                WorkTile work = work_tile(linear, params.schedule);
                const int flat_head = ds_workspace.first_head * group() + work.head;
                work.head = flat_head % params.heads_q;
                work.batch = flat_head / params.heads_q;
                describe<Config>(tile, params, work);
            },
            [](const QueryTile&, const TileCursor_&) {});
    }

    __device__ __forceinline__ void produce_stages() const {
        Cursor c;
        tiles.for_each([&](const QueryTile& tile) {
            const Sequence& s = tile.sequence;
            const TensorRows rows(params.k, s.batch, tile.head / group(), s.k_begin, s.seqlen_k);
            const Interval own[2] = {kv_tiles_of(tile, 0), kv_tiles_of(tile, 1)};
            const auto ds = [&](int of, int kv_tile) {
                return ds_workspace.tile(params, s.batch, tile.head, tile.first_query / 64 + of,
                                         kv_tile);
            };
            const Interval kv = tile.kv_tiles;
            if (kv.empty()) tiles.let_fetch();
            for (int i = kv.begin; i < kv.end; ++i) {
                if (i == max_of(kv.begin, kv.end - Config::kFetchAhead)) tiles.let_fetch();
                ring.acquire(c);
                int bytes = KTile::kBytes;
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (i >= own[j].begin && i < own[j].end) bytes += DSTile::kBytes;
                ptx::mbarrier_arrive_expect(ring.full(c), bytes);
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (i >= own[j].begin && i < own[j].end)
                        ptx::bulk_load(ds_tile(c, j), ds(j, i), DSTile::kBytes, ring.full(c));
                rows.load<KTile>(params.k_map, ring.tile(c), ring.full(c), i * Config::kBlockKV);
                c.advance();
            }
        });
    }

    __device__ __forceinline__ void produce() const {
        if (lane_id() != 0) return;
        if (warp_id() == 0) produce_stages();
        if (warp_id() == 1) produce_tiles();
    }

    // --- Consumers ---

    // The KV tiles that a consumer's rows see: those for which there is a dS.
    __device__ __forceinline__ Interval kv_tiles_of(const QueryTile& tile, int consumer) const {
        const int first_query = tile.first_query + consumer * 64;
        if (first_query >= tile.sequence.seqlen_q) return {0, 0};
        return tiles_of(mask_of(params, tile.sequence).keys_of({first_query, first_query + 64}),
                        Config::kBlockKV);
    }

    __device__ __forceinline__ void store(const QueryTile& tile, DQ& rdQ) const {
        const Sequence& s = tile.sequence;
        const int first_row = tile.first_query + (warp_id() - 4) * 16;
        rdQ.scale(params.scale);
        store_rows(global_tile<Element>(params.dq, s.batch, s.q_begin + first_row, tile.head,
                                        s.seqlen_q - first_row, params.head_dim),
                   rdQ);
    }

    __device__ __forceinline__ void consume() const {
        const int consumer = ptx::warp_uniform(threadIdx.x / 128) - 1;
        Cursor c;
        DQ rdQ;
        const auto release = [&](uint32_t slot) {
            if (leads_warp) ring.release({slot, 0});
        };
        const auto skip = [&](int stages) {
            for (; stages > 0; --stages, c.advance()) {
                ring.wait(c);
                release(c.slot);
            }
        };
        for (TileCursor_ t;; t.advance()) {
            tiles.ring.wait(t);
            const QueryTile& tile = tiles[t];
            if (ptx::warp_uniform(tile.first_query) < 0) return;
            const Interval kv{ptx::warp_uniform(tile.kv_tiles.begin),
                              ptx::warp_uniform(tile.kv_tiles.end)};
            Interval own = kv_tiles_of(tile, consumer);
            own = {ptx::warp_uniform(own.begin), ptx::warp_uniform(own.end)};
            if (own.empty()) {
                skip(kv.end - kv.begin);
                rdQ.clear();
            } else {
                skip(own.begin - kv.begin);
                uint32_t before = 0;
                for (int i = own.begin; i < own.end; ++i, c.advance()) {
                    ring.wait(c);
                    const AlongColumns<DSTile> ds_columns(ds_tile(c, consumer));
                    const AlongColumns<KTile> k_columns(ring.tile(c));
                    start_gemm_columns<Element, Config::kBlockKV>(rdQ, ds_columns, k_columns,
                                                                  i > own.begin);
                    ptx::wgmma_wait<1>();
                    if (i > own.begin) release(before);
                    before = c.slot;
                }
                ptx::wgmma_wait<0>();
                finished(rdQ);
                release(before);
                skip(kv.end - own.end);
            }
            store(tile, rdQ);
            __syncwarp();
            if (leads_warp) tiles.ring.release(t);
        }
    }

 private:
    __device__ __forceinline__ uint32_t ds_tile(const Cursor& c, int consumer) const {
        return ring.tile(c) + KTile::kBytes + consumer * DSTile::kBytes;
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fa3_backward_product_kernel(const __grid_constant__ Fa3BackwardStoringParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a
    const Fa3BackwardProduct<Config> kernel(params, params.ds_workspace,
                                            ptx::shared_address(dynamic_shared()));
    if (threadIdx.x == 0) kernel.init();
    __syncthreads();              // the barriers are there
    ptx::wait_for_grid_before();  // dS is there
    ptx::launch_dependents();
    run_roles<Config>(kernel);
#else
    __trap();  // not to be run elsewhere
#endif
}

template <class Config>
cudaError_t launch_fa3_backward_product(const BackwardParams& call, const DSWorkspace& ds_workspace,
                                        cudaStream_t stream) {
    Fa3BackwardStoringParams params{call};
    params.ds_workspace = ds_workspace;
    params.scheduler = make_dynamic_scheduler(call.tile_count_semaphore + 1);
    const int group = params.heads_q / params.heads_k;
    params.schedule = make_schedule(ceil_div(params.seqlen_q, Config::kBlockQ),
                                    ds_workspace.heads * group, 1, is_masked(params),
                                    int64_t{2} * Config::kHeadDim * params.seqlen_k / group, 1);
    if (cta_count(params.schedule) == 0) return cudaSuccess;
    const cudaError_t status = encode_tensor_map<typename Config::KTile>(
        params.k_map, params.k, params.element_type, params.head_dim);
    if (status != cudaSuccess) return status;
    return launch_kernel<fa3_backward_product_kernel<Config>>(
        min_of(cta_count(params.schedule), multiprocessors()), Config::kThreads,
        Config::kSharedBytes, params, stream, true);
}

}  // namespace flash_ext
