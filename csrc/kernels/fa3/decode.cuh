// Decoding: few queries, whose time goes to reading K and V (Flash-Decoding, Dao et al. 2023).
//
// The rows of a tile are queries, or the heads of a group (packed GQA, QueryTiles): 16, the fewest
// that tensor cores take, or a few times as many. It is computed as in fa2, by mma.sync. Its keys
// are in splits, each the work of a CTA; the CTAs of a tile are a thread-block cluster.
//
// Warps share nothing until the end. The warps of a CTA take its blocks of 16 keys in turn. Each
// has its own pipeline of K and V in shared memory, filled by cp.async, and its own softmax: so the
// loop has no barrier, and a warp waits for nothing but its own loads. Then the results are
// combined, as in combine.cuh,
//
//     m = max_p m_p,    l = sum_p 2^(m_p - m) l_p,    O = sum_p 2^(m_p - m) O_p / l
//
// over the warps through shared memory, and over the splits through distributed shared memory,
// where each CTA takes a share of the elements. More splits than a cluster has are several
// clusters: their results go through global memory, and of the CTAs with the same share the one
// that is last combines them. So there is no second kernel.
//
// K and V of 8 bits, beside Q of 16, halve the bytes. A warp's blocks are then of 32 keys, as many
// bytes as 16 have in 16 bits. The matmuls are of halves: K and V become halves in registers
// (tile/bytes.cuh), and Q before the loop; keys are their rows (decode_blocks.cuh). Sums times Q's
// and K's factors are the scores; V's descales come at the end. All calls with such inputs run
// here, with many Q tiles, too.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/fa3/decode_blocks.cuh"
#include "kernels/fa3/decode_loads.cuh"
#include "kernels/fa3/decode_params.cuh"
#include "kernels/fa3/decode_scales.cuh"
#include "kernels/fa3/tile_by_length.cuh"
#include "problem/score.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "schedule/epoch_counter.cuh"
#include "schedule/split_kv.cuh"
#include "schedule/tile_numbers.cuh"
#include "schedule/tile_order.cuh"

namespace flash_ext {

// Key: of K and V in memory. Element: of the matmuls; of Q and the output unless Key has 8 bits.
template <class Element, class Key, int kHeadDim, int kHeadDimV, OptionSet kOptions,
          tuning::Fa3DecodeShape kTuning>
struct Fa3Decode {
    static constexpr bool kBytes = sizeof(Key) == 1;
    static constexpr int kRows = kTuning.rows;
    static constexpr int kKeys = 32 / sizeof(Key);  // that a warp takes at a time
    static constexpr int kWarps = kTuning.warps;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kStages = kTuning.stages;
    static constexpr int kCtasPerSm = kTuning.ctas_per_sm;
    static constexpr bool kByLength = kTuning.by_length;
    static constexpr bool kPages = contains(kOptions, OptionSet::kPages);

    using QTile =
        std::conditional_t<kBytes, BInOrder<kRows, kHeadDim>, SharedTile<Element, kRows, kHeadDim>>;
    using KTile = SharedTile<Key, kKeys, kHeadDim>;
    using VTile = SharedTile<Key, kKeys, kHeadDimV>;
    using Factors = std::conditional_t<kBytes, ScoreFactors<kRows>, NoScoreFactors>;
    static constexpr int kRowsOfGroup = kBytes ? 8 : 16;  // whose results are combined at a time

    // A result over some of the keys: O not divided by the sums, row maxima and sums.
    template <int kPartialRows>
    struct PartialOf {
        float out[kPartialRows][kHeadDimV + 8];
        float max[kPartialRows];
        float sum[kPartialRows];
    };
    using Partial = PartialOf<kRows>;
    static_assert(sizeof(Partial) == 4 * kRows * decode_row_floats(kHeadDimV));
    struct Stage {
        char k[KTile::kBytes];
        char v[VTile::kBytes];
    };
    struct None {};
    struct SharedStorage {
        union {
            Stage stages[kWarps][kStages];
            PartialOf<kRowsOfGroup> of_warps[kWarps];  // after the loop
        };
        char q[QTile::kBytes];
        union {
            Factors factors;
            Partial of_split;  // after the loop
        };
        bool last;  // is this CTA the last one to store its share?
        // V's descales, of 8 bits. They are loaded with Q: at the end nothing would hide the wait.
        alignas(16) float of_v[kBytes ? kHeadDimV : 1];
        [[no_unique_address]] std::conditional_t<kByLength, TileByLength<kWarps, kKeys, kPages>,
                                                 None> found;
    };
    static_assert(!kBytes || kHeadDimV <= kThreads);
    static_assert((sizeof(SharedStorage) + 1024) * kCtasPerSm <= 228 * 1024);

