// SDPA's flash backend on flash_ext: kernels in place of torch's for the aten ops below it, while
// flash_ext/integrations/sdpa.py has switched them on. Calls that flash_ext does not run go to
// torch's kernel, which sdpa.py keeps as the op "flash_ext::original" + the name of aten's op.
//
// Results are what torch's kernels return: out and the gradients with the strides of empty_like,
// lse in float32, and tensors without content where only dropout needs them. out and lse mean the
// same in both packages, so a backward kernel can take the results of either forward kernel.
// Dropout masks differ, so with dropout both passes are torch's.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "api/accept.h"
#include "api/attention.h"
#include "api/boxing.h"

// torch.are_deterministic_algorithms_enabled, which the stable ABI lacks. Weak: without it all
// calls are deterministic.
namespace at {
class __attribute__((visibility("default"))) Context {
 public:
    __attribute__((weak)) bool deterministicAlgorithms() const;
};
__attribute__((weak, visibility("default"))) Context& globalContext();
}  // namespace at

namespace flash_ext {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::detail::from;
using torch::stable::detail::StableLibrary;
using torch::stable::detail::unbox_to_tuple;

// What torch's kernel of the op returns, except the integers.
template <class... Tensors, class... Arguments>
std::tuple<Tensors...> call_original(const char* op, const Arguments&... arguments) {
    StableIValue stack[std::max(sizeof...(Arguments), sizeof...(Tensors))] = {from(arguments)...};
    call_op(op, stack);
    return unbox_to_tuple<Tensors...>(stack);
}

// A kernel in place of torch's. Where it returns nothing the op kOriginal runs.
template <auto kKernel, const char* kOriginal>
struct OrOriginal;

template <class... Tensors, class... Arguments,
          std::optional<std::tuple<Tensors...>> (*kKernel)(Arguments...), const char* kOriginal>
struct OrOriginal<kKernel, kOriginal> {
    static std::tuple<Tensors...> run(Arguments... arguments) {
        if (const auto results = kKernel(arguments...)) return *results;
        return call_original<Tensors...>(kOriginal, arguments...);
    }
};

// --- Layouts ---

// How an op's tensors become (B, S, H, D) or (total, H, D).
using Layout = Tensor(const Tensor&);

Tensor as_it_is(const Tensor& x) { return x; }

// (B, H, S, D) as (B, S, H, D), and back. What has other dimensions is not run.
Tensor transposed(const Tensor& x) {
    if (x.dim() != 4) return x;
    const int64_t sizes[] = {x.size(0), x.size(2), x.size(1), x.size(3)};
    const int64_t strides[] = {x.stride(0), x.stride(2), x.stride(1), x.stride(3)};
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.get(), 4, sizes, strides,
                                                          /*offset_increment=*/0, &handle));
    return Tensor(handle);
}

// The strides of empty_like(x): those of x where it is dense, otherwise the same order without
// gaps. As at::infer_dense_strides, it ignores strides of 0 for the order.
std::vector<int64_t> dense_strides(const Tensor& x) {
    const int dims = static_cast<int>(x.dim());
    std::vector<int> order(dims);  // innermost first
    std::iota(order.rbegin(), order.rend(), 0);
    const auto is_outside = [&](int a, int b) {  // of b: 1, -1, or 0 where it is undetermined
        if (x.stride(a) == 0 || x.stride(b) == 0) return 0;
        if (x.stride(a) != x.stride(b)) return x.stride(a) > x.stride(b) ? 1 : -1;
        return x.size(a) > x.size(b) ? 1 : 0;
    };
    for (int i = 1; i < dims; ++i)
        for (int here = i, before = i - 1; before >= 0; --before) {
            const int comparison = is_outside(order[before], order[here]);
            if (comparison < 0) break;
            if (comparison == 0) continue;
            std::swap(order[before], order[here]);
            here = before;
        }
    std::vector<int64_t> strides(dims);
    int64_t stride = 1;
    bool dense = true;
    for (const int dim : order) {
        strides[dim] = stride;
        dense = dense && (x.size(dim) == 1 || x.stride(dim) == stride);
        stride *= x.size(dim);
    }
    if (dense)
        for (int dim = 0; dim < dims; ++dim) strides[dim] = x.stride(dim);
    return strides;
}

Tensor empty_as(const Tensor& x) {
    return empty_strided(x, {x.sizes().begin(), x.sizes().end()}, dense_strides(x),
                         x.scalar_type());
}

// --- What flash_ext runs ---

