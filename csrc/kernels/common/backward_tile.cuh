// One iteration, over a Q tile and a KV tile, of the backward pass. FA1 (algorithm 4) and FA2
// (algorithm 2) share it: they differ in their loops and in how dQ reaches HBM.
//
// Everything is computed transposed, rows are keys:
//     S^T  = K Q^T                 P^T  = 2^(S^T scale - lse), scale and lse in base 2
//     dP^T = V dO^T                dS^T = P^T * (dP^T - delta)
//     dV  += P^T dO                dK  += dS^T Q
//     dQ   = dS K
// P^T and dS^T leave the tensor cores in the layout in which dV and dK take them as operands. Only
// dS always goes through shared memory, because dQ sums over keys.
//
// Warps: kWarpsKV x kWarpsD. A warp owns kKeysPerWarp rows of the KV tile and every kWarpsD-th
// 16-column block of their dK and dV, in registers. With kWarpsD > 1 (large head dims, where a row
// of dK and dV does not fit one warp) the warps of a row group share the queries, and exchange P^T
// and dS^T through shared memory. For dQ they regroup: kWarpsM x kWarpsN of (queries, columns).
//
// Shared memory: K, V [kBlockKV][D]; kStages x (Q, dO [kBlockQ][D], lse, delta, reference
// [kBlockQ], 16-bit bias [kBlockQ][kBlockKV]); dS^T and, for kWarpsD > 1, P^T [kBlockKV][kBlockQ].
// dV and dK leave through the K and V tiles.
#pragma once

#include "kernels/common/backward_math.cuh"
#include "kernels/common/bias_rows.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/postprocess_dq.cuh"
#include "kernels/common/q_tile_walk.cuh"
#include "kernels/common/softmax.cuh"
#include "kernels/common/varlen.cuh"
#include "plan/tuning_backward.h"
#include "plan/workspace_rows.cuh"
#include "problem/hide_by_words.cuh"
#include "problem/key_rows.cuh"
#include "problem/mask.cuh"
#include "problem/score.cuh"
#include "problem/sequences.cuh"
#include "ptx/memory.cuh"
#include "tile/copy.cuh"
#include "tile/gemm.cuh"

namespace flash_ext {

// A warp's part of a slice of a Q tile in dq_accum. The tile is in fragment order if it is whole:
// [warp][slice][m][n][lane][4]. Otherwise its queries are in blocks of 8, so that it ends with its
// last query, and each block is in fragment order: [warp_n][slice][columns][lane][kFloats].
template <class Tile>
struct DQAccum {
    using DQ = typename Tile::DQ;
    static constexpr bool kWhole = Tile::kWholeTiles;
    static constexpr int kFloats = Tile::kDQFloats;
    static constexpr int kBlocks = kWhole ? DQ::kM : DQ::kRows / 8;  // of a warp's rows
    static constexpr int kBlockFloats = kWhole ? DQ::kN * 128 : 8 * Tile::kHeadDim;
    static constexpr int kStep = kWhole ? 1 : kFloats / 2;  // blocks of 8 columns
    struct alignas(4 * kFloats) Floats {
        float x[kFloats];
    };

    float* first;    // this lane's
    int last_block;  // of 8 queries that is stored, counted from the warp's first

    FLASH_DEVICE DQAccum(const BackwardParams& params, const Sequence& sequence, int head,
                         int q_tile, int slice) {
        // In these kernels no register is left for the thread's index over the loop.
        constexpr bool kNoRegister =
            Tile::kDQSlices > 1 || ((Tile::kHeadDim == 128 || Tile::kBiasTiles) && kCudaArch < 900);
        const int thread = !kWhole && kNoRegister ? ptx::not_hoisted(threadIdx.x) : threadIdx.x;
        const int warp = thread / 32;
        // ptxas 13.0: with either form alone, one of the kernels spills.
        constexpr bool kByLane = kWhole && (Tile::kHeadDim > 128 || kCudaArch < 900);
        const int lane = kByLane ? lane_id() : thread % 32;
        const int query = q_tile * Tile::kBlockQ + (kWhole ? 0 : warp / Tile::kWarpsN * DQ::kRows);
        const int part = kWhole ? warp : warp % Tile::kWarpsN;
        first = params.dq_accum + workspace_row(params, sequence, head, query) * Tile::kHeadDim +
                (part * Tile::kDQSlices + slice) * (DQ::kCols * (kWhole ? DQ::kRows : 8)) +
                lane * kFloats;
        last_block = ((sequence.seqlen_q - query + 7) >> 3) - 1;  // rounded down if negative
    }

