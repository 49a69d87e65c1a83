// Tuned numbers: tile shapes, stages and warps per (kernel, head dims). docs/notes has the
// measurements, and what was tried without success. The backward's are in tuning_backward.h.
//
// Each kernel has a table. Its rows are the list of the kernel's head dims, in ascending order,
// with the sets of options for which it is instantiated at these head dims. A call takes the first
// row that holds its head dims and has its options: kernels pad head dims with zeros. Rows are
// independent of other tables.
#pragma once

#include <iterator>

#include "plan/tables.h"

namespace flash_ext {
namespace tuning {

// --- FA1, forward ---

// Beside other options a mask is a bool bias: with all of them the tiles would be smaller.
inline constexpr OptionSets kFa1Options{3, {kDense, kAllOptions, kVarlenMask}};

struct Fa1ForwardRow {
    HeadDims head_dims;
    OptionSets options = kFa1Options;
    int block_q;
    int block_kv;  // where shared memory suffices (227 KB, Hopper), and the teams for it
    int teams;
    int small_block_kv;  // with two, otherwise (163 KB, A100; at 64 99 KB, 8.6, 8.9 and 12.x)
};

// FA1 is there to be read and compared, so it has kernels for few pairs only.
inline constexpr Fa1ForwardRow kFa1Forward[] = {
    {.head_dims = {64, 64}, .block_q = 32, .block_kv = 256, .teams = 3, .small_block_kv = 64},
    {.head_dims = {128, 128}, .block_q = 32, .block_kv = 256, .teams = 2, .small_block_kv = 128},
    {.head_dims = {256, 256}, .block_q = 16, .block_kv = 128, .teams = 3, .small_block_kv = 64},
};

// --- FA2, forward ---

inline constexpr int kForwardBlockQ = 128;  // rows of fa2's Q tiles, and of fa3's smallest

struct Fa2ForwardShape {
    int rows_per_warp = 32;
    int block_kv;
    int q_register_cols = 0;  // columns of Q that stay in registers
    int ctas_per_sm = rows_per_warp / 16;
    int warps = kForwardBlockQ / rows_per_warp;

