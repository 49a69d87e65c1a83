// The frame of the kernels that rotate and round: a CTA goes through tiles of 128 rows of a head.
//
// A thread has eight or sixteen vectors of 16 bytes of a tile, so a CTA has 2 D or D threads. The
// vectors of a warp are its own from memory to memory. cp.async brings them into the warp's part of
// shared memory, and lanes read them to registers; then the next tile is on its way. Results go
// back through shared memory too, so that stores are as wide and as adjacent as loads, whatever
// elements a lane has. Within a tile, warps wait for each other only where they share a maximum.
//
// So at least 64 KB of rows are in flight in an SM, however many registers the arithmetic needs. At
// 4.8 TB/s and a latency of 1.2 us an SM has 44 KB on the way, two thirds of them loads.
#pragma once

#include <math_constants.h>

#include <cfloat>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "problem/quantize.h"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/not_hoisted.cuh"
#include "ptx/shared.cuh"
#include "schedule/row_tiles.cuh"
#include "tile/copy.cuh"

namespace flash_ext {

inline constexpr int kMaxQuantizeThreads = kScaleRows * kMaxQuantizeDim / 64;

// How the threads of a CTA share a tile, and where its vectors are in shared memory: permuted
// within 128 bytes, so that lanes that read one of different rows use different banks. A lane's
// vectors are 2^kSwizzle ones after the vectors of the lane before, or fewer. Results have pieces
// of 8 bytes, whose pairs are permuted the same way, with kResultSwizzle.
//
// Permutations are linear: swizzled(a ^ b) = swizzled(a) ^ swizzled(b). So the address of a vector
// whose number is a lane's plus a constant, without common bits, takes one instruction:
// vector_address().
//
// kTileCtas: two CTAs of a cluster can share a tile. (With one, an SM has no registers for two
// tiles of D 256, and so all its warps wait for the same maximum, and for the same units of the SM
// at the same time.)
template <int kVectors, int kSwizzle, int kResultSwizzle, int kTileCtas = 1>
struct TileLayout {
    static constexpr int kCtas = kTileCtas;
    static constexpr int kThreadVectors = kVectors;  // of a thread, in a tile
    static constexpr int kWarpVectors = 32 * kVectors;
    static constexpr int kVectorRows = kScaleRows / kVectors;  // from a thread's vector to its next
    static constexpr int kMaxThreads = kScaleRows * kMaxQuantizeDim / (8 * kVectors * kCtas);

    // Of a CTA; a multiple of 32.
    static int threads(const QuantizeParams& params) {
        return kScaleRows * params.head_dim / (8 * kVectors * kCtas);
    }
    // This thread's number among the tile's.
    static FLASH_DEVICE uint32_t thread() {
        return kCtas == 1 ? threadIdx.x : ptx::cta_rank() * blockDim.x + threadIdx.x;
    }

    static FLASH_DEVICE constexpr uint32_t swizzled(uint32_t vector) {
        return vector ^ ((vector >> kSwizzle) & 7);
    }
    static FLASH_DEVICE constexpr uint32_t swizzled_piece(uint32_t piece) {
        return 2 * (piece / 2 ^ ((piece / 2 >> kResultSwizzle) & 7)) + piece % 2;
    }

