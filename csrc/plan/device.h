// What plans know of the GPUs.
#pragma once

#include <cstdint>

namespace flash_ext {

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

}  // namespace flash_ext
