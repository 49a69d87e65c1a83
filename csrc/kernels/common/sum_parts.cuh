// The sum of dK and dV over the parts of a head (Parts in plan/cost.h), which are in float32,
// always in the same order.
#pragma once

#include "kernels/common/launch.cuh"
#include "problem/sequences.cuh"
#include "ptx/math.cuh"
#include "tile/copy.cuh"

namespace flash_ext {

inline constexpr int kSumThreads = 256;

struct SumPartsParams : BackwardParams {  // whose dk and dv are of the parts
    TensorView sums[2];                   // dK and dV
};

// A row has a thread for each eight columns of dK, and then of dV.
template <class Element>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts_kernel(const __grid_constant__ SumPartsParams params) {
    const int64_t index = int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
    const int chunks = (params.head_dim + params.head_dim_v) / 8;
    // Across batches, rows and heads. Memory has no room for 2^32 rows of parts.
    const auto flat_row = static_cast<uint32_t>(index / chunks);
    const uint32_t flat_key = flat_row / params.heads_k;
    const int batch = flat_key / params.seqlen_k;
    if (batch >= tensor_batches(params)) return;
    int col = 8 * static_cast<int>(index - int64_t{flat_row} * chunks);
    const bool of_dv = col >= params.head_dim;
    if (of_dv) col -= params.head_dim;
    const int cols = of_dv ? params.head_dim_v : params.head_dim;
    const auto* source = static_cast<const float*>(of_dv ? params.dv.data : params.dk.data) +
                         int64_t{flat_row} * params.parts * cols + col;
    float sums[8] = {};
#pragma unroll 4
    for (int part = 0; part < params.parts; ++part, source += cols)
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 x = __ldcs(reinterpret_cast<const float4*>(source + i));
            sums[i] += x.x;
            sums[i + 1] += x.y;
            sums[i + 2] += x.z;
            sums[i + 3] += x.w;
        }
    auto* target = row_pointer<Element>(params.sums[of_dv], batch, flat_key % params.seqlen_k,
                                        flat_row % params.heads_k);
    *reinterpret_cast<uint4*>(target + col) = {
        ptx::pack<Element>(sums[0], sums[1]), ptx::pack<Element>(sums[2], sums[3]),
        ptx::pack<Element>(sums[4], sums[5]), ptx::pack<Element>(sums[6], sums[7])};
}

cudaError_t sum_parts(const BackwardParams& params, TensorView dk, TensorView dv,
                      cudaStream_t stream) {
    const int64_t rows = int64_t{tensor_batches(params)} * params.seqlen_k * params.heads_k;
    const int64_t threads = rows * (params.head_dim + params.head_dim_v) / 8;
    return dispatch_element(params.element_type, [&](auto element) {
        return launch_kernel<sum_parts_kernel<decltype(element)>>(
            ceil_div<int64_t>(threads, kSumThreads), kSumThreads, 0,
            SumPartsParams{params, {dk, dv}}, stream);
    });
}

}  // namespace flash_ext