    const Fa3DecodeParams& params;
    SharedStorage& storage = shared_storage<SharedStorage>();
    Sequence sequence;
    int head, head_k;  // of Q, the first one of the tile, and of K and V
    int first_query;   // of the tile

    FLASH_DEVICE explicit Fa3Decode(const Fa3DecodeParams& p) : params(p) {
        const int number = tile_number();
        const int index = number / p.by_heads;
        const SequenceTile tile = find_tile(index);
        sequence = tile.sequence;
        head = number - index * p.heads;
        head_k = head;
        if (p.pack_gqa_log2 > 0) {
            head *= p.group;
        } else {
            head_k = head / p.by_group;
        }
        first_query = tile.tile * queries();
    }

    // The tile with this index among those of a head, of all sequences. Varlen sequences are one
    // batch. A head of a dense batch has one tile, unless K and V have 8 bits.
    FLASH_DEVICE SequenceTile find_tile(int index) const {
        if constexpr (kByLength)
            return storage.found.find(params, params.by_length, index, queries());
        const PowerOfTwo by_queries{std::countr_zero(unsigned{kRows}) - params.pack_gqa_log2};
        const bool varlen = params.cu_seqlens_q != nullptr;
        const int batch = varlen ? 0 : kBytes ? index / params.by_tiles : index;
        return tile_of<true, Rows::kQueries, kPages>(params, batch, index - batch * params.tiles,
                                                     by_queries);
    }

    // --- The splits of the tile: each a CTA of one of its clusters ---

    FLASH_DEVICE int clusters() const {
        if constexpr (kByLength) return storage.found.work.clusters;
        return params.clusters;
    }
    FLASH_DEVICE int ctas() const {
        return kBytes ? params.cluster : min_of(params.num_splits, kMaxClusterSplits);
    }
    FLASH_DEVICE int splits() const { return kByLength ? clusters() * ctas() : params.num_splits; }
    // By length, the number of the cluster.
    FLASH_DEVICE int tile_number() const {
        if constexpr (kByLength) return ptx::cluster_id();
        return ptx::cluster_id() / params.by_clusters;
    }
    FLASH_DEVICE int cluster() const {
        if constexpr (kByLength) return storage.found.work.cluster;
        return ptx::cluster_id() - tile_number() * clusters();
    }
    FLASH_DEVICE int split() const { return cluster() * ctas() + ptx::cta_rank(); }
    FLASH_DEVICE VisibleTiles split_of_tile(const VisibleTiles& seen) const {
        if constexpr (kByLength) return split_of(seen, split(), splits());
        return split_of(seen, split(), splits(), params.by_splits);
    }

    // --- The rows of the tile: queries, or the heads of a group ---

    FLASH_DEVICE int queries() const { return kRows >> params.pack_gqa_log2; }
    FLASH_DEVICE int query_of(int row) const { return first_query + (row >> params.pack_gqa_log2); }
    FLASH_DEVICE int head_of(int row) const {
        return head + (row & ((1 << params.pack_gqa_log2) - 1));
    }
    // All valid rows are before this one.
    FLASH_DEVICE int rows() const {
        return min_of(sequence.seqlen_q - first_query, queries()) << params.pack_gqa_log2;
    }
    FLASH_DEVICE bool is_valid(int row) const {
        return row < rows() && (params.pack_gqa_log2 == 0 || head_of(row) < head + params.group);
    }

    // --- Loads ---

    FLASH_DEVICE void load_q() const {
        constexpr int kPerRow = kHeadDim / QTile::kChunk;
        for (int i = threadIdx.x; i < kRows * kPerRow; i += kThreads) {
            const int row = i / kPerRow, col = i % kPerRow * QTile::kChunk;
            const auto* source = row_pointer<const Element>(
                params.q, sequence.batch, sequence.q_begin + query_of(row), head_of(row));
            ptx::cp_async_16(ptx::shared_address(storage.q) + QTile::offset(row, i % kPerRow),
                             source + col, is_valid(row) && col < params.head_dim);
        }
    }

