// An autograd node in C++. The stable ABI has no way to write one, but ATen has an op for the
// kernels of other packages, _scaled_dot_product_fused_attention_overrideable, with a generated
// node; on CUDA no other package has kernels for it. The node passes tensors unchanged, so here
// they have flash_ext's layout. flash_ext/ops/node.py says which calls go this way.
//
// The op has no arguments for most options. `node_options_CUDA` stores the options of the next call
// on the same thread, which refers to them by its dropout_p. The forward kernel gives them to the
// node as outputs that have no other use, and the node gives them to the backward kernel.
#include <algorithm>
#include <bit>
#include <exception>
#include <stdexcept>
#include <utility>
#include <vector>

#include "api/accept.h"
#include "api/attention.h"
#include "api/boxing.h"

namespace flash_ext {
namespace {

// The options of the next call, and the dropout_p that identifies it.
struct Announced {
    double number = 0;
    Options options;
};
thread_local Announced announced;

double node_options(const Options& options) {
    static thread_local double calls = 0;  // exact to 2^53
    announced = {++calls, options};
    return calls;
}

// Options that are numbers, in one of the node's integers. 0 is the default of each.
struct NodeBits {
    uint64_t window_left : 30;  // these three plus 1
    uint64_t window_right : 30;
    uint64_t variant : 2;
    uint64_t deterministic : 1;
    uint64_t batch_invariant : 1;
};
static_assert(kVariants < 4);

int64_t pack(const Options& options) {
    // A window longer than any sequence is unlimited.
    const auto window = [](int64_t side) -> uint64_t {
        return std::min<int64_t>(side, (1 << 30) - 2) + 1;
    };
    const std::optional<Variant> variant = variant_of(options);
    return std::bit_cast<int64_t>(NodeBits{window(options.window_left),
                                           window(options.window_right),
                                           variant ? static_cast<uint64_t>(*variant) + 1 : 0,
                                           options.deterministic, options.batch_invariant});
}

void unpack(int64_t integers, Options& options) {
    const auto bits = std::bit_cast<NodeBits>(integers);
    options.window_left = static_cast<int64_t>(bits.window_left) - 1;
    options.window_right = static_cast<int64_t>(bits.window_right) - 1;
    if (bits.variant > 0) options.variant = kVariantNames[bits.variant - 1];
    options.deterministic = bits.deterministic;
    options.batch_invariant = bits.batch_invariant;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor> node_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
    double number, bool causal, bool /*return_debug_mask*/, std::optional<double> scale) {
    if (has_8_bits(k.scalar_type()))
        throw std::runtime_error("flash_ext: no variant has a backward for 8-bit inputs");
    Options options;
    if (number != 0) {
        if (number != announced.number)
            throw std::runtime_error(
                "flash_ext: aten's overrideable attention has no dropout_p here");
        options = std::exchange(announced, {}).options;
    }
    options.scale = scale;
    options.causal = causal;
    options.bias = bias;
    const auto [out, lse] = attention_forward(q, k, v, options);
    const Tensor none;  // undefined: the node does not save it
    return {out,
            lse,
            options.cu_seqlens_q.value_or(none),
            options.cu_seqlens_k.value_or(none),
            pack(options),
            std::bit_cast<int64_t>(options.softcap),
            options.alibi_slopes.value_or(none),
            options.seqused_k.value_or(none),
            none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> node_bwd(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
    const std::vector<bool>& grad_input_mask, const Tensor& out, const Tensor& lse,
    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t integers, int64_t softcap,
    double /*number*/, bool causal, const Tensor& alibi_slopes, const Tensor& seqused_k,
    std::optional<double> scale) try {
    Options options{.scale = scale,
                    .causal = causal,
                    .softcap = std::bit_cast<double>(softcap),
                    .alibi_slopes = if_defined(alibi_slopes),
                    .bias = if_defined(bias),
                    .cu_seqlens_q = if_defined(cu_seqlens_q),
                    .cu_seqlens_k = if_defined(cu_seqlens_k),
                    .seqused_k = if_defined(seqused_k)};
    unpack(integers, options);
    const auto [dq, dk, dv, dbias, dsink] =
        attention_backward({with_contiguous_rows(dout), std::nullopt, q, k, v, out, lse}, options,
                           /*dbias_factor=*/grad_input_mask[3] ? 1 : 0);
    return {dq, dk, dv, dbias};
} catch (...) {
    thrown = std::current_exception();
    throw;
}

// What autograd sees of ATen's backward op. Where a graph of the gradients is needed, Python
// records it, by a node that says that it has no gradient.
void node_bwd_autograd(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
    call_op(
        aoti_torch_grad_mode_is_enabled() ? "flash_ext::node_bwd_recorded" : "flash_ext::node_bwd",
        stack);
}

}  // namespace

void call_op(const char* name, StableIValue* stack) {
    thrown = nullptr;
    if (torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION) == TORCH_SUCCESS) return;
    if (thrown) std::rethrow_exception(std::exchange(thrown, nullptr));
    throw_failure(std::string("flash_ext: ") + name +
                  " failed; this torch, before 2.13, does not tell why");
}

}  // namespace flash_ext

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CompositeImplicitAutograd, m) {
    m.impl("node_options_" DEVICE_NAME, flash_ext::boxed<flash_ext::node_options>);
}

STABLE_TORCH_LIBRARY_IMPL(flash_ext, FLASH_EXT_DEVICE, m) {
    m.impl("node_bwd", flash_ext::boxed<flash_ext::node_bwd>);
}

STABLE_TORCH_LIBRARY_IMPL(aten, FLASH_EXT_DEVICE, m) {
    m.impl("_scaled_dot_product_fused_attention_overrideable",
           flash_ext::boxed<flash_ext::node_fwd>);
    m.impl("_scaled_dot_product_fused_attention_overrideable_backward",
           flash_ext::boxed<flash_ext::node_bwd>);
}

STABLE_TORCH_LIBRARY_IMPL(aten, FLASH_EXT_AUTOGRAD, m) {
    m.impl("_scaled_dot_product_fused_attention_overrideable_backward",
           &flash_ext::node_bwd_autograd);
}
