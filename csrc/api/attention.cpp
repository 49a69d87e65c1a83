// From tensors to kernels: check, allocate, fill in the params, choose the variant, launch.
#include "api/attention.h"

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "api/check.h"
#include "api/out_of_memory.h"
#include "plan/dispatch.h"
#include "plan/ds_workspace.cuh"
#include "plan/head_dims.h"
#include "plan/launchers.h"
#include "plan/tuning.h"
#include "plan/workspace_rows.cuh"
#include "problem/mask.cuh"
#include "problem/params.h"
#include "problem/sequences.cuh"
#include "schedule/launch_name.h"
#include "schedule/packed_gqa.h"
#include "schedule/split_kv.cuh"
#include "schedule/tile_numbers.cuh"
#include "tile/host_device.h"

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
Tensor empty(const Tensor& q, const std::vector<int64_t>& shape, ScalarType dtype) {
    std::vector<int64_t> strides(shape.size());
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0;) {
        strides[i] = stride;
        stride *= std::max<int64_t>(shape[i], 1);
    }
    return empty_strided(q, shape, strides, dtype);
}

// Scratch memory, given back to torch's allocator when the call returns: the allocator reuses it
// only for work later on the same stream.
class Workspace {
 public:
    explicit Workspace(const Tensor& q) : q_(q) {}

    template <class T>
    T* allocate(int64_t count) {
        static_assert(sizeof(T) % 4 == 0);
        const ScalarType dtype = std::is_same_v<T, int> ? ScalarType::Int : ScalarType::Float;
        tensors_.push_back(empty(q_, {count * static_cast<int64_t>(sizeof(T) / 4)}, dtype));
        return static_cast<T*>(tensors_.back().data_ptr());
    }

    unsigned long long* allocate_counters(int count) {
        return reinterpret_cast<unsigned long long*>(allocate<int>(2 * count));
    }

 private:
    const Tensor& q_;
    std::vector<Tensor> tensors_;
};

TensorView view(const Tensor& tensor) {
    // The stride of a dimension of size 1 is never used, and need not be aligned.
    const auto stride = [&](int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); };
    const int64_t dims = tensor.dim();
    return {tensor.data_ptr(), dims == 4 ? stride(0) : 0, stride(dims - 3), stride(dims - 2)};
}

// Do all rows start on 16-byte boundaries and end on them?
bool is_aligned(const Tensor& tensor) {
    constexpr int64_t kElements = 16 / 2;
    const int64_t last = tensor.dim() - 1;
    bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0 &&
                   tensor.size(last) % kElements == 0;
    for (int64_t dim = 0; dim < last; ++dim)
        aligned = aligned && (tensor.size(dim) == 1 || tensor.stride(dim) % kElements == 0);
    return aligned;
}

// Can TMA address all rows? See tile/tensor_map.cuh.
bool copy_engine_reaches(const Tensor& tensor) {
    int64_t end = 0;  // in elements, of the memory that the tensor's rows span
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) end += tensor.size(dim) * tensor.stride(dim);
    const int64_t row_dim = tensor.dim() - 3;
    const bool rows_differ = tensor.size(row_dim) == 1 || tensor.stride(row_dim) > 0;
    return rows_differ && 2 * end < int64_t{1} << 35;
}

template <class T>
const T* data_of(const std::optional<Tensor>& tensor) {
    return tensor ? static_cast<const T*>(tensor->data_ptr()) : nullptr;
}

