// Masks of blocks (problem/tile_mask.cuh):
//
//     a dense mask    pack_mask.cuh makes bits and kinds of blocks; here kinds become rows of runs
//     intervals       are copied; of each Q block their hull gives the row of runs, and of all
//                     hulls each KV block has a hull of Q blocks, in which one run may be full
//                     and one hidden
//     documents       say what the intervals are (mask_documents.cuh)
//     kinds           become rows of runs; where intervals cut them, a hull says how
//
// At last each row says which row is the next longest (tile_mask.cuh). A warp has a row of runs or
// a Q block, a CTA all rows of a matrix.
#pragma once

#include <bit>

#include "kernels/common/launch.cuh"
#include "kernels/common/mask_documents.cuh"
#include "kernels/common/pack_mask.cuh"
#include "problem/make_mask.cuh"
#include "tile/copy.cuh"
#include "tile/warp_prefix.cuh"

namespace flash_ext {

// --- Intervals ---

// Where the intervals of a Q block are from.
enum class IntervalSource { kGiven, kOffsets, kIds };

template <IntervalSource kSource>
struct IntervalsOfBlock {
    const MakeMaskParams& params;
    int batch, head, block;

    FLASH_DEVICE KeyIntervals at(int, int query) const {
        if constexpr (kSource == IntervalSource::kOffsets)
            return params.documents.mask.intervals(document_by_offsets(params, batch, query));
        const int* x = params.intervals.row(batch, head, query);
        const int64_t stride = params.intervals.strides[3];
        return {x[0], x[stride], x[2 * stride], x[3 * stride]};
    }
};
template <>
struct IntervalsOfBlock<IntervalSource::kIds> {
    const MakeMaskParams& params;
    int batch, head, block;
    DocumentsOfBlock found{params, batch, block};
    int first_keys = min_of(max_of(*params.documents.first_keys, 0), params.seqlen_k);

    // i: which one of the lane's tokens.
    FLASH_DEVICE KeyIntervals at(int i, int query) const {
        if (document_id(params.documents, batch, query) < 0) return {};
        return params.documents.mask.intervals({found.begins[i], found.ends[i], query, first_keys});
    }
};

// At once, not by halfwords.
FLASH_DEVICE BlockHulls load_hulls(const BlockHulls* hulls) {
    return std::bit_cast<BlockHulls>(__ldg(reinterpret_cast<const uint4*>(hulls)));
}

// Of one interval of each query of a Q block.
struct Hull {
    int begin = kMaskBlock * kMostMaskBlocks;  // the least one
    int end = 0;
    int latest_begin = 0;
    int earliest_end = kMaskBlock * kMostMaskBlocks;

    FLASH_DEVICE void add(int begin_, int end_) {
        if (begin_ < end_) {
            begin = min_of(begin, begin_);
            end = max_of(end, end_);
        }
        latest_begin = max_of(latest_begin, begin_);
        earliest_end = min_of(earliest_end, end_);
    }
    FLASH_DEVICE void join_lanes() {
        begin = __reduce_min_sync(kAllLanes, begin);
        end = __reduce_max_sync(kAllLanes, end);
        latest_begin = __reduce_max_sync(kAllLanes, latest_begin);
        earliest_end = __reduce_min_sync(kAllLanes, earliest_end);
    }
    FLASH_DEVICE BlockRange seen() const {
        return block_range(begin / kMaskBlock, ceil_div(end, kMaskBlock));
    }
    FLASH_DEVICE BlockRange full() const {
        return block_range(ceil_div(latest_begin, kMaskBlock), earliest_end / kMaskBlock);
    }
};

// Of runs of blocks the longest one, and of equal ones the first.
struct LongestRun {
    int length = 0;
    int end = 0;

