// Argument checks. A message names the argument, what was expected and what was given. The ops fwd
// and bwd allocate and launch nothing before all checks have passed. The CPU kernels have the same
// checks in flash_ext/cpu/checks.py.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "api/attention.h"
#include "plan/call.h"
#include "plan/device.h"
#include "plan/text.h"
#include "plan/tuning.h"
#include "plan/variants.h"
#include "problem/params.h"

// Weak: a CPU-only libtorch lacks it, and there this library must load too.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace flash_ext {

using torch::headeronly::ScalarType;

// What the tensors of a call agree on: dense (batch, seqlen, heads, head_dim), or packed (total,
// heads, head_dim).
struct Sizes {
    bool varlen;
    int64_t batch;
    int64_t seqlen_q;  // all rows when packed
    int64_t seqlen_k;
    int64_t heads_q;
    int64_t heads_k;
    int64_t head_dim;
    int64_t head_dim_v;

    // The shape of q, k, v or out.
    std::vector<int64_t> rows(int64_t seqlen, int64_t heads, int64_t dim) const {
        if (varlen) return {seqlen, heads, dim};
        return {batch, seqlen, heads, dim};
    }
    std::vector<int64_t> statistics() const {
        if (varlen) return {heads_q, seqlen_q};
        return {batch, heads_q, seqlen_q};
    }
    int64_t tensor_batches() const { return varlen ? 1 : batch; }
};

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    throw std::runtime_error(text("flash_ext: ", parts...));
}

template <class Got>
[[noreturn]] void refuse(std::string_view argument, std::string_view wanted, const Got& got) {
    fail(argument, " must be ", wanted, ", got ", got);
}

template <class Range>
std::string shape_text(const Range& sizes) {
    std::string shape;
    for (const auto size : sizes) shape += text(shape.empty() ? "" : ", ", size);
    return text("(", shape, ")");
}

