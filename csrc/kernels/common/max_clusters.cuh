// How many clusters fit on the GPU. A cluster runs on the SMs of one GPC, of which some are not
// there, differently on every GPU.
#pragma once

#include "kernels/common/launch.cuh"
#include "plan/launchers.h"
#include "schedule/split_kv.cuh"

namespace flash_ext {

__global__ void cluster_kernel() {}  // never launched

int max_clusters(int ctas) {
    constexpr int kDevices = 64;
    constexpr int kBytes = 120 * 1024;                         // more than half of an SM's
    static int found[kDevices][SplitCluster::kMaxSplits + 1];  // plus one; 0: not yet
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return 0;
    int& known = found[device][ctas];
    if (const int value = __atomic_load_n(&known, __ATOMIC_RELAXED); value > 0) return value - 1;

    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = ctas;
    config.blockDim = 384;
    config.dynamicSmemBytes = kBytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaError_t status =
        set_attribute<cluster_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize>(kBytes);
    if (status == cudaSuccess)
        status = set_attribute<cluster_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed>(1);
    int clusters = 0;
    if (status == cudaSuccess)
        status = cudaOccupancyMaxActiveClusters(&clusters, cluster_kernel, &config);
    if (status != cudaSuccess) {
        cudaGetLastError();  // clears it: the next launch would report it
        clusters = 0;
    }
    __atomic_store_n(&known, clusters + 1, __ATOMIC_RELAXED);
    return clusters;
}

}  // namespace flash_ext
