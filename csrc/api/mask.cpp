// From tensors to the kernels that make masks of blocks. Calls that are not accepted are refused in
// the words of flash_ext/cpu/make_mask.py.
#include <algorithm>
#include <cstdint>
#include <tuple>

#include "api/accept_mask.h"
#include "api/boxing.h"
#include "api/check.h"
#include "plan/launchers.h"

namespace flash_ext {
namespace {

template <class T>
MaskInput<T> input_of(const Tensor& x) {
    MaskInput<T> input{address_of<T>(x)};
    for (int dim = 0; dim < 4; ++dim) input.strides[dim] = x.size(dim) == 1 ? 0 : x.stride(dim);
    return input;
}

// A row of this many runs at most: a multiple of four ints.
int64_t row_ints(int64_t runs) {
    return kMaskHeader + ceil_div<int64_t>(std::max<int64_t>(runs, 1), 4) * 4;
}

// The tensors of a mask, and what their kernels need beside an input.
struct NewMask {
    Tensor kv_tiles, q_tiles, words;
    MakeMaskParams params{};

    NewMask(const Tensor& like, const MaskSizes& sizes, int64_t kv_runs, int64_t q_runs)
        : kv_tiles(rows(like, sizes, sizes.q_blocks(), kv_runs)),
          q_tiles(rows(like, sizes, sizes.kv_blocks(), q_runs)) {
        check_architecture(like);
        params.batch = static_cast<int>(sizes.batch);
        params.heads = static_cast<int>(sizes.heads);
        params.seqlen_q = static_cast<int>(sizes.seqlen_q);
        params.seqlen_k = static_cast<int>(sizes.seqlen_k);
        params.q_blocks = static_cast<int>(sizes.q_blocks());
        params.kv_blocks = static_cast<int>(sizes.kv_blocks());
        params.kv_tiles = static_cast<int*>(kv_tiles.data_ptr());
        params.q_tiles = static_cast<int*>(q_tiles.data_ptr());
        params.kv_row = static_cast<int>(kv_tiles.size(3));
        params.q_row = static_cast<int>(q_tiles.size(3));
    }

    static Tensor rows(const Tensor& like, const MaskSizes& sizes, int64_t blocks, int64_t runs) {
        return empty(like, {sizes.batch, sizes.heads, blocks, row_ints(runs)}, ScalarType::Int);
    }

    void set_words(const Tensor& like, const std::vector<int64_t>& shape) {
        words = empty(like, shape, ScalarType::Int);
        params.words = static_cast<uint32_t*>(words.data_ptr());
    }
    // Of intervals: the words. Returns the workspace of hulls.
    Tensor set_words_and_hulls() {
        const MakeMaskParams& p = params;
        set_words(kv_tiles, {p.batch, p.heads, int64_t{p.q_blocks} * kMaskBlock, kMaskWords});
        return of_q_blocks(params.hulls);
    }
    // A T for each Q block.
    template <class T>
    Tensor of_q_blocks(T*& data) const {
        const int64_t ints = sizeof(T) / sizeof(int);
        Tensor x =
            empty(kv_tiles, {params.batch, params.heads, params.q_blocks, ints}, ScalarType::Int);
        data = static_cast<T*>(x.data_ptr());
        return x;
    }

