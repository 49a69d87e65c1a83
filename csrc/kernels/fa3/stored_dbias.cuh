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
//
// Rows must be a multiple of 16 bytes. Others are stored in the workspace and copied at the end.
#pragma once

#include "kernels/fa3/bias_tiles.cuh"
#include "kernels/fa3/work_tiles.cuh"
#include "plan/launchers.h"
#include "ptx/tma.cuh"

namespace flash_ext {

// What the params of a backward have besides, with a bias.
struct DBiasMap {
    CUtensorMap map;  // of (B, Hq, Sq, Sk), in 16 bits
    void* data;
    int64_t batch_stride, head_stride;  // in elements, 0 where one index is for all
    int row_stride;
    bool by_tma, from_registers;
    bool adds;
    bool zeroes;  // what the mask hides

    // Encodes the map. Zeroes dbias if tiles are added.
    template <class Tile>
    cudaError_t prepare(const TiledBias& dbias, StoredDBias stored, bool zeroes_hidden,
                        cudaStream_t stream) {
        const bool stores = stored != StoredDBias::kNo;
        const bool is_float32 = dbias.element_bytes == 4;
        by_tma = stores && !is_float32;
        from_registers = stores && is_float32;
        adds = stored == StoredDBias::kAdded;
        zeroes = zeroes_hidden;
        if (!stores) return cudaSuccess;
        data = dbias.data;
        batch_stride = dbias.broadcast[0] ? 0 : dbias.strides[0];
        head_stride = dbias.broadcast[1] ? 0 : dbias.strides[1];
        row_stride = static_cast<int>(dbias.strides[2]);
        if (adds)
            if (const cudaError_t status = cudaMemsetAsync(
                    data, 0, dbias.element_bytes * dbias.sizes[0] * dbias.strides[0], stream);
                status != cudaSuccess)
                return status;
        return by_tma ? encode_tensor_map<Tile>(map, dbias) : cudaSuccess;
    }

    // The element of a tile's row 0 and column 0.
    FLASH_DEVICE int64_t index(const Sequence& sequence, int head, int first_query,
                               int first_key) const {
        return sequence.batch * batch_stride + head * head_stride +
               int64_t{first_query} * row_stride + first_key;
    }
};

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
    const DBiasMap& dbias = params.dbias_map;
    float* p = static_cast<float*>(dbias.data) + dbias.index(sequence, head, query, key);
#pragma unroll
    for (int n = 0; n < Scores::kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float* const row = p + e * dbias.row_stride;
            if (8 * n + e < rows && cols > 0) row[0] = ds.v[0][n][e];
            if (8 * n + e < rows && cols > 8) row[8] = ds.v[0][n][2 + e];
        }
        p += 8 * dbias.row_stride;
    }
}

// By all consumers: zeros for the Q tiles that do not see the KV tile. Rows of dbias are a
// multiple of 16 bytes.
template <int kBlockQ, int kBlockKV, class Params>
FLASH_DEVICE void store_dbias_zeros(const Params& params, const KeyTile& tile, int first_head,
                                    int heads) {
    const DBiasMap& dbias = params.dbias_map;
    const int element = dbias.by_tma ? 2 : 4;
    const int chunks = kBlockKV * element / 16;  // of a row
    const int rows = 256 / chunks;               // at a time
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const int key = tile.first_key + thread % chunks * (16 / element);
    if (key >= params.seqlen_k) return;
    for (int head = first_head; head < first_head + heads; ++head) {
        char* const column =
            static_cast<char*>(dbias.data) + dbias.index(tile.sequence, head, 0, key) * element;
        const auto store = [&](int begin, int end) {
            for (int row = begin + thread / chunks; row < end; row += rows)
                *reinterpret_cast<uint4*>(column + int64_t{row} * dbias.row_stride * element) = {};
        };
        store(0, tile.q_tiles.begin * kBlockQ);
        store(tile.q_tiles.end * kBlockQ, params.seqlen_q);
    }
}

}  // namespace flash_ext
