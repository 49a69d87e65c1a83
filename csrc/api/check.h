// Argument checks. A message names the argument, what was expected and what was given. The ops fwd
// and bwd allocate and launch nothing before all checks have passed. The CPU kernels have the same
// checks in flash_ext/cpu/checks.py.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "api/attention.h"
#include "plan/call.h"
#include "plan/device.h"
#include "plan/head_dims.h"
#include "plan/text.h"
#include "plan/variants.h"
#include "problem/params.h"

namespace flash_ext {

using torch::headeronly::ScalarType;

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    throw std::runtime_error(text("flash_ext: ", parts...));
}

template <class Got>
[[noreturn]] void refuse(const std::string& argument, const std::string& wanted, const Got& got) {
    fail(argument, " must be ", wanted, ", got ", got);
}

template <class Range>
std::string shape_text(const Range& sizes) {
    std::string shape;
    for (const auto size : sizes) shape += text(shape.empty() ? "" : ", ", size);
    return text("(", shape, ")");
}

inline const char* dtype_name(ScalarType dtype) {
    switch (dtype) {
        case ScalarType::Half:
            return "float16";
        case ScalarType::BFloat16:
            return "bfloat16";
        case ScalarType::Float:
            return "float32";
        case ScalarType::Double:
            return "float64";
        case ScalarType::Int:
            return "int32";
        case ScalarType::Long:
            return "int64";
        case ScalarType::Bool:
            return "bool";
        case ScalarType::Char:
            return "int8";
        case ScalarType::Float8_e4m3fn:
            return "float8_e4m3fn";
        case ScalarType::Float8_e5m2:
            return "float8_e5m2";
        case ScalarType::Float8_e4m3fnuz:
            return "float8_e4m3fnuz";
        case ScalarType::Float8_e5m2fnuz:
            return "float8_e5m2fnuz";
        default:
            return "another dtype";
    }
}

inline void require_dtype(const char* argument, const Tensor& tensor, ScalarType dtype) {
    if (tensor.scalar_type() != dtype)
        refuse(argument, dtype_name(dtype), dtype_name(tensor.scalar_type()));
}

inline void require_device(const char* argument, const Tensor& tensor, const Tensor& q) {
    if (!tensor.is_cuda())
        refuse(argument, "on q's device cuda:" + std::to_string(q.get_device_index()),
               "a tensor elsewhere");
    if (tensor.get_device_index() != q.get_device_index())
        refuse(argument, "on q's device cuda:" + std::to_string(q.get_device_index()),
               "cuda:" + std::to_string(tensor.get_device_index()));
}

inline void require_shape(const char* argument, const Tensor& tensor,
                          const std::vector<int64_t>& shape, const char* layout) {
    bool same = tensor.dim() == static_cast<int64_t>(shape.size());
    for (size_t i = 0; same && i < shape.size(); ++i) same = tensor.size(i) == shape[i];
    if (!same)
        refuse(argument, std::string("of shape ") + layout + " = " + shape_text(shape),
               shape_text(tensor.sizes()));
}

inline void require_contiguous_rows(const char* argument, const Tensor& tensor) {
    const int64_t last = tensor.dim() - 1;
    if (tensor.numel() > 0 && tensor.size(last) > 1 && tensor.stride(last) != 1)
        refuse(argument, "contiguous in its last dimension",
               "strides " + shape_text(tensor.strides()));
}

// q, k, v, out or dout: q's dtype and device, contiguous rows.
inline void require_like(const char* argument, const Tensor& tensor, const Tensor& q) {
    if (tensor.scalar_type() != q.scalar_type())
        refuse(argument, std::string("of q's dtype ") + dtype_name(q.scalar_type()),
               dtype_name(tensor.scalar_type()));
    require_device(argument, tensor, q);
    require_contiguous_rows(argument, tensor);
}

inline void require_contiguous(const char* argument, const Tensor& tensor) {
    if (!tensor.is_contiguous())
        refuse(argument, "contiguous", "strides " + shape_text(tensor.strides()));
}

