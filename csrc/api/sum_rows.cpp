// From tensors to the kernel that adds up rows, or attention over some keys each. Calls
// that are not accepted are refused in the words of flash_ext/cpu/sum_rows.py.
#include <algorithm>
#include <optional>
#include <vector>

#include "api/boxing.h"
#include "api/check.h"
#include "plan/launchers.h"

namespace flash_ext {
namespace {

ResultView view_of(const Tensor& x) {
    const ScalarType dtype = x.scalar_type();
    return {{x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)},
            dtype == ScalarType::Half       ? ResultType::kFloat16
            : dtype == ScalarType::BFloat16 ? ResultType::kBFloat16
                                            : ResultType::kFloat32};
}

// Are rows eight columns each, or 16 and so on, on boundaries of 16 bytes?
bool of_eight_columns(const Tensor& x) { return x.size(3) % 8 == 0 && operand("", x).is_aligned(); }

// (B, rows, H, D) like out (B, S, H, D), of any type that kernels read.
bool accepts_rows(const Tensor& x, const Tensor& out) {
    const ScalarType dtype = x.scalar_type();
    return (has_16_bits(dtype) || dtype == ScalarType::Float) && x.dim() == 4 &&
           is_of(x, out.device(), dtype, {out.size(0), x.size(1), out.size(2), out.size(3)});
}

bool accepts_lse(const Tensor& lse, const Tensor& out, int64_t rows) {
    return is_of(lse, out.device(), ScalarType::Float, {out.size(0), out.size(2), rows});
}

bool accepts_out(const Tensor& out) {
    constexpr int64_t kMaxRows = int64_t{1} << 31;
    return is_here(out.device()) && out.dim() == 4 && accepts_rows(out, out) &&
           out.size(0) * out.size(1) * out.size(2) < kMaxRows && out.size(3) < kMaxRows;
}

bool accepts_parts(const Tensor& out, const std::vector<Tensor>& parts,
                   const std::vector<int64_t>& firsts) {
    return accepts_out(out) && parts.size() <= kMaxParts && firsts.size() == parts.size() &&
           std::ranges::all_of(parts, [&](const Tensor& x) { return accepts_rows(x, out); });
}

StatisticsView statistics_of(const Tensor& lse) {
    return {static_cast<float*>(lse.data_ptr()), lse.stride(0), lse.stride(1)};
}

SumRowsParams params_of(const Tensor& out, const std::vector<Tensor>& parts,
                        const std::vector<int64_t>& firsts) {
    SumRowsParams params{};
    params.batch = static_cast<int>(out.size(0));
    params.rows = static_cast<int>(out.size(1));
    params.heads = static_cast<int>(out.size(2));
    params.head_dim = static_cast<int>(out.size(3));
    params.whole = of_eight_columns(out) && std::ranges::all_of(parts, of_eight_columns);
    params.out = view_of(out);
    params.parts = static_cast<int>(parts.size());
    for (size_t i = 0; i < parts.size(); ++i)
        params.part[i] = {view_of(parts[i]), {}, firsts[i], parts[i].size(1)};
    return params;
}

void launch(const SumRowsParams& params, const Tensor& out) {
    if (params.all_rows() == 0) return;
    check_architecture(out);
    launch_on_stream_of(out, [&](auto stream) { return sum_rows(params, stream); });
}

void add_rows(const Tensor& out, const std::vector<Tensor>& parts,
              const std::vector<int64_t>& firsts, const std::optional<Tensor>& index) {
    if (!accepts_parts(out, parts, firsts) ||
        (index && !is_of(*index, out.device(), ScalarType::Int, {out.size(1)})))
        refuse("sum_rows", out, parts, firsts, index);
    SumRowsParams params = params_of(out, parts, firsts);
    if (index) params.index = static_cast<const int32_t*>(index->data_ptr());
    launch(params, out);
}

// Every tensor of `outs` becomes x; they may be in other GPUs' memory.
void write_rows(const std::vector<Tensor>& outs, const Tensor& x) {
    const auto fits = [&](const Tensor& y) {
        return accepts_rows(y, outs[0]) && y.size(1) == outs[0].size(1);
    };
    const auto is_like_the_first = [&](const Tensor& y) {
        return fits(y) && y.scalar_type() == outs[0].scalar_type() &&
               std::ranges::equal(y.strides(), outs[0].strides());
    };
    if (outs.empty() || outs.size() > kMaxOuts || !accepts_out(outs[0]) || !fits(x) ||
        !std::ranges::all_of(outs, is_like_the_first))
        refuse("copy_rows", outs, x);
    const Tensor& out = outs[0];
    SumRowsParams params = params_of(out, {x}, {0});
    params.whole = params.whole && std::ranges::all_of(outs, of_eight_columns);
    params.outs = static_cast<int>(outs.size());
    for (size_t i = 1; i < outs.size(); ++i)
        params.distance[i] =
            static_cast<char*>(outs[i].data_ptr()) - static_cast<char*>(out.data_ptr());
    launch(params, out);
}

void combine_rows(const Tensor& out, const Tensor& lse, const std::vector<Tensor>& parts,
                  const std::vector<Tensor>& lse_parts, const std::vector<int64_t>& firsts) {
    bool accepted = accepts_parts(out, parts, firsts) && accepts_lse(lse, out, out.size(1)) &&
                    lse_parts.size() == parts.size();
    for (size_t i = 0; accepted && i < parts.size(); ++i)
        accepted = accepts_lse(lse_parts[i], out, parts[i].size(1));
    if (!accepted) refuse("combine_parts", out, lse, parts, lse_parts, firsts);
    SumRowsParams params = params_of(out, parts, firsts);
    params.lse = statistics_of(lse);
    for (size_t i = 0; i < parts.size(); ++i) params.part[i].lse = statistics_of(lse_parts[i]);
    launch(params, out);
}

}  // namespace
}  // namespace flash_ext

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
    using namespace flash_ext;
    m.impl("combine_parts", boxed<combine_rows>);
    m.impl("sum_rows", boxed<add_rows>);
    m.impl("copy_rows", boxed<write_rows>);
}
