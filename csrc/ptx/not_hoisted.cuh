// A hint to the compiler rather than an instruction.
#pragma once

namespace flash_ext::ptx {

// Returns x. What depends on it is computed where it is used: otherwise the compiler moves it out
// of the loop and keeps the results in registers that the matmuls need.
__device__ __forceinline__ int not_hoisted(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

}  // namespace flash_ext::ptx
