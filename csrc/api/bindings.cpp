// Registers the CUDA kernels of the ops that flash_ext/ops/ defines, and names their targets.
#include <torch/csrc/stable/ops.h>

#include "api/attention.h"
#include "api/boxing.h"
#include "api/into.h"
#include "api/quantize.h"
#include "api/sum_rows.h"

namespace flash_ext {
namespace {

std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, OPTION_PARAMETERS) {
    return attention_forward(q, k, v, OPTIONS);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd(Tensor dout, std::optional<Tensor> dlse,
                                                       Tensor q, Tensor k, Tensor v, Tensor out,
                                                       Tensor lse, OPTION_PARAMETERS,
                                                       bool need_dbias) {
    auto gradients = attention_backward(dout, dlse, q, k, v, out, lse, OPTIONS, need_dbias);
    for (Tensor* x : {&std::get<3>(gradients), &std::get<4>(gradients)})
        if (!x->defined()) *x = torch::stable::new_empty(q, {0});
    return gradients;
}

Tensor fwd_into(Tensor out, Tensor q, Tensor k, Tensor v, OPTION_PARAMETERS) {
    return attention_forward_into(out, q, k, v, OPTIONS);
}

Tensor bwd_into(Tensor dq, Tensor dk, Tensor dv, Tensor dout, std::optional<Tensor> dlse, Tensor q,
                Tensor k, Tensor v, Tensor out, Tensor lse, OPTION_PARAMETERS) {
    return attention_backward_into(dq, dk, dv, dout, dlse, q, k, v, out, lse, OPTIONS);
}

std::tuple<int64_t, int64_t, std::string> check(Tensor q, Tensor k, Tensor v, OPTION_PARAMETERS) {
    return attention_check(q, k, v, OPTIONS);
}

std::tuple<Tensor, Tensor> fp8_quantize(Tensor x, Text scales, std::optional<Tensor> signs,
                                        std::optional<Tensor> mean,
                                        std::optional<Tensor> cu_seqlens,
                                        std::optional<Tensor> seqused, int64_t blocks,
                                        std::optional<torch::headeronly::ScalarType> dtype) {
    return quantize_rows(x, scales.value, {signs, mean, cu_seqlens, seqused, blocks, dtype});
}

Tensor fp8_token_mean(Tensor x, std::optional<Tensor> cu_seqlens, std::optional<Tensor> seqused) {
    return mean_of_rows(x, {.cu_seqlens = cu_seqlens, .seqused = seqused});
}

void combine_parts(Tensor out, Tensor lse, std::vector<Tensor> parts, std::vector<Tensor> lse_parts,
                   std::vector<int64_t> firsts) {
    combine_rows(out, lse, parts, lse_parts, firsts);
}

void sum_rows(Tensor out, std::vector<Tensor> parts, std::vector<int64_t> firsts,
              std::optional<Tensor> index) {
    add_rows(out, parts, firsts, index);
}

void copy_rows(std::vector<Tensor> outs, Tensor x) { write_rows(outs, x); }

}  // namespace
}  // namespace flash_ext

// What the build compiled for, as FLASH_EXT_CUDA_ARCHS has it. Read by flash_ext/ops/binary.py.
extern "C" __attribute__((visibility("default"))) const char* flash_ext_targets() {
    return FLASH_EXT_TARGETS;
}

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
    m.impl("fwd", TORCH_BOX(&flash_ext::fwd));
    m.impl("bwd", TORCH_BOX(&flash_ext::bwd));
    m.impl("fwd_into", TORCH_BOX(&flash_ext::fwd_into));
    m.impl("bwd_into", TORCH_BOX(&flash_ext::bwd_into));
    m.impl("check", TORCH_BOX(&flash_ext::check));
    m.impl("fp8_quantize", TORCH_BOX(&flash_ext::fp8_quantize));
    m.impl("fp8_token_mean", TORCH_BOX(&flash_ext::fp8_token_mean));
    m.impl("combine_parts", TORCH_BOX(&flash_ext::combine_parts));
    m.impl("sum_rows", TORCH_BOX(&flash_ext::sum_rows));
    m.impl("copy_rows", TORCH_BOX(&flash_ext::copy_rows));
}