inline const char* dtype_name(ScalarType dtype) {
    constexpr std::pair<ScalarType, const char*> kNames[] = {
        {ScalarType::Half, "float16"},
        {ScalarType::BFloat16, "bfloat16"},
        {ScalarType::Float, "float32"},
        {ScalarType::Double, "float64"},
        {ScalarType::Int, "int32"},
        {ScalarType::Long, "int64"},
        {ScalarType::Bool, "bool"},
        {ScalarType::Char, "int8"},
        {ScalarType::Float8_e4m3fn, "float8_e4m3fn"},
        {ScalarType::Float8_e5m2, "float8_e5m2"},
        {ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz"},
        {ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz"}};
    for (const auto& [named, name] : kNames)
        if (named == dtype) return name;
    return "another dtype";
}

inline void require_dtype(std::string_view argument, const Tensor& tensor, ScalarType dtype) {
    if (tensor.scalar_type() != dtype)
        refuse(argument, dtype_name(dtype), dtype_name(tensor.scalar_type()));
}

// `owner`: the name of x.
inline void require_device(std::string_view argument, const Tensor& tensor, const Tensor& x,
                           std::string_view owner = "q") {
    const int32_t device = tensor.get_device_index();
    if (!tensor.is_cuda() || device != x.get_device_index())
        refuse(argument, text("on ", owner, "'s device cuda:", x.get_device_index()),
               tensor.is_cuda() ? text("cuda:", device) : "a tensor elsewhere");
}

inline void require_shape(std::string_view argument, const Tensor& tensor,
                          const std::vector<int64_t>& shape, std::string_view layout) {
    const auto sizes = tensor.sizes();
    if (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()))
        refuse(argument, text("of shape ", layout, " = ", shape_text(shape)), shape_text(sizes));
}

inline void require_contiguous_rows(std::string_view argument, const Tensor& tensor) {
    const int64_t last = tensor.dim() - 1;
    if (tensor.numel() > 0 && tensor.size(last) > 1 && tensor.stride(last) != 1)
        refuse(argument, "contiguous in its last dimension",
               text("strides ", shape_text(tensor.strides())));
}

// q, k, v, out or dout: q's dtype and device, contiguous rows.
inline void require_like(std::string_view argument, const Tensor& tensor, const Tensor& q) {
    if (tensor.scalar_type() != q.scalar_type())
        refuse(argument, text("of q's dtype ", dtype_name(q.scalar_type())),
               dtype_name(tensor.scalar_type()));
    require_device(argument, tensor, q);
    require_contiguous_rows(argument, tensor);
}

// What an argument of options must be, except its values.
inline void require_option(std::string_view argument, const Tensor& tensor, ScalarType dtype,
                           const std::vector<int64_t>& shape, std::string_view layout,
                           const Tensor& q) {
    require_dtype(argument, tensor, dtype);
    require_shape(argument, tensor, shape, layout);
    require_device(argument, tensor, q);
    if (!tensor.is_contiguous())
        refuse(argument, "contiguous", text("strides ", shape_text(tensor.strides())));
}

// lse or dlse.
inline void require_statistics(std::string_view argument, const Tensor& tensor, const Sizes& sizes,
                               const Tensor& q) {
    require_option(argument, tensor, ScalarType::Float, sizes.statistics(),
                   sizes.varlen ? "(heads_q, total_q)" : "(batch, heads_q, seqlen_q)", q);
}

inline void check_bias(const Tensor& bias, const Sizes& sizes, const Tensor& q) {
    const ScalarType dtype = bias.scalar_type();
    if (dtype != q.scalar_type() && dtype != ScalarType::Float && dtype != ScalarType::Bool)
        refuse("bias", text(dtype_name(q.scalar_type()), ", float32 or bool"), dtype_name(dtype));
    require_device("bias", bias, q);
    if (bias.dim() != 4)
        refuse("bias", "of shape (batch, heads_q, seqlen_q, seqlen_k), any of them 1",
               shape_text(bias.sizes()));
    const std::pair<const char*, int64_t> wanted[] = {{"batch", sizes.batch},
                                                      {"heads_q", sizes.heads_q},
                                                      {"seqlen_q", sizes.seqlen_q},
                                                      {"seqlen_k", sizes.seqlen_k}};
    for (int dim = 0; dim < 4; ++dim) {
        const auto& [name, size] = wanted[dim];
        const bool by_position = sizes.varlen && dim >= 2;  // as long as the longest sequence
        if (bias.size(dim) != 1 && !by_position && bias.size(dim) != size)
            refuse("bias", text("1 or ", name, " = ", size, " in dimension ", dim),
                   shape_text(bias.sizes()));
        if (bias.size(dim) >= int64_t{1} << 29)
            refuse("bias", "below 2^29 in every dimension", shape_text(bias.sizes()));
    }
}

inline ElementType element_type(ScalarType dtype) {
    if (dtype == ScalarType::Float8_e4m3fn) return ElementType::kFloat8;
    if (dtype == ScalarType::Char) return ElementType::kInt8;
    return dtype == ScalarType::Half ? ElementType::kFloat16 : ElementType::kBFloat16;
}

// A tensor as plans see it.
inline Operand operand(const char* name, const Tensor& tensor) {
    Operand x{.name = name,
              .data = tensor.data_ptr(),
              .sizes = {1, 1, 1, 1},
              .strides = {0, 0, 0, 0},
              .element_bytes = static_cast<int>(tensor.element_size())};
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    const size_t first = 4 - sizes.size();  // packed sequences have no dimension of batches
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
        x.sizes[first + dim] = sizes[dim];
        x.strides[first + dim] = strides[dim];
    }
    return x;
}

// The dtype of out, for that of q.
inline ScalarType out_dtype(ScalarType dtype, const Options& options) {
    if (options.out_dtype) return *options.out_dtype;
    return has_8_bits(dtype) ? ScalarType::BFloat16 : dtype;
}

// A descale: its values for a head are by blocks of rows or by channels.
struct DescaleArgument {
    const char* name;
    const std::optional<Tensor>& tensor;
    const char* layout;
    int64_t heads;
    // Values of a head. -1, of blocks with varlen: as many as the longest sequence has, or more;
    // only the device knows that number.
    int64_t last;
};

inline void check_descale(const DescaleArgument& x, const Sizes& sizes, const Tensor& q) {
    const Tensor& descale = *x.tensor;
    const int64_t dims = descale.dim();
    require_dtype(x.name, descale, ScalarType::Float);
    require_device(x.name, descale, q);
    bool fits = dims == 0 || (dims == 1 && descale.size(0) == 1);
    if (dims == 2) fits = descale.size(0) == sizes.batch && descale.size(1) == sizes.heads_k;
    if (dims == 3)
        fits = descale.size(0) == sizes.batch && descale.size(1) == x.heads &&
               (x.last < 0 || descale.size(2) == x.last);
    if (fits) return;
    const std::string last = x.last < 0 ? "blocks" : text(x.last);
    refuse(x.name,
           text("one number, of shape (batch, heads_k) = (", sizes.batch, ", ", sizes.heads_k,
                "), or ", x.layout, " = (", sizes.batch, ", ", x.heads, ", ", last, ")"),
           shape_text(descale.sizes()));
}

// What only 8-bit inputs have, and what they cannot have. `dtype` is q's.
inline void check_8_bit_options(const Tensor& q, ScalarType dtype, const Sizes& sizes,
                                const Options& options) {
    const bool is_8_bit = has_8_bits(dtype);
    const std::optional<ScalarType>& out = options.out_dtype;
    if (is_8_bit && out && *out != ScalarType::BFloat16 && *out != ScalarType::Half)
        refuse("out_dtype", "bfloat16 or float16 with 8-bit inputs", dtype_name(*out));
    if (is_8_bit && options.bias)
        refuse("bias", "None with 8-bit inputs (no variant has both)",
               shape_text(options.bias->sizes()));
    if (is_8_bit && options.dropout_p != 0)
        refuse("dropout_p", "0 with 8-bit inputs (no variant has both)", options.dropout_p);
    const auto blocks = [&](int64_t rows) {
        return sizes.varlen ? -1 : (rows + kDescaleRows - 1) / kDescaleRows;
    };
    const DescaleArgument descales[] = {
        {"q_descale", options.q_descale, "(batch, heads_q, blocks of 128 queries)", sizes.heads_q,
         blocks(sizes.seqlen_q)},
        {"k_descale", options.k_descale, "(batch, heads_k, blocks of 128 keys)", sizes.heads_k,
         blocks(sizes.seqlen_k)},
        {"v_descale", options.v_descale, "(batch, heads_k, head_dim_v)", sizes.heads_k,
         sizes.head_dim_v}};
    for (const DescaleArgument& x : descales) {
        if (!x.tensor) continue;
        if (!is_8_bit)
            refuse(x.name, "None unless q, k and v have 8 bits",
                   text("one for ", dtype_name(dtype)));
        check_descale(x, sizes, q);
    }
    if (!is_8_bit && out && *out != dtype)
        refuse("out_dtype", text("None or q's dtype ", dtype_name(dtype)), dtype_name(*out));
}

inline void check_options(const Tensor& q, ScalarType dtype, const Sizes& sizes,
                          const Options& options) {
    // The kernels have scale * log2(e), softcap * log2(e), its inverse and scale / softcap in
    // float32: within these bounds they are finite. And the backward pass finds tanh from P and
    // lse, whose error must be small beside the cap.
    const double softcap = options.softcap;
    const double max_factor = std::ldexp(1.0, 127);
    if (!(softcap == 0 || (std::ldexp(1.0, -10) <= softcap && softcap < max_factor)))
        refuse("softcap", "0 (none), or at least 2^-10 and below 2^127", softcap);
    const double max_scale = max_factor * (softcap > 0 ? std::min(softcap, 1.0) : 1.0);
    if (options.scale && !(std::abs(*options.scale) < max_scale))
        refuse("scale", "below 2^127 in magnitude, and below 2^127 softcap if that is given",
               *options.scale);
    if (options.window_left < -1)
        refuse("window_left", "at least -1 (unlimited)", options.window_left);
    if (options.window_right < -1)
        refuse("window_right", "at least -1 (unlimited)", options.window_right);
    if (options.alibi_slopes) {
        const Tensor& slopes = *options.alibi_slopes;
        const std::vector<int64_t> shape = slopes.dim() == 1
                                               ? std::vector{sizes.heads_q}
                                               : std::vector{sizes.batch, sizes.heads_q};
        require_dtype("alibi_slopes", slopes, ScalarType::Float);
        require_shape("alibi_slopes", slopes, shape, "(heads_q) or (batch, heads_q)");
        require_device("alibi_slopes", slopes, q);
        require_contiguous_rows("alibi_slopes", slopes);
    }
    check_8_bit_options(q, dtype, sizes, options);
    if (options.bias) check_bias(*options.bias, sizes, q);
    if (options.sink)
        require_option("sink", *options.sink, ScalarType::Float, {sizes.heads_q}, "(heads_q)", q);
    if (options.seqused_k)
        require_option("seqused_k", *options.seqused_k, ScalarType::Int, {sizes.batch}, "(batch)",
                       q);
    if (!(options.dropout_p >= 0 && options.dropout_p < 1))
        refuse("dropout_p", "in [0, 1)", options.dropout_p);
    if (options.dropout_p == 0) return;
    if (!options.rng_state) refuse("rng_state", "given when dropout_p > 0", "None");
    require_option("rng_state", *options.rng_state, ScalarType::Long, {2}, "(seed and offset)", q);
}

// The variant that a name stands for; none for "auto".
inline std::optional<Variant> check_variant(const Options& options) {
    if (options.variant == "auto") return std::nullopt;
    std::string names = "'auto'";
    for (int i = 0; i < kVariants; ++i) {
        if (options.variant == kVariantNames[i]) return static_cast<Variant>(i);
        names += text(" or '", kVariantNames[i], "'");
    }
    refuse("variant", names, text("'", options.variant, "'"));
}

// The GPU of the call.
inline const GpuModel& device_of(const Tensor& q) {
    const GpuModel* device = find_device(q.get_device_index());
    if (device == nullptr) fail("the CUDA runtime does not see device ", q.get_device_index());
    return *device;
}

// torch's current stream of x's device.
inline cudaStream_t current_stream(const Tensor& x) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream == nullptr ||
        aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream) != 0)
        fail("this torch has no CUDA stream to launch on");
    return static_cast<cudaStream_t>(stream);
}

