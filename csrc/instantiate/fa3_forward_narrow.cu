#include "kernels/fa3/decode.cuh"
#include "kernels/fa3/forward.cuh"

template flash_ext::ForwardLauncher flash_ext::fa3_forward<32, 32>;
template flash_ext::ForwardLauncher flash_ext::fa3_decode<32, 32>;
template flash_ext::ForwardLauncher flash_ext::fa3_forward<64, 64>;
template flash_ext::ForwardLauncher flash_ext::fa3_decode<64, 64>;
template flash_ext::ForwardLauncher flash_ext::fa3_forward<96, 96>;
template flash_ext::ForwardLauncher flash_ext::fa3_decode<96, 96>;
