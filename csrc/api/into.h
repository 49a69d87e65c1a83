// The ops that write into tensors of the caller.
#pragma once

#include "api/attention.h"

namespace flash_ext {

// attention_forward into `out`. Returns lse.
Tensor attention_forward_into(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Options& options);

// attention_backward into dq, dk and dv. Returns dsink, or a tensor of shape (0).
Tensor attention_backward_into(const Tensor& dq, const Tensor& dk, const Tensor& dv,
                               const Tensor& dout, const std::optional<Tensor>& dlse,
                               const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                               const Tensor& lse, const Options& options);

}  // namespace flash_ext
