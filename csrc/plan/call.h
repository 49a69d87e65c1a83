// A call and its GPU, as far as the choice of kernels depends on them: known before anything is
// allocated. And the list of variants among which it chooses, which dispatch in csrc follows, and
// (through tests/native) the tests.
#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "problem/params.h"
#include "tile/host_device.h"
#include "tile/tensor_view.h"

namespace flash_ext {

// Algorithms, in the order of flash_ext.VARIANTS.
enum class Variant { kFa1, kFa2, kFa3 };
inline constexpr const char* kVariantNames[] = {"fa1", "fa2", "fa3"};
inline constexpr int kVariants = 3;
inline constexpr Variant kFastestVariant = Variant::kFa3;

constexpr const char* name_of(Variant variant) { return kVariantNames[static_cast<int>(variant)]; }

struct GpuModel {
    int major = 0;  // compute capability
    int minor = 0;
    int shared_bytes = 0;  // that a CTA can have
    int sms = 0;
    int64_t l2_share = 0;  // bytes of L2 that keep what CTAs share
    int cluster_sms = 0;   // SMs that run clusters of four or eight CTAs, a CTA each
};

constexpr GpuModel gpu_model(int major, int minor, int shared_bytes, int sms, int64_t l2_bytes) {
    // 32 MiB of an H100's 50 and of an A100's 40, as measured.
    constexpr int64_t kL2Share = 32 << 20;
    const int64_t l2_share = l2_bytes / 5 * 4 < kL2Share ? l2_bytes / 5 * 4 : kL2Share;
    // The SMs of a GPC are not a multiple of four or eight: 12 of an H100's or H200's 132 are idle.
    return {major, minor, shared_bytes, sms, l2_share, sms - sms / 11};
}

// Null where the CUDA runtime does not see it.
const GpuModel* find_device(int index);

// A tensor whose rows kernels read or write: (B, S, H, D), with varlen (1, total, H, D).
struct Operand {
    const char* name;  // of the argument
    void* data;
    int64_t sizes[4];
    int64_t strides[4];  // 0 if the size is 1: such a stride is never used, and need not be aligned
    int element_bytes = 2;

    // Do all rows start on 16-byte boundaries and end on them?
    bool is_aligned() const {
        const int64_t elements = 16 / element_bytes;
        bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0 && sizes[3] % elements == 0;
        for (int dim = 0; dim < 3; ++dim) aligned = aligned && strides[dim] % elements == 0;
        return aligned;
    }
    // Can TMA address all rows? It needs alignment, rows that are not one row repeated, and less
    // than 32 GiB from the first to the last: see tile/tensor_map.cuh.
    bool is_reached_by_tma() const {
        int64_t end = 0;  // in elements, of the memory that the tensor's rows span
        for (int dim = 0; dim < 4; ++dim) end += sizes[dim] * strides[dim];
        const bool rows_differ = sizes[1] == 1 || strides[1] > 0;
        return is_aligned() && rows_differ && element_bytes * end < int64_t{1} << 35;
    }
    // In memory of its own, with rows of a multiple of 16 bytes, one after another. What strides of
    // 0 repeat is there once, but for rows.
    Operand aligned_copy() const {
        Operand copy = *this;
        copy.data = nullptr;
        const int64_t elements = 16 / element_bytes;
        copy.sizes[3] = ceil_div(sizes[3], elements) * elements;
        int64_t stride = copy.sizes[3];
        for (const int dim : {2, 1, 0}) {
            const bool once = dim != 1 && strides[dim] == 0;
            if (once) copy.sizes[dim] = min_of<int64_t>(sizes[dim], 1);
            copy.strides[dim] = once ? 0 : stride;
            stride *= max_of<int64_t>(copy.sizes[dim], 1);
        }
        return copy;
    }
    int64_t bytes() const { return element_bytes * sizes[0] * sizes[1] * sizes[2] * sizes[3]; }
    TensorView view() const { return {data, strides[0], strides[1], strides[2]}; }
};

struct Call {
    const GpuModel& gpu;
    const AttentionParams& params;
    std::span<const Operand> operands;  // q, k, v; out and dout in a backward

    // May FA3 copy this operand, if TMA cannot address its rows? Pages stay where they are: they
    // are a cache of other sequences, too.
    bool may_copy(const Operand& x) const {
        return params.pages.table == nullptr || &x == operands.data();
    }
};

// What is said of a call, without streams: a stream needs the locale of the C++ runtime that it was
// compiled for, and a process may have loaded another one first.
inline std::string part_of_text(std::string_view part) { return std::string(part); }
inline std::string part_of_text(std::integral auto number) { return std::to_string(number); }

template <class... Parts>
std::string text(const Parts&... parts) {
    return (std::string() + ... + part_of_text(parts));
}

}  // namespace flash_ext
