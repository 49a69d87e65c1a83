// The parameters of kernels: plain structs, without torch. Strides are in elements. Every pointer
// has a shape comment: B batch, Sq / Sk sequence lengths, Hq / Hk heads, D / Dv head dims.
#pragma once

#include <cstdint>

#include "problem/option_set.h"
#include "tile/host_device.h"
#include "tile/tensor_view.h"

namespace flash_ext {

enum class BiasType { kElement, kFloat32, kBool };

// Added to the scores. With varlen it is indexed by positions within the sequence. A broadcast
// dimension has stride 0 and size 1. Unless they are broadcast, keys are contiguous.
struct Bias {
    const void* data = nullptr;  // (B, Hq, Sq, Sk)
    BiasType type = BiasType::kElement;
    int64_t strides[4] = {0, 0, 0, 0};
    int sizes[4] = {1, 1, 1, 1};
    bool paired = false;  // is the element of every even key aligned to two elements?
};

inline constexpr int kMaskBlock = 128;         // queries, and keys, of a block of a mask
inline constexpr int kMostMaskBlocks = 65535;  // whose numbers have 16 bits

// Which blocks of 128 queries and 128 keys are visible, and what of them: see tile_mask.cuh. Null
// where there is no such mask.
struct TileMask {
    const int* kv_tiles = nullptr;    // (B or 1, heads, Q blocks, kv_row): rows of runs
    const int* q_tiles = nullptr;     // (B or 1, heads, KV blocks, q_row)
    const uint32_t* words = nullptr;  // (B or 1, heads, Q blocks, KV blocks if bits, 128, 4)
    int heads = 1;                    // Hq, Hk or 1
    int batch_stride = 0;             // masks from a batch element to the next: heads, or 0
    Divisor by_group;                 // the query heads that share a mask
    int kv_row = 0;
    int q_row = 0;
    int q_blocks = 0;
    int kv_blocks = 0;
    bool bits = false;  // words are bits of keys, otherwise two intervals of keys
};

// x = x_8bit * descale. Strides in elements; 0 where one value serves all. `last` is the stride of
// blocks (of 128 rows; q and k) or of channels (v).
struct Descale {
    const float* data = nullptr;  // null: 1
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
    int64_t last_stride = 0;
    int last_block = 0;  // of blocks
    bool by_query_head = false;
};
inline constexpr int kDescaleRows = 128;  // of a block

// See schedule/tile_order.cuh.
struct TileOrder {
    int tiles = 0;  // per head
    int heads = 0;
    int batch = 0;
    int l2_group_heads = 1;  // heads (of all batches) whose tiles are interleaved
    int tiles_at_once = 1;   // neighbors in this order, which one CTA takes one after another
    int first = 0;           // so many tiles of each head come before all others
};

// With what a kernel divides by: a division takes 30 instructions, all before the first loads.
struct PreparedTileOrder : TileOrder {
    int l2_group_tiles = 0;
    Divisor by_l2_group_tiles, by_l2_group_heads, by_last_heads, by_heads, by_all_heads;

    PreparedTileOrder() = default;
    constexpr PreparedTileOrder(const TileOrder& order)
        : TileOrder(order),
          l2_group_tiles((tiles - first) * l2_group_heads),
          by_l2_group_tiles(l2_group_tiles),
          by_l2_group_heads(l2_group_heads),
          by_last_heads((max_of(heads * batch, 1) - 1) % l2_group_heads + 1),
          by_heads(heads),
          by_all_heads(heads * batch) {}
};

// Where the pages of a sequence are among K's and V's, whose batches they then are: page i of
// its keys is page `table[i]` of the tensors. Entries past its keys in use are never read; others
// are clamped to the tensors.
struct Pages {
    const int* table = nullptr;  // (B, at least as many as a sequence has); null: no pages
    int64_t stride = 0;          // of its rows
    int count = 0;               // of K and V
    int size = 1;                // keys of a page
    Divisor by_size{size};
    int box_rows = 0;  // of a TMA box, where TMA loads them
};

// The problem and its options, the same for every kernel of every variant.
struct AttentionParams {
    ElementType element_type;

    int batch;
    int heads_q;
    int heads_k;
    int seqlen_q;    // Sq; with varlen the total number of rows, so for seqlen_k
    int seqlen_k;    // with pages the most that a sequence can have
    int head_dim;    // D
    int head_dim_v;  // Dv

