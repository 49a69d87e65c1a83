// What the queries of documents see (problem/make_mask.cuh), by a warp for each block of 128
// queries.
//
// Each lane searches the offsets. With ids a lane has every 32nd token of the block, and a bit for
// each token says whether a document begins with it. A document may be longer than the block: the
// kernel before has written of each block the first and the last token with which one begins.
#pragma once

#include <climits>

#include "kernels/common/launch.cuh"
#include "problem/make_mask.cuh"

namespace flash_ext {

inline constexpr int kMakeMaskThreads = 128;
inline constexpr uint32_t kAllLanes = 0xffffffff;
inline constexpr int kTokensOfLane = kMaskBlock / 32;

FLASH_DEVICE int64_t warp_index() {
    return (int64_t{blockIdx.x} * kMakeMaskThreads + threadIdx.x) / 32;
}

FLASH_DEVICE int64_t document_id(const Documents& documents, int batch, int token) {
    const int64_t at = batch * documents.ids_strides[0] + token * documents.ids_strides[1];
    return documents.ids_have_64_bits ? static_cast<const int64_t*>(documents.ids)[at]
                                      : static_cast<const int*>(documents.ids)[at];
}

// A bit for each token of a block: does a document begin with it?
struct TokensThatBegin {
    uint32_t words[kTokensOfLane];

    FLASH_DEVICE TokensThatBegin(const MakeMaskParams& params, int batch, int block) {
#pragma unroll
        for (int i = 0; i < kTokensOfLane; ++i) {
            const int token = block * kMaskBlock + 32 * i + static_cast<int>(threadIdx.x % 32);
            bool begins = token == 0;
            if (token > 0 && token < params.seqlen_q)
                begins = document_id(params.documents, batch, token) !=
                         document_id(params.documents, batch, token - 1);
            words[i] = __ballot_sync(kAllLanes, begins);
        }
    }
};

__global__ void __launch_bounds__(kMakeMaskThreads)
    mask_first_tokens_kernel(const __grid_constant__ MakeMaskParams params) {
    const int64_t row = warp_index();
    if (row >= int64_t{params.batch} * params.q_blocks) return;
    const int block = static_cast<int>(row % params.q_blocks);
    const TokensThatBegin tokens(params, static_cast<int>(row / params.q_blocks), block);
    FirstTokens found{INT_MAX, -1};
#pragma unroll
    for (int i = 0; i < kTokensOfLane; ++i) {
        if (tokens.words[i] == 0) continue;
        const int first = block * kMaskBlock + 32 * i;
        found.first = min_of(found.first, first + __ffs(tokens.words[i]) - 1);
        found.last = first + 31 - __clz(tokens.words[i]);
    }
    if (threadIdx.x % 32 == 0) params.documents.first_tokens[row] = found;
}

// The documents of the tokens of a block, by their numbers. A lane's tokens are 32 apart.
struct DocumentsOfBlock {
    int begins[kTokensOfLane];
    int ends[kTokensOfLane];

    FLASH_DEVICE DocumentsOfBlock(const MakeMaskParams& params, int batch, int block) {
        const int lane = threadIdx.x % 32;
        const TokensThatBegin tokens(params, batch, block);
        const FirstTokens* of_blocks =
            params.documents.first_tokens + int64_t{batch} * params.q_blocks;
        const auto token_of = [&](int i) { return block * kMaskBlock + 32 * i; };
        int begin = begin_before(of_blocks, block);
#pragma unroll
        for (int i = 0; i < kTokensOfLane; ++i) {
            const uint32_t until = tokens.words[i] & (kAllLanes >> (31 - lane));
            begins[i] = until == 0 ? begin : token_of(i) + 31 - __clz(until);
            if (tokens.words[i] != 0) begin = token_of(i) + 31 - __clz(tokens.words[i]);
        }
        int end = end_after(of_blocks, block, params.q_blocks, params.seqlen_q);
#pragma unroll
        for (int i = kTokensOfLane - 1; i >= 0; --i) {
            const uint32_t later = tokens.words[i] & ~(kAllLanes >> (31 - lane));
            ends[i] = later == 0 ? end : token_of(i) + __ffs(later) - 1;
            if (tokens.words[i] != 0) end = token_of(i) + __ffs(tokens.words[i]) - 1;
        }
    }

    static constexpr int kBlocksAtOnce = 128;

    // The last token before this block with which a document begins, -1 if there is none.
    static FLASH_DEVICE int begin_before(const FirstTokens* of_blocks, int block) {
        int found = -1;
        for (int base = block - kBlocksAtOnce; found < 0 && base > -kBlocksAtOnce;
             base -= kBlocksAtOnce) {
#pragma unroll
            for (int i = threadIdx.x % 32; i < kBlocksAtOnce; i += 32)
                if (base + i >= 0) found = max_of(found, of_blocks[base + i].last);
            found = __reduce_max_sync(kAllLanes, found);
        }
        return found;
    }
    // The first one after it, or the number of all tokens.
    static FLASH_DEVICE int end_after(const FirstTokens* of_blocks, int block, int blocks,
                                      int tokens) {
        int found = tokens;
        for (int base = block + 1; found == tokens && base < blocks; base += kBlocksAtOnce) {
#pragma unroll
            for (int i = threadIdx.x % 32; i < kBlocksAtOnce; i += 32)
                if (base + i < blocks) found = min_of(found, of_blocks[base + i].first);
            found = __reduce_min_sync(kAllLanes, found);
        }
        return found;
    }
};

// The sequence of a query, -1 before the first and count after the last one.
FLASH_DEVICE int sequence_of_query(const Documents& documents, int query) {
    int low = 0, high = documents.count + 1;  // how many offsets are at most the query
    while (low < high) {
        const int middle = (low + high) / 2;
        const bool before = documents.cu_seqlens_q[middle] <= query;
        (before ? low : high) = before ? middle + 1 : middle;
    }
    return low - 1;
}

FLASH_DEVICE Document document_by_offsets(const MakeMaskParams& params, int batch, int query) {
    const Documents& documents = params.documents;
    Document x{0, params.seqlen_k, query + params.seqlen_k - params.seqlen_q};
    int number = batch;
    if (documents.cu_seqlens_q != nullptr) {
        number = sequence_of_query(documents, query);
        if (number < 0 || number >= documents.count) return {};
        x.begin = documents.cu_seqlens_k[number];
        x.end = documents.cu_seqlens_k[number + 1];
        x.position = query + x.end - documents.cu_seqlens_q[number + 1];
    }
    const int first_keys = documents.first_keys[number * documents.first_keys_stride];
    x.first_keys = min_of(max_of(first_keys, 0), params.seqlen_k);
    return x;
}

}  // namespace flash_ext
