// The lists that everything else follows: dispatch and instantiation in csrc, and (through
// tests/native) the tests and benchmarks.
#pragma once

namespace flash_ext {

// Algorithms, in the order of flash_ext.VARIANTS.
enum class Variant { kFa1, kFa2, kFa3 };
inline constexpr const char* kVariantNames[] = {"fa1", "fa2", "fa3"};
inline constexpr int kVariants = 3;

// Head dims of Q and K, and of V and the output.
struct HeadDims {
    int qk;
    int v;
};

// Pairs with kernels of their own; any other up to the last is padded, inside the kernel, to the
// first of these that holds it.
inline constexpr HeadDims kHeadDims[] = {{64, 64},   {96, 96},   {128, 128},
                                         {192, 128}, {192, 192}, {256, 256}};
inline constexpr int kHeadDimPairs = 6;
inline constexpr int kMaxHeadDim = 256;

// The index in kHeadDims, or -1.
constexpr int padded_head_dims(int head_dim, int head_dim_v) {
    for (int i = 0; i < kHeadDimPairs; ++i)
        if (head_dim <= kHeadDims[i].qk && head_dim_v <= kHeadDims[i].v) return i;
    return -1;
}

// A kernel exists in up to three forms, so that the common case pays for no option: kPlain has
// masks (full, causal, window) and sinks; kPacked finds its sequences on the device besides, and in
// fa2 may take a part of the keys; kGeneral has all options, as branches that are uniform over the
// grid.
enum class Features { kPlain, kPacked, kGeneral };

}  // namespace flash_ext
