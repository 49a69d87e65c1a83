// Which arguments the kernels of attention accept. Only the conditions are here: a call that is not
// accepted is refused in the words of flash_ext/cpu/refusals.py, which finds the first that fails.
// Tests compare the two (tests/test_accept.py).
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "api/attention.h"
#include "api/boxing.h"
#include "plan/call.h"
#include "plan/transposed_v.cuh"
#include "plan/tuning.h"
#include "problem/params.h"

namespace flash_ext {

using torch::headeronly::ScalarType;
using torch::stable::Device;

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    throw std::runtime_error(text("flash_ext: ", parts...));
}

// What flash_ext/cpu/refusals.py says against the arguments of an op; empty if nothing.
template <class... Arguments>
std::string refusal(const char* op, const Arguments&... arguments) {
    std::vector<StableIValue> stack;
    const auto push = [&](const auto& x) { stack.push_back(torch::stable::detail::from(x)); };
    const auto push_all = [&](auto x) {
        if constexpr (HasFields<decltype(x)>) {
            std::apply([&](const auto&... field) { (push(field), ...); }, x.fields());
        } else {
            push(x);
        }
    };
    (push_all(arguments), ...);
    call_op(text("flash_ext::refusal_of_", op).c_str(), stack.data());
    const StableIValue* result = stack.data();
    return take<std::string>(result);
}

template <class... Arguments>
[[noreturn]] void refuse(const char* op, const Arguments&... arguments) {
    const std::string why = refusal(op, arguments...);
    if (why.empty()) fail(op, " does not accept these arguments");
    throw std::runtime_error(why);
}

// What the tensors of a call agree on: dense (batch, seqlen, heads, head_dim), or varlen (total,
// heads, head_dim).
struct Sizes {
    bool varlen;
    int64_t batch;
    int64_t seqlen_q;   // with varlen all rows
    int64_t seqlen_k;   // with pages the most that a sequence can have
    int64_t pages;      // of k and v
    int64_t page_size;  // 0: k and v are not in pages
    int64_t heads_q;
    int64_t heads_k;
    int64_t head_dim;
    int64_t head_dim_v;

    // The shape of q, k, v or out.
    std::vector<int64_t> rows(int64_t seqlen, int64_t heads, int64_t dim) const {
        if (varlen) return {seqlen, heads, dim};
        return {batch, seqlen, heads, dim};
    }
    // The shape of V^T.
    std::vector<int64_t> v_transposed() const {
        const int64_t groups = varlen ? (seqlen_k + (kKeyGroup - 1) * (batch + 2)) / kKeyGroup
                                      : ceil_div<int64_t>(seqlen_k, kKeyGroup);
        if (varlen) return {heads_k, head_dim_v, groups * kKeyGroup};
        return {batch, heads_k, head_dim_v, groups * kKeyGroup};
    }
    // The shape of k or v.
    std::vector<int64_t> key_rows(int64_t dim) const {
        if (page_size > 0) return {pages, page_size, heads_k, dim};
        return rows(seqlen_k, heads_k, dim);
    }
    std::vector<int64_t> statistics() const {
        if (varlen) return {heads_q, seqlen_q};
        return {batch, heads_q, seqlen_q};
    }
    int64_t tensor_batches() const { return varlen ? 1 : batch; }
};

inline bool has_16_bits(ScalarType dtype) {
    return dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

inline bool is_here(const Device& device) {
    return device.type() == torch::headeronly::DeviceType::FLASH_EXT_DEVICE;
}

inline bool has_shape(const Tensor& x, const std::vector<int64_t>& shape) {
    const auto sizes = x.sizes();
    return std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end());
}

inline bool is_aligned(const Tensor& x, uintptr_t bytes) {
    return x.numel() == 0 || reinterpret_cast<uintptr_t>(x.data_ptr()) % bytes == 0;
}

inline bool has_contiguous_rows(const Tensor& x) {
    const int64_t last = x.dim() - 1;
    return x.numel() == 0 || x.size(last) <= 1 || x.stride(last) == 1;
}

