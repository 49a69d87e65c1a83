// What the tables of tuning.h are made of: head dims, how a row is found, and sets of options.
#pragma once

#include "problem/option_set.h"
#include "problem/params.h"
#include "tile/host_device.h"

namespace flash_ext {

// Head dims of Q and K, and of V and the output.
struct HeadDims {
    int qk;
    int v;

    constexpr bool operator==(const HeadDims&) const = default;
    constexpr bool holds(HeadDims x) const { return x.qk <= qk && x.v <= v; }
};

namespace tuning {

// The first row that holds `dims` and has these options, or null.
template <class Row, int kRows>
constexpr const Row* find_row(const Row (&table)[kRows], HeadDims dims,
                              OptionSet options = OptionSet::kNone) {
    for (const Row& row : table)
        if (row.head_dims.holds(dims) && row.options.index_for(options) >= 0) return &row;
    return nullptr;
}

template <class Row, int kRows>
constexpr Row row_of(const Row (&table)[kRows], HeadDims dims) {
    for (const Row& row : table)
        if (row.head_dims == dims) return row;
    throw "no row of these head dims";  // never reached in a constant expression
}

// --- The sets of options that kernels have ---

// With splits a kernel reads a tile's coordinates more often: a few percent, up to 10 where
// sequences are short. The common case does not pay for options.
inline constexpr OptionSet kDense = OptionSet::kNone;
inline constexpr OptionSet kVarlen = OptionSet::kVarlen;
inline constexpr OptionSet kVarlenSplits = OptionSet::kVarlen | OptionSet::kSplits;
// One option, beside sequences of any lengths and splits.
inline constexpr OptionSet kWithSoftcap = kVarlenSplits | OptionSet::kSoftcap;
inline constexpr OptionSet kWithAlibi = kVarlenSplits | OptionSet::kAlibi;
inline constexpr OptionSet kWithDropout = kVarlenSplits | OptionSet::kDropout;
// FA3 has a bias only with dense sequences, and TMA needs aligned rows.
inline constexpr OptionSet kFa3Bias = OptionSet::kBias;
inline constexpr OptionSet kFa3Mask = OptionSet::kMask;  // the same
inline constexpr OptionSet kFa3MaskSplits = OptionSet::kMask | OptionSet::kSplits;
// The widest heads whose forward has registers for a float32 bias, too.
inline constexpr int kFa3Float32BiasHeadDim = 64;
inline constexpr OptionSet kFa2Bias = kVarlenSplits | OptionSet::kBias;
inline constexpr OptionSet kFa3Scores =
    kVarlenSplits | OptionSet::kRareScale | OptionSet::kSoftcap | OptionSet::kAlibi;
inline constexpr OptionSet kAllOptions =
    kFa3Scores | OptionSet::kBias | OptionSet::kDropout | OptionSet::kUnaligned;
inline constexpr OptionSet kVarlenMask = OptionSet::kVarlen | OptionSet::kMask;
inline constexpr OptionSet kAllAndMask = kAllOptions | OptionSet::kMask;
// With a page table, which bias and dropout do not have.
inline constexpr OptionSet kPages = kVarlen | OptionSet::kPages;
inline constexpr OptionSet kPagesSplits = kVarlenSplits | OptionSet::kPages;
inline constexpr OptionSet kFa3PagesScores = kFa3Scores | OptionSet::kPages;
inline constexpr OptionSet kPagesScores = kFa3PagesScores | OptionSet::kUnaligned;

}  // namespace tuning
}  // namespace flash_ext
