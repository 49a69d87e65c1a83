// From tensors to the kernels that quantize to FP8. The CPU kernels have the same checks in
// flash_ext/cpu/quantize.py.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "api/boxing.h"
#include "api/check.h"
#include "plan/launchers.h"
#include "schedule/row_tiles.cuh"

namespace flash_ext {
namespace {

struct QuantizeOptions {
    std::optional<Tensor> signs;
    std::optional<Tensor> mean;
    std::optional<Tensor> cu_seqlens;
    std::optional<Tensor> seqused;
    int64_t blocks = 0;  // of descale, for block scales
    std::optional<ScalarType> dtype;

    auto fields() { return std::tie(signs, mean, cu_seqlens, seqused, blocks, dtype); }
};

constexpr const char* kScalesNames[] = {"tensor", "head", "block", "channel"};

Scales check_scales(const std::string& scales) {
    for (int i = 0; i < 4; ++i)
        if (scales == kScalesNames[i]) return static_cast<Scales>(i);
    refuse("scales", "'tensor' or 'head' or 'block' or 'channel'", "'" + scales + "'");
}

// Kernels read several elements at a time.
void require_aligned(const char* argument, const Tensor& tensor, uintptr_t bytes) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
    if (tensor.numel() > 0 && address % bytes != 0)
        refuse(argument, text("aligned to ", bytes, " bytes"),
               text("a tensor that starts ", address % bytes, " bytes after"));
}

// The only GPUs with attention in FP8.
void check_hopper(const Tensor& x) {
    const GpuModel& device = device_of(x);
    if (device.major != 9)
        refuse("the GPU", "a Hopper GPU (compute capability 9.0), as for attention in FP8",
               text(device.major, ".", device.minor));
#ifndef FLASH_EXT_SM90A
    fail("quantization to FP8 was not built: add 90a to FLASH_EXT_CUDA_ARCHS");
#endif
}

// Kernels read 16 bytes at a time.
Tensor with_aligned_rows(const Tensor& x) { return operand("x", x).is_aligned() ? x : copy_of(x); }

// Everything of the params but x and the results.
QuantizeParams check_rows(const Tensor& x, const QuantizeOptions& options) {
    const bool varlen = options.cu_seqlens.has_value();
    const int64_t dims = varlen ? 3 : 4;
    if (x.dim() != dims)
        refuse("x",
               varlen ? "of shape (total, heads, head_dim) with cu_seqlens"
                      : "of shape (batch, seqlen, heads, head_dim) (packed sequences come with "
                        "cu_seqlens)",
               shape_text(x.sizes()));
    if (!x.is_cuda()) refuse("x", "on a CUDA device", "a tensor elsewhere");
    if (x.scalar_type() != ScalarType::Half && x.scalar_type() != ScalarType::BFloat16)
        refuse("x", "float16 or bfloat16", dtype_name(x.scalar_type()));
    require_contiguous_rows("x", x);
    const int64_t rows = x.size(dims - 3), heads = x.size(dims - 2), head_dim = x.size(dims - 1);
    if (head_dim < 16 || head_dim > tuning::kMaxHeadDim || head_dim % 16 != 0)
        refuse("x's head dimension",
               text("a multiple of 16 up to ", tuning::kMaxHeadDim, " on CUDA"), head_dim);
    if (heads == 0) refuse("x's number of heads", "at least 1", heads);
    if (rows >= int64_t{1} << 29) refuse("x's sequence length", "below 2^29", rows);
    if (varlen && options.cu_seqlens->numel() < 1)
        refuse("cu_seqlens", "of shape (batch + 1)", shape_text(options.cu_seqlens->sizes()));
    const int64_t batch = varlen ? options.cu_seqlens->numel() - 1 : x.size(0);
    const int64_t tiles =
        heads * ((varlen ? 1 : std::max<int64_t>(batch, 1)) * (rows / kScaleRows + 1) + batch + 2);
    if (tiles >= int64_t{1} << 31)
        refuse("x", "of fewer than 2^31 tiles of 128 rows", shape_text(x.sizes()));
    if (varlen)
        require_option("cu_seqlens", *options.cu_seqlens, ScalarType::Int, {batch + 1},
                       "(batch + 1)", x);
    if (options.seqused)
        require_option("seqused", *options.seqused, ScalarType::Int, {batch}, "(batch)", x);
    if (options.mean) {
        require_option("mean", *options.mean, ScalarType::Float, {batch, heads, head_dim},
                       "(batch, heads, head_dim)", x);
        require_aligned("mean", *options.mean, 16);
    }
    if (options.signs) {
        require_option("signs", *options.signs, ScalarType::Char, {head_dim}, "(head_dim)", x);
        require_aligned("signs", *options.signs, 8);
    }
    check_hopper(x);

    QuantizeParams params{};
    params.element_type = element_type(x.scalar_type());
    params.batch = static_cast<int>(batch);
    params.rows = static_cast<int>(!varlen && batch == 0 ? 0 : rows);
    params.heads = static_cast<int>(heads);
    params.head_dim = static_cast<int>(head_dim);
    params.hadamard_dim = static_cast<int>(head_dim & -head_dim);
    const auto data = [](const std::optional<Tensor>& tensor) -> const void* {
        return tensor && tensor->numel() > 0 ? tensor->data_ptr() : nullptr;
    };
    params.cu_seqlens = static_cast<const int*>(data(options.cu_seqlens));
    params.seqused = static_cast<const int*>(data(options.seqused));
    params.signs = static_cast<const int8_t*>(data(options.signs));
    params.mean = static_cast<const float*>(data(options.mean));
    return params;
}

// x_8bit and descale.
std::tuple<Tensor, Tensor> quantize_rows(const Tensor& x, const std::string& scales,
                                         const QuantizeOptions& options) {
    const Scales kind = check_scales(scales);
    QuantizeParams params = check_rows(x, options);
    if (options.signs && kind == Scales::kChannel)
        refuse("signs", "None with scales='channel' (a rotation mixes the channels)", "a tensor");
    if (options.mean && kind == Scales::kChannel)
        refuse("mean", "None with scales='channel', which is for v", "a tensor");
    const int64_t blocks = ceil_div<int64_t>(x.size(x.dim() - 3), kScaleRows);
    if (kind == Scales::kBlock && !options.cu_seqlens && options.blocks != blocks)
        refuse("blocks", text("ceil(seqlen / 128) = ", blocks), options.blocks);
    if (options.blocks < 0 || options.blocks >= int64_t{1} << 31)
        refuse("blocks", "at least 0 and below 2^31", options.blocks);
    const ScalarType dtype = options.dtype.value_or(ScalarType::Float8_e4m3fn);
    if (dtype != ScalarType::Float8_e4m3fn && dtype != ScalarType::Char)
        refuse("dtype", "float8_e4m3fn or int8", dtype_name(dtype));
    params.to_int8 = dtype == ScalarType::Char;
    if (params.to_int8 && kind != Scales::kBlock)
        refuse("dtype", "float8_e4m3fn unless scales='block'", dtype_name(dtype));
    params.scales = kind;
    params.blocks = static_cast<int>(options.blocks);
    const float largest = params.to_int8 ? kMaxInt8 : kMaxFloat8;
    params.numerator = largest * (params.to_int8 ? kInt8Unit : 1.f) / kSumDivisor;
    const int divisor = !options.mean ? 1 : options.signs ? kSumDivisor : kDifferenceDivisor;
    params.least_amax = params.numerator / (kMostFactor / divisor);
    // The Hadamard matrix is orthonormal but for this factor.
    const double norm = options.signs ? 1.0 / std::sqrt(double(params.hadamard_dim)) : 1.0;
    params.descale_of_1 = kSumDivisor * norm / largest;
    const cudaStream_t stream = current_stream(x);

    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const Tensor aligned = with_aligned_rows(x);
    Tensor x_8bit = empty(x, {x.sizes().begin(), x.sizes().end()}, dtype);
    std::vector<int64_t> shape;
    if (kind != Scales::kTensor) shape = {params.batch, params.heads};
    if (kind == Scales::kBlock) shape.push_back(params.blocks);
    if (kind == Scales::kChannel) shape.push_back(params.head_dim);
    Tensor descale = empty(x, shape, ScalarType::Float);
    Tensor amax = kind == Scales::kBlock ? Tensor() : empty(x, shape, ScalarType::Float);
    params.x = operand("x", aligned).view();
    params.x_8bit = static_cast<uint8_t*>(x_8bit.data_ptr());
    params.descale = static_cast<float*>(descale.data_ptr());
    if (amax.defined()) params.amax = static_cast<float*>(amax.data_ptr());
    check_launch(quantize(params, device_of(x), stream));
    return {x_8bit, descale};
}

// (B, H, D), float32.
Tensor mean_of_rows(const Tensor& x, const std::optional<Tensor>& cu_seqlens,
                    const std::optional<Tensor>& seqused) {
    QuantizeParams params = check_rows(x, {.cu_seqlens = cu_seqlens, .seqused = seqused});
    const cudaStream_t stream = current_stream(x);

    const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const Tensor aligned = with_aligned_rows(x);
    Tensor mean = empty(x, {params.batch, params.heads, params.head_dim}, ScalarType::Float);
    const Tensor sums =
        empty(x, {row_tile_count(params, kColumnRows), params.head_dim}, ScalarType::Float);
    params.x = operand("x", aligned).view();
    params.sums = static_cast<float*>(sums.data_ptr());
    params.mean_out = static_cast<float*>(mean.data_ptr());
    check_launch(token_mean(params, stream));
    return mean;
}

}  // namespace
}  // namespace flash_ext

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
    using namespace flash_ext;
    m.impl("fp8_quantize", boxed<quantize_rows>);
    m.impl("fp8_token_mean", boxed<mean_of_rows>);
}
