// The bias of FA3's kernels: tiles of 16-bit numbers that TMA brings to shared memory, a row for
// each query, ahead of the scores to which they are added.
//
// A bias whose rows TMA can address is loaded as it is. Others are first copied by tile_bias(): a
// float32 bias as two parts whose sum it is to 2^-16, one of bool as 0 and -inf, one row or column
// for all as a tile's worth of equal ones. The parts of a tile are stages of the pipeline, one
// after another.
#pragma once

#include "kernels/common/launch.cuh"
#include "problem/sequences.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"

namespace flash_ext {

// What a kernel's params have besides, with a bias. The steps are 0 where one index is for all.
struct BiasMap {
    CUtensorMap map;  // of (B, Hq parts, Sq, Sk)
    int parts;
    int batch_step, head_step, row_step, col_step;

    // Encodes the map, and fills the copy if there is one.
    template <class Tile>
    cudaError_t prepare(const AttentionParams& params, const TiledBias& bias, cudaStream_t stream) {
        if (bias.is_copy)
            if (const cudaError_t status =
                    tile_bias(params.bias, params.element_type, bias, stream);
                status != cudaSuccess)
                return status;
        parts = bias.parts;
        const auto step = [&](int dim) { return bias.broadcast[dim] ? 0 : 1; };
        batch_step = step(0);
        head_step = step(1) * parts;
        row_step = step(2);
        col_step = step(3);
        cuuint64_t strides[3];  // in bytes; of a single index never used, but TMA needs one
        for (int i = 0; i < 3; ++i) strides[i] = max_of<int64_t>(2 * bias.strides[2 - i], 16);
        return encode_tensor_map<Tile>(
            map, bias.data,
            {static_cast<cuuint64_t>(bias.sizes[3]), static_cast<cuuint64_t>(bias.sizes[2]),
             static_cast<cuuint64_t>(bias.sizes[1]), static_cast<cuuint64_t>(bias.sizes[0])},
            strides, Tile::kRows);
    }

    // Loads the parts of a tile.
    template <class Tile, class Pipeline>
    FLASH_DEVICE void load(const Pipeline& pipeline, typename Pipeline::State& state,
                           const Sequence& sequence, int head, int first_query,
                           int first_key) const {
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
            pipeline.producer_acquire(state);
            pipeline.producer_expect(state, Tile::kBytes);
#pragma unroll
            for (int atom = 0; atom < Tile::kAtoms; ++atom)
                ptx::tma_load_4d(
                    pipeline.stage(state) + atom * Tile::kAtomBytes, map, pipeline.full(state),
                    first_key * col_step + atom * Tile::kAtomCols, first_query * row_step,
                    head * head_step + part, sequence.batch * batch_step);
            state.advance();
        }
    }
};

template <class Params>
struct WithBias : Params {
    BiasMap bias_map;
};
template <class Params, OptionSet kOptions>
using MayHaveBias =
    std::conditional_t<contains(kOptions, OptionSet::kBias), WithBias<Params>, Params>;

// Scores of a warp in base 2, with the bias: s = s scale + log2(e) bias. The warp's rows begin at
// row `first_row` of the tile if rows are queries, otherwise at its column first_row. Rounded
// towards zero, so that finite numbers stay finite, such as the most negative one, which masks use.
template <Rows kRows, class Tile, class Scores>
FLASH_DEVICE void add_bias(Scores& s, uint32_t tile, int first_row, float scale) {
    constexpr bool kByQuery = kRows == Rows::kQueries;
    const int lane = ptx::not_hoisted(lane_id());  // over the loop it would take a register
    const uint32_t address =
        tile + (kByQuery ? Tile::offset(first_row + lane % 16, lane / 16)
                         : Tile::offset(lane / 16 * 8 + lane % 8, first_row / 8 + lane / 8 % 2));
#pragma unroll
    for (int k = 0; k < Scores::kCols / 16; ++k) {
        uint32_t pairs[4];
        if constexpr (kByQuery) {
            ptx::ldmatrix_x4<false>(pairs, (address ^ (k % Tile::kBlocksPerAtom * 32)) +
                                               k / Tile::kBlocksPerAtom * Tile::kAtomBytes);
        } else {
            ptx::ldmatrix_x4<true>(pairs, address + k * 16 * Tile::kPitch);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 b = ptx::unpack<typename Tile::Element>(pairs[j]);
            float (&x)[4] = s.v[0][2 * k + j / 2];
            const int i = j % 2 * 2;
            x[i] = __fmaf_rz(kLog2e, b.x, x[i] * scale);
            x[i + 1] = __fmaf_rz(kLog2e, b.y, x[i + 1] * scale);
        }
    }
}

// The same with a tile's parts, as they come. By all lanes of a warp. The position in the pipeline
// is in one register, over the loop of a kernel.
template <Rows kRows, class Tile, class Scores, class Pipeline>
FLASH_DEVICE void add_bias(Scores& s, const Pipeline& pipeline, uint32_t& position, int first_row,
                           float scale, int parts) {
    typename Pipeline::State state{position / 2, position % 2};
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
        pipeline.consumer_wait(state);
        add_bias<kRows, Tile>(s, pipeline.stage(state), first_row, scale);
        __syncwarp();
        pipeline.consumer_release_if(lane_id() == 0, state);
        state.advance();
        scale = 1.f;
    }
    position = 2 * state.stage + state.phase;
}

}  // namespace flash_ext
