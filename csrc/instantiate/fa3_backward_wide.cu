#include "kernels/fa3/backward_wide.cuh"

template flash_ext::BackwardLauncher flash_ext::fa3_backward_wide<192, 128>;
template flash_ext::BackwardLauncher flash_ext::fa3_backward_wide<192, 192>;
template flash_ext::BackwardLauncher flash_ext::fa3_backward_wide<256, 256>;
