#include "kernels/fa2/backward.cuh"
#include "kernels/fa2/forward.cuh"

template flash_ext::ForwardLauncher flash_ext::fa2_forward<32, 32>;
template int flash_ext::fa2_forward_shared_bytes<32, 32>();
template flash_ext::BackwardLauncher flash_ext::fa2_backward<32, 32>;
template int flash_ext::fa2_backward_shared_bytes<32, 32>();
template flash_ext::ForwardLauncher flash_ext::fa2_forward<64, 64>;
template int flash_ext::fa2_forward_shared_bytes<64, 64>();
template flash_ext::BackwardLauncher flash_ext::fa2_backward<64, 64>;
template int flash_ext::fa2_backward_shared_bytes<64, 64>();
template flash_ext::ForwardLauncher flash_ext::fa2_forward<96, 96>;
template int flash_ext::fa2_forward_shared_bytes<96, 96>();
template flash_ext::BackwardLauncher flash_ext::fa2_backward<96, 96>;
template int flash_ext::fa2_backward_shared_bytes<96, 96>();
template flash_ext::ForwardLauncher flash_ext::fa2_forward<128, 128>;
template int flash_ext::fa2_forward_shared_bytes<128, 128>();
template flash_ext::BackwardLauncher flash_ext::fa2_backward<128, 128>;
template int flash_ext::fa2_backward_shared_bytes<128, 128>();
