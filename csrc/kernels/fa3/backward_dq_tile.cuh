// A Q tile's dQ in the FA3 backward: which part of it a consumer has, the order of its fragments in
// the workspace, and the postprocess pass, which converts it.
#pragma once

#include <type_traits>

#include "kernels/common/postprocess_dq.cuh"
#include "kernels/fa3/backward_common.cuh"
#include "plan/tuning_backward.h"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/uniform.cuh"

namespace flash_ext {

// The counter of KV tiles of a head of K and V (or of the parts that share query heads) that have
// added all of their dQ. These counters follow the counters of Q tiles in params.dq_semaphore;
// there are no more of them than Q tiles.
FLASH_DEVICE int* tiles_done(const BackwardParams& params, const Sequence& sequence, int head) {
    return params.dq_semaphore + 1 + params.padding_row / kWorkspaceRows +
           sequence.index() * params.heads_k + head;
}

// A consumer's half of dQ has the 64 rows of a wgmma: queries, or with kTranspose rows of dQ^T,
// which are columns of dQ. The number of queries can then be any multiple of 8. At head dim 64 each
// consumer has all columns and half of the queries, a multiple of 16. At head dim 96 the last 32
// columns do not exist: wgmma reads what follows K in shared memory, and the warps that get the
// result do not store it.
template <class Element_, int kHeadDim, int kBlockQ_, bool kTranspose>
struct Fa3DQTile {
    using Element = Element_;
    using QTile = SharedTile<Element, kBlockQ_, kHeadDim>;
    static constexpr bool kHalvesQueries = !kTranspose || kHeadDim == 64;
    static constexpr int kQueries = kBlockQ_ / (kHalvesQueries ? 2 : 1);   // of a consumer
    using Fragments = RegisterTile<16, kTranspose ? kQueries : kHeadDim>;  // of a warp
    using Floats = std::conditional_t<kTranspose, float4, float2>;  // of a lane and 8 queries
    static constexpr int kBlockQ = kBlockQ_;
    static constexpr int kThreads = 256;
    static constexpr bool kMayBeVarlen = true;
    static constexpr bool kUnaligned = false;
    static_assert(kTranspose ? kHeadDim >= 64 && kQueries % 16 == 0 : kQueries == 64);

    // The consumers' warps that have rows.
    static constexpr int kWarps = kHalvesQueries ? 8 : kHeadDim / 16;
    static FLASH_DEVICE int warps(int consumer) {
        return kWarps == 8 || consumer == 0 ? 4 : kWarps - 4;
    }

    // A consumer's half, in floats, if `rows` rows of the tile are stored.
    struct Half {
        int first;
        int size;
    };
    static FLASH_DEVICE Half half(int consumer, int rows) {
        if constexpr (kHalvesQueries) {
            const int first = consumer * kQueries;
            return {first * kHeadDim, clamp(rows - first, 0, kQueries) * kHeadDim};
        } else {
            const int cols = consumer == 0 ? 64 : kHeadDim - 64;
            return {consumer * 64 * rows, cols * rows};
        }
    }

    // visit(n, i, place, first row) for the lane's Floats in a half: elements v[0][n][i] and the
    // next ones, of 8 rows. They are in the order of these 8 rows, so that a half ends with the
    // last query: [8 queries][warp of the consumer][lane] of dQ^T, or [8 queries][8 columns][lane].
    template <class Visit>
    static FLASH_DEVICE void for_each(int consumer, Visit visit) {
        const int warp = warp_id() % 4;
        const int first = kHalvesQueries ? kQueries * consumer : 0;
#pragma unroll
        for (int n = 0; n < Fragments::kN; ++n)
            if constexpr (kTranspose) {
                visit(n, 0, (n * warps(consumer) + warp) * 32 + lane_id(), first + 8 * n);
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    visit(n, 2 * i, ((2 * warp + i) * Fragments::kN + n) * 32 + lane_id(),
                          first + 16 * warp + 8 * i);
            }
    }

    // A consumer warp writes its fragments to a half in shared memory.
    static FLASH_DEVICE void store(char* half, const Fragments& rdQ, int consumer) {
        if (kWarps < 8 && ptx::warp_uniform(threadIdx.x / 32) - 4 >= kWarps) return;
        for_each(consumer, [&](int n, int i, int place, int) {
            reinterpret_cast<Floats*>(half)[place] =
                reinterpret_cast<const Floats&>(rdQ.v[0][n][i]);
        });
    }

    // For the postprocess pass, with a warp for each of the consumers'. Queries that do not exist,
    // and tiles to which no KV tile has added, get zeros.
    static FLASH_DEVICE void fetch_dq(const BackwardParams& params, const Sequence& sequence,
                                      int head, int q_tile, uint32_t shared) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a
        wait_for_sum(params, sequence, head);
        const int first_query = q_tile * kBlockQ;
        if (first_query >= sequence.seqlen_q || warp_id() >= kWarps) return;
        const int consumer = warp_id() / 4;
        const int64_t row = workspace_row(params, sequence, head, first_query);
        const bool stored =
            params.dq_accum_zeroed || params.dq_semaphore[1 + row / kWorkspaceRows] != 0;
        const int rows = stored ? stored_rows<kBlockQ>(sequence, first_query) : 0;
        const float* source = params.dq_accum + row * kHeadDim + half(consumer, rows).first;
        Fragments rdQ;
        rdQ.clear();
        for_each(consumer, [&](int n, int i, int place, int first_row) {
            if (first_row < rows)
                reinterpret_cast<Floats&>(rdQ.v[0][n][i]) =
                    __ldcs(reinterpret_cast<const Floats*>(source) + place);
        });
        rdQ.scale(params.gradient_scale);
        if constexpr (kTranspose) {
            const int lane = lane_id();
            const int first_row = kHalvesQueries ? consumer * kQueries : 0;
            const int first_chunk = 2 * (kHalvesQueries ? warp_id() % 4 : warp_id());
            const uint32_t address = shared + QTile::offset(first_row + lane / 16 * 8 + lane % 8,
                                                            first_chunk + lane / 8 % 2);
#pragma unroll
            for (int k = 0; k < kQueries / 16; ++k) {
                uint32_t blocks[4];  // of 8 columns and 8 queries
                AFromRegisters<Element, Fragments>{rdQ}.load_a(blocks, 0, k);
                ptx::stmatrix_x4_trans(address + k * 16 * QTile::kPitch, blocks);
            }
        } else {
            store_to_shared<Element, QTile>(shared, rdQ, 16 * warp_id());
        }
#else
        __trap();  // never launched on other GPUs
#endif
    }

 private:
    // The pass begins on SMs that the backward kernel leaves idle or has left, and converts heads
    // as they are complete. The next kernel in the stream waits only for this pass, so one CTA
    // waits for the end of the backward kernel. With varlen all do: with invalid offsets a counter
    // might never reach its count.
    static FLASH_DEVICE void wait_for_sum(const BackwardParams& params, const Sequence& sequence,
                                          int head) {
        constexpr int kBlockKV = tuning::kFa3BackwardBlockKV;
        const bool varlen = params.cu_seqlens_q != nullptr;
        if (varlen || blockIdx.x == gridDim.x - 1) ptx::wait_for_grid_before();
        if (!varlen && threadIdx.x == 0) {
            const int* done = tiles_done(params, sequence, head / group_of(params));
            ptx::wait_for_count(done, ceil_div(sequence.rows_k, kBlockKV) * params.query_parts,
                                256);
        }
        __syncthreads();
    }
};

}  // namespace flash_ext