    std::tuple<Tensor, Tensor, Tensor> make() const {
        launch_on_stream_of(kv_tiles, [&](auto stream) { return make_mask(params, stream); });
        return {kv_tiles, q_tiles, words};
    }
};

std::tuple<Tensor, Tensor, Tensor> mask_from_dense(const Tensor& mask) {
    const auto accepted = accept_mask_from_dense(mask);
    if (!accepted) refuse("mask_from_dense", mask);
    const MaskSizes& sizes = *accepted;
    const int64_t q_blocks = sizes.q_blocks(), kv_blocks = sizes.kv_blocks();
    NewMask made(mask, sizes, kv_blocks, q_blocks);
    made.set_words(mask, {sizes.batch, sizes.heads, q_blocks, kv_blocks, kMaskBlock, kMaskWords});
    const Tensor kinds =
        empty(mask, {sizes.batch, sizes.heads, q_blocks, kv_blocks}, ScalarType::Byte);
    made.params.kinds = input_of<uint8_t>(kinds);
    made.params.new_kinds = static_cast<uint8_t*>(kinds.data_ptr());
    if (mask.numel() > 0) made.params.dense = input_of<uint8_t>(mask);
    return made.make();
}

std::tuple<Tensor, Tensor, Tensor> mask_from_intervals(const Tensor& intervals, int64_t seqlen_k) {
    const auto sizes = accept_mask_from_intervals(intervals, seqlen_k);
    if (!sizes) refuse("mask_from_intervals", intervals, seqlen_k);
    NewMask made(intervals, *sizes, kIntervalRunsOfQueries, kIntervalRunsOfKeys);
    made.params.intervals = input_of<int>(intervals);
    const Tensor hulls = made.set_words_and_hulls();
    return made.make();
}

std::tuple<Tensor, Tensor, Tensor> mask_from_documents(const Tensor& first_keys, int64_t seqlen_q,
                                                       int64_t seqlen_k,
                                                       const DocumentOptions& options) {
    const auto sizes = accept_mask_from_documents(first_keys, seqlen_q, seqlen_k, options);
    if (!sizes) refuse("mask_from_documents", first_keys, seqlen_q, seqlen_k, options);
    NewMask made(first_keys, *sizes, kIntervalRunsOfQueries, kIntervalRunsOfKeys);
    const Tensor hulls = made.set_words_and_hulls();
    Documents& documents = made.params.documents;
    const auto side = [](int64_t window) {
        constexpr int64_t kMost = BandMask::kUnlimited;
        return static_cast<int>(window < 0 ? kMost : std::min(window, kMost));
    };
    documents.mask = {side(options.window_left), side(options.window_right),
                      options.first_keys_in_window};
    documents.first_keys = address_of<int>(first_keys);
    documents.first_keys_stride = first_keys.numel() == 1 ? 0 : first_keys.stride(0);
    Tensor first_tokens;
    if (options.ids) {
        documents.ids = address_of<void>(*options.ids);
        documents.ids_have_64_bits = options.ids->scalar_type() == ScalarType::Long;
        for (int dim = 0; dim < 2; ++dim) documents.ids_strides[dim] = options.ids->stride(dim);
        first_tokens = made.of_q_blocks(documents.first_tokens);
    } else if (options.cu_seqlens_q) {
        documents.cu_seqlens_q = address_of<int>(*options.cu_seqlens_q);
        documents.cu_seqlens_k = address_of<int>(*options.cu_seqlens_k);
        documents.count = static_cast<int>(options.cu_seqlens_q->numel() - 1);
    }
    return made.make();
}

std::tuple<Tensor, Tensor, Tensor> mask_from_blocks(const Tensor& kinds, const Tensor& intervals) {
    const auto sizes = accept_mask_from_blocks(kinds, intervals);
    if (!sizes) refuse("mask_from_blocks", kinds, intervals);
    NewMask made(kinds, *sizes, sizes->kv_blocks(), sizes->q_blocks());
    made.params.intervals = input_of<int>(intervals);
    const Tensor hulls = made.set_words_and_hulls();
    made.params.kinds = input_of<uint8_t>(kinds);
    return made.make();
}

std::tuple<Tensor, Tensor> mask_from_kinds(const Tensor& kinds) {
    const auto sizes = accept_mask_from_kinds(kinds);
    if (!sizes) refuse("mask_from_kinds", kinds);
    NewMask made(kinds, *sizes, sizes->kv_blocks(), sizes->q_blocks());
    made.params.kinds = input_of<uint8_t>(kinds);
    const auto [kv_tiles, q_tiles, none] = made.make();
    return {kv_tiles, q_tiles};
}

}  // namespace
}  // namespace flash_ext

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
    using namespace flash_ext;
    m.impl("mask_from_dense", boxed<mask_from_dense>);
    m.impl("mask_from_intervals", boxed<mask_from_intervals>);
    m.impl("mask_from_documents", boxed<mask_from_documents>);
    m.impl("mask_from_blocks", boxed<mask_from_blocks>);
    m.impl("mask_from_kinds", boxed<mask_from_kinds>);
}
