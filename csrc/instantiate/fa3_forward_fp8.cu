#include "kernels/fa3/forward_fp8.cuh"

template flash_ext::ForwardLauncher
    flash_ext::fa3_forward_fp8<flash_ext::ElementType::kFloat8, 64, 64>;
template flash_ext::ForwardLauncher
    flash_ext::fa3_forward_fp8<flash_ext::ElementType::kInt8, 64, 64>;
template flash_ext::ForwardLauncher
    flash_ext::fa3_forward_fp8<flash_ext::ElementType::kFloat8, 128, 128>;
template flash_ext::ForwardLauncher
    flash_ext::fa3_forward_fp8<flash_ext::ElementType::kInt8, 128, 128>;
template flash_ext::ForwardLauncher
    flash_ext::fa3_forward_fp8<flash_ext::ElementType::kFloat8, 192, 128>;
template flash_ext::ForwardLauncher
    flash_ext::fa3_forward_fp8<flash_ext::ElementType::kInt8, 192, 128>;
template flash_ext::ForwardLauncher
    flash_ext::fa3_forward_fp8<flash_ext::ElementType::kFloat8, 256, 256>;
template flash_ext::ForwardLauncher
    flash_ext::fa3_forward_fp8<flash_ext::ElementType::kInt8, 256, 256>;
