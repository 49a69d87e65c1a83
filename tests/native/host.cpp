// For tests without a GPU: csrc's three functions (attention.h) by way of flash_ext's own CPU
// kernels, so that what surrounds them on the host, node.cpp and sdpa.cpp, runs on CPU tensors.
#include <torch/csrc/stable/ops.h>

#include <stdexcept>
#include <vector>

#include "api/accept.h"
#include "api/accept_append_kv.h"
#include "api/accept_mask.h"
#include "api/attention.h"
#include "api/boxing.h"

namespace flash_ext {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;
using torch::stable::detail::unbox_to_tuple;

template <class T>
void append(std::vector<StableIValue>& stack, T x) {
    std::apply([&](auto&... field) { (stack.push_back(from(field)), ...); }, x.fields());
}

Tensor times(const Tensor& x, double factor) {
    Tensor number = torch::stable::new_empty(x, {}, torch::headeronly::ScalarType::Float);
    StableIValue stack[] = {from(x), from(torch::stable::fill_(number, factor))};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mul", "Tensor", stack, TORCH_ABI_VERSION));
    return to<Tensor>(stack[0]);
}

// There is no memory for calls with so many queries, of tests/test_node.py.
constexpr int64_t kForwardFails = 99, kBackwardFails = 98;

void allocate_results(const Tensor& q, int64_t fails) {
    if (q.dim() == 4 && q.size(1) == fails) throw_out_of_memory("CUDA out of memory. 1 of 2 GiB");
}

// For tests/test_accept.py: the words with which csrc refuses the arguments of an op; "" if it
// accepts them.
std::string words_of(bool accepted, const std::string& why) {
    return accepted ? "" : why.empty() ? "refused without words" : why;
}
std::string refused_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
    return words_of(accept_forward(q, k, v, options).has_value(),
                    refusal("fwd", q, k, v, options, /*reads=*/false));
}
std::string refused_bwd(const BackwardTensors& x, const Options& options) {
    return words_of(accept_backward(x, options).has_value(), refusal("bwd", x, options));
}
std::string refused_append_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
                              const Tensor& v, const Tensor& cache_seqlens,
                              const AppendOptions& options) {
    return words_of(accepts_append(k_cache, v_cache, k, v, cache_seqlens, options),
                    refusal("append_kv", k_cache, v_cache, k, v, cache_seqlens, options));
}

std::string refused_mask_from_dense(const Tensor& mask) {
    return words_of(accept_mask_from_dense(mask).has_value(), refusal("mask_from_dense", mask));
}
std::string refused_mask_from_intervals(const Tensor& intervals, int64_t seqlen_k) {
    return words_of(accept_mask_from_intervals(intervals, seqlen_k).has_value(),
                    refusal("mask_from_intervals", intervals, seqlen_k));
}
std::string refused_mask_from_documents(const Tensor& first_keys, int64_t seqlen_q,
                                        int64_t seqlen_k, const DocumentOptions& options) {
    return words_of(accept_mask_from_documents(first_keys, seqlen_q, seqlen_k, options).has_value(),
                    refusal("mask_from_documents", first_keys, seqlen_q, seqlen_k, options));
}
std::string refused_mask_from_blocks(const Tensor& kinds, const Tensor& intervals) {
    return words_of(accept_mask_from_blocks(kinds, intervals).has_value(),
                    refusal("mask_from_blocks", kinds, intervals));
}
std::string refused_mask_from_kinds(const Tensor& kinds) {
    return words_of(accept_mask_from_kinds(kinds).has_value(), refusal("mask_from_kinds", kinds));
}

}  // namespace

Tensor empty_strided(const Tensor& x, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& strides, torch::headeronly::ScalarType dtype) {
    AtenTensorHandle handle = nullptr;
    aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                             to<int32_t>(from(dtype)), aoti_torch_device_type_cpu(),
                             x.get_device_index(), &handle);
    return Tensor(handle);
}

std::tuple<Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Options& options, const Tensor& into) {
    allocate_results(q, kForwardFails);
    std::vector<StableIValue> stack{from(q), from(k), from(v)};
    append(stack, options);
    call_op("flash_ext::fwd", stack.data());
    auto [out, lse] = unbox_to_tuple<Tensor, Tensor>(stack.data());
    if (!into.defined()) return {out, lse};
    Tensor given = into;
    return {torch::stable::copy_(given, out), lse};
}

AllGradients attention_backward(const BackwardTensors& x, const Options& options,
                                float dbias_factor, const Gradients& into) {
    allocate_results(x.q, kBackwardFails);
    std::vector<StableIValue> stack;
    append(stack, x);
    append(stack, options);
    stack.push_back(from(dbias_factor != 0));
    call_op("flash_ext::bwd", stack.data());
    auto [dq, dk, dv, dbias, dsink] =
        unbox_to_tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(stack.data());
    auto [given_dq, given_dk, given_dv] = into;
    if (given_dq.defined()) {
        torch::stable::copy_(given_dq, dq);
        torch::stable::copy_(given_dk, dk);
        torch::stable::copy_(given_dv, dv);
    }
    return {dq, dk, dv, dbias.dim() == 4 ? times(dbias, dbias_factor) : Tensor(), Tensor()};
}

std::tuple<int64_t, int64_t, std::string, std::string> attention_check(const Tensor& q,
                                                                       const Tensor& /*k*/,
                                                                       const Tensor& /*v*/,
                                                                       const Options& /*options*/) {
    const int64_t dim = q.size(q.dim() - 1);
    if (dim > 256 || q.scalar_type() == torch::headeronly::ScalarType::Long)
        throw std::invalid_argument("flash_ext: no kernel");
    constexpr int64_t kOddLength = 77, kNoBackward = 248;  // of tests/test_sdpa.py
    if (q.dim() == 4 && q.size(1) == kOddLength)
        throw std::invalid_argument("flash_ext: no kernel for this call");
    return {0, dim == kNoBackward ? -1 : 0, "", ""};
}

}  // namespace flash_ext

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CPU, m) {
    m.impl("refused_fwd", flash_ext::boxed<flash_ext::refused_fwd>);
    m.impl("refused_bwd", flash_ext::boxed<flash_ext::refused_bwd>);
    m.impl("refused_append_kv", flash_ext::boxed<flash_ext::refused_append_kv>);
    m.impl("refused_mask_from_dense", flash_ext::boxed<flash_ext::refused_mask_from_dense>);
    m.impl("refused_mask_from_intervals", flash_ext::boxed<flash_ext::refused_mask_from_intervals>);
    m.impl("refused_mask_from_documents", flash_ext::boxed<flash_ext::refused_mask_from_documents>);
    m.impl("refused_mask_from_blocks", flash_ext::boxed<flash_ext::refused_mask_from_blocks>);
    m.impl("refused_mask_from_kinds", flash_ext::boxed<flash_ext::refused_mask_from_kinds>);
}
