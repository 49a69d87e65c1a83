#include "kernels/fa3/decode.cuh"
#include "kernels/fa3/forward.cuh"

template flash_ext::ForwardLauncher flash_ext::fa3_forward<192, 128>;
template flash_ext::ForwardLauncher flash_ext::fa3_decode<192, 128>;
template flash_ext::ForwardLauncher flash_ext::fa3_forward<192, 192>;
template flash_ext::ForwardLauncher flash_ext::fa3_decode<192, 192>;
template flash_ext::ForwardLauncher flash_ext::fa3_forward<256, 256>;
template flash_ext::ForwardLauncher flash_ext::fa3_decode<256, 256>;
