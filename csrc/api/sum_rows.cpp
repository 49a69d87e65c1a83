// From tensors to the kernel that adds up rows, or attention over some keys each. The CPU kernels
// have the same checks in flash_ext/cpu/sum_rows.py.
#include "api/sum_rows.h"

#include <torch/csrc/stable/accelerator.h>

#include <string>

#include "api/check.h"
#include "api/stream.h"
#include "plan/sum_rows.h"

namespace flash_ext {
namespace {

ResultView view_of(const Tensor& x) {
    const ScalarType dtype = x.scalar_type();
    return {{x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)},
            dtype == ScalarType::Half       ? ResultType::kFloat16
            : dtype == ScalarType::BFloat16 ? ResultType::kBFloat16
                                            : ResultType::kFloat32};
}

StatisticsView statistics_of(const Tensor& x) {
    return {static_cast<float*>(x.data_ptr()), x.stride(0), x.stride(1)};
}

// Are rows eight columns each, or 16 and so on, on boundaries of 16 bytes?
bool of_eight_columns(const Tensor& x) {
    const int64_t elements = x.scalar_type() == ScalarType::Float ? 4 : 8;
    bool whole = x.size(3) % 8 == 0 && reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
    for (int64_t dim = 0; dim < 3; ++dim)
        whole = whole && (x.size(dim) <= 1 || x.stride(dim) % elements == 0);
    return whole;
}

std::vector<int64_t> shape_of(const Tensor& x) {
    return {x.size(0), x.size(1), x.size(2), x.size(3)};
}

// `x` is on out's device, of this shape, with contiguous rows.
void require_like_out(const std::string& argument, const Tensor& x, const Tensor& out,
                      const std::vector<int64_t>& shape, const std::string& layout) {
    require_shape(argument.c_str(), x, shape, layout.c_str());
    if (!x.is_cuda() || x.get_device_index() != out.get_device_index())
        refuse(argument, "on out's device cuda:" + std::to_string(out.get_device_index()),
               "a tensor elsewhere");
    require_contiguous_rows(argument.c_str(), x);
}

void require_result_type(const std::string& argument, const Tensor& x) {
    const ScalarType dtype = x.scalar_type();
    if (dtype != ScalarType::Half && dtype != ScalarType::BFloat16 && dtype != ScalarType::Float)
        refuse(argument, "float16, bfloat16 or float32", dtype_name(dtype));
}

void require_rows(const std::string& argument, const Tensor& x) {
    if (x.dim() != 4)
        refuse(argument, "of shape (batch, seqlen, heads, head_dim)", shape_text(x.sizes()));
}

// The sum's own parameters, and its checks.
SumRowsParams params_of(const Tensor& out) {
    require_rows("out", out);
    if (!out.is_cuda()) refuse("out", "on a CUDA device", "a tensor elsewhere");
    require_result_type("out", out);
    require_contiguous_rows("out", out);
    if (out.size(0) * out.size(1) * out.size(2) >= int64_t{1} << 31 || out.size(3) >= int64_t{1}
                                                                                          << 31)
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

void set_lse(SumRowsParams& params, const Tensor& out, const Tensor& lse) {
    require_dtype("lse", lse, ScalarType::Float);
    require_like_out("lse", lse, out, {out.size(0), out.size(2), out.size(1)},
                     "(batch, heads, seqlen)");
    params.lse = statistics_of(lse);
}

// A part of the rows from `first` on.
void add_part(SumRowsParams& params, const Tensor& out, const std::string& argument,
              const Tensor& x, int64_t first, const std::string& argument_lse, const Tensor* lse) {
    require_rows(argument, x);
    require_result_type(argument, x);
    const int64_t rows = x.size(1);
    require_like_out(argument, x, out, {out.size(0), rows, out.size(2), out.size(3)},
                     "out's shape but for the rows");
    RowsPart& part = params.part[params.parts++];
    part = {view_of(x), {}, first, rows};
    params.whole = params.whole && of_eight_columns(x);
    if (!lse) return;
    require_dtype(argument_lse.c_str(), *lse, ScalarType::Float);
    require_like_out(argument_lse, *lse, out, {out.size(0), out.size(2), rows},
                     "(batch, heads, seqlen)");
    part.lse = statistics_of(*lse);
}

void add_parts(SumRowsParams& params, const Tensor& out, const std::vector<Tensor>& parts,
               const std::vector<Tensor>* lse_parts, const std::vector<int64_t>& firsts) {
    if (parts.size() > kMostParts)
        refuse("parts", "at most " + std::to_string(kMostParts) + " tensors", parts.size());
    if (firsts.size() != parts.size())
        refuse("firsts", "one number for each of parts", firsts.size());
    if (lse_parts && lse_parts->size() != parts.size())
        refuse("lse_parts", "one tensor for each of parts", lse_parts->size());
    for (size_t i = 0; i < parts.size(); ++i) {
        const std::string number = "[" + std::to_string(i) + "]";
        add_part(params, out, "parts" + number, parts[i], firsts[i], "lse_parts" + number,
                 lse_parts ? &(*lse_parts)[i] : nullptr);
    }
}

void launch(const SumRowsParams& params, const Tensor& out) {
    if (params.all_rows() == 0) return;
    check_architecture(out);
    const cudaStream_t stream = current_stream(out);
    const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
    check_launch(sum_rows(params, stream), "sum_rows");
}

}  // namespace

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

void write_rows(const std::vector<Tensor>& outs, const Tensor& x) {
    if (outs.empty() || outs.size() > kMostOuts)
        refuse("outs", "1 to " + std::to_string(kMostOuts) + " tensors", outs.size());
    const Tensor& out = outs[0];
    SumRowsParams params = params_of(out);
    add_part(params, out, "x", x, 0, "", nullptr);
    require_like_out("x", x, out, shape_of(out), "the shape of outs");
    params.outs = static_cast<int>(outs.size());
    for (size_t i = 1; i < outs.size(); ++i) {
        const std::string argument = "outs[" + std::to_string(i) + "]";
        require_rows(argument, outs[i]);
        require_dtype(argument.c_str(), outs[i], out.scalar_type());
        require_like_out(argument, outs[i], out, shape_of(out), "the shape of outs[0]");
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
    set_lse(params, out, lse);
    add_parts(params, out, parts, &lse_parts, firsts);
    launch(params, out);
}

}  // namespace flash_ext