    // The same in halves, with a factor of each row.
    template <class Given>
    FLASH_DEVICE void load_q_as_halves() const {
        rows_to_halves<QTile, kWarps, Given>(
            ptx::shared_address(storage.q), storage.factors.of_rows, params.head_dim,
            [&](int row) {
                return row_pointer<const __half>(params.q, sequence.batch,
                                                 sequence.q_begin + query_of(row), head_of(row));
            },
            [&](int row) { return is_valid(row); });
    }

    // --- Attention over the keys of a warp ---

    template <class Softmax>
    FLASH_DEVICE Softmax begin_softmax() const {
        Softmax softmax;
        if (params.sink == nullptr || split() > 0 || warp_id() > 0 || !sequence.is_owned(params))
            return softmax;
        Softmax::for_each_row([&](int m, int i, int row) {
            if (is_valid(row)) softmax.begin_with(params.sink[head_of(row)] * kLog2e, m, i);
        });
        return softmax;
    }

    // ptxas 13.0 and 13.2: what follows from these two, and from first_query, would be spilled over
    // the loop of 8 bits.
    FLASH_DEVICE Sequence sequence_not_hoisted() const {
        Sequence s = sequence;
        if constexpr (kBytes) {
            s.batch = ptx::not_hoisted(s.batch);
            s.seq_idx = ptx::not_hoisted(s.seq_idx);
            s.seqlen_q = ptx::not_hoisted(s.seqlen_q);
        }
        return s;
    }

    // Applies the options and the mask.
    template <class Blocks>
    FLASH_DEVICE void finish_scores(typename Blocks::Scores& rS, const VisibleTiles& blocks, int i,
                                    Interval full) const {
        const Sequence s = sequence_not_hoisted();
        const BandMask mask = mask_of(params, s);
        const int first = kBytes ? ptx::not_hoisted(first_query) : first_query;
        const Interval keys = tile_interval(blocks.tile(i), kKeys);
        if (params.changes_scores) [[unlikely]]  // packed GQA has no ALiBi, which uses first_query
            Blocks::template apply_options<tuning::kFa3Scores>(rS, params, s, head, first_query,
                                                               keys.begin);
        const bool is_full = Blocks::kSpareRegisters
                                 ? full.begin <= i && i < full.end
                                 : mask.is_full({first, first + queries()}, keys);
        if (!is_full)
            Blocks::mask(rS, keys.begin, [&](int row) { return mask.key_range(query_of(row)); });
    }

    template <class Blocks>
    FLASH_DEVICE void attend(typename Blocks::Output& rO, typename Blocks::Softmax& softmax) const {
        const BandMask mask = mask_of(params, sequence);
        const VisibleTiles seen =
            VisibleTiles::of_queries(mask, {first_query, first_query + queries()}, kKeys);
        const VisibleTiles blocks = split_of_tile(seen);
        int block = blocks.begin + warp_id();
        constexpr bool kSpare = Blocks::kSpareRegisters;
        typename KeyLoadsOf<Key, kOptions, kWarps, KTile, VTile, kSpare>::Type loads(
            params, decode_keys<Key, kOptions>(params, sequence), blocks, block, head_k);
        auto& stages = storage.stages[warp_id()];
        constexpr int kPending = 2 * kStages - 1;  // groups after the one that is needed
        if constexpr (!kBytes) load_q();           // belongs to the first group
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
            loads.next_k(stages[i].k);
            loads.next_v(stages[i].v);
        }
        if constexpr (kBytes) {
            if (threadIdx.x == 0)
                storage.factors.of_keys = HeadDescales::of(params.k_descale, sequence, head_k);
            const int col = threadIdx.x;
            const float of_v = col < params.head_dim_v
                                   ? HeadDescales::of(params.v_descale, sequence, head_k).at(col)
                                   : 0.f;
            if (params.element_type == ElementType::kFloat16) {
                load_q_as_halves<__half>();
            } else {
                load_q_as_halves<__nv_bfloat16>();
            }
            if (col < kHeadDimV) storage.of_v[col] = of_v;
        }
        ptx::cp_async_wait<kPending>();
        __syncthreads();  // all of Q has landed
        const Blocks computation(ptx::shared_address(storage.q));
        const Factors& factors = storage.factors;
        [[maybe_unused]] const auto of_keys = factors.of_keys;
        const Interval full =
            VisibleTiles::full_for(mask, {first_query, first_query + queries()}, kKeys);

