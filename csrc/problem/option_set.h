// A set of options of attention: what a call asks for, or what a kernel has, beyond what every
// kernel has (full, causal and window masks, sinks). Kernels are instantiated for sets
// (plan/tuning.h), so an option costs the kernels that have it, and no other.
#pragma once

namespace flash_ext {

enum class OptionSet : unsigned {
    kNone = 0,
    // Of the sequences: lengths that may differ, or end inside a tile of FA1's and FA2's backward.
    kVarlen = 1 << 0,
    kSplits = 1 << 1,  // of the keys; in FA3 packed GQA, too
    // Of the scores:
    kRareScale = 1 << 2,  // see has_rare_scale()
    kSoftcap = 1 << 3,
    kAlibi = 1 << 4,
    kBias = 1 << 5,
    kDropout = 1 << 6,
    kUnaligned = 1 << 7,  // rows that do not start and end on 16-byte boundaries
    // Of K and V:
    kPages = 1 << 8,
    // Of the mask: lists of tiles.
    kMask = 1 << 9,
};

constexpr OptionSet operator|(OptionSet a, OptionSet b) {
    return static_cast<OptionSet>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
constexpr OptionSet operator&(OptionSet a, OptionSet b) {
    return static_cast<OptionSet>(static_cast<unsigned>(a) & static_cast<unsigned>(b));
}
constexpr bool contains(OptionSet set, OptionSet x) { return (set & x) == x; }
constexpr OptionSet only_if(bool condition, OptionSet x) {
    return condition ? x : OptionSet::kNone;
}

// Those for which ScoreFunction (score.cuh) scales the scores, and changes them, before they are
// masked. Without any the scale is a factor of exponents.
constexpr OptionSet score_options(OptionSet set) {
    using enum OptionSet;
    return set & (kRareScale | kSoftcap | kAlibi | kBias);
}
constexpr bool changes_scores(OptionSet set) { return score_options(set) != OptionSet::kNone; }
// Then ScoreFunction returns the softcap's tanh, and the cap is a factor of exponents, as the scale
// is without a softcap.
constexpr bool only_softcap(OptionSet set) { return score_options(set) == OptionSet::kSoftcap; }
constexpr bool only_alibi(OptionSet set) { return score_options(set) == OptionSet::kAlibi; }

// Are entries of P dropped by pairs, as numbers of fp16? P then has no factor when it is rounded:
// calls for which 1 / (1 - p) is large have a rare scale.
constexpr bool drops_pairs(OptionSet set) {
    return contains(set, OptionSet::kDropout) && !contains(set, OptionSet::kRareScale);
}

// Is the bias in 16 bits, with rows that start on 16-byte boundaries? Then FA2 copies tiles of it
// to shared memory; see mma_options_of().
constexpr bool has_bias_tiles(OptionSet set) {
    return contains(set, OptionSet::kBias) && !contains(set, OptionSet::kUnaligned);
}

// Does a kernel for these options visit the elements of its tiles between matmuls and softmax,
// which takes registers?
constexpr bool visits_elements(OptionSet set) {
    return changes_scores(set) || contains(set, OptionSet::kDropout);
}

// The sets that a kernel is instantiated for. A call takes the first one that contains its options,
// so a set comes after the sets that it contains.
struct OptionSets {
    int count;
    OptionSet sets[14];

    // The index of the set for these options, or -1.
    constexpr int index_for(OptionSet needed) const {
        for (int i = 0; i < count; ++i)
            if (contains(sets[i], needed)) return i;
        return -1;
    }
    constexpr OptionSet set_for(OptionSet needed) const { return sets[index_for(needed)]; }
};

}  // namespace flash_ext
