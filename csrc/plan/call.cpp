#include "plan/call.h"

#include <algorithm>
#include <cstdint>

namespace flash_ext {

bool Operand::is_empty() const {
    return sizes[0] == 0 || sizes[1] == 0 || sizes[2] == 0 || sizes[3] == 0;
}

bool Operand::is_aligned() const {
    const int64_t elements = 16 / element_bytes;
    bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0 && sizes[3] % elements == 0;
    for (int dim = 0; dim < 3; ++dim) aligned = aligned && used_stride(dim) % elements == 0;
    return aligned;
}

bool Operand::is_reached_by_tma() const {
    int64_t end = 0;  // in elements, of the memory that the tensor's rows span
    for (int dim = 0; dim < 4; ++dim) end += sizes[dim] * used_stride(dim);
    const bool rows_differ = sizes[1] == 1 || strides[1] > 0;
    return rows_differ && element_bytes * end < int64_t{1} << 35;
}

TensorView Operand::view() const { return {data, used_stride(0), used_stride(1), used_stride(2)}; }

}  // namespace flash_ext