// Is x of this device, dtype and shape, with contiguous rows?
inline bool is_of(const Tensor& x, const Device& device, ScalarType dtype,
                  const std::vector<int64_t>& shape) {
    return x.scalar_type() == dtype && x.device() == device && has_shape(x, shape) &&
           has_contiguous_rows(x);
}
// The same, with all of x contiguous.
inline bool is_plain(const Tensor& x, const Device& device, ScalarType dtype,
                     const std::vector<int64_t>& shape) {
    return is_of(x, device, dtype, shape) && x.is_contiguous();
}
inline bool is_plain_or_none(const std::optional<Tensor>& x, const Device& device, ScalarType dtype,
                             const std::vector<int64_t>& shape) {
    return !x || is_plain(*x, device, dtype, shape);
}

// The variant that a name stands for; none for "auto" and for what names no variant.
inline std::optional<Variant> variant_of(const Options& options) {
    for (int i = 0; i < kVariants; ++i)
        if (options.variant == kVariantNames[i]) return static_cast<Variant>(i);
    return std::nullopt;
}

// Any dimension may be 1. Varlen sequences have as many positions as the longest one, which only
// the device knows.
inline bool accepts_bias(const Tensor& bias, const Sizes& sizes, ScalarType dtype,
                         const Device& device) {
    const ScalarType of_bias = bias.scalar_type();
    if (of_bias != dtype && of_bias != ScalarType::Float && of_bias != ScalarType::Bool)
        return false;
    if (bias.device() != device || bias.dim() != 4) return false;
    const int64_t wanted[] = {sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.seqlen_k};
    for (int dim = 0; dim < 4; ++dim) {
        const int64_t size = bias.size(dim);
        const bool any = size == 1 || (sizes.varlen && dim >= 2);
        if ((!any && size != wanted[dim]) || size >= int64_t{1} << 29) return false;
    }
    return true;
}

inline bool is_plain_mask(const Tensor& x, const Device& device) {
    return x.scalar_type() == ScalarType::Int && x.device() == device && x.is_contiguous() &&
           is_aligned(x, 16);
}

// Are these rows of runs, of as many blocks? Batch elements, query heads, or heads of K and V have
// their own, or all have the same.
inline bool accepts_runs(const Tensor& x, const Sizes& sizes, int64_t blocks) {
    constexpr int64_t kMostRuns = int64_t{1} << 31;
    return x.dim() == 4 && (x.size(0) == 1 || x.size(0) == sizes.batch) &&
           (x.size(1) == 1 || x.size(1) == sizes.heads_q || x.size(1) == sizes.heads_k) &&
           x.size(2) == blocks && x.size(3) >= 8 && x.size(3) < kMostRuns && x.size(3) % 4 == 0;
}

// A mask says itself where sequences end, and has the window.
inline bool accepts_mask(const Sizes& sizes, const Options& options, const Device& device) {
    const auto &kv = options.mask_kv_tiles, &q = options.mask_q_tiles, &words = options.mask_words;
    if (!kv && !q && !words) return true;
    if (!kv || !q || !words || options.cu_seqlens_q || options.seqused_k || options.page_table ||
        options.causal || options.window_left != -1 || options.window_right != -1)
        return false;
    const int64_t q_blocks = ceil_div<int64_t>(sizes.seqlen_q, kMaskBlock);
    const int64_t kv_blocks = ceil_div<int64_t>(sizes.seqlen_k, kMaskBlock);
    if (std::max(q_blocks, kv_blocks) > kMostMaskBlocks || !accepts_runs(*kv, sizes, q_blocks) ||
        !accepts_runs(*q, sizes, kv_blocks))
        return false;
    const int64_t batch = kv->size(0), heads = kv->size(1);
    return q->size(0) == batch && q->size(1) == heads &&
           (has_shape(*words, {batch, heads, q_blocks * kMaskBlock, 4}) ||
            has_shape(*words, {batch, heads, q_blocks, kv_blocks, kMaskBlock, 4})) &&
           is_plain_mask(*kv, device) && is_plain_mask(*q, device) && is_plain_mask(*words, device);
}

// One number, (batch, heads_k), or (batch, heads, last). last < 0: any number of blocks, as many as
// the longest varlen sequence has, or more.
inline bool accepts_descale(const std::optional<Tensor>& descale, const Sizes& sizes, int64_t heads,
                            int64_t last, const Device& device) {
    if (!descale) return true;
    const Tensor& x = *descale;
    if (x.scalar_type() != ScalarType::Float || x.device() != device) return false;
    if (x.dim() < 2) return x.dim() == 0 || x.size(0) == 1;
    if (x.dim() == 2) return has_shape(x, {sizes.batch, sizes.heads_k});
    return has_shape(x, {sizes.batch, heads, last < 0 ? x.size(2) : last});
}

