// Which arguments the ops that make masks of blocks accept. As in accept.h the words of a refusal
// are in Python, flash_ext/cpu/make_mask.py, and a test compares the two (tests/test_mask_ops.py).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "api/accept.h"

namespace flash_ext {

// The sizes of a mask: of matrices, and of each.
struct MaskSizes {
    int64_t batch, heads, seqlen_q, seqlen_k;

    int64_t matrices() const { return batch * heads; }
    int64_t q_blocks() const { return ceil_div<int64_t>(seqlen_q, kMaskBlock); }
    int64_t kv_blocks() const { return ceil_div<int64_t>(seqlen_k, kMaskBlock); }

    // Blocks have 16-bit numbers, and CTAs 32-bit ones.
    bool accepted() const {
        constexpr int64_t kMost = int64_t{1} << 31;
        const int64_t q = q_blocks(), kv = kv_blocks();
        return seqlen_k >= 0 && std::max(q, kv) <= kMostMaskBlocks && batch < kMost &&
               heads < kMost && matrices() < kMost && matrices() * std::max(q * kv, q + kv) < kMost;
    }
};

// Masks, intervals and kinds have four dimensions, in any strides.
inline bool is_mask_input(const Tensor& x, ScalarType dtype) {
    return x.scalar_type() == dtype && x.dim() == 4 && is_here(x.device());
}

inline std::optional<MaskSizes> if_accepted(const MaskSizes& sizes) {
    return sizes.accepted() ? std::optional(sizes) : std::nullopt;
}

inline std::optional<MaskSizes> accept_mask_from_dense(const Tensor& mask) {
    if (!is_mask_input(mask, ScalarType::Bool)) return std::nullopt;
    return if_accepted({mask.size(0), mask.size(1), mask.size(2), mask.size(3)});
}

inline std::optional<MaskSizes> accept_mask_from_intervals(const Tensor& intervals,
                                                           int64_t seqlen_k) {
    if (!is_mask_input(intervals, ScalarType::Int) || intervals.size(3) != 4) return std::nullopt;
    return if_accepted({intervals.size(0), intervals.size(1), intervals.size(2), seqlen_k});
}

// The options of mask_from_documents().
struct DocumentOptions {
    std::optional<Tensor> ids, cu_seqlens_q, cu_seqlens_k;
    int64_t window_left = -1, window_right = -1;
    bool first_keys_in_window = false;

    auto fields() {
        return std::tie(ids, cu_seqlens_q, cu_seqlens_k, window_left, window_right,
                        first_keys_in_window);
    }
};

inline bool accepts_offsets_of_documents(const Tensor& first_keys, const DocumentOptions& options) {
    const auto &cu_q = options.cu_seqlens_q, &cu_k = options.cu_seqlens_k;
    const auto fits = [&](const Tensor& x) {
        return x.scalar_type() == ScalarType::Int && x.dim() == 1 && x.numel() > 0 &&
               x.is_contiguous() && x.device() == first_keys.device() &&
               x.numel() == cu_q->numel() && x.numel() < int64_t{1} << 31;
    };
    return cu_q && cu_k && fits(*cu_q) && fits(*cu_k) && !options.ids &&
           (first_keys.numel() == 1 || first_keys.numel() == cu_q->numel() - 1);
}

inline std::optional<MaskSizes> accept_mask_from_documents(const Tensor& first_keys,
                                                           int64_t seqlen_q, int64_t seqlen_k,
                                                           const DocumentOptions& options) {
    if (first_keys.scalar_type() != ScalarType::Int || first_keys.dim() != 1 ||
        !is_here(first_keys.device()) || seqlen_q < 0 || options.window_left < -1 ||
        options.window_right < -1)
        return std::nullopt;
    MaskSizes sizes{1, 1, seqlen_q, seqlen_k};
    if (options.ids) {
        const Tensor& ids = *options.ids;
        const bool fits =
            (ids.scalar_type() == ScalarType::Int || ids.scalar_type() == ScalarType::Long) &&
            ids.dim() == 2 && ids.size(1) == seqlen_q && ids.device() == first_keys.device();
        if (!fits || seqlen_q != seqlen_k || first_keys.numel() != 1 || options.cu_seqlens_q ||
            options.cu_seqlens_k)
            return std::nullopt;
        sizes.batch = ids.size(0);
    } else if (options.cu_seqlens_q || options.cu_seqlens_k) {
        if (!accepts_offsets_of_documents(first_keys, options)) return std::nullopt;
    } else {
        sizes.batch = first_keys.numel();
    }
    return if_accepted(sizes);
}

inline std::optional<MaskSizes> accept_mask_from_kinds(const Tensor& kinds) {
    if (!is_mask_input(kinds, ScalarType::Byte) || kinds.size(2) > kMostMaskBlocks ||
        kinds.size(3) > kMostMaskBlocks)
        return std::nullopt;
    return if_accepted(
        {kinds.size(0), kinds.size(1), kinds.size(2) * kMaskBlock, kinds.size(3) * kMaskBlock});
}

inline std::optional<MaskSizes> accept_mask_from_blocks(const Tensor& kinds,
                                                        const Tensor& intervals) {
    const std::optional<MaskSizes> of_kinds = accept_mask_from_kinds(kinds);
    if (!of_kinds || !is_mask_input(intervals, ScalarType::Int) || intervals.size(3) != 4 ||
        intervals.device() != kinds.device())
        return std::nullopt;
    for (int dim = 0; dim < 2; ++dim)
        if (intervals.size(dim) != 1 && intervals.size(dim) != kinds.size(dim)) return std::nullopt;
    MaskSizes sizes = *of_kinds;
    sizes.seqlen_q = intervals.size(2);
    return sizes.q_blocks() == kinds.size(2) ? std::optional(sizes) : std::nullopt;
}

}  // namespace flash_ext