        for (int stage = 0; block < blocks.end; block += kWarps) {
            typename Blocks::Scores rS;
            rS.clear();
            const int first_key = blocks.tile(block) * kKeys;
            float k_factor = 1.f;
            if constexpr (kSpare) k_factor = of_keys.of_key(first_key);
            ptx::cp_async_wait<kPending>();
            __syncwarp();  // the loads of all lanes have landed
            computation.multiply_k(rS, ptx::shared_address(stages[stage].k));
            __syncwarp();  // all lanes have read K
            loads.next_k(stages[stage].k);
            if constexpr (!kSpare) k_factor = factors.of_block(first_key);
            factors.template apply<typename Blocks::Softmax>(rS, k_factor);
            finish_scores<Blocks>(rS, blocks, block, full);
            softmax.update(rS, rO, params.exponent_scale);
            ptx::cp_async_wait<kPending>();
            __syncwarp();
            Blocks::multiply_v(rO, rS, ptx::shared_address(stages[stage].v));
            __syncwarp();
            loads.next_v(stages[stage].v);
            if (++stage == kStages) stage = 0;
        }
        softmax.finish();
    }

    // --- Results ---

    // This warp's results of a group of rows.
    template <class Blocks>
    FLASH_DEVICE void store_partial(const typename Blocks::Output& rO,
                                    const typename Blocks::Softmax& softmax, int m) const {
        auto& partial = storage.of_warps[warp_id()];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = Blocks::row_of_lane(i);
            if (kRowsOfGroup * m + row >= rows()) continue;
            if (Blocks::is_first_of_row()) {
                partial.max[row] = softmax.row_max[m][i];
                partial.sum[row] = softmax.row_sum[m][i];
            }
            Blocks::for_each_pair_of_row(rO, m, i, [&](float x, float y, int col) {
                *reinterpret_cast<float2*>(&partial.out[row][col]) = {x, y};
            });
        }
    }

    // Four columns of a row.
    struct Four {
        float max, sum;
        float4 out;
    };
    template <class SomePartial>
    static FLASH_DEVICE Four load_four(const SomePartial& partial, int row, int col) {
        return {partial.max[row], partial.sum[row],
                *reinterpret_cast<const float4*>(&partial.out[row][col])};
    }
    static FLASH_DEVICE void store_four(Partial& partial, int row, int col, const Four& four) {
        *reinterpret_cast<float4*>(&partial.out[row][col]) = four.out;
        if (col > 0) return;
        partial.max[row] = four.max;
        partial.sum[row] = four.sum;
    }

    // Combines `parts` partial results, kMost at most, from load(part). Those that do not exist
    // are zeros: 0 times an existing one would be NaN where V is infinite.
    template <int kMost, class Load>
    static FLASH_DEVICE Four combine(int count, Load load) {
        Four partial[kMost];
#pragma unroll
        for (int i = 0; i < kMost; ++i)  // all loads before their first use
            partial[i] = i < count ? load(i) : Four{-INFINITY, 0.f, {}};
        Four all{-INFINITY, 0.f, {}};
#pragma unroll
        for (int i = 0; i < kMost; ++i) all.max = fmaxf(all.max, partial[i].max);
        const float finite = finite_max(all.max);
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            const float weight = ptx::ex2(partial[i].max - finite);
            all.sum += weight * partial[i].sum;
            all.out.x += weight * partial[i].out.x;
            all.out.y += weight * partial[i].out.y;
            all.out.z += weight * partial[i].out.z;
            all.out.w += weight * partial[i].out.w;
        }
        return all;
    }

    // visit(row, column) for this thread's groups of four columns of rows 0 to `rows` - 1. `shares`
    // CTAs share them, so that a warp has neighbors.
    template <class Visit>
    FLASH_DEVICE void for_each_four(int rows, int share, int shares, Visit visit) const {
        constexpr int kPerRow = kHeadDimV / 4;
        for (int i = (warp_id() * shares + share) * 32 + lane_id(); i < rows * kPerRow;
             i += kThreads * shares)
            visit(i / kPerRow, i % kPerRow * 4);
    }

    // To the results of the split.
    FLASH_DEVICE void combine_warps(int m) const {
        constexpr int kGroup = kRowsOfGroup;
        for_each_four(min_of(rows() - kGroup * m, kGroup), 0, 1, [&](int row, int col) {
            const auto load = [&](int warp) { return load_four(storage.of_warps[warp], row, col); };
            store_four(storage.of_split, kGroup * m + row, col, combine<kWarps>(kWarps, load));
        });
    }

    // O / l and lse, to HBM.
    FLASH_DEVICE void store_result(int row, int col, const Four& all) const {
        if (!is_valid(row)) return;
        const Sequence s = sequence_not_hoisted();
        const float factor = all.sum == 0.f ? 0.f : 1.f / all.sum;
        const int query = query_of(row);
        using Softmax = OnlineSoftmax<16, (kBytes ? 7 : 0)>;
        if (col == 0)
            params.lse[statistics_offset(params, s, head_of(row)) + query] =
                Softmax::lse_of(all.max, all.sum);
        if (col >= params.head_dim_v) return;  // a multiple of 8
        auto* target = row_pointer<Element>(params.out, s.batch, s.q_begin + query, head_of(row));
        const auto store = [&]<class Out>(Out, float4 x) {
            *reinterpret_cast<uint2*>(target + col) = {ptx::pack<Out>(x.x, x.y),
                                                       ptx::pack<Out>(x.z, x.w)};
        };
        float4 x{all.out.x * factor, all.out.y * factor, all.out.z * factor, all.out.w * factor};
        if constexpr (kBytes) {
            descale(x, col);
            if (params.out_type == ElementType::kBFloat16) return store(__nv_bfloat16{}, x);
        }
        store(Element{}, x);
    }

    // Applies the descales of V, of four columns.
    FLASH_DEVICE void descale(float4& x, int col) const {
        const float4 of_v = *reinterpret_cast<const float4*>(&storage.of_v[col]);
        x.x *= of_v.x;
        x.y *= of_v.y;
        x.z *= of_v.z;
        x.w *= of_v.w;
    }

    // This CTA's share of the elements, over the splits of the cluster.
    FLASH_DEVICE void combine_splits() const {
        const uint32_t of_split = ptx::shared_address(&storage.of_split);
        for_each_four(rows(), ptx::cta_rank(), ctas(), [&](int row, int col) {
            const Four all = combine<kMaxClusterSplits>(ctas(), [&](int cta) {
                const uint32_t partial = ptx::address_in_cta(of_split, cta);
                Four x;
                ptx::ld_cluster(x.max, partial + offsetof(Partial, max) + 4 * row);
                ptx::ld_cluster(x.sum, partial + offsetof(Partial, sum) + 4 * row);
                ptx::ld_cluster(x.out, partial + row * sizeof(Partial::out[0]) + 4 * col);
                return x;
            });
            if (clusters() == 1) {
                store_result(row, col, all);
            } else {
                store_four(of_clusters()[cluster()], row, col, all);
            }
        });
    }

    // --- Several clusters ---

    FLASH_DEVICE Partial* of_clusters() const {
        auto* all = reinterpret_cast<Partial*>(params.o_partial);
        if constexpr (kByLength) return all + first_stored();
        return all + int64_t{tile_number()} * clusters();
    }
    // By length: the index of the tile's first cluster in memory.
    FLASH_DEVICE int64_t first_stored() const {
        return int64_t{tile_number() % params.heads} * params.by_length.most() +
               storage.found.work.stored;
    }
    // How many clusters have stored this CTA's share.
    FLASH_DEVICE EpochCounter stored() const {
        int64_t tile = 0;
        if constexpr (kByLength) {
            tile = first_stored();
        } else {
            tile = tile_number();
        }
        return {params.counters + tile * ctas() + ptx::cta_rank(), params.epoch};
    }

    // By length there are any number of clusters, of which some are combined at a time.
    template <class Load>
    FLASH_DEVICE Four combine_clusters_of(Load load) const {
        if constexpr (kByLength) {
            constexpr int kAtOnce = 8;
            Four all{-INFINITY, 0.f, {}};
#pragma unroll 1
            for (int first = 0; first < clusters(); first += kAtOnce)
                all = combine<kAtOnce + 1>(min_of(clusters() - first, kAtOnce) + 1, [&](int i) {
                    return i == 0 ? all : load(first + i - 1);
                });
            return all;
        } else {
            return combine<kMaxClusters>(clusters(), load);
        }
    }

    // The share of this CTA, over the clusters, if it is the last one to store it.
    FLASH_DEVICE void combine_clusters() const {
        bool& last = storage.last;
        __syncthreads();  // all threads have stored
        if (threadIdx.x == 0) last = stored().template next<true>(clusters()) == clusters() - 1;
        __syncthreads();
        if (!last) return;
        const Partial* partials = of_clusters();
        for_each_four(rows(), ptx::cta_rank(), ctas(), [&](int row, int col) {
            const auto load = [&](int i) { return load_four(partials[i], row, col); };
            store_result(row, col, combine_clusters_of(load));
        });
    }

    // The results of this split, in its of_split.
    template <class Blocks>
    FLASH_DEVICE void compute() const {
        typename Blocks::Output rO;
        rO.clear();
        auto softmax = begin_softmax<typename Blocks::Softmax>();
        attend<Blocks>(rO, softmax);
        ptx::cp_async_wait<0>();
#pragma unroll
        for (int m = 0; m < Blocks::kRows / kRowsOfGroup; ++m) {
            if (kRowsOfGroup * m >= rows()) break;
            __syncthreads();  // no stage, or no result of a group before, is in use
            store_partial<Blocks>(rO, softmax, m);
            __syncthreads();
            combine_warps(m);
        }
    }

    FLASH_DEVICE void run() const {
        if (first_query >= sequence.seqlen_q) return;  // a padding tile, of all CTAs of the cluster
        if (clusters() > 1 && threadIdx.x == 0) stored().start();
        if constexpr (!kBytes) {
            compute<QueriesAsRows<Element, QTile, KTile, VTile>>();
        } else if (kRows == 16 && rows() <= 8) {
            compute<QueriesAsColumns<QTile, KTile, VTile, 8>>();
        } else {
            compute<QueriesAsColumns<QTile, KTile, VTile, kRows>>();
        }
        ptx::cluster_sync();
        combine_splits();
        if (clusters() > 1) combine_clusters();
        ptx::cluster_sync();  // no CTA ends before others have read its result
    }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    fa3_decode_kernel(const __grid_constant__ Fa3DecodeParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a
    Kernel(params).run();
#else
    __trap();  // never launched on other GPUs
#endif
}