// What only 8-bit inputs have, and what they cannot have. `dtype`: of q.
inline bool accepts_8_bit_options(ScalarType dtype, ScalarType key_dtype, const Sizes& sizes,
                                  const Options& options, const Device& device) {
    const std::optional<ScalarType>& out = options.out_dtype;
    if (!has_8_bits(dtype) && (options.q_descale || (out && *out != dtype))) return false;
    if (!has_8_bits(key_dtype)) return !options.k_descale && !options.v_descale;
    const auto blocks = [&](int64_t rows, bool packed) {
        return packed ? -1 : ceil_div<int64_t>(rows, kDescaleRows);
    };
    const bool packed_keys = options.cu_seqlens_k.has_value();
    return (!out || *out == ScalarType::BFloat16 || *out == ScalarType::Half) && !options.bias &&
           options.dropout_p == 0 && !options.batch_invariant &&
           accepts_descale(options.q_descale, sizes, sizes.heads_q,
                           blocks(sizes.seqlen_q, sizes.varlen), device) &&
           accepts_descale(options.k_descale, sizes, sizes.heads_k,
                           blocks(sizes.seqlen_k, packed_keys), device) &&
           accepts_descale(options.v_descale, sizes, sizes.heads_k, sizes.head_dim_v, device);
}

inline bool accepts_options(ScalarType dtype, ScalarType key_dtype, const Sizes& sizes,
                            const Options& options, const Device& device) {
    // The kernels have scale * log2(e), softcap * log2(e), its inverse and scale / softcap in
    // float32: within these bounds they are finite. And the backward pass finds tanh from P and
    // lse, whose error must be small beside the cap.
    const double softcap = options.softcap;
    const double max_factor = std::ldexp(1.0, 127);
    if (!(softcap == 0 || (std::ldexp(1.0, -10) <= softcap && softcap < max_factor))) return false;
    const double max_scale = max_factor * (softcap > 0 ? std::min(softcap, 1.0) : 1.0);
    if (options.scale && !(std::abs(*options.scale) < max_scale)) return false;
    if (options.window_left < -1 || options.window_right < -1) return false;
    const auto& slopes = options.alibi_slopes;
    if (slopes && !is_of(*slopes, device, ScalarType::Float, {sizes.heads_q}) &&
        !is_of(*slopes, device, ScalarType::Float, {sizes.batch, sizes.heads_q}))
        return false;
    return (!options.bias || accepts_bias(*options.bias, sizes, dtype, device)) &&
           accepts_mask(sizes, options, device) &&
           accepts_8_bit_options(dtype, key_dtype, sizes, options, device) &&
           is_plain_or_none(options.sink, device, ScalarType::Float, {sizes.heads_q}) &&
           options.dropout_p >= 0 && options.dropout_p < 1 &&
           (options.dropout_p == 0 ||
            (options.rng_state && is_plain(*options.rng_state, device, ScalarType::Long, {2})));
}

// Positions and CTA indices are 32-bit; elements are addressed in 64.
inline bool accepts_sizes(const Sizes& sizes) {
    for (const int64_t dim : {sizes.head_dim, sizes.head_dim_v})
        if (dim < 1 || dim > tuning::kMaxHeadDim) return false;
    constexpr int64_t kMaxLength = int64_t{1} << 29;
    constexpr int64_t kMaxTiles = int64_t{1} << 31;
    constexpr int64_t kSmallestTile = 16;
    const auto accepts = [&](int64_t length, int64_t heads) {
        const int64_t blocks = length / kSmallestTile + 1 + (sizes.varlen ? sizes.batch + 1 : 0);
        const int64_t matrices = heads * sizes.tensor_batches();
        return length < kMaxLength && matrices < kMaxTiles && matrices * blocks < kMaxTiles;
    };
    return accepts(sizes.seqlen_q, sizes.heads_q) && accepts(sizes.seqlen_k, sizes.heads_k);
}

// Of pages: may a call have this table, for k of this shape, and the options beside it?
inline bool accepts_page_table(const Tensor& k, int64_t batch, const Options& options,
                               const Device& device) {
    const Tensor& table = *options.page_table;
    return table.dim() == 2 && is_of(table, device, ScalarType::Int, {batch, table.size(1)}) &&
           options.seqused_k && !options.cu_seqlens_k && k.dim() == 4 && k.size(1) > 0 &&
           (k.size(0) > 0 || table.size(1) == 0) && !options.bias && options.dropout_p == 0;
}

