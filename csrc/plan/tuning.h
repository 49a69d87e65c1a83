// All tuned numbers: tile shapes, stages and warps per (kernel, head dims). docs/notes has the
// measurements, and what was tried without success.
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

inline constexpr OptionSets kFa1Options{2, {kDense, kAllOptions}};

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
inline constexpr OptionSets kFa2RareOptions{3, {kVarlenSplits, kAllAndMask, kPagesScores}};
inline constexpr OptionSets kFa2BackwardOptions{3, {kDense, kVarlenSplits, kAllAndMask}};
inline constexpr OptionSets kFa2BiasBackwardOptions{4,
                                                    {kDense, kVarlenSplits, kFa2Bias, kAllAndMask}};
inline constexpr OptionSets kFa2RareBackwardOptions{2, {kVarlenSplits, kAllAndMask}};

// A warp has two blocks of 16 rows where O and S fit in 255 registers per lane, otherwise one. A
// tile has as many keys as then fit. Q in registers leaves fewer registers for the fragments that
// are being loaded: it is faster where warps have 16 rows and shared memory is the limit.
struct Fa2ForwardRow {
    HeadDims head_dims;
    OptionSets options = kFa2Options;
    Fa2ForwardShape plain;  // and varlen
    Fa2ForwardShape general;
    Fa2ForwardShape with_bias = plain;  // of kFa2Bias
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
     .options = kFa2BiasOptions,
     .plain = {.block_kv = 128},
     .general = {.block_kv = 64},
     .with_bias = {.block_kv = 64}},
    {.head_dims = {96, 96},
     .options = kFa2RareOptions,
     .plain = {.block_kv = 64},
     .general = {.block_kv = 32}},
    {.head_dims = {128, 128},
     .options = kFa2BiasOptions,
     .plain = {.block_kv = 64},
     .general = {.block_kv = 32},
     .with_bias = {.block_kv = 48}},
    {.head_dims = {192, 128},
     .options = kFa2RareOptions,
     .plain = {.block_kv = 48},
     .general = {.rows_per_warp = 16, .block_kv = 64}},
    {.head_dims = {192, 192},
     .options = kFa2RareOptions,
     .plain = {.rows_per_warp = 16, .block_kv = 64, .q_register_cols = 192},
     .general = {.rows_per_warp = 16, .block_kv = 64}},
    {.head_dims = {256, 256},
     .plain = {.rows_per_warp = 16, .block_kv = 64, .q_register_cols = 128},
     .general = {.rows_per_warp = 16, .block_kv = 64},
     .small_plain = {.rows_per_warp = 16, .block_kv = 32, .q_register_cols = 128},
     .small_general = {.rows_per_warp = 16, .block_kv = 32}},
};

constexpr Fa2ForwardShape fa2_forward_shape(HeadDims dims, OptionSet options,
                                            bool less_memory = false) {
    const Fa2ForwardRow row = row_of(kFa2Forward, dims);
    if (has_bias_tiles(options)) {
        Fa2ForwardShape shape = less_memory ? row.small_general : row.with_bias;
        shape.ctas_per_sm = row.with_bias.ctas_per_sm;  // the plan has one order of tiles
        return shape;
    }
    if (changes_scores(options)) return less_memory ? row.small_general : row.general;
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
    {kVarlen, kVarlenSplits, kFa3Softcap, kFa3Alibi, kFa3Dropout, kFa3Bias, kFa3Mask,
     kFa3MaskSplits, kFa3Scores, kPages, kPagesSplits}};
inline constexpr OptionSets kFa3Forward64Options{
    14,
    {kVarlen, kVarlenSplits, kVarlen | OptionSet::kSoftcap, kFa3Softcap,
     kVarlen | OptionSet::kAlibi, kFa3Alibi, kVarlen | OptionSet::kDropout, kFa3Dropout, kFa3Bias,
     kFa3Mask, kFa3MaskSplits, kFa3Scores, kPages, kPagesSplits}};
inline constexpr OptionSets kFa3ForwardWideOptions{
    8,
    {kVarlen, kVarlenSplits, kFa3Softcap, kFa3Mask, kFa3MaskSplits, kFa3Scores, kPages,
     kPagesSplits}};

