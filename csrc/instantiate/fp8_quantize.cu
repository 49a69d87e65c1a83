#include "kernels/fp8/columns.cuh"
#include "kernels/fp8/quantize.cuh"

namespace flash_ext {
namespace {

// The second of two kernels begins before the first has ended, where its code waits.
bool second_begins_early() {
#ifdef FLASH_EXT_SM90A
    return current_device().major == 9;
#else
    return false;
#endif
}

template <class Element, int kHadamardDim>
using RowsOf = std::conditional_t<kHadamardDim == 0, PlainRows<Element>,
                                  RotatedRows<Element, max_of(kHadamardDim, 16)>>;

template <auto kKernel, class Rows, class Storage>
cudaError_t launch_persistent(const QuantizeParams& params, cudaStream_t stream, bool pdl) {
    using Layout = typename Rows::Layout;
    const int threads = Layout::threads(params);
    const int bytes = threads / 32 * static_cast<int>(sizeof(Storage));
    constexpr int kMostBytes = Layout::kMaxThreads / 32 * sizeof(Storage);
    return launch_kernel<kKernel>(persistent_ctas(params, threads, Rows::kSmThreads, bytes),
                                  threads, bytes, params, stream, pdl, kMostBytes);
}

cudaError_t find_maxima(const QuantizeParams& params, cudaStream_t stream) {
    const cudaError_t status =
        cudaMemsetAsync(params.amax, 0, scale_count(params) * sizeof(float), stream);
    if (status != cudaSuccess) return status;
    if (params.signs == nullptr)
        return params.mean == nullptr ? reduce_columns<Columns::kAmax>(params, stream)
                                      : reduce_columns<Columns::kAmaxWithoutMean>(params, stream);
    return dispatch_rotation(params, [&](auto element, auto dim) {
        // Never without a rotation.
        using Rows = RotatedRows<decltype(element), max_of(int{dim}, 16)>;
        return launch_persistent<amax_kernel<Rows>, Rows, WarpRowsAndMeans<typename Rows::Layout>>(
            params, stream, false);
    });
}

}  // namespace

cudaError_t quantize(const QuantizeParams& params, cudaStream_t stream) {
    const bool second = params.scales != Scales::kBlock;
    if (second) {
        const cudaError_t status = find_maxima(params, stream);
        if (status != cudaSuccess) return status;
    }
    return dispatch_rotation(params, [&](auto element, auto dim) {
        using Rows = RowsOf<decltype(element), dim>;
        return launch_persistent<quantize_kernel<Rows>, Rows,
                                 WarpRowsAndResults<typename Rows::Layout>>(
            params, stream, second && second_begins_early());
    });
}

cudaError_t token_mean(const QuantizeParams& params, cudaStream_t stream) {
    const cudaError_t status = reduce_columns<Columns::kSum>(params, stream);
    if (status != cudaSuccess) return status;
    return launch_kernel<mean_kernel>(int64_t{params.batch} * params.heads,
                                      kMeanGroups * params.head_dim, 0, params, stream,
                                      second_begins_early());
}

}  // namespace flash_ext
