// From a call to its kernels: which variant, which tiles and splits, how much workspace, and their
// launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cassert>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "plan/call.h"
#include "plan/launchers.h"
#include "problem/mask.cuh"
#include "problem/params.h"
#include "tile/host_device.h"

namespace flash_ext {

enum class Pass { kForward, kBackward };

// Whose kernels run a pass.
struct Choice {
    std::optional<Variant> variant;  // none: no kernel can
    std::string why;                 // not the one that was asked for
    std::string copied;              // the inputs whose rows are copied first, by name
};

// This variant, or, if others may stand in for it, the first that can. For the backward that is the
// forward's, and others may.
Choice choose(const Call& call, Pass pass, Variant variant, bool may_stand_in);

// Scratch memory of a call: one allocation, cut into regions.
//
// First the plan reserves regions, by the pointers that will point to them. When the memory has
// been allocated, assign() sets the pointers. They must not move in between.
class Workspace {
 public:
    // The alignment that torch's allocator gives a tensor.
    static constexpr int64_t kAlignment = 512;

    struct Region {
        void* pointer;   // the address of the pointer to it
        int64_t offset;  // in bytes
        int64_t bytes;
    };

    Workspace() = default;
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    template <class T>
    void reserve(T*& pointer, int64_t count) {
        add(&pointer, count * static_cast<int64_t>(sizeof(T)));
    }
    void reserve(void*& pointer, int64_t bytes) { add(&pointer, bytes); }

    int64_t bytes() const { return bytes_; }
    std::span<const Region> regions() const { return {regions_, static_cast<size_t>(count_)}; }

    // `memory`: of bytes(), aligned to kAlignment.
    void assign(void* memory) const {
        for (const Region& region : regions()) {
            void* address = static_cast<char*>(memory) + region.offset;
            std::memcpy(region.pointer, &address, sizeof address);
        }
    }

 private:
    static constexpr int kMaxRegions = 24;

    void add(void* pointer, int64_t bytes) {
        assert(count_ < kMaxRegions);
        regions_[count_++] = {pointer, bytes_, bytes};
        bytes_ += ceil_div(bytes, kAlignment) * kAlignment;
    }

    Region regions_[kMaxRegions];
    int count_ = 0;
    int64_t bytes_ = 0;
};

// The kernel for few queries, for the sequences of a batch that have few, after that for the
// others.
struct FewQueries {
    ForwardParams params;
    ForwardKernel kernel;
};

// Filled in with the call's tensors and options. make_plan() adds all decisions: tiles, splits,
// packing, the order of tiles, and what memory they need. The caller gives the workspace its memory
// before the launch.
struct ForwardPlan {
    Variant variant;
    ForwardParams params;
    MaskSummary mask;
    ForwardKernel kernel;
    std::optional<FewQueries> few_queries;
    Workspace workspace;
    RowCopies inputs, results;  // in the place of rows that TMA cannot address
    Bias given_bias;            // FA2: if the kernels have a copy, with aligned rows
};

struct BackwardPlan {
    Variant variant;
    Variant wanted = variant;  // by the caller; without a wish the fastest
    BackwardParams params;
    MaskSummary mask;
    BackwardKernel kernel;
    Workspace workspace;
    RowCopies inputs, results;
    Bias given_bias;
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
