// One kernel for float16 and bfloat16, where what depends on the type is a small part of it: a
// build has half as many of these kernels. Their element type is AnyHalf, and the call's parameters
// say which of the two it is.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "tile/copy.cuh"
#include "tile/gemm.cuh"

namespace flash_ext {

struct AnyHalf {
    uint16_t bits;
};

// Calls function(element tag) with the type of a call: Element, or, where that is AnyHalf, `type`.
template <class Element, class Function>
__device__ __forceinline__ void with_element(ElementType type, Function function) {
    if constexpr (!std::is_same_v<Element, AnyHalf>) {
        function(Element{});
    } else if (type == ElementType::kFloat16) {
        function(__half{});
    } else {
        function(__nv_bfloat16{});
    }
}

// As ptx::pack.
template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high, ElementType type) {
    if constexpr (!std::is_same_v<Element, AnyHalf>) return ptx::pack<Element>(low, high);
    const uint32_t half = ptx::pack<__half>(low, high);
    const uint32_t bfloat16 = ptx::pack<__nv_bfloat16>(low, high);
    return type == ElementType::kFloat16 ? half : bfloat16;
}

// An operand whose rounding depends on the type, with that type.
template <class Element, class A>
__device__ __forceinline__ const A& rounded_to(const A& a) {
    return a;
}
template <class Element, class Accumulator>
__device__ __forceinline__ AFromRegisters<Element, Accumulator> rounded_to(
    const AFromRegisters<AnyHalf, Accumulator>& a) {
    return {a.acc};
}

// As the functions of these names without a type.
template <class Element, int kK, class Accumulator, class A, class B>
__device__ __forceinline__ void gemm(Accumulator& c, const A& a, const B& b, ElementType type) {
    if constexpr (!std::is_same_v<Element, AnyHalf>) {
        gemm<Element, kK>(c, a, b);
    } else {
        with_element<AnyHalf>(type, [&](auto element) {
            gemm<decltype(element), kK>(c, rounded_to<decltype(element)>(a), b);
        });
    }
}

template <class Element, class Tile, int kColStep = 1, class Accumulator>
__device__ __forceinline__ void store_to_shared(uint32_t shared, const Accumulator& acc,
                                                int first_row, int first_col_block,
                                                ElementType type) {
    if constexpr (!std::is_same_v<Element, AnyHalf>) {
        store_to_shared<Element, Tile, kColStep>(shared, acc, first_row, first_col_block);
    } else {
        with_element<AnyHalf>(type, [&](auto element) {
            store_to_shared<decltype(element), Tile, kColStep>(shared, acc, first_row,
                                                               first_col_block);
        });
    }
}

}  // namespace flash_ext