    constexpr bool operator==(const Fa2ForwardShape&) const = default;
};

// Kernels for varlen serve sequences of equal length, too: at rare head dims they do.
inline constexpr OptionSets kFa2Options{4, {kDense, kVarlenSplits, kAllAndMask, kPagesScores}};
inline constexpr OptionSets kFa2BiasOptions{
    5, {kDense, kVarlenSplits, kFa2Bias, kAllAndMask, kPagesScores}};
// Models with softcap have head dims 64, 128 and 256, with dropout 64 and 128.
inline constexpr OptionSets kFa2EveryOptions{
    7, {kDense, kVarlenSplits, kWithSoftcap, kWithDropout, kFa2Bias, kAllAndMask, kPagesScores}};
inline constexpr OptionSets kFa2SoftcapOptions{
    5, {kDense, kVarlenSplits, kWithSoftcap, kAllAndMask, kPagesScores}};
inline constexpr OptionSets kFa2RareOptions{3, {kVarlenSplits, kAllAndMask, kPagesScores}};

// A warp has two blocks of 16 rows where O and S fit in 255 registers per lane, otherwise one. A
// tile has as many keys as then fit. Q in registers leaves fewer registers for the fragments that
// are being loaded: it is faster where warps have 16 rows and shared memory is the limit.
struct Fa2ForwardRow {
    HeadDims head_dims;
    OptionSets options = kFa2Options;
    Fa2ForwardShape plain;  // and varlen
    Fa2ForwardShape general;
    Fa2ForwardShape with_bias = plain;     // of kFa2Bias
    Fa2ForwardShape with_softcap = plain;  // of kWithSoftcap
    Fa2ForwardShape with_dropout = plain;  // of kWithDropout
    // Where shared memory does not suffice for these (163 KB, A100).
    Fa2ForwardShape small_plain = plain;
    Fa2ForwardShape small_general = general;
};

inline constexpr Fa2ForwardRow kFa2Forward[] = {
    {.head_dims = {32, 32},
     .options = kFa2BiasOptions,
     .plain = {.block_kv = 64, .ctas_per_sm = 3},
     .general = {.block_kv = 64}},
    {.head_dims = {64, 64},
     .options = kFa2EveryOptions,
     .plain = {.block_kv = 128},
     .general = {.block_kv = 64},
     .with_bias = {.block_kv = 64},
     .with_softcap = {.block_kv = 64},
     .with_dropout = {.block_kv = 64}},
    {.head_dims = {96, 96},
     .options = kFa2RareOptions,
     .plain = {.block_kv = 64},
     .general = {.block_kv = 32}},
    {.head_dims = {128, 128},
     .options = kFa2EveryOptions,
     .plain = {.block_kv = 64},
     .general = {.block_kv = 32},
     .with_bias = {.block_kv = 48},
     .with_softcap = {.block_kv = 32},
     .with_dropout = {.block_kv = 48}},
    {.head_dims = {192, 128},
     .options = kFa2RareOptions,
     .plain = {.block_kv = 48},
     .general = {.rows_per_warp = 16, .block_kv = 64}},
    {.head_dims = {192, 192},
     .options = kFa2RareOptions,
     .plain = {.rows_per_warp = 16, .block_kv = 64, .q_register_cols = 192},
     .general = {.rows_per_warp = 16, .block_kv = 64}},
    {.head_dims = {256, 256},
     .options = kFa2SoftcapOptions,
     .plain = {.rows_per_warp = 16, .block_kv = 64, .q_register_cols = 128},
     .general = {.rows_per_warp = 16, .block_kv = 64},
     .with_softcap = {.rows_per_warp = 16, .block_kv = 64},
     .small_plain = {.rows_per_warp = 16, .block_kv = 32, .q_register_cols = 128},
     .small_general = {.rows_per_warp = 16, .block_kv = 32}},
};

constexpr Fa2ForwardShape fa2_forward_shape(HeadDims dims, OptionSet options,
                                            bool less_memory = false) {
    const Fa2ForwardRow row = row_of(kFa2Forward, dims);
    if (has_bias_tiles(options) || options == kWithSoftcap) {
        const Fa2ForwardShape large = has_bias_tiles(options) ? row.with_bias : row.with_softcap;
        Fa2ForwardShape shape = less_memory ? row.small_general : large;
        shape.ctas_per_sm = large.ctas_per_sm;  // the plan has one order of tiles
        return shape;
    }
    if (changes_scores(options)) return less_memory ? row.small_general : row.general;
    if (options == kWithDropout) return row.with_dropout;
    return less_memory ? row.small_plain : row.plain;
}

// --- Short sequences, of FA2 and FA3 ---

inline constexpr int kShortBlock = 64;     // the most queries, and keys
inline constexpr int kShortThreads = 128;  // of a CTA

// More stages, or more CTAs of one stage, whose loads run beside the matmuls of others.
struct ShortShape {
    int stages;
    int ctas_per_sm;
};

struct ShortRow {
    HeadDims head_dims;
    ShortShape forward;
    ShortShape backward;
    OptionSets options{2, {kDense, OptionSet::kBias}};
};

inline constexpr ShortRow kShort[] = {
    {.head_dims = {32, 32},
     .forward = {.stages = 2, .ctas_per_sm = 5},
     .backward = {.stages = 2, .ctas_per_sm = 3}},
    {.head_dims = {64, 64},
     .forward = {.stages = 2, .ctas_per_sm = 3},
     .backward = {.stages = 1, .ctas_per_sm = 3}},
};

// The shared memory of a CTA with a bias: of each stage Q, K and V, and in the backward dO and O;
// the bias in float32, and in the backward P and dS.
constexpr int short_shared_bytes(HeadDims dims, bool backward) {
    const ShortRow row = row_of(kShort, dims);
    const int stages = backward ? 5 * row.backward.stages : 3 * row.forward.stages;
    return kShortBlock * (stages * 2 * dims.qk + (backward ? 8 : 4) * kShortBlock);
}

// --- FA3, forward ---

struct Fa3ForwardShape {
    int consumers = 2;  // warpgroups, of 64 rows each
    int block_kv;
    int q_stages = 2;
    int k_stages;
    int v_stages;
    bool ping_pong = false;
    int bias_stages = 0;        // of tiles of the bias, with kFa3Bias
    int partial_cols = 0;       // FP8: columns of O that one P V computes, in the registers of S
    bool transposes_v = false;  // FP8: the kernel itself, beside its matmuls
};

enum class Fa3ForwardTile { kSmallQ, kUsual, kLongKeys };

// A tile takes as long as percent x rows x (keys + overhead), with the empty ones of both.
struct Fa3Cost {
    int percent = 100;
    int overhead = 64;
};
struct Fa3Costs {
    Fa3Cost alike{};  // where all Q tiles see the same keys
    Fa3Cost differ{};
};

// Kernels with options take twice as long to compile. Models with softcap or ALiBi have head dims
// 64, 128 and 256, with dropout 64 and 128: at others such calls are padded further. kFa3Scores is
// for rare calls: both softcap and ALiBi, or a rare scale. At 64 the usual tiles are faster with
// options, too: they have no splits.
inline constexpr OptionSets kFa3ForwardOptions{4, {kVarlen, kVarlenSplits, kPages, kPagesSplits}};
inline constexpr OptionSets kFa3ForwardBias{
    5, {kVarlen, kVarlenSplits, kFa3Bias, kPages, kPagesSplits}};
inline constexpr OptionSets kFa3ForwardAllOptions{
    11,
    {kVarlen, kVarlenSplits, kWithSoftcap, kWithAlibi, kWithDropout, kFa3Bias, kFa3Mask,
     kFa3MaskSplits, kFa3Scores, kPages, kPagesSplits}};
inline constexpr OptionSets kFa3Forward64Options{
    14,
    {kVarlen, kVarlenSplits, kVarlen | OptionSet::kSoftcap, kWithSoftcap,
     kVarlen | OptionSet::kAlibi, kWithAlibi, kVarlen | OptionSet::kDropout, kWithDropout, kFa3Bias,
     kFa3Mask, kFa3MaskSplits, kFa3Scores, kPages, kPagesSplits}};
inline constexpr OptionSets kFa3ForwardWideOptions{
    8,
    {kVarlen, kVarlenSplits, kWithSoftcap, kFa3Mask, kFa3MaskSplits, kFa3Scores, kPages,
     kPagesSplits}};

struct Fa3ForwardRow {
    HeadDims head_dims;
    OptionSets options = kFa3ForwardOptions;
    Fa3ForwardShape usual;
    Fa3ForwardShape small_q = usual;  // for few Q tiles, and all that kernels with splits have
    Fa3ForwardShape long_keys = usual;
    Fa3ForwardShape with_bias{};  // of kFa3Bias
    Fa3ForwardShape small_q_with_bias = with_bias;
    Fa3ForwardShape with_mask = small_q;  // of kFa3Mask
    // The numbers of `usual` are the defaults. Measured: docs/notes/009-fa3-forward.md.
    Fa3Costs small_q_costs{};
    Fa3Costs long_keys_costs{};

