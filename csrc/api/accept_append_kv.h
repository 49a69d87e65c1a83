// Which arguments append_kv accepts. As in accept.h the words of a refusal are in Python,
// flash_ext/cpu/append_kv.py, and a test compares the two (tests/test_append_kv.py).
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "api/accept.h"

namespace flash_ext {

// In the order of the schema (flash_ext/ops/append_kv.py).
struct AppendOptions {
    std::optional<Tensor> q;
    std::optional<Tensor> page_table;
    std::optional<Tensor> cu_seqlens_q;
    std::optional<Tensor> cu_seqlens_k;
    std::optional<Tensor> rotary_cos;
    std::optional<Tensor> rotary_sin;
    std::optional<Tensor> rotary_seqlens;
    bool rotary_interleaved = false;
    bool q_at_one_position = false;
    std::optional<Tensor> k_descale;
    std::optional<Tensor> v_descale;

    auto fields() {
        return std::tie(q, page_table, cu_seqlens_q, cu_seqlens_k, rotary_cos, rotary_sin,
                        rotary_seqlens, rotary_interleaved, q_at_one_position, k_descale,
                        v_descale);
    }
};

// (B, S, H, D), or packed (total, H, D), of fewer than 2^31 rows.
inline bool accepts_new_rows(const Tensor& x, const Device& device, ScalarType dtype,
                             const std::optional<Tensor>& cu_seqlens, int64_t batch, int64_t heads,
                             int64_t dim) {
    const int64_t dims = cu_seqlens ? 3 : 4;
    if (x.dim() != dims || x.size(dims - 3) >= int64_t{1} << 31) return false;
    const int64_t rows = x.size(dims - 3);
    return is_of(
               x, device, dtype,
               cu_seqlens ? std::vector{rows, heads, dim} : std::vector{batch, rows, heads, dim}) &&
           is_plain_or_none(cu_seqlens, device, ScalarType::Int, {batch + 1});
}

// Has each element separate memory, and a page fewer than 2^31 rows?
inline bool accepts_cache(const Tensor& cache) {
    if (cache.dim() != 4 || cache.size(1) >= int64_t{1} << 31 || cache.size(0) >= int64_t{1} << 31)
        return false;
    for (int dim = 0; dim < 4; ++dim)
        if (cache.size(dim) > 1 && cache.stride(dim) == 0) return false;
    return true;
}

// dtype: of k.
inline bool accepts_rotary(const Tensor& k_cache, ScalarType dtype, int64_t batch,
                           const AppendOptions& options) {
    if (!options.q)
        return !options.rotary_cos && !options.rotary_sin && !options.rotary_seqlens &&
               !options.cu_seqlens_q;
    if (!options.rotary_cos || !options.rotary_sin) return false;
    const Tensor &q = *options.q, &cos = *options.rotary_cos;
    const Device device = k_cache.device();
    const ScalarType of_cos = cos.scalar_type();
    const int64_t dim = k_cache.size(3);
    return has_16_bits(dtype) && q.dim() >= 3 &&
           accepts_new_rows(q, device, dtype, options.cu_seqlens_q, batch, q.size(q.dim() - 2),
                            dim) &&
           (of_cos == dtype || of_cos == ScalarType::Float) && cos.dim() == 2 && cos.size(0) > 0 &&
           cos.size(0) < int64_t{1} << 31 && cos.size(1) > 0 && 2 * cos.size(1) <= dim &&
           is_plain(cos, device, of_cos, {cos.size(0), cos.size(1)}) &&
           is_plain(*options.rotary_sin, device, of_cos, {cos.size(0), cos.size(1)}) &&
           is_plain_or_none(options.rotary_seqlens, device, ScalarType::Int, {batch});
}

// Of rows that are quantized on their way.
inline bool accepts_stored_descales(const AppendOptions& options, bool quantized,
                                    const Sizes& sizes, const Device& device) {
    if (!quantized) return !options.k_descale && !options.v_descale;
    const int64_t blocks = ceil_div<int64_t>(sizes.seqlen_k, kDescaleRows);
    return accepts_descale(options.k_descale, sizes, sizes.heads_k, blocks, device) &&
           accepts_descale(options.v_descale, sizes, sizes.heads_k, sizes.head_dim_v, device);
}

inline bool accepts_append(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
                           const Tensor& v, const Tensor& cache_seqlens,
                           const AppendOptions& options) {
    const Device device = k_cache.device();
    if (!is_here(device) || !accepts_cache(k_cache) || !accepts_cache(v_cache)) return false;
    const ScalarType dtype = k_cache.scalar_type(), dtype_v = v_cache.scalar_type();
    const bool quantized = has_8_bits(dtype) && has_16_bits(k.scalar_type());
    const ScalarType dtype_k = quantized ? k.scalar_type() : dtype;
    const int64_t pages = k_cache.size(0), page_size = k_cache.size(1), heads = k_cache.size(2);
    const int64_t batch = cache_seqlens.numel();
    const std::optional<Tensor>& table = options.page_table;
    return (has_16_bits(dtype) ? dtype_v == dtype : has_8_bits(dtype) && has_8_bits(dtype_v)) &&
           has_contiguous_rows(k_cache) &&
           is_of(v_cache, device, dtype_v, {pages, page_size, heads, v_cache.size(3)}) &&
           is_plain(cache_seqlens, device, ScalarType::Int, {batch}) &&
           (table ? table->dim() == 2 && page_size > 0 &&
                        is_of(*table, device, ScalarType::Int, {batch, table->size(1)})
                  : pages >= batch) &&
           accepts_new_rows(k, device, dtype_k, options.cu_seqlens_k, batch, heads,
                            k_cache.size(3)) &&
           accepts_new_rows(v, device, quantized ? dtype_k : dtype_v, options.cu_seqlens_k, batch,
                            heads, v_cache.size(3)) &&
           v.size(v.dim() - 3) == k.size(k.dim() - 3) &&
           accepts_rotary(k_cache, dtype_k, batch, options) &&
           accepts_stored_descales(options, quantized,
                                   {.batch = batch,
                                    .seqlen_k = page_size * (table ? table->size(1) : 1),
                                    .heads_k = heads,
                                    .head_dim_v = v_cache.size(3)},
                                   device);
}

}  // namespace flash_ext
