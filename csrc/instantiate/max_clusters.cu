#include "kernels/common/max_clusters.cuh"