Bias bias_of(const Tensor& tensor) {
    Bias bias;
    bias.data = tensor.data_ptr();
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

// The options with a bias that kernels can read: keys side by side, or one for all of them.
Options readable(Options options) {
    if (options.bias && options.bias->dim() == 4 && options.bias->size(3) > 1 &&
        options.bias->stride(3) != 1)
        options.bias = torch::stable::contiguous(*options.bias);
    return options;
}

void fill_params(AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Sizes& sizes, const Options& options) {
    const int64_t kUnlimited = BandMask::kUnlimited;
    params.element_type =
        q.scalar_type() == ScalarType::Half ? ElementType::kFloat16 : ElementType::kBFloat16;
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

    const auto bound = [&](int64_t window) {
        return static_cast<int>(window < 0 ? kUnlimited : std::min(window, kUnlimited));
    };
    params.window_left = bound(options.window_left);
    params.window_right = options.causal ? 0 : bound(options.window_right);

    params.scale = static_cast<float>(
        options.scale.value_or(1.0 / std::sqrt(static_cast<double>(params.head_dim))));
    params.scale_log2 = params.scale * kLog2e;
    params.softcap = static_cast<float>(options.softcap);
    params.alibi_slopes = data_of<float>(options.alibi_slopes);
    if (options.alibi_slopes && options.alibi_slopes->dim() == 2)
        params.alibi_batch_stride = options.alibi_slopes->stride(0);
    if (options.bias) params.bias = bias_of(*options.bias);
    params.sink = data_of<float>(options.sink);

    if (options.dropout_p > 0) {
        params.rng_state = data_of<int64_t>(options.rng_state);
        params.keep_threshold = static_cast<uint32_t>(
            std::max(1.0, std::nearbyint((1.0 - options.dropout_p) * 65536.0)));
        params.keep_scale = 65536.f / static_cast<float>(params.keep_threshold);
    }
    params.aligned = is_aligned(q) && is_aligned(k) && is_aligned(v);
}

void check_launch(cudaError_t status) {
    if (status != cudaSuccess) fail("the CUDA launch failed: ", cudaGetErrorString(status));
}

// function(constants of the head dims with kernels of their own that the call is padded to)
template <class Function>
void dispatch_head_dims(const Sizes& sizes, Function function) {
    const int index =
        padded_head_dims(static_cast<int>(sizes.head_dim), static_cast<int>(sizes.head_dim_v));
    compile_time_for<kHeadDimPairs>([&](auto i) {
        constexpr HeadDims kDims = kHeadDims[i];
        if (i == index)
            function(std::integral_constant<int, kDims.qk>{},
                     std::integral_constant<int, kDims.v>{});
    });
}

enum class Pass { kForward, kBackward };

// A tensor whose rows a kernel reads, by the name of the argument.
struct NamedTensor {
    const char* name;
    const Tensor& tensor;
};

// With which lse is never large, see kernels/common/large_lse.cuh.
constexpr double kMaxFa3Softcap = 2048;

// Why a variant's kernels cannot run a pass of the call; empty where they can. `inputs` are those
// of the pass that there are already.
std::string obstacle(Variant variant, Pass pass, std::span<const NamedTensor> inputs,
                     const Sizes& sizes, const Options& options) {
    const DeviceLimits& limits = device_limits(inputs[0].tensor.get_device_index());
    const bool backward = pass == Pass::kBackward;
    if (variant == Variant::kFa3) {
#ifndef FLASH_EXT_SM90A
        return "was not built: add 90a to FLASH_EXT_CUDA_ARCHS";
#endif
        if (limits.major != 9)
            return "needs a Hopper GPU (compute capability 9.0), this one has " +
                   std::to_string(limits.major) + "." + std::to_string(limits.minor);
        if (options.dropout_p > 0) return "has no dropout";
        if (options.bias) return "has no bias";
        if (options.softcap > kMaxFa3Softcap) return "has no softcap above 2048";
        for (const auto& [name, x] : inputs) {
            // A tensor map wants memory.
            if (backward && x.numel() == 0)
                return std::string("has no backward for an empty ") + name;
            if (!is_aligned(x))
                return std::string("needs rows of ") + name +
                       " that start and end on 16-byte boundaries";
            if (!copy_engine_reaches(x))
                return std::string("needs rows of ") + name +
                       " that are not one row repeated, within 32 GiB of memory";
        }
        // What tile_counter.cuh can count, of the smallest tiles.
        const int rows = backward ? 64 : 128;
        const auto tiles = [&](int64_t heads, int64_t length) {
            return heads * sizes.tensor_batches() *
                   (length / rows + 1 + (sizes.packed ? sizes.batch : 0));
        };
        const int64_t keys = backward ? tiles(sizes.heads_k, sizes.seqlen_k) : 0;
        if (std::max(keys, tiles(sizes.heads_q, sizes.seqlen_q)) >= int64_t{1} << 24)
            return "needs fewer than 2^24 tiles of " + std::to_string(rows) + " rows";
    }
    // Some GPUs (compute capability 8.6, 8.9, 12.x) have less shared memory than the A100.
    int needed = 0;
    dispatch_head_dims(sizes, [&](auto dim, auto dim_v) {
        const int bytes[2][kVariants] = {
            {fa1_forward_shared_bytes<dim, dim_v>(), fa2_forward_shared_bytes<dim, dim_v>(), 0},
            {fa1_backward_shared_bytes<dim, dim_v>(), fa2_backward_shared_bytes<dim, dim_v>(), 0}};
        needed = bytes[backward][static_cast<int>(variant)];
    });
    if (needed <= limits.shared_bytes) return "";
    std::ostringstream text;
    text << "needs " << needed << " bytes of shared memory per block "
         << (backward ? "in the backward pass " : "") << "at head dimensions " << sizes.head_dim
         << " and " << sizes.head_dim_v << ", this GPU has " << limits.shared_bytes;
    return text.str();
}

std::string named(Variant variant, const std::string& why) {
    return std::string("variant '") + kVariantNames[static_cast<int>(variant)] + "' " + why;
}

// The variant of the call: the one named, or the fastest that runs the forward pass.
Variant choose_variant(std::span<const NamedTensor> inputs, const Sizes& sizes,
                       const Options& options) {
    const auto wanted = check_variant(options);
    Variant variant = wanted.value_or(Variant::kFa3);
    std::string why = obstacle(variant, Pass::kForward, inputs, sizes, options);
    if (!wanted && !why.empty()) {
        variant = Variant::kFa2;
        why = obstacle(variant, Pass::kForward, inputs, sizes, options);
    }
    if (!why.empty()) fail(named(variant, why));
    return variant;
}

// Whose kernels compute the gradients of a call of `variant`: its own, or fa2's where fa3's cannot.
struct BackwardChoice {
    std::optional<Variant> variant;  // none: no kernel can
    std::string why;                 // not its own
};

BackwardChoice choose_backward(Variant variant, std::span<const NamedTensor> inputs,
                               const Sizes& sizes, const Options& options) {
    const std::string why = obstacle(variant, Pass::kBackward, inputs, sizes, options);
    if (why.empty()) return {variant, ""};
    if (variant != Variant::kFa3) return {std::nullopt, named(variant, why)};
    return {Variant::kFa2, named(variant, why)};  // which fits every Hopper GPU
}

// Sequence lengths are on the device, where the host cannot see them: with FLASH_EXT_DEBUG=1 they
// are fetched, which waits for the device, and checked.
void debug_seqlens(const Tensor& q, const Sizes& sizes, const Options& options) {
    if (!sizes.packed && !options.seqused_k) return;
    const char* debug = std::getenv("FLASH_EXT_DEBUG");
    if (debug == nullptr || std::string(debug) == "0" || std::string(debug).empty()) return;
    const auto fetch = [&](const std::optional<Tensor>& tensor) {
        std::vector<int> values(tensor ? tensor->numel() : 0);
        const cudaStream_t stream = current_stream(q);
        if (!values.empty() &&
            (cudaMemcpyAsync(values.data(), tensor->data_ptr(), values.size() * sizeof(int),
                             cudaMemcpyDeviceToHost, stream) != cudaSuccess ||
             cudaStreamSynchronize(stream) != cudaSuccess)) {
            cudaGetLastError();
            fail(
                "FLASH_EXT_DEBUG=1 cannot read sequence lengths here, for example while a CUDA "
                "graph is captured");
        }
        return values;
    };
    const std::vector<int> offsets[2] = {fetch(options.cu_seqlens_q), fetch(options.cu_seqlens_k)};
    for (int i = 0; i < 2 && sizes.packed; ++i) {
        const std::string name = i == 0 ? "cu_seqlens_q" : "cu_seqlens_k";
        const int64_t total = i == 0 ? sizes.seqlen_q : sizes.seqlen_k;
        for (size_t b = 0; b < offsets[i].size(); ++b) {
            const int64_t low = b == 0 ? 0 : offsets[i][b - 1];
            const int64_t high = b == 0 ? 0 : total;
            if (offsets[i][b] < low || offsets[i][b] > high)
                refuse(name + "[" + std::to_string(b) + "]",
                       b == 0 ? "0"
                              : "from " + std::to_string(low) + " (the entry before) to " +
                                    std::to_string(high) + " (all rows)",
                       offsets[i][b]);
        }
    }
    const std::vector<int> used = fetch(options.seqused_k);
    for (size_t b = 0; b < used.size(); ++b) {
        const int64_t length = sizes.packed ? offsets[1][b + 1] - offsets[1][b] : sizes.seqlen_k;
        if (used[b] < 0 || used[b] > length)
            refuse("seqused_k[" + std::to_string(b) + "]",
                   "from 0 to the sequence's " + std::to_string(length) + " keys", used[b]);
    }
    for (int i = 0; i < 2 && sizes.packed && options.bias; ++i) {
        const int64_t reach = options.bias->size(2 + i);
        for (size_t b = 0; reach != 1 && b + 1 < offsets[i].size(); ++b)
            if (offsets[i][b + 1] - offsets[i][b] > reach)
                refuse("bias",
                       "as long as the longest sequence in dimension " + std::to_string(2 + i) +
                           ", at least " + std::to_string(offsets[i][b + 1] - offsets[i][b]),
                       reach);
    }
}

// A single query, as in decoding: the heads that share a key head become the rows of one tile,
// which loads K and V once for all of them. Only where nothing tells these heads or rows apart.
void fold_group(ForwardParams& params) {
    const int group = params.heads_q / std::max(params.heads_k, 1);
    const bool alike = params.alibi_slopes == nullptr && params.bias.data == nullptr &&
                       params.sink == nullptr && params.rng_state == nullptr;
    const bool sees_all_keys = params.window_left >= params.seqlen_k;
    if (params.seqlen_q != 1 || params.cu_seqlens_q != nullptr || group < 2 || !alike ||
        !sees_all_keys || params.q.head_stride == 0)
        return;
    for (TensorView* view : {&params.q, &params.out}) {
        view->row_stride = view->head_stride;
        view->head_stride *= group;
    }
    params.seqlen_q = group;  // and lse (B, Hq, 1) is lse (B, Hk, group)
    params.heads_q = params.heads_k;
    params.window_right = BandMask::kUnlimited;
}

// How many Q tiles the GPU works on at a time in fa2's or fa3's forward.
template <int kHeadDim, int kHeadDimV>
int tiles_at_once(Variant variant, Features features, const DeviceLimits& limits) {
    if (variant == Variant::kFa3) return limits.multiprocessors;
    // An SM has 1 KB more shared memory than a CTA may have, and takes as much for each CTA.
    constexpr int kReserved = 1024;
    const int fitting = (limits.shared_bytes + kReserved) /
                        (fa2_forward_shared_bytes<kHeadDim, kHeadDimV>() + kReserved);
    const int tuned = tuning::fa2_forward({kHeadDim, kHeadDimV}, features).ctas_per_sm;
    return limits.multiprocessors * std::min(tuned, fitting);
}

}  // namespace