// What an argument of options must be, except its values.
inline void require_option(const char* argument, const Tensor& tensor, ScalarType dtype,
                           const std::vector<int64_t>& shape, const char* layout, const Tensor& q) {
    require_dtype(argument, tensor, dtype);
    require_shape(argument, tensor, shape, layout);
    require_device(argument, tensor, q);
    require_contiguous(argument, tensor);
}

// lse or dlse.
inline void require_statistics(const char* argument, const Tensor& tensor, const Sizes& sizes,
                               const Tensor& q) {
    require_option(argument, tensor, ScalarType::Float, sizes.statistics(),
                   sizes.varlen ? "(heads_q, total_q)" : "(batch, heads_q, seqlen_q)", q);
}

inline void check_bias(const Tensor& bias, const Sizes& sizes, const Tensor& q) {
    const ScalarType dtype = bias.scalar_type();
    if (dtype != q.scalar_type() && dtype != ScalarType::Float && dtype != ScalarType::Bool)
        refuse("bias", std::string(dtype_name(q.scalar_type())) + ", float32 or bool",
               dtype_name(dtype));
    require_device("bias", bias, q);
    if (bias.dim() != 4)
        refuse("bias", "of shape (batch, heads_q, seqlen_q, seqlen_k), any of them 1",
               shape_text(bias.sizes()));
    const std::pair<const char*, int64_t> wanted[] = {{"batch", sizes.batch},
                                                      {"heads_q", sizes.heads_q},
                                                      {"seqlen_q", sizes.seqlen_q},
                                                      {"seqlen_k", sizes.seqlen_k}};
    for (int dim = 0; dim < 4; ++dim) {
        const auto& [name, size] = wanted[dim];
        const bool by_position = sizes.varlen && dim >= 2;  // as long as the longest sequence
        if (bias.size(dim) != 1 && !by_position && bias.size(dim) != size)
            refuse("bias",
                   std::string("1 or ") + name + " = " + std::to_string(size) + " in dimension " +
                       std::to_string(dim),
                   shape_text(bias.sizes()));
        if (bias.size(dim) >= int64_t{1} << 29)
            refuse("bias", "below 2^29 in every dimension", shape_text(bias.sizes()));
    }
}

// The dtype of out, for that of q.
inline ScalarType out_dtype(ScalarType dtype, const Options& options) {
    if (options.out_dtype) return *options.out_dtype;
    return has_8_bits(dtype) ? ScalarType::BFloat16 : dtype;
}

// One of q_descale, k_descale and v_descale. `last`: the values of a head, by blocks of rows or by
// channels. With varlen the blocks are as many as those of the longest sequence, or more; only the
// device knows that number.
inline void check_descale(const char* argument, const Tensor& descale, int64_t heads, int64_t last,
                          const char* layout, const Sizes& sizes, const Tensor& q) {
    const int64_t dims = descale.dim();
    require_dtype(argument, descale, ScalarType::Float);
    require_device(argument, descale, q);
    bool fits = dims == 0 || (dims == 1 && descale.size(0) == 1);
    if (dims == 2) fits = descale.size(0) == sizes.batch && descale.size(1) == sizes.heads_k;
    if (dims == 3)
        fits = descale.size(0) == sizes.batch && descale.size(1) == heads &&
               (last < 0 || descale.size(2) == last);
    if (fits) return;
    const std::string blocks = last < 0 ? "blocks" : text(last);
    refuse(argument,
           text("one number, of shape (batch, heads_k) = (", sizes.batch, ", ", sizes.heads_k,
                "), or ", layout, " = (", sizes.batch, ", ", heads, ", ", blocks, ")"),
           shape_text(descale.sizes()));
}

