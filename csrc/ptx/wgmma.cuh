// wgmma: matmuls of a warpgroup, D (64 x N) += A (64 x K) B (K x N) with K = 16, of FP8 32,
// asynchronous. A and B are read from shared memory through descriptors (tile/wgmma.cuh), or A from
// registers. sm_90a only. PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate
// instructions".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/float8.cuh"

namespace flash_ext::ptx {

// Before the first wgmma that reads registers written by this thread.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Commits the wgmmas issued so far as a group.
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Tells the compiler that a wgmma has written this register. Comes after the wait for it.
__device__ __forceinline__ void warpgroup_fence_operand(float& x) {
    asm volatile("" : "+f"(x)::"memory");
}
__device__ __forceinline__ void warpgroup_fence_operand(int& x) {
    asm volatile("" : "+r"(x)::"memory");
}

// One wgmma of width kN; `accumulate` = 0 overwrites D. kTransposeB: B is stored [k][n].
// mma_mn_major: so is A, [k][m]. Number: the type of D's registers. That of int8 is int; of FP8 it
// may be int, too, where the same registers hold both: then they are the bits of floats.
template <class Element, int kN, bool kTransposeB, class Number = float>
struct Wgmma;

// clang-format off
#define T10(tens) "%" tens "0,%" tens "1,%" tens "2,%" tens "3,%" tens "4,%" tens "5,%" tens "6,%" tens "7,%" tens "8,%" tens "9"
#define T30 T10("") "," T10("1") "," T10("2")
#define T60 T30 "," T10("3") "," T10("4") "," T10("5")
#define T90 T60 "," T10("6") "," T10("7") "," T10("8")
#define D8(i) D(i), D(i + 1), D(i + 2), D(i + 3), D(i + 4), D(i + 5), D(i + 6), D(i + 7)
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)
// For one N: D's N / 2 registers as text and as operands, and the numbers of the operands that
// follow them.
#define FLASH_WGMMA_TYPED(ELEMENT, TYPE, N, TEXT, OPERANDS, O0, O1, O2, O3, O4, O5, O6)            \
    template <bool kTransposeB>                                                                    \
    struct Wgmma<ELEMENT, N, kTransposeB> {                                                        \
        static __device__ __forceinline__ void mma(float (&d)[N / 2], uint64_t a, uint64_t b,      \
                                                   int accumulate) {                               \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" O2 ", 0; "                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE           \
                         " {" TEXT "}, %" O0 ", %" O1 ", p, 1, 1, 0, %" O3 "; }"                   \
                         : LIST OPERANDS                                                           \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(int{kTransposeB}));                \
        }                                                                                          \
        static __device__ __forceinline__ void mma_mn_major(float (&d)[N / 2], uint64_t a,          \
                                                           uint64_t b, int accumulate) {           \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" O2 ", 0; "                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE           \
                         " {" TEXT "}, %" O0 ", %" O1 ", p, 1, 1, 1, %" O3 "; }"                   \
                         : LIST OPERANDS                                                           \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(int{kTransposeB}));                \
        }                                                                                          \
        static __device__ __forceinline__ void mma(float (&d)[N / 2], const uint32_t (&a)[4],      \
                                                   uint64_t b, int accumulate) {                   \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" O5 ", 0; "                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE           \
                         " {" TEXT "}, {%" O0 ",%" O1 ",%" O2 ",%" O3 "}, %" O4                    \
                         ", p, 1, 1, %" O6 "; }"                                                   \
                         : LIST OPERANDS                                                           \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),    \
                           "n"(int{kTransposeB}));                                                 \
        }                                                                                          \
    };
// Both operands of FP8 are K-major.
#define FLASH_WGMMA_FP8_TYPED(NUMBER, N, TEXT, OPERANDS, O0, O1, O2, O3, O4, O5, O6)               \
    template <>                                                                                    \
    struct Wgmma<Float8, N, false, NUMBER> {                                                       \
        static __device__ __forceinline__ void mma(NUMBER (&d)[N / 2], uint64_t a, uint64_t b,     \
                                                   int accumulate) {                               \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" O2 ", 0; "                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3"                \
                         " {" TEXT "}, %" O0 ", %" O1 ", p, 1, 1; }"                               \
                         : LIST OPERANDS                                                           \
                         : "l"(a), "l"(b), "r"(accumulate));                                       \
        }                                                                                          \
        static __device__ __forceinline__ void mma(NUMBER (&d)[N / 2], const uint32_t (&a)[4],     \
                                                   uint64_t b, int accumulate) {                   \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" O5 ", 0; "                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3"                \
                         " {" TEXT "}, {%" O0 ",%" O1 ",%" O2 ",%" O3 "}, %" O4 ", p, 1, 1; }"     \
                         : LIST OPERANDS                                                           \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));   \
        }                                                                                          \
    };
