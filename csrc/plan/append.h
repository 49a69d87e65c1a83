// What an append of keys to a cache does besides.
#pragma once

#include <cstdint>

#include "plan/call.h"
#include "problem/append_kv.h"

namespace flash_ext {

// The rows of each sequence that an append brings to L2 for the attention that follows: as many as
// L2 keeps. Not for prompts, whose time is not that of memory, and only for rows whose heads are
// adjacent.
inline int prefetched_rows(const AppendKVParams& params, const GpuModel& gpu) {
    constexpr int kFewRows = 16;  // new ones of a sequence
    int64_t bytes = 0;            // of a row of K and V
    for (const AppendedRows& x : {params.tensors[0], params.tensors[1]}) {
        const int64_t of_element = x.quantized ? 1 : element_bytes(params.element_type);
        const auto is_whole = [&](int64_t elements) { return of_element * elements % 16 == 0; };
        bytes += of_element * x.heads * x.head_dim;
        if (gpu.major != 9 || bytes == 0 ||
            x.all_rows(params.batch) > int64_t{kFewRows} * params.batch ||
            (x.heads > 1 && x.to.head_stride != x.head_dim) || !is_whole(x.heads * x.head_dim) ||
            !is_whole(x.to.row_stride) || !is_whole(x.to.batch_stride) ||
            reinterpret_cast<uintptr_t>(x.to.data) % 16 != 0)
            return 0;
    }
    const int64_t rows = gpu.l2_share / 4 * 3 / max_of<int64_t>(bytes * params.batch, 1);
    return static_cast<int>(min_of(rows, params.capacity));
}

}  // namespace flash_ext
