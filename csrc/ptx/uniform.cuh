// A value that all lanes share, told to the compiler.
#pragma once

namespace flash_ext::ptx {

// A warp reduction leaves its result in a uniform register, so what is loaded from memory but equal
// in all lanes takes none of the lanes' own registers from here on.
__device__ __forceinline__ int warp_uniform(int x) { return __reduce_max_sync(0xffffffff, x); }

}  // namespace flash_ext::ptx
