// Rows of several tensors added up in one pass over memory; or, with an lse each, attention over
// some keys each, O_p and lse_p, made into that over all of them:
//
//     lse = log(sum_p e^lse_p),    O = sum_p e^(lse_p - lse) O_p
//
// Between GPUs every step of a method is a whole call with results of its own. (combine.cuh is for
// the splits of one call, with maxima and sums in place of lse.) Several tensors may get the same
// rows, other GPUs' among them. Bound by memory: each row is read and written once. A row
// has 8, 16 or 32 lanes; heads are next to each other in memory, so a warp's rows are too.
#pragma once

#include <type_traits>

#include "kernels/common/launch.cuh"
#include "ptx/math.cuh"
#include "tile/copy.cuh"

namespace flash_ext {

inline constexpr int kSumRowsThreads = 256;
inline constexpr int kLaneColumns = 8;

// A lane's kColumns columns, one or eight, as they are in memory: in all words, or two of 16 bits
// in each of the first ones. They are converted after all loads are under way.
template <class Element, int kColumns>
struct LaneBits {  // Element: of all tensors; void: of any types, which are looked up at run time
    static constexpr bool kAlike = !std::is_void_v<Element>;
    static constexpr int kWords = kAlike ? kColumns / 2 : kColumns;
    alignas(16) uint32_t words[kWords];

    static FLASH_DEVICE bool is_float(ResultType type) {
        return !kAlike && type == ResultType::kFloat32;
    }
    static FLASH_DEVICE bool is_half(ResultType type) {
        return kAlike ? std::is_same_v<Element, __half> : type == ResultType::kFloat16;
    }

    FLASH_DEVICE void load(const char* source, ResultType type) {
        if constexpr (kColumns == 1) {
            words[0] = is_float(type) ? *reinterpret_cast<const uint32_t*>(source)
                                      : *reinterpret_cast<const uint16_t*>(source);
        } else {
            const auto* x = reinterpret_cast<const uint4*>(source);
            four_words(0) = x[0];
            if (is_float(type)) four_words(4) = x[1];
        }
    }

    FLASH_DEVICE void store(char* target, ResultType type) {
        if constexpr (kColumns == 8) {
            auto* x = reinterpret_cast<uint4*>(target);
            x[0] = four_words(0);
            if (is_float(type)) x[1] = four_words(4);
        } else if (is_float(type)) {
            *reinterpret_cast<uint32_t*>(target) = words[0];
        } else {
            *reinterpret_cast<uint16_t*>(target) = static_cast<uint16_t>(words[0]);
        }
    }

    FLASH_DEVICE void to_floats(float (&x)[kColumns], ResultType type) const {
        const bool half = is_half(type);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const float2 pair =
                half ? ptx::unpack<__half>(words[i / 2]) : ptx::unpack<__nv_bfloat16>(words[i / 2]);
            x[i] = is_float(type) ? __uint_as_float(words[i % kWords]) : i % 2 ? pair.y : pair.x;
        }
    }

    // What to_floats reads.
    FLASH_DEVICE void set(const float (&x)[kColumns], ResultType type) {
        const bool half = is_half(type);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const float next = x[min_of(i + 1, kColumns - 1)];
            if (is_float(type)) {
                words[i % kWords] = __float_as_uint(x[i]);
            } else if (i % 2 == 0) {
                words[i / 2] =
                    half ? ptx::pack<__half>(x[i], next) : ptx::pack<__nv_bfloat16>(x[i], next);
            }
        }
    }

 private:
    FLASH_DEVICE uint4& four_words(int first) {
        return reinterpret_cast<uint4&>(words[first % kWords]);
    }
};

// Lanes of a row: the first power of two from 8 on that holds it, or 32.
FLASH_HOST_DEVICE constexpr int lanes_per_row(int head_dim, int lane_columns) {
    int lanes = 8;
    while (lanes < 32 && lanes * lane_columns < head_dim) lanes *= 2;
    return lanes;
}

// From the lse of parts to their weights; returns the lse of all. A part without any key has no
// weight: there may be anything in its result.
template <int kParts>
FLASH_DEVICE float weigh(float (&weight)[kParts], bool (&has)[kParts]) {
    float max = -INFINITY;
    float sum = 0.f;
#pragma unroll
    for (int p = 0; p < kParts; ++p) max = fmaxf(max, weight[p]);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        has[p] = weight[p] != -INFINITY;
        weight[p] = has[p] ? ptx::ex2((weight[p] - max) * kLog2e) : 0.f;
        sum += weight[p];
    }
    const float scale = 1.f / sum;
