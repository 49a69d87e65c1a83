// Registers the CUDA kernels of the ops that flash_ext/ops.py defines, and names their targets.
#include <torch/csrc/stable/library.h>

#include <utility>

#include "attention.h"

// The options as parameters, and gathered: the dispatcher passes them one by one.
#define OPTION_PARAMETERS                                                                      \
    std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right,       \
        double softcap, std::optional<Tensor> alibi_slopes, std::optional<Tensor> bias,        \
        std::optional<Tensor> sink, std::optional<Tensor> cu_seqlens_q,                        \
        std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> seqused_k, double dropout_p, \
        std::optional<Tensor> rng_state, bool deterministic, std::string variant
#define OPTIONS                                                                                 \
    Options {                                                                                   \
        scale, causal, window_left, window_right, softcap, std::move(alibi_slopes),             \
            std::move(bias), std::move(sink), std::move(cu_seqlens_q), std::move(cu_seqlens_k), \
            std::move(seqused_k), dropout_p, std::move(rng_state), deterministic,               \
            std::move(variant)                                                                  \
    }

namespace flash_ext {
namespace {

std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, OPTION_PARAMETERS) {
    return attention_forward(q, k, v, OPTIONS);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd(Tensor dout, std::optional<Tensor> dlse,
                                                       Tensor q, Tensor k, Tensor v, Tensor out,
                                                       Tensor lse, OPTION_PARAMETERS,
                                                       bool need_dbias) {
    return attention_backward(dout, dlse, q, k, v, out, lse, OPTIONS, need_dbias);
}

std::tuple<int64_t, int64_t, std::string> check(Tensor q, Tensor k, Tensor v, OPTION_PARAMETERS) {
    return attention_check(q, k, v, OPTIONS);
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
