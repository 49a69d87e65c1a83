// Attributes of the GPUs.
#pragma once

namespace flash_ext {

struct Device {
    int major = 0;  // compute capability
    int minor = 0;
    int shared_bytes = 0;  // that a CTA can have
    int multiprocessors = 0;
};

// Null where the CUDA runtime does not see it.
const Device* find_device(int index);

// That of this thread, on which it launches.
const Device& current_device();

}  // namespace flash_ext
