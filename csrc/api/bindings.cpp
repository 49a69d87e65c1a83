// The ops of attention that flash_ext/ops/ defines, and the targets of the kernels. The CPU kernels
// have the same checks of tensors that results are written into, in flash_ext/cpu/into.py.
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

#include "api/attention.h"
#include "api/boxing.h"
#include "api/check.h"

namespace flash_ext {
namespace {

Tensor or_empty(const Tensor& x, const Tensor& q) {
    return x.defined() ? x : torch::stable::new_empty(q, {0});
}

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
    const auto [dq, dk, dv, dbias, dsink] =
        attention_backward(dout, dlse, q, k, v, out, lse, options, need_dbias);
    return {dq, dk, dv, or_empty(dbias, q), or_empty(dsink, q)};
}

void require_into(const char* argument, const Tensor& into, const Tensor& like, int64_t last) {
    std::vector<int64_t> shape(like.sizes().begin(), like.sizes().end());
    if (!shape.empty()) shape.back() = last;
    require_shape(argument, into, shape, "its result's");
    require_like(argument, into, like);
    if (into.numel() == 0 || into.dim() > 4) return;   // which check_forward refuses
    bool fits = operand(argument, into).is_aligned();  // as the kernels' widest stores want it
    for (int64_t dim = 0; dim + 1 < into.dim(); ++dim)
        fits = fits && (into.size(dim) == 1 || into.stride(dim) != 0);
    if (!fits)
        refuse(argument, "of contiguous rows of their own that begin at multiples of 16 bytes",
               text("strides ", shape_text(into.strides())));
}

// Without these `out` has q's dtype, and all gradients have a place.
void require_plain(const Tensor& q, const Options& options) {
    if (has_8_bits(q.scalar_type()))
        refuse("q", "float16 or bfloat16 where results are written into tensors",
               dtype_name(q.scalar_type()));
    if (options.bias) refuse("bias", "None where results are written into tensors", "a tensor");
}

// fwd into `out`. Returns lse.
Tensor fwd_into(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v,
                const Options& options) {
    require_plain(q, options);
    require_into("out", out, q, v.dim() > 0 ? v.size(v.dim() - 1) : 0);
    return std::get<1>(attention_forward(q, k, v, options, out));
}

// bwd into dq, dk and dv. Returns dsink, or a tensor of shape (0).
Tensor bwd_into(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& k,
                const Tensor& v, const Tensor& out, const Tensor& lse, const Options& options) {
    require_plain(q, options);
    const std::tuple<const char*, const Tensor*, const Tensor*> results[] = {
        {"dq", &dq, &q}, {"dk", &dk, &k}, {"dv", &dv, &v}};
    for (const auto& [name, into, like] : results)
        require_into(name, *into, *like, like->dim() > 0 ? like->size(like->dim() - 1) : 0);
    const auto gradients = attention_backward(dout, dlse, q, k, v, out, lse, options,
                                              /*need_dbias=*/false, {dq, dk, dv});
    return or_empty(std::get<4>(gradients), q);
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
    m.impl("fwd_into", boxed<fwd_into>);
    m.impl("bwd_into", boxed<bwd_into>);
    m.impl("check", boxed<attention_check>);
}