    // Varlen, and the keys in use; null where not given.
    const int* cu_seqlens_q = nullptr;  // (B + 1) row offsets of the sequences
    const int* cu_seqlens_k = nullptr;  // (B + 1)
    const int* seqused_k = nullptr;     // (B)
    Pages pages;

    // Mask. BandMask::kUnlimited: no bound on this side. Causal is window_right = 0.
    int window_left;
    int window_right;

    // Scores.
    float scale;
    float scale_log2;     // scale * log2(e)
    float softcap = 0.f;  // 0: none
    // Of a softcap: scale / softcap, softcap * log2(e), and the inverse of this.
    float tanh_scale;
    float softcap_log2;
    float inverse_softcap_log2;
    const float* alibi_slopes = nullptr;  // (Hq) or (B, Hq)
    int64_t alibi_batch_stride = 0;
    Bias bias;
    TileMask tile_mask;
    const float* sink = nullptr;  // (Hq)

    // Of 8-bit inputs; q's if it has 8 bits, too.
    Descale q_descale;     // (B, Hk) or (B, Hq, blocks)
    Descale k_descale;     // (B, Hk) or (B, Hk, blocks)
    Descale v_descale;     // (B, Hk) or (B, Hk, Dv)
    ElementType out_type;  // of out; that of q unless q has 8 bits
    ElementType key_type;  // of k; that of q unless k and v have 8 bits, and q 16

    // Dropout, see dropout.cuh.
    const int64_t* rng_state = nullptr;  // (2): seed, offset; null: none
    uint32_t drop_threshold;             // of 15 bits, twice
    // The factor of entries that are kept, 1 / (1 - p), is the product of these. P has the first
    // one when it is rounded: without it, small P would lose digits in fp16, with all of it the
    // largest could overflow.
    float p_factor = 1.f;
    float late_factor = 1.f;

    // Must the bits of a row depend on its query and keys alone? Then plans ask neither for the
    // batch nor for the number of queries where that would change them (docs/notes/034).
    bool batch_invariant = false;

    // Does every row of every tensor start and end on a 16-byte boundary? (So head dims are
    // multiples of 8.) Then tiles are copied 16 bytes at a time.
    bool aligned;
    // Does the kernel that the plan has chosen scale scores before it masks them? See OptionSet.
    bool changes_scores = false;
    bool v_transposed = false;  // FP8: is v V^T (plan/transposed_v.cuh)?
    PreparedTileOrder tile_order;

