// From tensors to the kernel that adds attention over some keys to the results so far. The CPU
// kernel has the same checks in flash_ext/cpu/combine_partial.py.
#include "api/combine_partial.h"

#include <torch/csrc/stable/accelerator.h>

#include <vector>

#include "api/check.h"
#include "api/stream.h"
#include "plan/combine_partial.h"

namespace flash_ext {
namespace {

void require_like_out(const char* argument, const Tensor& tensor, const Tensor& out,
                      const std::vector<int64_t>& shape, const char* layout) {
    require_shape(argument, tensor, shape, layout);
    if (!tensor.is_cuda() || tensor.get_device_index() != out.get_device_index())
        refuse(argument, "on out's device cuda:" + std::to_string(out.get_device_index()),
               "a tensor elsewhere");
    require_contiguous_rows(argument, tensor);
}

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

// Does every row start on a boundary of four elements, and end on one?
bool rows_of_four(const Tensor& x) {
    const int64_t element_bytes = x.scalar_type() == ScalarType::Float ? 4 : 2;
    bool aligned =
        x.size(3) % 4 == 0 && reinterpret_cast<uintptr_t>(x.data_ptr()) % (4 * element_bytes) == 0;
    for (int64_t dim = 0; dim < 3; ++dim)
        aligned = aligned && (x.size(dim) <= 1 || x.stride(dim) % 4 == 0);
    return aligned;
}

void require_result_type(const char* argument, const Tensor& x) {
    const ScalarType dtype = x.scalar_type();
    if (dtype != ScalarType::Half && dtype != ScalarType::BFloat16 && dtype != ScalarType::Float)
        refuse(argument, "float16, bfloat16 or float32", dtype_name(dtype));
}

}  // namespace

void add_partial(const Tensor& out, const Tensor& lse, const Tensor& o_partial,
                 const Tensor& lse_partial, const std::optional<Tensor>& out_before) {
    if (out.dim() != 4)
        refuse("out", "of shape (batch, seqlen, heads, head_dim)", shape_text(out.sizes()));
    if (!out.is_cuda()) refuse("out", "on a CUDA device", "a tensor elsewhere");
    require_result_type("out", out);
    require_contiguous_rows("out", out);
    const std::vector<int64_t> shape(out.sizes().begin(), out.sizes().end());
    const std::vector<int64_t> statistics{shape[0], shape[2], shape[1]};
    require_dtype("lse", lse, ScalarType::Float);
    require_like_out("lse", lse, out, statistics, "(batch, heads, seqlen)");
    require_dtype("lse_partial", lse_partial, ScalarType::Float);
    require_like_out("lse_partial", lse_partial, out, statistics, "(batch, heads, seqlen)");
    require_result_type("o_partial", o_partial);
    require_like_out("o_partial", o_partial, out, shape, "out's shape");
    const Tensor before = out_before.value_or(out);
    require_result_type("out_before", before);
    require_like_out("out_before", before, out, shape, "out's shape");
    for (const int64_t size : shape)
        if (size >= int64_t{1} << 31)
            refuse("out", "below 2^31 in every dimension", shape_text(out.sizes()));
    if (out.numel() == 0) return;
    check_architecture(out);

    CombinePartialParams params{};
    params.batch = static_cast<int>(shape[0]);
    params.rows = static_cast<int>(shape[1]);
    params.heads = static_cast<int>(shape[2]);
    params.head_dim = static_cast<int>(shape[3]);
    params.aligned = rows_of_four(before) && rows_of_four(out) && rows_of_four(o_partial);
    params.before = view_of(before);
    params.out = view_of(out);
    params.lse = statistics_of(lse);
    params.o_partial = view_of(o_partial);
    params.lse_partial = statistics_of(lse_partial);
    const cudaStream_t stream = current_stream(out);
    const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
    check_launch(combine_partial(params, stream));
}

}  // namespace flash_ext
