#include "kernels/fa2/backward.cuh"
#include "kernels/fa2/forward.cuh"

template flash_ext::ForwardLauncher flash_ext::fa2_forward<192, 128>;
template int flash_ext::fa2_forward_shared_bytes<192, 128>();
template flash_ext::BackwardLauncher flash_ext::fa2_backward<192, 128>;
template int flash_ext::fa2_backward_shared_bytes<192, 128>();
template flash_ext::ForwardLauncher flash_ext::fa2_forward<192, 192>;
template int flash_ext::fa2_forward_shared_bytes<192, 192>();
template flash_ext::BackwardLauncher flash_ext::fa2_backward<192, 192>;
template int flash_ext::fa2_backward_shared_bytes<192, 192>();
template flash_ext::ForwardLauncher flash_ext::fa2_forward<256, 256>;
template int flash_ext::fa2_forward_shared_bytes<256, 256>();
template flash_ext::BackwardLauncher flash_ext::fa2_backward<256, 256>;
template int flash_ext::fa2_backward_shared_bytes<256, 256>();