    // visit(block, n, floats) for the stored blocks: the floats of a block from column block n on.
    template <class Visit>
    FLASH_DEVICE void for_each(Visit visit) const {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
            if (kWhole || block <= last_block) visit_block(block, block, visit);
    }

    // The same for all. Blocks that are not stored have the floats of the last one, to which their
    // zeros may be added: branches for each would keep all of rdQ in registers until all matmuls
    // are done. Where that is no loss, one branch saves the search for the last block.
    template <class Visit>
    FLASH_DEVICE void for_all(Visit visit) const {
        if (kWhole || (kBlocks <= 4 && last_block >= kBlocks - 1)) {
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) visit_block(block, block, visit);
        } else {
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
                visit_block(block, min_of(block, last_block), visit);
        }
    }

    // Float i of these, in registers.
    template <class DQ_>
    static FLASH_DEVICE auto& element(DQ_& rdQ, int block, int n, int i) {
        if constexpr (kWhole) return rdQ.v[block][n][i];
        return rdQ.v[block / 2][n + i / 2][block % 2 * 2 + i % 2];
    }

 private:
    template <class Visit>
    FLASH_DEVICE void visit_block(int block, int place, Visit visit) const {
        float* floats = first + place * kBlockFloats;
#pragma unroll
        for (int n = 0; n < DQ::kN; n += kStep)
            visit(block, n, reinterpret_cast<Floats&>(floats[n * (kWhole ? 128 : 64)]));
    }
};

// A member of SharedStorage, empty where only dbias is computed.
template <bool kStored, class Tile, int kWarpsD>
struct DSStorage {
    char tiles[kWarpsD > 1 ? 2 : 1][Tile::kBytes];
};
template <class Tile, int kWarpsD>
struct DSStorage<false, Tile, kWarpsD> {};

template <class Element_, int kHeadDim_, int kHeadDimV_, OptionSet kOptions_,
          tuning::MmaBackwardShape kTuning>
struct BackwardTile {
    using Element = Element_;
    static constexpr OptionSet kOptions = kOptions_;
    static constexpr bool kUnaligned = contains(kOptions, OptionSet::kUnaligned);
    static constexpr bool kMayBeVarlen = contains(kOptions, OptionSet::kVarlen);
    static constexpr bool kMayHaveMask = contains(kOptions, OptionSet::kMask);  // of tiles
    static constexpr bool kBiasTiles = has_bias_tiles(kOptions);
    static constexpr bool kWholeTiles = !kMayBeVarlen;  // as MmaKernels plans
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kKeysPerWarp = kTuning.keys_per_warp;
    static constexpr int kWarpsKV = kTuning.warps_kv;
    static constexpr int kWarpsD = kTuning.warps_d;
    static constexpr int kWarps = kWarpsKV * kWarpsD;
    static constexpr bool kInRegisters = kWarpsD == 1;  // P^T and dS^T, for dV and dK
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kBlockQ = kTuning.block_q;
    static constexpr int kBlockKV = kKeysPerWarp * kWarpsKV;
    static constexpr int kCtasPerSm = kTuning.ctas_per_sm;
    static constexpr int kStages = kTuning.stages;
    static constexpr int kStatisticsStages = kTuning.for_dbias ? 2 : kStages;
    static constexpr bool kForLessMemory =  // of fa2, and of dbias
        kTuning != (kTuning.for_dbias
                        ? tuning::kSharedBiasTile
                        : tuning::fa2_backward_shape({kHeadDim, kHeadDimV}, kOptions));

