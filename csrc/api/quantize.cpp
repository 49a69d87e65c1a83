// From tensors to the kernels that quantize to FP8. Calls that are not accepted are refused in the
// words of flash_ext/cpu/quantize.py.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "api/boxing.h"
#include "api/check.h"
#include "plan/launchers.h"
#include "plan/transposed_v.cuh"
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
    bool transposed = false;

    auto fields() { return std::tie(signs, mean, cu_seqlens, seqused, blocks, dtype, transposed); }
};

constexpr std::string_view kScalesNames[] = {"tensor", "head", "block", "channel"};

// The only GPUs with attention in FP8.
void check_hopper(const Tensor& x) {
    const GpuModel& device = device_of(x);
    if (device.major != 9)
        fail("the GPU must be a Hopper GPU (compute capability 9.0), as for attention in FP8, got ",
             device.major, ".", device.minor);
#ifndef FLASH_EXT_SM90A
    fail("quantization to FP8 was not built: add 90a to FLASH_EXT_CUDA_ARCHS");
#endif
}

// Kernels read 16 bytes at a time.
Tensor with_aligned_rows(const Tensor& x) { return operand("x", x).is_aligned() ? x : copy_of(x); }

// Everything of the params but x and the results; none if x or the options are refused.
std::optional<QuantizeParams> accept_rows(const Tensor& x, const QuantizeOptions& options) {
    const bool varlen = options.cu_seqlens.has_value();
    const Device device = x.device();
    const int64_t dims = varlen ? 3 : 4;
    if (x.dim() != dims || !is_here(device) || !has_contiguous_rows(x) ||
        !has_16_bits(x.scalar_type()))
        return std::nullopt;
    const int64_t rows = x.size(dims - 3), heads = x.size(dims - 2), head_dim = x.size(dims - 1);
    if (head_dim < 16 || head_dim > tuning::kMaxHeadDim || head_dim % 16 != 0 || heads == 0 ||
        rows >= int64_t{1} << 29 || (varlen && options.cu_seqlens->numel() < 1))
        return std::nullopt;
    const int64_t batch = varlen ? options.cu_seqlens->numel() - 1 : x.size(0);
    const int64_t tiles =
        heads * ((varlen ? 1 : std::max<int64_t>(batch, 1)) * (rows / kScaleRows + 1) + batch + 2);
    if (tiles >= int64_t{1} << 31 ||
        !is_plain_or_none(options.cu_seqlens, device, ScalarType::Int, {batch + 1}) ||
        !is_plain_or_none(options.seqused, device, ScalarType::Int, {batch}) ||
        !is_plain_or_none(options.mean, device, ScalarType::Float, {batch, heads, head_dim}) ||
        !is_plain_or_none(options.signs, device, ScalarType::Char, {head_dim}) ||
        (options.mean && !is_aligned(*options.mean, 16)) ||
        (options.signs && !is_aligned(*options.signs, 8)))
        return std::nullopt;

    QuantizeParams params{};
    params.element_type = element_type(x.scalar_type());
    params.batch = static_cast<int>(batch);
    params.rows = static_cast<int>(!varlen && batch == 0 ? 0 : rows);
    params.heads = static_cast<int>(heads);
    params.head_dim = static_cast<int>(head_dim);
    params.hadamard_dim = static_cast<int>(head_dim & -head_dim);
    params.cu_seqlens = data_of<int>(options.cu_seqlens);
    params.seqused = data_of<int>(options.seqused);
    params.signs = data_of<int8_t>(options.signs);
    params.mean = data_of<float>(options.mean);
    return params;
}

