// SDPA's flash and efficient backends on flash_ext: kernels in place of torch's for the aten ops
// below them, while flash_ext/integrations/sdpa.py has switched them on. Calls that flash_ext does
// not run go to torch's kernel, which sdpa.py keeps as the op "flash_ext::original" + the name of
// aten's op.
//
// Results are what torch's kernels return: out and the gradients with their strides, lse in
// float32, and tensors without content where only dropout needs them. out and lse mean the same in
// both packages, so a backward kernel can take the results of either forward kernel. Dropout masks
// differ, so with dropout both passes are torch's.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <exception>
#include <limits>
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

template <class T>
StableIValue argument(const T& x) {
    return from(x);
}
StableIValue argument(const std::vector<bool>& bits) {  // has no bools that a list could refer to
    const auto copy = std::make_unique<bool[]>(bits.size());
    std::copy(bits.begin(), bits.end(), copy.get());
    return from(torch::headeronly::HeaderOnlyArrayRef<bool>(copy.get(), bits.size()));
}

// What torch's kernel of the op returns, except the integers.
template <class... Tensors, class... Arguments>
std::tuple<Tensors...> call_original(const char* op, const Arguments&... arguments) {
    StableIValue stack[std::max(sizeof...(Arguments), sizeof...(Tensors))] = {
        argument(arguments)...};
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

// The memory of x, from its first element on, with other sizes and strides.
Tensor view_of(const Tensor& x, const std::vector<int64_t>& sizes,
               const std::vector<int64_t>& strides) {
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch__reinterpret_tensor(x.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                       strides.data(), /*offset_increment=*/0, &handle));
    return Tensor(handle);
}

// (B, H, S, D) as (B, S, H, D), and back. What has other dimensions is not run.
Tensor transposed(const Tensor& x) {
    if (x.dim() != 4) return x;
    return view_of(x, {x.size(0), x.size(2), x.size(1), x.size(3)},
                   {x.stride(0), x.stride(2), x.stride(1), x.stride(3)});
}

