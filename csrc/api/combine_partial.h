// Attention over some keys added to the results so far. See flash_ext/ops/combine_partial.py for
// the op's contract.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "api/attention.h"

namespace flash_ext {

// out and lse, in place; with `out_before` the results so far are there and not in out.
void add_partial(const Tensor& out, const Tensor& lse, const Tensor& o_partial,
                 const Tensor& lse_partial, const std::optional<Tensor>& out_before);

}  // namespace flash_ext
