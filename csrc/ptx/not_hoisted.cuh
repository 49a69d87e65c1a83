// A hint to the compiler rather than an instruction.
#pragma once

namespace flash_ext::ptx {

// The same value, but computed where it is used: without this the compiler moves what depends on it
// out of the loop and holds the results in registers that the matmuls need.
__device__ __forceinline__ int not_hoisted(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

}  // namespace flash_ext::ptx