    // With options kernels without splits have the usual tile alone, those with splits the small
    // one, and those with a bias both.
    static constexpr bool has_tile(OptionSet options, Fa3ForwardTile tile) {
        constexpr OptionSet kSmallAlone = OptionSet::kSplits | OptionSet::kMask;
        if ((options & kSmallAlone) != OptionSet::kNone) return tile == Fa3ForwardTile::kSmallQ;
        if (contains(options, OptionSet::kBias)) return tile != Fa3ForwardTile::kLongKeys;
        if (visits_elements(options)) return tile == Fa3ForwardTile::kUsual;
        return tile != Fa3ForwardTile::kLongKeys || !contains(options, OptionSet::kPages);
    }
};

inline constexpr Fa3ForwardRow kFa3Forward[] = {
    {.head_dims = {32, 32},
     .options = kFa3ForwardBias,
     .usual = {.consumers = 4, .block_kv = 64, .k_stages = 4, .v_stages = 4},
     .small_q = {.block_kv = 128, .k_stages = 4, .v_stages = 4, .ping_pong = true},
     .long_keys = {.consumers = 4, .block_kv = 80, .k_stages = 4, .v_stages = 4},
     .with_bias = {.consumers = 4, .block_kv = 64, .k_stages = 4, .v_stages = 4, .bias_stages = 3},
     .small_q_with_bias =
         {.block_kv = 128, .k_stages = 4, .v_stages = 4, .ping_pong = true, .bias_stages = 3},
     .small_q_costs = {.alike = {112}, .differ = {110}},
     .long_keys_costs = {.alike = {98, 72}, .differ = {96, 208}}},
    {.head_dims = {64, 64},
     .options = kFa3Forward64Options,
     .usual = {.consumers = 4, .block_kv = 64, .k_stages = 3, .v_stages = 3},
     .small_q = {.block_kv = 128, .k_stages = 4, .v_stages = 4, .ping_pong = true},
     .long_keys = {.consumers = 3, .block_kv = 96, .k_stages = 4, .v_stages = 4},
     .with_bias =
         {.block_kv = 128, .k_stages = 2, .v_stages = 2, .ping_pong = true, .bias_stages = 3},
     .small_q_costs = {.alike = {112}, .differ = {109, 80}},
     .long_keys_costs = {.alike = {98}, .differ = {99, 155}}},
    {.head_dims = {96, 96},
     .usual = {.consumers = 3, .block_kv = 64, .k_stages = 5, .v_stages = 5},
     .small_q = {.block_kv = 128, .k_stages = 3, .v_stages = 3},
     .small_q_costs = {.alike = {110}, .differ = {105}}},
    {.head_dims = {128, 128},
     .options = kFa3ForwardAllOptions,
     .usual = {.block_kv = 128, .k_stages = 3, .v_stages = 2, .ping_pong = true},
     .with_bias = {.block_kv = 128,
                   .q_stages = 1,
                   .k_stages = 2,
                   .v_stages = 2,
                   .ping_pong = true,
                   .bias_stages = 2},
     .with_mask = {.block_kv = 128, .k_stages = 2, .v_stages = 2, .ping_pong = true}},
    {.head_dims = {192, 128}, .usual = {.block_kv = 96, .k_stages = 2, .v_stages = 2}},
    {.head_dims = {192, 192}, .usual = {.block_kv = 64, .k_stages = 2, .v_stages = 2}},
    {.head_dims = {256, 256},
     .options = kFa3ForwardWideOptions,
     .usual = {.block_kv = 64, .q_stages = 1, .k_stages = 3, .v_stages = 2},
     .with_mask = {.block_kv = 64, .q_stages = 1, .k_stages = 2, .v_stages = 2}},
};

constexpr Fa3ForwardShape fa3_forward_shape(HeadDims dims, OptionSet options, Fa3ForwardTile tile) {
    Fa3ForwardRow row = row_of(kFa3Forward, dims);
    if (contains(options, OptionSet::kBias))
        return tile == Fa3ForwardTile::kSmallQ ? row.small_q_with_bias : row.with_bias;
    if (contains(options, OptionSet::kMask)) row.small_q = row.with_mask;
    // A tile of few rows leaves a consumer without any, which skips what the other one computes. A
    // kernel with options is the same with and without splits.
    if (contains(options, OptionSet::kSplits) && !visits_elements(options))
        row.small_q.ping_pong = false;
    return tile == Fa3ForwardTile::kSmallQ     ? row.small_q
           : tile == Fa3ForwardTile::kLongKeys ? row.long_keys
                                               : row.usual;
}

// --- FA3, decoding ---

// kByLength: of few rows, with splits by length (schedule/split_by_length.cuh).
enum class Fa3DecodeTile { kFewRows, kManyKeys, kManyRows, kByLength };

struct Fa3DecodeShape {
    int rows = 16;
    int warps = 8;
    int stages;
    int ctas_per_sm = 1;
    bool by_length = false;
};

// As many rows, or warps, as registers allow, and as many stages as shared memory then does.
struct Fa3DecodeRow {
    HeadDims head_dims;
    // One kernel has all options of the scores, as run-time branches.
    OptionSets options{2, {kFa3Scores, kFa3PagesScores}};
    Fa3DecodeShape few_rows;
    Fa3DecodeShape many_keys = few_rows;  // of few rows, where an SM has no more than one CTA
    Fa3DecodeShape many_rows = few_rows;
    Fa3DecodeShape lengths = few_rows;  // kByLength
};

inline constexpr Fa3DecodeRow kFa3Decode[] = {
    {.head_dims = {32, 32},
     .few_rows = {.stages = 4, .ctas_per_sm = 2},
     .many_keys = {.warps = 16, .stages = 4},
     .many_rows = {.rows = 64, .stages = 6}},
    {.head_dims = {64, 64},
     .few_rows = {.stages = 3, .ctas_per_sm = 2},
     .many_keys = {.warps = 16, .stages = 3},
     .many_rows = {.rows = 64, .stages = 4}},
    {.head_dims = {96, 96},
     .few_rows = {.stages = 2, .ctas_per_sm = 2},
     .many_keys = {.warps = 16, .stages = 2},
     .many_rows = {.rows = 48, .stages = 3}},
    {.head_dims = {128, 128},
     .few_rows = {.stages = 1, .ctas_per_sm = 2},
     .many_keys = {.warps = 16, .stages = 1},
     .many_rows = {.rows = 32, .stages = 2}},
    {.head_dims = {192, 128}, .few_rows = {.stages = 2}, .many_rows = {.rows = 32, .stages = 2}},
    {.head_dims = {192, 192}, .few_rows = {.stages = 2}},
    {.head_dims = {256, 256}, .few_rows = {.stages = 1}},
};

// With K and V in 8 bits. A block of 32 keys has as many bytes as 16 in 16 bits, so the numbers are
// the same. Eight rows need half of the registers and instructions that 16 do, which the kernels of
// 16 rows also use where there are no more (kernels/fa3/decode_blocks.cuh); with 8 warps, of which
// an SM has two CTAs, ptxas 13.0 spills these. Other head dims are padded: columns that are zeros
// are not read.
inline constexpr Fa3DecodeRow kFa3Decode8Bits[] = {
    {.head_dims = {64, 64},
     .few_rows = {.rows = 8, .stages = 3, .ctas_per_sm = 2},
     .many_keys = {.warps = 16, .stages = 3},
     .many_rows = {.rows = 32, .stages = 4},
     .lengths = {.warps = 16, .stages = 3}},
    {.head_dims = {128, 128},
     .few_rows = {.rows = 8, .stages = 1, .ctas_per_sm = 2},
     .many_keys = {.warps = 12, .stages = 2},
     .many_rows = {.rows = 32, .stages = 2},
     .lengths = {.warps = 12, .stages = 2}},
    {.head_dims = {256, 256}, .few_rows = {.stages = 1}},
};

constexpr Fa3DecodeShape fa3_decode_shape(const Fa3DecodeRow& row, Fa3DecodeTile tile) {
    Fa3DecodeShape shape = tile == Fa3DecodeTile::kManyRows   ? row.many_rows
                           : tile == Fa3DecodeTile::kManyKeys ? row.many_keys
                           : tile == Fa3DecodeTile::kByLength ? row.lengths
                                                              : row.few_rows;
    shape.by_length = tile == Fa3DecodeTile::kByLength;
    return shape;
}

// The most keys of a split for which few warps are better than many; of 8 bits twice as many.
inline constexpr int kFewDecodeKeys = 512;

// --- FA3, forward of FP8 ---

// Some pairs are padded further than with 16 bits: models with 32, or 192 in V as well, hardly
// exist.
struct Fa3ForwardFp8Row {
    HeadDims head_dims;
    OptionSets options{2, {kVarlen, kVarlenSplits}};
    int partial_cols;  // of all its tiles
    Fa3ForwardShape usual;
    Fa3ForwardShape small_q;  // as in Fa3ForwardRow

