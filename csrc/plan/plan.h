// From a call to its kernels: which variant, which tiles and splits, how much workspace, and their
// launch.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "plan/call.h"
#include "plan/launchers.h"
#include "plan/variants.h"
#include "plan/workspace.h"
#include "problem/mask.cuh"
#include "problem/params.h"

namespace flash_ext {

enum class Pass { kForward, kBackward };

// Whose kernels run a pass.
struct Choice {
    std::optional<Variant> variant;  // none: no kernel can
    std::string why;                 // not the one that was asked for
};

// For a forward: the named variant, or the fastest one that runs it.
Choice choose_forward(const Call& call, std::optional<Variant> wanted);

// For the backward of a call whose forward ran in variant `forward`: the same, or the variant that
// stands in.
Choice choose_backward(const Call& call, Variant forward);

// Filled in with the call's tensors and options. make_plan() adds all decisions: tiles, splits,
// packing, the order of tiles, and what memory they need. The caller gives the workspace its memory
// before the launch.
struct ForwardPlan {
    Variant variant;
    ForwardParams params;
    MaskSummary mask;
    ForwardKernel kernel;
    Workspace workspace;
};

struct BackwardPlan {
    Variant variant;
    BackwardParams params;
    MaskSummary mask;
    BackwardKernel kernel;
    Workspace workspace;
    // The call's dK and dV, if the kernels write the parts' gradients.
    TensorView dk, dv;
    // The call's, if varlen is computed deterministically: the kernels read others, see
    // sanitize_cu_seqlens.cuh.
    const int* cu_seqlens_q = nullptr;  // (B + 1)
    const int* cu_seqlens_k = nullptr;  // (B + 1)
};

void make_plan(ForwardPlan& plan, const GpuModel& gpu);
void make_plan(BackwardPlan& plan, const GpuModel& gpu);

// All kernels of the pass, on the current device.
cudaError_t launch(const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch(const BackwardPlan& plan, cudaStream_t stream);

}  // namespace flash_ext