    using QTile = SharedTile<Element, kBlockQ, kHeadDim>;
    using DOTile = SharedTile<Element, kBlockQ, kHeadDimV>;
    using KTile = SharedTile<Element, kBlockKV, kHeadDim>;
    using VTile = SharedTile<Element, kBlockKV, kHeadDimV>;
    using PTile = SharedTile<Element, kBlockKV, kBlockQ>;
    using BiasTile = SharedTile<Element, kBlockQ, kBlockKV>;

    static constexpr int kWarpsN = KTile::kBlocksPerAtom;
    static constexpr int kWarpsM = kWarps / kWarpsN;

    using Walk = std::conditional_t<kMayHaveMask, ListedQTileWalk, QTileWalk>;
    static_assert(!kMayHaveMask || (kMaskBlock % kBlockQ == 0 && kMaskBlock % kBlockKV == 0));

    // What comes with a Q tile: three numbers for each of its queries, one array after another.
    struct Statistics {
        float lse_log2[kBlockQ];
        float minus_delta[kBlockQ];
        float reference[kBlockQ];
    };
    struct SharedStorage {
        char k[KTile::kBytes];
        char v[VTile::kBytes];
        // dS^T and, where warps share it, P^T.
        [[no_unique_address]] DSStorage<!kTuning.for_dbias, PTile, kWarpsD> ds_p;
        char q[kStages][QTile::kBytes];
        char dout[kStages][DOTile::kBytes];
        [[no_unique_address]] BiasRowsStorage<kBiasTiles, BiasTile, kStages> bias;
        Statistics statistics[kStatisticsStages];
        [[no_unique_address]] QTileMaskStorage<kMayHaveMask, kStages, kBlockQ> mask;
        alignas(16) int work_index;
        alignas(16) TileCoord tile_coord;
        DropoutMask dropout;  // of the sequence's head 0; only where pairs are dropped
    };
    static constexpr int kSharedBytes = sizeof(SharedStorage);

    // dQ is computed in slices of columns if a warp's do not fit in registers beside dK and dV.
    static constexpr int kDQSlices = kTuning.dq_slices;
    static constexpr int kDQFloats = kWholeTiles ? 4 : 2;  // that a lane adds at a time
    using DQ = RegisterTile<kBlockQ / kWarpsM, kHeadDim / kWarpsN / kDQSlices>;

    static_assert(kWarpsM * kWarpsN == kWarps && kBlockQ % (16 * kWarpsM) == 0);
    static_assert((DQ::kM & (DQ::kM - 1)) == 0, "operands of dQ start at an XOR of their blocks");
    static_assert(kHeadDim % (16 * kWarpsN * kDQSlices) == 0 && kBlockQ % (16 * kWarpsD) == 0);

    using Scores = RegisterTile<kKeysPerWarp, kBlockQ / kWarpsD>;
    using GradientK = RegisterTile<kKeysPerWarp, kHeadDim / kWarpsD>;
    using GradientV = RegisterTile<kKeysPerWarp, kHeadDimV / kWarpsD>;

    const BackwardParams& params;
    int head_k;
    Sequence sequence;
    BandMask mask;
    int warp_key;  // the warp's first row within the KV tile
    int warp_d;    // 0 .. kWarpsD - 1
    uint32_t smem;

    FLASH_DEVICE BackwardTile(const BackwardParams& p, const Sequence& sequence_, int head_k_)
        : params(p),
          head_k(head_k_),
          sequence(sequence_),
          mask(mask_of(p, sequence)),
          warp_key(warp_id() % kWarpsKV * kKeysPerWarp),
          warp_d(warp_id() / kWarpsKV),
          smem(ptx::shared_address(dynamic_shared())) {}

    FLASH_DEVICE VisibleTiles q_tiles_seeing(int first_key) const {
        return VisibleTiles::of_keys<kMayBeVarlen>(mask, {first_key, first_key + kBlockKV},
                                                   kBlockQ);
    }