std::optional<QuantizeParams> accept_quantize(const Tensor& x, const std::string& scales,
                                              const QuantizeOptions& options, ScalarType dtype) {
    std::optional<QuantizeParams> params = accept_rows(x, options);
    const auto* kind = std::ranges::find(kScalesNames, scales);
    if (!params || kind == std::end(kScalesNames)) return std::nullopt;
    params->scales = static_cast<Scales>(kind - kScalesNames);
    params->to_int8 = dtype == ScalarType::Char;
    params->blocks = static_cast<int>(options.blocks);
    const bool of_blocks = params->scales == Scales::kBlock;
    const int64_t blocks = ceil_div<int64_t>(x.size(x.dim() - 3), kScaleRows);
    const bool accepted = (dtype == ScalarType::Float8_e4m3fn || (params->to_int8 && of_blocks)) &&
                          !((params->scales == Scales::kChannel || options.transposed) &&
                            (options.signs || options.mean)) &&
                          !(of_blocks && options.transposed) && options.blocks >= 0 &&
                          options.blocks < int64_t{1} << 31 &&
                          (!of_blocks || options.cu_seqlens || options.blocks == blocks);
    return accepted ? params : std::nullopt;
}

struct Quantization {
    QuantizeParams params;
    Tensor x_8bit, descale;
    Tensor aligned, amax;
};

Quantization quantization_of(const Tensor& x, const std::string& scales,
                             const QuantizeOptions& options) {
    const ScalarType dtype = options.dtype.value_or(ScalarType::Float8_e4m3fn);
    const std::optional<QuantizeParams> accepted = accept_quantize(x, scales, options, dtype);
    if (!accepted) refuse("fp8_quantize", x, scales, options);
    check_hopper(x);
    Quantization made{};
    made.params = *accepted;
    QuantizeParams& params = made.params;
    const Scales kind = params.scales;
    const float largest = params.to_int8 ? kMaxInt8 : kMaxFloat8;
    params.numerator = largest * (params.to_int8 ? kInt8Unit : 1.f) / kSumDivisor;
    const int divisor = !options.mean ? 1 : options.signs ? kSumDivisor : kDifferenceDivisor;
    params.least_amax = params.numerator / (kMaxFactor / divisor);
    // The Hadamard matrix is orthonormal but for this factor.
    const double norm = options.signs ? 1.0 / std::sqrt(double(params.hadamard_dim)) : 1.0;
    params.descale_of_1 = kSumDivisor * norm / largest;

    made.aligned = with_aligned_rows(x);
    std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
    if (options.transposed) {
        const size_t rows = shape.size() - 3;
        const bool varlen = options.cu_seqlens.has_value();
        shape = {params.heads, params.head_dim,
                 transposed_keys(static_cast<int>(shape[rows]), params.batch, varlen)};
        if (!varlen) shape.insert(shape.begin(), params.batch);
    }
    made.x_8bit = empty(x, shape, dtype);
    shape.clear();
    if (kind != Scales::kTensor) shape = {params.batch, params.heads};
    if (kind == Scales::kBlock) shape.push_back(params.blocks);
    if (kind == Scales::kChannel) shape.push_back(params.head_dim);
    made.descale = empty(x, shape, ScalarType::Float);
    if (kind != Scales::kBlock) {
        made.amax = empty(x, shape, ScalarType::Float);
        params.amax = static_cast<float*>(made.amax.data_ptr());
    }
    params.x = operand("x", made.aligned).view();
    if (options.transposed) {
        params.transposed = transposed_view(made.x_8bit.data_ptr(), params.heads, params.head_dim,
                                            static_cast<int>(made.x_8bit.size(x.dim() - 1)));
    } else {
        params.x_8bit = static_cast<uint8_t*>(made.x_8bit.data_ptr());
    }
    params.descale = static_cast<float*>(made.descale.data_ptr());
    return made;
}

// x_8bit and descale.
std::tuple<Tensor, Tensor> quantize_rows(const Tensor& x, const std::string& scales,
                                         const QuantizeOptions& options) {
    const Quantization made = quantization_of(x, scales, options);
    launch_on_stream_of(x,
                        [&](auto stream) { return quantize(made.params, device_of(x), stream); });
    return {made.x_8bit, made.descale};
}

struct Mean {
    QuantizeParams params;
    Tensor mean;  // (B, H, D), float32
    Tensor aligned, sums;
};

