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

// Every tensor of `outs` becomes x; they may be in other GPUs' memory.
void write_rows(const std::vector<Tensor>& outs, const Tensor& x);

void combine_rows(const Tensor& out, const Tensor& lse, const std::vector<Tensor>& parts,
                  const std::vector<Tensor>& lse_parts, const std::vector<int64_t>& firsts);

}  // namespace flash_ext
