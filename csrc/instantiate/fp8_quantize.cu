#include "kernels/fp8/columns.cuh"
#include "kernels/fp8/quantize.cuh"

namespace flash_ext {
namespace {

template <class T>
struct TypeTag {
    using type = T;
};

// Calls launch(type tag of the rows).
template <class Launch>
cudaError_t dispatch_rows(const QuantizeParams& params, Launch launch) {
    return dispatch_rotation(params, [&](auto element, auto dim) {
        using Element = decltype(element);
        if constexpr (int{dim} == 0) {
            return launch(TypeTag<PlainRows<Element>>{});
        } else if constexpr (int{dim} == 256) {  // a thread has 16 vectors, two CTAs share a tile
            return launch(TypeTag<RotatedRows<Element, 256, 16, 2>>{});
        } else {
            return launch(TypeTag<RotatedRows<Element, dim>>{});
        }
    });
}

template <auto kKernel, class Rows, class Storage>
cudaError_t launch_persistent(const QuantizeParams& params, cudaStream_t stream, bool pdl) {
    using Layout = typename Rows::Layout;
    const int threads = Layout::threads(params);
    const int bytes = threads / 32 * static_cast<int>(sizeof(Storage));
    constexpr int kMostBytes = Layout::kMaxThreads / 32 * sizeof(Storage);
    return launch_kernel<kKernel>(
        persistent_ctas<Layout>(params, threads, Rows::kSmThreads, bytes), threads, bytes, params,
        stream, {.pdl = pdl, .cluster = Layout::kCtas, .most_shared_bytes = kMostBytes});
}

cudaError_t find_maxima(const QuantizeParams& params, cudaStream_t stream) {
    const cudaError_t status = launch_kernel<zero_amax_kernel>(
        ceil_div<int64_t>(scale_count(params), kZeroThreads), kZeroThreads, 0, params, stream);
    if (status != cudaSuccess) return status;
    if (params.signs == nullptr)
        return params.mean == nullptr
                   ? reduce_columns<Columns::kAmax>(params, stream, true)
                   : reduce_columns<Columns::kAmaxWithoutMean>(params, stream, true);
    return dispatch_rows(params, [&](auto tag) {
        using Rows = typename decltype(tag)::type;
        if constexpr (Rows::kDim == 0) {
            return cudaErrorInvalidValue;  // handled above
        } else {
            return launch_persistent<amax_kernel<Rows>, Rows, WarpRows<typename Rows::Layout>>(
                params, stream, true);
        }
    });
}

}  // namespace

cudaError_t quantize(const QuantizeParams& params, cudaStream_t stream) {
    const bool second = params.scales != Scales::kBlock;
    if (second) {
        const cudaError_t status = find_maxima(params, stream);
        if (status != cudaSuccess) return status;
    }
    return dispatch_rows(params, [&](auto tag) {
        using Rows = typename decltype(tag)::type;
        return launch_persistent<quantize_kernel<Rows>, Rows,
                                 WarpRowsAndResults<typename Rows::Layout>>(params, stream, second);
    });
}

cudaError_t token_mean(const QuantizeParams& params, cudaStream_t stream) {
    const cudaError_t status = reduce_columns<Columns::kSum>(params, stream, false);
    if (status != cudaSuccess) return status;
    return launch_kernel<mean_kernel>(int64_t{params.batch} * params.heads,
                                      kMeanGroups * params.head_dim, 0, params, stream,
                                      {.pdl = true});
}

}  // namespace flash_ext
