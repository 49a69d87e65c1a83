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

// One wgmma of width kN; `accumulate` = 0 overwrites D. kTransposeB: B is stored [k][n].
// mma_mn_major: so is A, [k][m].
template <class Element, int kN, bool kTransposeB>
struct Wgmma;

// clang-format off
#define T10(tens) "%" tens "0,%" tens "1,%" tens "2,%" tens "3,%" tens "4,%" tens "5,%" tens "6,%" tens "7,%" tens "8,%" tens "9"
#define T30 T10("") "," T10("1") "," T10("2")
#define T60 T30 "," T10("3") "," T10("4") "," T10("5")
#define T90 T60 "," T10("6") "," T10("7") "," T10("8")
#define F8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define F16(i) F8(i), F8(i + 8)
#define F32(i) F16(i), F16(i + 16)
#define F64(i) F32(i), F32(i + 32)
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
#define FLASH_WGMMA_FP8(N, TEXT, OPERANDS, O0, O1, O2, O3, O4, O5, O6)                             \
    template <>                                                                                    \
    struct Wgmma<Float8, N, false> {                                                               \
        static __device__ __forceinline__ void mma(float (&d)[N / 2], uint64_t a, uint64_t b,      \
                                                   int accumulate) {                               \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" O2 ", 0; "                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3"                \
                         " {" TEXT "}, %" O0 ", %" O1 ", p, 1, 1; }"                               \
                         : LIST OPERANDS                                                           \
                         : "l"(a), "l"(b), "r"(accumulate));                                       \
        }                                                                                          \
        static __device__ __forceinline__ void mma(float (&d)[N / 2], const uint32_t (&a)[4],      \
                                                   uint64_t b, int accumulate) {                   \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" O5 ", 0; "                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3"                \
                         " {" TEXT "}, {%" O0 ",%" O1 ",%" O2 ",%" O3 "}, %" O4 ", p, 1, 1; }"     \
                         : LIST OPERANDS                                                           \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));   \
        }                                                                                          \
    };
#define LIST(...) __VA_ARGS__
#define FLASH_WGMMA(...)                                  \
    FLASH_WGMMA_TYPED(__half, "f16", __VA_ARGS__)         \
    FLASH_WGMMA_TYPED(__nv_bfloat16, "bf16", __VA_ARGS__) \
    FLASH_WGMMA_FP8(__VA_ARGS__)
FLASH_WGMMA(32, T10("") ",%10,%11,%12,%13,%14,%15", (F16(0)), "16", "17", "18", "19", "20", "21", "22")
FLASH_WGMMA(64, T30 ",%30,%31", (F32(0)), "32", "33", "34", "35", "36", "37", "38")
FLASH_WGMMA(80, T30 "," T10("3"), (F32(0), F8(32)), "40", "41", "42", "43", "44", "45", "46")
FLASH_WGMMA(96, T30 "," T10("3") ",%40,%41,%42,%43,%44,%45,%46,%47", (F32(0), F16(32)), "48", "49", "50", "51", "52", "53", "54")
FLASH_WGMMA(128, T60 ",%60,%61,%62,%63", (F64(0)), "64", "65", "66", "67", "68", "69", "70")
FLASH_WGMMA(192, T90 ",%90,%91,%92,%93,%94,%95", (F64(0), F32(64)), "96", "97", "98", "99", "100", "101", "102")
FLASH_WGMMA(256, T90 "," T10("9") "," T10("10") "," T10("11") ",%120,%121,%122,%123,%124,%125,%126,%127", (F64(0), F64(64)), "128", "129", "130", "131", "132", "133", "134")
#undef T10
#undef T30
#undef T60
#undef T90
#undef F8
#undef F16
#undef F32
#undef F64
#undef LIST
#undef FLASH_WGMMA
#undef FLASH_WGMMA_TYPED
#undef FLASH_WGMMA_FP8
// clang-format on

}  // namespace flash_ext::ptx
