// The ops of attention that flash_ext/ops/ defines, and the targets of the kernels.
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

// May a result like `like`, but for the last size, be written into this tensor?
bool accepts_into(const Tensor& into, const Tensor& like, const Tensor& last) {
    if (like.dim() < 3 || like.dim() > 4 || last.dim() == 0) return true;  // refused by itself
    std::vector<int64_t> shape(like.sizes().begin(), like.sizes().end());
    shape.back() = last.size(last.dim() - 1);
    if (!has_shape(into, shape) || into.scalar_type() != like.scalar_type() ||
        into.device() != like.device() || !has_contiguous_rows(into))
        return false;
    if (into.numel() == 0) return true;
    bool fits = operand("", into).is_aligned();  // as the kernels' widest stores want it
    for (int64_t dim = 0; dim + 1 < into.dim(); ++dim)
        fits = fits && (into.size(dim) == 1 || into.stride(dim) != 0);
    return fits;
}

// Otherwise `out` has another dtype than q, or a gradient has no place.
bool is_plain_call(const Tensor& q, const Options& options) {
    return !has_8_bits(q.scalar_type()) && !options.bias;
}

// fwd into `out`. Returns lse.
Tensor fwd_into(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v,
                const Options& options) {
    if (!is_plain_call(q, options) || !accepts_into(out, q, v))
        refuse("fwd_into", out, q, k, v, options);
    return std::get<1>(attention_forward(q, k, v, options, out));
}

// bwd into dq, dk and dv. Returns dsink, or a tensor of shape (0).
Tensor bwd_into(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dout,
                const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& k,
                const Tensor& v, const Tensor& out, const Tensor& lse, const Options& options) {
    if (!is_plain_call(q, options) || !accepts_into(dq, q, q) || !accepts_into(dk, k, k) ||
        !accepts_into(dv, v, v))
        refuse("bwd_into", dq, dk, dv, dout, dlse, q, k, v, out, lse, options);
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
