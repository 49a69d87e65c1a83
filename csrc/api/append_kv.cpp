// From tensors to the kernel that writes new rows of K and V into a cache. Calls that are not
// accepted are refused in the words of flash_ext/cpu/append_kv.py.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "api/accept_append_kv.h"
#include "api/boxing.h"
#include "api/check.h"
#include "plan/call.h"
#include "plan/launchers.h"

namespace flash_ext {
namespace {

AppendedRows rows_of(const Tensor& from, const Tensor& to, const std::optional<Tensor>& cu_seqlens,
                     bool into_cache, bool rotated) {
    const ScalarType stored = to.scalar_type();
    return {.from = operand("", from).view(),
            .to = operand("", to).view(),
            .rows = static_cast<int>(from.size(from.dim() - 3)),
            .heads = static_cast<int>(from.size(from.dim() - 2)),
            .head_dim = static_cast<int>(from.size(from.dim() - 1)),
            .cu_seqlens = data_of<int>(cu_seqlens),
            .into_cache = into_cache,
            .rotated = rotated,
            .quantized = has_8_bits(stored) && !has_8_bits(from.scalar_type()),
            .to_int8 = stored == ScalarType::Char};
}

Rotary rotary_of(const AppendOptions& options, const int* cache_seqlens) {
    const Tensor& cos = *options.rotary_cos;
    const int* begins = data_of<int>(options.rotary_seqlens);
    return {.cos = cos.data_ptr(),
            .sin = options.rotary_sin->data_ptr(),
            .is_float = cos.scalar_type() == ScalarType::Float,
            .positions = static_cast<int>(cos.size(0)),
            .dim = static_cast<int>(2 * cos.size(1)),
            .interleaved = options.rotary_interleaved,
            .begins = begins != nullptr ? begins : cache_seqlens};
}

// May threads have 16 bytes each? Then a pair's columns must not be in different such parts, unless
// all of a part's are.
bool has_whole_parts(const std::vector<Tensor>& tensors, const Rotary& rotary) {
    const int columns = rotary.cos == nullptr ? 1 : rotary.interleaved ? 8 : 16;
    return rotary.dim % columns == 0 && std::ranges::all_of(tensors, [](const Tensor& x) {
               return operand("", x).is_aligned();
           });
}

// The rotated q, or nothing, of shape (0); and the lengths with the new rows.
std::tuple<Tensor, Tensor> append_rows(const Tensor& k_cache, const Tensor& v_cache,
                                       const Tensor& k, const Tensor& v,
                                       const Tensor& cache_seqlens, const AppendOptions& options) {
    if (!accepts_append(k_cache, v_cache, k, v, cache_seqlens, options))
        refuse("append_kv", k_cache, v_cache, k, v, cache_seqlens, options);
    check_architecture(k_cache);
    const GpuModel& gpu = device_of(k_cache);
    if (k.scalar_type() != k_cache.scalar_type() && gpu.major < 9)
        fail("the GPU must be a Hopper GPU (compute capability 9.0), as for attention to a cache ",
             "of 8 bits, got ", gpu.major, ".", gpu.minor);
    AppendKVParams params{};
    params.element_type = element_type(k.scalar_type());
    params.batch = static_cast<int>(cache_seqlens.numel());
    params.cache_seqlens = static_cast<const int*>(cache_seqlens.data_ptr());
    params.capacity = k_cache.size(1);
    const std::optional<Tensor>& table = options.page_table;
    params.pages = {data_of<int>(table), table ? table->stride(0) : 0,
                    static_cast<int>(k_cache.size(0)),
                    static_cast<int>(std::max<int64_t>(k_cache.size(1), 1))};
    if (table) params.capacity *= table->size(1);
    const bool rotates = options.q.has_value();
    if (rotates) params.rotary = rotary_of(options, params.cache_seqlens);
    Tensor used = empty(k, {params.batch}, ScalarType::Int);
    params.seqused_k = static_cast<int*>(used.data_ptr());
    Tensor rotated = rotates ? contiguous_like(*options.q) : empty(k, {0}, k.scalar_type());
    std::vector<Tensor> tensors{k_cache, v_cache, k, v};
    params.tensors[0] = rows_of(k, k_cache, options.cu_seqlens_k, true, rotates);
    params.tensors[1] = rows_of(v, v_cache, options.cu_seqlens_k, true, false);
    params.tensors[0].descale = descale_of(options.k_descale, /*of_queries=*/false);
    params.tensors[1].descale = descale_of(options.v_descale, /*of_queries=*/false);
    params.tensors[1].by_column = true;
    params.count = 2;
    if (rotates) {
        AppendedRows& q = params.tensors[params.count++];
        q = rows_of(*options.q, rotated, options.cu_seqlens_q, false, true);
        q.at_one_position = options.q_at_one_position;
        tensors.insert(tensors.end(), {*options.q, rotated});
    }
    params.whole = has_whole_parts(tensors, params.rotary);
    launch_on_stream_of(k_cache, [&](auto stream) { return append_kv(params, stream); });
    return {rotated, used};
}

}  // namespace
}  // namespace flash_ext

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
    using namespace flash_ext;
    m.impl("append_kv", boxed<append_rows>);
}