    // The first of them, for one query head of the group after another, and the next one.
    FLASH_DEVICE Walk first_q_tile(int first_key) const {
        const int group = params.heads_q / params.heads_k;
        if constexpr (kMayHaveMask) {
            return ListedQTileWalk::first(mask_storage().q_tiles, q_tile_list(first_key));
        } else {
            return QTileWalk(q_tiles_seeing(first_key), head_k * group, group);
        }
    }
    FLASH_DEVICE Walk next_q_tile(const Walk& walk, int first_key) const {
        if constexpr (kMayHaveMask) {
            return walk.next(mask_storage().q_tiles, q_tile_list(first_key));
        } else {
            return walk.next();
        }
    }

    FLASH_DEVICE void load_k(int first_key) const {
        load_tile<KTile, kThreads, kUnaligned>(
            k_tile(),
            key_rows(params, sequence)
                .template tile<Element>(params.k, head_k, first_key, params.head_dim),
            params.aligned);
    }
    FLASH_DEVICE void load_v(int first_key) const {
        load_tile<VTile, kThreads, kUnaligned>(
            v_tile(),
            key_rows(params, sequence)
                .template tile<Element>(params.v, head_k, first_key, params.head_dim_v),
            params.aligned);
    }
    FLASH_DEVICE void load_kv(int first_key) const {
        load_k(first_key);
        load_v(first_key);
    }

    // Addresses in shared memory; Q's and dO's are an iteration's, with one stage always the same.
    FLASH_DEVICE uint32_t k_tile() const { return smem + offsetof(SharedStorage, k); }
    FLASH_DEVICE uint32_t v_tile() const { return smem + offsetof(SharedStorage, v); }
    FLASH_DEVICE uint32_t ds_tile() const { return smem + offsetof(SharedStorage, ds_p); }
    FLASH_DEVICE uint32_t p_tile() const { return ds_tile() + PTile::kBytes; }
    FLASH_DEVICE uint32_t q_tile_at(int stage) const {
        return smem + offsetof(SharedStorage, q) + stage % kStages * QTile::kBytes;
    }
    FLASH_DEVICE uint32_t do_tile_at(int stage) const {
        return smem + offsetof(SharedStorage, dout) + stage % kStages * DOTile::kBytes;
    }

    FLASH_DEVICE void load_q(const Walk& walk) const {
        load_rows<QTile>(q_tile_at(walk.stage), params.q, params.head_dim, walk);
    }
    FLASH_DEVICE void load_do(const Walk& walk) const {
        load_rows<DOTile>(do_tile_at(walk.stage), params.dout, params.head_dim_v, walk);
    }

    FLASH_DEVICE uint32_t bias_tile_at(int stage) const {
        return smem + offsetof(SharedStorage, bias) + stage % kStages * BiasTile::kBytes;
    }
    FLASH_DEVICE void load_bias(const Walk& walk, int first_key) const {
        if constexpr (kBiasTiles) {
            const int first_query = walk.q_tile() * kBlockQ;
            BiasCursor<BiasTile, kThreads, kBlockQ> cursor;
            cursor.start(params, ptx::not_hoisted(sequence.batch), walk.head, first_query,
                         first_key);
            cursor.template load<false>(bias_tile_at(walk.stage), params.bias.strides[2],
                                        params.seqlen_q - first_query, params.seqlen_k - first_key,
                                        0);
        }
    }

    FLASH_DEVICE Statistics& statistics(int stage) const {
        return shared_storage<SharedStorage>().statistics[stage % kStatisticsStages];
    }

    // Fetches lse, delta and reference of a Q tile, which the preprocess pass has left in HBM.
    FLASH_DEVICE void load_statistics(const Walk& walk) const {
        constexpr int kChunks = kBlockQ / 4;
        // With two stages no register is left for it over the loop.
        const int thread = kStages == 2 ? ptx::not_hoisted(threadIdx.x) : threadIdx.x;
        if (thread >= 3 * kChunks) return;
        const int query = walk.q_tile() * kBlockQ + thread % kChunks * 4;
        const int64_t row = kWholeTiles || query < sequence.seqlen_q
                                ? workspace_row(params, sequence, walk.head, query)
                                : params.padding_row;
        const float* source = (thread < kChunks       ? params.lse_log2
                               : thread < 2 * kChunks ? params.minus_delta
                                                      : params.reference) +
                              row;
        ptx::cp_async_16(ptx::shared_address(statistics(walk.stage).lse_log2) + thread * 16, source,
                         true);
    }

