#include "kernels/fa3/forward_fp8.cuh"

template flash_ext::ForwardLauncher flash_ext::fa3_forward_fp8<64, 64>;
template flash_ext::ForwardLauncher flash_ext::fa3_forward_fp8<96, 96>;
template flash_ext::ForwardLauncher flash_ext::fa3_forward_fp8<128, 128>;
template flash_ext::ForwardLauncher flash_ext::fa3_forward_fp8<192, 128>;
template flash_ext::ForwardLauncher flash_ext::fa3_forward_fp8<256, 256>;
