#include "kernels/fa3/decode.cuh"

template flash_ext::ForwardLauncher flash_ext::fa3_decode_8_bits<64, 64>;
template flash_ext::ForwardLauncher flash_ext::fa3_decode_8_bits<128, 128>;
template flash_ext::ForwardLauncher flash_ext::fa3_decode_8_bits<256, 256>;