Tensor empty_strided(const Tensor& x, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& strides, ScalarType dtype) {
    int32_t code = aoti_torch_dtype_float32();
    if (dtype == ScalarType::Half) code = aoti_torch_dtype_float16();
    if (dtype == ScalarType::BFloat16) code = aoti_torch_dtype_bfloat16();
    if (dtype == ScalarType::Int) code = aoti_torch_dtype_int32();
    if (dtype == ScalarType::UInt64) code = aoti_torch_dtype_uint64();
    AtenTensorHandle handle = nullptr;
    if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                 code, aoti_torch_device_type_cuda(), x.get_device_index(),
                                 &handle) != 0)
        throw_out_of_memory("CUDA out of memory. flash_ext tried to allocate a tensor of shape " +
                            shape_text(sizes) + " on cuda:" + std::to_string(x.get_device_index()));
    return Tensor(handle);
}

Tensor with_contiguous_rows(const Tensor& x) {
    if (x.stride(x.dim() - 1) == 1) return x;
    Tensor copy = empty(x, {x.sizes().begin(), x.sizes().end()}, x.scalar_type());
    torch::stable::copy_(copy, x);
    return copy;
}

std::tuple<Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Options& given, const Tensor& into) {
    const Sizes sizes = check_forward(q, k, v, given);
    const NamedTensor inputs[] = {{"q", q}, {"k", k}, {"v", v}};
    const Variant variant = choose_variant(inputs, sizes, given);
    const Options options = readable(given);
    debug_seqlens(q, sizes, options);
    ForwardParams params;
    fill_params(params, q, k, v, sizes, options);

    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    Tensor out = into;
    if (!out.defined())
        out =
            empty(q, sizes.rows(sizes.seqlen_q, sizes.heads_q, sizes.head_dim_v), q.scalar_type());
    Tensor lse = empty(q, sizes.statistics(), ScalarType::Float);
    params.q = view(q);
    params.k = view(k);
    params.v = view(v);
    params.out = view(out);
    params.lse = static_cast<float*>(lse.data_ptr());
    fold_group(params);

    Workspace workspace(q);
    const cudaStream_t stream = current_stream(q);
    dispatch_head_dims(sizes, [&](auto dim, auto dim_v) {
        if (variant == Variant::kFa1) {
            constexpr int kBlockQ = tuning::fa1_forward({dim, dim_v}).block_q;
            const int64_t rows = tile_count(params, {params.heads_q, kBlockQ}) * kBlockQ;
            params.out_accum = workspace.allocate<float>(rows * dim_v);
            params.row_statistics = workspace.allocate<float>(rows * 2);
            check_launch(fa1_forward<dim, dim_v>(params, stream));
            return;
        }
        const bool fa3 = variant == Variant::kFa3;
        const Features features = features_of(params);
        // ALiBi tells heads apart, and TMA wants them apart in memory.
        const bool may_fold = fa3 && params.alibi_slopes == nullptr && params.q.head_stride > 0;
        const QueryTiles q_tiles = query_tiles(params, tuning::kForwardBlockQ, may_fold);
        const int64_t tiles = tile_count(params, q_tiles);
        const int at_once =
            tiles_at_once<dim, dim_v>(variant, features, device_limits(q.get_device_index()));
        params.few_tiles = tiles <= at_once;
        params.fold = q_tiles.fold;
        params.key_parts =
            key_parts(params, tiles, params.heads_q / std::max(q_tiles.heads, 1), at_once);
        const bool combine = params.key_parts > 1 || params.fold > 0;
        if (combine) {
            const int64_t rows = params.key_parts * lse.numel();
            params.part_out = workspace.allocate<float>(rows * dim_v);
            params.part_statistics = workspace.allocate<PartStatistics>(rows);
        }
        if (fa3) {
            if (tiles * params.key_parts > at_once)
                params.tile_counter = workspace.allocate_counters(1);
            check_launch(fa3_forward<dim, dim_v>(params, stream));
        } else {
            check_launch(fa2_forward<dim, dim_v>(params, stream));
        }
        if (combine) check_launch(combine_parts(params, stream, fa3));
    });
    return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& out, const Tensor& lse, const Options& given, bool need_dbias,
    const std::tuple<Tensor, Tensor, Tensor>& into) {
    const Sizes sizes = check_backward(dout, dlse, q, k, v, out, lse, given);
    const NamedTensor inputs[] = {{"q", q}, {"k", k}, {"v", v}, {"out", out}, {"dout", dout}};
    const std::span<const NamedTensor> all(inputs);
    const BackwardChoice choice =
        choose_backward(choose_variant(all.first(3), sizes, given), all, sizes, given);
    if (!choice.variant) fail(choice.why);
    const Variant variant = *choice.variant;
    const Options options = readable(given);
    debug_seqlens(q, sizes, options);
    BackwardParams params;
    fill_params(params, q, k, v, sizes, options);
    params.aligned = params.aligned && is_aligned(dout) && is_aligned(out);
    params.ds_factor = std::sqrt(params.keep_scale);
    params.inverse_ds_factor = 1.f / params.ds_factor;
    params.gradient_scale = params.scale * params.ds_factor;
    params.deterministic = options.deterministic;

    const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    const auto empty_as = [&](const Tensor& x) {
        return empty(q, {x.sizes().begin(), x.sizes().end()}, x.scalar_type());
    };
    const bool has_dbias =
        need_dbias && options.bias && options.bias->scalar_type() != ScalarType::Bool;
    auto [dq, dk, dv] = into;
    if (!dq.defined()) {
        dq = empty_as(q);
        dk = empty_as(k);
        dv = empty_as(v);
    }
    Tensor dbias = has_dbias ? empty_as(*options.bias) : Tensor();
    Tensor dsink = options.sink ? empty_as(*options.sink) : Tensor();
    params.q = view(q);
    params.k = view(k);
    params.v = view(v);
    params.out = view(out);
    params.dout = view(dout);
    params.lse = static_cast<const float*>(lse.data_ptr());
    params.dlse = data_of<float>(dlse);
    params.dq = view(dq);
    params.dk = view(dk);
    params.dv = view(dv);
    if (has_dbias) params.dbias = dbias.data_ptr();
    if (options.sink) params.dsink = static_cast<float*>(dsink.data_ptr());

    Workspace workspace(q);
    const cudaStream_t stream = current_stream(q);
    if (params.deterministic && sizes.packed) {
        int* offsets_q = workspace.allocate<int>(sizes.batch + 1);
        int* offsets_k = workspace.allocate<int>(sizes.batch + 1);
        check_launch(monotone_offsets(params, offsets_q, offsets_k, stream));
        params.cu_seqlens_q = offsets_q;
        params.cu_seqlens_k = offsets_k;
    }
    dispatch_head_dims(sizes, [&](auto dim, auto dim_v) {
        // fa3 has no backward kernel for 96, and keeps dQ of wide heads in registers.
        constexpr int kFa3Dim = dim == 96 ? 128 : dim;
        constexpr int kFa3DimV = dim == 96 ? 128 : dim_v;
        const int block =
            variant != Variant::kFa3 || dim > 128
                ? kWorkspaceRows
                : workspace_block(tuning::fa3_backward({kFa3Dim, kFa3DimV},
                                                       tuning::many_queries(features_of(params),
                                                                            mean_queries(params)))
                                      .block_q);
        params.q_blocks = tile_numbers(params, params.seqlen_q, block);
        const int64_t rows = workspace_rows(params, block);
        const int sum_columns = variant != Variant::kFa3 ? dim : dim > 128 ? 0 : kFa3Dim;
        const int64_t turns = 1 + rows / tuning::kMinBackwardBlockQ;
        const int64_t queries = statistics_rows(params);
        params.lse_log2 =
            workspace.allocate<float>(rows * (3 + sum_columns) + turns + 3 + 2 * queries);
        params.delta = params.lse_log2 + rows;
        if (variant != Variant::kFa3) params.reference = params.delta + rows;
        params.dq_accum = params.delta + 2 * rows;
        params.turn = reinterpret_cast<int*>(params.dq_accum + rows * sum_columns);
        params.large_lse = {reinterpret_cast<unsigned long long*>(params.turn + turns + turns % 2),
                            launch_name()};
        if (variant != Variant::kFa3 || params.softcap == 0.f)
            params.relative_lse = reinterpret_cast<RelativeLse*>(params.large_lse.word + 1);
        if (variant == Variant::kFa1) {
            check_launch(fa1_backward<dim, dim_v>(params, stream));
        } else if (variant == Variant::kFa2) {
            check_launch(fa2_backward<dim, dim_v>(params, stream));
        } else {
            if (dim > 128) {
                params.tile_counter = workspace.allocate_counters(2);
                params.ds_bytes = ds_workspace_bytes(params);
                if (params.ds_bytes > 0) params.ds = workspace.allocate<int>(params.ds_bytes / 4);
            }
            check_launch(fa3_backward<kFa3Dim, kFa3DimV>(params, stream));
        }
        if (has_dbias) check_launch(bias_gradient<dim, dim_v>(params, stream));
    });
    if (options.sink) {
        params.dsink_parts = workspace.allocate<float>(sizes.heads_q * tuning::kSinkParts);
        check_launch(sink_gradient(params, stream));
    }
    return {dq, dk, dv, dbias, dsink};
}

std::tuple<int64_t, int64_t, std::string> attention_check(const Tensor& q, const Tensor& k,
                                                          const Tensor& v, const Options& options) {
    const Sizes sizes = check_forward(q, k, v, options);
    const NamedTensor inputs[] = {{"q", q}, {"k", k}, {"v", v}};
    const Variant variant = choose_variant(inputs, sizes, options);
    const BackwardChoice backward = choose_backward(variant, inputs, sizes, options);
    return {static_cast<int64_t>(variant),
            backward.variant ? static_cast<int64_t>(*backward.variant) : -1, backward.why};
}

}  // namespace flash_ext
