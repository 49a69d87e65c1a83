#include "kernels/fa3/backward.cuh"

template flash_ext::BackwardLauncher flash_ext::fa3_backward<64, 64>;