struct Fa3ForwardRow {
    HeadDims head_dims;
    OptionSets options = kFa3ForwardOptions;
    Fa3ForwardShape usual;
    Fa3ForwardShape small_q = usual;  // for few Q tiles, and all that kernels with splits have
    Fa3ForwardShape long_keys = usual;
    Fa3ForwardShape with_bias{};          // of kFa3Bias
    Fa3ForwardShape with_mask = small_q;  // of kFa3Mask
    // Those of `usual` are the defaults. Measured: docs/notes/009-fa3-forward.md.
    Fa3Costs small_q_costs{};
    Fa3Costs long_keys_costs{};

    // With options kernels without splits have the usual tile alone, and those with splits the
    // small one.
    static constexpr bool has_tile(OptionSet options, Fa3ForwardTile tile) {
        constexpr OptionSet kSmallAlone = OptionSet::kSplits | OptionSet::kBias | OptionSet::kMask;
        if ((options & kSmallAlone) != OptionSet::kNone) return tile == Fa3ForwardTile::kSmallQ;
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
     .with_bias =
         {.block_kv = 128, .k_stages = 4, .v_stages = 4, .ping_pong = true, .bias_stages = 3},
     .small_q_costs = {.alike = {112}, .differ = {110}},
     .long_keys_costs = {.alike = {98, 72}, .differ = {96, 208}}},
    {.head_dims = {64, 64},
     .options = kFa3Forward64Options,
     .usual = {.consumers = 4, .block_kv = 64, .k_stages = 3, .v_stages = 3},
     .small_q = {.block_kv = 128, .k_stages = 4, .v_stages = 4, .ping_pong = true},
     .long_keys = {.consumers = 3, .block_kv = 96, .k_stages = 4, .v_stages = 4},
     .with_bias =
         {.block_kv = 128, .k_stages = 3, .v_stages = 3, .ping_pong = true, .bias_stages = 2},
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
    if (contains(options, OptionSet::kBias)) return row.with_bias;
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
     .many_keys = {.warps = 16, .stages = 1},
     .many_rows = {.rows = 32, .stages = 2},
     .lengths = {.warps = 16, .stages = 1}},
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

// Some pairs are padded further than with 16 bits: at 96 the tiles of 128 are faster, though a
// quarter of them is zeros (docs/notes/016-fp8.md), and models with 32, or 192 in V as well, hardly
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

// --- FA1 and FA2, backward ---

struct MmaBackwardShape {
    int block_q;
    int keys_per_warp;  // rows of S^T, dK and dV that a warp holds
    int warps_kv;       // block_kv = keys_per_warp * warps_kv
    int warps_d = 1;    // warps that share these rows, see backward_tile.cuh
    int ctas_per_sm = 1;
    int dq_slices = 1;       // of columns, in which dQ is computed to save registers
    int stages = 2;          // stages of the pipeline of Q tiles with their dO
    bool for_dbias = false;  // no other gradient comes of it