// Whether there are kernels for the call, forward and backward: torch's backward could not continue
// this package's forward. That there are is remembered for the device, dtype and head dim of the
// thread's last call; that there are none may have other reasons, and is asked again.
bool has_kernels(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) try {
    static thread_local std::tuple<int64_t, ScalarType, int64_t> known;
    const std::tuple asked(q.get_device_index(), q.scalar_type(), q.size(q.dim() - 1));
    if (asked == known) return true;
    const Options lengths{.cu_seqlens_q = options.cu_seqlens_q,
                          .cu_seqlens_k = options.cu_seqlens_k};
    if (std::get<1>(attention_check(q, k, v, lengths)) < 0) return false;
    known = asked;
    return true;
} catch (const std::exception&) {
    return false;
}

// For q (B, Sq, Hq, D), k and v (B, Sk, Hk, D), or varlen, (total, H, D). For calls that torch does
// not run either, torch reports the error.
bool runs(const Tensor& q, const Tensor& k, const Tensor& v, double dropout_p,
          const Options& options) {
    const std::optional<Sizes> sizes = sizes_of(q, k, v, options);
    if (dropout_p != 0 || !sizes || sizes->head_dim != sizes->head_dim_v) return false;
    if (has_8_bits(k.scalar_type())) return false;  // nor does torch
    for (const Tensor* x : {&q, &k, &v})
        if (x->numel() == 0 || dense_strides(*x).back() != 1) return false;
    return has_kernels(q, k, v, options);
}

// --- Both passes, of every op: nothing where torch's kernel must run ---

// out and lse.
std::optional<std::tuple<Tensor, Tensor>> run_forward(Layout layout, const Tensor& query,
                                                      const Tensor& key, const Tensor& value,
                                                      double dropout_p, const Options& options) {
    const Tensor q = layout(query), k = layout(key), v = layout(value);
    if (!runs(q, k, v, dropout_p, options)) return std::nullopt;
    const Tensor out = empty_as(query);
    return std::tuple(out, std::get<1>(attention_forward(q, k, v, options, layout(out))));
}

std::optional<Gradients> run_backward(Layout layout, const Tensor& grad_out, const Tensor& query,
                                      const Tensor& key, const Tensor& value, const Tensor& out,
                                      const Tensor& lse, double dropout_p, Options options) {
    const Tensor q = layout(query), k = layout(key), v = layout(value);
    if (!grad_out.defined() || !runs(q, k, v, dropout_p, options)) return std::nullopt;
    options.deterministic =
        at::globalContext == nullptr || at::globalContext().deterministicAlgorithms();
    const Gradients into = {empty_as(query), empty_as(key), empty_as(value)};
    const auto& [dq, dk, dv] = into;
    attention_backward({layout(with_contiguous_rows(grad_out)), std::nullopt, q, k, v, layout(out),
                        torch::stable::contiguous(lse)},
                       options, /*need_dbias=*/false, {layout(dq), layout(dk), layout(dv)});
    return into;
}

// --- The other results of the ops ---

// The state of the random generator, an unused tensor and the debug mask, of a call without
// dropout. Nothing reads or writes their content. But calls must not share them: torch.compile's
// CUDA graphs take memory of their own pool for results.
std::tuple<Tensor, Tensor, Tensor> random_state(const Tensor& like) {
    return {empty_strided(like, {2}, {1}, ScalarType::UInt64),
            empty_strided(like, {}, {}, ScalarType::UInt64),
            empty_strided(like, {0}, {1}, like.scalar_type())};
}

// --- _scaled_dot_product_flash_attention, of (B, H, S, D) ---

constexpr char kForward[] = "flash_ext::original_scaled_dot_product_flash_attention";
constexpr char kBackward[] = "flash_ext::original_scaled_dot_product_flash_attention_backward";

std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor> sdpa_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p, bool is_causal,
    bool return_debug_mask, std::optional<double> scale) {
    std::optional<std::tuple<Tensor, Tensor>> results;
    if (!return_debug_mask)
        results = run_forward(transposed, query, key, value, dropout_p,
                              {.scale = scale, .causal = is_causal});
    if (!results) {
        const auto [out, lse, cum_seq_q, cum_seq_k, state, unused, debug_mask] =
            call_original<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
                kForward, query, key, value, dropout_p, is_causal, return_debug_mask, scale);
        return {out,         lse,   cum_seq_q, cum_seq_k, query.size(2),
                key.size(2), state, unused,    debug_mask};
    }
    const auto& [out, lse] = *results;
    const auto [state, unused, debug_mask] = random_state(query);
    const Tensor none;
    return {out, lse, none, none, query.size(2), key.size(2), state, unused, debug_mask};
}

std::optional<Gradients> sdpa_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& lse, const Tensor& /*cum_seq_q*/, const Tensor& /*cum_seq_k*/,
    int64_t /*max_q*/, int64_t /*max_k*/, double dropout_p, bool is_causal,
    const Tensor& /*philox_seed*/, const Tensor& /*philox_offset*/, std::optional<double> scale) {
    return run_backward(transposed, grad_out, query, key, value, out, lse, dropout_p,
                        {.scale = scale, .causal = is_causal});
}

