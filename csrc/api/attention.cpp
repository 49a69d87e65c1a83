// The ops of attention. From tensors to kernels: check, choose the variant, fill in the params,
// allocate, launch.
#include "api/attention.h"

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "api/boxing.h"
#include "api/check.h"
#include "plan/plan.h"
#include "problem/mask.cuh"
#include "problem/params.h"

namespace flash_ext {
namespace {

TensorView view(const Tensor& tensor) { return operand("", tensor).view(); }

Bias bias_of(const Tensor& tensor) {
    Bias bias;
    bias.data = address_of<void>(tensor);
    if (tensor.scalar_type() == ScalarType::Float) bias.type = BiasType::kFloat32;
    if (tensor.scalar_type() == ScalarType::Bool) bias.type = BiasType::kBool;
    bias.paired = reinterpret_cast<uintptr_t>(bias.data) % (2 * tensor.element_size()) == 0;
    for (int dim = 0; dim < 4; ++dim) {
        bias.sizes[dim] = static_cast<int>(tensor.size(dim));
        bias.strides[dim] = tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
        if (dim < 3) bias.paired = bias.paired && bias.strides[dim] % 2 == 0;
    }
    return bias;
}

TileMask tile_mask_of(const Options& options, int heads_q) {
    if (!options.mask_kv_tiles) return {};
    const Tensor &kv_tiles = *options.mask_kv_tiles, &q_tiles = *options.mask_q_tiles;
    const Tensor& words = *options.mask_words;
    const int heads = static_cast<int>(kv_tiles.size(1));
    return {.kv_tiles = address_of<int>(kv_tiles),
            .q_tiles = address_of<int>(q_tiles),
            .words = address_of<uint32_t>(words),
            .heads = heads,
            .batch_stride = kv_tiles.size(0) > 1 ? heads : 0,
            .by_group = Divisor(heads_q / max_of(heads, 1)),
            .kv_row = static_cast<int>(kv_tiles.size(3)),
            .q_row = static_cast<int>(q_tiles.size(3)),
            .q_blocks = static_cast<int>(kv_tiles.size(2)),
            .kv_blocks = static_cast<int>(q_tiles.size(2)),
            .bits = words.dim() == 6};
}

// The dtype of out, for q's.
ScalarType out_dtype(ScalarType dtype, const Options& options) {
    if (options.out_dtype) return *options.out_dtype;
    return has_8_bits(dtype) ? ScalarType::BFloat16 : dtype;
}

// See TanhSeries. tanh(x) / x by a0 + a1 x^2 + a2 x^4, for x up to 5/8 with a relative error of at
// most 2^-13.6. tanh.approx's is 2^-11, but it differs from score to score: lse, a sum over
// scores, needs less of an error that does not.
void fill_tanh_series(ForwardParams& params) {
    constexpr double kLargest = 0.625, a[3] = {0.99992075, -0.32962111, 0.10660988};
    const double square = std::pow(params.tanh_scale, 2.0);  // of x over a score's
    const double largest = kLargest * kLargest / square;
    const double limit = std::exp2(std::ceil(std::log2(largest)) + 1);
    const double offset = limit - largest;  // then all t have one exponent
    const double a1 = a[1] * square, a2 = a[2] * square * square;
    const double factors[3] = {a[0] - a1 * offset + a2 * offset * offset, a1 - 2 * a2 * offset, a2};
    params.tanh_series[0] = static_cast<float>(offset);
    for (int i = 0; i < 3; ++i)
        params.tanh_series[1 + i] = static_cast<float>(params.scale_log2 * factors[i]);
    params.tanh_limit = static_cast<float>(limit);
}

// Everything but the results of the pass. `operands`: q, k, v.
void fill_params(AttentionParams& params, const Sizes& sizes, std::span<const Operand> operands,
                 const Tensor& q, ScalarType key_dtype, const Options& options,
                 float max_p_factor) {
    const int64_t kUnlimited = BandMask::kUnlimited;
    const ScalarType dtype = q.scalar_type();
    params.q = operands[0].view();
    params.k = operands[1].view();
    params.v = operands[2].view();
    params.element_type = element_type(dtype);
    params.key_type = element_type(key_dtype);
    params.out_type = element_type(out_dtype(dtype, options));
    params.batch = static_cast<int>(sizes.batch);
    params.seqlen_q = static_cast<int>(sizes.seqlen_q);
    params.seqlen_k = static_cast<int>(sizes.seqlen_k);
    params.heads_q = static_cast<int>(sizes.heads_q);
    params.heads_k = static_cast<int>(sizes.heads_k);
    params.head_dim = static_cast<int>(sizes.head_dim);
    params.head_dim_v = static_cast<int>(sizes.head_dim_v);

    params.cu_seqlens_q = data_of<int>(options.cu_seqlens_q);
    params.cu_seqlens_k = data_of<int>(options.cu_seqlens_k);
    params.seqused_k = data_of<int>(options.seqused_k);
    if (options.page_table) {
        const Tensor& table = *options.page_table;
        params.pages = {data_of<int>(options.page_table), table.stride(0),
                        static_cast<int>(sizes.pages), static_cast<int>(sizes.page_size)};
    }

    const auto bound = [&](int64_t window) {
        return static_cast<int>(window < 0 ? kUnlimited : std::min(window, kUnlimited));
    };
    params.window_left = bound(options.window_left);
    params.window_right = options.causal ? 0 : bound(options.window_right);

    params.scale = static_cast<float>(
        options.scale.value_or(1.0 / std::sqrt(static_cast<double>(params.head_dim))));
    params.scale_log2 = params.scale * kLog2e;
    params.softcap = static_cast<float>(options.softcap);
    params.tanh_scale = params.scale / params.softcap;
    params.softcap_log2 = params.softcap * kLog2e;
    params.inverse_softcap_log2 = 1.f / params.softcap_log2;
    params.alibi_slopes = data_of<float>(options.alibi_slopes);
    if (options.alibi_slopes && options.alibi_slopes->dim() == 2)
        params.alibi_batch_stride = options.alibi_slopes->stride(0);
    if (options.bias) params.bias = bias_of(*options.bias);
    params.tile_mask = tile_mask_of(options, params.heads_q);
    params.sink = data_of<float>(options.sink);

    params.q_descale = descale_of(options.q_descale, /*of_queries=*/true);
    params.k_descale = descale_of(options.k_descale, /*of_queries=*/false);
    params.v_descale = descale_of(options.v_descale, /*of_queries=*/false);
    params.v_transposed = options.v_transposed;

    if (options.dropout_p > 0) {
        params.rng_state = data_of<int64_t>(options.rng_state);
        // p in units of 2^-15: a kept entry in 32,768 is the least.
        const double dropped = std::min(std::nearbyint(options.dropout_p * 0x1p15), 0x1p15 - 1);
        params.drop_threshold = static_cast<uint32_t>(dropped) * 0x10001u;
        const float keep_scale = static_cast<float>(0x1p15 / (0x1p15 - dropped));
        params.p_factor = std::min(keep_scale, max_p_factor);
        params.late_factor = keep_scale / params.p_factor;
    }
    params.batch_invariant = options.batch_invariant;
    params.aligned = std::ranges::all_of(operands, &Operand::is_aligned);
}

Sizes check_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
    const std::optional<Sizes> sizes = accept_forward(q, k, v, options);
    if (!sizes) refuse("fwd", q, k, v, options, /*reads=*/false);
    check_architecture(q);
    return *sizes;
}

// With FLASH_EXT_DEBUG=1 the lengths of sequences, which are on the device, are read and checked.
void debug_lengths(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
    if (!options.cu_seqlens_q && !options.seqused_k) return;
    const char* debug = std::getenv("FLASH_EXT_DEBUG");
    if (debug == nullptr || std::string_view(debug) == "" || std::string_view(debug) == "0") return;
    const std::string why = refusal("fwd", q, k, v, options, /*reads=*/true);
    if (!why.empty()) throw std::runtime_error(why);
}

// Kernels read the keys of a bias side by side, or one for all of them. The copy, if there is one.
Tensor make_readable(Bias& bias, const Options& options) {
    const std::optional<Tensor>& given = options.bias;
    if (!given || given->size(3) == 1 || given->stride(3) == 1) return Tensor();
    Tensor copy = torch::stable::contiguous(*given);
    bias = bias_of(copy);
    return copy;
}

// `operands`: q, k, v. Throws if no variant runs the call.
Choice choose_forward(const AttentionParams& params, std::span<const Operand> operands,
                      const Tensor& q, const Options& options) {
    const std::optional<Variant> wanted = variant_of(options);
    const Choice choice = choose({device_of(q), params, operands}, Pass::kForward,
                                 wanted.value_or(kFastestVariant), /*may_stand_in=*/!wanted);
    if (!choice.variant) fail(choice.why);
    return choice;
}

// Plans the rest and launches. Scratch memory is given back to torch's allocator on return: the
// allocator reuses it only for work later on the same stream.
template <class Plan>
void run(Plan& plan, const Tensor& q) {
    make_plan(plan, device_of(q));
    Tensor memory;
    if (plan.workspace.bytes() > 0) {
        memory = empty(q, {plan.workspace.bytes() / 4}, ScalarType::Float);
        plan.workspace.assign(memory.data_ptr());
    }
    launch_on_stream_of(q, [&](cudaStream_t stream) {
        const cudaError_t status = launch(plan, stream);
        if (status == kNoKernel)
            fail("there is no kernel of variant '", name_of(plan.variant), "' at head dimensions ",
                 plan.params.head_dim, " and ", plan.params.head_dim_v);
        return status;
    });
}

}  // namespace