    constexpr bool has_tile(OptionSet options, Fa3ForwardTile tile) const {
        const bool small = tile == Fa3ForwardTile::kSmallQ;
        return contains(options, OptionSet::kSplits)
                   ? small
                   : !small || small_q.consumers < usual.consumers;
    }
};

inline constexpr Fa3ForwardFp8Row kFa3ForwardFp8[] = {
    {.head_dims = {64, 64},
     .partial_cols = 64,
     .usual = {.consumers = 3, .block_kv = 128, .k_stages = 4, .v_stages = 3, .ping_pong = true},
     .small_q = {.block_kv = 64, .k_stages = 4, .v_stages = 3, .ping_pong = true}},
    {.head_dims = {96, 96},
     .partial_cols = 96,
     .usual = {.consumers = 3, .block_kv = 128, .k_stages = 4, .v_stages = 3, .ping_pong = true},
     .small_q = {.block_kv = 128, .k_stages = 3, .v_stages = 2, .ping_pong = true}},
    {.head_dims = {128, 128},
     .partial_cols = 128,
     .usual = {.block_kv = 256, .k_stages = 2, .v_stages = 3},
     .small_q = {.block_kv = 128, .k_stages = 3, .v_stages = 2}},
    {.head_dims = {192, 128},
     .partial_cols = 128,
     .usual = {.block_kv = 192, .k_stages = 2, .v_stages = 2},
     .small_q = {.block_kv = 128, .k_stages = 2, .v_stages = 2}},
    {.head_dims = {256, 256},
     .partial_cols = 128,
     .usual = {.block_kv = 128, .q_stages = 1, .k_stages = 3, .v_stages = 2},
     .small_q = {.block_kv = 64, .q_stages = 1, .k_stages = 3, .v_stages = 2}},
};

constexpr Fa3ForwardShape fa3_forward_fp8_shape(HeadDims dims, Fa3ForwardTile tile) {
    const Fa3ForwardFp8Row row = row_of(kFa3ForwardFp8, dims);
    const bool small_q = tile == Fa3ForwardTile::kSmallQ;
    Fa3ForwardShape found = small_q ? row.small_q : row.usual;
    // For few queries a pass of its own over V would take as long as the attention.
    found.transposes_v = small_q;
    found.partial_cols = row.partial_cols < found.block_kv ? row.partial_cols : found.block_kv;
    return found;
}

// --- All variants ---

// The fewest keys of a split of a tile with few rows. fa2's are combined by another kernel.
inline constexpr int kFa2SplitKeys = 512;
inline constexpr int kFa3SplitKeys = 128;

// No table has wider rows than FA2's.
inline constexpr int kMaxHeadDim = std::rbegin(kFa2Forward)->head_dims.qk;

}  // namespace tuning
}  // namespace flash_ext
