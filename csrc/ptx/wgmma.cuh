// wgmma: matmuls of a warpgroup, D (64 x N) += A (64 x K) B (K x N) with K = 16, of FP8 32,
// asynchronous. A and B are read from shared memory through descriptors (tile/wgmma.cuh), or A from
// registers. And setmaxnreg, the registers of a warpgroup. sm_90a only. PTX ISA, "Asynchronous
// warpgroup level matrix multiply-accumulate instructions", "setmaxnreg".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/device.h"
#include "ptx/float8.cuh"

namespace flash_ext::ptx {

// A warpgroup returns registers to its CTA, or takes more.
template <int kRegisters>
FLASH_DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
FLASH_DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Before the first wgmma that reads registers written by this thread.
FLASH_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

FLASH_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the latest groups are unfinished.
template <int kPending>
FLASH_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Tells the compiler that a wgmma has written this register. Comes after the wait for it.
FLASH_DEVICE void warpgroup_fence_operand(float& x) { asm volatile("" : "+f"(x)::"memory"); }
FLASH_DEVICE void warpgroup_fence_operand(int& x) { asm volatile("" : "+r"(x)::"memory"); }

// One wgmma of width kN; `accumulate` = 0 overwrites D. kTransposeB: B is stored [k][n].
// mma_mn_major: so is A, [k][m]. Number: the type of D's registers: int for int8; for FP8 it
// may be int, too, where the same registers hold both: then they are the bits of floats.
template <class Element, int kN, bool kTransposeB, class Number = float>
struct Wgmma;

using RegistersOfA = uint32_t[4];

// clang-format off
#define T10(tens) "%" tens "0,%" tens "1,%" tens "2,%" tens "3,%" tens "4,%" tens "5,%" tens "6,%" tens "7,%" tens "8,%" tens "9"
#define T30 T10("") "," T10("1") "," T10("2")
#define T60 T30 "," T10("3") "," T10("4") "," T10("5")
#define T90 T60 "," T10("6") "," T10("7") "," T10("8")
#define D8(i) D(i), D(i + 1), D(i + 2), D(i + 3), D(i + 4), D(i + 5), D(i + 6), D(i + 7)
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)
#define LIST(...) __VA_ARGS__
// One function. D: its N / 2 registers as text and as operands; O0, O1 and O2 are the numbers of the
// operands `accumulate`, b and kTransposeB. A's operands follow.
#define FLASH_MMA(NAME, NUMBER, N, TYPES, D_TEXT, A_TEXT, MODIFIERS, O0, O1, D_OPERANDS, A, A_OPERANDS) \
    static FLASH_DEVICE void NAME(NUMBER (&d)[N / 2], A a, uint64_t b, int accumulate) {  \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" O0 ", 0; "                                      \
                     "wgmma.mma_async.sync.aligned.m64n" #N TYPES                                       \
                     " {" D_TEXT "}, " A_TEXT ", %" O1 ", p" MODIFIERS "; }"                            \
                     : LIST D_OPERANDS                                                                  \
                     : "r"(accumulate), "l"(b), "n"(int{kTransposeB}), LIST A_OPERANDS);                \
    }
#define FLASH_MMA_SHARED(NAME, NUMBER, N, TYPES, TEXT, MODIFIERS, OPERANDS, O0, O1, O3)               \
    FLASH_MMA(NAME, NUMBER, N, TYPES, TEXT, "%" O3, MODIFIERS, O0, O1, OPERANDS, uint64_t, ("l"(a)))
