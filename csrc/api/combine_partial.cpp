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

TensorView view_of(const Tensor& x) {
    return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

StatisticsView statistics_of(const Tensor& x) {
    return {static_cast<float*>(x.data_ptr()), x.stride(0), x.stride(1)};
}

bool rows_of_four(const Tensor& x, int64_t element_bytes) {
    bool aligned =
        x.size(3) % 4 == 0 && reinterpret_cast<uintptr_t>(x.data_ptr()) % (4 * element_bytes) == 0;
    for (int64_t dim = 0; dim < 3; ++dim)
        aligned = aligned && (x.size(dim) <= 1 || x.stride(dim) % 4 == 0);
    return aligned;
}

}  // namespace

void add_partial(const Tensor& out, const Tensor& lse, const Tensor& o_partial,
                 const Tensor& lse_partial) {
    if (out.dim() != 4)
        refuse("out", "of shape (batch, seqlen, heads, head_dim)", shape_text(out.sizes()));
    if (!out.is_cuda()) refuse("out", "on a CUDA device", "a tensor elsewhere");
    require_dtype("out", out, ScalarType::Float);
    require_contiguous_rows("out", out);
    const std::vector<int64_t> shape(out.sizes().begin(), out.sizes().end());
    const std::vector<int64_t> statistics{shape[0], shape[2], shape[1]};
    require_dtype("lse", lse, ScalarType::Float);
    require_like_out("lse", lse, out, statistics, "(batch, heads, seqlen)");
    require_dtype("lse_partial", lse_partial, ScalarType::Float);
    require_like_out("lse_partial", lse_partial, out, statistics, "(batch, heads, seqlen)");
    const ScalarType dtype = o_partial.scalar_type();
    if (dtype != ScalarType::Half && dtype != ScalarType::BFloat16 && dtype != ScalarType::Float)
        refuse("o_partial", "float16, bfloat16 or float32", dtype_name(dtype));
    require_like_out("o_partial", o_partial, out, shape, "out's shape");
    for (const int64_t size : shape)
        if (size >= int64_t{1} << 31)
            refuse("out", "below 2^31 in every dimension", shape_text(out.sizes()));
    if (out.numel() == 0) return;
    check_architecture(out);

    CombinePartialParams params{};
    params.partial_type = dtype == ScalarType::Half       ? PartialType::kFloat16
                          : dtype == ScalarType::BFloat16 ? PartialType::kBFloat16
                                                          : PartialType::kFloat32;
    params.batch = static_cast<int>(shape[0]);
    params.rows = static_cast<int>(shape[1]);
    params.heads = static_cast<int>(shape[2]);
    params.head_dim = static_cast<int>(shape[3]);
    params.aligned =
        rows_of_four(out, 4) && rows_of_four(o_partial, dtype == ScalarType::Float ? 4 : 2);
    params.out = view_of(out);
    params.lse = statistics_of(lse);
    params.o_partial = view_of(o_partial);
    params.lse_partial = statistics_of(lse_partial);
    const cudaStream_t stream = current_stream(out);
    const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
    check_launch(combine_partial(params, stream));
}

}  // namespace flash_ext