Tensor empty_strided(const Tensor& x, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& strides, ScalarType dtype) {
    const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
    AtenTensorHandle handle = nullptr;
    if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                 code, aoti_torch_device_type_cuda(), x.get_device_index(),
                                 &handle) != 0) {
        std::string shape;
        for (const int64_t size : sizes) shape += text(shape.empty() ? "" : ", ", size);
        throw_failure(text("CUDA out of memory. flash_ext tried to allocate a tensor of shape (",
                           shape, ") on cuda:", x.get_device_index()));
    }
    return Tensor(handle);
}

std::tuple<Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Options& options, const Tensor& into) {
    const Sizes sizes = check_forward(q, k, v, options);
    const Operand operands[] = {operand("q", q), operand("k", k),
                                operand_of_v(v, options.v_transposed)};
    ForwardPlan plan{};
    ForwardParams& params = plan.params;
    // P is up to 2^8, kRescaleThreshold.
    fill_params(params, sizes, operands, q, k.scalar_type(), options, 0x1p7f);
    if (params.softcap > 0.f) fill_tanh_series(params);
    plan.variant = *choose_forward(params, operands, q, options).variant;
    const Tensor bias = make_readable(params.bias, options);
    debug_lengths(q, k, v, options);

    Tensor out = into;
    if (!out.defined())
        out = empty(q, sizes.rows(sizes.seqlen_q, sizes.heads_q, sizes.head_dim_v),
                    out_dtype(q.scalar_type(), options));
    Tensor lse = empty(q, sizes.statistics(), ScalarType::Float);
    params.out = view(out);
    params.lse = static_cast<float*>(lse.data_ptr());
    run(plan, q);
    return {out, lse};
}

