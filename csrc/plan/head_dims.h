// Pairs of head dims.
#pragma once

namespace flash_ext {

// Head dims of Q and K, and of V and the output.
struct HeadDims {
    int qk;
    int v;

    constexpr bool operator==(const HeadDims&) const = default;
    constexpr bool holds(HeadDims x) const { return x.qk <= qk && x.v <= v; }
};

}  // namespace flash_ext
