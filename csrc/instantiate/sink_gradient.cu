#include "kernels/common/sink_gradient.cuh"
