#include "kernels/fa2/backward.cuh"
#include "kernels/fa2/forward.cuh"

template struct flash_ext::Fa2<192, 128>;
template struct flash_ext::Fa2<192, 192>;
template struct flash_ext::Fa2<256, 256>;
