// Sums of rows, and of attention over some keys each. See flash_ext/ops/sum_rows.py for the ops'
// contracts.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "api/attention.h"

namespace flash_ext {

void add_rows(const Tensor& out, const std::vector<Tensor>& parts,
              const std::vector<int64_t>& firsts, const std::optional<Tensor>& index);

void combine_rows(const Tensor& out, const Tensor& lse, const std::vector<Tensor>& parts,
                  const std::vector<Tensor>& lse_parts, const std::vector<int64_t>& firsts);

// out and lse, in place; with `out_before` the results so far are there and not in out.
void add_partial(const Tensor& out, const Tensor& lse, const Tensor& o_partial,
                 const Tensor& lse_partial, const std::optional<Tensor>& out_before);

}  // namespace flash_ext
