#include "kernels/fa1/backward.cuh"
#include "kernels/fa1/forward.cuh"

template flash_ext::ForwardLauncher flash_ext::fa1_forward<64, 64>;
template int flash_ext::fa1_forward_shared_bytes<64, 64>();
template flash_ext::BackwardLauncher flash_ext::fa1_backward<64, 64>;
template int flash_ext::fa1_backward_shared_bytes<64, 64>();
template flash_ext::ForwardLauncher flash_ext::fa1_forward<128, 128>;
template int flash_ext::fa1_forward_shared_bytes<128, 128>();
template flash_ext::BackwardLauncher flash_ext::fa1_backward<128, 128>;
template int flash_ext::fa1_backward_shared_bytes<128, 128>();
template flash_ext::ForwardLauncher flash_ext::fa1_forward<256, 256>;
template int flash_ext::fa1_forward_shared_bytes<256, 256>();
template flash_ext::BackwardLauncher flash_ext::fa1_backward<256, 256>;
template int flash_ext::fa1_backward_shared_bytes<256, 256>();