AllGradients attention_backward(const BackwardTensors& x, const Options& options,
                                float dbias_factor, const Gradients& into) {
    const Tensor &q = x.q, &k = x.k, &v = x.v;
    const std::optional<Sizes> sizes = accept_backward(x, options);
    if (!sizes) refuse("bwd", x, options);
    check_architecture(q);
    const Operand operands[] = {operand("q", q), operand("k", k), operand("v", v),
                                operand("out", x.out), operand("dout", x.dout)};
    BackwardPlan plan{};
    BackwardParams& params = plan.params;
    const auto qkv = std::span(operands).first(3);
    fill_params(params, *sizes, qkv, q, q.scalar_type(), options, 0x1p15f);  // P is up to 1
    const Variant forward = *choose_forward(params, qkv, q, options).variant;
    params.aligned = std::ranges::all_of(operands, &Operand::is_aligned);
    const Choice choice = choose({device_of(q), params, operands}, Pass::kBackward, forward, true);
    if (!choice.variant) fail(choice.why);
    plan.variant = *choice.variant;
    plan.wanted = variant_of(options).value_or(kFastestVariant);
    const Tensor bias = make_readable(params.bias, options);
    debug_lengths(q, k, v, options);
    params.ds_factor = std::sqrt(params.p_factor * params.late_factor);
    params.inverse_ds_factor = 1.f / params.ds_factor;
    params.gradient_scale = params.scale * params.ds_factor;
    params.deterministic = options.deterministic && q.numel() > 0;  // otherwise nothing is added

    auto [dq, dk, dv] = into;
    if (!dq.defined())
        std::tie(dq, dk, dv) =
            std::tuple(contiguous_like(q), contiguous_like(k), contiguous_like(v));
    Tensor dbias, dsink;
    if (dbias_factor != 0 && options.bias && options.bias->scalar_type() != ScalarType::Bool) {
        dbias = contiguous_like(*options.bias);
        params.dbias = dbias.data_ptr();
        params.dbias_factor = params.ds_factor * dbias_factor;
    }
    if (options.sink) {
        dsink = contiguous_like(*options.sink);
        params.dsink = static_cast<float*>(dsink.data_ptr());
    }
    params.out = operands[3].view();
    params.dout = operands[4].view();
    params.lse = static_cast<const float*>(x.lse.data_ptr());
    params.dlse = data_of<float>(x.dlse);
    params.dq = view(dq);
    params.dk = view(dk);
    params.dv = view(dv);
    run(plan, q);
    return {dq, dk, dv, dbias, dsink};
}

