// Shared by the launchers: element and feature dispatch, dynamic shared memory, the launch itself.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../dispatch.h"
#include "../params.h"
#include "../variants.h"

namespace flash_ext {

// The address of the CTA's dynamic shared memory, aligned for swizzled tiles.
__device__ __forceinline__ char* dynamic_shared() {
    extern __shared__ __align__(1024) char storage[];
    return storage;
}

// A row of a (batch, row, head) tensor.
template <class Element>
__device__ __forceinline__ Element* row_pointer(const TensorView& view, int batch, int64_t row,
                                                int head) {
    return static_cast<Element*>(view.data) + batch * view.batch_stride + row * view.row_stride +
           head * view.head_stride;
}

// launch(element tag, features constant) with the compile-time values of this call.
template <class Launch>
void dispatch_kernel(const AttentionParams& params, bool general, Launch launch) {
    const auto features = general ? Features::kGeneral : Features::kPlain;
    dispatch<Features::kPlain, Features::kGeneral>(features, [&](auto kFeatures) {
        if (params.element_type == ElementType::kFloat16) {
            launch(__half{}, kFeatures);
        } else {
            launch(__nv_bfloat16{}, kFeatures);
        }
    });
}

// Does this call need the general kernel?
inline bool needs_general(const AttentionParams& params) {
    return !params.aligned || params.cu_seqlens_q != nullptr || params.seqused_k != nullptr ||
           params.keep_threshold < (1u << 16) || params.scale <= 0.f;
}

// Launches nothing on an empty grid, which is no error: an empty tensor has no tiles.
template <class Params>
cudaError_t launch_kernel(void (*kernel)(Params), int ctas, int threads, int shared_bytes,
                          const Params& params, cudaStream_t stream) {
    if (ctas == 0) return cudaSuccess;
    if (shared_bytes > 48 * 1024) {
        const cudaError_t status =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (status != cudaSuccess) return status;
    }
    kernel<<<ctas, threads, shared_bytes, stream>>>(params);
    return cudaGetLastError();
}

}  // namespace flash_ext
