// Short sequences: what the kernels for at most 64 queries and 64 keys share. All scores of a head
// are one tile, and a row of scores is in one warp.
//
// A CTA goes over heads of the batch, its walk, and loads a head's tiles ahead of the computation
// of another one: such calls are bound by memory. All heads of a walk have the same bias, which
// stays in shared memory. Neighboring CTAs have neighboring heads, whose rows are side by side.
//
// Warps: four, each with 16 rows of scores, whose columns are keys.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/common/softmax.cuh"
#include "problem/key_rows.cuh"
#include "problem/mask.cuh"
#include "problem/score.cuh"
#include "problem/sequences.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"

namespace flash_ext {

template <class Params>
struct ShortParams : Params {
    int ctas_per_bias;  // that share the heads of one tile of the bias
};

template <class Element_, int kHeadDim_, OptionSet kOptions_, class Params_, bool kIsForward>
struct ShortTile {
    using Element = Element_;
    using Params = Params_;
    static constexpr OptionSet kOptions = kOptions_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kBlock = tuning::kShortBlock;
    static constexpr int kThreads = tuning::kShortThreads;
    static constexpr int kRows = 16;  // of a warp
    static constexpr bool kHasBias = contains(kOptions, OptionSet::kBias);
    static_assert(kBlock == kThreads / 32 * kRows);

    using Tile = SharedTile<Element, kBlock, kHeadDim>;  // of Q, K, V, O and their gradients
    using Scores = RegisterTile<kRows, kBlock>;
    using Output = RegisterTile<kRows, kHeadDim>;
    // A thread's elements, which no other one reads, in base 2.
    using BiasStorage = float4[kHasBias ? Scores::kN : 1][kHasBias ? kThreads : 1];

    // A head of the batch.
    struct Head {
        Sequence sequence;
        int head;
        int head_k;
    };

    // The heads that share the CTA's tile of the bias, from one on each params.ctas_per_bias-th. A
    // division for each of them would cost more than its matmuls.
    struct Walk {
        int batch, head, left;  // left: heads from this one on
        int batch_step, head_step;

        FLASH_DEVICE Walk(const Params& params, int bias, int first) {
            const int (&sizes)[4] = params.bias.sizes;
            const int heads = sizes[1] == 1 ? params.heads_q : 1;
            left = (sizes[0] == 1 ? params.batch : 1) * heads - first;
            batch = (sizes[0] == 1 ? 0 : bias / sizes[1]) + first / heads;
            head = sizes[1] == 1 ? first % heads : bias % sizes[1];
            batch_step = params.ctas_per_bias / heads;
            head_step = params.ctas_per_bias % heads;  // 0 if the head is always the same
        }
        FLASH_DEVICE void advance(const Params& params) {
            left -= params.ctas_per_bias;
            batch += batch_step;
            head += head_step;
            if (head < params.heads_q) return;
            head -= params.heads_q;
            ++batch;
        }
    };

    const Params& params;
    uint32_t visible;

    // Computed again in each place: over the walk what follows from it would take registers.
    FLASH_DEVICE int warp_row() const {
        return static_cast<int>(ptx::not_hoisted(threadIdx.x)) / 32 * kRows;
    }

    FLASH_DEVICE explicit ShortTile(const Params& p) : params(p), visible(visible_keys()) {}

    // --- The walk ---

    FLASH_DEVICE int biases() const { return params.bias.sizes[0] * params.bias.sizes[1]; }
    // The CTA's tile of the bias, and its number among those that share this.
    FLASH_DEVICE int bias() const { return static_cast<int>(blockIdx.x) % biases(); }
    FLASH_DEVICE int number() const { return static_cast<int>(blockIdx.x) / biases(); }
    FLASH_DEVICE Walk walk() const { return Walk(params, bias(), number()); }
    FLASH_DEVICE Head head_of(const Walk& walk) const {
        const bool grouped = kIsForward && params.heads_q != params.heads_k;
        return {sequence_of<false>(params, walk.batch), walk.head,
                grouped ? key_head(params, walk.head) : walk.head};
    }

    // --- Loads ---

    FLASH_DEVICE void load_queries(uint32_t shared, const TensorView& view, const Head& x,
                                   int cols) const {
        load(shared, query_rows<const Element>(view, x.sequence, x.head, 0, cols));
    }
    FLASH_DEVICE void load_keys(uint32_t shared, const TensorView& view, const Head& x,
                                int cols) const {
        load(shared, key_rows(params, x.sequence).template tile<Element>(view, x.head_k, 0, cols));
    }
    // As load_tile(). In the backward positions in the tile take no registers over the walk.
    FLASH_DEVICE void load(uint32_t shared, const GlobalTile<const Element>& tile) const {
        const ChunkWalk<Tile, kThreads> walk(kIsForward ? threadIdx.x
                                                        : ptx::not_hoisted(threadIdx.x));
        const Element* const first = tile.data + walk.row * tile.row_stride;
        walk.for_each([&](int row, int col, int offset) {
            ptx::cp_async_16(shared + offset, first + (row - walk.row) * tile.row_stride + col,
                             row < tile.rows && col < tile.cols);
        });
    }