    constexpr bool operator==(const MmaBackwardShape&) const = default;
};

// One tile for all options.
struct Fa1BackwardRow {
    HeadDims head_dims;
    OptionSets options = kFa1Options;
    MmaBackwardShape plain;
};

inline constexpr Fa1BackwardRow kFa1Backward[] = {
    {.head_dims = {64, 64}, .plain = {.block_q = 64, .keys_per_warp = 16, .warps_kv = 8}},
    {.head_dims = {128, 128},
     .plain = {.block_q = 32, .keys_per_warp = 32, .warps_kv = 4, .warps_d = 2}},
    {.head_dims = {256, 256},
     .plain = {.block_q = 32, .keys_per_warp = 16, .warps_kv = 4, .warps_d = 2, .dq_slices = 4}},
};

// A warp has as many keys as registers allow beside dK and dV, since each fragment of Q and dO is
// used for all of them.
struct Fa2BackwardRow {
    HeadDims head_dims;
    OptionSets options = kFa2BackwardOptions;
    MmaBackwardShape general;  // options take registers
    MmaBackwardShape plain;
    MmaBackwardShape with_bias = plain;  // of kFa2Bias
    MmaBackwardShape varlen = plain;
    MmaBackwardShape small_plain = plain;  // where shared memory does not suffice (163 KB, A100)
    MmaBackwardShape small_with_bias = with_bias;
};

inline constexpr Fa2BackwardRow kFa2Backward[] = {
    {.head_dims = {32, 32},
     .options = kFa2BiasBackwardOptions,
     .general = {.block_q = 64, .keys_per_warp = 16, .warps_kv = 8},
     .plain = {.block_q = 32, .keys_per_warp = 32, .warps_kv = 4, .ctas_per_sm = 2}},
    {.head_dims = {64, 64},
     .options = kFa2BiasBackwardOptions,
     .general = {.block_q = 32, .keys_per_warp = 16, .warps_kv = 8},
     .plain = {.block_q = 32, .keys_per_warp = 32, .warps_kv = 4, .ctas_per_sm = 2}},
    {.head_dims = {96, 96},
     .options = kFa2RareBackwardOptions,
     .general = {.block_q = 32, .keys_per_warp = 16, .warps_kv = 4, .ctas_per_sm = 2},
     .plain = {.block_q = 64, .keys_per_warp = 16, .warps_kv = 8}},
    {.head_dims = {128, 128},
     .options = kFa2BiasBackwardOptions,
     .general = {.block_q = 32, .keys_per_warp = 32, .warps_kv = 4, .warps_d = 2},
     .plain = {.block_q = 64, .keys_per_warp = 32, .warps_kv = 4, .warps_d = 2},
     .small_with_bias = {.block_q = 32, .keys_per_warp = 32, .warps_kv = 4, .warps_d = 2}},
    {.head_dims = {192, 128},
     .options = kFa2RareBackwardOptions,
     .general = {.block_q = 32, .keys_per_warp = 16, .warps_kv = 4, .warps_d = 2},
     .plain = {.block_q = 64, .keys_per_warp = 32, .warps_kv = 2, .warps_d = 4, .stages = 1}},
    {.head_dims = {192, 192},
     .options = kFa2RareBackwardOptions,
     .general = {.block_q = 32, .keys_per_warp = 16, .warps_kv = 4, .warps_d = 2},
     .plain = {.block_q = 64, .keys_per_warp = 32, .warps_kv = 2, .warps_d = 4, .stages = 1}},
    {.head_dims = {256, 256},
     .general = {.block_q = 32, .keys_per_warp = 16, .warps_kv = 4, .warps_d = 2, .dq_slices = 2},
     .plain = {.block_q = 128, .keys_per_warp = 32, .warps_kv = 2, .warps_d = 4, .stages = 1},
     .varlen = {.block_q = 32, .keys_per_warp = 16, .warps_kv = 4, .warps_d = 2, .dq_slices = 2},
     .small_plain =
         {.block_q = 32, .keys_per_warp = 16, .warps_kv = 4, .warps_d = 2, .dq_slices = 2}},
};

constexpr MmaBackwardShape fa2_backward_shape(HeadDims dims, OptionSet options,
                                              bool less_memory = false) {
    const Fa2BackwardRow row = row_of(kFa2Backward, dims);
    if (has_bias_tiles(options)) return less_memory ? row.small_with_bias : row.with_bias;
    if (changes_scores(options)) return row.general;
    if (contains(options, kVarlen)) return row.varlen;
    return less_memory ? row.small_plain : row.plain;
}

// --- The gradient of the bias, of every variant ---

// With fa2's tiles. A call with a bias gradient is rare: powers of two suffice, and compile faster.
struct BiasGradientRow {
    HeadDims head_dims;
    OptionSets options{1, {kAllAndMask}};
};

inline constexpr BiasGradientRow kBiasGradient[] = {
    {{32, 32}}, {{64, 64}}, {{128, 128}}, {{256, 256}}};

// Of a bias that only batch elements and heads share: large tiles, so that L2 is not the limit, or
// smaller ones where shared memory does not suffice.
inline constexpr MmaBackwardShape kSharedBiasTile{.block_q = 128,
                                                  .keys_per_warp = 32,
                                                  .warps_kv = 4,
                                                  .warps_d = 2,
                                                  .stages = 1,
                                                  .for_dbias = true};
inline constexpr MmaBackwardShape kSmallSharedBiasTile{.block_q = 64,
                                                       .keys_per_warp = 32,
                                                       .warps_kv = 2,
                                                       .warps_d = 2,
                                                       .stages = 1,
                                                       .for_dbias = true};
inline constexpr BiasGradientRow kSharedBiasGradient[] = {
    {{32, 32}, {1, {kFa2Bias}}}, {{64, 64}, {1, {kFa2Bias}}}, {{128, 128}, {1, {kFa2Bias}}}};

// FA3's, for Hopper. `small`: if the scores of a head are one such tile.
struct Fa3BiasGradientShape {
    int block_q;
    int block_kv;
    int stages;
};

struct Fa3BiasGradientRow {
    HeadDims head_dims;
    Fa3BiasGradientShape usual;
    Fa3BiasGradientShape small;
    OptionSets options{
        1, {OptionSet::kVarlen | OptionSet::kRareScale | OptionSet::kBias | OptionSet::kUnaligned}};
};

inline constexpr Fa3BiasGradientRow kFa3BiasGradient[] = {
    {.head_dims = {32, 32}, .usual = {128, 128, 4}, .small = {64, 64, 8}},
    {.head_dims = {64, 64}, .usual = {128, 128, 2}, .small = {64, 64, 4}},
    {.head_dims = {128, 128}, .usual = {128, 64, 2}, .small = {64, 64, 2}}};

// --- FA3, backward ---

// What runs beside what in a consumer's iteration: the sets of steps that pay somewhere, by which
// steps they have. Note 010, "Between the matmuls", says what each step gains.
enum class Fa3BackwardOverlap { kPingPong, kByMatmul, kByMatmulEarly, kEarly, kLateFences };
using enum Fa3BackwardOverlap;

// Whose registers dQ has. When it starts, S and dP are in P and dS, rounded. d 32 is 3 % faster
// with its own. ptxas 12.9: d 64 serializes wgmma, unless they are dP's.
enum class Fa3DQRegisters { kOwn, kOfS, kOfDP };

struct Fa3BackwardShape {
    int block_q;
    int q_stages = 2;   // of Q tiles with their lse
    int do_stages = 2;  // of dO tiles with their delta
    Fa3BackwardOverlap overlap = kPingPong;
    bool transpose_dq = true;  // a consumer's half of dQ: 64 columns, or 64 rows
    bool hold_ds = true;       // dK takes dS from registers, or from shared memory
    Fa3DQRegisters dq_registers = Fa3DQRegisters::kOfS;
    int bias_stages = 0;  // of tiles of the bias, with kFa3Bias

