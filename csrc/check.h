// Argument checks. A message names the argument, what was wanted and what came. Nothing is
// allocated or launched before all of them have passed. The CPU kernels' are in
// flash_ext/_checks.py, alike.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention.h"
#include "variants.h"

namespace flash_ext {

using torch::headeronly::ScalarType;

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream message;
    message << "flash_ext: ";
    (message << ... << parts);
    throw std::runtime_error(message.str());
}

template <class Got>
[[noreturn]] void refuse(const std::string& argument, const std::string& wanted, const Got& got) {
    fail(argument, " must be ", wanted, ", got ", got);
}

template <class Range>
std::string shape_text(const Range& sizes) {
    std::ostringstream text;
    text << "(";
    for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
    text << ")";
    return text.str();
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

template <size_t kDims>
void require_shape(const char* argument, const Tensor& tensor,
                   const std::array<int64_t, kDims>& shape, const char* layout) {
    bool same = tensor.dim() == static_cast<int64_t>(kDims);
    for (size_t i = 0; same && i < kDims; ++i) same = tensor.size(i) == shape[i];
    if (!same)
        refuse(argument, std::string("of shape ") + layout + " = " + shape_text(shape),
               shape_text(tensor.sizes()));
}

// q, k, v, out or dout: q's dtype and device, contiguous rows.
inline void require_like(const char* argument, const Tensor& tensor, const Tensor& q) {
    if (tensor.scalar_type() != q.scalar_type())
        refuse(argument, std::string("of q's dtype ") + dtype_name(q.scalar_type()),
               dtype_name(tensor.scalar_type()));
    require_device(argument, tensor, q);
    if (tensor.numel() > 0 && tensor.size(3) > 1 && tensor.stride(3) != 1)
        refuse(argument, "contiguous in its last dimension",
               "strides " + shape_text(tensor.strides()));
}

// lse or dlse.
inline void require_statistics(const char* argument, const Tensor& tensor, const Tensor& q) {
    require_shape(argument, tensor, std::array{q.size(0), q.size(2), q.size(1)},
                  "(batch, heads_q, seqlen_q)");
    require_dtype(argument, tensor, ScalarType::Float);
    require_device(argument, tensor, q);
    if (!tensor.is_contiguous())
        refuse(argument, "contiguous", "strides " + shape_text(tensor.strides()));
}

inline void check_options(const Tensor& q, const Options& options) {
    if (options.scale && !std::isfinite(static_cast<float>(*options.scale)))
        refuse("scale", "finite", *options.scale);
    if (options.window_left < -1)
        refuse("window_left", "at least -1 (unlimited)", options.window_left);
    if (options.window_right < -1)
        refuse("window_right", "at least -1 (unlimited)", options.window_right);
    if (!(options.dropout_p >= 0 && options.dropout_p < 1))
        refuse("dropout_p", "in [0, 1)", options.dropout_p);
    if (options.dropout_p == 0) return;
    if (!options.rng_state) refuse("rng_state", "given when dropout_p > 0", "None");
    const Tensor& state = *options.rng_state;
    require_dtype("rng_state", state, ScalarType::Long);
    require_shape("rng_state", state, std::array<int64_t, 1>{2}, "(seed and offset)");
    require_device("rng_state", state, q);
    if (!state.is_contiguous())
        refuse("rng_state", "contiguous", "strides " + shape_text(state.strides()));
}

// The variant that "auto" or a name stands for, if it has the options.
inline Variant check_variant(const Options& options) {
    Variant variant = Variant::kFa2;
    if (options.variant != "auto") {
        int index = 0;
        while (index < kVariants && options.variant != kVariantNames[index]) ++index;
        if (index == kVariants) {
            std::string names = "'auto'";
            for (const char* name : kVariantNames) names += std::string(" or '") + name + "'";
            refuse("variant", names, "'" + options.variant + "'");
        }
        variant = static_cast<Variant>(index);
    }
    const std::pair<const char*, bool> asked[] = {
        {"softcap", options.softcap != 0},
        {"alibi_slopes", options.alibi_slopes.has_value()},
        {"bias", options.bias.has_value()},
        {"sink", options.sink.has_value()},
        {"cu_seqlens_q", options.cu_seqlens_q.has_value()},
        {"cu_seqlens_k", options.cu_seqlens_k.has_value()},
        {"seqused_k", options.seqused_k.has_value()},
    };
    for (const auto& [option, given] : asked)
        if (given)
            fail(option, " is not supported yet by variant '",
                 kVariantNames[static_cast<int>(variant)], "'");
    return variant;
}

struct DeviceLimits {
    int major = 0;  // compute capability
    int minor = 0;
    int shared_bytes = 0;  // per block
};

// Asked of the driver once for all devices.
inline const DeviceLimits& device_limits(int device) {
    static const std::vector<DeviceLimits> limits = [] {
        int count = 0;
        if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
        std::vector<DeviceLimits> all(count);
        for (int i = 0; i < count; ++i) {
            cudaDeviceGetAttribute(&all[i].major, cudaDevAttrComputeCapabilityMajor, i);
            cudaDeviceGetAttribute(&all[i].minor, cudaDevAttrComputeCapabilityMinor, i);
            cudaDeviceGetAttribute(&all[i].shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                   i);
        }
        cudaGetLastError();  // clears what failed, lest a launch report it
        return all;
    }();
    if (device < 0 || device >= static_cast<int>(limits.size()))
        fail("the CUDA runtime does not see device ", device);
    return limits[device];
}

inline void check_architecture(const Tensor& q) {
    const DeviceLimits& limits = device_limits(q.get_device_index());
    if (limits.major < 8)
        refuse("the GPU", "of compute capability 8.0 or newer",
               std::to_string(limits.major) + "." + std::to_string(limits.minor));
}

// Positions and CTA indices are 32-bit; elements are addressed in 64.
inline void check_sizes(const Tensor& q, const Tensor& k) {
    constexpr int64_t kMaxLength = int64_t{1} << 29;
    constexpr int64_t kMaxTiles = int64_t{1} << 31;
    constexpr int64_t kSmallestTile = 16;
    for (const auto& [name, tensor] : {std::pair{"q", &q}, std::pair{"k", &k}}) {
        const int64_t length = tensor->size(1);
        if (length >= kMaxLength)
            refuse(std::string(name) + "'s sequence length", "below 2^29", length);
        const int64_t heads = tensor->size(0) * tensor->size(2);
        if (heads >= kMaxTiles || heads * (length / kSmallestTile + 1) >= kMaxTiles)
            refuse(std::string(name), "of fewer than 2^31 tiles of 16 rows",
                   shape_text(tensor->sizes()));
    }
}

inline Variant check_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                             const Options& options) {
    const Variant variant = check_variant(options);
    const std::tuple<const char*, const Tensor&, const char*> inputs[] = {
        {"q", q, "of shape (batch, seqlen_q, heads_q, head_dim)"},
        {"k", k, "of shape (batch, seqlen_k, heads_k, head_dim)"},
        {"v", v, "of shape (batch, seqlen_k, heads_k, head_dim)"},
    };
    for (const auto& [name, tensor, layout] : inputs) {
        if (tensor.dim() != 4) refuse(name, layout, shape_text(tensor.sizes()));
        if (!tensor.is_cuda())
            refuse(name, "on a CUDA device like the other inputs", "a tensor elsewhere");
    }
    if (q.scalar_type() != ScalarType::Half && q.scalar_type() != ScalarType::BFloat16)
        refuse("q", "float16 or bfloat16", dtype_name(q.scalar_type()));
    for (const auto& [name, tensor, layout] : inputs) require_like(name, tensor, q);

    const int64_t batch = q.size(0);
    const int64_t heads_q = q.size(2);
    const int64_t head_dim = q.size(3);
    const int64_t seqlen_k = k.size(1);
    const int64_t heads_k = k.size(2);
    if (head_dim < 1 || head_dim > kMaxHeadDim)
        refuse("q's head dimension", "1 to " + std::to_string(kMaxHeadDim), head_dim);
    require_shape("k", k, std::array{batch, seqlen_k, heads_k, head_dim},
                  "(batch, seqlen_k, heads_k, head_dim)");
    if (heads_k == 0 || heads_q % heads_k != 0)
        refuse("q's number of heads", "a multiple of k's, " + std::to_string(heads_k), heads_q);
    require_shape("v", v, std::array{batch, seqlen_k, heads_k, v.size(3)},
                  "(batch, seqlen_k, heads_k, head_dim)");
    if (v.size(3) != head_dim)
        fail("v with a head dimension (", v.size(3), ") other than q's (", head_dim,
             ") is not supported yet by variant '", kVariantNames[static_cast<int>(variant)], "'");
    check_sizes(q, k);
    check_options(q, options);
    check_architecture(q);
    return variant;
}

inline Variant check_backward(const Tensor& dout, const std::optional<Tensor>& dlse,
                              const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                              const Tensor& lse, const Options& options) {
    const Variant variant = check_forward(q, k, v, options);
    const std::array shape{q.size(0), q.size(1), q.size(2), v.size(3)};
    const char* layout = "(batch, seqlen_q, heads_q, head_dim)";
    require_shape("dout", dout, shape, layout);
    require_like("dout", dout, q);
    require_shape("out", out, shape, layout);
    require_like("out", out, q);
    require_statistics("lse", lse, q);
    if (dlse) require_statistics("dlse", *dlse, q);
    return variant;
}

}  // namespace flash_ext