Mean mean_of(const Tensor& x, const std::optional<Tensor>& cu_seqlens,
             const std::optional<Tensor>& seqused, int step = 1) {
    const auto accepted = accept_rows(x, {.cu_seqlens = cu_seqlens, .seqused = seqused});
    if (!accepted) refuse("fp8_token_mean", x, cu_seqlens, seqused);
    check_hopper(x);
    Mean made{};
    made.params = *accepted;
    QuantizeParams& params = made.params;
    made.aligned = with_aligned_rows(x);
    params.x = operand("x", made.aligned).view();
    params.x.row_stride *= step;
    params.rows = ceil_div(params.rows, step);
    made.mean = empty(x, {params.batch, params.heads, params.head_dim}, ScalarType::Float);
    made.sums = empty(x, {row_tile_count(params, kColumnRows), params.head_dim}, ScalarType::Float);
    params.sums = static_cast<float*>(made.sums.data_ptr());
    params.mean_out = static_cast<float*>(made.mean.data_ptr());
    return made;
}

Tensor mean_of_rows(const Tensor& x, const std::optional<Tensor>& cu_seqlens,
                    const std::optional<Tensor>& seqused) {
    const Mean made = mean_of(x, cu_seqlens, seqused);
    launch_on_stream_of(x, [&](auto stream) { return token_mean(made.params, stream); });
    return made.mean;
}

// Of q and k before attention.
struct QkvOptions {
    std::optional<Tensor> signs;
    std::optional<Tensor> cu_seqlens_q;
    std::optional<Tensor> cu_seqlens_k;
    std::optional<Tensor> seqused_k;
    int64_t blocks_q = 0;
    int64_t blocks_k = 0;
    std::optional<ScalarType> dtype;
    int64_t mean_rows = 0;

    auto fields() {
        return std::tie(signs, cu_seqlens_q, cu_seqlens_k, seqused_k, blocks_q, blocks_k, dtype,
                        mean_rows);
    }
};

// x_8bit and descale of q, k and v, and the mean of k, of shape (0) without one.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_all(
    const Tensor& q, const Tensor& k, const Tensor& v, const QkvOptions& options) {
    std::optional<Mean> mean;
    QuantizeOptions of_k{.signs = options.signs,
                         .cu_seqlens = options.cu_seqlens_k,
                         .seqused = options.seqused_k,
                         .blocks = options.blocks_k,
                         .dtype = options.dtype};
    if (options.mean_rows > 0) {
        const bool some = !options.cu_seqlens_k && !options.seqused_k && k.dim() == 4;
        const int64_t step = some ? std::max<int64_t>(k.size(1) / options.mean_rows, 1) : 1;
        mean = mean_of(k, options.cu_seqlens_k, options.seqused_k, static_cast<int>(step));
        of_k.mean = mean->mean;
    }
    const Quantization q_made = quantization_of(q, "block",
                                                {.signs = options.signs,
                                                 .cu_seqlens = options.cu_seqlens_q,
                                                 .blocks = options.blocks_q,
                                                 .dtype = options.dtype});
    const Quantization k_made = quantization_of(k, "block", of_k);
    const Quantization v_made = quantization_of(
        v, "channel",
        {.cu_seqlens = options.cu_seqlens_k, .seqused = options.seqused_k, .transposed = true});
    launch_on_stream_of(q, [&](auto stream) {
        return quantize_qkv(q_made.params, k_made.params, v_made.params,
                            mean ? &mean->params : nullptr, device_of(q), stream);
    });
    return {q_made.x_8bit,
            q_made.descale,
            k_made.x_8bit,
            k_made.descale,
            v_made.x_8bit,
            v_made.descale,
            mean ? mean->mean : empty(q, {0}, ScalarType::Float)};
}

}  // namespace
}  // namespace flash_ext

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
    using namespace flash_ext;
    m.impl("fp8_quantize", boxed<quantize_rows>);
    m.impl("fp8_quantize_qkv", boxed<quantize_all>);
    m.impl("fp8_token_mean", boxed<mean_of_rows>);
}