// What only 8-bit inputs have, and what they cannot have. `dtype` is q's.
inline void check_8_bit_options(const Tensor& q, ScalarType dtype, const Sizes& sizes,
                                const Options& options) {
    if (!has_8_bits(dtype)) {
        const auto refuse_given = [&](const char* name, const std::optional<Tensor>& descale) {
            if (descale)
                refuse(name, "None unless q, k and v have 8 bits",
                       std::string("one for ") + dtype_name(dtype));
        };
        refuse_given("q_descale", options.q_descale);
        refuse_given("k_descale", options.k_descale);
        refuse_given("v_descale", options.v_descale);
        if (options.out_dtype && *options.out_dtype != dtype)
            refuse("out_dtype", std::string("None or q's dtype ") + dtype_name(dtype),
                   dtype_name(*options.out_dtype));
        return;
    }
    if (options.out_dtype && *options.out_dtype != ScalarType::BFloat16 &&
        *options.out_dtype != ScalarType::Half)
        refuse("out_dtype", "bfloat16 or float16 with 8-bit inputs",
               dtype_name(*options.out_dtype));
    if (options.bias)
        refuse("bias", "None with 8-bit inputs (no variant has both)",
               shape_text(options.bias->sizes()));
    if (options.dropout_p != 0)
        refuse("dropout_p", "0 with 8-bit inputs (no variant has both)", options.dropout_p);
    const auto blocks = [&](int64_t rows) {
        return sizes.varlen ? -1 : (rows + kDescaleRows - 1) / kDescaleRows;
    };
    if (options.q_descale)
        check_descale("q_descale", *options.q_descale, sizes.heads_q, blocks(sizes.seqlen_q),
                      "(batch, heads_q, blocks of 128 queries)", sizes, q);
    if (options.k_descale)
        check_descale("k_descale", *options.k_descale, sizes.heads_k, blocks(sizes.seqlen_k),
                      "(batch, heads_k, blocks of 128 keys)", sizes, q);
    if (options.v_descale)
        check_descale("v_descale", *options.v_descale, sizes.heads_k, sizes.head_dim_v,
                      "(batch, heads_k, head_dim_v)", sizes, q);
}

inline void check_options(const Tensor& q, ScalarType dtype, const Sizes& sizes,
                          const Options& options) {
    // The kernels have scale * log2(e), softcap * log2(e), its inverse and scale / softcap in
    // float32: within these bounds they are finite. And the backward pass finds tanh from P and
    // lse, whose error must be small beside the cap.
    const double softcap = options.softcap;
    const double max_factor = std::ldexp(1.0, 127);
    if (!(softcap == 0 || (std::ldexp(1.0, -10) <= softcap && softcap < max_factor)))
        refuse("softcap", "0 (none), or at least 2^-10 and below 2^127", softcap);
    const double max_scale = max_factor * (softcap > 0 ? std::min(softcap, 1.0) : 1.0);
    if (options.scale && !(std::abs(*options.scale) < max_scale))
        refuse("scale", "below 2^127 in magnitude, and below 2^127 softcap if that is given",
               *options.scale);
    if (options.window_left < -1)
        refuse("window_left", "at least -1 (unlimited)", options.window_left);
    if (options.window_right < -1)
        refuse("window_right", "at least -1 (unlimited)", options.window_right);
    if (options.alibi_slopes) {
        const Tensor& slopes = *options.alibi_slopes;
        const std::vector<int64_t> shape = slopes.dim() == 1
                                               ? std::vector{sizes.heads_q}
                                               : std::vector{sizes.batch, sizes.heads_q};
        require_dtype("alibi_slopes", slopes, ScalarType::Float);
        require_shape("alibi_slopes", slopes, shape, "(heads_q) or (batch, heads_q)");
        require_device("alibi_slopes", slopes, q);
        require_contiguous_rows("alibi_slopes", slopes);
    }
    check_8_bit_options(q, dtype, sizes, options);
    if (options.bias) check_bias(*options.bias, sizes, q);
    if (options.sink)
        require_option("sink", *options.sink, ScalarType::Float, {sizes.heads_q}, "(heads_q)", q);
    if (options.seqused_k)
        require_option("seqused_k", *options.seqused_k, ScalarType::Int, {sizes.batch}, "(batch)",
                       q);
    if (!(options.dropout_p >= 0 && options.dropout_p < 1))
        refuse("dropout_p", "in [0, 1)", options.dropout_p);
    if (options.dropout_p == 0) return;
    if (!options.rng_state) refuse("rng_state", "given when dropout_p > 0", "None");
    require_option("rng_state", *options.rng_state, ScalarType::Long, {2}, "(seed and offset)", q);
}

