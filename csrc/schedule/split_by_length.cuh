// Splits by length: the longer a sequence, the more splits it has, so that all are about equally
// long, whatever the lengths are. They are on the device, so each CTA finds its split itself, by
// passes over the sequences: the sum of their lengths, then prefix sums of their splits. The
// host knows no more than how many splits there can be.
//
// The splits are clusters of CTAs here, as decode.cuh has them. Lengths are in blocks of keys.
#pragma once

#include "schedule/split_kv.cuh"
#include "tile/warp_prefix.cuh"

namespace flash_ext {

// The Q tiles of a sequence, and the blocks of keys that each of them sees at most.
struct SequenceWork {
    int tiles;
    int blocks;
};

// The work of a cluster.
struct ClusterWork {
    int number;   // of the sequence; negative: there is none
    int tile;     // of the sequence
    int cluster;  // of the tile's `clusters`
    int clusters;
    int stored;  // of a tile with several: the index of its first one, as those tiles come first
};

// Cluster `index` of a head. By a warp. work_of(number) is what a sequence has. Tiles with several
// clusters come first: if one of many sequences is long, its clusters are the longest, and must not
// start last.
template <class WorkOf>
FLASH_DEVICE ClusterWork find_cluster_work(int index, int sequences, int length, WorkOf work_of) {
    const int passes = ceil_div(sequences, 32);  // of a warp over all sequences
    int before = 0;
#pragma unroll 1
    for (int pass = 0; pass < 2 * passes; ++pass) {
        const bool of_several = pass < passes;
        const int first = (of_several ? pass : pass - passes) * 32;
        const int number = first + lane_id();
        const SequenceWork work = number < sequences ? work_of(number) : SequenceWork{0, 0};
        const int clusters = SplitsByLength::of_tile(work.blocks, length);
        const int own = (clusters > 1) == of_several ? work.tiles * clusters : 0;
        const int end = before + warp_prefix_sum(own);
        const unsigned past = __ballot_sync(0xffffffff, end > index);
        if (past != 0) {
            const int lane = __ffs(past) - 1;
            const auto of_lane = [&](int x) { return __shfl_sync(0xffffffff, x, lane); };
            const int of_each = of_lane(clusters);
            const int within = index - of_lane(end - own);
            const int tile = within / of_each;
            const int cluster = within - tile * of_each;
            return {first + lane, tile, cluster, of_each, index - cluster};
        }
        before = __shfl_sync(0xffffffff, end, 31);
    }
    return {-1, 0, 0, 1, 0};
}

}  // namespace flash_ext