std::tuple<int64_t, int64_t, std::string, std::string> attention_check(const Tensor& q,
                                                                       const Tensor& k,
                                                                       const Tensor& v,
                                                                       const Options& options) {
    const Sizes sizes = check_forward(q, k, v, options);
    const Operand operands[] = {operand("q", q), operand("k", k),
                                operand_of_v(v, options.v_transposed)};
    AttentionParams params{};
    fill_params(params, sizes, operands, q, k.scalar_type(), options, 1.f);
    const Choice forward = choose_forward(params, operands, q, options);
    const Choice backward =
        choose({device_of(q), params, operands}, Pass::kBackward, *forward.variant, true);
    return {static_cast<int64_t>(*forward.variant),
            backward.variant ? static_cast<int64_t>(*backward.variant) : -1, backward.why,
            forward.copied};
}

namespace {

Tensor or_empty(const Tensor& x, const Tensor& q) {
    return x.defined() ? x : torch::stable::new_empty(q, {0});
}

std::tuple<Tensor, Tensor> fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                               const Options& options) {
    return attention_forward(q, k, v, options);
}

AllGradients bwd(const BackwardTensors& x, const Options& options, bool need_dbias) {
    const auto [dq, dk, dv, dbias, dsink] = attention_backward(x, options, need_dbias ? 1 : 0);
    return {dq, dk, dv, or_empty(dbias, x.q), or_empty(dsink, x.q)};
}

// May a result like `like`, but for the last size, be written into this tensor?
bool accepts_into(const Tensor& into, const Tensor& like, const Tensor& last) {
    if (like.dim() < 3 || like.dim() > 4 || last.dim() == 0) return true;  // refused by itself
    std::vector<int64_t> shape(like.sizes().begin(), like.sizes().end());
    shape.back() = last.size(last.dim() - 1);
    if (!is_of(into, like.device(), like.scalar_type(), shape)) return false;
    if (into.numel() == 0) return true;
    bool fits = operand("", into).is_aligned();  // as the kernels' widest stores want it
    for (int64_t dim = 0; dim + 1 < into.dim(); ++dim)
        fits = fits && (into.size(dim) == 1 || into.stride(dim) != 0);
    return fits;
}

// Otherwise `out` has another dtype than q, or a gradient has no place.
bool is_plain_call(const Tensor& q, const Options& options) {
    return !has_8_bits(q.scalar_type()) && !options.bias;
}

// Returns lse.
Tensor fwd_into(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v,
                const Options& options) {
    if (!is_plain_call(q, options) || !accepts_into(out, q, v))
        refuse("fwd_into", out, q, k, v, options);
    return std::get<1>(attention_forward(q, k, v, options, out));
}

// Returns dsink, or a tensor of shape (0).
Tensor bwd_into(const Tensor& dq, const Tensor& dk, const Tensor& dv, const BackwardTensors& x,
                const Options& options) {
    if (!is_plain_call(x.q, options) || !accepts_into(dq, x.q, x.q) ||
        !accepts_into(dk, x.k, x.k) || !accepts_into(dv, x.v, x.v))
        refuse("bwd_into", dq, dk, dv, x, options);
    const auto gradients = attention_backward(x, options, /*dbias_factor=*/0, {dq, dk, dv});
    return or_empty(std::get<4>(gradients), x.q);
}

}  // namespace
}  // namespace flash_ext

// What the build compiled for, as FLASH_EXT_CUDA_ARCHS has it. Read by flash_ext/ops/binary.py.
extern "C" __attribute__((visibility("default"))) const char* flash_ext_targets() {
    return FLASH_EXT_TARGETS;
}

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
    using namespace flash_ext;
    m.impl("fwd", boxed<fwd>);
    m.impl("bwd", boxed<bwd>);
    m.impl("fwd_into", boxed<fwd_into>);
    m.impl("bwd_into", boxed<bwd_into>);
    m.impl("check", boxed<attention_check>);
}
