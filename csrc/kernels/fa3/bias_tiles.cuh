// The bias of FA3's kernels: tiles with a row for each query, which TMA brings to shared memory
// ahead of the scores to which they are added. In the forward most tiles of 16 bits are added by
// the exponents of P (BiasScale): an operation less, and no rounding between.
//
// A bias whose rows TMA can address is loaded as it is. Others are first copied by tile_bias(): one
// of bool as 0 and -inf in 16 bits, one row or column for all as a tile's worth of equal ones. A
// stage of the pipeline is a tile of 16-bit numbers, or half of the keys of a float32 one.
#pragma once

#include "kernels/common/launch.cuh"
#include "problem/sequences.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "schedule/tile_order.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"

namespace flash_ext {

// A tile, and half of its keys in float32, which has as many bytes.
template <class Element, int kBlockQ, int kBlockKV>
struct BiasTile : SharedTile<Element, kBlockQ, kBlockKV> {
    using Half = SharedTile<float, kBlockQ, kBlockKV / 2>;
};

// A kernel's pipeline of tiles, a member of its SharedStorage: empty without a bias.
template <class Tile, int kStages>
struct BiasStorage {
    using Pipeline = flash_ext::Pipeline<kStages, Tile::kBytes>;
    typename Pipeline::Stages stages;
    typename Pipeline::Barriers barriers;

    FLASH_DEVICE Pipeline pipeline() const { return {stages, barriers}; }
};
template <class Tile>
struct BiasStorage<Tile, 0> {
    using Pipeline = flash_ext::Pipeline<1, Tile::kBytes>;
};

// A map of tiles of the bias, or of its gradient.
template <class Tile>
cudaError_t encode_tensor_map(CUtensorMap& map, const TiledBias& bias) {
    cuuint64_t sizes[4], strides[3];  // in bytes; of a single index never used, but needed
    for (int i = 0; i < 4; ++i) sizes[i] = bias.sizes[3 - i];
    for (int i = 0; i < 3; ++i)
        strides[i] = max_of<int64_t>(bias.element_bytes * bias.strides[2 - i], 16);
    return encode_tensor_map<Tile>(map, bias.data, sizes, strides, Tile::kRows);
}

// What a kernel's params have besides, with a bias. The steps are 0 where one index is for all.
struct BiasMap {
    CUtensorMap map;  // of (B, Hq, Sq, Sk)
    bool is_float32;
    int batch_step, head_step, row_step, col_step;

    // Encodes the map, and fills the copy if there is one.
    template <class Tile>
    cudaError_t prepare(const AttentionParams& params, const TiledBias& bias, cudaStream_t stream) {
        using Half = typename Tile::Half;
        static_assert(Half::kBytes == Tile::kBytes && Half::kAtoms == Tile::kAtoms);
        if (bias.is_copy)
            if (const cudaError_t status =
                    tile_bias(params.bias, params.element_type, bias, stream);
                status != cudaSuccess)
                return status;
        is_float32 = bias.element_bytes == 4;
        const auto step = [&](int dim) { return bias.broadcast[dim] ? 0 : 1; };
        batch_step = step(0);
        head_step = step(1);
        row_step = step(2);
        col_step = step(3);
        return is_float32 ? encode_tensor_map<Half>(map, bias) : encode_tensor_map<Tile>(map, bias);
    }

