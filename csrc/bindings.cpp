// Registers the CUDA kernels of the ops that flash_ext/ops.py defines, and names their targets.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <utility>
#include <vector>

#include "attention.h"
#include "check.h"

// The options as parameters, and gathered: the dispatcher passes them one by one.
#define OPTION_PARAMETERS                                                                      \
    std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right,       \
        double softcap, std::optional<Tensor> alibi_slopes, std::optional<Tensor> bias,        \
        std::optional<Tensor> sink, std::optional<Tensor> cu_seqlens_q,                        \
        std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> seqused_k, double dropout_p, \
        std::optional<Tensor> rng_state, bool deterministic, Text variant
#define OPTIONS                                                                                 \
    Options {                                                                                   \
        scale, causal, window_left, window_right, softcap, std::move(alibi_slopes),             \
            std::move(bias), std::move(sink), std::move(cu_seqlens_q), std::move(cu_seqlens_k), \
            std::move(seqused_k), dropout_p, std::move(rng_state), deterministic,               \
            std::move(variant.value)                                                            \
    }

namespace flash_ext {

// A str of a schema. As a std::string torch 2.11 to 2.13 would not free it: 48 bytes a call.
struct Text {
    std::string value;
};

}  // namespace flash_ext

template <>
struct torch::stable::detail::ToImpl<flash_ext::Text> {
    static flash_ext::Text call(StableIValue value, uint64_t /*version*/, bool /*internal*/) {
        const StringHandle handle = to<StringHandle>(value);
        const char* characters = "";
        torch_string_c_str(handle, &characters);
        flash_ext::Text text{characters};
        torch_delete_string(handle);
        return text;
    }
};

namespace flash_ext {
namespace {

std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, OPTION_PARAMETERS) {
    return attention_forward(q, k, v, OPTIONS);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd(Tensor dout, std::optional<Tensor> dlse,
                                                       Tensor q, Tensor k, Tensor v, Tensor out,
                                                       Tensor lse, OPTION_PARAMETERS,
                                                       bool need_dbias) {
    auto gradients = attention_backward(dout, dlse, q, k, v, out, lse, OPTIONS, need_dbias);
    for (Tensor* x : {&std::get<3>(gradients), &std::get<4>(gradients)})
        if (!x->defined()) *x = torch::stable::new_empty(q, {0});
    return gradients;
}

std::tuple<int64_t, int64_t, std::string> check(Tensor q, Tensor k, Tensor v, OPTION_PARAMETERS) {
    return attention_check(q, k, v, OPTIONS);
}

// ATen's scaled_dot_product_fused_attention_overrideable, an op for the kernels of other packages.
// On CUDA it has none. It comes with an autograd node in C++, which the stable ABI has no way to
// write, and the node only passes tensors on: here they have flash_ext's layout. `ops.forward`
// calls it.
std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor> aten_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& attn_bias,
    double dropout_p, bool is_causal, bool return_debug_mask, std::optional<double> scale) {
    if (attn_bias || dropout_p != 0 || return_debug_mask)
        fail("aten's overrideable attention has no attn_bias, dropout_p or debug mask here");
    const auto [out, lse] = attention_forward(q, k, v, {.scale = scale, .causal = is_causal});
    const Tensor undefined;  // what only other kernels need: the node saves nothing for it
    return {out, lse, undefined, undefined, 0, 0, undefined, undefined, undefined};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> aten_bwd(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& /*attn_bias*/, const std::vector<bool>& /*grad_input_mask*/, const Tensor& out,
    const Tensor& lse, const Tensor& /*cum_seq_q*/, const Tensor& /*cum_seq_k*/, int64_t /*max_q*/,
    int64_t /*max_k*/, double /*dropout_p*/, bool is_causal, const Tensor& /*philox_seed*/,
    const Tensor& /*philox_offset*/, std::optional<double> scale) {
    const bool rows_contiguous = dout.stride(dout.dim() - 1) == 1;
    const auto [dq, dk, dv, dbias, dsink] = attention_backward(
        rows_contiguous ? dout : torch::stable::contiguous(dout), std::nullopt, q, k, v, out, lse,
        {.scale = scale, .causal = is_causal}, /*need_dbias=*/false);
    return {dq, dk, dv, Tensor()};
}

}  // namespace
}  // namespace flash_ext

// What the build compiled for, as FLASH_EXT_CUDA_ARCHS has it. Read by flash_ext/ops.py.
extern "C" __attribute__((visibility("default"))) const char* flash_ext_targets() {
    return FLASH_EXT_TARGETS;
}

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
    m.impl("fwd", TORCH_BOX(&flash_ext::fwd));
    m.impl("bwd", TORCH_BOX(&flash_ext::bwd));
    m.impl("check", TORCH_BOX(&flash_ext::check));
}

STABLE_TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_BOX(&flash_ext::aten_fwd));
    m.impl("_scaled_dot_product_fused_attention_overrideable_backward",
           TORCH_BOX(&flash_ext::aten_bwd));
}