    FLASH_DEVICE int begin() const { return end - length; }
    FLASH_DEVICE void add(int length_, int end_) {
        if (length_ <= length) return;
        length = length_;
        end = end_;
    }
    // `none`: where an empty one is.
    FLASH_DEVICE void join_lanes(int none) {
        const int longest = __reduce_max_sync(kAllLanes, length);
        end = __reduce_min_sync(kAllLanes,
                                length == longest && length > 0 ? end : kMostMaskBlocks + 1);
        length = longest;
        if (length == 0) end = none;
    }
};

// The words and the hull of a Q block; without kinds also its row of runs.
template <IntervalSource kSource>
__global__ void __launch_bounds__(kMakeMaskThreads)
    mask_hulls_kernel(const __grid_constant__ MakeMaskParams params) {
    const int64_t row = warp_index();
    if (row >= int64_t{params.batch} * params.heads * params.q_blocks) return;
    const int q_block = static_cast<int>(row % params.q_blocks);
    const int matrix = static_cast<int>(row / params.q_blocks);
    const int lane = threadIdx.x % 32;
    auto* words = reinterpret_cast<KeyIntervals*>(params.words) + row * kMaskBlock;
    const IntervalsOfBlock<kSource> intervals{params, matrix / params.heads, matrix % params.heads,
                                              q_block};
    Hull first, second;
#pragma unroll
    for (int i = 0; i < kMaskBlock / 32; ++i) {
        const int query = q_block * kMaskBlock + 32 * i + lane;
        const bool exists = query < params.seqlen_q;
        const KeyIntervals x =
            exists ? tidy(intervals.at(i, query), params.seqlen_k) : KeyIntervals{};
        words[32 * i + lane] = x;
        if (!exists) continue;
        first.add(x.begin_0, x.end_0);
        second.add(x.begin_1, x.end_1);
    }
    first.join_lanes();
    second.join_lanes();
    if (lane != 0) return;
    const BlockHulls hulls{join(first.seen(), second.seen()), join(first.full(), second.full())};
    params.hulls[row] = hulls;
    if (params.kinds.data != nullptr) return;
    RowWriter writer{params.kv_tiles + row * params.kv_row};
    for_each_range(hulls, [&](BlockRange range, BlockKind kind) { writer.add(range, kind); });
    writer.write_header();
}

// The row of runs of a KV block: all Q blocks from the first to the last one that see it, but for
// the longest gap, and the longest run of full ones as such.
__global__ void __launch_bounds__(kMakeMaskThreads)
    mask_columns_kernel(const __grid_constant__ MakeMaskParams params) {
    const int64_t row = warp_index();
    if (row >= int64_t{params.batch} * params.heads * params.kv_blocks) return;
    const int kv_block = static_cast<int>(row % params.kv_blocks);
    const BlockHulls* hulls = params.hulls + row / params.kv_blocks * params.q_blocks;
    const int lane = threadIdx.x % 32;
    int begin = params.q_blocks, end = 0;
    int last_seen = -1;  // before these 32
    int before = 0;      // full blocks directly before these 32
    LongestRun full_run, gap;
#pragma unroll 4
    for (int base = 0; base < params.q_blocks; base += 32) {
        const int q_block = base + lane;
        const BlockKind kind = q_block < params.q_blocks
                                   ? load_hulls(hulls + q_block).kind(kv_block)
                                   : BlockKind::kHidden;
        const uint32_t full = __ballot_sync(kAllLanes, kind == BlockKind::kFull);
        const uint32_t seen = __ballot_sync(kAllLanes, kind != BlockKind::kHidden);
        if (kind != BlockKind::kHidden) {
            begin = min_of(begin, q_block);
            end = q_block + 1;
            const uint32_t seen_before = seen & ~(kAllLanes << lane);
            const int previous = seen_before == 0 ? last_seen : base + 31 - __clz(seen_before);
            if (previous >= 0) gap.add(q_block - previous - 1, q_block);
        }
        const uint32_t gaps = ~full & (kAllLanes >> (31 - lane));
        full_run.add(gaps == 0 ? before + lane + 1 : lane - 31 + __clz(gaps), q_block + 1);
        before = full == kAllLanes ? before + 32 : __clz(~full);
        if (seen != 0) last_seen = base + 31 - __clz(seen);
    }
    begin = __reduce_min_sync(kAllLanes, begin);
    end = __reduce_max_sync(kAllLanes, end);
    full_run.join_lanes(end);
    gap.join_lanes(end);
    if (lane != 0) return;
    RowWriter writer{params.q_tiles + row * params.q_row};
    writer.add(block_range(full_run.begin(), full_run.end), BlockKind::kFull);
    const auto add_others = [&](int from, int until) {
        writer.add(block_range(from, min_of(until, full_run.begin())), BlockKind::kPartial);
        writer.add(block_range(max_of(from, full_run.end), until), BlockKind::kPartial);
    };
    add_others(begin, gap.begin());
    add_others(gap.end, end);
    writer.write_header();
}

// --- Kinds ---

// Appends the runs of a kind to a row that has `runs` already. Returns the number of its blocks.
template <class IsOfKind>
FLASH_DEVICE int append_runs(int* row, int blocks, int& runs, IsOfKind is_of_kind) {
    const int lane = threadIdx.x % 32;
    const auto vote = [&](int base) {
        return __ballot_sync(kAllLanes, base + lane < blocks && is_of_kind(base + lane));
    };
    int total = 0;
    int start = 0;         // of the last run that has begun
    uint32_t is_open = 0;  // does it go on in these 32 blocks?
    uint32_t next = vote(0);
    for (int base = 0; base < blocks; base += 32) {
        const uint32_t found = next;
        next = vote(base + 32);
        const uint32_t starts = found & ~(found << 1 | is_open);
        const uint32_t ends = found & ~(found >> 1 | next << 31);
        if (ends >> lane & 1) {
            const uint32_t before = starts & (kAllLanes >> (31 - lane));
            const int first = before == 0 ? start : base + 31 - __clz(before);
            row[kMaskHeader + runs + __popc(ends & ~(kAllLanes << lane))] =
                static_cast<int>(mask_run(first, base + lane + 1 - first));
        }
        total += __popc(found);
        runs += __popc(ends);
        if (starts != 0) start = base + 31 - __clz(starts);
        is_open = found >> 31;
    }
    return total;
}

template <class KindOf>
FLASH_DEVICE void write_row(int* row, int blocks, KindOf kind_of) {
    int runs = 0;
    const auto append = [&](BlockKind kind) {
        return append_runs(row, blocks, runs, [&](int block) { return kind_of(block) == kind; });
    };
    const int full = append(BlockKind::kFull);
    const int partial = append(BlockKind::kPartial);
    if (threadIdx.x % 32 == 0) *reinterpret_cast<int4*>(row) = {full, partial, runs, 0};
}

template <bool kHasHulls>
__global__ void __launch_bounds__(kMakeMaskThreads)
    mask_rows_kernel(const __grid_constant__ MakeMaskParams params) {
    const int64_t matrices = int64_t{params.batch} * params.heads;
    const int64_t q_rows = matrices * params.q_blocks;
    int64_t row = warp_index();
    const bool of_q_block = row < q_rows;
    if (!of_q_block) row -= q_rows;
    const int blocks = of_q_block ? params.q_blocks : params.kv_blocks;
    if (row >= matrices * blocks) return;
    const int own = static_cast<int>(row % blocks);
    const int matrix = static_cast<int>(row / blocks);
    const BlockHulls* hulls = params.hulls + int64_t{matrix} * params.q_blocks;
    const auto kind_at = [&](const uint8_t* given, int64_t q_block, int kv_block) {
        const uint8_t kind = *given;
        if constexpr (kHasHulls)
            return kind == 0 ? BlockKind::kHidden : load_hulls(hulls + q_block).kind(kv_block);
        return static_cast<BlockKind>(kind);
    };
    const int64_t (&strides)[4] = params.kinds.strides;
    const uint8_t* kinds = params.kinds.row(matrix / params.heads, matrix % params.heads, 0);
    if (of_q_block) {
        const uint8_t* of_row = kinds + own * strides[2];
        write_row(params.kv_tiles + row * params.kv_row, params.kv_blocks, [&](int kv_block) {
            return kind_at(of_row + kv_block * strides[3], own, kv_block);
        });
    } else {
        const uint8_t* of_column = kinds + own * strides[3];
        write_row(params.q_tiles + row * params.q_row, params.q_blocks, [&](int q_block) {
            return kind_at(of_column + q_block * strides[2], q_block, own);
        });
    }
}

// --- The order of rows ---

inline constexpr int kOrderThreads = 512;
inline constexpr int kOrderWarps = kOrderThreads / 32;

// Of each class and each warp: how many of the warp's rows have it, then where the next one comes.
struct OrderStorage {
    int places[kLengthClasses][kOrderWarps];
};

// Calls visit(class, lanes of which a row has it, this lane's row) for the classes of each 32 rows.
template <class Visit>
FLASH_DEVICE void for_each_class(const int* rows, int stride, int begin, int end, Visit visit) {
    const int lane = threadIdx.x % 32;
    const auto class_of = [&](int row) {
        if (row >= end) return -1;
        const int2 x = *reinterpret_cast<const int2*>(rows + int64_t{row} * stride);
        return length_class(x.x + x.y);
    };
    int next = class_of(begin + lane);
    for (int base = begin; base < end; base += 32) {
        const int own = next;
        next = class_of(base + 32 + lane);
        for (uint32_t left = __ballot_sync(kAllLanes, own >= 0); left != 0;) {
            const int found = __shfl_sync(kAllLanes, own, __ffs(left) - 1);
            const uint32_t lanes = __ballot_sync(kAllLanes, own == found);
            visit(found, lanes, base + lane);
            left &= ~lanes;
        }
    }
}

// By one warp: from counts to places, first by class, then by warp. A lane has two classes.
FLASH_DEVICE void set_places(OrderStorage& storage) {
    static_assert(kLengthClasses == 2 * 32);
    int* counts = storage.places[2 * (threadIdx.x % 32)];
    int total = 0;
    for (int i = 0; i < 2 * kOrderWarps; ++i) total += counts[i];
    int place = warp_prefix_sum(total) - total;
    for (int i = 0; i < 2 * kOrderWarps; ++i) {
        const int count = counts[i];
        counts[i] = place;
        place += count;
    }
}

// A counting sort of the rows of a matrix by their classes; a warp has neighbors. Rows of one class
// stay in order, since neighbors often see the same blocks.
__global__ void __launch_bounds__(kOrderThreads)
    mask_order_kernel(const __grid_constant__ MakeMaskParams params) {
    auto& storage = shared_storage<OrderStorage>();
    const bool of_q_blocks = blockIdx.x % 2 == 0;
    const int count = of_q_blocks ? params.q_blocks : params.kv_blocks;
    const int stride = of_q_blocks ? params.kv_row : params.q_row;
    int* rows =
        (of_q_blocks ? params.kv_tiles : params.q_tiles) + int64_t{blockIdx.x / 2} * count * stride;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int share = ceil_div(count, 32 * kOrderWarps) * 32;
    const int begin = min_of(warp * share, count), end = min_of(begin + share, count);
    for (int i = threadIdx.x; i < kLengthClasses * kOrderWarps; i += kOrderThreads)
        storage.places[i / kOrderWarps][i % kOrderWarps] = 0;
    __syncthreads();
    for_each_class(rows, stride, begin, end, [&](int found, uint32_t lanes, int) {
        if (lane == 0) storage.places[found][warp] += __popc(lanes);
    });
    __syncthreads();
    if (warp == 0) set_places(storage);
    __syncthreads();
    for_each_class(rows, stride, begin, end, [&](int found, uint32_t lanes, int row) {
        const int first = storage.places[found][warp];
        if (lanes >> lane & 1)
            rows[int64_t{first + __popc(lanes & ~(kAllLanes << lane))} * stride + 3] = row;
        __syncwarp();
        if (lane == 0) storage.places[found][warp] += __popc(lanes);
        __syncwarp();
    });
}

template <auto kKernel>
cudaError_t launch_warps(int64_t warps, const MakeMaskParams& params, cudaStream_t stream) {
    return launch_kernel<kKernel>(ceil_div<int64_t>(warps, kMakeMaskThreads / 32), kMakeMaskThreads,
                                  0, params, stream);
}

cudaError_t make_hulls(const MakeMaskParams& params, cudaStream_t stream) {
    using enum IntervalSource;
    const int64_t rows = int64_t{params.batch} * params.heads * params.q_blocks;
    if (params.documents.first_keys == nullptr)
        return launch_warps<mask_hulls_kernel<kGiven>>(rows, params, stream);
    if (params.documents.ids == nullptr)
        return launch_warps<mask_hulls_kernel<kOffsets>>(rows, params, stream);
    const cudaError_t status = launch_warps<mask_first_tokens_kernel>(rows, params, stream);
    if (status != cudaSuccess) return status;
    return launch_warps<mask_hulls_kernel<kIds>>(rows, params, stream);
}

cudaError_t make_mask(const MakeMaskParams& params, cudaStream_t stream) {
    const int64_t matrices = int64_t{params.batch} * params.heads;
    const int64_t q_rows = matrices * params.q_blocks, kv_rows = matrices * params.kv_blocks;
    const bool has_hulls =
        params.intervals.data != nullptr || params.documents.first_keys != nullptr;
    cudaError_t status = cudaSuccess;
    if (params.dense.data != nullptr) status = pack_mask(params, stream);
    if (has_hulls) status = make_hulls(params, stream);
    if (status != cudaSuccess) return status;
    if (params.kinds.data == nullptr) {
        status = launch_warps<mask_columns_kernel>(kv_rows, params, stream);
    } else if (has_hulls) {
        status = launch_warps<mask_rows_kernel<true>>(q_rows + kv_rows, params, stream);
    } else {
        status = launch_warps<mask_rows_kernel<false>>(q_rows + kv_rows, params, stream);
    }
    if (status != cudaSuccess) return status;
    return launch_kernel<mask_order_kernel>(2 * matrices, kOrderThreads, sizeof(OrderStorage),
                                            params, stream);
}

}  // namespace flash_ext
