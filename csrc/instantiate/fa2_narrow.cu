#include "kernels/fa2/backward.cuh"
#include "kernels/fa2/forward.cuh"

template struct flash_ext::Fa2<32, 32>;
template struct flash_ext::Fa2<64, 64>;
