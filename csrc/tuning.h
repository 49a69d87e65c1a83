// Every tuned number: tile shapes, stages and warps per (kernel, head dim). What was measured, and
// what else was tried, is in docs/notes.
#pragma once

#include "variants.h"

namespace flash_ext::tuning {

struct Forward {
    int rows_per_warp;
    int warps;
    int block_kv;
    bool q_in_registers;
    int ctas_per_sm;
};

// Two 16-row blocks a warp while O and S fit in its 255 registers a lane, one beyond.
constexpr Forward fa2_forward(HeadDims dims, Features features) {
    if (dims.qk == 192 && dims.v == 128 && features == Features::kGeneral)
        return {16, 8, 64, false, 1};
    if (dims.v == 128 && features == Features::kGeneral) return {32, 4, 32, false, 2};
    if (dims.v == 64 && features == Features::kGeneral) return {32, 4, 64, false, 2};
    if (dims.v == 96 && features == Features::kGeneral) return {32, 4, 32, false, 2};
    if (dims.qk == 192 && dims.v == 128) return {32, 4, 48, false, 2};
    switch (dims.qk) {
        case 64:
            return {32, 4, 80, true, 2};
        case 96:
            return {32, 4, 64, false, 2};
        case 128:
            return {32, 4, 64, false, 2};
        case 192:
            return {16, 8, 64, false, 1};
        default:
            return {16, 8, 32, false, 1};
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
};

// As many keys a warp as dK and dV leave registers for: each fragment of Q and dO serves them all.
constexpr Backward fa2_backward(HeadDims dims, Features features) {
    if (features == Features::kGeneral) {  // options take registers
        if (dims.qk == 64) return {32, 16, 8, 1, 1};
        if (dims.qk == 96) return {32, 16, 4, 1, 2};
        if (dims.qk == 128) return {32, 32, 4, 2, 1};
        if (dims.qk == 192) return {32, 16, 4, 2, 1};
    }
    switch (dims.qk) {
        case 64:
            return {32, 32, 4, 1, 2};
        case 96:
            return {64, 16, 8, 1, 1};
        case 128:
            return {64, 32, 4, 2, 1};
        case 192:
            return {64, 16, 4, 2, 1};
        default:
            return {32, 16, 4, 2, 1, 2};
    }
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

// Rows of a Q tile in the backward's workspaces.
constexpr int backward_block_q(Variant variant, HeadDims dims, Features features) {
    return variant == Variant::kFa1 ? fa1_backward(dims).block_q
                                    : fa2_backward(dims, features).block_q;
}

}  // namespace flash_ext::tuning
