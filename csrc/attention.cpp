// From tensors to kernels: check, allocate, fill in the params, choose the variant, launch.
#include "attention.h"

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <vector>

#include "check.h"
#include "dispatch.h"
#include "host_device.h"
#include "kernels/kernels.h"
#include "mask.cuh"
#include "params.h"
#include "tuning.h"

// Weak: a CPU-only libtorch lacks it, and there this library must load too.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace flash_ext {
namespace {

cudaStream_t current_stream(const Tensor& q) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream == nullptr ||
        aoti_torch_get_current_cuda_stream(q.get_device_index(), &stream) != 0)
        fail("this torch has no CUDA stream to launch on");
    return static_cast<cudaStream_t>(stream);
}

// A contiguous, uninitialised tensor on q's device.
template <size_t kDims>
Tensor empty(const Tensor& q, const std::array<int64_t, kDims>& shape, ScalarType dtype) {
    std::array<int64_t, kDims> strides;
    int64_t stride = 1;
    for (size_t i = kDims; i-- > 0;) {
        strides[i] = stride;
        stride *= std::max<int64_t>(shape[i], 1);
    }
    int32_t code = aoti_torch_dtype_float32();
    if (dtype == ScalarType::Half) code = aoti_torch_dtype_float16();
    if (dtype == ScalarType::BFloat16) code = aoti_torch_dtype_bfloat16();
    if (dtype == ScalarType::Int) code = aoti_torch_dtype_int32();
    AtenTensorHandle handle = nullptr;
    if (aoti_torch_empty_strided(kDims, shape.data(), strides.data(), code,
                                 aoti_torch_device_type_cuda(), q.get_device_index(), &handle) != 0)
        fail("allocating a tensor of shape ", shape_text(shape), " failed: out of memory?");
    return Tensor(handle);
}

// Scratch memory, given back to torch's allocator when the call returns: the allocator reuses it
// only for work later on the same stream.
class Workspace {
 public:
    explicit Workspace(const Tensor& q) : q_(q) {}

    template <class T>
    T* allocate(int64_t count) {
        static_assert(sizeof(T) == 4);
        const ScalarType dtype = std::is_same_v<T, int> ? ScalarType::Int : ScalarType::Float;
        tensors_.push_back(empty(q_, std::array{count}, dtype));
        return static_cast<T*>(tensors_.back().data_ptr());
    }

 private:
    const Tensor& q_;
    std::vector<Tensor> tensors_;
};

TensorView view(const Tensor& tensor) {
    // The stride of a dimension of size 1 is never used, and need not be aligned.
    const auto stride = [&](int dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); };
    return {tensor.data_ptr(), stride(0), stride(1), stride(2)};
}

// Do all rows start on 16-byte boundaries and end on them?
bool is_aligned(const Tensor& tensor) {
    constexpr int64_t kElements = 16 / 2;
    bool aligned =
        reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0 && tensor.size(3) % kElements == 0;
    for (int dim = 0; dim < 3; ++dim)
        aligned = aligned && (tensor.size(dim) == 1 || tensor.stride(dim) % kElements == 0);
    return aligned;
}

void fill_params(AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Options& options) {
    const int64_t kUnlimited = BandMask::kUnlimited;
    params.element_type =
        q.scalar_type() == ScalarType::Half ? ElementType::kFloat16 : ElementType::kBFloat16;
    params.batch = static_cast<int>(q.size(0));
    params.seqlen_q = static_cast<int>(q.size(1));
    params.seqlen_k = static_cast<int>(k.size(1));
    params.heads_q = static_cast<int>(q.size(2));
    params.heads_k = static_cast<int>(k.size(2));
    params.head_dim = static_cast<int>(q.size(3));
    params.head_dim_v = static_cast<int>(v.size(3));

    const auto bound = [&](int64_t window) {
        return static_cast<int>(window < 0 ? kUnlimited : std::min(window, kUnlimited));
    };
    params.window_left = bound(options.window_left);
    params.window_right = options.causal ? 0 : bound(options.window_right);

    params.scale = static_cast<float>(
        options.scale.value_or(1.0 / std::sqrt(static_cast<double>(params.head_dim))));
    params.scale_log2 = params.scale * kLog2e;

    if (options.dropout_p > 0) {
        params.rng_state = static_cast<const int64_t*>(options.rng_state->data_ptr());
        params.keep_threshold = static_cast<uint32_t>(
            std::max(1.0, std::nearbyint((1.0 - options.dropout_p) * 65536.0)));
        params.keep_scale = 65536.f / static_cast<float>(params.keep_threshold);
    }
    params.aligned = is_aligned(q) && is_aligned(k) && is_aligned(v);
}

template <class Params>
using Launcher = cudaError_t (*)(Params, cudaStream_t);

template <class Params>
void launch(const Params& params, const Tensor& q, Variant variant,
            const std::array<Launcher<Params>, kVariants>& launchers) {
    const cudaError_t status = launchers[static_cast<int>(variant)](params, current_stream(q));
    if (status != cudaSuccess) fail("the CUDA launch failed: ", cudaGetErrorString(status));
}

