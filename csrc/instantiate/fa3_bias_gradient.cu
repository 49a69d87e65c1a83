#include "kernels/fa3/bias_gradient.cuh"

template flash_ext::BackwardLauncher flash_ext::fa3_bias_gradient<32, 32>;
template flash_ext::BackwardLauncher flash_ext::fa3_bias_gradient<64, 64>;
template flash_ext::BackwardLauncher flash_ext::fa3_bias_gradient<128, 128>;
