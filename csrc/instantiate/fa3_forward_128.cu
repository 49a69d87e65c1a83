#include "kernels/fa3/decode.cuh"
#include "kernels/fa3/forward.cuh"

template flash_ext::ForwardLauncher flash_ext::fa3_forward<128, 128>;
template flash_ext::ForwardLauncher flash_ext::fa3_decode<128, 128>;
