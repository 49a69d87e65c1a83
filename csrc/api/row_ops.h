// The ops beside attention, without their registration: quantization to FP8, and sums of rows. See
// flash_ext/ops/quantize.py and sum_rows.py for their contracts.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "api/attention.h"

namespace flash_ext {

struct QuantizeOptions {
    std::optional<Tensor> signs;
    std::optional<Tensor> mean;
    std::optional<Tensor> cu_seqlens;
    std::optional<Tensor> seqused;
    int64_t blocks = 0;  // of descale, for block scales
    std::optional<torch::headeronly::ScalarType> dtype;

    auto fields() { return std::tie(signs, mean, cu_seqlens, seqused, blocks, dtype); }
};

// x_8bit and descale.
std::tuple<Tensor, Tensor> quantize_rows(const Tensor& x, const std::string& scales,
                                         const QuantizeOptions& options);

// (B, H, D), float32.
Tensor mean_of_rows(const Tensor& x, const std::optional<Tensor>& cu_seqlens,
                    const std::optional<Tensor>& seqused);

void add_rows(const Tensor& out, const std::vector<Tensor>& parts,
              const std::vector<int64_t>& firsts, const std::optional<Tensor>& index);

// Every tensor of `outs` becomes x; they may be in other GPUs' memory.
void write_rows(const std::vector<Tensor>& outs, const Tensor& x);

void combine_rows(const Tensor& out, const Tensor& lse, const std::vector<Tensor>& parts,
                  const std::vector<Tensor>& lse_parts, const std::vector<int64_t>& firsts);

}  // namespace flash_ext