    // Fetches what the mask of tiles has of the queries, if it shows the tile in part.
    FLASH_DEVICE void load_words(const Walk& walk, int first_key) const {
        if constexpr (kMayHaveMask) {
            const int query = static_cast<int>(threadIdx.x) - (kThreads - kBlockQ);
            if (!walk.partial || query < 0) return;
            ptx::cp_async_16(
                ptx::shared_address(mask_storage().words[walk.stage % kStages] + query),
                words_of(params, sequence.batch, walk.head, walk.q_tile() * kBlockQ + query,
                         first_key / kMaskBlock),
                true);
        }
    }

    // P^T of the warp's keys and queries, or tanh with a softcap alone. Queries past the sequence
    // are not masked: their lse is +inf, which makes their P zero.
    FLASH_DEVICE void compute_p(Scores& rP, const Walk& walk, int first_key) const {
        rP.clear();
        gemm<Element, kHeadDim>(rP, AFromRows<KTile>(k_tile(), warp_key),
                                BFromRows<QTile>(q_tile_at(walk.stage), warp_query()));
        const int first_query = walk.q_tile() * kBlockQ + warp_query();
        if constexpr (kBiasTiles) {
            score_function(walk.head).apply(
                rP, AFromColumns<BiasTile>(bias_tile_at(walk.stage), warp_query(), warp_key / 16));
        } else if constexpr (changes_scores(kOptions)) {
            score_function(walk.head).apply(rP, first_key + warp_key, first_query);
        }
        const auto is_full = [&] {
            return mask.is_full(tile_interval(walk.q_tile(), kBlockQ),
                                {first_key, first_key + kBlockKV});
        };
        const bool large_lse = params.large_lse.is_raised();  // read each time, to save registers
        // The order decides whether ptxas spills.
        if (kHeadDim == 96 ? !is_full() || large_lse : large_lse || !is_full()) {
            if (large_lse) [[unlikely]]
                for_each_with_query<Rows::kKeys, Scores>(
                    statistics(walk.stage).reference + warp_query(),
                    [&](int m, int n, int i, float r) { rP.v[m][n][i] -= r; });
            mask_scores(rP, first_query,
                        [&](int row) { return mask.query_range(first_key + warp_key + row); });
            if constexpr (only_softcap(kOptions)) keep_finite(rP);
        }
        if constexpr (kMayHaveMask) {
            if (walk.partial)
                hide_queries(rP, visible_elements<Scores>(
                                     mask_storage().words[walk.stage % kStages] + warp_query(),
                                     params.tile_mask.bits, first_key + warp_key));
        }
        if constexpr (!only_softcap(kOptions))
            exponentiate<Rows::kKeys>(rP, statistics(walk.stage).lse_log2 + warp_query(),
                                      exponent_scale<kOptions>(params));
    }