    TensorView q;    // (B, Sq, Hq, D)
    TensorView k;    // (B, Sk, Hk, D), or (pages, page size, Hk, D)
    TensorView v;    // (B, Sk, Hk, Dv), or (pages, page size, Hk, Dv), or (B, Hk, Dv, keys)
    TensorView out;  // (B, Sq, Hq, Dv)
};

// May the lengths of sequences differ?
FLASH_HOST_DEVICE bool is_varlen(const AttentionParams& params) {
    return params.cu_seqlens_q != nullptr || params.seqused_k != nullptr;
}

// Does q have 8 bits? Then k and v do, too.
FLASH_HOST_DEVICE bool has_8_bits(const AttentionParams& params) {
    return element_bytes(params.element_type) == 1;
}
FLASH_HOST_DEVICE bool has_8_bit_keys(const AttentionParams& params) {
    return element_bytes(params.key_type) == 1;
}

// The least scale of kernels that multiply scores by it after masking, or divide lse by it.
inline constexpr float kMinScale = 1e-30f;

// The largest softcap whose tanh one instruction computes well enough.
inline constexpr float kMaxTanhSoftcap = 64.f;

// The largest 1 / (1 - p) of dropout whose numbers may be compared as numbers of fp16: 31 of 32
// magnitudes are finite.
inline constexpr float kMaxHalvesKeepScale = 32.f;

// A scale or a softcap that is tiny, a scale that is not positive, or a large softcap; or dropout
// that keeps less than half, in fp16: small P then need a factor before they are rounded. 8-bit
// kernels take any scale.
inline bool has_rare_scale(const AttentionParams& params) {
    if (has_8_bits(params)) return false;
    const float cap = params.softcap != 0.f ? params.softcap : 1.f;
    const float keep_scale = params.p_factor * params.late_factor;
    return min_of(params.scale, cap) < kMinScale || cap > kMaxTanhSoftcap ||
           keep_scale > (params.element_type == ElementType::kFloat16 ? 2.f : kMaxHalvesKeepScale);
}

// The options that the call asks for.
inline OptionSet options_of(const AttentionParams& params) {
    using enum OptionSet;
    return only_if(is_varlen(params), kVarlen) | only_if(has_rare_scale(params), kRareScale) |
           only_if(params.softcap != 0.f, kSoftcap) |
           only_if(params.alibi_slopes != nullptr, kAlibi) |
           only_if(params.bias.data != nullptr, kBias) |
           only_if(params.rng_state != nullptr, kDropout) | only_if(!params.aligned, kUnaligned) |
           only_if(params.pages.table != nullptr, kPages) |
           only_if(params.tile_mask.kv_tiles != nullptr, kMask);
}

// Have query heads that share K and V masks of their own?
inline bool has_masks_within_groups(const AttentionParams& params) {
    return params.tile_mask.heads > params.heads_k;
}

// Can FA2 bring tiles of the bias to shared memory, if it is in 16 bits, with rows that start on
// 16-byte boundaries? What a tile has beyond the bias is then beyond the sequence.
inline bool may_have_bias_tiles(const AttentionParams& params) {
    const Bias& bias = params.bias;
    return bias.data != nullptr && params.cu_seqlens_q == nullptr &&
           params.cu_seqlens_k == nullptr && bias.sizes[3] > 1 &&
           bias.sizes[3] == params.seqlen_k &&
           (bias.sizes[2] == 1 || bias.sizes[2] == params.seqlen_q);
}
inline bool has_bias_tiles(const AttentionParams& params) {
    const Bias& bias = params.bias;
    int64_t misaligned = reinterpret_cast<uintptr_t>(bias.data) % 16;
    for (int dim = 0; dim < 3; ++dim) misaligned |= bias.strides[dim] % 8;
    return may_have_bias_tiles(params) && bias.type == BiasType::kElement && misaligned == 0;
}

// What the kernels of FA1 and FA2 need: other biases as other unaligned rows.
inline OptionSet mma_options_of(const AttentionParams& params) {
    return options_of(params) |
           only_if(params.bias.data != nullptr && !has_bias_tiles(params), OptionSet::kUnaligned);
}

// The factor from scores of 16-bit inputs to exponents of 2. Kernels that change scores scale them
// before they mask them, the others in the exponent.
FLASH_HOST_DEVICE float exponent_scale(const AttentionParams& params) {
    return params.changes_scores ? 1.f : params.scale_log2;
}

// The number of queries, and of keys, of a sequence; with varlen the mean.
inline int mean_queries(const AttentionParams& params) {
    return params.cu_seqlens_q == nullptr || params.batch == 0 ? params.seqlen_q
                                                               : params.seqlen_q / params.batch;
}
inline int mean_keys(const AttentionParams& params) {
    return params.cu_seqlens_k == nullptr || params.batch == 0 ? params.seqlen_k
                                                               : params.seqlen_k / params.batch;
}

// The statistics of a row's softmax over a split of the keys.
struct alignas(8) PartialStatistics {
    float max;  // in exponents of 2
    float sum;
};

struct ForwardParams : AttentionParams {
    float* lse;  // (B, Hq, Sq), natural logarithm; with varlen (Hq, Sq), as all statistics

    // FA3 only.
    unsigned long long* counters = nullptr;  // (1), of the dynamic scheduler; or in decode.cuh
                                             // (tiles, 8)
    // FA2 and FA3: the results of splits, see combine.cuh; in decode.cuh those of clusters of
    // splits.
    int num_splits = 1;
    float* o_partial = nullptr;                       // (splits, B, Hq, Sq, padded Dv)
    PartialStatistics* statistics_partial = nullptr;  // (splits, B, Hq, Sq)

    // FA3 only: a query has 2^pack_gqa_log2 rows in a Q tile, see QueryTiles. ptxas 13.0: not
    // beside num_splits, lest both are loaded at once, into registers that are side by side.
    int pack_gqa_log2 = 0;

    // FA1 only, whose running output and statistics are in HBM.
    float* out_accum = nullptr;       // (B, Hq, Q tiles, kBlockQ * padded Dv), in fragment order
    float* row_statistics = nullptr;  // (B, Hq, Q tiles, 2, kBlockQ): maxima, then sums

    // FA3 with pages and varlen: sequences of at most so many queries are another kernel's.
    int few_queries = 0;

    // FA3 with a softcap: TanhSeries' offset and factors, and its limit.
    float tanh_series[4];
    float tanh_limit;

    // FA3, batch-invariant: splits are fixed ones (schedule/split_kv.cuh), at most num_splits, and
    // so many CTAs have those of a Q tile. With one o_partial is the CTAs' own memory.
    int split_ctas = 0;

