// Quantization to FP8, without the registration of its ops. See flash_ext/ops/quantize.py for their
// contract.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

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

}  // namespace flash_ext
