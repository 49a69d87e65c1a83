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

template <class Element_, int kHeadDim_, OptionSet kOptions_, class Params_>
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
    // A thread's elements, which no other one reads, as given: so scale S + bias has the same bits
    // in forward and backward.
    using BiasStorage = float4[kHasBias ? Scores::kN : 1][kHasBias ? kThreads : 1];

    // A head of the batch.
    struct Head {
        Sequence sequence;
        int head;
    };

    const Params& params;
    // Computed again in each place: over the walk what follows from it would take registers.
    FLASH_DEVICE int warp_row() const {
        return static_cast<int>(ptx::not_hoisted(threadIdx.x)) / 32 * kRows;
    }

    FLASH_DEVICE explicit ShortTile(const Params& p) : params(p) {}

    // --- The walk ---

    FLASH_DEVICE int biases() const { return params.bias.sizes[0] * params.bias.sizes[1]; }
    // Of the tile of the bias that this CTA has.
    FLASH_DEVICE int bias_batch() const {
        return static_cast<int>(blockIdx.x) % biases() / params.bias.sizes[1];
    }
    FLASH_DEVICE int bias_head() const {
        return static_cast<int>(blockIdx.x) % params.bias.sizes[1];
    }
    // Its heads: first(), first() + params.ctas_per_bias and so on, below count().
    FLASH_DEVICE int first() const { return static_cast<int>(blockIdx.x) / biases(); }
    FLASH_DEVICE int heads_of_bias() const {
        return params.bias.sizes[1] == 1 ? params.heads_q : 1;
    }
    FLASH_DEVICE int count() const {
        return (params.bias.sizes[0] == 1 ? params.batch : 1) * heads_of_bias();
    }
    FLASH_DEVICE Head head_at(int i) const {
        const int heads = heads_of_bias();
        const int batch = params.bias.sizes[0] == 1 ? i / heads : bias_batch();
        return {sequence_of<false>(params, batch), heads == 1 ? bias_head() : i % heads};
    }

    // --- Loads ---

    FLASH_DEVICE void load_queries(uint32_t shared, const TensorView& view, const Head& x,
                                   int cols) const {
        load(shared, query_rows<const Element>(view, x.sequence, x.head, 0, cols));
    }
    FLASH_DEVICE void load_keys(uint32_t shared, const TensorView& view, const Head& x,
                                int cols) const {
        const int head = key_head(params, x.head);
        load(shared, key_rows(params, x.sequence).template tile<Element>(view, head, 0, cols));
    }
    // As load_tile(), but over the walk positions in the tile take no registers.
    FLASH_DEVICE void load(uint32_t shared, const GlobalTile<const Element>& tile) const {
        const ChunkWalk<Tile, kThreads> walk(ptx::not_hoisted(threadIdx.x));
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
                           bias_batch() * bias.strides[0] + bias_head() * bias.strides[1];
        const int64_t key_stride = bias.sizes[3] == 1 ? 0 : 1;
#pragma unroll 2
        for (int n = 0; n < Scores::kN; ++n) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int query = warp_row() + lane_row() + i / 2 * 8;
                const int key = 8 * n + lane_col() + i % 2;
                x[i] = 0.f;  // the mask hides what is past the sequence
                if (query >= params.seqlen_q || key >= params.seqlen_k) continue;
                const BiasElement b = data[query * bias.strides[2] + key * key_stride];
                if constexpr (std::is_same_v<BiasElement, bool>) {
                    x[i] = b ? 0.f : -INFINITY;
                } else {
                    x[i] = ptx::to_float(b);
                }
            }
            storage[n][threadIdx.x] = {x[0], x[1], x[2], x[3]};
        }
    }

    // --- Scores ---

    // S = Q K^T of the warp's rows, with bias, masked.
    FLASH_DEVICE void score(Scores& rS, uint32_t sQ, uint32_t sK, const Head& x,
                            const BiasStorage& storage) const {
        rS.clear();
        gemm<Element, kHeadDim>(rS, AFromRows<Tile>(sQ, warp_row()), BFromRows<Tile>(sK));
        if constexpr (kHasBias) {
            const float scale = params.scale_log2;
#pragma unroll
            for (int n = 0; n < Scores::kN; ++n) {
                const float4 bias = storage[n][threadIdx.x];
                const float of_bias[4] = {bias.x, bias.y, bias.z, bias.w};
                // Rounded as in ScoreFunction.
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    rS.v[0][n][i] = __fmaf_rz(kLog2e, of_bias[i], rS.v[0][n][i] * scale);
            }
        }
        const BandMask mask = mask_of(params, x.sequence);
        if (!mask.is_full({0, kBlock}, {0, kBlock}))
            mask_scores(rS, 0, [&](int row) { return mask.key_range(warp_row() + row); });
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
    const int count = cta.count();
    int i = cta.first();
    cta.begin();
    auto head = cta.head_at(i);
    cta.load(head, cta.stage(0));
    ptx::cp_async_commit();
    for (int n = 0; i < count; ++n) {
        i += params.ctas_per_bias;
        const auto next = cta.head_at(i);
        const auto load_next = [&] {
            if (i < count) cta.load(next, cta.stage(n + 1));
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
