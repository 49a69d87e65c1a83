// Writes new rows of K and V into a cache, dense or in pages, after the rows that each sequence
// holds, and rotates K and Q by their positions: for columns x and y of a pair, of angle t,
//
//     x' = x cos t - y sin t,    y' = x sin t + y cos t
//
// (Su et al., "RoFormer", 2021), in float32, each operation rounded by itself as on the CPU. Rows
// of 16 bits on their way into a cache of 8 are then divided by their descale and rounded, without
// a rounding to 16 bits before. One launch for all three tensors; memory is the limit. A thread has
// some columns, 16 bytes or one element, of some heads of a row, whose position and angles are the
// same. Rows whose place is not in the cache are not written.
//
// Attention to the cache follows, and memory is nearly idle until then. So more threads bring the
// first rows that sequences hold to L2, a row of all heads each.
#pragma once

#include <type_traits>

#include "kernels/common/launch.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "tile/copy.cuh"

namespace flash_ext {

inline constexpr int kAppendThreads = 256;
inline constexpr int kAppendHeads = 4;  // of a thread, which loads all before it stores one

// Where a new row belongs: row `index` of a sequence. Packed rows may be of none, -1.
struct NewRow {
    int sequence;
    int index;
};

FLASH_DEVICE NewRow new_row(const AppendKVParams& params, const AppendedRows& tensor, int64_t row) {
    if (tensor.cu_seqlens == nullptr)
        return {static_cast<int>(row / tensor.rows), static_cast<int>(row % tensor.rows)};
    int sequence = -1;  // the last one that begins at this row or before
    for (int end = params.batch + 1; end - sequence > 1;) {
        const int middle = (sequence + end) / 2;
        (tensor.cu_seqlens[middle] <= row ? sequence : end) = middle;
    }
    if (sequence < 0 || sequence >= params.batch) return {-1, 0};
    return {sequence, static_cast<int>(row - tensor.cu_seqlens[sequence])};
}

// The row of the cache for row `index` of a sequence. False: there is none.
FLASH_DEVICE bool find_cache_row(const AppendKVParams& params, const NewRow& row, int& page,
                                 int& page_row) {
    const Pages& pages = params.pages;
    if (row.sequence < 0) return false;
    const int64_t position = int64_t{params.cache_seqlens[row.sequence]} + row.index;
    if (position < 0 || position >= params.capacity) return false;
    page = pages.table == nullptr
               ? row.sequence
               : pages.table[row.sequence * pages.stride + position / pages.size];
    page_row = static_cast<int>(position % pages.size);
    return page >= 0 && page < pages.count;
}

// The descales of a head of a cache of 8 bits.
struct StoredDescales {
    const float* data;  // null: 1
    int64_t stride;     // of columns

    FLASH_DEVICE static StoredDescales of(const AppendKVParams& params, const AppendedRows& tensor,
                                          const NewRow& row, int head) {
        const Descale& x = tensor.descale;
        if (x.data == nullptr) return {nullptr, 0};
        const int64_t position = int64_t{params.cache_seqlens[row.sequence]} + row.index;
        const int64_t block =
            tensor.by_column ? 0 : min_of<int64_t>(position / kDescaleRows, x.last_block);
        return {
            x.data + row.sequence * x.batch_stride + head * x.head_stride + block * x.last_stride,
            tensor.by_column ? x.last_stride : 0};
    }

    // Of 0 nothing but 0 can be read again.
    FLASH_DEVICE float quotient(float x, int column) const {
        const float descale = data == nullptr ? 1.f : data[column * stride];
        return descale == 0.f ? 0.f : __fdiv_rn(x, descale);
    }
};

// To the nearest, ties to even, within the type's largest magnitude. A NaN of e4m3 stays one; int8
// has none, so that it becomes 0.
FLASH_DEVICE uint8_t to_8_bits(float x, bool to_int8) {
    if constexpr (kCudaArch == 0 || kCudaArch >= 900)  // others are refused before the launch
        if (!to_int8) return static_cast<uint8_t>(ptx::pack_e4m3(x, 0.f, 0.f, 0.f));
    const float within = x < -127.f ? -127.f : x > 127.f ? 127.f : x;
    return static_cast<uint8_t>(x == x ? static_cast<int>(rintf(within)) : 0);
}

// kColumns neighboring columns, as they are in memory.
template <class Element, int kColumns>
struct alignas(kColumns * sizeof(Element)) RowColumns {
    // __half and __nv_bfloat16 by their bits; anything of 8 bits is only copied.
    using Bits = std::conditional_t<sizeof(Element) == 2, uint16_t, uint8_t>;
    static constexpr int kCount = kColumns;