    // `of_lane`: the address of the lane's first vector, or piece; `more`: the constant part.
    static FLASH_DEVICE constexpr uint32_t vector_address(uint32_t of_lane, uint32_t more) {
        return (of_lane ^ swizzled(more) % 8 * 16) + swizzled(more) / 8 * 128;
    }
    static FLASH_DEVICE constexpr uint32_t piece_address(uint32_t of_lane, uint32_t more) {
        return (of_lane ^ swizzled_piece(more) % 16 * 8) + swizzled_piece(more) / 16 * 128;
    }
};

// The mean of the columns of a head, where rows are rotated.
struct WarpMean {
    int64_t head;  // scale_head(); -1: none
    alignas(16) float of_columns[kMaxQuantizeDim + kMaxQuantizeDim / 8];
};

// A warp's part of a tile.
template <class Layout>
struct alignas(128) WarpRows {
    uint4 x[Layout::kWarpVectors];  // swizzled()
    RowTile tiles[2];               // the one in registers, and the one of `x`
    WarpMean mean;                  // of the head of the tile in registers, or of an earlier one
    alignas(128) uint2 x_8bit[Layout::kWarpVectors];  // swizzled_piece()
};

// Where a vector of the warp's part is in the tile. Vector 32 i + n of a warp is vector
// i T + 32 warp + n of the tile, of T threads, counted row by row: every i is kVectorRows rows
// further, in the same column. (D is a multiple of 16, and a warp's 32 vectors may have several
// rows, or end in one.)
template <class Layout>
class TilePosition {
 public:
    __device__ TilePosition(const QuantizeParams& params, int vector) {
        const uint32_t vectors = params.head_dim / 8;
        const uint32_t linear = Layout::thread() / 32 * 32 + vector % 32;
        const uint32_t row = linear / vectors;
        bits_ = (row + Layout::kVectorRows * (vector / 32)) << 16 | 8 * (linear - row * vectors);
    }
    __device__ int row() const { return ptx::not_hoisted(bits_) >> 16; }
    __device__ int column() const { return ptx::not_hoisted(bits_) & 0xffff; }

 private:
    uint32_t bits_;  // one register, over many tiles
};

// Is this the pass that rounds, after one for the maxima? It begins with the last tile of all: what
// the pass before has left in L2.
FLASH_DEVICE bool is_second_pass(const QuantizeParams& params) {
    return params.scales != Scales::kBlock && !params.finds_maxima;
}

// The tiles of a CTA, as one warp sees them: every gridDim.x-th one, of which it computes with one
// while the next one is loaded. What belongs to tiles is in shared memory, since registers are for
// elements.
template <class Rows>
class TileStream {
 public:
    using Layout = typename Rows::Layout;

    __device__ explicit TileStream(const QuantizeParams& params)
        : storage((&shared_storage<WarpRows<Layout>>())[threadIdx.x / 32]),
          at_(params, threadIdx.x % 32) {
        if (threadIdx.x % 32 == 0) storage.mean.head = -1;
        choose_next(params);
        load_next(params);
    }

    // Waits for the tile that was started last, reads it to registers and starts the next one in
    // its place.
    __device__ const RowTile& read(const QuantizeParams& params, Rows& rows) {
        ++tiles_read_;
        choose_next(params);
        ptx::cp_async_wait<0>();
        __syncwarp();  // the vectors of all lanes are there
        rows.read(storage);
        __syncwarp();  // all lanes have read them
        load_next(params);
        return storage.tiles[number() % 2];
    }
    // The number of the tile in registers.
    __device__ uint32_t number() const { return tiles_read_ - 1; }
    __device__ const RowTile& next() const { return storage.tiles[tiles_read_ % 2]; }

    WarpRows<Layout>& storage;  // this warp's

 private:
    __device__ void choose_next(const QuantizeParams& params) {
        constexpr uint32_t kCtas = Layout::kCtas;
        uint32_t number = blockIdx.x / kCtas + tiles_read_ * (gridDim.x / kCtas);
        if (is_second_pass(params))
            number = static_cast<uint32_t>(row_tile_count(params, kScaleRows)) - 1 - number;
        const RowTile tile = row_tile(params, number, kScaleRows);
        __syncwarp();  // all lanes are done with the tile before
        if (threadIdx.x % 32 == 0) storage.tiles[tiles_read_ % 2] = tile;
        __syncwarp();  // it is complete
    }

