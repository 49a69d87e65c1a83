#include "kernels/fa1/backward.cuh"
#include "kernels/fa1/forward.cuh"

template struct flash_ext::Fa1<64, 64>;
template struct flash_ext::Fa1<128, 128>;
template struct flash_ext::Fa1<256, 256>;