    Bits bits[kColumns];

    FLASH_DEVICE float operator[](int i) const { return ptx::unpack<Element>(bits[i]).x; }
    FLASH_DEVICE void set(int i, float x) {
        bits[i] = static_cast<Bits>(ptx::pack<Element>(x, 0.f));
    }
};

// cos t and sin t of kColumns neighboring columns of a position, with the sign of the column's own
// pair: x' = x cos t + y `signed_sin`.
template <class Element, int kColumns>
struct Angles {
    float cos[kColumns];
    float signed_sin[kColumns];

    FLASH_DEVICE void load(const Rotary& rotary, int64_t position, int column) {
        const int half = rotary.dim / 2;
        const bool known = position >= 0 && position < rotary.positions;
        const auto read = [&](const void* of, int64_t i) {
            if (!known) return NAN;
            return rotary.is_float ? static_cast<const float*>(of)[i]
                                   : ptx::unpack<Element>(static_cast<const uint16_t*>(of)[i]).x;
        };
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const int at = column + i;
            const bool second = rotary.interleaved ? at % 2 == 1 : at >= half;
            const int64_t pair = rotary.interleaved ? at / 2 : second ? at - half : at;
            const float sin = read(rotary.sin, position * half + pair);
            cos[i] = read(rotary.cos, position * half + pair);
            signed_sin[i] = second ? sin : -sin;
        }
    }
};

// The other column of each pair.
template <class Columns, class Bits>
FLASH_DEVICE Columns partners_of(const Rotary& rotary, const Columns& own, const Bits* row,
                                 int column) {
    const int half = rotary.dim / 2;
    if (!rotary.interleaved)
        return *reinterpret_cast<const Columns*>(row +
                                                 (column < half ? column + half : column - half));
    Columns partners;
    if constexpr (Columns::kCount == 1) {
        partners.bits[0] = row[column ^ 1];
    } else {
#pragma unroll
        for (int i = 0; i < Columns::kCount; ++i) partners.bits[i] = own.bits[i ^ 1];
    }
    return partners;
}

template <class Columns>
FLASH_DEVICE void store_columns(const TensorView& to, int batch, int64_t row, int head, int column,
                                const Columns& columns) {
    auto* target = row_pointer<typename Columns::Bits>(to, batch, row, head);
    *reinterpret_cast<Columns*>(target + column) = columns;
}

