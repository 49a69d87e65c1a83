// csrc/plan/ as a Python module, for tests/test_plan.py: which kernels a call takes, and how its
// workspace is laid out. The GPUs and the kernels are stand-ins, which note that they were asked.
// Without MODULE a library with ask() alone: pybind11 takes the compiler longer than the plan.
#include "plan/plan.h"

#ifdef MODULE
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan/launchers.h"
#include "plan/tuning.h"
#include "plan/tuning_backward.h"
#include "problem/mask.cuh"

namespace {

// Compute capability, shared memory of a CTA, SMs, L2.
constexpr int kGpus[][5] = {
    {9, 0, 232448, 132, 50 << 20}, {8, 0, 166912, 108, 40 << 20}, {8, 9, 101376, 142, 96 << 20}};

int attributes_asked = 0;
std::vector<std::string> launched;
std::vector<std::array<int, 4>> copied;  // batch, rows, heads and columns, of inputs and results

cudaError_t note(const std::string& name, int head_dim = 0, int head_dim_v = 0) {
    launched.push_back(head_dim == 0 ? name
                                     : name + "<" + std::to_string(head_dim) + ", " +
                                           std::to_string(head_dim_v) + ">");
    return cudaSuccess;
}

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) {
    *count = std::size(kGpus);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    ++attributes_asked;
    *value = kGpus[device][attribute];
    return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

namespace flash_ext {

template <int kHeadDim, int kHeadDimV>
cudaError_t Fa1<kHeadDim, kHeadDimV>::forward(const ForwardParams&, const ForwardKernel&,
                                              cudaStream_t) {
    return note("fa1_forward", kHeadDim, kHeadDimV);
}
template <int kHeadDim, int kHeadDimV>
cudaError_t Fa1<kHeadDim, kHeadDimV>::backward(const BackwardParams&, const BackwardKernel&,
                                               cudaStream_t) {
    return note("fa1_backward", kHeadDim, kHeadDimV);
}
// About what the kernels take.
template <int kHeadDim, int kHeadDimV>
int Fa1<kHeadDim, kHeadDimV>::forward_shared_bytes() {
    return 100'000;
}
template <int kHeadDim, int kHeadDimV>
int Fa1<kHeadDim, kHeadDimV>::backward_shared_bytes() {
    return 110'000;
}
template <int kHeadDim, int kHeadDimV>
cudaError_t Fa2<kHeadDim, kHeadDimV>::forward(const ForwardParams&, const ForwardKernel&,
                                              cudaStream_t) {
    return note("fa2_forward", kHeadDim, kHeadDimV);
}
template <int kHeadDim, int kHeadDimV>
cudaError_t Fa2<kHeadDim, kHeadDimV>::backward(const BackwardParams&, const BackwardKernel&,
                                               cudaStream_t) {
    return note("fa2_backward", kHeadDim, kHeadDimV);
}
// About what the kernels take.
template <int kHeadDim, int kHeadDimV>
int Fa2<kHeadDim, kHeadDimV>::forward_shared_bytes() {
    return 512 * kHeadDim;
}
template <int kHeadDim, int kHeadDimV>
int Fa2<kHeadDim, kHeadDimV>::backward_shared_bytes() {
    return 110'000;
}
template <int kHeadDim, int kHeadDimV>
cudaError_t short_forward(const ForwardParams&, const ForwardKernel& kernel, cudaStream_t) {
    return note(text("short_forward, ", kernel.ctas_per_bias), kHeadDim, kHeadDimV);
}
template <int kHeadDim, int kHeadDimV>
cudaError_t short_backward(const BackwardParams&, const BackwardKernel& kernel, cudaStream_t) {
    return note(text("short_backward, ", kernel.ctas_per_bias), kHeadDim, kHeadDimV);
}
template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_forward(const ForwardParams&, const ForwardKernel&, cudaStream_t) {
    return note("fa3_forward", kHeadDim, kHeadDimV);
}
template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_decode(const ForwardParams&, const ForwardKernel&, cudaStream_t) {
    return note("fa3_decode", kHeadDim, kHeadDimV);
}
template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_decode_8_bits(const ForwardParams&, const ForwardKernel&, cudaStream_t) {
    return note("fa3_decode_8_bits", kHeadDim, kHeadDimV);
}
template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_forward_fp8(const ForwardParams& params, const ForwardKernel&, cudaStream_t) {
    return note(params.element_type == ElementType::kInt8 ? "fa3_forward_int8" : "fa3_forward_fp8",
                kHeadDim, kHeadDimV);
}
template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_backward(const BackwardParams&, const BackwardKernel& kernel, cudaStream_t) {
    constexpr const char* kNames[] = {"fa3_backward", "fa3_backward, stores dbias",
                                      "fa3_backward, adds dbias"};
    return note(kNames[static_cast<int>(kernel.stored_dbias)], kHeadDim, kHeadDimV);
}
template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_backward_wide(const BackwardParams&, const BackwardKernel&, cudaStream_t) {
    return note("fa3_backward_wide", kHeadDim, kHeadDimV);
}
template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_bias_gradient(const BackwardParams&, const BackwardKernel& kernel, cudaStream_t) {
    return note(text("fa3_bias_gradient", kernel.bias_gradient->small_tiles ? ", small" : "", ", ",
                     kernel.bias_gradient->ctas),
                kHeadDim, kHeadDimV);
}
cudaError_t sum_parts(const BackwardParams&, TensorView, TensorView, cudaStream_t) {
    return note("sum_parts");
}
cudaError_t copy_rows(const RowCopies& copies, bool back, cudaStream_t) {
    for (const RowCopy& x : std::span(copies.all).first(copies.count))
        copied.push_back({x.batch, x.rows, x.heads, x.cols});
    return copies.count == 0 ? cudaSuccess : note(back ? "copy_rows, back" : "copy_rows");
}
cudaError_t tile_bias(const Bias&, ElementType, const TiledBias&, cudaStream_t) {
    return note("tile_bias");
}
cudaError_t bias_gradient(const BackwardParams&, const BackwardKernel& kernel, cudaStream_t) {
    return note(kernel.ctas_per_dbias == 0 ? "bias_gradient"
                                           : text("shared_bias_gradient, ", kernel.ctas_per_dbias));
}
cudaError_t combine_splits(const ForwardParams&, HeadDims, cudaStream_t, bool pdl) {
    return note(pdl ? "combine_splits, pdl" : "combine_splits");
}
cudaError_t copy_dbias(const BackwardParams&, const TiledBias&, cudaStream_t) {
    return note("copy_dbias");
}
cudaError_t transpose_v(const ForwardParams&, const TensorView&, cudaStream_t) {
    return note("transpose_v");
}
cudaError_t sink_gradient(const BackwardParams&, cudaStream_t) { return note("sink_gradient"); }
cudaError_t sanitize_cu_seqlens(BackwardParams, const int*, const int*, cudaStream_t) {
    return note("sanitize_cu_seqlens");
}

// function(constants qk and v) for each row of a tuning table.
template <auto& kTable, class Function>
void for_each_row(Function function) {
    compile_time_for<std::extent_v<std::remove_reference_t<decltype(kTable)>>>([&](auto i) {
        constexpr HeadDims kDims = kTable[i].head_dims;
        function(std::integral_constant<int, kDims.qk>{}, std::integral_constant<int, kDims.v>{});
    });
}

// To be linked with, as in csrc/instantiate/.
std::vector<const void*> instantiated_for_all_head_dims() {
    std::vector<const void*> all;
    const auto keep = [&](auto*... functions) {
        (all.push_back(reinterpret_cast<const void*>(functions)), ...);
    };
    for_each_row<tuning::kFa1Forward>(
        [&](auto d, auto dv) { keep(&Fa1<d, dv>::forward, &Fa1<d, dv>::forward_shared_bytes); });
    for_each_row<tuning::kFa1Backward>(
        [&](auto d, auto dv) { keep(&Fa1<d, dv>::backward, &Fa1<d, dv>::backward_shared_bytes); });
    for_each_row<tuning::kFa2Forward>(
        [&](auto d, auto dv) { keep(&Fa2<d, dv>::forward, &Fa2<d, dv>::forward_shared_bytes); });
    for_each_row<tuning::kFa2Backward>(
        [&](auto d, auto dv) { keep(&Fa2<d, dv>::backward, &Fa2<d, dv>::backward_shared_bytes); });
    for_each_row<tuning::kShort>(
        [&](auto d, auto dv) { keep(&short_forward<d, dv>, &short_backward<d, dv>); });
    for_each_row<tuning::kFa3Forward>([&](auto d, auto dv) { keep(&fa3_forward<d, dv>); });
    for_each_row<tuning::kFa3Decode>([&](auto d, auto dv) { keep(&fa3_decode<d, dv>); });
    for_each_row<tuning::kFa3Decode8Bits>(
        [&](auto d, auto dv) { keep(&fa3_decode_8_bits<d, dv>); });
    for_each_row<tuning::kFa3ForwardFp8>([&](auto d, auto dv) { keep(&fa3_forward_fp8<d, dv>); });
    for_each_row<tuning::kFa3Backward>([&](auto d, auto dv) { keep(&fa3_backward<d, dv>); });
    for_each_row<tuning::kFa3BackwardWide>(
        [&](auto d, auto dv) { keep(&fa3_backward_wide<d, dv>); });
    for_each_row<tuning::kFa3BiasGradient>(
        [&](auto d, auto dv) { keep(&fa3_bias_gradient<d, dv>); });
    return all;
}

namespace {

const int kOffsets[1] = {0};                             // the plan reads none
char* const kMemory = reinterpret_cast<char*>(1 << 20);  // nor anything of the workspace

using Regions = std::map<std::string, std::pair<int64_t, int64_t>>;  // name: (offset, bytes)

struct Planned {
    Regions regions;
    int64_t bytes;
    std::vector<std::string> launches;
    std::vector<std::array<int, 4>> copies;
    int num_splits = 1;
    int split_ctas = 0;
    int pack_gqa_log2 = 0;
    int tile = 0;  // tuning::Fa3ForwardTile, or of the kernel for few queries Fa3DecodeTile
    int clusters_by_length = 0;
    int l2_group_heads = 0;
    int tiles_at_once = 0;
    bool changes_scores = false;  // the kernel
};

// A problem, with contiguous tensors.
struct Problem {
    int gpu = 0;
    int batch = 1, seqlen_q = 1, seqlen_k = 1, heads_q = 1, heads_k = 1;
    int head_dim = 64, head_dim_v = 64;
    int window_left = -1, window_right = -1;
    bool varlen = false, bias = false, dropout = false, sink = false, deterministic = false;
    bool repeated_rows = false;  // of k
    std::string wanted;          // the variant; empty: that whose backward runs
    int bias_sizes[4] = {1, 1, 1, 1};
    bool bias_float32 = false, bias_bool = false;
    float dbias_factor = 1.f;
    std::string odd_rows;         // the names of tensors whose rows begin at any address
    bool expanded_heads = false;  // of k and v
    bool seqused = false;
    int page_size = 0;  // of K and V in pages
    bool fp8 = false, int8 = false, alibi = false;
    bool kv_8_bits = false;  // and q 16
    bool v_transposed = false;
    double softcap = 0;
    bool batch_invariant = false;
    bool mask = false;          // of tiles
    int launched_head_dim = 0;  // of the launch alone, if not 0

    Operand operand(const char* name, int64_t rows, int64_t heads, int64_t dim) const {
        Operand x{name, kMemory, {varlen ? 1 : batch, rows, heads, dim}, {}, 2};
        int64_t stride = 1;
        for (int i = 3; i >= 0; --i) {
            x.strides[i] = x.sizes[i] == 1 ? 0 : stride;
            stride *= x.sizes[i];
        }
        if (repeated_rows && name[0] == 'k') x.strides[1] = 0;
        if (expanded_heads && (name[0] == 'k' || name[0] == 'v')) x.strides[2] = 0;
        if ((' ' + odd_rows + ' ').find(text(" ", name, " ")) != std::string::npos)
            x.strides[1] += 1;
        if (fp8 || int8 || (kv_8_bits && (name[0] == 'k' || name[0] == 'v'))) x.element_bytes = 1;
        return x;
    }

    std::vector<Operand> operands() const {
        return {operand("q", seqlen_q, heads_q, head_dim),
                operand("k", seqlen_k, heads_k, head_dim),
                operand("v", seqlen_k, heads_k, head_dim_v),
                operand("out", seqlen_q, heads_q, head_dim_v),
                operand("dout", seqlen_q, heads_q, head_dim_v)};
    }

    template <class Choose>
    Choice choose(int operands_there, Choose choose) const {
        const std::vector<Operand> all = operands();
        const auto there = std::span(all).first(operands_there);
        AttentionParams params{};
        fill(params);
        if (dropout) params.rng_state = reinterpret_cast<const int64_t*>(kMemory);
        params.aligned = std::ranges::all_of(there, &Operand::is_aligned);
        return choose({*find_device(gpu), params, there});
    }

    Choice choose_forward(const std::string& wanted) const {
        const auto variant = variant_of(wanted);
        return choose(3, [&](const Call& call) {
            return flash_ext::choose(call, Pass::kForward, variant.value_or(kFastestVariant),
                                     !variant);
        });
    }
    Choice choose_backward(const std::string& forward) const {
        return choose(5, [&](const Call& call) {
            return flash_ext::choose(call, Pass::kBackward, *variant_of(forward), true);
        });
    }

    static std::optional<Variant> variant_of(const std::string& name) {
        for (int i = 0; i < kVariants; ++i)
            if (name == kVariantNames[i]) return static_cast<Variant>(i);
        return std::nullopt;
    }

    void fill(AttentionParams& params) const {
        params.element_type = fp8    ? ElementType::kFloat8
                              : int8 ? ElementType::kInt8
                                     : ElementType::kBFloat16;
        params.key_type = kv_8_bits ? ElementType::kFloat8 : params.element_type;
        params.batch = batch;
        params.seqlen_q = seqlen_q;
        params.seqlen_k = seqlen_k;
        params.heads_q = heads_q;
        params.heads_k = heads_k;
        params.head_dim = head_dim;
        params.head_dim_v = head_dim_v;
        if (varlen) params.cu_seqlens_q = params.cu_seqlens_k = kOffsets;
        if (seqused) params.seqused_k = kOffsets;
        const std::vector<Operand> all = operands();
        params.q = all[0].view();
        params.k = all[1].view();
        params.v = all[2].view();
        params.out = all[3].view();
        params.window_left = window_left < 0 ? BandMask::kUnlimited : window_left;
        params.window_right = window_right < 0 ? BandMask::kUnlimited : window_right;
        params.scale = params.scale_log2 = 1.f;
        params.softcap = static_cast<float>(softcap);
        if (bias) params.bias.data = kMemory;
        if (bias_float32) params.bias.type = BiasType::kFloat32;
        if (bias_bool) params.bias.type = BiasType::kBool;
        std::ranges::copy(bias_sizes, params.bias.sizes);
        if (sink) params.sink = reinterpret_cast<float*>(kMemory);
        if (alibi) params.alibi_slopes = reinterpret_cast<float*>(kMemory);
        params.batch_invariant = batch_invariant;
        if (mask) params.tile_mask.kv_tiles = static_cast<const int*>(kOffsets);
        if (page_size > 0) params.pages = {kOffsets, 1, 1, page_size};
        params.aligned = true;
        params.v_transposed = v_transposed;
    }

    // The regions by name, once they have memory.
    template <class Plan>
    Planned planned(Plan& plan, const std::map<std::string, void*>& names) const {
        Planned found{{}, plan.workspace.bytes(), {}};
        plan.workspace.assign(kMemory);
        for (const Workspace::Region& region : plan.workspace.regions())
            for (const auto& [name, pointer] : names)
                if (region.pointer == pointer) {
                    const auto offset = *static_cast<char**>(pointer) - kMemory;
                    found.regions[name] = {offset, region.bytes};
                }
        if (found.regions.size() != plan.workspace.regions().size())
            throw std::runtime_error("a region without a name");
        launched.clear();
        copied.clear();
        if (launched_head_dim > 0)
            plan.params.head_dim = plan.kernel.head_dims.qk = launched_head_dim;
        if (launch(plan, nullptr) != cudaSuccess) throw std::runtime_error("no kernel");
        found.launches = launched;
        found.copies = copied;
        return found;
    }

    Planned forward(const std::string& variant) const {
        ForwardPlan plan{.variant = *variant_of(variant)};
        ForwardParams& params = plan.params;
        fill(params);
        make_plan(plan, *find_device(gpu));
        std::map<std::string, void*> names{
            {"out_accum", &params.out_accum},
            {"row_statistics", &params.row_statistics},
            {"o_partial", &params.o_partial},
            {"statistics_partial", &params.statistics_partial},
            {"counters", &params.counters},
            {"copy of bias", &params.bias.data},
            {"q", &params.q.data},
            {"k", &params.k.data},
            {plan.kernel.row_major_v ? "v_transposed" : "v", &params.v.data},
            {"out", &params.out.data}};
        if (plan.few_queries) {
            names["o_partial beside"] = &plan.few_queries->params.o_partial;
            names["counters beside"] = &plan.few_queries->params.counters;
        }
        Planned found = planned(plan, names);
        found.num_splits = params.num_splits;
        found.split_ctas = params.split_ctas;
        found.changes_scores = params.changes_scores;
        found.pack_gqa_log2 = params.pack_gqa_log2;
        found.clusters_by_length = plan.kernel.by_length.clusters;
        found.tile = plan.kernel.decode_tile ? static_cast<int>(*plan.kernel.decode_tile)
                                             : static_cast<int>(plan.kernel.tile);
        found.l2_group_heads = params.tile_order.l2_group_heads;
        found.tiles_at_once = params.tile_order.tiles_at_once;
        return found;
    }

    Planned backward(const std::string& variant) const {
        BackwardPlan plan{.variant = *variant_of(variant)};
        BackwardParams& params = plan.params;
        fill(params);
        params.deterministic = deterministic;
        if (bias && !bias_bool) params.dbias = kMemory;
        params.dbias_factor = dbias_factor;
        if (!wanted.empty()) plan.wanted = *variant_of(wanted);
        if (sink) params.dsink = reinterpret_cast<float*>(kMemory);
        params.dout = operands()[4].view();
        params.dq = operand("dq", seqlen_q, heads_q, head_dim).view();
        params.dk = operand("dk", seqlen_k, heads_k, head_dim).view();
        params.dv = operand("dv", seqlen_k, heads_k, head_dim_v).view();
        make_plan(plan, *find_device(gpu));
        const bool parts = params.parts > 1;
        return planned(plan, {{"offsets_q", &params.cu_seqlens_q},
                              {"offsets_k", &params.cu_seqlens_k},
                              {"lse_log2", &params.lse_log2},
                              {"minus_delta", &params.minus_delta},
                              {"large_lse", &params.large_lse.word},
                              {"lse_rows", &params.lse_rows},
                              {"delta_rows", &params.delta_rows},
                              {"reference", &params.reference},
                              {"dq_accum", &params.dq_accum},
                              {"dq_semaphore", &params.dq_semaphore},
                              {"tile_count_semaphore", &params.tile_count_semaphore},
                              {"ds", &plan.kernel.ds},
                              {"dbias_sums", &plan.kernel.dbias_sums},
                              {"bias", &plan.kernel.bias.data},
                              {"copy of bias", &params.bias.data},
                              {"dbias", &plan.kernel.dbias.data},
                              {"q", &params.q.data},
                              {"k", &params.k.data},
                              {"v", &params.v.data},
                              {"out", &params.out.data},
                              {"dout", &params.dout.data},
                              {"dq", &params.dq.data},
                              {"dk", parts ? &plan.dk.data : &params.dk.data},
                              {"dv", parts ? &plan.dv.data : &params.dv.data},
                              {"dk_parts", parts ? &params.dk.data : nullptr},
                              {"dv_parts", parts ? &params.dv.data : nullptr}});
    }
};

std::pair<std::optional<std::string>, std::string> variant_and_reason(const Choice& choice) {
    if (!choice.variant) return {std::nullopt, choice.why};
    return {name_of(*choice.variant), choice.why};
}

}  // namespace
}  // namespace flash_ext

#ifndef MODULE

// The launches of a pass, "forward" or "backward", or the choice of a variant for it: its name and
// the reason. fields: the GPU, the rows of q and k, both head dims, and options.
extern "C" __attribute__((visibility("default"))) const char* ask(const char* what,
                                                                  const char* variant,
                                                                  const int* fields) {
    flash_ext::Problem p;
    p.gpu = fields[0];
    p.seqlen_q = fields[1];
    p.seqlen_k = fields[2];
    p.head_dim = p.head_dim_v = fields[3];
    p.bias = fields[4];
    p.fp8 = fields[5];
    p.softcap = fields[6];
    const std::string question = what;
    static std::string answer;
    if (question == "forward" || question == "backward") {
        answer.clear();
        const auto plan = question == "forward" ? p.forward(variant) : p.backward(variant);
        for (const std::string& launch : plan.launches)
            answer += (answer.empty() ? "" : "; ") + launch;
    } else {
        const auto [name, why] = flash_ext::variant_and_reason(
            question == "choose_forward" ? p.choose_forward(variant) : p.choose_backward(variant));
        answer = name.value_or("none") + ": " + why;
    }
    return answer.c_str();
}

#else

PYBIND11_MODULE(MODULE, m) {
    namespace py = pybind11;
    using flash_ext::Planned;
    using flash_ext::Problem;
    using flash_ext::variant_and_reason;
    py::class_<Planned>(m, "Planned", py::module_local())
        .def_readonly("regions", &Planned::regions)
        .def_readonly("bytes", &Planned::bytes)
        .def_readonly("launches", &Planned::launches)
        .def_readonly("copies", &Planned::copies)
        .def_readonly("num_splits", &Planned::num_splits)
        .def_readonly("split_ctas", &Planned::split_ctas)
        .def_readonly("pack_gqa_log2", &Planned::pack_gqa_log2)
        .def_readonly("clusters_by_length", &Planned::clusters_by_length)
        .def_readonly("tile", &Planned::tile)
        .def_readonly("l2_group_heads", &Planned::l2_group_heads)
        .def_readonly("tiles_at_once", &Planned::tiles_at_once)
        .def_readonly("changes_scores", &Planned::changes_scores);
    py::class_<Problem>(m, "Problem", py::module_local())
        .def(py::init<>())
        .def_readwrite("gpu", &Problem::gpu)
        .def_readwrite("batch", &Problem::batch)
        .def_readwrite("seqlen_q", &Problem::seqlen_q)
        .def_readwrite("seqlen_k", &Problem::seqlen_k)
        .def_readwrite("heads_q", &Problem::heads_q)
        .def_readwrite("heads_k", &Problem::heads_k)
        .def_readwrite("head_dim", &Problem::head_dim)
        .def_readwrite("head_dim_v", &Problem::head_dim_v)
        .def_readwrite("window_left", &Problem::window_left)
        .def_readwrite("window_right", &Problem::window_right)
        .def_readwrite("varlen", &Problem::varlen)
        .def_readwrite("bias", &Problem::bias)
        .def_readwrite("dropout", &Problem::dropout)
        .def_readwrite("sink", &Problem::sink)
        .def_readwrite("deterministic", &Problem::deterministic)
        .def_readwrite("repeated_rows", &Problem::repeated_rows)
        .def_readwrite("odd_rows", &Problem::odd_rows)
        .def_readwrite("expanded_heads", &Problem::expanded_heads)
        .def_readwrite("seqused", &Problem::seqused)
        .def_readwrite("wanted", &Problem::wanted)
        .def_property(
            "bias_sizes", [](const Problem& p) { return std::to_array(p.bias_sizes); },
            [](Problem& p, const std::array<int, 4>& sizes) {
                std::ranges::copy(sizes, p.bias_sizes);
            })
        .def_readwrite("bias_float32", &Problem::bias_float32)
        .def_readwrite("bias_bool", &Problem::bias_bool)
        .def_readwrite("dbias_factor", &Problem::dbias_factor)
        .def_readwrite("fp8", &Problem::fp8)
        .def_readwrite("int8", &Problem::int8)
        .def_readwrite("alibi", &Problem::alibi)
        .def_readwrite("kv_8_bits", &Problem::kv_8_bits)
        .def_readwrite("v_transposed", &Problem::v_transposed)
        .def_readwrite("softcap", &Problem::softcap)
        .def_readwrite("batch_invariant", &Problem::batch_invariant)
        .def_readwrite("mask", &Problem::mask)
        .def_readwrite("page_size", &Problem::page_size)
        .def_readwrite("launched_head_dim", &Problem::launched_head_dim)
        .def("choose_forward",
             [](const Problem& p, const std::string& wanted) {
                 return variant_and_reason(p.choose_forward(wanted));
             })
        .def("choose_backward",
             [](const Problem& p, const std::string& forward) {
                 return variant_and_reason(p.choose_backward(forward));
             })
        .def("copied", [](const Problem& p) { return p.choose_forward("auto").copied; })
        .def("forward", &Problem::forward)
        .def("backward", &Problem::backward);
    m.def("dispatch", [](int value, int status) {
        return static_cast<int>(flash_ext::dispatch<16, 32>(
            value, [&](auto) { return static_cast<cudaError_t>(status); }));
    });
    m.def("attributes_asked", [] { return attributes_asked; });
    m.def("multiprocessors", [](int gpu) {
        const flash_ext::GpuModel* device = flash_ext::find_device(gpu);
        return device == nullptr ? 0 : device->sms;
    });
    m.attr("alignment") = flash_ext::Workspace::kAlignment;
}

#endif
