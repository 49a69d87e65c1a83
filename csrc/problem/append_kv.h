// New keys and values on their way into a cache, rotated by their positions and quantized for a
// cache of 8 bits, and queries that are rotated beside them: the parameters of their kernel.
#pragma once

#include <cstdint>

#include "problem/params.h"
#include "tile/tensor_view.h"

namespace flash_ext {

// cos and sin of the angles by which pairs of columns are rotated. Their type is float32, or that
// of the tensors.
struct Rotary {
    const void* cos = nullptr;  // (positions, dim / 2); null: nothing is rotated
    const void* sin = nullptr;  // (positions, dim / 2)
    bool is_float = false;
    int positions = 0;  // angles of others are NaN
    int dim = 0;        // the columns that are rotated, the first ones of a row
    // Is a pair columns 2 i and 2 i + 1? Otherwise it is columns i and i + dim / 2.
    bool interleaved = false;
    const int* begins = nullptr;  // (B), the position of each sequence's first row
};

struct AppendedRows {
    TensorView from;  // (B, S, H, D), or packed (total, H, D)
    TensorView to;    // (pages, page size, H, D) of a cache; for q as `from`
    int rows = 0;     // S; of packed sequences the total
    int heads = 0;
    int head_dim = 0;
    const int* cu_seqlens = nullptr;  // (B + 1), of packed sequences
    bool into_cache = true;
    bool rotated = false;
    bool at_one_position = false;  // are a sequence's rows all rotated as its first one?
    // Of rows of 16 bits in a cache of 8: what a number is divided by before it is rounded.
    bool quantized = false;
    bool to_int8 = false;  // to e4m3 otherwise
    Descale descale;       // (B, H), of k with blocks of keys, of v with columns
    bool by_column = false;

    FLASH_HOST_DEVICE int64_t all_rows(int batch) const {
        return cu_seqlens != nullptr ? rows : int64_t{batch} * rows;
    }
};

struct AppendKVParams {
    ElementType element_type;
    bool whole = false;  // 16 bytes at a time, on boundaries of 16 bytes?
    int batch = 0;
    const int* cache_seqlens = nullptr;  // (B), the rows that the cache holds
    int* seqused_k = nullptr;            // (B), the same with the new ones
    int64_t capacity = 0;                // the most that a sequence can have
    Pages pages;                         // without a table sequence b has page b alone
    Rotary rotary;
    int count = 0;
    AppendedRows tensors[3];  // k, v, and q where it is rotated
};

}  // namespace flash_ext
