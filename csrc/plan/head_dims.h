// The list of head dims. Dispatch and instantiation in csrc follow it and, through tests/native,
// the tests and benchmarks.
#pragma once

#include "tile/tensor_view.h"

namespace flash_ext {

// Head dims of Q and K, and of V and the output.
struct HeadDims {
    int qk;
    int v;

    constexpr bool operator==(const HeadDims&) const = default;
    constexpr bool holds(HeadDims x) const { return x.qk <= qk && x.v <= v; }
};

// The pairs that have kernels. Any other pair up to the last one is padded, inside the kernel, to
// the first of these that holds it.
inline constexpr HeadDims kHeadDims[] = {{32, 32},   {64, 64},   {96, 96},  {128, 128},
                                         {192, 128}, {192, 192}, {256, 256}};
// Not std::size: <iterator> adds a second to the compile time of every CUDA file.
inline constexpr int kHeadDimPairs = sizeof(kHeadDims) / sizeof(HeadDims);
inline constexpr int kMaxHeadDim = kHeadDims[kHeadDimPairs - 1].qk;

// Does a pair have kernels for inputs of this type? With 8 bits some are padded further: at 96 the
// tiles of 128 are faster, though a quarter of them is zeros (docs/notes/016-fp8.md), and models
// with 32, or 192 in V as well, hardly exist.
constexpr bool has_kernels(HeadDims dims, ElementType type) {
    return element_bytes(type) > 1 ||
           (dims != HeadDims{32, 32} && dims != HeadDims{96, 96} && dims != HeadDims{192, 192});
}

// The pair to which `dims` is padded. The call has been checked, so there is one.
constexpr HeadDims pad_head_dims(HeadDims dims, ElementType type = ElementType::kFloat16) {
    for (const HeadDims pair : kHeadDims)
        if (pair.holds(dims) && has_kernels(pair, type)) return pair;
    return {};
}

}  // namespace flash_ext
