#include "plan/steps.h"
#include "plan/tuning_backward.h"

namespace flash_ext {
namespace {

using Fa2Kernels = MmaKernels<tuning::kFa2Forward, tuning::kFa2Backward, Fa2>;

// With a mask of tiles the keys of a row come in an order that depends on what the other rows of
// its block see: full blocks first.
std::string fa2_unsupported_reason(const Call& call, Pass pass) {
    if (call.params.batch_invariant && call.params.tile_mask.kv_tiles != nullptr)
        return "is batch-invariant without a mask of blocks";
    return Fa2Kernels::unsupported_reason(call, pass);
}

// A bias of bool, or with unaligned rows, is copied first if a kernel has tiles of it then: bool as
// 0 and -inf in 16 bits.
template <auto& kTable, class Plan>
void copy_bias(Plan& plan) {
    auto& params = plan.params;
    Bias& bias = params.bias;
    if (!may_have_bias_tiles(params) || has_bias_tiles(params) || bias.type == BiasType::kFloat32)
        return;
    const OptionSet needed =
        options_of(params) | only_if(params.batch_invariant, OptionSet::kRareScale);
    const auto* row = tuning::find_row(kTable, head_dims(params), needed);
    if (row == nullptr || !has_bias_tiles(row->options.set_for(needed))) return;
    plan.given_bias = bias;
    bias.type = BiasType::kElement;
    int64_t elements = ceil_div(bias.sizes[3], 8) * 8;
    for (const int dim : {2, 1, 0}) {
        bias.strides[dim] = bias.sizes[dim] == 1 ? 0 : elements;
        elements *= bias.sizes[dim];
    }
    alignas(16) static constexpr char kAligned[16]{};
    bias.data = kAligned;  // until the workspace has memory
    plan.workspace.reserve(const_cast<void*&>(bias.data), 2 * elements);
}

void plan_fa2_forward(ForwardPlan& plan) {
    if (plan_short_forward(plan)) return;
    copy_bias<tuning::kFa2Forward>(plan);
    ForwardParams& params = plan.params;
    const GpuModel& gpu = plan.kernel.gpu;
    // With pages there is only the general tile. A rare scale asks for it without pages, too.
    const OptionSet needed =
        mma_options_of(params) | only_if(params.batch_invariant, OptionSet::kRareScale);
    // As with splits until their number is known.
    choose_kernel(plan, tuning::kFa2Forward, needed | OptionSet::kSplits);
    const HeadDims dims = plan.kernel.head_dims;
    const int bytes_of_cta = Fa2Kernels::forward_shared_bytes(dims);
    const int fitting = fitting_ctas(gpu, bytes_of_cta);
    const int tuned = tuning::fa2_forward_shape(dims, plan.kernel.options).ctas_per_sm;
    const QueryTiles q_tiles{params.heads_q, tuning::kForwardBlockQ};
    params.num_splits = num_splits(params, plan.mask, tile_count(params, q_tiles), 1,
                                   gpu.sms * std::min(tuned, fitting), tuning::kFa2SplitKeys);
    if (params.batch_invariant) params.num_splits = 1;
    const bool splits = params.num_splits > 1;
    choose_kernel(plan, tuning::kFa2Forward, needed | only_if(splits, OptionSet::kSplits));
    if (splits) reserve_splits(plan);
    params.tile_order =
        forward_tile_order(params, plan.mask, q_tiles, dims, tuned, gpu, params.num_splits);
}

// Can the backward itself store dS as dbias, in rows of a multiple of 16 bytes?
bool stores_dbias(const BackwardPlan& plan) {
    const BackwardParams& params = plan.params;
    const Bias& bias = params.bias;
    return params.dbias != nullptr && has_bias_tiles(plan.kernel.options) && !is_varlen(params) &&
           bias.sizes[0] == params.batch && bias.sizes[1] == params.heads_q &&
           bias.sizes[2] == params.seqlen_q && bias.sizes[3] == params.seqlen_k &&
           bias.sizes[3] % 8 == 0 && params.dbias_factor == 1.f;
}

void plan_fa2_backward(BackwardPlan& plan) {
    if (plan_short_backward(plan)) return;
    copy_bias<tuning::kFa2Backward>(plan);
    Fa2Kernels::plan_backward(plan);
    if (stores_dbias(plan)) {
        plan.kernel.stored_dbias = StoredDBias::kStored;
        plan.params.stores_dbias = true;
    }
    const HeadDims dims = plan.kernel.head_dims;
    const tuning::MmaBackwardShape tile = tuning::fa2_backward_shape(dims, plan.kernel.options);
    plan.params.tile_order =
        backward_tile_order(plan.params, plan.mask, tile.keys_per_warp * tile.warps_kv, dims,
                            tile.ctas_per_sm, plan.kernel.gpu);
}

}  // namespace

constexpr VariantRow kFa2Row{fa2_unsupported_reason, std::nullopt,        plan_fa2_forward,
                             plan_fa2_backward,      Fa2Kernels::forward, Fa2Kernels::backward};

}  // namespace flash_ext