// Throws the error of a launch.
inline void check_launch(cudaError_t status) {
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction)
        fail("the CUDA kernels were compiled for " FLASH_EXT_TARGETS
             ", which this GPU does not run: compile them on its machine, or set "
             "FLASH_EXT_CUDA_ARCHS to its target ('90a' for Hopper, '80+PTX' for others)");
    if (status != cudaSuccess) fail("the CUDA launch failed: ", cudaGetErrorString(status));
}

inline void check_architecture(const Tensor& q) {
    const GpuModel& device = device_of(q);
    if (device.major < 8)
        refuse("the GPU", "of compute capability 8.0 or newer",
               text(device.major, ".", device.minor));
}

// Positions and CTA indices are 32-bit; elements are addressed in 64.
inline void check_sizes(const Sizes& sizes) {
    constexpr int64_t kMaxLength = int64_t{1} << 29;
    constexpr int64_t kMaxTiles = int64_t{1} << 31;
    constexpr int64_t kSmallestTile = 16;
    for (const auto& [name, length, heads] : {std::tuple{"q", sizes.seqlen_q, sizes.heads_q},
                                              std::tuple{"k", sizes.seqlen_k, sizes.heads_k}}) {
        if (length >= kMaxLength) refuse(text(name, "'s sequence length"), "below 2^29", length);
        const int64_t blocks = length / kSmallestTile + 1 + (sizes.varlen ? sizes.batch + 1 : 0);
        const int64_t matrices = heads * sizes.tensor_batches();
        if (matrices >= kMaxTiles || matrices * blocks >= kMaxTiles)
            refuse(name, "of fewer than 2^31 tiles of 16 rows",
                   text(matrices, " (batch, head) pairs of ", length, " rows"));
    }
}

