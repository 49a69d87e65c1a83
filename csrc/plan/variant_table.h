// One row for each variant: all that is specific to it on the host.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "plan/plan.h"

namespace flash_ext {

struct VariantRow {
    const char* name;

    // Why its kernels cannot run a pass of the call; empty where they can.
    std::string (*unsupported_reason)(const Call& call, Pass pass);
    // The variant that stands in where they cannot.
    std::optional<Variant> stand_in;

    // Tiles, splits and workspace. The params are complete but for these.
    void (*plan_forward)(ForwardPlan& plan, const Device& device);
    void (*plan_backward)(BackwardPlan& plan, const Device& device);

    cudaError_t (*forward)(const ForwardParams& params, cudaStream_t stream);
    cudaError_t (*backward)(const BackwardParams& params, cudaStream_t stream);
};

const VariantRow& row_of(Variant variant);

}  // namespace flash_ext