#pragma unroll
    for (int p = 0; p < kParts; ++p) weight[p] *= scale;
    return max == -INFINITY ? max : max + logf(sum);
}

// A row of up to kParts parts. All loads are under way before the first one is used.
template <int kParts, class Element, int kColumns>
__global__ void __launch_bounds__(kSumRowsThreads)
    sum_rows_kernel(const __grid_constant__ SumRowsParams params) {
    using Bits = LaneBits<Element, kColumns>;
    const uint32_t lanes = lanes_per_row(params.head_dim, kColumns);
    const uint32_t index = blockIdx.x * (kSumRowsThreads / lanes) + threadIdx.x / lanes;
    const int lane = static_cast<int>(threadIdx.x % lanes);
    const bool valid = index < params.all_rows();
    // Threads without a row stay until the warp has met below.
    const uint32_t flat_row = valid ? index / params.heads : 0;
    const int head = valid ? static_cast<int>(index % params.heads) : 0;
    const int batch = static_cast<int>(flat_row / params.rows);
    const int64_t row = flat_row % params.rows;
    const int64_t source = params.index ? params.index[row] : row;
    const bool weighted = params.lse.data != nullptr;
    const auto statistic = [&](const StatisticsView& view, int64_t at) {
        return view.data + batch * view.batch_stride + head * view.head_stride + at;
    };
    int column = lane * kColumns;
    const auto place_of = [&](const ResultView& view, int64_t at) {
        const TensorView& x = view.tensor;
        const int64_t first = batch * x.batch_stride + at * x.row_stride + head * x.head_stride;
        return static_cast<char*>(x.data) + (first + column) * (Bits::is_float(view.type) ? 4 : 2);
    };

    bool has[kParts];
    float weight[kParts];
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        const RowsPart& part = params.part[p];
        const int64_t at = source - part.first;
        has[p] = valid && at >= 0 && at < part.rows;  // parts that there are not have no rows
        weight[p] = weighted && has[p] ? *statistic(part.lse, at) : -INFINITY;
    }
    Bits bits[kParts];
    const auto load = [&] {
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            const RowsPart& part = params.part[p];
            if (has[p] && column < params.head_dim)
                bits[p].load(place_of(part.x, source - part.first), part.x.type);
        }
    };
    load();

    const float lse = weighted ? weigh(weight, has) : 0.f;
    while (valid && column < params.head_dim) {
        float total[kColumns]{};
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            if (!has[p]) continue;
            float x[kColumns];
            bits[p].to_floats(x, params.part[p].x.type);
#pragma unroll
            for (int i = 0; i < kColumns; ++i) total[i] += weighted ? weight[p] * x[i] : x[i];
        }
        Bits result;
        result.set(total, params.out.type);
        for (int i = 0; i < params.outs; ++i)
            result.store(place_of(params.out, row) + params.distance[i], params.out.type);
        column += static_cast<int>(lanes) * kColumns;
        load();
    }

    __syncwarp();  // all lanes of the row have read what may be the same lse
    if (valid && weighted && lane == 0) *statistic(params.lse, row) = lse;
}

template <int kParts, class Element, int kColumns = kLaneColumns>
cudaError_t launch_sum_rows(const SumRowsParams& params, cudaStream_t stream) {
    const int rows_per_cta = kSumRowsThreads / lanes_per_row(params.head_dim, kColumns);
    const int64_t ctas = ceil_div<int64_t>(params.all_rows(), rows_per_cta);
    return launch_kernel<sum_rows_kernel<kParts, Element, kColumns>>(ctas, kSumRowsThreads, 0,
                                                                     params, stream);
}

template <class Element>
cudaError_t launch_sum_rows_of(const SumRowsParams& params, cudaStream_t stream) {
    return params.parts <= 2   ? launch_sum_rows<2, Element>(params, stream)
           : params.parts <= 4 ? launch_sum_rows<4, Element>(params, stream)
                               : launch_sum_rows<kMaxParts, Element>(params, stream);
}

cudaError_t sum_rows(const SumRowsParams& params, cudaStream_t stream) {
    if (!params.whole) return launch_sum_rows<kMaxParts, void, 1>(params, stream);  // rare layouts
    const ResultType type = params.out.type;
    bool alike = type != ResultType::kFloat32;
    for (int p = 0; p < params.parts; ++p) alike = alike && params.part[p].x.type == type;
    return !alike                         ? launch_sum_rows_of<void>(params, stream)
           : type == ResultType::kFloat16 ? launch_sum_rows_of<__half>(params, stream)
                                          : launch_sum_rows_of<__nv_bfloat16>(params, stream);
}

}  // namespace flash_ext
