// What a kernel is told. Plain structs, no torch. Strides are in elements; shapes stand beside
// every pointer: B batch, Sq / Sk sequence lengths, Hq / Hk heads, D / Dv head dims.
#pragma once

#include <cstdint>

namespace flash_ext {

enum class ElementType { kFloat16, kBFloat16 };

// A (batch, row, head, column) tensor with a contiguous last dimension. Packed sequences
// (total rows, head, column) have batch_stride 0.
struct TensorView {
    void* data = nullptr;
    int64_t batch_stride = 0;
    int64_t row_stride = 0;
    int64_t head_stride = 0;
};

// See scheduler.cuh.
struct Schedule {
    int tiles = 0;  // per head
    int heads = 0;
    int batch = 0;
    int section_heads = 1;  // heads (of all batches) whose tiles are interleaved
};

// The problem and its options, the same for every kernel of every variant.
struct AttentionParams {
    ElementType element_type;

    int batch;
    int heads_q;
    int heads_k;
    int seqlen_q;  // Sq, or the packed total of rows
    int seqlen_k;
    int head_dim;    // D
    int head_dim_v;  // Dv

    // Packed sequences (varlen), not filled in yet: row offsets of the sequences, and keys in use
    // of each.
    const int* cu_seqlens_q = nullptr;  // (B + 1)
    const int* cu_seqlens_k = nullptr;  // (B + 1)
    const int* seqused_k = nullptr;     // (B)

    // Mask: BandMask::kUnlimited where a side has no bound; causal is window_right = 0.
    int window_left;
    int window_right;

    // Scores.
    float scale;
    float scale_log2;  // scale * log2(e)
    // The options from here to sink are carried for the kernels to come; nothing sets them yet.
    float softcap = 0.f;                  // 0: none
    const float* alibi_slopes = nullptr;  // (Hq) or (B, Hq)
    int64_t alibi_batch_stride = 0;
    const void* bias = nullptr;  // (B, Hq, Sq, Sk), any of them broadcast by stride 0
    int64_t bias_strides[4] = {0, 0, 0, 0};
    const float* sink = nullptr;  // (Hq)

    // Dropout; see dropout.cuh. keep_threshold 65536 keeps everything.
    const int64_t* rng_state = nullptr;  // (2): seed, offset
    uint32_t keep_threshold = 1u << 16;
    float keep_scale = 1.f;

    // Every row of every tensor starts and ends on a 16-byte boundary (so the head dim is a
    // multiple of 8): tiles move in 16-byte copies.
    bool aligned;
    Schedule schedule;
};

struct ForwardParams : AttentionParams {
    TensorView q;    // (B, Sq, Hq, D)
    TensorView k;    // (B, Sk, Hk, D)
    TensorView v;    // (B, Sk, Hk, Dv)
    TensorView out;  // (B, Sq, Hq, Dv)
    float* lse;      // (B, Hq, Sq), natural logarithm

    // FA1 only: its running output and statistics live in HBM.
    float* out_accum = nullptr;  // (B, Hq, Q tiles, kBlockQ * padded Dv), in fragment order
    float* row_max = nullptr;    // (B, Hq, Sq)
    float* row_sum = nullptr;    // (B, Hq, Sq)
};

struct BackwardParams : AttentionParams {
    TensorView q;       // (B, Sq, Hq, D)
    TensorView k;       // (B, Sk, Hk, D)
    TensorView v;       // (B, Sk, Hk, Dv)
    TensorView out;     // (B, Sq, Hq, Dv)
    TensorView dout;    // (B, Sq, Hq, Dv)
    const float* lse;   // (B, Hq, Sq)
    const float* dlse;  // (B, Hq, Sq) or null
    TensorView dq;      // (B, Sq, Hq, D)
    TensorView dk;      // (B, Sk, Hk, D)
    TensorView dv;      // (B, Sk, Hk, Dv)

    bool deterministic;

    // Workspace. Rows are padded to whole Q tiles: Sq' = q_tiles * kBlockQ.
    int q_tiles;
    float* dq_accum;      // (B, Hq, q_tiles, kBlockQ * padded D), each tile in fragment order
    float* lse_log2;      // (B, Hq, Sq'), lse * log2(e); +inf where the row sees no key
    float* delta;         // (B, Hq, Sq'), rowsum(dO * O) - dlse
    int* turn = nullptr;  // (1 + B * Hq * q_tiles) zeros when deterministic: a ticket, then per
                          // Q tile the number of KV tiles that have added their dQ
};

}  // namespace flash_ext
