// setmaxnreg: a warpgroup returns registers to its CTA, or takes more. PTX ISA, "Miscellaneous
// instructions: setmaxnreg".
#pragma once

namespace flash_ext::ptx {

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash_ext::ptx