// The sizes of tensors that agree with each other; none if they do not.
inline std::optional<Sizes> sizes_of(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Options& options) {
    const auto &cu_q = options.cu_seqlens_q, &cu_k = options.cu_seqlens_k;
    const ScalarType dtype = q.scalar_type(), dtype_k = k.scalar_type();
    const ScalarType dtype_v = dtype == ScalarType::Char ? ScalarType::Float8_e4m3fn : dtype_k;
    const Device device = q.device();
    const bool has_pages = options.page_table.has_value();
    const int64_t dims = cu_q ? 3 : 4, dims_k = has_pages ? 4 : dims;
    if (q.dim() != dims || k.dim() != dims_k || v.dim() != dims_k || !has_contiguous_rows(q))
        return std::nullopt;
    const int64_t batch = cu_q ? std::max<int64_t>(cu_q->numel() - 1, 0) : q.size(0);
    if (has_pages && !accepts_page_table(k, batch, options, device)) return std::nullopt;

    const int64_t page_size = has_pages ? k.size(1) : 0;
    const Sizes sizes{
        .varlen = cu_q.has_value(),
        .batch = batch,
        .seqlen_q = q.size(dims - 3),
        .seqlen_k = has_pages ? options.page_table->size(1) * page_size : k.size(dims - 3),
        .pages = has_pages ? k.size(0) : 0,
        .page_size = page_size,
        .heads_q = q.size(dims - 2),
        .heads_k = k.size(dims_k - 2),
        .head_dim = q.size(dims - 1),
        .head_dim_v = v.size(dims_k - (options.v_transposed ? 2 : 1))};
    if (options.v_transposed && (has_pages || !has_8_bits(dtype))) return std::nullopt;
    const bool agree =
        (dtype_k == dtype || (has_16_bits(dtype) && has_8_bits(dtype_k))) &&
        is_of(k, device, dtype_k, sizes.key_rows(sizes.head_dim)) &&
        is_of(v, device, dtype_v,
              options.v_transposed ? sizes.v_transposed() : sizes.key_rows(sizes.head_dim_v)) &&
        sizes.heads_k > 0 && sizes.heads_q % sizes.heads_k == 0 &&
        (has_pages || cu_q.has_value() == cu_k.has_value()) &&
        is_plain_or_none(cu_q, device, ScalarType::Int, {sizes.batch + 1}) &&
        is_plain_or_none(cu_k, device, ScalarType::Int, {sizes.batch + 1}) &&
        is_plain_or_none(options.seqused_k, device, ScalarType::Int, {sizes.batch});
    return agree ? std::optional(sizes) : std::nullopt;
}

// The sizes of a forward pass; none if it is refused.
inline std::optional<Sizes> accept_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                           const Options& options) {
    const ScalarType dtype = q.scalar_type();
    const Device device = q.device();
    if ((options.variant != "auto" && !variant_of(options)) || !is_here(device) ||
        (!has_16_bits(dtype) && !has_8_bits(dtype)))
        return std::nullopt;
    const std::optional<Sizes> sizes = sizes_of(q, k, v, options);
    return sizes && accepts_sizes(*sizes) &&
                   accepts_options(dtype, k.scalar_type(), *sizes, options, device)
               ? sizes
               : std::nullopt;
}

// The same for a backward pass.
inline std::optional<Sizes> accept_backward(const BackwardTensors& x, const Options& options) {
    const std::optional<Sizes> sizes = accept_forward(x.q, x.k, x.v, options);
    const ScalarType dtype = x.q.scalar_type();
    if (!sizes || sizes->page_size > 0 || has_8_bits(x.k.scalar_type())) return std::nullopt;
    const Device device = x.q.device();
    const auto shape = sizes->rows(sizes->seqlen_q, sizes->heads_q, sizes->head_dim_v);
    const bool accepted = is_of(x.dout, device, dtype, shape) &&
                          is_of(x.out, device, dtype, shape) &&
                          is_plain(x.lse, device, ScalarType::Float, sizes->statistics()) &&
                          is_plain_or_none(x.dlse, device, ScalarType::Float, sizes->statistics());
    return accepted ? sizes : std::nullopt;
}

}  // namespace flash_ext