    // Ping-pong gains 2 to 9 % if exponentials take as long as matmuls, and 1 % at d 128. In the
    // kernel for softcap and ALiBi at d 128 it costs 1 to 4 % (with softcap).
    constexpr bool ping_pong() const { return overlap <= kByMatmulEarly; }
    // lse and delta are added to S and dP by a matmul (StatisticsRow), if that is faster than to
    // load them into registers and to subtract them. Not with options.
    constexpr bool by_matmul() const { return overlap == kByMatmul || overlap == kByMatmulEarly; }
    // All exponentials run beside dP, which ptxas does not do by itself.
    constexpr bool early_exponentials() const {
        return overlap == kByMatmulEarly || overlap == kEarly;
    }
    // A fence waits until the stores before it are done. Late fences, of dS and dQ, come when the
    // next matmuls have been started.
    constexpr bool late_fences() const { return overlap != kPingPong; }
};

inline constexpr OptionSets kFa3BackwardOptions{1, {kVarlen}};
inline constexpr OptionSets kFa3BackwardBias{2, {kVarlen, kFa3Bias}};
inline constexpr OptionSets kFa3BackwardAllOptions{
    7, {kVarlen, kFa3Softcap, kFa3Alibi, kFa3Dropout, kFa3Bias, kFa3Mask, kFa3Scores}};
// At 64 there are no registers for dropout: it is padded to 128. Nor is ALiBi common at 256.
inline constexpr OptionSets kFa3BackwardScores{
    6, {kVarlen, kFa3Softcap, kFa3Alibi, kFa3Bias, kFa3Mask, kFa3Scores}};
inline constexpr OptionSets kFa3BackwardWideOptions{3, {kVarlen, kFa3Softcap, kFa3Scores}};

// For heads whose dQ is summed in HBM. Tiles of 80 queries pay when Q, dO and dQ of a head no
// longer stay in L2; up to 32,768 queries both are level.
struct Fa3BackwardRow {
    HeadDims head_dims;
    OptionSets options = kFa3BackwardOptions;
    Fa3BackwardShape usual;
    Fa3BackwardOverlap with_options = usual.overlap;
    Fa3BackwardShape many_queries = usual;  // without options
    Fa3BackwardShape with_bias{};           // of kFa3Bias
};

inline constexpr Fa3BackwardRow kFa3Backward[] = {
    {.head_dims = {32, 32},
     .options = kFa3BackwardBias,
     .usual = {.block_q = 128,
               .q_stages = 3,
               .do_stages = 3,
               .overlap = kByMatmul,
               .transpose_dq = false,
               .dq_registers = Fa3DQRegisters::kOwn},
     .with_bias = {.block_q = 128,
                   .transpose_dq = false,
                   .dq_registers = Fa3DQRegisters::kOwn,
                   .bias_stages = 2}},
    {.head_dims = {64, 64},
     .options = kFa3BackwardScores,
     .usual = {.block_q = 128,
               .q_stages = 3,
               .overlap = kByMatmul,
               .transpose_dq = false,
               .hold_ds = false,
               .dq_registers = Fa3DQRegisters::kOfDP},
     .with_options = kPingPong,
     .with_bias = {.block_q = 128,
                   .transpose_dq = false,
                   .hold_ds = false,
                   .dq_registers = Fa3DQRegisters::kOfDP,
                   .bias_stages = 1}},
    {.head_dims = {96, 96}, .usual = {.block_q = 96}},
    {.head_dims = {128, 128},
     .options = kFa3BackwardAllOptions,
     .usual = {.block_q = 64, .q_stages = 3, .overlap = kByMatmulEarly},
     .with_options = kEarly,
     .many_queries = {.block_q = 80, .overlap = kLateFences},
     .with_bias = {.block_q = 64, .overlap = kEarly, .bias_stages = 2}},
};

inline constexpr int kManyQueries = 16384;

constexpr Fa3BackwardShape fa3_backward_shape(HeadDims dims, OptionSet options, bool many_queries) {
    Fa3BackwardRow row = row_of(kFa3Backward, dims);
    if (contains(options, OptionSet::kBias)) return row.with_bias;
    if (contains(options, OptionSet::kMask)) return row.usual;
    if (!visits_elements(options)) return many_queries ? row.many_queries : row.usual;
    row.usual.overlap = row.with_options;
    return row.usual;
}

// For wider heads. Stages are as many as shared memory holds.
struct Fa3BackwardWideRow {
    HeadDims head_dims;
    OptionSets options = kFa3BackwardOptions;
    int pool_pairs;      // dKdV kernel: pairs of Q and dO tiles
    int k_stages;        // dQ kernel: K tiles
    int v_stages;        // dQ kernel: V tiles
    int dq_gemm_stages;  // dQ GEMM: K tiles with their dS
};

inline constexpr Fa3BackwardWideRow kFa3BackwardWide[] = {
    {.head_dims = {192, 128}, .pool_pairs = 3, .k_stages = 3, .v_stages = 2, .dq_gemm_stages = 5},
    {.head_dims = {192, 192}, .pool_pairs = 3, .k_stages = 3, .v_stages = 2, .dq_gemm_stages = 5},
    {.head_dims = {256, 256},
     .options = kFa3BackwardWideOptions,
     .pool_pairs = 2,
     .k_stages = 2,
     .v_stages = 1,
     .dq_gemm_stages = 4},
};

inline constexpr int kFa3BackwardBlockKV = 128;   // of the KV tiles of other heads
inline constexpr int kFa3BackwardWideBlock = 64;  // of a dKdV kernel's Q and KV tiles: the least
inline constexpr int kFa3DQBlockQ = 128;          // of a dQ kernel's Q tiles, in two halves

// --- All variants ---

// The fewest keys of a split of a tile with few rows. Those of fa2 are combined by another kernel.
inline constexpr int kFa2SplitKeys = 512;
inline constexpr int kFa3SplitKeys = 128;

// No table has wider rows than FA2's.
inline constexpr int kMaxHeadDim = std::rbegin(kFa2Forward)->head_dims.qk;

}  // namespace tuning
}  // namespace flash_ext