    FLASH_DEVICE void load_bias(BiasStorage& storage) const {
        if constexpr (kHasBias) {
            switch (params.bias.type) {
                case BiasType::kElement:
                    return load_bias_of<Element>(storage);
                case BiasType::kFloat32:
                    return load_bias_of<float>(storage);
                case BiasType::kBool:
                    return load_bias_of<bool>(storage);
            }
        }
    }
    template <class BiasElement>
    FLASH_DEVICE void load_bias_of(BiasStorage& storage) const {
        const Bias& bias = params.bias;
        const auto* data = static_cast<const BiasElement*>(bias.data) +
                           this->bias() / bias.sizes[1] * bias.strides[0] +
                           this->bias() % bias.sizes[1] * bias.strides[1];
        const int key_mask = bias.sizes[3] == 1 ? 0 : -1;
#pragma unroll 2
        for (int n = 0; n < Scores::kN; ++n) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int query = warp_row() + lane_row() + i / 2 * 8;
                const int key = 8 * n + lane_col() + i % 2;
                x[i] = 0.f;  // the mask hides what is past the sequence
                if (query >= params.seqlen_q || key >= params.seqlen_k) continue;
                const BiasElement b = data[query * bias.strides[2] + (key & key_mask)];
                // Towards zero: the most negative number stays finite, and absorbs any score.
                if constexpr (std::is_same_v<BiasElement, bool>) {
                    x[i] = b ? 0.f : -INFINITY;
                } else {
                    x[i] = __fmul_rz(ptx::to_float(b), kLog2e);
                }
            }
            storage[n][threadIdx.x] = {x[0], x[1], x[2], x[3]};
        }
    }

    // --- Scores ---

    // S = Q K^T of the warp's rows, with bias, masked.
    FLASH_DEVICE void score(Scores& rS, uint32_t sQ, uint32_t sK,
                            const BiasStorage& storage) const {
        rS.clear();
        gemm<Element, kHeadDim>(rS, AFromRows<Tile>(sQ, warp_row()), BFromRows<Tile>(sK));
        if constexpr (kHasBias) {
            const float scale = params.scale_log2;
#pragma unroll
            for (int n = 0; n < Scores::kN; ++n) {
                const float4 bias = storage[n][threadIdx.x];
                const float of_bias[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    rS.v[0][n][i] = __fmaf_rn(rS.v[0][n][i], scale, of_bias[i]);
            }
        }
        if (visible == ~0u) return;
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!(visible >> bit_of(n, i) & 1)) rS.v[0][n][i] = -INFINITY;
    }

    // Which keys the lane's rows see, the same for all heads: a bit for each of its elements.
    static FLASH_DEVICE constexpr int bit_of(int n, int i) { return i / 2 * 16 + 2 * n + i % 2; }
    FLASH_DEVICE uint32_t visible_keys() const {
        static_assert(2 * Scores::kN == 16);
        const BandMask mask = mask_of(params, sequence_of<false>(params, 0));
        uint32_t visible = 0;
        for_each_row<kRows>([&](int, int i, int row) {
            const Interval keys = mask.key_range(warp_row() + row);
            const int from = columns_before(keys.begin - lane_col());
            const int until = max_of(columns_before(min_of(keys.end, kBlock) - lane_col()), from);
            visible |= ptx::bit_range(from, until - from) << 16 * i;
        });
        return visible;
    }

    // The warp's sixteen rows to HBM, through its rows of a tile in shared memory.
    FLASH_DEVICE void store(const GlobalTile<Element>& rows, const Output& x,
                            uint32_t shared) const {
        __syncwarp();  // the warp has read these rows
        store_to_shared<Element, Tile>(shared, x, warp_row());
        __syncwarp();  // the rows are complete
        // As store_tile(), but each of its stores became four of 4 bytes (nvcc 13.0).
        ChunkWalk<Tile, 32, kRows>(lane_id()).for_each([&](int row, int col, int offset) {
            if (row >= rows.rows || col >= rows.cols) return;
            uint32_t packed[4];
            ptx::ld_shared_v4(packed, shared + warp_row() * Tile::kPitch + offset);
            ptx::st_global_v4(rows.data + row * rows.row_stride + col, packed);
        });
    }
};

// The walk of a CTA of a kernel, which loads a head into a stage, and computes it.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    short_kernel(const __grid_constant__ typename Kernel::Params params) {
    Kernel cta(params);
    cta.begin();
    auto walk = cta.walk();
    auto head = cta.head_of(walk);
    cta.load(head, cta.stage(0));
    ptx::cp_async_commit();
    for (int n = 0; walk.left > 0; ++n) {
        walk.advance(params);
        const auto next = cta.head_of(walk);
        const auto load_next = [&] {
            if (walk.left > 0) cta.load(next, cta.stage(n + 1));
            ptx::cp_async_commit();
        };
        ptx::cp_async_wait<0>();
        __syncthreads();  // the head has landed; all warps have left the one before
        if constexpr (Kernel::kStages > 1) load_next();
        cta.compute(head, cta.stage(n));
        if constexpr (Kernel::kStages == 1) {
            __syncthreads();  // all warps have left the head
            load_next();
        }
        head = next;
    }
    cta.end();
}

template <class Kernel>
cudaError_t launch_short(const typename Kernel::Params& params, cudaStream_t stream) {
    static_assert(Kernel::kSharedBytes <= 99 * 1024);  // of a CTA of compute capability 8.6
    const Bias& bias = params.bias;
    return launch_kernel<short_kernel<Kernel>>(
        int64_t{bias.sizes[0]} * bias.sizes[1] * params.ctas_per_bias, Kernel::kThreads,
        Kernel::kSharedBytes, params, stream);
}

}  // namespace flash_ext