// kRow: of the tuning table.
template <class Element, class Key, tuning::Fa3DecodeRow kRow>
cudaError_t launch_decode(const ForwardParams& call, const ForwardKernel& kernel,
                          cudaStream_t stream) {
    const Fa3DecodeParams params = decode_params(call, kernel);
    using enum tuning::Fa3DecodeTile;
    return dispatch_options<kRow.options>(kernel.options, [&](auto options) {
        return dispatch<kFewRows, kManyKeys, kManyRows, kByLength>(
            *kernel.decode_tile, [&](auto tile) {
                using Kernel = Fa3Decode<Element, Key, kRow.head_dims.qk, kRow.head_dims.v,
                                         options.value, tuning::fa3_decode_shape(kRow, tile)>;
                return launch_kernel<fa3_decode_kernel<Kernel>>(
                    work_tile_count(params.tile_order), Kernel::kThreads,
                    sizeof(typename Kernel::SharedStorage), params, stream,
                    {.cluster = params.cluster});
            });
    });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_decode(const ForwardParams& params, const ForwardKernel& kernel,
                       cudaStream_t stream) {
    constexpr auto kRow = tuning::row_of(tuning::kFa3Decode, {kHeadDim, kHeadDimV});
    return dispatch_element(params.element_type, [&](auto element) {
        using Element = decltype(element);
        return launch_decode<Element, Element, kRow>(params, kernel, stream);
    });
}

template <int kHeadDim, int kHeadDimV>
cudaError_t fa3_decode_8_bits(const ForwardParams& params, const ForwardKernel& kernel,
                              cudaStream_t stream) {
    constexpr auto kRow = tuning::row_of(tuning::kFa3Decode8Bits, {kHeadDim, kHeadDimV});
    return params.key_type == ElementType::kInt8
               ? launch_decode<__half, Int8, kRow>(params, kernel, stream)
               : launch_decode<__half, Float8, kRow>(params, kernel, stream);
}

}  // namespace flash_ext
