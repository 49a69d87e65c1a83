// Registers the CUDA kernels of the ops that flash_ext/ops/ defines, and names their targets.
#include <torch/csrc/stable/ops.h>

#include "api/attention.h"
#include "api/boxing.h"
#include "api/row_ops.h"

namespace flash_ext {
namespace {

std::tuple<Tensor, Tensor> fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                               const Options& options) {
    return attention_forward(q, k, v, options);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd(const Tensor& dout,
                                                       const std::optional<Tensor>& dlse,
                                                       const Tensor& q, const Tensor& k,
                                                       const Tensor& v, const Tensor& out,
                                                       const Tensor& lse, const Options& options,
                                                       bool need_dbias) {
    auto gradients = attention_backward(dout, dlse, q, k, v, out, lse, options, need_dbias);
    for (Tensor* x : {&std::get<3>(gradients), &std::get<4>(gradients)})
        if (!x->defined()) *x = torch::stable::new_empty(q, {0});
    return gradients;
}

}  // namespace
}  // namespace flash_ext

// What the build compiled for, as FLASH_EXT_CUDA_ARCHS has it. Read by flash_ext/ops/binary.py.
extern "C" __attribute__((visibility("default"))) const char* flash_ext_targets() {
    return FLASH_EXT_TARGETS;
}

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
    using namespace flash_ext;
    m.impl("fwd", boxed<fwd>);
    m.impl("bwd", boxed<bwd>);
    m.impl("fwd_into", boxed<attention_forward_into>);
    m.impl("bwd_into", boxed<attention_backward_into>);
    m.impl("check", boxed<attention_check>);
    m.impl("fp8_quantize", boxed<quantize_rows>);
    m.impl("fp8_token_mean", boxed<mean_of_rows>);
    m.impl("combine_parts", boxed<combine_rows>);
    m.impl("sum_rows", boxed<add_rows>);
    m.impl("copy_rows", boxed<write_rows>);
}
