#include "kernels/common/bias_gradient.cuh"