// The strides of empty_like(x): x's own where it is dense, otherwise the same order without
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
// this package's forward. That there are is remembered for the device, dtype and head dims of the
// thread's last call, and whether it had a bias; that there are none may have other reasons, and is
// asked again.
bool has_kernels(const Tensor& q, const Tensor& k, const Tensor& v, const Sizes& sizes,
                 const Options& options) try {
    static thread_local std::tuple<int64_t, ScalarType, int64_t, int64_t, bool> known;
    const std::tuple asked(q.get_device_index(), q.scalar_type(), sizes.head_dim, sizes.head_dim_v,
                           options.bias.has_value());
    if (asked == known) return true;
    const Options lengths{.bias = options.bias,
                          .cu_seqlens_q = options.cu_seqlens_q,
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
    if (dropout_p != 0 || !sizes || !accepts_sizes(*sizes)) return false;
    const ScalarType dtype = q.scalar_type(), dtype_k = k.scalar_type();
    if (has_8_bits(dtype_k)) return false;  // nor does torch
    if (q.numel() == 0 || k.numel() == 0 || v.numel() == 0) return false;
    if (!accepts_options(dtype, dtype_k, *sizes, options, q.device())) return false;
    return has_kernels(q, k, v, *sizes, options);
}

// The same for the flash backend, whose results have the strides of its inputs.
bool runs_flash(const Tensor& q, const Tensor& k, const Tensor& v, double dropout_p,
                const Options& options) {
    for (const Tensor* x : {&q, &k, &v})
        if (x->dim() == 0 || dense_strides(*x).back() != 1) return false;
    return q.size(q.dim() - 1) == v.size(v.dim() - 1) && runs(q, k, v, dropout_p, options);
}

bool is_deterministic() {
    return at::globalContext == nullptr || at::globalContext().deterministicAlgorithms();
}

// --- Both passes of the flash backend's ops: nothing where torch's kernel must run ---

// out and lse.
std::optional<std::tuple<Tensor, Tensor>> run_forward(Layout layout, const Tensor& query,
                                                      const Tensor& key, const Tensor& value,
                                                      double dropout_p, const Options& options) {
    const Tensor q = layout(query), k = layout(key), v = layout(value);
    if (!runs_flash(q, k, v, dropout_p, options)) return std::nullopt;
    const Tensor out = empty_as(query);
    return std::tuple(out, std::get<1>(attention_forward(q, k, v, options, layout(out))));
}

std::optional<Gradients> run_backward(Layout layout, const Tensor& grad_out, const Tensor& query,
                                      const Tensor& key, const Tensor& value, const Tensor& out,
                                      const Tensor& lse, double dropout_p, Options options) {
    const Tensor q = layout(query), k = layout(key), v = layout(value);
    if (!grad_out.defined() || !runs_flash(q, k, v, dropout_p, options)) return std::nullopt;
    options.deterministic = is_deterministic();
    const Gradients into = {empty_as(query), empty_as(key), empty_as(value)};
    const auto& [dq, dk, dv] = into;
    attention_backward({layout(with_contiguous_rows(grad_out)), std::nullopt, q, k, v, layout(out),
                        torch::stable::contiguous(lse)},
                       options, /*dbias_factor=*/0, {layout(dq), layout(dk), layout(dv)});
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
    std::optional<int64_t> num_splits) {
    Options options =
        flash_options(cum_seq_q, cum_seq_k, is_causal, scale, window_left, window_right);
    options.seqused_k = seqused_k;
    options.batch_invariant = num_splits == 1;
    if (return_debug_mask || alibi_slopes || block_table) return std::nullopt;
    const auto results = run_forward(as_it_is, query, key, value, dropout_p, options);
    if (!results) return std::nullopt;
    return std::tuple_cat(*results, random_state(query));
}

// Before torch 2.13 the op has no block_table and num_splits, its last two arguments of 17 (sdpa.py
// has compared the schemas). With num_splits = 1 a sequence's result must not depend on the others.
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

// --- _scaled_dot_product_efficient_attention, of (B, H, S, D) ---
// SDPA calls it for an attn_mask, among others. attn_bias is the mask in a floating dtype, expanded
// to (B, H, Sq, Sk): its strides are 0 where it is broadcast.

constexpr char kEfficient[] = "flash_ext::original_scaled_dot_product_efficient_attention";
constexpr char kEfficientBackward[] =
    "flash_ext::original_scaled_dot_product_efficient_attention_backward";

constexpr int64_t kLseRows = 32;  // torch rounds the rows of lse up to these

// In a set of dimensions, as bits.
bool contains(int64_t dims, int dim) { return (dims >> dim & 1) != 0; }

// Once what strides of 0 repeat in these dimensions.
Tensor once_in(int64_t dims, const Tensor& bias) {
    std::vector<int64_t> sizes(bias.sizes().begin(), bias.sizes().end());
    const std::vector<int64_t> strides(bias.strides().begin(), bias.strides().end());
    for (int dim = 0; dim < bias.dim(); ++dim)
        if (strides[dim] == 0 && contains(dims, dim)) sizes[dim] = std::min<int64_t>(sizes[dim], 1);
    return view_of(bias, sizes, strides);
}

// The options of a call on (B, S, H, D); none if torch must run it: float32, often, and a causal
// mask that starts at the first key where ours ends at the last one.
std::optional<Options> efficient_options(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const std::optional<Tensor>& attn_bias, double dropout_p,
                                         bool is_causal, std::optional<double> scale) {
    if (!has_16_bits(q.scalar_type()) || q.dim() != 4 || k.dim() != 4 || v.dim() != 4)
        return std::nullopt;
    if (is_causal && q.size(1) != k.size(1)) return std::nullopt;
    Options options{.scale = scale, .causal = is_causal};
    if (attn_bias) {
        if (!has_shape(*attn_bias, {q.size(0), q.size(2), q.size(1), k.size(1)}))
            return std::nullopt;
        options.bias = once_in(~0, *attn_bias);
    }
    if (!runs(q, k, v, dropout_p, options)) return std::nullopt;
    return options;
}

Tensor empty_bshd(const Tensor& q, const Tensor& rows, int64_t head_dim) {
    return empty(q, {rows.size(0), rows.size(1), rows.size(2), head_dim}, q.scalar_type());
}

// lse with torch's number of rows; +inf in rows of no query.
Tensor padded(const Tensor& lse) {
    const int64_t rows = lse.size(2), all = ceil_div(rows, kLseRows) * kLseRows;
    if (rows == all) return lse;
    Tensor result = empty(lse, {lse.size(0), lse.size(1), all}, ScalarType::Float);
    torch::stable::fill_(result, std::numeric_limits<double>::infinity());
    Tensor own = torch::stable::narrow(result, 2, 0, rows);
    torch::stable::copy_(own, lse);
    return result;
}

std::optional<std::tuple<Tensor, Tensor, Tensor, Tensor>> efficient_forward(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& attn_bias, bool compute_log_sumexp, double dropout_p,
    bool is_causal, std::optional<double> scale) {
    const Tensor q = transposed(query), k = transposed(key), v = transposed(value);
    const auto options = efficient_options(q, k, v, attn_bias, dropout_p, is_causal, scale);
    if (!options) return std::nullopt;
    const auto [out, lse] = attention_forward(q, k, v, *options, empty_bshd(q, q, v.size(3)));
    // The state of the random generator: not shared between calls, see random_state.
    const auto state = [&] { return empty_strided(q, {}, {}, ScalarType::Long); };
    return std::tuple(transposed(out),
                      compute_log_sumexp
                          ? padded(lse)
                          : empty(q, {lse.size(0), lse.size(1), 0}, ScalarType::Float),
                      state(), state());
}

// Over which dimensions autograd sums the gradient of a mask of these sizes. -1: autograd is not
// the caller, and the gradient must have torch's strides.
int64_t summed_dims(const std::vector<int64_t>& sizes) {
    StableIValue stack[] = {from(sizes)};
    call_op("flash_ext::sdpa_summed_dims", stack);
    return torch::stable::detail::to<int64_t>(stack[0]);
}

// The gradient of the mask as torch's kernel lays it out: rows of a multiple of 16 elements.
Tensor as_torch_has_it(const Tensor& dbias) {
    constexpr int64_t kElements = 16;
    std::vector<int64_t> sizes(dbias.sizes().begin(), dbias.sizes().end());
    const int64_t keys = sizes[3];
    if (keys % kElements == 0) return dbias;
    sizes[3] = ceil_div(keys, kElements) * kElements;
    Tensor rows = empty(dbias, sizes, dbias.scalar_type());
    Tensor result = torch::stable::narrow(rows, 3, 0, keys);
    return torch::stable::copy_(result, dbias);
}

// The gradient of a mask that is broadcast has the size of the mask alone where autograd sums the
// result anyway, over the dimensions that SDPA has expanded: each of the copies gets an equal part
// of the sum, and all are the same memory. Elsewhere, in compiled graphs for one, each element gets
// its own gradient.
std::optional<std::tuple<Tensor, Tensor, Tensor, Tensor>> efficient_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& attn_bias, const Tensor& out, const Tensor& lse, const Tensor& /*philox_seed*/,
    const Tensor& /*philox_offset*/, double dropout_p, const std::vector<bool>& grad_input_mask,
    bool is_causal, std::optional<double> scale) {
    if (!grad_out.defined() || grad_input_mask.size() != 4) return std::nullopt;
    const Tensor q = transposed(query), k = transposed(key), v = transposed(value);
    auto options = efficient_options(q, k, v, if_defined(attn_bias), dropout_p, is_causal, scale);
    // SDPA asks for no lse where only the mask requires a gradient: torch has its own error for it.
    if (!options || lse.dim() != 3 || lse.size(2) < query.size(2)) return std::nullopt;
    options->deterministic = is_deterministic();

    const bool need_dbias = options->bias && grad_input_mask[3];
    std::vector<int64_t> sizes;  // of the mask
    int64_t dims = 0;
    double copies = 1;
    if (need_dbias) {
        sizes.assign(attn_bias.sizes().begin(), attn_bias.sizes().end());
        dims = summed_dims(sizes);
        options->bias = once_in(std::max<int64_t>(dims, 0), attn_bias);
        for (int dim = 0; dim < 4; ++dim)
            if (options->bias->size(dim) == 1) copies *= sizes[dim];
    }
    const Gradients into = {empty_bshd(q, q, q.size(3)), empty_bshd(q, k, k.size(3)),
                            empty_bshd(q, v, v.size(3))};
    Tensor all_rows = lse;
    const Tensor own_lse =
        torch::stable::contiguous(torch::stable::narrow(all_rows, 2, 0, query.size(2)));
    Tensor dbias = std::get<3>(
        attention_backward({transposed(with_contiguous_rows(grad_out)), std::nullopt, q, k, v,
                            transposed(out), own_lse},
                           *options, need_dbias ? static_cast<float>(1 / copies) : 0, into));
    if (need_dbias && dims < 0) dbias = as_torch_has_it(dbias);
    if (copies > 1) {
        std::vector<int64_t> strides(dbias.strides().begin(), dbias.strides().end());
        for (int dim = 0; dim < 4; ++dim)
            if (dbias.size(dim) != sizes[dim]) strides[dim] = 0;
        dbias = view_of(dbias, sizes, strides);
    }
    const auto& [dq, dk, dv] = into;
    return std::tuple(transposed(dq), transposed(dk), transposed(dv), dbias);
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
    kernels->impl("_scaled_dot_product_efficient_attention",
                  boxed<OrOriginal<efficient_forward, kEfficient>::run>);
    kernels->impl("_scaled_dot_product_efficient_attention_backward",
                  boxed<OrOriginal<efficient_backward, kEfficientBackward>::run>);
    if (with_out)
        kernels->impl("_flash_attention_forward_no_dropout_inplace",
                      boxed<OrOriginal<WithOut<flash_forward>::run, kFlashForwardOut>::run>);
}

}  // namespace
}  // namespace flash_ext

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CompositeExplicitAutograd, m) {
    m.impl("sdpa_override_" DEVICE_NAME, flash_ext::boxed<flash_ext::sdpa_override>);
}
