// The lists that everything else follows: dispatch and instantiation in csrc, and (through
// tests/native) the tests and benchmarks.
#pragma once

namespace flash_ext {

// Algorithms, in the order of flash_ext.VARIANTS.
enum class Variant { kFa1, kFa2 };
inline constexpr const char* kVariantNames[] = {"fa1", "fa2"};
inline constexpr int kVariants = 2;

// Head dims with kernels of their own; every other one up to the last is padded to the next of
// these inside the kernel.
inline constexpr int kHeadDims[] = {64, 96, 128, 192, 256};
inline constexpr int kMaxHeadDim = 256;

constexpr int padded_head_dim(int head_dim) {
    for (int dim : kHeadDims)
        if (head_dim <= dim) return dim;
    return -1;
}

// Every kernel exists twice, so that the common case pays for no option: kPlain has masks (full,
// causal, window) only; kGeneral has all options as branches that are uniform over the grid.
enum class Features { kPlain, kGeneral };

}  // namespace flash_ext
