// The ops of attention. See flash_ext/ops/ for their contract.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace flash_ext {

using torch::stable::Tensor;

// Has this dtype 8 bits? If q has, v is in float8_e4m3fn; if k has and q 16, v is as k. (A tensor
// is asked for its dtype once: each time costs tens of nanoseconds.)
inline bool has_8_bits(torch::headeronly::ScalarType dtype) {
    using torch::headeronly::ScalarType;
    return dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Char;
}

// The keyword options of all ops, in the order of the schema and with its defaults
// (flash_ext/ops/options.py).
struct Options {
    std::optional<double> scale;
    bool causal = false;
    int64_t window_left = -1;
    int64_t window_right = -1;
    double softcap = 0;
    std::optional<Tensor> alibi_slopes;
    std::optional<Tensor> bias;
    std::optional<Tensor> mask_kv_tiles;
    std::optional<Tensor> mask_q_tiles;
    std::optional<Tensor> mask_words;
    std::optional<Tensor> sink;
    std::optional<Tensor> cu_seqlens_q;
    std::optional<Tensor> cu_seqlens_k;
    std::optional<Tensor> seqused_k;
    std::optional<Tensor> page_table;
    double dropout_p = 0;
    std::optional<Tensor> rng_state;
    std::optional<Tensor> q_descale;
    std::optional<Tensor> k_descale;
    std::optional<Tensor> v_descale;
    bool v_transposed = false;
    std::optional<torch::headeronly::ScalarType> out_dtype;
    bool deterministic = false;
    bool batch_invariant = false;
    std::string variant = "auto";

    auto fields() {
        return std::tie(scale, causal, window_left, window_right, softcap, alibi_slopes, bias,
                        mask_kv_tiles, mask_q_tiles, mask_words, sink, cu_seqlens_q, cu_seqlens_k,
                        seqused_k, page_table, dropout_p, rng_state, q_descale, k_descale,
                        v_descale, v_transposed, out_dtype, deterministic, batch_invariant,
                        variant);
    }
};

// The tensors of a backward pass, in the order of the schema.
struct BackwardTensors {
    Tensor dout;
    std::optional<Tensor> dlse;
    Tensor q, k, v, out, lse;

    auto fields() { return std::tie(dout, dlse, q, k, v, out, lse); }
};

using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // dq, dk, dv
// And dbias and dsink, which are undefined where there are none.
using AllGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Throws what Python sees as torch.OutOfMemoryError, which the stable ABI cannot throw.
[[noreturn]] void throw_out_of_memory(const std::string& message);

// Throws what torch's last call failed with, or `otherwise` before torch 2.13, which does not tell:
// that memory is out as torch.OutOfMemoryError.
[[noreturn]] void throw_failure(const std::string& otherwise);

inline std::optional<Tensor> if_defined(const Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// An uninitialized tensor on x's device.
Tensor empty_strided(const Tensor& x, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& strides, torch::headeronly::ScalarType dtype);

inline Tensor empty(const Tensor& x, const std::vector<int64_t>& shape,
                    torch::headeronly::ScalarType dtype) {
    std::vector<int64_t> strides(shape.size());
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0;) {
        strides[i] = stride;
        stride *= std::max<int64_t>(shape[i], 1);
    }
    return empty_strided(x, shape, strides, dtype);
}

inline Tensor contiguous_like(const Tensor& x) {
    return empty(x, {x.sizes().begin(), x.sizes().end()}, x.scalar_type());
}

// A contiguous copy. Does not use torch's own op, whose error would not be torch.OutOfMemoryError.
inline Tensor copy_of(const Tensor& x) {
    Tensor copy = contiguous_like(x);
    return torch::stable::copy_(copy, x);
}

// A gradient as the kernels read it: itself, or a copy.
inline Tensor with_contiguous_rows(const Tensor& x) {
    return x.stride(x.dim() - 1) == 1 ? x : copy_of(x);
}

// out and lse. Where `into` is defined it is used as out. It is aligned as torch allocates memory,
// and its rows are contiguous.
std::tuple<Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Options& options, const Tensor& into = Tensor());

// `dbias_factor`: dbias is the gradient of the bias times this; 0: it is not needed. `into`: as
// above.
AllGradients attention_backward(const BackwardTensors& x, const Options& options,
                                float dbias_factor, const Gradients& into = {});

// Two indices in kVariantNames: of the variant that attention_forward would run (or its error), and
// of the variant whose kernels would compute the gradients, with the reason where they differ. The
// second is -1 where no kernel could.
std::tuple<int64_t, int64_t, std::string, std::string> attention_check(const Tensor& q,
                                                                       const Tensor& k,
                                                                       const Tensor& v,
                                                                       const Options& options);

}  // namespace flash_ext
