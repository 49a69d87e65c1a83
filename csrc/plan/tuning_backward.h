// Tuned numbers of the backward, as tuning.h has the forward's.
#pragma once

#include "plan/tuning.h"

namespace flash_ext {
namespace tuning {

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

inline constexpr OptionSets kFa2BackwardOptions{3, {kDense, kVarlenSplits, kAllAndMask}};
inline constexpr OptionSets kFa2BiasBackwardOptions{4,
                                                    {kDense, kVarlenSplits, kFa2Bias, kAllAndMask}};
inline constexpr OptionSets kFa2EveryBackwardOptions{
    6, {kDense, kVarlenSplits, kWithSoftcap, kWithDropout, kFa2Bias, kAllAndMask}};
inline constexpr OptionSets kFa2SoftcapBackwardOptions{
    4, {kDense, kVarlenSplits, kWithSoftcap, kAllAndMask}};
inline constexpr OptionSets kFa2RareBackwardOptions{2, {kVarlenSplits, kAllAndMask}};

// A warp has as many keys as registers allow beside dK and dV, since each fragment of Q and dO is
// used for all of them.
struct Fa2BackwardRow {
    HeadDims head_dims;
    OptionSets options = kFa2BackwardOptions;
    MmaBackwardShape general;  // options take registers
    MmaBackwardShape plain;
    MmaBackwardShape with_bias = plain;     // of kFa2Bias
    MmaBackwardShape with_softcap = plain;  // of kWithSoftcap
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
     .options = kFa2EveryBackwardOptions,
     .general = {.block_q = 32, .keys_per_warp = 16, .warps_kv = 8},
     .plain = {.block_q = 32, .keys_per_warp = 32, .warps_kv = 4, .ctas_per_sm = 2}},
    {.head_dims = {96, 96},
     .options = kFa2RareBackwardOptions,
     .general = {.block_q = 32, .keys_per_warp = 16, .warps_kv = 4, .ctas_per_sm = 2},
     .plain = {.block_q = 64, .keys_per_warp = 16, .warps_kv = 8}},
    {.head_dims = {128, 128},
     .options = kFa2EveryBackwardOptions,
     .general = {.block_q = 32, .keys_per_warp = 32, .warps_kv = 4, .warps_d = 2},
     .plain = {.block_q = 64, .keys_per_warp = 32, .warps_kv = 4, .warps_d = 2},
     .with_softcap = {.block_q = 32, .keys_per_warp = 32, .warps_kv = 4, .warps_d = 2},
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
     .options = kFa2SoftcapBackwardOptions,
     .general = {.block_q = 32, .keys_per_warp = 16, .warps_kv = 4, .warps_d = 2, .dq_slices = 2},
     .plain = {.block_q = 128, .keys_per_warp = 32, .warps_kv = 2, .warps_d = 4, .stages = 1},
     .with_softcap =
         {.block_q = 32, .keys_per_warp = 16, .warps_kv = 4, .warps_d = 2, .dq_slices = 2},
     .varlen = {.block_q = 32, .keys_per_warp = 16, .warps_kv = 4, .warps_d = 2, .dq_slices = 2},
     .small_plain =
         {.block_q = 32, .keys_per_warp = 16, .warps_kv = 4, .warps_d = 2, .dq_slices = 2}},
};

constexpr MmaBackwardShape fa2_backward_shape(HeadDims dims, OptionSet options,
                                              bool less_memory = false) {
    const Fa2BackwardRow row = row_of(kFa2Backward, dims);
    if (has_bias_tiles(options)) return less_memory ? row.small_with_bias : row.with_bias;
    if (options == kWithSoftcap) return row.with_softcap;
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
    bool transpose_dq = true;  // a consumer's half of dQ: 64 rows of dQ^T, or of dQ
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
    7, {kVarlen, kWithSoftcap, kWithAlibi, kWithDropout, kFa3Bias, kFa3Mask, kFa3Scores}};
// ALiBi is not common at 256.
inline constexpr OptionSets kFa3BackwardWideOptions{3, {kVarlen, kWithSoftcap, kFa3Scores}};

// For heads whose dQ is summed in HBM. Tiles of 80 queries pay when Q, dO and dQ of a head no
// longer stay in L2; up to 32,768 queries both are level.
struct Fa3BackwardRow {
    HeadDims head_dims;
    OptionSets options = kFa3BackwardOptions;
    Fa3BackwardShape usual;
    Fa3BackwardOverlap with_options = usual.overlap;
    Fa3BackwardShape many_queries = usual;  // without options
    Fa3BackwardShape with_bias{};           // of kFa3Bias
    Fa3BackwardShape with_dropout = usual;  // of kWithDropout
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
     .options = kFa3BackwardAllOptions,
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
                   .bias_stages = 1},
     .with_dropout =
         {.block_q = 96, .q_stages = 3, .hold_ds = false, .dq_registers = Fa3DQRegisters::kOwn}},
    {.head_dims = {96, 96}, .usual = {.block_q = 96}},
    {.head_dims = {128, 128},
     .options = kFa3BackwardAllOptions,
     .usual = {.block_q = 64, .q_stages = 3, .overlap = kByMatmulEarly},
     .with_options = kEarly,
     .many_queries = {.block_q = 80, .overlap = kLateFences},
     .with_bias = {.block_q = 64, .overlap = kEarly, .bias_stages = 2},
     .with_dropout = {.block_q = 64, .q_stages = 3}},
};

inline constexpr int kManyQueries = 16384;

constexpr Fa3BackwardShape fa3_backward_shape(HeadDims dims, OptionSet options, bool many_queries) {
    Fa3BackwardRow row = row_of(kFa3Backward, dims);
    if (contains(options, OptionSet::kBias)) return row.with_bias;
    if (contains(options, OptionSet::kMask)) return row.usual;
    if (options == kWithDropout) return row.with_dropout;
    if (!visits_elements(options)) return many_queries ? row.many_queries : row.usual;
    // With a softcap alone exponentials come after dP. ptxas 13.0: kEarly spills there at d 128.
    row.usual.overlap = only_softcap(options) ? kPingPong : row.with_options;
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

}  // namespace tuning
}  // namespace flash_ext