// --- _flash_attention_forward, of (B, S, H, D) or (total, H, D) ---
// torch.nn.attention.varlen.varlen_attn and nested tensors call it.

constexpr char kFlashForward[] = "flash_ext::original_flash_attention_forward";
constexpr char kFlashForwardOut[] =
    "flash_ext::original_flash_attention_forward_no_dropout_inplace";
constexpr char kFlashBackward[] = "flash_ext::original_flash_attention_backward";

Options flash_options(const std::optional<Tensor>& cum_seq_q,
                      const std::optional<Tensor>& cum_seq_k, bool is_causal,
                      std::optional<double> scale, std::optional<int64_t> window_left,
                      std::optional<int64_t> window_right) {
    return {.scale = scale,
            .causal = is_causal,
            .window_left = std::max<int64_t>(window_left.value_or(-1), -1),
            .window_right = std::max<int64_t>(window_right.value_or(-1), -1),
            .cu_seqlens_q = cum_seq_q,
            .cu_seqlens_k = cum_seq_k};
}

std::optional<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>> flash_forward(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& cum_seq_q, const std::optional<Tensor>& cum_seq_k,
    int64_t /*max_q*/, int64_t /*max_k*/, double dropout_p, bool is_causal, bool return_debug_mask,
    std::optional<double> scale, std::optional<int64_t> window_left,
    std::optional<int64_t> window_right, const std::optional<Tensor>& seqused_k,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& block_table,
    std::optional<int64_t> /*num_splits*/) {
    Options options =
        flash_options(cum_seq_q, cum_seq_k, is_causal, scale, window_left, window_right);
    options.seqused_k = seqused_k;
    if (return_debug_mask || alibi_slopes || block_table) return std::nullopt;
    const auto results = run_forward(as_it_is, query, key, value, dropout_p, options);
    if (!results) return std::nullopt;
    return std::tuple_cat(*results, random_state(query));
}

// Before torch 2.13 the op has no block_table and num_splits, its last two arguments of 17 (sdpa.py
// has compared the schemas). num_splits asks that a sequence's result does not depend on the
// others, which it never does here.
void flash_forward_boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
    StableIValue arguments[17];
    std::fill(std::copy_n(stack, inputs, arguments), std::end(arguments), from(std::nullopt));
    boxed<OrOriginal<flash_forward, kFlashForward>::run>(arguments, 17, outputs);
    std::copy_n(arguments, outputs, stack);
}

// The same op, which writes out and returns lse.
template <auto kKernel>
struct WithOut;

template <class Results, class... Arguments, std::optional<Results> (*kKernel)(Arguments...)>
struct WithOut<kKernel> {
    static std::optional<std::tuple<Tensor>> run(const Tensor& out, Arguments... arguments) {
        const auto results = kKernel(arguments...);
        if (!results) return std::nullopt;
        Tensor into = out;
        torch::stable::copy_(into, std::get<0>(*results));
        return std::get<1>(*results);
    }
};

std::optional<Gradients> flash_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& lse, const Tensor& cum_seq_q, const Tensor& cum_seq_k,
    int64_t /*max_q*/, int64_t /*max_k*/, double dropout_p, bool is_causal,
    const Tensor& /*rng_state*/, const Tensor& /*unused*/, std::optional<double> scale,
    std::optional<int64_t> window_left, std::optional<int64_t> window_right) {
    return run_backward(as_it_is, grad_out, query, key, value, out, lse, dropout_p,
                        flash_options(if_defined(cum_seq_q), if_defined(cum_seq_k), is_causal,
                                      scale, window_left, window_right));
}

// Replaces torch's kernels by those above, or restores torch's. `with_out`: torch has the op that
// writes out.
void sdpa_override(bool on, bool with_out) {
    static std::unique_ptr<StableLibrary> kernels;
    kernels.reset();
    if (!on) return;
    kernels = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", DEVICE_NAME,
                                              __FILE__, __LINE__);
    kernels->impl("_scaled_dot_product_flash_attention", boxed<sdpa_forward>);
    kernels->impl("_scaled_dot_product_flash_attention_backward",
                  boxed<OrOriginal<sdpa_backward, kBackward>::run>);
    kernels->impl("_flash_attention_forward", &flash_forward_boxed);
    kernels->impl("_flash_attention_backward",
                  boxed<OrOriginal<flash_backward, kFlashBackward>::run>);
    if (with_out)
        kernels->impl("_flash_attention_forward_no_dropout_inplace",
                      boxed<OrOriginal<WithOut<flash_forward>::run, kFlashForwardOut>::run>);
}

}  // namespace
}  // namespace flash_ext

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CompositeExplicitAutograd, m) {
    m.impl("sdpa_override_" DEVICE_NAME, flash_ext::boxed<flash_ext::sdpa_override>);
}
