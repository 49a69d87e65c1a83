// Every tuned number: tile shapes, stages and warps per (kernel, head dim). What was measured, and
// what else was tried, is in docs/notes.
#pragma once

namespace flash_ext::tuning {

struct Forward {
    int rows_per_warp;
    int warps;
    int block_kv;
    int stages;
    bool q_in_registers;
    int ctas_per_sm;
};

// Two 16-row blocks a warp while O and S fit in its 255 registers a lane, one beyond.
constexpr Forward fa2_forward(int head_dim) {
    switch (head_dim) {
        case 64: return {32, 4, 64, 2, true, 2};
        case 96: return {32, 4, 64, 2, false, 2};
        case 128: return {32, 4, 64, 2, false, 2};
        case 192: return {16, 8, 64, 2, false, 1};
        default: return {16, 8, 32, 2, false, 1};
    }
}

// Both backward kernels share backward_tile.cuh and these shapes.
struct Backward {
    int block_q;
    int keys_per_warp;  // rows of S^T, dK and dV that a warp holds
    int warps_kv;       // block_kv = keys_per_warp * warps_kv
    int warps_d;        // warps that share those rows: see backward_tile.cuh
    int ctas_per_sm;
};

constexpr Backward backward(int head_dim) {
    switch (head_dim) {
        case 64: return {32, 32, 4, 1, 2};
        case 96: return {64, 16, 8, 1, 1};
        case 128: return {64, 16, 8, 1, 1};
        case 192: return {64, 16, 4, 2, 1};
        default: return {32, 16, 4, 2, 1};
    }
}

}  // namespace flash_ext::tuning
