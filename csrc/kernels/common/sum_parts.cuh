// The sum of dK and dV over the parts of a head (Parts in plan/cost.h), which are in float32,
// always in the same order.
#pragma once

#include "kernels/common/launch.cuh"
#include "problem/sequences.cuh"
#include "ptx/math.cuh"

namespace flash_ext {

inline constexpr int kSumThreads = 256;

struct PartsSum {
    struct Gradient {
        TensorView sum;      // dK or dV
        const float* parts;  // (B, Sk, Hk, part_count, cols)
        int cols;
        int64_t size;  // B * Sk * Hk * cols
    };
    Gradient of[2];
    int64_t first_ctas;  // which have of[0]
    int part_count;
    int heads;
    int rows;  // Sk
};

// Each thread has 8 columns of a row.
template <class Element>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts_kernel(const __grid_constant__ PartsSum sum) {
    const bool second = blockIdx.x >= sum.first_ctas;
    const PartsSum::Gradient& gradient = sum.of[second];
    const int64_t cta = blockIdx.x - (second ? sum.first_ctas : 0);
    const int64_t index = 8 * (cta * kSumThreads + threadIdx.x);
    const int cols = gradient.cols;
    if (index >= gradient.size) return;
    const int64_t flat_row = index / cols;
    const int64_t col = index % cols;
    const float* source = gradient.parts + flat_row * sum.part_count * cols + col;
    float sums[8] = {};
#pragma unroll 4
    for (int part = 0; part < sum.part_count; ++part, source += cols)
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 x = __ldcs(reinterpret_cast<const float4*>(source + i));
            sums[i] += x.x;
            sums[i + 1] += x.y;
            sums[i + 2] += x.z;
            sums[i + 3] += x.w;
        }
    const TensorView& view = gradient.sum;
    const int64_t batch = flat_row / sum.heads / sum.rows;
    const int64_t row = flat_row / sum.heads % sum.rows;
    auto* target = static_cast<Element*>(view.data) + batch * view.batch_stride +
                   row * view.row_stride + flat_row % sum.heads * view.head_stride + col;
    *reinterpret_cast<uint4*>(target) = {
        ptx::pack<Element>(sums[0], sums[1]), ptx::pack<Element>(sums[2], sums[3]),
        ptx::pack<Element>(sums[4], sums[5]), ptx::pack<Element>(sums[6], sums[7])};
}

cudaError_t sum_parts(const BackwardParams& params, TensorView dk, TensorView dv,
                      cudaStream_t stream) {
    const int64_t rows = int64_t{tensor_batches(params)} * params.seqlen_k * params.heads_k;
    const auto ctas = [&](int cols) { return ceil_div<int64_t>(rows * cols / 8, kSumThreads); };
    const int d = params.head_dim, d_v = params.head_dim_v;
    const PartsSum sum{.of = {{dk, static_cast<float*>(params.dk.data), d, rows * d},
                              {dv, static_cast<float*>(params.dv.data), d_v, rows * d_v}},
                       .first_ctas = ctas(d),
                       .part_count = params.parts,
                       .heads = params.heads_k,
                       .rows = params.seqlen_k};
    return dispatch_element(params.element_type, [&](auto element) {
        return launch_kernel<sum_parts_kernel<decltype(element)>>(ctas(d) + ctas(d_v), kSumThreads,
                                                                  0, sum, stream);
    });
}

}  // namespace flash_ext