// Some columns of some heads of a row; `unit` counts them.
template <class Element, int kColumns>
FLASH_DEVICE void append_unit(const AppendKVParams& params, const AppendedRows& tensor,
                              int64_t unit) {
    using Columns = RowColumns<Element, kColumns>;
    using Bits = typename Columns::Bits;
    const int parts = ceil_div(tensor.head_dim, kColumns);
    const int groups = ceil_div(tensor.heads, kAppendHeads);
    const int column = static_cast<int>(unit % parts) * kColumns;
    const int group = static_cast<int>(unit / parts % groups);
    const int64_t row = unit / parts / groups;
    if (row >= tensor.all_rows(params.batch)) return;

    const NewRow found = new_row(params, tensor, row);
    const bool packed = tensor.cu_seqlens != nullptr;
    const int from_batch = packed ? 0 : found.sequence;
    const int64_t from_row = packed ? row : found.index;
    int to_batch = from_batch, page_row = 0;
    if (tensor.into_cache && !find_cache_row(params, found, to_batch, page_row)) return;
    const int64_t to_row = tensor.into_cache ? page_row : from_row;

    Columns own[kAppendHeads], partners[kAppendHeads];
    Angles<Element, kColumns> angles;
    const bool rotated = tensor.rotated && column < params.rotary.dim && found.sequence >= 0;
    if constexpr (sizeof(Element) == 2) {
        if (rotated) {
            const int index = tensor.at_one_position ? 0 : found.index;
            angles.load(params.rotary, int64_t{params.rotary.begins[found.sequence]} + index,
                        column);
        }
    }
#pragma unroll
    for (int i = 0; i < kAppendHeads; ++i) {
        const int head = group + i * groups;  // neighboring threads have neighboring heads
        if (head >= tensor.heads) continue;
        const Bits* source = row_pointer<const Bits>(tensor.from, from_batch, from_row, head);
        own[i] = *reinterpret_cast<const Columns*>(source + column);
        if (rotated) partners[i] = partners_of(params.rotary, own[i], source, column);
    }
#pragma unroll
    for (int i = 0; i < kAppendHeads; ++i) {
        const int head = group + i * groups;
        if (head >= tensor.heads) continue;
        if constexpr (sizeof(Element) == 2) {
            const auto number = [&](int j) {
                return rotated ? __fadd_rn(__fmul_rn(own[i][j], angles.cos[j]),
                                           __fmul_rn(partners[i][j], angles.signed_sin[j]))
                               : own[i][j];
            };
            if (tensor.quantized) {
                const auto descales = StoredDescales::of(params, tensor, found, head);
                RowColumns<uint8_t, kColumns> result;
#pragma unroll
                for (int j = 0; j < kColumns; ++j)
                    result.bits[j] =
                        to_8_bits(descales.quotient(number(j), column + j), tensor.to_int8);
                store_columns(tensor.to, to_batch, to_row, head, column, result);
                continue;
            }
            if (rotated) {
                Columns result;
#pragma unroll
                for (int j = 0; j < kColumns; ++j) result.set(j, number(j));
                own[i] = result;
            }
        }
        store_columns(tensor.to, to_batch, to_row, head, column, own[i]);
    }
}

// CTAs of a tensor.
template <int kColumns>
FLASH_HOST_DEVICE int64_t append_ctas(const AppendKVParams& params, const AppendedRows& tensor) {
    const int64_t units = tensor.all_rows(params.batch) * ceil_div(tensor.heads, kAppendHeads) *
                          ceil_div(tensor.head_dim, kColumns);
    return ceil_div<int64_t>(units, kAppendThreads);
}

// The lengths with the new rows. By a CTA.
FLASH_DEVICE void store_lengths(const AppendKVParams& params) {
    const AppendedRows& k = params.tensors[0];
    for (int i = threadIdx.x; i < params.batch; i += kAppendThreads)
        params.seqused_k[i] =
            params.cache_seqlens[i] +
            (k.cu_seqlens == nullptr ? k.rows : k.cu_seqlens[i + 1] - k.cu_seqlens[i]);
}

template <class Element, int kColumns>
__global__ void __launch_bounds__(kAppendThreads)
    append_kv_kernel(const __grid_constant__ AppendKVParams params) {
    int64_t cta = blockIdx.x;
    if (cta == 0) store_lengths(params);
    for (int i = 0; i < params.count; ++i) {
        const int64_t ctas = append_ctas<kColumns>(params, params.tensors[i]);
        if (cta < ctas)
            return append_unit<Element, kColumns>(params, params.tensors[i],
                                                  cta * kAppendThreads + threadIdx.x);
        cta -= ctas;
    }
}

template <class Element>
cudaError_t launch_append_kv(const AppendKVParams& params, cudaStream_t stream) {
    constexpr int kWhole = 16 / sizeof(Element);
    int64_t ctas = 0;
    for (int i = 0; i < params.count; ++i)
        ctas += params.whole ? append_ctas<kWhole>(params, params.tensors[i])
                             : append_ctas<1>(params, params.tensors[i]);
    const auto kernel = params.whole
                            ? launch_kernel<append_kv_kernel<Element, kWhole>, AppendKVParams>
                            : launch_kernel<append_kv_kernel<Element, 1>, AppendKVParams>;
    return kernel(max_of<int64_t>(ctas, params.batch > 0), kAppendThreads, 0, params, stream, {});
}

cudaError_t append_kv(const AppendKVParams& params, cudaStream_t stream) {
    if (element_bytes(params.element_type) == 1) return launch_append_kv<uint8_t>(params, stream);
    return dispatch_element(params.element_type, [&](auto element) {
        return launch_append_kv<decltype(element)>(params, stream);
    });
}

}  // namespace flash_ext
