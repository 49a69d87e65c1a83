// Errors of torch from C++; torch.OutOfMemoryError among them, which the stable ABI cannot throw.
#pragma once

#include <string>

namespace flash_ext {

// Throws what Python sees as torch.OutOfMemoryError.
[[noreturn]] void throw_out_of_memory(const std::string& message);

// Throws what torch's last call failed with, or `otherwise` before torch 2.13, which does not tell:
// that memory is out as torch.OutOfMemoryError.
[[noreturn]] void throw_failure(const std::string& otherwise);

}  // namespace flash_ext