// The variant that a name stands for; none for "auto".
inline std::optional<Variant> check_variant(const Options& options) {
    if (options.variant == "auto") return std::nullopt;
    int index = 0;
    while (index < kVariants && options.variant != kVariantNames[index]) ++index;
    if (index == kVariants) {
        std::string names = "'auto'";
        for (const char* name : kVariantNames) names += std::string(" or '") + name + "'";
        refuse("variant", names, "'" + options.variant + "'");
    }
    return static_cast<Variant>(index);
}

// The GPU of the call.
inline const GpuModel& device_of(const Tensor& q) {
    const GpuModel* device = find_device(q.get_device_index());
    if (device == nullptr) fail("the CUDA runtime does not see device ", q.get_device_index());
    return *device;
}

inline void check_architecture(const Tensor& q) {
    const GpuModel& device = device_of(q);
    if (device.major < 8)
        refuse("the GPU", "of compute capability 8.0 or newer",
               std::to_string(device.major) + "." + std::to_string(device.minor));
}

// Positions and CTA indices are 32-bit; elements are addressed in 64.
inline void check_sizes(const Sizes& sizes) {
    constexpr int64_t kMaxLength = int64_t{1} << 29;
    constexpr int64_t kMaxTiles = int64_t{1} << 31;
    constexpr int64_t kSmallestTile = 16;
    for (const auto& [name, length, heads] : {std::tuple{"q", sizes.seqlen_q, sizes.heads_q},
                                              std::tuple{"k", sizes.seqlen_k, sizes.heads_k}}) {
        if (length >= kMaxLength)
            refuse(std::string(name) + "'s sequence length", "below 2^29", length);
        const int64_t blocks = length / kSmallestTile + 1 + (sizes.varlen ? sizes.batch + 1 : 0);
        const int64_t matrices = heads * sizes.tensor_batches();
        if (matrices >= kMaxTiles || matrices * blocks >= kMaxTiles)
            refuse(name, "of fewer than 2^31 tiles of 16 rows",
                   std::to_string(matrices) + " (batch, head) pairs of " + std::to_string(length) +
                       " rows");
    }
}

