#include "kernels/short/backward.cuh"
#include "kernels/short/forward.cuh"

template flash_ext::ForwardLauncher flash_ext::short_forward<32, 32>;
template flash_ext::BackwardLauncher flash_ext::short_backward<32, 32>;
template flash_ext::ForwardLauncher flash_ext::short_forward<64, 64>;
template flash_ext::BackwardLauncher flash_ext::short_backward<64, 64>;
