// Checks of the tensors that attention is written into. The CPU kernels have the same in
// flash_ext/cpu/into.py.
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

#include "api/attention.h"
#include "api/check.h"

namespace flash_ext {
namespace {

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

}  // namespace

Tensor attention_forward_into(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Options& options) {
    require_plain(q, options);
    require_into("out", out, q, v.dim() > 0 ? v.size(v.dim() - 1) : 0);
    return std::get<1>(attention_forward(q, k, v, options, out));
}

Tensor attention_backward_into(const Tensor& dq, const Tensor& dk, const Tensor& dv,
                               const Tensor& dout, const std::optional<Tensor>& dlse,
                               const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                               const Tensor& lse, const Options& options) {
    require_plain(q, options);
    const std::tuple<const char*, const Tensor*, const Tensor*> results[] = {
        {"dq", &dq, &q}, {"dk", &dk, &k}, {"dv", &dv, &v}};
    for (const auto& [name, into, like] : results)
        require_into(name, *into, *like, like->dim() > 0 ? like->size(like->dim() - 1) : 0);
    const auto gradients = attention_backward(dout, dlse, q, k, v, out, lse, options,
                                              /*need_dbias=*/false, {dq, dk, dv});
    const Tensor& dsink = std::get<4>(gradients);
    return dsink.defined() ? dsink : torch::stable::new_empty(q, {0});
}

}  // namespace flash_ext
