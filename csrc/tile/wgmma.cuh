// C += A B by wgmma, for a warpgroup. Operands in shared memory are matrix descriptors. The
// accumulator is in the registers of the four warps: each holds 16 of the 64 rows, as a
// RegisterTile<16, N>.
#pragma once

#include <cstdint>

#include "ptx/uniform.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"

namespace flash_ext {

// The matrix descriptor of a swizzled SharedTile (PTX ISA, "Matrix descriptor format"), with all
// lengths in units of 16 bytes:
//   bits  0-13  start address
//   bits 16-29  leading dimension byte offset: from one swizzle atom to the next, where M or N
//               crosses atoms
//   bits 32-45  stride dimension byte offset: from one group of eight rows to the next
//   bits 49-51  base offset: 0, since tiles begin at multiples of 1,024 bytes
//   bits 62-63  swizzle: 1 is 128 bytes, 2 is 64 bytes, 3 is 32 bytes
//
// kPinned: the descriptor passes through a warp reduction, which leaves it in a uniform register
// and which the compiler neither moves out of a loop nor repeats. Otherwise the descriptors of a
// tile that stays in place, and all descriptors where uniform registers are short, are kept in
// vector registers and moved back one by one, beside the matmuls. The reduction takes some 30
// cycles.
template <class Tile, bool kPinned>
FLASH_DEVICE uint64_t matrix_descriptor(uint32_t address) {
    constexpr uint64_t kSwizzle = Tile::kPitch == 128 ? 1 : Tile::kPitch == 64 ? 2 : 3;
    constexpr uint64_t kConstant = kSwizzle << 62 | uint64_t{8 * Tile::kPitch / 16} << 32 |
                                   uint64_t{Tile::kAtomBytes / 16} << 16;
    const uint32_t encoded = (address & 0x3ffff) >> 4;
    return kConstant | (kPinned ? static_cast<uint32_t>(ptx::warp_uniform(encoded)) : encoded);
}

// The descriptor of the operand this many bytes further on. The start address is in the lower half,
// which does not overflow.
FLASH_DEVICE uint64_t moved_descriptor(uint64_t descriptor, uint32_t bytes) {
    const uint32_t lower = static_cast<uint32_t>(descriptor) + bytes / 16;
    return (descriptor >> 32 << 32) | lower;
}

// A K-major operand, stored [m or n][k]. A step along k (16 elements, of FP8 32) is two 16-byte
// chunks of each row.
template <class Tile, bool kPinned = true>
struct KMajor {
    static constexpr bool kTranspose = false;
    uint64_t descriptor;

    FLASH_DEVICE explicit KMajor(uint32_t tile, int first_row = 0)
        : descriptor(matrix_descriptor<Tile, kPinned>(tile + first_row * Tile::kPitch)) {}

    FLASH_DEVICE void move(uint32_t bytes) { descriptor = moved_descriptor(descriptor, bytes); }

    // The bytes from the operand's first 16 columns to its k-th.
    static constexpr uint32_t step(int k) {
        return k / Tile::kBlocksPerAtom * Tile::kAtomBytes + k % Tile::kBlocksPerAtom * 32;
    }
    FLASH_DEVICE uint64_t at(int k) const { return descriptor + step(k) / 16; }
};

// ptxas 13.0: a step is an addition to the lower half. In 64 bits it is one, too, but beside an
// operand whose stage changes it becomes two with a carry, and three moves.
template <class Tile>
struct KMajorBy32Bits : KMajor<Tile> {
    using KMajor<Tile>::KMajor;
    FLASH_DEVICE uint64_t at(int k) const {
        return moved_descriptor(this->descriptor, this->step(k));
    }
};

// An MN-major operand, stored [k][m or n]. A step of 16 along k is 16 rows.
template <class Tile, bool kPinned = true>
struct MNMajor {
    static constexpr bool kTranspose = true;
    uint64_t descriptor;

    FLASH_DEVICE explicit MNMajor(uint32_t tile)
        : descriptor(matrix_descriptor<Tile, kPinned>(tile)) {}

    FLASH_DEVICE void move(uint32_t bytes) { descriptor = moved_descriptor(descriptor, bytes); }

    FLASH_DEVICE uint64_t at(int k) const { return descriptor + k * 16 * Tile::kPitch / 16; }
};

// An operand of one number per row, as StatisticsRow, without swizzle: 8 rows are a core matrix of
// 128 contiguous bytes. Its second half along K is the first one once more (leading dimension
// byte offset 0), so a product with Ones counts each row twice.
template <int kRows>
struct RowNumbers {
    static constexpr bool kTranspose = false;
    static constexpr int kBytes = kRows * 16;
    uint64_t descriptor;

    FLASH_DEVICE explicit RowNumbers(uint32_t rows)
        : descriptor(uint64_t{128 / 16} << 32 |
                     static_cast<uint32_t>(ptx::warp_uniform((rows & 0x3ffff) >> 4))) {}
    FLASH_DEVICE uint64_t at(int) const { return descriptor; }
};

// A matrix of ones of bfloat16, in registers.
struct Ones {
    static constexpr bool kTranspose = false;
    uint32_t v[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    FLASH_DEVICE const uint32_t (&at(int) const)[4] { return v; }
};

// The A operand in registers, rounded to the input type.
template <int kCols, int kElementBytes = 2>
struct RegisterOperand {
    static constexpr bool kTranspose = false;
    uint32_t v[kCols * kElementBytes / 32][4];

    template <class Element>
    FLASH_DEVICE void round(const RegisterTile<16, kCols>& source) {
#pragma unroll
        for (int k = 0; k < kCols / 16; ++k)
            AFromRegisters<Element, RegisterTile<16, kCols>>{source}.load_a(v[k], 0, k);
    }
    // Eight columns, from col on.
    template <class Element>
    FLASH_DEVICE void round_columns(const RegisterTile<16, 8>& source, int col) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            v[col / 16][col % 16 / 4 + i] = source.template pack<Element>(0, 0, i);
    }
    FLASH_DEVICE const uint32_t (&at(int k) const)[4] { return v[k]; }
};

// Starts C = A B or C += A B, and commits it as one wgmma group. Until a wait for the group
// returns, C must not be accessed, nor A modified where it is in registers.
template <class Element, int kK, class Accumulator, class A, class B>
FLASH_DEVICE void gemm_async(Accumulator& c, const A& a, const B& b, bool accumulate) {
    using Number = typename Accumulator::Number;
    using Wgmma = ptx::Wgmma<Element, Accumulator::kCols, B::kTranspose, Number>;
    auto& d = reinterpret_cast<Number(&)[Accumulator::kN * 4]>(c.v);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kK * static_cast<int>(sizeof(Element)) / 32; ++k)
        if constexpr (A::kTranspose) {
            Wgmma::mma_mn_major(d, a.at(k), b.at(k), accumulate || k > 0);
        } else {
            Wgmma::mma(d, a.at(k), b.at(k), accumulate || k > 0);
        }
    ptx::wgmma_commit();
}

// After a wait: tells the compiler that C has been written up to this point.
template <class Accumulator>
FLASH_DEVICE void warpgroup_fence(Accumulator& c) {
    c.for_each([](auto& x, int, int) { ptx::warpgroup_fence_operand(x); });
}

}  // namespace flash_ext