    // dS^T from P^T: the gradient of Q K^T scale, without kThroughSoftcap of scores after softcap.
    // With dropout P becomes the factor of dO in dV, and with a softcap alone tanh becomes P.
    template <bool kThroughSoftcap = true>
    FLASH_DEVICE void compute_ds(Scores& rdS, Scores& rP, const Walk& walk, int first_key) const {
        const Statistics& numbers = statistics(walk.stage);
        const float* minus_delta = numbers.minus_delta + warp_query();
        rdS.clear();  // dP^T first
        gemm<Element, kHeadDimV>(rdS, AFromRows<VTile>(v_tile(), warp_key),
                                 BFromRows<DOTile>(do_tile_at(walk.stage), warp_query()));
        if constexpr (only_softcap(kOptions)) {
            subtract_delta<Rows::kKeys>(rdS, minus_delta);
            return softcap_gradient<Rows::kKeys>(rP, rdS, numbers.lse_log2 + warp_query(),
                                                 params.softcap_log2);
        }
        if constexpr ((kOptions & (OptionSet::kDropout | OptionSet::kSoftcap)) == OptionSet::kNone)
            return softmax_gradient<Rows::kKeys>(rdS, rP, minus_delta);
        // With dropout Z / (1 - p), dS = P * (Z dP / (1 - p) - delta), dV = (P Z)^T dO / (1 - p). P
        // and dS are rounded with a part of these factors; the rest comes at the end.
        const int first_query = walk.q_tile() * kBlockQ + warp_query();
        if constexpr (drops_pairs(kOptions)) {
            // In registers the mask and the tile's first row would spill at d 128.
            const SharedStorage& storage = shared_storage<SharedStorage>();
            return dropout_gradient<kOptions>(rdS, rP, storage.dropout.ahead(walk.head),
                                              first_query, storage.tile_coord.first_row + warp_key,
                                              minus_delta, params.ds_factor);
        }
        uint32_t dropped[Scores::kM][ceil_div(Scores::kN, 8)] = {};
        const bool drops = contains(kOptions, OptionSet::kDropout) && params.rng_state != nullptr;
        if (drops) {
            for_each_keep<kOptions, Rows::kKeys, Scores>(
                dropout_mask(params, sequence, walk.head), first_query, first_key + warp_key,
                [&](int m, int n, int i, bool keep) {
                    rdS.v[m][n][i] = keep ? rdS.v[m][n][i] * params.ds_factor : 0.f;
                    dropped[m][n / 8] |= static_cast<uint32_t>(!keep) << (n % 8 * 4 + i);
                });
        }
        softmax_gradient<Rows::kKeys>(rdS, rP, minus_delta);
        if (kThroughSoftcap && params.softcap != 0.f)
            score_function(walk.head).softcap_gradient(
                rdS, rP, first_key + warp_key, first_query, [&](int col) {
                    const int query = warp_query() + col;
                    return numbers.lse_log2[query] + numbers.reference[query];
                });
        if (drops) {
#pragma unroll
            for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
                for (int n = 0; n < Scores::kN; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        rP.v[m][n][i] = dropped[m][n / 8] >> (n % 8 * 4 + i) & 1
                                            ? 0.f
                                            : rP.v[m][n][i] * params.p_factor;
        }
    }

    // Other warps may use it after a barrier.
    FLASH_DEVICE void share_p_ds(const Scores& rP, const Scores& rdS) const {
        store_to_shared<Element, PTile>(ds_tile(), rdS, warp_key, warp_query() / 16);
        if constexpr (!kInRegisters)
            store_to_shared<Element, PTile>(p_tile(), rP, warp_key, warp_query() / 16);
    }

    // dV += P^T dO
    FLASH_DEVICE void accumulate_dv(GradientV& rdV, const Scores& rP, int stage) const {
        const BFromColumns<DOTile, kWarpsD> dO(do_tile_at(stage), 0, warp_d);
        if constexpr (kInRegisters) {
            gemm<Element, kBlockQ>(rdV, AFromRegisters<Element, Scores>{rP}, dO);
        } else {
            gemm<Element, kBlockQ>(rdV, AFromRows<PTile>(p_tile(), warp_key), dO);
        }
    }

    // dK += dS^T Q
    FLASH_DEVICE void accumulate_dk(GradientK& rdK, const Scores& rdS, int stage) const {
        const BFromColumns<QTile, kWarpsD> q(q_tile_at(stage), 0, warp_d);
        if constexpr (kInRegisters) {
            gemm<Element, kBlockQ>(rdK, AFromRegisters<Element, Scores>{rdS}, q);
        } else {
            gemm<Element, kBlockQ>(rdK, AFromRows<PTile>(ds_tile(), warp_key), q);
        }
    }

    // A slice of dQ of this iteration, without the factor scale: dS K over all keys of the
    // tile. A barrier must follow before dS is overwritten.
    template <int kSlice>
    FLASH_DEVICE void compute_dq(DQ& rdQ) const {
        const int warp_m = warp_id() / kWarpsN;
        const int warp_n = warp_id() % kWarpsN;
        using KColumns = BFromColumns<KTile, kWarpsN>;
        const AFromColumns<PTile> dS(ds_tile(), 0, warp_m * DQ::kM);
        const KColumns k(k_tile(), 0, warp_n);
        rdQ.clear();
        gemm<Element, kBlockKV>(rdQ, dS, BSkipping<KColumns, kSlice*(DQ::kN / 2)>{k});
    }

    // Where each element of dbias is one of dS, in 16 bits, dS of this iteration, complete in
    // shared memory, is a tile of it. A matrix of ldmatrix may have any eight keys: here those that
    // give a lane eight keys of one query, side by side. Their rows would share banks, so lane 4 g
    // + c has its pair of keys (j + c) % 4 in register j.
    FLASH_DEVICE void store_dbias(const Walk& walk, int first_key) const {
        constexpr int kKeys = 32;  // of four lanes
        constexpr int kPieces = kBlockQ / 8 * (kBlockKV / kKeys);
        static_assert(kPieces % kWarps == 0);
        const int lane = ptx::not_hoisted(threadIdx.x) % 32;
        const int c = lane % 8 / 2;  // of the matrices' rows
        const int key_of_row = 8 * c + (lane / 8 + c) % 4 * 2 + lane % 2;
#pragma unroll
        for (int i = 0; i < kPieces / kWarps; ++i) {
            const int piece = warp_id() + i * kWarps;
            const int query = piece / (kBlockKV / kKeys) * 8;
            const int key = piece % (kBlockKV / kKeys) * kKeys;
            uint32_t x[4];
            ptx::ldmatrix_x4<true>(x, ds_tile() + PTile::offset(key + key_of_row, query / 8));
            const bool by_one = lane % 2 != 0, by_two = lane % 4 >= 2;
            const uint32_t y[4] = {by_one ? x[3] : x[0], by_one ? x[0] : x[1], by_one ? x[1] : x[2],
                                   by_one ? x[2] : x[3]};
            store_dbias_chunk(walk.head, walk.q_tile() * kBlockQ + query + lane / 4,
                              first_key + key + lane % 4 * 8,
                              {by_two ? y[2] : y[0], by_two ? y[3] : y[1], by_two ? y[0] : y[2],
                               by_two ? y[1] : y[3]});
        }
    }
    // Zeros where the mask hides tiles.
    FLASH_DEVICE void zero_hidden_dbias(int first_key) const {
        constexpr int kChunks = kBlockKV / 8;  // of a row
        const VisibleTiles seen = q_tiles_seeing(first_key);
        const int key = first_key + threadIdx.x % kChunks * 8;
        const int group = params.heads_q / params.heads_k;
        for (int head = head_k * group; head < (head_k + 1) * group; ++head)
            for (int row = threadIdx.x / kChunks; row < sequence.seqlen_q;
                 row += kThreads / kChunks) {
                const int q_tile = row / kBlockQ;
                if (q_tile < seen.begin || q_tile >= seen.end)
                    store_dbias_chunk(head, row, key, {});
            }
    }

    FLASH_DEVICE void add_dq(const DQ& rdQ, const Walk& walk, int slice) const {
        using Accum = DQAccum<BackwardTile>;
        Accum(params, sequence, walk.head, walk.q_tile(), slice)
            .for_all([&](int block, int n, typename Accum::Floats& floats) {
                float x[Accum::kFloats];
#pragma unroll
                for (int i = 0; i < Accum::kFloats; ++i) x[i] = Accum::element(rdQ, block, n, i);
                ptx::red_add(floats.x, x);
            });
    }

    // For the postprocess pass, whose warps have this layout: dQ_i from HBM to shared memory.
    static FLASH_DEVICE void fetch_dq(const BackwardParams& params, const Sequence& sequence,
                                      int head, int q_tile, uint32_t shared) {
        using Accum = DQAccum<BackwardTile>;
#pragma unroll
        for (int slice = 0; slice < kDQSlices; ++slice) {
            DQ rdQ;
            rdQ.clear();
            Accum(params, sequence, head, q_tile, slice)
                .for_each([&](int block, int n, const typename Accum::Floats& floats) {
                    const auto y = floats;
#pragma unroll
                    for (int i = 0; i < Accum::kFloats; ++i)
                        Accum::element(rdQ, block, n, i) = y.x[i];
                });
            rdQ.scale(params.gradient_scale);
            store_to_shared<Element, QTile, kWarpsN>(
                shared, rdQ, warp_id() / kWarpsN * DQ::kRows,
                warp_id() % kWarpsN + slice * (DQ::kN / 2) * kWarpsN);
        }
    }

    // dK and dV to HBM, through the memory of the K and V tiles; zeros for rows that are not in
    // use. All warps have left the loop.
    FLASH_DEVICE void store_dk_dv(GradientK& rdK, GradientV& rdV, int first_key) const {
        rdK.scale(params.gradient_scale);
        if constexpr (contains(kOptions, OptionSet::kDropout))
            rdV.scale(late_factor<kOptions>(params));
        store_to_shared<Element, KTile, kWarpsD>(k_tile(), rdK, warp_key, warp_d);
        store_to_shared<Element, VTile, kWarpsD>(v_tile(), rdV, warp_key, warp_d);
        __syncthreads();  // dK and dV are complete
        const int64_t row = sequence.k_begin + first_key;
        const int rows = sequence.rows_k - first_key;
        const auto gdK =
            global_tile<Element>(params.dk, sequence.batch, row, head_k, rows, params.head_dim);
        const auto gdV =
            global_tile<Element>(params.dv, sequence.batch, row, head_k, rows, params.head_dim_v);
        store_tile<KTile, kThreads, kBlockKV, kUnaligned>(gdK, k_tile(), 0, params.aligned);
        store_tile<VTile, kThreads, kBlockKV, kUnaligned>(gdV, v_tile(), 0, params.aligned);
    }

 private:
    static FLASH_DEVICE auto& mask_storage() { return shared_storage<SharedStorage>().mask; }

    FLASH_DEVICE QTileList<kMaskBlock / kBlockQ> q_tile_list(int first_key) const
        requires kMayHaveMask
    {
        return {params, sequence, q_tiles_seeing(first_key), head_k, first_key / kMaskBlock};
    }

    // Eight keys. Rows of dbias are a multiple of 16 bytes.
    FLASH_DEVICE void store_dbias_chunk(int head, int query, int key, const uint4& x) const {
        if (query >= params.seqlen_q || key >= params.seqlen_k) return;
        const int64_t row = int64_t{sequence.batch * params.heads_q + head} * params.seqlen_q;
        *reinterpret_cast<uint4*>(static_cast<Element*>(params.dbias) +
                                  (row + query) * params.seqlen_k + key) = x;
    }

    // The warp's first query within the Q tile, while it computes P^T and dS^T.
    FLASH_DEVICE int warp_query() const { return warp_d * Scores::kCols; }

    FLASH_DEVICE ScoreFunction<Element, Rows::kKeys, kOptions> score_function(int head_q) const {
        return {params, sequence, head_q};
    }

    template <class Tile>
    FLASH_DEVICE void load_rows(uint32_t shared, const TensorView& view, int cols,
                                const Walk& walk) const {
        const auto tile =
            query_rows<const Element>(view, sequence, walk.head, walk.q_tile() * kBlockQ, cols);
        load_tile<Tile, kThreads, kUnaligned>(shared, tile, params.aligned);
    }
};

// All passes of a backward whose main one is kKernel.
template <class Tile, auto kKernel>
cudaError_t launch_backward(const BackwardParams& params, int64_t ctas, cudaStream_t stream) {
    cudaError_t status = backward_preprocess(params, kPreprocessRows, stream);
    if (status == cudaSuccess)
        status = launch_kernel<kKernel>(ctas, Tile::kThreads, Tile::kSharedBytes, params, stream);
    return status == cudaSuccess ? postprocess_dq<Tile>(params, stream) : status;
}

}  // namespace flash_ext
