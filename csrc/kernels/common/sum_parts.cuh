// The sum of dK and dV over the parts of a head (plan/parts.h), which are in float32, always in the
// same order.
#pragma once

#include "kernels/common/launch.cuh"
#include "problem/sequences.cuh"
#include "ptx/math.cuh"

namespace flash_ext {

inline constexpr int kSumThreads = 256;

struct PartsSum {
    TensorView gradient;  // dK or dV
    const float* parts;   // (B, Sk, Hk, part_count, cols)
    int part_count;
    int cols;
    int heads;
    int rows;      // Sk
    int64_t size;  // B * Sk * Hk * cols
};

// Each thread has 8 columns of a row.
template <class Element>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts_kernel(const __grid_constant__ PartsSum sum) {
    const int64_t index = 8 * (int64_t{blockIdx.x} * kSumThreads + threadIdx.x);
    if (index >= sum.size) return;
    const int64_t flat_row = index / sum.cols;
    const int64_t col = index % sum.cols;
    const float* source = sum.parts + flat_row * sum.part_count * sum.cols + col;
    float sums[8] = {};
#pragma unroll 4
    for (int part = 0; part < sum.part_count; ++part, source += sum.cols)
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 x = __ldcs(reinterpret_cast<const float4*>(source + i));
            sums[i] += x.x;
            sums[i + 1] += x.y;
            sums[i + 2] += x.z;
            sums[i + 3] += x.w;
        }
    const TensorView& view = sum.gradient;
    const int64_t batch = flat_row / sum.heads / sum.rows;
    const int64_t row = flat_row / sum.heads % sum.rows;
    auto* target = static_cast<Element*>(view.data) + batch * view.batch_stride +
                   row * view.row_stride + flat_row % sum.heads * view.head_stride + col;
    *reinterpret_cast<uint4*>(target) = {
        ptx::pack<Element>(sums[0], sums[1]), ptx::pack<Element>(sums[2], sums[3]),
        ptx::pack<Element>(sums[4], sums[5]), ptx::pack<Element>(sums[6], sums[7])};
}

cudaError_t sum_parts(BackwardParams params, cudaStream_t stream) {
    const int heads = params.heads_k / params.parts;
    const auto add = [&](const TensorView& gradient, const float* parts, int cols) {
        const int64_t size = int64_t{tensor_batches(params)} * params.seqlen_k * heads * cols;
        const PartsSum sum{gradient, parts, params.parts, cols, heads, params.seqlen_k, size};
        return dispatch_element(params.element_type, [&](auto element) {
            return launch_kernel<sum_parts_kernel<decltype(element)>>(
                ceil_div<int64_t>(size / 8, kSumThreads), kSumThreads, 0, sum, stream);
        });
    };
    const cudaError_t status = add(params.dk, params.dk_parts, params.head_dim);
    return status != cudaSuccess ? status : add(params.dv, params.dv_parts, params.head_dim_v);
}

}  // namespace flash_ext
