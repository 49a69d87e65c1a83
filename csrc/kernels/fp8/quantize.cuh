// x -> x_8bit and descale, with x = x_8bit * descale up to rounding and the rotation of rotate.cuh.
//
// A tile has 128 rows of a head. With block scales these are what shares a scale: the rows are
// loaded once, stay in registers between maximum and rounding, and are stored once. Other scales
// need the maximum of more than a CTA has, so a first pass finds maxima: of a column another kernel
// (columns.cuh), otherwise this one, which then stores no rows. Maxima meet in atomicMax, whose
// result does not depend on the order. The second pass begins with the rows that the first one has
// left in L2, the last ones.
//
// With a the maximum before the factor `norm` of the rotation:
//
//     x_8bit = e4m3(v * (448 / a)),   descale = a * norm / 448        (1 where a = 0)
//
// and with 127 for int8, which has no NaN: where a number of the tile is not finite, descale is
// NaN. v and a are divided by powers of two (problem/quantize.h), which cancel.
#pragma once

#include "kernels/fp8/columns.cuh"
#include "kernels/fp8/rotate.cuh"
#include "kernels/fp8/transpose_v.cuh"
#include "ptx/grid_dependency.cuh"

namespace flash_ext {

// Of descales of blocks, CTAs with rows write their own, and the first of a sequence those that the
// sequence does not reach.
template <class Layout>
FLASH_DEVICE void store_block_descales(const QuantizeParams& params, const RowTile& tile,
                                       float amax) {
    if (tile.sequence < 0) return;
    float* descale = params.descale + tile.scale_head(params) * params.blocks;
    if (Layout::thread() == 0 && tile.rows > 0 && tile.tile < params.blocks)
        descale[tile.tile] = descale_of(params, amax);
    if (tile.tile > 0) return;
    for (int i = ceil_div(tile.length, kScaleRows) + Layout::thread(); i < params.blocks;
         i += Layout::kCtas * blockDim.x)
        descale[i] = 1.f;
}

// Stores a warp's results: a lane stores the results of vectors 64 i + 2 lane, the first of them at
// `at`, and of the next ones. Rows that are not in use become 0, but not -0.
template <class Layout>
FLASH_DEVICE void store_results(const QuantizeParams& params, const TilePosition<Layout>& at,
                                const WarpRows<Layout>& results, const RowTile& tile) {
    const int64_t row_stride = int64_t{params.heads} * params.head_dim;
    uint8_t* target = params.x_8bit +
                      (int64_t{tile.batch} * params.rows + tile.begin + at.row()) * row_stride +
                      tile.head * params.head_dim + at.column();
    const uint32_t of_lane =
        ptx::shared_address(&results.x_8bit[Layout::swizzled_piece(2 * ptx::lane_not_hoisted())]);
#pragma unroll
    for (int i = 0; i < Layout::kThreadVectors / 2; ++i) {
        const int row = at.row() + 2 * Layout::kVectorRows * i;
        uint32_t x[4];
        ptx::ld_shared_v4(x, Layout::piece_address(of_lane, 64 * i));
        if (row >= tile.used) x[0] = x[1] = x[2] = x[3] = 0;
        if (row < tile.rows) *reinterpret_cast<uint4*>(target) = {x[0], x[1], x[2], x[3]};
        target += 2 * Layout::kVectorRows * row_stride;
    }
}

template <class Rows>
FLASH_DEVICE void quantize_tiles(const QuantizeParams& params) {
    using Layout = typename Rows::Layout;
    __shared__ TileMaxima<Layout> maxima;
    if (params.scales == Scales::kBlock) ptx::launch_dependents();
    maxima.init();
    const bool second_pass = is_second_pass(params);
    const float divisor = Rows::divisor(params);
    TileStream<Rows> stream(params);
    const TilePosition<Layout> results_at(params, 2 * (threadIdx.x % 32));
    Rows rows(params);
    rows.load_mean(params, stream.next(), stream.storage.mean);  // while the rows are on their way
    maxima.wait_for_init();

    if (params.scales != Scales::kBlock) ptx::wait_for_grid_before();  // for zeros, or the maxima
    if (second_pass) store_descales(params);

    for (bool more = true; more;) {
        const RowTile& tile = stream.read(params, rows);
        more = stream.next().is_valid;
        rows.prepare(params, tile, stream.storage.mean);
        float largest = rows.amax_before_last();
        rows.last_butterflies();
        if (__any_sync(0xffffffff, !(largest <= FLT_MAX))) {
            largest = rows.finite_amax();
            if (params.to_int8) largest = CUDART_NAN_F;
        }
        float amax = 0.f;
        if (!second_pass) {
            amax = maxima.reduce(largest * (divisor / kSumDivisor), stream.number());
        } else if (params.scales != Scales::kChannel && tile.sequence >= 0) {
            amax = amax_of(params, tile.scale_head(params));
        }
        if (params.finds_maxima) {
            if (Layout::thread() == 0 && tile.used > 0)
                atomicMax(reinterpret_cast<uint32_t*>(&amax_of(params, tile.scale_head(params))),
                          __float_as_uint(amax));
            continue;
        }
        if (!second_pass) store_block_descales<Layout>(params, tile, amax);
        if (!Rows::kRotates && params.scales == Scales::kChannel) {
            float factors[8] = {};
            if (tile.sequence >= 0)
                load_channel_factors(factors, params, tile.scale_head(params), rows.column());
            rows.template write<Float8>(stream.storage, factors);
        } else {
            float factor = factor_of(params, amax);
            if (factor <= kMaxFactor / kSumDivisor) {
                factor *= divisor;
            } else {
                rows.multiply(divisor);  // the product of both factors may overflow
            }
            if (params.to_int8) {
                rows.template write<Int8>(stream.storage, factor);
            } else {
                rows.template write<Float8>(stream.storage, factor);
            }
        }
        __syncwarp();  // the warp's results are complete
        store_results(params, results_at, stream.storage, tile);
    }
    ptx::wait_for_grid_before();  // what comes after this kernel comes after all before it
}

template <class Rows>
__global__ void __maxnreg__(Rows::kRegisters)
    quantize_kernel(const __grid_constant__ QuantizeParams params) {
    if constexpr (kCudaArch >= 900) quantize_tiles<Rows>(params);
}

// Zeros for atomicMax. A kernel, since the next one may begin early after a kernel, but not after a
// memset.
inline constexpr int kZeroThreads = 256;
__global__ void __launch_bounds__(kZeroThreads)
    zero_amax_kernel(const __grid_constant__ QuantizeParams params) {
    ptx::launch_dependents();
    const int64_t i = int64_t{blockIdx.x} * kZeroThreads + threadIdx.x;
    if (i < scale_count(params)) params.amax[i] = 0.f;
}

inline cudaError_t zero_amax(const QuantizeParams& params, cudaStream_t stream) {
    return launch_kernel<zero_amax_kernel>(ceil_div<int64_t>(scale_count(params), kZeroThreads),
                                           kZeroThreads, 0, params, stream);
}

inline cudaError_t launch_quantize(const QuantizeParams& params, const GpuModel& gpu,
                                   cudaStream_t stream, bool pdl) {
    const int hadamard_dim = params.signs == nullptr ? 0 : params.hadamard_dim;
    return dispatch<0, 16, 32, 64, 128, 256>(hadamard_dim, [&](auto dim) {
        return dispatch_element(params.element_type, [&](auto element) {
            using Rows = TileRows<decltype(element), dim>;
            using Layout = typename Rows::Layout;
            const int threads = Layout::threads(params);
            const int bytes = threads / 32 * static_cast<int>(sizeof(WarpRows<Layout>));
            constexpr int kMostBytes = Layout::kMaxThreads / 32 * sizeof(WarpRows<Layout>);
            return launch_kernel<quantize_kernel<Rows>>(
                persistent_ctas<Layout>(params, gpu, threads, Rows::kSmThreads, bytes), threads,
                bytes, params, stream,
                {.pdl = pdl, .cluster = Layout::kCtas, .most_shared_bytes = kMostBytes});
        });
    });
}

cudaError_t quantize(QuantizeParams params, const GpuModel& gpu, cudaStream_t stream) {
    const bool pdl = params.scales != Scales::kBlock;
    cudaError_t status = pdl ? zero_amax(params, stream) : cudaSuccess;
    if (status == cudaSuccess && params.scales == Scales::kChannel)
        status = reduce_columns<Columns::kAmax>(params, stream, /*pdl=*/true);
    params.finds_maxima = params.scales == Scales::kTensor || params.scales == Scales::kHead;
    if (status == cudaSuccess && params.finds_maxima)
        status = launch_quantize(params, gpu, stream, pdl);
    params.finds_maxima = false;
    if (status != cudaSuccess) return status;
    return params.transposed.data == nullptr ? launch_quantize(params, gpu, stream, pdl)
                                             : transpose_rows(params, stream);
}

// Each kernel begins where the one before has left SMs. V is transposed while its last rows are in
// L2. The kernels of q and k read nothing that the one before writes, and the mean is complete: the
// maxima of v have waited for it.
cudaError_t quantize_qkv(const QuantizeParams& q, const QuantizeParams& k, const QuantizeParams& v,
                         const QuantizeParams* mean, const GpuModel& gpu, cudaStream_t stream) {
    cudaError_t status = zero_amax(v, stream);
    if (status == cudaSuccess && mean != nullptr) status = token_mean(*mean, stream, /*pdl=*/true);
    if (status == cudaSuccess) status = reduce_columns<Columns::kAmax>(v, stream, /*pdl=*/true);
    if (status == cudaSuccess) status = transpose_rows(v, stream);
    if (status == cudaSuccess) status = launch_quantize(q, gpu, stream, /*pdl=*/true);
    return status == cudaSuccess ? launch_quantize(k, gpu, stream, /*pdl=*/true) : status;
}

}  // namespace flash_ext
