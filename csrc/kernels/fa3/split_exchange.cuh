// How the splits of a Q tile that are a cluster exchange and combine their results (SplitCluster,
// schedule/split_kv.cuh; the formulas are those of combine.cuh). Each split sends its columns to
// the CTAs that combine them, straight from registers, by st.async: its bytes arrive at the
// receiver's mbarrier. So this is one wait, where results in HBM take four: until they are stored,
// until all are there, for the statistics and for the results.
#pragma once

#include "kernels/common/recompute_rows.cuh"
#include "kernels/common/softmax.cuh"
#include "problem/params.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "schedule/split_kv.cuh"
#include "tile/fragment.cuh"

namespace flash_ext {

// A member of a kernel's SharedStorage.
struct alignas(16) SplitExchangeStorage {
    char bytes[SplitCluster::kBytes];
    uint64_t barrier;
};

// In shared memory, of all rows and splits: the CTA's columns of O, then the statistics.
template <int kHeadDimV>
struct SplitExchange {
    SplitExchangeStorage& storage;
    SplitCluster cluster;
    int split;  // of this CTA, its rank in the cluster
    int rows;

    __device__ __forceinline__ SplitExchange(SplitExchangeStorage& s, int splits, int own_split,
                                             int tile_rows)
        : storage(s), cluster{splits, kHeadDimV}, split(own_split), rows(tile_rows) {}

    __device__ __forceinline__ int own_blocks() const { return cluster.blocks_of(split); }
    __device__ __forceinline__ int first_col() const { return split * cluster.blocks() * 8; }

    // By one thread: this CTA will get this many rows of each split.
    __device__ __forceinline__ void expect(int sent_rows) const {
        if (own_blocks() > 0)
            ptx::mbarrier_arrive_expect(
                barrier(), sent_rows * cluster.splits * SplitCluster::row_bytes(own_blocks()));
    }

    // Row `row` of the tile, the lane's first one (i = 0) or its second. Of the four lanes that
    // hold it, lane i has its statistics.
    __device__ __forceinline__ void send(int row, const RegisterTile<16, kHeadDimV>& rO, int i,
                                         PartialStatistics statistics) const {
        const int number = row * cluster.splits + split;
        const int blocks = cluster.blocks();
        const uint32_t columns = results() + number * blocks * 32 + lane_col() * 4;
        int cta = -1, block = blocks;
        uint32_t target = 0, counter = 0;
#pragma unroll
        for (int n = 0; n < kHeadDimV / 8; ++n, ++block) {
            if (block == blocks) {
                block = 0;
                ++cta;
                target = ptx::address_in_cta(columns, cta);
                counter = ptx::address_in_cta(barrier(), cta);
                if (lane_id() % 4 == i)
                    ptx::st_async(ptx::address_in_cta(this->statistics() + number * 8, cta),
                                  statistics.max, statistics.sum, counter);
            }
            ptx::st_async(target + block * 32, rO.v[0][n][2 * i], rO.v[0][n][2 * i + 1], counter);
        }
    }

    // Until the CTA has got what it combines.
    __device__ __forceinline__ void wait() const { ptx::mbarrier_wait(barrier(), 0); }

    struct Result {
        float max, sum;
        bool is_marked;
        float columns[4];
    };

    // Columns 4 * `quad` and the next three of the CTA's own.
    __device__ __forceinline__ Result combine(int row, int quad, float scale) const {
        const auto* of_row =
            reinterpret_cast<const float2*>(storage.bytes + statistics() - results()) +
            row * cluster.splits;
        const auto* columns = reinterpret_cast<const float4*>(storage.bytes) +
                              row * cluster.splits * cluster.blocks() * 2 + quad;
        Result result{-INFINITY, 0.f, false, {}};
        for (int i = 0; i < cluster.splits; ++i) {
            const float max = of_row[i].x;
            result.max = fmaxf(result.max, max);
            result.is_marked |= is_marked(max);
        }
        result.max = finite_max(result.max);
        for (int i = 0; i < cluster.splits; ++i) {
            const float2 statistics = of_row[i];
            const float4 x = columns[i * cluster.blocks() * 2];
            const float share = ptx::ex2((statistics.x - result.max) * scale) * statistics.y;
            result.sum += share;
            result.columns[0] += share * x.x;
            result.columns[1] += share * x.y;
            result.columns[2] += share * x.z;
            result.columns[3] += share * x.w;
        }
        const float inverse = result.sum == 0.f ? 0.f : 1.f / result.sum;
#pragma unroll
        for (float& x : result.columns) x *= inverse;
        return result;
    }

    static __device__ __forceinline__ void init(SplitExchangeStorage& storage) {
        ptx::mbarrier_init(ptx::shared_address(&storage.barrier), 1);
    }

 private:
    __device__ __forceinline__ uint32_t barrier() const {
        return ptx::shared_address(&storage.barrier);
    }
    __device__ __forceinline__ uint32_t results() const {
        return ptx::shared_address(storage.bytes);
    }
    __device__ __forceinline__ uint32_t statistics() const {
        return results() + rows * cluster.splits * cluster.blocks() * 32;
    }
};

}  // namespace flash_ext
