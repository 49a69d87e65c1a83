#include "kernels/fa2/backward.cuh"
#include "kernels/fa2/forward.cuh"

template struct flash_ext::Fa2<96, 96>;
template struct flash_ext::Fa2<128, 128>;