    template <class Tile, class Pipeline>
    FLASH_DEVICE void load(const Pipeline& pipeline, typename Pipeline::State& state,
                           const Sequence& sequence, int head, int first_query,
                           int first_key) const {
        int col = first_key * col_step;
#pragma unroll 1
        for (int part = is_float32 ? 0 : 1; part < 2; ++part) {
            pipeline.producer_acquire(state);
            pipeline.producer_expect(state, Tile::kBytes);
#pragma unroll 1
            for (int atom = 0; atom < Tile::kAtoms; ++atom) {
                ptx::tma_load_4d(pipeline.stage(state) + atom * Tile::kAtomBytes, map,
                                 pipeline.full(state), col, first_query * row_step,
                                 head * head_step, sequence.batch * batch_step);
                col += is_float32 ? Tile::Half::kAtomCols : Tile::kAtomCols;
            }
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

// Batch elements that share a bias come one after another: then they share it in L2.
template <class Params>
FLASH_DEVICE void adjacent_batches(WorkTile& work, const Params& params) {
    if (params.bias_map.batch_step != 0) return;
    const PreparedTileOrder& order = params.tile_order;
    const int head = work.batch * order.heads + work.head;
    work.head = head / order.batch;
    work.batch = head - work.head * order.batch;
}

// A score in base 2, with its bias. Rounded towards zero, so that finite numbers stay finite, such
// as the most negative one, which masks use.
FLASH_DEVICE float with_bias(float score, float scale, float bias) {
    return __fmaf_rz(kLog2e, bias, score * scale);
}

// What a lane has of a tile of 16-bit numbers, 16 columns of scores at a time: load() brings it,
// and at() is that of row 8 i and this lane's column. The warp's rows begin at the tile's row
// `first_row` if rows are queries, otherwise at its column first_row.
template <Rows kRows, class Tile>
struct BiasFragment {
    uint32_t address;
    uint32_t pairs[4];

    FLASH_DEVICE BiasFragment(uint32_t tile, int first_row) {
        const int lane = ptx::lane_not_hoisted();  // over the loop it would take a register
        address = tile + (kRows == Rows::kQueries ? Tile::offset(first_row + lane % 16, lane / 16)
                                                  : Tile::offset(lane / 16 * 8 + lane % 8,
                                                                 first_row / 8 + lane / 8 % 2));
    }
    FLASH_DEVICE void load(int column) {
        if constexpr (kRows == Rows::kQueries) {
            ptx::ldmatrix_x4<false>(pairs, Tile::block_address(address, column / 16));
        } else {
            ptx::ldmatrix_x4<true>(pairs, address + column / 16 * 16 * Tile::kPitch);
        }
    }
    FLASH_DEVICE float at(int i, int column) const {
        const float2 b = ptx::unpack<typename Tile::Element>(pairs[column % 16 / 8 * 2 + i]);
        return column % 2 == 0 ? b.x : b.y;
    }
};

// The scale of scores without their bias, which the exponents of P add with the maximum.
template <class Fragment>
struct BiasScale {
    float scale;
    Fragment bias;

    FLASH_DEVICE auto exponents(const float (&subtracted)[2]) const {
        return [scale = scale, bias = bias, &subtracted](float x, int i, int column) mutable {
            if (i == 0 && column % 16 == 0) bias.load(column);
            return fmaf(x, scale, fmaf(bias.at(i, column), kLog2e, -subtracted[i]));
        };
    }
};

// Adds a tile of 16-bit numbers.
template <class Scores, class Fragment>
FLASH_DEVICE void add_bias_16(Scores& s, Fragment bias, float scale) {
#pragma unroll
    for (int n = 0; n < Scores::kN; ++n) {
        if (n % 2 == 0) bias.load(8 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            s.v[0][n][i] = with_bias(s.v[0][n][i], scale, bias.at(i / 2, 8 * n + i % 2));
    }
}

// Adds half of a float32 tile. Rows are queries: to the scores of its keys, whose first column is
// kFirstCol. Rows are keys: to all scores, if they are of its keys.
template <Rows kRows, class Half, int kFirstCol, class Scores>
FLASH_DEVICE void add_bias_32(Scores& s, uint32_t half, int first_row, float scale) {
    const int lane = ptx::lane_not_hoisted();
    const int row = lane / 4, col = lane % 4 * 2;  // of the lane's first score
    if constexpr (kRows == Rows::kQueries) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t address =
                half + Half::offset(first_row + row + 8 * i, col / 4) + col % 4 * 4;
#pragma unroll
            for (int n = 0; n < Half::kCols / 8; ++n) {
                float b[2];
                ptx::ld_shared_v2(b, Half::block_address(address, n));
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s.v[0][kFirstCol / 8 + n][2 * i + e];
                    x = with_bias(x, scale, b[e]);
                }
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int key = first_row + row + 8 * i;
                const uint32_t address = half + Half::offset(col + e, key / 4) + key % 4 * 4;
#pragma unroll
                for (int n = 0; n < Scores::kN; ++n) {
                    float& x = s.v[0][n][2 * i + e];
                    const int bits = ptx::ld_shared(address + n * 8 * Half::kPitch);
                    x = with_bias(x, scale, __int_as_float(bits));
                }
            }
    }
}

// Releases the tile that comes next in the pipeline, by all lanes of a warp that does not use it.
template <class Pipeline>
FLASH_DEVICE void skip_bias(const Pipeline& pipeline, uint32_t& position, bool is_float32) {
    typename Pipeline::State state{position / 2, position % 2};
    for (int part = is_float32 ? 0 : 1; part < 2; ++part) {
        pipeline.consumer_wait(state);
        if (lane_id() == 0) pipeline.consumer_release(state);
        state.advance();
    }
    position = 2 * state.stage + state.phase;
}

// Uses the stage that comes next in the pipeline, by all lanes of a warp, and releases it. The
// position in the pipeline is in one register, over the loop of a kernel.
template <class Pipeline, class Use>
FLASH_DEVICE void use_bias(const Pipeline& pipeline, uint32_t& position, Use use) {
    typename Pipeline::State state{position / 2, position % 2};
    pipeline.consumer_wait(state);
    use(pipeline.stage(state));
    __syncwarp();
    if (lane_id() == 0) pipeline.consumer_release(state);
    state.advance();
    position = 2 * state.stage + state.phase;
}

// Scales scores and adds the tile that comes next.
template <Rows kRows, class Tile, bool kMayBeFloat32, class Scores, class Pipeline>
FLASH_DEVICE void add_bias(Scores& s, const Pipeline& pipeline, uint32_t& position, int first_row,
                           float scale, bool is_float32) {
    using Half = typename Tile::Half;
    const auto with_stage = [&](auto add) { use_bias(pipeline, position, add); };
    if (!kMayBeFloat32 || !is_float32) [[likely]] {
        with_stage([&](uint32_t tile) {
            add_bias_16(s, BiasFragment<kRows, Tile>{tile, first_row}, scale);
        });
    } else if constexpr (kRows == Rows::kQueries) {
        with_stage([&](uint32_t half) { add_bias_32<kRows, Half, 0>(s, half, first_row, scale); });
        with_stage([&](uint32_t half) {
            add_bias_32<kRows, Half, Half::kCols>(s, half, first_row, scale);
        });
    } else {
#pragma unroll 1
        for (int part = 0; part < 2; ++part)
            with_stage([&](uint32_t half) {
                if (first_row / Half::kCols == part)
                    add_bias_32<kRows, Half, 0>(s, half, first_row % Half::kCols, scale);
            });
    }
}

}  // namespace flash_ext