    // Copies the warp's part of the next tile from x, as one group of cp.async. A lane copies the
    // vectors 32 i + lane. Rows that are not in use become zeros.
    FLASH_DEVICE void load_next(const QuantizeParams& params) {
        const RowTile& tile = next();
        if (!tile.is_valid) return;
        const uint16_t* x = static_cast<const uint16_t*>(params.x.data) +
                            tile.batch * params.x.batch_stride + tile.head * params.x.head_stride +
                            (tile.begin + at_.row()) * params.x.row_stride + at_.column();
        const int64_t step = Layout::kVectorRows * params.x.row_stride;
        const int rows = tile.used - at_.row();
        const uint32_t target =
            ptx::shared_address(storage.x) + 16 * Layout::swizzled(ptx::lane_not_hoisted());
#pragma unroll
        for (int i = 0; i < Layout::kThreadVectors; ++i, x += step)
            ptx::cp_async_16(Layout::vector_address(target, 32 * i), x,
                             Layout::kVectorRows * i < rows);
        ptx::cp_async_commit();
    }

    TilePosition<Layout> at_;  // of the lane's first vector
    uint32_t tiles_read_ = 0;
};

// The maxima of the warps of a tile. With two CTAs, each has a copy, and barriers of which a phase
// ends when all of a tile's maxima have come. One CTA may be a tile ahead, never two: so every
// other tile can have the same place.
template <class Layout>
struct TileMaxima {
    uint32_t of_warps[2][32];
    uint64_t arrived[2];  // mbarriers

    // Before the first maxima: initializes this CTA's barriers. wait_for_init() waits until the
    // other CTA has initialized its own.
    FLASH_DEVICE void init() {
        if constexpr (Layout::kCtas > 1) {
            if (threadIdx.x == 0) {
                ptx::mbarrier_init(ptx::shared_address(&arrived[0]), 1);
                ptx::mbarrier_init(ptx::shared_address(&arrived[1]), 1);
                ptx::mbarrier_fence_init();
            }
            __syncwarp();  // initialized before any lane of this warp arrives
            ptx::cluster_arrive_relaxed();
        }
    }
    FLASH_DEVICE void wait_for_init() {
        if constexpr (Layout::kCtas > 1) ptx::cluster_wait();
    }

    // The maximum of x, which is not negative, over all threads of the CTA's tile number `tile`.
    // Bits of such floats are in the order of their values.
    FLASH_DEVICE float reduce(float x, uint32_t tile) {
        uint32_t (&maxima)[32] = of_warps[tile % 2];
        const uint32_t of_warp = __reduce_max_sync(0xffffffff, __float_as_uint(x));
        const uint32_t lane = ptx::lane_not_hoisted();
        const uint32_t warps = Layout::kCtas * blockDim.x / 32;
        if constexpr (Layout::kCtas == 1) {
            if (lane == 0) maxima[threadIdx.x / 32] = of_warp;
            __syncthreads();  // the maxima of all warps are complete
        } else {
            const uint32_t barrier = ptx::shared_address(&arrived[tile % 2]);
            if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(barrier, sizeof(uint32_t) * warps);
            if (lane < Layout::kCtas)
                ptx::st_async(
                    ptx::address_in_cta(ptx::shared_address(&maxima[Layout::thread() / 32]), lane),
                    of_warp, ptx::address_in_cta(barrier, lane));
            __syncwarp();
            ptx::mbarrier_wait(barrier, tile / 2 % 2);  // for the maxima of all warps
        }
        return __uint_as_float(__reduce_max_sync(0xffffffff, lane < warps ? maxima[lane] : 0));
    }
};

// As many CTAs of `threads` threads as run at a time, with at most `sm_threads` threads on an SM
// and `cta_bytes` of shared memory for each CTA. A few less where all tiles of a CTA are then of
// the same head, so that its mean is loaded once.
template <class Layout>
int64_t persistent_ctas(const QuantizeParams& params, const GpuModel& gpu, int threads,
                        int sm_threads, int cta_bytes) {
    const int by_threads = max_of(sm_threads / threads, 1);
    const int by_shared = max_of(gpu.shared_bytes / cta_bytes, 1);
    int tiles = gpu.sms * min_of(by_threads, by_shared) / Layout::kCtas;  // at a time
    const int above = tiles % params.heads;
    if (params.mean != nullptr && 16 * above <= tiles) tiles -= above;
    return Layout::kCtas * min_of(row_tile_count(params, kScaleRows), int64_t{tiles});
}

}  // namespace flash_ext
