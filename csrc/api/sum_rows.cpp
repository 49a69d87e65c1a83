// From tensors to the kernel that adds up rows, or attention over some keys each. The CPU kernels
// have the same checks in flash_ext/cpu/sum_rows.py.
#include <torch/csrc/stable/accelerator.h>

#include <string>

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

// `x` is on out's device, of this shape, with contiguous rows.
void require_like_out(const std::string& argument, const Tensor& x, const Tensor& out,
                      const std::vector<int64_t>& shape, const char* layout) {
    require_shape(argument, x, shape, layout);
    require_device(argument, x, out, "out");
    require_contiguous_rows(argument, x);
}

// (B, rows, H, D) like out (B, S, H, D), of any type that kernels read.
void require_rows(const std::string& argument, const Tensor& x, const Tensor& out) {
    if (x.dim() != 4)
        refuse(argument, "of shape (batch, seqlen, heads, head_dim)", shape_text(x.sizes()));
    const ScalarType dtype = x.scalar_type();
    if (dtype != ScalarType::Half && dtype != ScalarType::BFloat16 && dtype != ScalarType::Float)
        refuse(argument, "float16, bfloat16 or float32", dtype_name(dtype));
    require_like_out(argument, x, out, {out.size(0), x.size(1), out.size(2), out.size(3)},
                     "out's shape but for the rows");
}

StatisticsView statistics_of(const std::string& argument, const Tensor& lse, const Tensor& out,
                             int64_t rows) {
    require_dtype(argument, lse, ScalarType::Float);
    require_like_out(argument, lse, out, {out.size(0), out.size(2), rows},
                     "(batch, heads, seqlen)");
    return {static_cast<float*>(lse.data_ptr()), lse.stride(0), lse.stride(1)};
}

// The sum's own parameters, and its checks.
SumRowsParams params_of(const Tensor& out) {
    if (!out.is_cuda()) refuse("out", "on a CUDA device", "a tensor elsewhere");
    require_rows("out", out, out);
    constexpr int64_t kMost = int64_t{1} << 31;
    if (out.size(0) * out.size(1) * out.size(2) >= kMost || out.size(3) >= kMost)
        refuse("out", "below 2^31 rows of all heads", shape_text(out.sizes()));
    SumRowsParams params{};
    params.batch = static_cast<int>(out.size(0));
    params.rows = static_cast<int>(out.size(1));
    params.heads = static_cast<int>(out.size(2));
    params.head_dim = static_cast<int>(out.size(3));
    params.whole = of_eight_columns(out);
    params.out = view_of(out);
    return params;
}

// `x` as rows from `first` on.
RowsPart& add_part(SumRowsParams& params, const Tensor& out, const std::string& argument,
                   const Tensor& x, int64_t first) {
    require_rows(argument, x, out);
    params.whole = params.whole && of_eight_columns(x);
    return params.part[params.parts++] = {view_of(x), {}, first, x.size(1)};
}

void add_parts(SumRowsParams& params, const Tensor& out, const std::vector<Tensor>& parts,
               const std::vector<Tensor>* lse_parts, const std::vector<int64_t>& firsts) {
    if (parts.size() > kMostParts)
        refuse("parts", text("at most ", kMostParts, " tensors"), parts.size());
    if (firsts.size() != parts.size())
        refuse("firsts", "one number for each of parts", firsts.size());
    if (lse_parts && lse_parts->size() != parts.size())
        refuse("lse_parts", "one tensor for each of parts", lse_parts->size());
    for (size_t i = 0; i < parts.size(); ++i) {
        RowsPart& part = add_part(params, out, text("parts[", i, "]"), parts[i], firsts[i]);
        if (lse_parts)
            part.lse = statistics_of(text("lse_parts[", i, "]"), (*lse_parts)[i], out, part.rows);
    }
}

void launch(const SumRowsParams& params, const Tensor& out) {
    if (params.all_rows() == 0) return;
    check_architecture(out);
    const cudaStream_t stream = current_stream(out);
    const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
    check_launch(sum_rows(params, stream));
}

void add_rows(const Tensor& out, const std::vector<Tensor>& parts,
              const std::vector<int64_t>& firsts, const std::optional<Tensor>& index) {
    SumRowsParams params = params_of(out);
    add_parts(params, out, parts, nullptr, firsts);
    if (index) {
        require_dtype("index", *index, ScalarType::Int);
        require_like_out("index", *index, out, {out.size(1)}, "(seqlen)");
        params.index = static_cast<const int32_t*>(index->data_ptr());
    }
    launch(params, out);
}

// Every tensor of `outs` becomes x; they may be in other GPUs' memory.
void write_rows(const std::vector<Tensor>& outs, const Tensor& x) {
    if (outs.empty() || outs.size() > kMostOuts)
        refuse("outs", text("1 to ", kMostOuts, " tensors"), outs.size());
    const Tensor& out = outs[0];
    SumRowsParams params = params_of(out);
    const auto require_shape_of_outs = [&](const std::string& argument, const Tensor& y) {
        require_rows(argument, y, out);
        require_shape(argument, y, {out.sizes().begin(), out.sizes().end()},
                      "the shape of outs[0]");
    };
    require_shape_of_outs("x", x);
    add_part(params, out, "x", x, 0);
    params.outs = static_cast<int>(outs.size());
    for (size_t i = 1; i < outs.size(); ++i) {
        const std::string argument = text("outs[", i, "]");
        require_shape_of_outs(argument, outs[i]);
        require_dtype(argument, outs[i], out.scalar_type());
        for (int64_t dim = 0; dim < 3; ++dim)
            if (outs[i].stride(dim) != out.stride(dim))
                refuse(argument, "of the strides of outs[0]", "others");
        params.distance[i] =
            static_cast<char*>(outs[i].data_ptr()) - static_cast<char*>(out.data_ptr());
        params.whole = params.whole && of_eight_columns(outs[i]);
    }
    launch(params, out);
}

void combine_rows(const Tensor& out, const Tensor& lse, const std::vector<Tensor>& parts,
                  const std::vector<Tensor>& lse_parts, const std::vector<int64_t>& firsts) {
    SumRowsParams params = params_of(out);
    params.lse = statistics_of("lse", lse, out, out.size(1));
    add_parts(params, out, parts, &lse_parts, firsts);
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