// The arguments of the forward pass. Sizes are those of the call.
inline Sizes check_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                           const Options& options) {
    check_variant(options);
    if (options.cu_seqlens_q.has_value() != options.cu_seqlens_k.has_value())
        refuse("cu_seqlens_q and cu_seqlens_k", "given together",
               options.cu_seqlens_q ? "cu_seqlens_q alone" : "cu_seqlens_k alone");
    Sizes sizes{};
    sizes.varlen = options.cu_seqlens_q.has_value();
    const char* layouts[2][3] = {
        {"(batch, seqlen_q, heads_q, head_dim)", "(batch, seqlen_k, heads_k, head_dim)",
         "(batch, seqlen_k, heads_k, head_dim_v)"},
        {"(total_q, heads_q, head_dim)", "(total_k, heads_k, head_dim)",
         "(total_k, heads_k, head_dim_v)"}};
    const auto& layout = layouts[sizes.varlen];
    const int64_t dims = sizes.varlen ? 3 : 4;
    const std::pair<const char*, const Tensor&> inputs[] = {{"q", q}, {"k", k}, {"v", v}};
    for (int i = 0; i < 3; ++i) {
        const auto& [name, tensor] = inputs[i];
        if (tensor.dim() != dims)
            refuse(name,
                   text("of shape ", layout[i],
                        sizes.varlen ? " with cu_seqlens_q and cu_seqlens_k"
                                     : " (packed sequences come with cu_seqlens_q)"),
                   shape_text(tensor.sizes()));
        if (!tensor.is_cuda())
            refuse(name, "on a CUDA device like the other inputs", "a tensor elsewhere");
    }
    const ScalarType dtype = q.scalar_type();
    if (dtype != ScalarType::Half && dtype != ScalarType::BFloat16 && !has_8_bits(dtype))
        refuse("q", "float16, bfloat16, float8_e4m3fn or int8", dtype_name(dtype));
    require_like("k", k, q);
    if (dtype == ScalarType::Char) {
        if (v.scalar_type() != ScalarType::Float8_e4m3fn)
            refuse("v", "float8_e4m3fn with q and k in int8", dtype_name(v.scalar_type()));
    } else if (v.scalar_type() != dtype) {
        refuse("v", text("of q's dtype ", dtype_name(dtype)), dtype_name(v.scalar_type()));
    }
    require_device("v", v, q);
    for (const auto& [name, tensor] : inputs) require_contiguous_rows(name, tensor);

    sizes.batch =
        sizes.varlen ? std::max<int64_t>(options.cu_seqlens_q->numel() - 1, 0) : q.size(0);
    sizes.seqlen_q = q.size(dims - 3);
    sizes.seqlen_k = k.size(dims - 3);
    sizes.heads_q = q.size(dims - 2);
    sizes.heads_k = k.size(dims - 2);
    sizes.head_dim = q.size(dims - 1);
    sizes.head_dim_v = v.size(dims - 1);
    for (const auto& [name, dim] : {std::pair{"q's head dimension", sizes.head_dim},
                                    std::pair{"v's head dimension", sizes.head_dim_v}})
        if (dim < 1 || dim > tuning::kMaxHeadDim)
            refuse(name, text("1 to ", tuning::kMaxHeadDim), dim);
    require_shape("k", k, sizes.rows(sizes.seqlen_k, sizes.heads_k, sizes.head_dim), layout[1]);
    if (sizes.heads_k == 0) refuse("k's number of heads", "at least 1", sizes.heads_k);
    if (sizes.heads_q % sizes.heads_k != 0)
        refuse("q's number of heads", text("a multiple of k's, ", sizes.heads_k), sizes.heads_q);
    require_shape("v", v, sizes.rows(sizes.seqlen_k, sizes.heads_k, sizes.head_dim_v), layout[2]);
    if (sizes.varlen) {
        for (const auto& [name, offsets] : {std::pair{"cu_seqlens_q", &*options.cu_seqlens_q},
                                            std::pair{"cu_seqlens_k", &*options.cu_seqlens_k}})
            require_option(name, *offsets, ScalarType::Int, {sizes.batch + 1}, "(batch + 1)", q);
    }
    check_sizes(sizes);
    check_options(q, dtype, sizes, options);
    check_architecture(q);
    return sizes;
}

// With FLASH_EXT_DEBUG=1 the lengths of sequences are fetched, which waits for the device, and
// checked.
void debug_seqlens(const Sizes& sizes, const Options& options, cudaStream_t stream);

inline Sizes check_backward(const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q,
                            const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                            const Options& options) {
    const Sizes sizes = check_forward(q, k, v, options);
    if (has_8_bits(q.scalar_type()))
        refuse("q", "float16 or bfloat16 (no variant has a backward for 8-bit inputs)",
               dtype_name(q.scalar_type()));
    const std::vector<int64_t> shape = sizes.rows(sizes.seqlen_q, sizes.heads_q, sizes.head_dim_v);
    const char* layout =
        sizes.varlen ? "(total_q, heads_q, head_dim_v)" : "(batch, seqlen_q, heads_q, head_dim_v)";
    for (const auto& [name, tensor] : {std::pair{"dout", &dout}, std::pair{"out", &out}}) {
        require_shape(name, *tensor, shape, layout);
        require_like(name, *tensor, q);
    }
    require_statistics("lse", lse, sizes, q);
    if (dlse) require_statistics("dlse", *dlse, sizes, q);
    return sizes;
}

}  // namespace flash_ext
