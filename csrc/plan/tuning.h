// Every tuned number: tile shapes, stages and warps per (kernel, head dim). What was measured, and
// what else was tried, is in docs/notes.
#pragma once

#include "plan/head_dims.h"
#include "problem/params.h"

namespace flash_ext::tuning {

inline constexpr int kForwardBlockQ = 128;  // rows of fa2's Q tiles, and of fa3's smallest

struct Forward {
    int rows_per_warp;
    int warps;
    int block_kv;
    int q_register_cols;  // so many columns of Q stay in registers
    int ctas_per_sm;
};

// Two 16-row blocks a warp while O and S fit in its 255 registers a lane, one beyond. As many keys
// a tile as then fit. Q in registers takes from the fragments that are under way: it pays where the
// 16-row warps leave shared memory too little time.
constexpr Forward fa2_forward(HeadDims dims, Features features) {
    const bool general = features == Features::kGeneral;
    switch (dims.qk) {
        case 64:
            return general ? Forward{32, 4, 64, 0, 2} : Forward{32, 4, 128, 0, 2};
        case 96:
            return {32, 4, general ? 32 : 64, 0, 2};
        case 128:
            return {32, 4, general ? 32 : 64, 0, 2};
        case 192:
            if (dims.v == 128) return general ? Forward{16, 8, 64, 0, 1} : Forward{32, 4, 48, 0, 2};
            return {16, 8, 64, general ? 0 : 192, 1};
        default:
            return {16, 8, 64, general ? 0 : 128, 1};
    }
}

// Where shared memory does not suffice for that one (163 KB, A100).
constexpr Forward small_fa2_forward(HeadDims dims, Features features) {
    if (dims.qk <= 192) return fa2_forward(dims, features);
    return {16, 8, 32, features == Features::kGeneral ? 0 : 128, 1};
}

struct Fa3Forward {
    int consumers;  // warpgroups, of 64 rows each
    int block_kv;
    int q_stages;
    int k_stages;
    int v_stages;
    bool take_turns;
};

// What fa3's forward tiles are chosen by, beside head dims. kParts: the keys are cut into parts.
enum class Fa3Lengths { kParts, kFewQueries, kUsual, kLongKeys };

inline constexpr int kLongKeys = 8192;  // so many keys or more are many

// Of a sequence. Few queries are those of which 256 rows a tile would leave many more rows empty
// than 128 do, or which fill the GPU no more than once with tiles of 128.
constexpr Fa3Lengths fa3_lengths(int queries, int keys, bool few_tiles) {
    const auto rounded = [&](int64_t rows) { return ceil_div<int64_t>(queries, rows) * rows; };
    if (few_tiles || rounded(256) > rounded(128) + rounded(128) / 8) return Fa3Lengths::kFewQueries;
    return keys >= kLongKeys ? Fa3Lengths::kLongKeys : Fa3Lengths::kUsual;
}

constexpr Fa3Forward fa3_forward(HeadDims dims, Features features, Fa3Lengths lengths) {
    switch (dims.qk) {
        case 64:
            if (features == Features::kGeneral || lengths <= Fa3Lengths::kFewQueries)
                return {2, 128, 2, 4, 4, true};
            if (lengths == Fa3Lengths::kLongKeys) return {3, 96, 2, 4, 4, false};
            return {4, 64, 2, 3, 3, false};
        case 96:
            return {2, 128, 2, 3, 3, false};
        case 128:
            return {2, 128, 2, 3, 2, true};
        case 192:
            if (dims.v == 128) return {2, 96, 2, 2, 2, false};
            return {2, 80, 2, 2, 2, false};
        default:
            return {2, 64, 1, 3, 2, false};
    }
}

struct Fa1Forward {
    int block_q;
    int block_kv;        // where shared memory suffices (227 KB, Hopper)
    int small_block_kv;  // elsewhere (163 KB, A100)
};

constexpr Fa1Forward fa1_forward(HeadDims dims) {
    switch (dims.qk) {
        case 64:
            return {32, 256, 256};
        case 96:
            return {32, 256, 128};
        case 128:
            return {32, 256, 128};
        case 192:
            return {16, 128, 128};
        default:
            return {16, 128, 64};
    }
}

struct Backward {
    int block_q;
    int keys_per_warp;  // rows of S^T, dK and dV that a warp holds
    int warps_kv;       // block_kv = keys_per_warp * warps_kv
    int warps_d;        // warps that share those rows: see backward_tile.cuh
    int ctas_per_sm;
    int dq_parts = 1;  // dQ is computed in so many column parts, to save registers
    int stages = 2;    // Q tiles in shared memory, with their dO
};

// As many keys a warp as dK and dV leave registers for: each fragment of Q and dO serves them all.
// These tiles also fit GPUs with less shared memory (163 KB, A100).
constexpr Backward small_fa2_backward(HeadDims dims, Features features) {
    if (features == Features::kGeneral) {  // options take registers
        switch (dims.qk) {
            case 64:
                return {32, 16, 8, 1, 1};
            case 96:
                return {32, 16, 4, 1, 2};
            case 128:
                return {32, 32, 4, 2, 1};
            case 192:
                return {32, 16, 4, 2, 1};
            default:
                return {32, 16, 4, 2, 1, 2};
        }
    }
    switch (dims.qk) {
        case 64:
            return {32, 32, 4, 1, 2};
        case 96:
            return {64, 16, 8, 1, 1};
        case 128:
            return {64, 32, 4, 2, 1};
        case 192:
            return {64, 32, 2, 4, 1, 1, 1};
        default:
            return {32, 16, 4, 2, 1, 2};
    }
}

// Where shared memory suffices (227 KB, Hopper).
constexpr Backward fa2_backward(HeadDims dims, Features features) {
    if (dims.qk == 256 && features == Features::kPlain) return {128, 32, 2, 4, 1, 1, 1};
    return small_fa2_backward(dims, features);
}

// Computing delta in the loop takes registers too.
constexpr Backward fa1_backward(HeadDims dims) {
    switch (dims.qk) {
        case 64:
            return {32, 16, 8, 1, 1};
        case 96:
            return {64, 16, 8, 1, 1};
        case 128:
            return {32, 32, 4, 2, 1};
        case 192:
            return {32, 16, 4, 2, 1};
        default:
            return {32, 16, 4, 2, 1, 4};
    }
}

struct Fa3Backward {
    int block_q;
    int q_stages;   // Q tiles in shared memory, with their lse
    int do_stages;  // dO tiles, with their delta
    bool turns;     // do consumers begin their steps by turns?
};

// Turns are worth 3 to 9 % where exponentials take as long as matmuls, and cost 1 % where reads of
// shared memory take longer than both (note 010).
//
// 80 queries a step take less of shared memory's time at d 128. Few queries fill their tiles less
// well.
inline constexpr int kManyQueries = 8192;

constexpr bool many_queries(Features features, int queries) {
    return features != Features::kGeneral && queries >= kManyQueries;
}

constexpr Fa3Backward fa3_backward(HeadDims dims, bool many_queries) {
    if (dims.qk == 128 && many_queries) return {80, 2, 2, false};
    return dims.qk == 64 ? Fa3Backward{128, 3, 2, true} : Fa3Backward{64, 3, 2, false};
}

// Heads up to 128 sum dQ in memory; wider ones have no registers for that (fa3/backward_wide.cuh).
constexpr bool has_narrow_fa3_backward(HeadDims dims) { return dims.qk <= 128; }

// What fa3's backward pads heads to: it has no kernel of its own for 96.
constexpr HeadDims fa3_backward_head_dims(HeadDims dims) {
    return dims.qk == 96 ? HeadDims{128, 128} : dims;
}

struct Fa3BackwardWide {
    int pool_pairs;      // dK and dV: Q and dO tiles in shared memory
    int k_stages;        // dQ: K tiles ...
    int v_stages;        // ... and V tiles
    int product_stages;  // dS K: tiles of both
};

// As much as shared memory holds.
constexpr Fa3BackwardWide fa3_backward_wide(HeadDims dims) {
    return dims.qk == 256 ? Fa3BackwardWide{2, 2, 1, 4} : Fa3BackwardWide{3, 3, 2, 5};
}

// Parts of a head's rows in the sum of sink's gradient.
inline constexpr int kSinkParts = 32;

// Of queries or keys, in fa3's backward.
inline constexpr int kMinFa3BackwardBlock = 64;

// The fewest rows of a Q tile in any backward.
inline constexpr int kMinBackwardBlockQ = 32;

}  // namespace flash_ext::tuning
