#include "kernels/fp8/columns.cuh"
#include "kernels/fp8/quantize.cuh"

namespace flash_ext {

cudaError_t quantize(const QuantizeParams& params, cudaStream_t stream) {
    const int threads = 4 * params.head_dim;
    if (params.scales != Scales::kBlock) {
        cudaError_t status =
            cudaMemsetAsync(params.amax, 0, scale_count(params) * sizeof(float), stream);
        if (status == cudaSuccess && params.scales == Scales::kChannel)
            status = reduce_columns<Columns::kAmax>(params, stream);
        if (status == cudaSuccess && params.scales != Scales::kChannel)
            status = dispatch_rotation(params, [&](auto element, auto dim) {
                return launch_kernel<amax_kernel<decltype(element), dim>>(
                    tiles_of_heads(params, kScaleRows), threads, 0, params, stream);
            });
        if (status != cudaSuccess) return status;
    }
    return dispatch_rotation(params, [&](auto element, auto dim) {
        return launch_kernel<quantize_kernel<decltype(element), dim>>(
            tiles_of_heads(params, kScaleRows), threads, 0, params, stream);
    });
}

cudaError_t token_mean(const QuantizeParams& params, cudaStream_t stream) {
    const cudaError_t status = reduce_columns<Columns::kSum>(params, stream);
    if (status != cudaSuccess) return status;
    return launch_kernel<mean_kernel>(int64_t{params.batch} * params.heads, params.head_dim, 0,
                                      params, stream);
}

}  // namespace flash_ext
