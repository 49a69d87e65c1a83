// torch.OutOfMemoryError from C++, which the stable ABI has no way to throw.
#pragma once

#include <string>

namespace flash_ext {

// Throws c10::OutOfMemoryError, which Python sees as torch.OutOfMemoryError; std::runtime_error
// where this torch has it under other names.
[[noreturn]] void throw_out_of_memory(const std::string& message);

}  // namespace flash_ext