// function(constant of the head dim with kernels of its own that head_dim is padded to)
template <class Function>
void dispatch_head_dim(int head_dim, Function function) {
    static_assert(std::size(kHeadDims) == 5);
    dispatch<kHeadDims[0], kHeadDims[1], kHeadDims[2], kHeadDims[3], kHeadDims[4]>(
        padded_head_dim(head_dim), function);
}

// Some GPUs (compute capability 8.6, 8.9, 12.x) have less shared memory than the A100.
void check_shared_memory(const Tensor& q, Variant variant, bool backward) {
    int needed = 0;
    dispatch_head_dim(static_cast<int>(q.size(3)), [&](auto dim) {
        const int bytes[2][kVariants] = {
            {fa1_forward_shared_bytes<dim>(), fa2_forward_shared_bytes<dim>()},
            {fa1_backward_shared_bytes<dim>(), fa2_backward_shared_bytes<dim>()}};
        needed = bytes[backward][static_cast<int>(variant)];
    });
    const int available = device_limits(q.get_device_index()).shared_bytes;
    if (needed > available)
        fail("variant '", kVariantNames[static_cast<int>(variant)], "' needs ", needed,
             " bytes of shared memory per block ", backward ? "in the backward pass " : "",
             "at head dimension ", q.size(3), ", this GPU has ", available);
}

}  // namespace

std::tuple<Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Options& options) {
    const Variant variant = check_forward(q, k, v, options);
    check_shared_memory(q, variant, false);
    ForwardParams params;
    fill_params(params, q, k, v, options);

    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    Tensor out = empty(q, std::array{q.size(0), q.size(1), q.size(2), v.size(3)}, q.scalar_type());
    Tensor lse = empty(q, std::array{q.size(0), q.size(2), q.size(1)}, ScalarType::Float);
    params.q = view(q);
    params.k = view(k);
    params.v = view(v);
    params.out = view(out);
    params.lse = static_cast<float*>(lse.data_ptr());

    Workspace workspace(q);
    if (variant == Variant::kFa1) {
        const int head_dim = padded_head_dim(params.head_dim_v);
        const int block_q = tuning::fa1_forward(head_dim).block_q;
        const int64_t heads = q.size(0) * q.size(2);
        const int64_t rows = heads * q.size(1);
        params.out_accum = workspace.allocate<float>(heads * ceil_div(params.seqlen_q, block_q) *
                                                     block_q * head_dim);
        params.row_max = workspace.allocate<float>(rows);
        params.row_sum = workspace.allocate<float>(rows);
    }
    dispatch_head_dim(params.head_dim, [&](auto dim) {
        launch<ForwardParams>(params, q, variant, {fa1_forward<dim>, fa2_forward<dim>});
    });
    return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& out, const Tensor& lse, const Options& options) {
    const Variant variant = check_backward(dout, dlse, q, k, v, out, lse, options);
    check_shared_memory(q, variant, true);
    BackwardParams params;
    fill_params(params, q, k, v, options);
    params.aligned = params.aligned && is_aligned(dout) && is_aligned(out);
    params.deterministic = options.deterministic;

    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    const auto empty_as = [&](const Tensor& x) {
        return empty(x, std::array{x.size(0), x.size(1), x.size(2), x.size(3)}, x.scalar_type());
    };
    Tensor dq = empty_as(q);
    Tensor dk = empty_as(k);
    Tensor dv = empty_as(v);
    params.q = view(q);
    params.k = view(k);
    params.v = view(v);
    params.out = view(out);
    params.dout = view(dout);
    params.lse = static_cast<const float*>(lse.data_ptr());
    params.dlse = dlse ? static_cast<const float*>(dlse->data_ptr()) : nullptr;
    params.dq = view(dq);
    params.dk = view(dk);
    params.dv = view(dv);

    const int head_dim = padded_head_dim(params.head_dim);
    const int block_q = tuning::backward_block_q(variant, head_dim);
    params.q_tiles = ceil_div(params.seqlen_q, block_q);
    const int64_t q_tiles = int64_t{params.q_tiles} * params.heads_q * params.batch;
    Workspace workspace(q);
    params.dq_accum = workspace.allocate<float>(q_tiles * block_q * head_dim);
    params.lse_log2 = workspace.allocate<float>(q_tiles * block_q);
    params.delta = workspace.allocate<float>(q_tiles * block_q);
    if (params.deterministic && variant == Variant::kFa2)
        params.turn = workspace.allocate<int>(1 + q_tiles);

    dispatch_head_dim(params.head_dim, [&](auto dim) {
        launch<BackwardParams>(params, q, variant, {fa1_backward<dim>, fa2_backward<dim>});
    });
    const auto none = [&] { return empty(q, std::array<int64_t, 1>{0}, q.scalar_type()); };
    return {dq, dk, dv, none(), none()};
}

int64_t attention_check(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
    const Variant variant = check_forward(q, k, v, options);
    check_shared_memory(q, variant, false);
    return static_cast<int64_t>(variant);
}

}  // namespace flash_ext
