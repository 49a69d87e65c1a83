#include "kernels/fa2/backward.cuh"
#include "kernels/fa2/forward.cuh"

template flash_ext::ForwardLauncher flash_ext::fa2_forward<128, 128>;
template int flash_ext::fa2_forward_shared_bytes<128, 128>();
template flash_ext::BackwardLauncher flash_ext::fa2_backward<128, 128>;
template int flash_ext::fa2_backward_shared_bytes<128, 128>();