#define FLASH_MMA_REGISTERS(NUMBER, N, TYPES, TEXT, MODIFIERS, OPERANDS, O0, O1, O3, O4, O5, O6)      \
    FLASH_MMA(mma, NUMBER, N, TYPES, TEXT, "{%" O3 ",%" O4 ",%" O5 ",%" O6 "}", MODIFIERS, O0, O1,    \
              OPERANDS, const RegistersOfA&, ("r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])))
#define FLASH_WGMMA_16(ELEMENT, TYPES, N, TEXT, OPERANDS, O0, O1, O2, O3, O4, O5, O6)                 \
    template <bool kTransposeB>                                                                       \
    struct Wgmma<ELEMENT, N, kTransposeB> {                                                           \
        FLASH_MMA_SHARED(mma, float, N, TYPES, TEXT, ", 1, 1, 0, %" O2, OPERANDS, O0, O1, O3)         \
        FLASH_MMA_SHARED(mma_mn_major, float, N, TYPES, TEXT, ", 1, 1, 1, %" O2, OPERANDS, O0, O1, O3) \
        FLASH_MMA_REGISTERS(float, N, TYPES, TEXT, ", 1, 1, %" O2, OPERANDS, O0, O1, O3, O4, O5, O6)  \
    };
// Both operands of 8 bits are K-major.
#define FLASH_WGMMA_8(ELEMENT, NUMBER, TYPES, MODIFIERS, N, TEXT, OPERANDS, O0, O1, O2, O3, O4, O5, O6) \
    template <bool kTransposeB>                                                                       \
    struct Wgmma<ELEMENT, N, kTransposeB, NUMBER> {                                                   \
        static_assert(!kTransposeB);                                                                  \
        FLASH_MMA_SHARED(mma, NUMBER, N, TYPES, TEXT, MODIFIERS, OPERANDS, O0, O1, O3)                \
        FLASH_MMA_REGISTERS(NUMBER, N, TYPES, TEXT, MODIFIERS, OPERANDS, O0, O1, O3, O4, O5, O6)      \
    };
#define FLASH_WGMMA_ALL(DEFINE, ...) \
    DEFINE(__VA_ARGS__, 32, T10("") ",%10,%11,%12,%13,%14,%15", (D16(0)), "16", "17", "18", "19", "20", "21", "22") \
    DEFINE(__VA_ARGS__, 48, T10("") "," T10("1") ",%20,%21,%22,%23", (D16(0), D8(16)), "24", "25", "26", "27", "28", "29", "30") \
    DEFINE(__VA_ARGS__, 64, T30 ",%30,%31", (D32(0)), "32", "33", "34", "35", "36", "37", "38") \
    DEFINE(__VA_ARGS__, 80, T30 "," T10("3"), (D32(0), D8(32)), "40", "41", "42", "43", "44", "45", "46") \
    DEFINE(__VA_ARGS__, 96, T30 "," T10("3") ",%40,%41,%42,%43,%44,%45,%46,%47", (D32(0), D16(32)), "48", "49", "50", "51", "52", "53", "54") \
    DEFINE(__VA_ARGS__, 128, T60 ",%60,%61,%62,%63", (D64(0)), "64", "65", "66", "67", "68", "69", "70") \
    DEFINE(__VA_ARGS__, 192, T90 ",%90,%91,%92,%93,%94,%95", (D64(0), D32(64)), "96", "97", "98", "99", "100", "101", "102") \
    DEFINE(__VA_ARGS__, 256, T90 "," T10("9") "," T10("10") "," T10("11") ",%120,%121,%122,%123,%124,%125,%126,%127", (D64(0), D64(64)), "128", "129", "130", "131", "132", "133", "134")
#define D(i) "+f"(d[i])
FLASH_WGMMA_ALL(FLASH_WGMMA_16, __half, "k16.f32.f16.f16")
FLASH_WGMMA_ALL(FLASH_WGMMA_16, __nv_bfloat16, "k16.f32.bf16.bf16")
FLASH_WGMMA_ALL(FLASH_WGMMA_8, Float8, float, "k32.f32.e4m3.e4m3", ", 1, 1")
#undef D
#define D(i) "+r"(d[i])
FLASH_WGMMA_ALL(FLASH_WGMMA_8, Float8, int, "k32.f32.e4m3.e4m3", ", 1, 1")
FLASH_WGMMA_ALL(FLASH_WGMMA_8, Int8, int, "k32.s32.s8.s8", "")
#undef D
#undef D8
#undef D16
#undef D32
#undef D64
#undef T10
#undef T30
#undef T60
#undef T90
#undef LIST
// clang-format on

}  // namespace flash_ext::ptx