    int group = 1;  // query heads that share a head of K and V
    Divisor by_group;
};

// Raised if *word is `epoch`, see launch_epoch.h. The word is the call's own, and nothing clears
// it. It may hold the epoch before, by chance or in a CUDA graph from an earlier replay: this costs
// time, but changes no result.
struct Flag {
    unsigned long long* word = nullptr;  // (1)
    unsigned long long epoch = 0;

    FLASH_HOST_DEVICE bool is_raised() const { return *word == epoch; }
};

// Half of a number as the sum of three bfloat16 numbers, exact to 24 bits, and five zeros: a row of
// the operand RowNumbers (tile/wgmma.cuh).
struct alignas(16) StatisticsRow {
    uint32_t terms[4];
};

struct BackwardParams : AttentionParams {
    TensorView dout;    // (B, Sq, Hq, Dv)
    const float* lse;   // (B, Hq, Sq)
    const float* dlse;  // (B, Hq, Sq) or null
    TensorView dq;      // (B, Sq, Hq, D)
    TensorView dk;      // (B, Sk, Hk, D), or of parts: (B, Sk, Hk parts, D) in float32
    TensorView dv;      // (B, Sk, Hk, Dv), or of parts

    // The square root of 1 / (1 - p). With dropout, dS is rounded without this factor: with all of
    // 1 / (1 - p) its largest values could overflow fp16, with none of it its smallest could
    // underflow.
    float ds_factor;
    float inverse_ds_factor;
    float gradient_scale;  // scale * ds_factor: the factor from dS K and dS^T Q to dQ and dK
    bool deterministic;
    bool stores_dbias = false;  // FA2: does the backward itself store it?

    // Gradients of options; null where not requested.
    void* dbias = nullptr;   // with the sizes and the type of bias, contiguous
    float dbias_factor;      // the factor from the sum of dS to dbias
    float* dsink = nullptr;  // (Hq)

    // See large_lse.cuh.
    bool may_have_large_lse;
    Flag large_lse;  // does any row have a reference?

    // Workspace. R is its number of rows, see plan/workspace_rows.cuh.
    int row_groups;         // of 8 rows, per head and batch element of the tensors
    int64_t padding_row;    // R - 128: rows of no query, for what a Q tile has past its sequence
    float* dq_accum;        // (R, dq_accum_cols), each Q tile in fragment order
    int dq_accum_cols = 0;  // the head dim of the kernel, or 0 if there is no dq_accum
    float* lse_log2;        // (R), lse * log2(e), relative to the reference; +inf where the row
                            // sees no key
    float* minus_delta;     // (R), (dlse - rowsum(dO * O)) / ds_factor
    float* reference;       // (R), 0 for most; see large_lse.cuh
    // (R), or null: -lse_log2 / scale_log2 (0 in rows with a reference, minus the largest bfloat16
    // in rows that see no key) and -delta, for kernels that add them by a matmul.
    StatisticsRow* lse_rows = nullptr;
    StatisticsRow* delta_rows = nullptr;
    // (1 + R / 8 + Q tiles): a work index, then by the first row of each Q tile the number of KV
    // tiles that have added their dQ, then in FA3 the counters of tiles_done(). Zeroed by the
    // preprocess pass where dQ is summed in HBM. FA2 uses it in deterministic mode.
    int* dq_semaphore = nullptr;
    bool dq_accum_zeroed = true;                         // does the preprocess pass zero dq_accum?
    unsigned long long* tile_count_semaphore = nullptr;  // (2), FA3 for wide heads

    // FA3: into how many parts the queries of each KV head are cut, see Parts in plan/cost.h. Of
    // these, query_parts share query heads, and cut the Q tiles.
    int parts = 1;
    int query_parts = 1;
};

// For FA3's kernels each part is a head of K and V.
inline BackwardParams with_parts_as_heads(BackwardParams params) {
    params.heads_k *= params.parts;
    return params;
}

// The query heads of a head of K and V, or of a part.
FLASH_HOST_DEVICE constexpr int group_of(const ForwardParams& params) { return params.group; }
FLASH_HOST_DEVICE constexpr int group_of(const BackwardParams& params) {
    return params.heads_q * params.query_parts / params.heads_k;
}

// The head of K and V that a query head has.
FLASH_HOST_DEVICE constexpr int key_head(const ForwardParams& params, int head) {
    return head / params.by_group;
}
FLASH_HOST_DEVICE constexpr int key_head(const BackwardParams& params, int head) {
    return head / group_of(params) / (params.parts / params.query_parts);
}

}  // namespace flash_ext
