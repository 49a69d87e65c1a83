#include "../kernels/sink_gradient.cuh"
