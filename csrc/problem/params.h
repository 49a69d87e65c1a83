// The parameters of a kernel. Plain structs, no torch. Strides are in elements. Every pointer has a
// shape comment: B batch, Sq / Sk sequence lengths, Hq / Hk heads, D / Dv head dims.
#pragma once

#include <cstdint>

#include "tile/host_device.h"
#include "tile/tensor_view.h"

namespace flash_ext {

enum class BiasType { kElement, kFloat32, kBool };

// Added to the scores; of packed sequences by positions within the sequence. A broadcast dimension
// has stride 0 and size 1. Otherwise keys are contiguous.
struct Bias {
    const void* data = nullptr;  // (B, Hq, Sq, Sk)
    BiasType type = BiasType::kElement;
    int64_t strides[4] = {0, 0, 0, 0};
    int sizes[4] = {1, 1, 1, 1};
    bool paired = false;  // is the element of every even key aligned to two elements?
};

// See schedule/tile_order.cuh.
struct Schedule {
    int tiles = 0;  // per head
    int heads = 0;
    int batch = 0;
    int l2_group_heads = 1;  // heads (of all batches) whose tiles are interleaved
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

    // Packed sequences (varlen), and keys in use; null where there are none.
    const int* cu_seqlens_q = nullptr;  // (B + 1) row offsets of the sequences
    const int* cu_seqlens_k = nullptr;  // (B + 1)
    const int* seqused_k = nullptr;     // (B)

    // Mask: BandMask::kUnlimited where a side has no bound; causal is window_right = 0.
    int window_left;
    int window_right;

    // Scores.
    float scale;
    float scale_log2;                     // scale * log2(e)
    float softcap = 0.f;                  // 0: none
    const float* alibi_slopes = nullptr;  // (Hq) or (B, Hq)
    int64_t alibi_batch_stride = 0;
    Bias bias;
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

// A kernel exists in up to three forms, so that the common case pays for no option: kPlain has
// masks (full, causal, window) and sinks; kVarlen also finds its sequences on the device, and in
// fa2 may take a split of the keys; kGeneral has all options, as branches that are uniform over the
// grid.
enum class Features { kPlain, kVarlen, kGeneral };

// The form of the kernel that this call needs.
FLASH_HOST_DEVICE Features features_of(const AttentionParams& params) {
    if (!params.aligned || params.keep_threshold < (1u << 16) || params.scale <= 0.f ||
        params.softcap != 0.f || params.alibi_slopes != nullptr || params.bias.data != nullptr)
        return Features::kGeneral;
    if (params.cu_seqlens_q != nullptr || params.seqused_k != nullptr) return Features::kVarlen;
    return Features::kPlain;
}

// The factor from the scores of the kernel's softmax to exponents of 2. The general form scales
// scores before it masks them, the others in the exponent.
FLASH_HOST_DEVICE float exponent_scale(const AttentionParams& params) {
    return features_of(params) == Features::kGeneral ? 1.f : params.scale_log2;
}

// Of a sequence; of packed sequences on average.
inline int mean_queries(const AttentionParams& params) {
    return params.cu_seqlens_q == nullptr || params.batch == 0 ? params.seqlen_q
                                                               : params.seqlen_q / params.batch;
}

// Of a row's softmax over a split of the keys.
struct alignas(8) PartialStatistics {
    float max;
    float sum;
};

struct ForwardParams : AttentionParams {
    TensorView q;    // (B, Sq, Hq, D)
    TensorView k;    // (B, Sk, Hk, D)
    TensorView v;    // (B, Sk, Hk, Dv)
    TensorView out;  // (B, Sq, Hq, Dv)
    float* lse;      // (B, Hq, Sq), natural logarithm; like all statistics (Hq, Sq) when packed

    // FA3 only.
    unsigned long long* tile_count_semaphore = nullptr;  // (1), the dynamic scheduler's
    bool few_tiles = false;  // do its smallest Q tiles fill the GPU no more than once?

    int pack_gqa_log2 = 0;  // a query has 2^pack_gqa_log2 rows in a Q tile, see QueryTiles

    // FA2 and FA3: where the keys of a Q tile are split, or GQA is packed, the result of each
    // split; see combine.cuh.
    int num_splits = 1;
    float* o_partial = nullptr;                       // (splits, B, Hq, Sq, padded Dv)
    PartialStatistics* statistics_partial = nullptr;  // (splits, B, Hq, Sq)

    // FA1 only: its running output and statistics are in HBM.
    float* out_accum = nullptr;       // (B, Hq, Q tiles, kBlockQ * padded Dv), in fragment order
    float* row_statistics = nullptr;  // (B, Hq, Q tiles, 2, kBlockQ): maxima, then sums
};

// Raised where *word is `epoch`, see launch_epoch.h. A word that still holds it from a graph's
// replay before costs time alone.
struct Flag {
    unsigned long long* word = nullptr;  // (1)
    unsigned long long epoch = 0;

    FLASH_HOST_DEVICE bool is_raised() const { return *word == epoch; }
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

    // With dropout dS is computed without this factor, the square root of keep_scale. With the
    // whole keep_scale fp16 could not hold its largest numbers for every p, without any of it not
    // the smallest.
    float ds_factor;
    float inverse_ds_factor;
    float gradient_scale;  // scale * ds_factor: what dS K and dS^T Q lack of dQ and dK
    bool deterministic;

    // Gradients of options; null where not requested.
    void* dbias = nullptr;   // of bias's sizes and type, contiguous
    float* dsink = nullptr;  // (Hq)

    // See large_lse.cuh.
    bool may_have_large_lse;
    Flag large_lse;  // does any row have a reference?

    // Workspace; its rows R are those of plan/workspace_rows.cuh.
    int q_blocks;  // per head
    int q_block_rows;
    float* dq_accum;   // (R, padded D), each Q tile in fragment order
    float* lse_log2;   // (R), lse * log2(e), relative to the reference; +inf where the row
                       // sees no key
    float* delta;      // (R), (rowsum(dO * O) - dlse) / ds_factor
    float* reference;  // (R), 0 for most; see large_lse.cuh
    // (1 + R / kBlockQ): a work index, then for each Q tile the number of KV tiles that have added
    // their dQ. FA2: in deterministic mode, zeroed before the launch. FA3: always, zeroed by the
    // preprocess pass, and followed by the counts of tiles_done().
    int* dq_semaphore = nullptr;
    bool dq_accum_zeroed;                                // FA3: does dq_accum begin with zeros?
    float* dsink_partial = nullptr;                      // (Hq, kSinkParts)
    unsigned long long* tile_count_semaphore = nullptr;  // (2), FA3 for wide heads
    void* ds = nullptr;    // (ds_bytes), FA3 for wide heads: dS of some of them, or null
    int64_t ds_bytes = 0;  // see plan/ds_workspace.cuh
};

}  // namespace flash_ext
