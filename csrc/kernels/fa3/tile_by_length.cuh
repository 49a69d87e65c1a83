// The tile of a CTA of decode.cuh with splits by length (schedule/split_by_length.cuh).
#pragma once

#include "kernels/common/softmax.cuh"
#include "problem/mask.cuh"
#include "schedule/split_by_length.cuh"
#include "schedule/tile_numbers.cuh"

namespace flash_ext {

// A member of SharedStorage: over the loop over keys `work` would take registers.
template <int kWarps, int kKeys, bool kPages>
struct TileByLength {
    ClusterWork work;
    float blocks[kWarps];  // of the sequences of each warp

    // Of cluster `index` of a head, with tiles of `queries`. By all threads of the CTA: together
    // they load all lengths, at once if the sequences are not many, and a warp goes over them
    // again.
    FLASH_DEVICE SequenceTile find(const AttentionParams& params, const SplitsByLength& by_length,
                                   int index, int queries) {
        const int sequences = sequence_count(params);
        const auto work_of = [&](int number) -> SequenceWork {
            const Sequence s = sequence_of<true, kPages>(params, number);
            if (s.seqlen_q > by_length.most_queries) return {0, 0};
            const VisibleTiles seen =
                VisibleTiles::of_queries(mask_of(params, s), {0, s.seqlen_q}, kKeys);
            return {ceil_div(s.seqlen_q, queries), seen.count()};
        };
        float sum = 0.f;
        for (int number = threadIdx.x; number < sequences; number += 32 * kWarps) {
            const SequenceWork of_one = work_of(number);
            sum += static_cast<float>(of_one.tiles) * static_cast<float>(of_one.blocks);
        }
        sum = warp_sum(sum);
        if (lane_id() == 0) blocks[warp_id()] = sum;
        __syncthreads();  // the sums of all warps
        if (warp_id() == 0) {
            sum = warp_sum(lane_id() < kWarps ? blocks[lane_id()] : 0.f);
            const ClusterWork found =
                find_cluster_work(index, sequences, by_length.length(sum), work_of);
            if (lane_id() == 0) work = found;
        }
        __syncthreads();  // the work
        if (work.number < 0) return {};
        return {sequence_of<true, kPages>(params, work.number), work.tile};
    }
};

}  // namespace flash_ext
