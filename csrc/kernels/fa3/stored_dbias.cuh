// The gradient of a bias, by FA3's backward itself: where each of its elements is one element of
// dS, or the sum of two. kernels/fa3/bias_gradient.cuh sums over more.
//
// In 16 bits dbias is dS as the matmuls take it, rounded once: TMA stores the tiles from shared
// memory, beside dP and dQ. In float32 warps store it from registers, 32 contiguous bytes of each
// of four rows at a time.
//
// The backward goes over the tiles that the mask shows. In the others the consumers store zeros,
// before the first Q tile of their KV tile. Where two elements of dS are one of dbias, both are
// added to zeros: x + y has the bits of y + x, so the result is the same every time.
#pragma once

#include "kernels/fa3/bias_tiles.cuh"
#include "kernels/fa3/work_tiles.cuh"
#include "plan/launchers.h"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"

namespace flash_ext {

// What the params of a backward have besides, with a bias.
struct DBiasMap {
    CUtensorMap map;  // of (B, Hq, Sq, Sk), in 16 bits
    bool by_tma, from_registers;
    bool adds;
    bool zeroes;  // what the mask hides

    // Encodes the map. Zeroes dbias if tiles are added.
    template <class Tile>
    cudaError_t prepare(const BackwardParams& params, StoredDBias stored, bool masked,
                        cudaStream_t stream) {
        const int (&shape)[4] = params.bias.sizes;
        const bool is_float32 = params.bias.type == BiasType::kFloat32;
        const bool stores = stored != StoredDBias::kNo;
        by_tma = stores && !is_float32;
        from_registers = stores && is_float32;
        adds = stored == StoredDBias::kAdded;
        zeroes = stored == StoredDBias::kStored && masked;
        cuuint64_t sizes[4], strides[3];  // in bytes
        int64_t bytes = is_float32 ? 4 : 2;
        for (int i = 0; i < 4; ++i) {
            sizes[i] = shape[3 - i];
            bytes *= shape[3 - i];
            if (i < 3) strides[i] = bytes;
        }
        if (adds)
            if (const cudaError_t status = cudaMemsetAsync(params.dbias, 0, bytes, stream);
                status != cudaSuccess)
                return status;
        return by_tma ? encode_tensor_map<Tile>(map, params.dbias, sizes, strides, Tile::kRows)
                      : cudaSuccess;
    }
};

// The sizes of dbias are of (B or 1, Hq or 1, Sq, Sk). The element of a tile's row 0 and column 0.
template <class Params>
FLASH_DEVICE int64_t dbias_index(const Params& params, const Sequence& sequence, int head,
                                 int first_query, int first_key) {
    const BiasMap& bias = params.bias_map;
    const int64_t matrix =
        int64_t{sequence.batch} * bias.batch_step * params.bias.sizes[1] + head * bias.head_step;
    return (matrix * params.seqlen_q + first_query) * params.seqlen_k + first_key;
}

// By one thread: 64 keys of a tile of dS, which are an atom of shared memory.
template <class Params>
FLASH_DEVICE void store_dbias_tile(const Params& params, uint32_t atom, const Sequence& sequence,
                                   int head, int first_query, int first_key) {
    const int x = first_key, y = first_query;
    const int z = head * params.bias_map.head_step;
    const int w = sequence.batch * params.bias_map.batch_step;
    if (params.dbias_map.adds) {
        ptx::tma_add_4d(params.dbias_map.map, atom, x, y, z, w);
    } else {
        ptx::tma_store_4d(params.dbias_map.map, atom, x, y, z, w);
    }
    ptx::bulk_commit();
}

// By a warp: dS^T of its 16 keys in float32.
template <class Params, class Scores>
FLASH_DEVICE void store_dbias_rows(const Params& params, const Scores& ds, const Sequence& sequence,
                                   int head, int first_query, int first_key) {
    const int query = first_query + ptx::lane_not_hoisted() % 4 * 2;
    const int key = first_key + ptx::lane_not_hoisted() / 4;
    const int rows = params.seqlen_q - query;
    const int cols = params.seqlen_k - key;
    float* p = static_cast<float*>(params.dbias) + dbias_index(params, sequence, head, query, key);
#pragma unroll
    for (int n = 0; n < Scores::kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float* const row = p + e * params.seqlen_k;
            if (8 * n + e < rows && cols > 0) row[0] = ds.v[0][n][e];
            if (8 * n + e < rows && cols > 8) row[8] = ds.v[0][n][2 + e];
        }
        p += 8 * params.seqlen_k;
    }
}

// By all consumers: zeros where the Q tiles are none of those of the KV tile. Rows of dbias are a
// multiple of 16 bytes.
template <int kBlockQ, int kBlockKV, class Params>
FLASH_DEVICE void store_dbias_zeros(const Params& params, const KeyTile& tile, int first_head,
                                    int heads) {
    const int element = params.bias_map.is_float32 ? 4 : 2;
    const int chunks = kBlockKV * element / 16;  // of a row
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const int key = tile.first_key + thread % chunks * (16 / element);
    if (key >= params.seqlen_k) return;
    const int rows = 256 / chunks;  // at a time
    for (int head = first_head; head < first_head + heads; ++head) {
        char* const column = static_cast<char*>(params.dbias) +
                             dbias_index(params, tile.sequence, head, 0, key) * element;
        const auto store = [&](int begin, int end) {
            for (int row = begin + thread / chunks; row < end; row += rows)
                *reinterpret_cast<uint4*>(column + int64_t{row} * params.seqlen_k * element) = {};
        };
        store(0, tile.q_tiles.begin * kBlockQ);
        store(tile.q_tiles.end * kBlockQ, params.seqlen_q);
    }
}

}  // namespace flash_ext
