// The list of head dims, which dispatch and instantiation in csrc follow, and (through
// tests/native) the tests and benchmarks.
#pragma once

namespace flash_ext {

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

}  // namespace flash_ext