// The arguments of the forward pass. Sizes are those of the call.
inline Sizes check_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                           const Options& options) {
    check_variant(options);
    if (options.cu_seqlens_q.has_value() != options.cu_seqlens_k.has_value())
        refuse("cu_seqlens_q and cu_seqlens_k", "given together",
               options.cu_seqlens_q ? "cu_seqlens_q alone" : "cu_seqlens_k alone");
    Sizes sizes{};
    sizes.varlen = options.cu_seqlens_q.has_value();
    const char* layouts[2][3] = {
        {"(batch, seqlen_q, heads_q, head_dim)", "(batch, seqlen_k, heads_k, head_dim)",
         "(batch, seqlen_k, heads_k, head_dim_v)"},
        {"(total_q, heads_q, head_dim)", "(total_k, heads_k, head_dim)",
         "(total_k, heads_k, head_dim_v)"}};
    const auto& layout = layouts[sizes.varlen];
    const int64_t dims = sizes.varlen ? 3 : 4;
    const std::pair<const char*, const Tensor&> inputs[] = {{"q", q}, {"k", k}, {"v", v}};
    for (int i = 0; i < 3; ++i) {
        const auto& [name, tensor] = inputs[i];
        if (tensor.dim() != dims)
            refuse(name,
                   std::string("of shape ") + layout[i] +
                       (sizes.varlen ? " with cu_seqlens_q and cu_seqlens_k"
                                     : " (packed sequences come with cu_seqlens_q)"),
                   shape_text(tensor.sizes()));
        if (!tensor.is_cuda())
            refuse(name, "on a CUDA device like the other inputs", "a tensor elsewhere");
    }
    const ScalarType dtype = q.scalar_type();
    if (dtype != ScalarType::Half && dtype != ScalarType::BFloat16 && !has_8_bits(dtype))
        refuse("q", "float16, bfloat16, float8_e4m3fn or int8", dtype_name(dtype));
    require_like("k", k, q);
    if (dtype == ScalarType::Char) {
        if (v.scalar_type() != ScalarType::Float8_e4m3fn)
            refuse("v", "float8_e4m3fn with q and k in int8", dtype_name(v.scalar_type()));
    } else if (v.scalar_type() != dtype) {
        refuse("v", std::string("of q's dtype ") + dtype_name(dtype), dtype_name(v.scalar_type()));
    }
    require_device("v", v, q);
    for (const auto& [name, tensor] : inputs) require_contiguous_rows(name, tensor);

    sizes.batch =
        sizes.varlen ? std::max<int64_t>(options.cu_seqlens_q->numel() - 1, 0) : q.size(0);
    sizes.seqlen_q = q.size(dims - 3);
    sizes.seqlen_k = k.size(dims - 3);
    sizes.heads_q = q.size(dims - 2);
    sizes.heads_k = k.size(dims - 2);
    sizes.head_dim = q.size(dims - 1);
    sizes.head_dim_v = v.size(dims - 1);
    for (const auto& [name, dim] : {std::pair{"q's head dimension", sizes.head_dim},
                                    std::pair{"v's head dimension", sizes.head_dim_v}})
        if (dim < 1 || dim > kMaxHeadDim) refuse(name, "1 to " + std::to_string(kMaxHeadDim), dim);
    require_shape("k", k, sizes.rows(sizes.seqlen_k, sizes.heads_k, sizes.head_dim), layout[1]);
    if (sizes.heads_k == 0) refuse("k's number of heads", "at least 1", sizes.heads_k);
    if (sizes.heads_q % sizes.heads_k != 0)
        refuse("q's number of heads", "a multiple of k's, " + std::to_string(sizes.heads_k),
               sizes.heads_q);
    require_shape("v", v, sizes.rows(sizes.seqlen_k, sizes.heads_k, sizes.head_dim_v), layout[2]);
    if (sizes.varlen) {
        for (const auto& [name, offsets] : {std::pair{"cu_seqlens_q", &*options.cu_seqlens_q},
                                            std::pair{"cu_seqlens_k", &*options.cu_seqlens_k}})
            require_option(name, *offsets, ScalarType::Int, {sizes.batch + 1}, "(batch + 1)", q);
    }
    check_sizes(sizes);
    check_options(q, dtype, sizes, options);
    check_architecture(q);
    return sizes;
}

inline Sizes check_backward(const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q,
                            const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                            const Options& options) {
    const Sizes sizes = check_forward(q, k, v, options);
    if (has_8_bits(q.scalar_type()))
        refuse("q", "float16 or bfloat16 (no variant has a backward for 8-bit inputs)",
               dtype_name(q.scalar_type()));
    const std::vector<int64_t> shape = sizes.rows(sizes.seqlen_q, sizes.heads_q, sizes.head_dim_v);
    const char* layout =
        sizes.varlen ? "(total_q, heads_q, head_dim_v)" : "(batch, seqlen_q, heads_q, head_dim_v)";
    for (const auto& [name, tensor] : {std::pair{"dout", &dout}, std::pair{"out", &out}}) {
        require_shape(name, *tensor, shape, layout);
        require_like(name, *tensor, q);
    }
    require_statistics("lse", lse, sizes, q);
    if (dlse) require_statistics("dlse", *dlse, sizes, q);
    return sizes;
}

}  // namespace flash_ext
