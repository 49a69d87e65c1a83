#include "kernels/fa3/backward.cuh"

template flash_ext::BackwardLauncher flash_ext::fa3_backward<32, 32>;
template flash_ext::BackwardLauncher flash_ext::fa3_backward<64, 64>;
template flash_ext::BackwardLauncher flash_ext::fa3_backward<96, 96>;
template flash_ext::BackwardLauncher flash_ext::fa3_backward<128, 128>;
