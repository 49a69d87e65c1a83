// C += A B on one warp's registers, A and B from any operand of fragment.cuh.
#pragma once

#include "ptx/mma.cuh"
#include "tile/fragment.cuh"

namespace flash_ext {

// Each B fragment serves all of the warp's rows: with two 16-row blocks per warp, shared memory
// delivers half as many bytes per multiplication. The inner dimension is kK, or kFirst to kK - 1.
template <class Element, int kK, int kFirst = 0, class Accumulator, class A, class B>
FLASH_DEVICE void gemm(Accumulator& c, const A& a, const B& b) {
#pragma unroll
    for (int k = kFirst / 16; k < kK / 16; ++k) {
        uint32_t a_fragment[Accumulator::kM][4];
#pragma unroll
        for (int m = 0; m < Accumulator::kM; ++m) a.load_a(a_fragment[m], m, k);
#pragma unroll
        for (int n = 0; n < Accumulator::kN / 2; ++n) {
            uint32_t b_fragment[4];
            b.load_b(b_fragment, n, k);
#pragma unroll
            for (int m = 0; m < Accumulator::kM; ++m) {
                ptx::mma_m16n8k16<Element>(c.v[m][2 * n], a_fragment[m], b_fragment[0],
                                           b_fragment[1]);
                ptx::mma_m16n8k16<Element>(c.v[m][2 * n + 1], a_fragment[m], b_fragment[2],
                                           b_fragment[3]);
            }
        }
    }
}

}  // namespace flash_ext