// And of int8, with sums in int32.
#define FLASH_WGMMA_INT8(N, TEXT, OPERANDS, O0, O1, O2, O3, O4, O5, O6)                            \
    template <>                                                                                    \
    struct Wgmma<Int8, N, false, int> {                                                            \
        static __device__ __forceinline__ void mma(int (&d)[N / 2], uint64_t a, uint64_t b,        \
                                                   int accumulate) {                               \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" O2 ", 0; "                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8"                    \
                         " {" TEXT "}, %" O0 ", %" O1 ", p; }"                                     \
                         : LIST OPERANDS                                                           \
                         : "l"(a), "l"(b), "r"(accumulate));                                       \
        }                                                                                          \
    };
#define LIST(...) __VA_ARGS__
#define FLASH_WGMMA_F16(...) FLASH_WGMMA_TYPED(__half, "f16", __VA_ARGS__)
#define FLASH_WGMMA_BF16(...) FLASH_WGMMA_TYPED(__nv_bfloat16, "bf16", __VA_ARGS__)
#define FLASH_WGMMA_FP8(...) FLASH_WGMMA_FP8_TYPED(float, __VA_ARGS__)
#define FLASH_WGMMA_FP8_BITS(...) FLASH_WGMMA_FP8_TYPED(int, __VA_ARGS__)
#define FLASH_WGMMA_ALL(DEFINE) \
    DEFINE(32, T10("") ",%10,%11,%12,%13,%14,%15", (D16(0)), "16", "17", "18", "19", "20", "21", "22") \
    DEFINE(64, T30 ",%30,%31", (D32(0)), "32", "33", "34", "35", "36", "37", "38") \
    DEFINE(80, T30 "," T10("3"), (D32(0), D8(32)), "40", "41", "42", "43", "44", "45", "46") \
    DEFINE(96, T30 "," T10("3") ",%40,%41,%42,%43,%44,%45,%46,%47", (D32(0), D16(32)), "48", "49", "50", "51", "52", "53", "54") \
    DEFINE(128, T60 ",%60,%61,%62,%63", (D64(0)), "64", "65", "66", "67", "68", "69", "70") \
    DEFINE(192, T90 ",%90,%91,%92,%93,%94,%95", (D64(0), D32(64)), "96", "97", "98", "99", "100", "101", "102") \
    DEFINE(256, T90 "," T10("9") "," T10("10") "," T10("11") ",%120,%121,%122,%123,%124,%125,%126,%127", (D64(0), D64(64)), "128", "129", "130", "131", "132", "133", "134")
#define D(i) "+f"(d[i])
FLASH_WGMMA_ALL(FLASH_WGMMA_F16)
FLASH_WGMMA_ALL(FLASH_WGMMA_BF16)
FLASH_WGMMA_ALL(FLASH_WGMMA_FP8)
#undef D
#define D(i) "+r"(d[i])
FLASH_WGMMA_ALL(FLASH_WGMMA_FP8_BITS)
FLASH_WGMMA_ALL(FLASH_WGMMA_INT8)
#undef D
#undef T10
#undef T30
#undef T60
#undef T90
#undef D8
#undef D16
#undef D32
#undef D64
#undef LIST
#undef FLASH_WGMMA_ALL
#undef FLASH_WGMMA_F16
#undef FLASH_WGMMA_BF16
#undef FLASH_WGMMA_TYPED
#undef FLASH_WGMMA_FP8
#undef FLASH_WGMMA_FP8_BITS
#undef FLASH_WGMMA_FP8_TYPED
#undef FLASH_WGMMA_INT8
// clang-format on

}  // namespace flash_ext::ptx
