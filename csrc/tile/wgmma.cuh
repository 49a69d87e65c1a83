// C += A B of a warpgroup by wgmma: operands in shared memory as descriptors, the accumulator in
// the registers of its four warps, each of which holds 16 of the 64 rows (as RegisterTile<16, N>).
#pragma once

#include <cstdint>

#include "ptx/uniform.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"

namespace flash_ext {

// A matrix descriptor, the 64-bit name of a swizzled SharedTile for wgmma (PTX ISA, "Matrix
// descriptor format"), in units of 16 bytes:
//   bits  0-13  address
//   bits 16-29  stride from atom to atom, where the matrix runs along N (or M) across atoms
//   bits 32-45  stride from one group of eight rows to the next
//   bits 49-51  the tile's place within the swizzle's pattern: 0, since tiles begin at 1,024 bytes
//   bits 62-63  swizzle: 1 is 128 bytes, 2 is 64 bytes, 3 is 32 bytes
//
// kPinned: by way of a warp reduction, which the compiler neither moves out of a loop nor repeats.
// Without it, the descriptors of a tile that stays in place, and those of all tiles where scalar
// registers are short, end up in the lanes' registers and are moved back one by one, beside the
// matmuls. With it, they are there some 30 cycles later.
template <class Tile, bool kPinned>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
    constexpr uint64_t kSwizzle = Tile::kPitch == 128 ? 1 : Tile::kPitch == 64 ? 2 : 3;
    constexpr uint64_t kConstant = kSwizzle << 62 | uint64_t{8 * Tile::kPitch / 16} << 32 |
                                   uint64_t{Tile::kAtomBytes / 16} << 16;
    const uint32_t encoded = (address & 0x3ffff) >> 4;
    return kConstant | (kPinned ? static_cast<uint32_t>(ptx::warp_uniform(encoded)) : encoded);
}

// An operand stored [m or n][k]: 16 columns of k are two of a row's chunks.
template <class Tile, bool kPinned = true>
struct AlongRows {
    static constexpr bool kTranspose = false;
    uint64_t descriptor;

    __device__ __forceinline__ explicit AlongRows(uint32_t tile, int first_row = 0)
        : descriptor(matrix_descriptor<Tile, kPinned>(tile + first_row * Tile::kPitch)) {}

    __device__ __forceinline__ uint64_t at(int k) const {
        const int atom = k / Tile::kBlocksPerAtom;
        return descriptor + (atom * Tile::kAtomBytes + k % Tile::kBlocksPerAtom * 32) / 16;
    }
};

// An operand stored [k][m or n]: 16 rows.
template <class Tile, bool kPinned = true>
struct AlongColumns {
    static constexpr bool kTranspose = true;
    uint64_t descriptor;

    __device__ __forceinline__ explicit AlongColumns(uint32_t tile)
        : descriptor(matrix_descriptor<Tile, kPinned>(tile)) {}

    __device__ __forceinline__ uint64_t at(int k) const {
        return descriptor + k * 16 * Tile::kPitch / 16;
    }
};

// A in registers, rounded to the input type.
template <int kCols>
struct RegisterOperand {
    uint32_t v[kCols / 16][4];

    template <class Element>
    __device__ __forceinline__ void round(const RegisterTile<16, kCols>& source) {
#pragma unroll
        for (int k = 0; k < kCols / 16; ++k)
            AFromRegisters<Element, RegisterTile<16, kCols>>{source}.load_a(v[k], 0, k);
    }
    __device__ __forceinline__ const uint32_t (&at(int k) const)[4] { return v[k]; }
};

// Starts C = A B, or C += A B, and closes its group. Until a wait says that it is done, C, and A
// where it is in registers, must not be touched.
template <class Element, int kK, class Accumulator, class A, class B>
__device__ __forceinline__ void start_gemm(Accumulator& c, const A& a, const B& b,
                                           bool accumulate) {
    auto& d = reinterpret_cast<float (&)[Accumulator::kN * 4]>(c.v);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kK / 16; ++k)
        ptx::Wgmma<Element, Accumulator::kCols, B::kTranspose>::mma(d, a.at(k), b.at(k),
                                                                    accumulate || k > 0);
    ptx::wgmma_commit();
}

// The same for an A that is stored [k][m] in shared memory.
template <class Element, int kK, class Accumulator, class A, class B>
__device__ __forceinline__ void start_gemm_columns(Accumulator& c, const A& a, const B& b,
                                                   bool accumulate) {
    static_assert(A::kTranspose);
    auto& d = reinterpret_cast<float (&)[Accumulator::kN * 4]>(c.v);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kK / 16; ++k)
        ptx::Wgmma<Element, Accumulator::kCols, B::kTranspose>::mma_columns(d, a.at(k), b.at(k),
                                                                            accumulate || k > 0);
    ptx::wgmma_commit();
}

// Tells the compiler that C was written up to here, after a wait.
template <class Accumulator>
__device__ __forceinline__ void finished(Accumulator& c) {
#pragma unroll
    for (int n = 0; n < Accumulator::kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::wgmma_finished(c.v[0][n][i]);
}

}  // namespace flash_ext
