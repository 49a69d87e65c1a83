// All models of time and of memory by which plans choose: tiles, splits, parts, packed GQA, the
// order of tiles. Measured constants are from docs/notes, constants of single tiles are in
// tuning.h.
//
// The unit of time is a block: what a CTA takes for the scores of 64 rows and 128 keys, in the pass
// and kernel in question. Only times of one function are compared.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "plan/call.h"
#include "plan/tuning_backward.h"
#include "plan/workspace_rows.cuh"
#include "problem/mask.cuh"
#include "problem/params.h"
#include "problem/sequences.cuh"
#include "schedule/dbias_tiles.cuh"
#include "schedule/split_kv.cuh"
#include "schedule/tile_numbers.cuh"
#include "tile/host_device.h"

namespace flash_ext {

// How often a GPU that works on `at_once` tiles at a time is filled. Equal tiles run in whole
// waves; others, long ones first, fill it to the end.
inline double waves(double tiles, double at_once, bool equal) {
    const double filled = tiles / at_once;
    return equal ? std::ceil(filled) : filled;
}

inline HeadDims head_dims(const AttentionParams& params) {
    return {params.head_dim, params.head_dim_v};
}

// The query heads that share keys; 1 without any.
inline int group_or_one(const AttentionParams& params) {
    return params.heads_q / max_of(params.heads_k, 1);
}

// --- The order of tiles ---

// A row of K and one of V, or of Q and of dO.
inline int64_t row_pair_bytes(const AttentionParams& params, HeadDims dims) {
    return int64_t{element_bytes(params.key_type)} * (dims.qk + dims.v);
}
// The keys that have as many bytes in 16 bits.
inline int keys_of_16_bits(const AttentionParams& params, int keys) {
    return ceil_div(keys * element_bytes(params.key_type), 2);
}
// What a query of a backward has in L2: also its row of dQ, in float32.
inline int64_t row_pair_bytes_with_dq(const AttentionParams& params, HeadDims dims) {
    return row_pair_bytes(params, dims) + int64_t{4} * dims.qk;
}

// The heads of an L2 swizzle group, from the bytes of the operands that the tiles of a head share.
// A group has tiles for about `l2_waves` waves of CTAs (one where heads have few tiles), and for
// half as many at least: with fewer, its last tiles would leave much of the GPU idle.
//
// Where a head has few tiles, memory is the limit, and not how well the tiles of a group fill the
// GPU. Groups are then smaller, presumably since each half of an H100's L2 serves half of the SMs,
// so what all SMs read takes room in both (docs/notes/022-short-sequences.md).
inline TileOrder make_tile_order(int tiles, int heads, int batch, bool tiles_differ,
                                 int64_t bytes_per_head, int ctas_per_sm, const GpuModel& gpu,
                                 int l2_waves = 2) {
    constexpr int kFewTilesPerHead = 8;
    constexpr int kWave = 128;  // of an H100, as measured
    const bool few_tiles = tiles <= kFewTilesPerHead;
    const int64_t l2_group_tiles = kWave * (few_tiles ? 1 : l2_waves) * ctas_per_sm;
    const int64_t total_heads = static_cast<int64_t>(heads) * batch;
    const int64_t l2_share = few_tiles ? gpu.l2_share / 4 : gpu.l2_share;
    const int64_t fitting = max_of(l2_share / max_of<int64_t>(bytes_per_head, 1),
                                   ceil_div<int64_t>(l2_group_tiles, max_of(tiles, 1)));
    // Groups of equal size: a small last one would leave much of the GPU idle, too.
    const int64_t groups = max_of<int64_t>(ceil_div(total_heads, fitting), 1);
    const int64_t l2_group_heads =
        tiles_differ ? max_of<int64_t>(ceil_div(total_heads, groups), 1) : 1;
    return {tiles, heads, batch, static_cast<int>(l2_group_heads)};
}

// Varlen under a mask needs larger groups: most of a group's work may belong to one long
// sequence, whose longest tiles are a large part of the whole run.
constexpr int l2_group_waves(const AttentionParams& params, bool masked) {
    return masked && params.cu_seqlens_q != nullptr ? 4 : 2;
}

// Under a mask, where heads have few tiles and nearly every CTA of a persistent grid has one head,
// it takes all tiles of that head, so that the first one brings K and V to L2 for the others. All
// heads are then worked on at the same time: not where their K and V exceed half of an H100's L2.
// Without a mask it gains little, and loses where K and V are not in L2 before (note 022).
inline TileOrder with_whole_heads(TileOrder order, int64_t bytes_per_head, const GpuModel& gpu) {
    constexpr int kMaxTilesAtOnce = 3;
    const int64_t heads = int64_t{order.heads} * order.batch;
    if (order.tiles > 1 && order.tiles <= kMaxTilesAtOnce && heads <= gpu.sms &&
        8 * heads >= 7 * int64_t{gpu.sms} && heads * bytes_per_head <= gpu.l2_share / 4 * 3) {
        order.l2_group_heads = 1;
        order.tiles_at_once = order.tiles;
    }
    return order;
}

// Each Q tile with all splits of its keys. The tiles of a head share K and V.
inline TileOrder forward_tile_order(const AttentionParams& params, const MaskSummary& mask,
                                    const QueryTiles& tiles, HeadDims dims, int ctas_per_sm,
                                    const GpuModel& gpu, int splits = 1,
                                    bool may_take_whole_heads = false) {
    const bool masked = mask.hides_later;
    const int64_t bytes_per_head =
        row_pair_bytes(params, dims) * params.seqlen_k * params.heads_k / max_of(tiles.heads, 1);
    TileOrder order =
        make_tile_order(tile_numbers(params, params.seqlen_q, tiles.queries), tiles.heads,
                        tensor_batches(params), masked || params.cu_seqlens_q != nullptr,
                        bytes_per_head, ctas_per_sm, gpu, l2_group_waves(params, masked));
    if (may_take_whole_heads && masked && !is_varlen(params) && splits == 1)
        order = with_whole_heads(order, bytes_per_head, gpu);
    order.tiles *= splits;
    return order;
}

// With a mask of tiles the host does not know how long a row is, and the longest one of a head may
// take longer than all the rest of its L2 swizzle group: in the last group other SMs would wait for
// it. So the longest rows of all heads come first: two of each, since more heads at a time than a
// group has cost time.
inline int longest_first(const TileOrder& order) {
    constexpr int kRows = 2;
    return order.tiles_at_once > 1 ? 0 : min_of(kRows, order.tiles);
}

// The bytes of Q, dO and dQ that the KV tiles of a head share.
inline int64_t backward_bytes_per_head(const BackwardParams& params, HeadDims dims) {
    return row_pair_bytes_with_dq(params, dims) * params.seqlen_q * group_of(params);
}

// The order of KV tiles, if dQ is summed in HBM. In deterministic mode the tiles of a head add to a
// Q tile in turn, so each begins a few iterations after the one before. The more of a head run at
// the same time, the longer they wait at first, and under a mask, where the one before has more
// queries that come first; the fewer, the more heads' Q, dO and dQ are to fit in L2. Measured:
// docs/notes/031-options.md.
inline TileOrder backward_tile_order(const BackwardParams& params, const MaskSummary& mask,
                                     int block_kv, HeadDims dims, int ctas_per_sm,
                                     const GpuModel& gpu) {
    const bool differ = mask.is_masked() || params.cu_seqlens_q != nullptr;
    TileOrder order =
        make_tile_order(tile_numbers(params, params.seqlen_k, block_kv), params.heads_k,
                        tensor_batches(params), differ, backward_bytes_per_head(params, dims),
                        ctas_per_sm, gpu, l2_group_waves(params, mask.is_masked()));
    if (params.deterministic) {
        const int in_turn = differ ? 4 : 8;  // tiles of a head
        const int heads = order.heads * order.batch;
        const int groups = max_of((heads * in_turn + gpu.sms / 2) / gpu.sms, 1);
        order.l2_group_heads = max_of(ceil_div(heads, groups), 1);
    }
    return order;
}

// The first KV tile of a head should be complete when its other tiles begin. So as many tiles come
// in between as there are CTAs, and more under a mask, where the first tile has 2 tiles /
// (tiles + 1) times as many iterations as the mean. 0 in deterministic mode and with varlen, for
// long sequences, for which zeros cost little, and where the heads in between do not fit in L2
// (note 010) or are more than a quarter of all (an estimate).
inline int lead_of(const BackwardParams& params, const MaskSummary& mask, const TileOrder& order,
                   HeadDims dims, const GpuModel& gpu) {
    constexpr int kMaxTiles = 16;
    if (params.deterministic || params.cu_seqlens_q != nullptr || order.tiles < 2 ||
        order.tiles > kMaxTiles)
        return 0;
    const int lead =
        mask.is_masked() ? ceil_div(2 * gpu.sms, order.tiles + 1) : ceil_div(gpu.sms, order.tiles);
    // On an H100 33.5 MiB, for leads of 33 heads of 1 MiB each (132 SMs, 4 tiles a head), which the
    // share for whole groups of heads would exclude.
    const bool fits = lead * backward_bytes_per_head(params, dims) <= gpu.l2_share / 64 * 67;
    return fits && 4 * lead <= order.heads * order.batch ? lead : 0;
}

// --- Tiles of FA3's forward ---

// The time of a forward with such tiles, the empty rows and keys of both included.
inline double forward_time(const AttentionParams& params, const MaskSummary& mask,
                           const tuning::Fa3ForwardShape& tile, const tuning::Fa3Costs& costs,
                           const GpuModel& gpu) {
    const int rows = 64 * tile.consumers;
    const bool equal = !is_varlen(params) && !mask.is_masked();
    const tuning::Fa3Cost cost = equal ? costs.alike : costs.differ;
    const int64_t heads = int64_t{params.heads_q} * params.batch;
    const int64_t keys = equal
                             ? ceil_div(mean_keys(params), tile.block_kv) * tile.block_kv
                             : min_of(mean_keys(params), mask.keys_seen + rows) + tile.block_kv / 2;
    const auto tiles = static_cast<double>(heads * ceil_div(mean_queries(params), rows));
    return cost.percent * waves(tiles, gpu.sms, equal) * rows *
           static_cast<double>(keys + cost.overhead) / (100 * 64 * 128);
}

// The tiles of a call without splits: those that take the least time. few_tiles: do the smallest Q
// tiles fill the GPU no more than once?
inline tuning::Fa3ForwardTile fa3_forward_tile(HeadDims dims, const AttentionParams& params,
                                               const MaskSummary& mask, bool few_tiles,
                                               const GpuModel& gpu) {
    using enum tuning::Fa3ForwardTile;
    const auto time = [&](const tuning::Fa3ForwardShape& tile, const tuning::Fa3Costs& costs = {}) {
        return forward_time(params, mask, tile, costs, gpu);
    };
    if (has_8_bits(params)) {
        const tuning::Fa3ForwardFp8Row row = row_of(tuning::kFa3ForwardFp8, dims);
        // With fewer rows a row and key takes longer (docs/notes/016-fp8.md, d 64).
        constexpr tuning::Fa3Costs kCosts{.alike = {115}, .differ = {115}};
        const bool small_q = row.has_tile(tuning::kVarlen, kSmallQ) &&
                             (few_tiles || time(row.small_q, kCosts) < time(row.usual));
        return small_q ? kSmallQ : kUsual;
    }
    const tuning::Fa3ForwardRow row = row_of(tuning::kFa3Forward, dims);
    const double usual = time(row.usual);
    const double small_q = time(row.small_q, row.small_q_costs);
    const double long_keys = row.has_tile(options_of(params), kLongKeys)
                                 ? time(row.long_keys, row.long_keys_costs)
                                 : usual;
    if (few_tiles || small_q < min_of(usual, long_keys)) return kSmallQ;
    return long_keys < usual ? kLongKeys : kUsual;
}

// --- Packed GQA ---

// Of the least power of two that is not below x.
constexpr int log2_up(int x) { return x < 2 ? 0 : std::bit_width(unsigned(x - 1)); }

// Tiles of block_q rows. GQA is packed if that at least halves their number and saves more bytes of
// K and V than its results cost, which are written in float32 and read again (combine.cuh).
inline QueryTiles query_tiles(const AttentionParams& params, const MaskSummary& mask, int block_q,
                              bool may_pack_gqa) {
    const QueryTiles one_head{params.heads_q, block_q};
    const int group = group_or_one(params);
    if (!may_pack_gqa || group < 2 || group > block_q) return one_head;
    const int pack_gqa_log2 = max_of(log2_up(group), 3);  // a load takes eight rows
    const QueryTiles packed{params.heads_k, block_q >> pack_gqa_log2, pack_gqa_log2};
    const int64_t many = tile_count(params, one_head);
    const int64_t few = tile_count(params, packed);
    const int64_t saved_bytes =
        (many - few) * mask.keys_seen * row_pair_bytes(params, head_dims(params));
    const int64_t result_bytes = statistics_rows(params) * params.head_dim_v * 8;
    return 2 * few <= many && result_bytes <= saved_bytes ? packed : one_head;
}

// Tiles for few queries: of up to block_q rows, which hold all queries and the heads of their
// group. None (0 heads) where there are more. With varlen sequences have one query, or some of them
// none: otherwise some may be long.
inline QueryTiles few_query_tiles(const AttentionParams& params, int block_q, bool may_pack_gqa) {
    const int group = may_pack_gqa ? group_or_one(params) : 1;
    const bool varlen = params.cu_seqlens_q != nullptr;
    const int pack_gqa_log2 = log2_up(group);
    if (varlen && params.seqlen_q > params.batch) return {};
    const int64_t queries = varlen ? 1 : max_of(params.seqlen_q, 1);
    if (queries << pack_gqa_log2 > block_q) return {};
    return {group > 1 ? params.heads_k : params.heads_q, block_q >> pack_gqa_log2, pack_gqa_log2};
}

// Tiles of block_q rows for any number of queries. Groups of heads are packed if a tile holds them.
inline QueryTiles any_query_tiles(const AttentionParams& params, int block_q, bool may_pack_gqa) {
    const int group = may_pack_gqa ? group_or_one(params) : 1;
    if (group < 2 || group > block_q) return {params.heads_q, block_q};
    const int pack_gqa_log2 = log2_up(group);
    return {params.heads_k, block_q >> pack_gqa_log2, pack_gqa_log2};
}

// --- Splits of the keys ---

// The number of splits of the keys of each Q tile, so that few tiles fill a GPU that works on
// `at_once` of them at a time (Flash-Decoding): the smallest number whose time is near the minimum.
// Splits have a least number of keys: the more queries have partial results and the more splits run
// one after another, the larger it is. `few_keys`: where there are few rows. Then fewer than
// kMinKeysToSplit keys are not split, since the combination takes longer than they do.
inline int num_splits(const AttentionParams& params, const MaskSummary& mask, int64_t tiles,
                      int heads_per_tile, int at_once, int few_keys) {
    constexpr int kMinKeysToSplit = 1024;
    const int queries = mean_queries(params);
    const int keys = mask.keys_seen;
    if (tiles == 0 || queries == 0 || keys == 0) return 1;
    const bool whole_tiles = int64_t{queries} * heads_per_tile >= 64;
    if (!whole_tiles && keys < kMinKeysToSplit) return 1;
    // The mean share of the keys that a tile sees: under a causal mask the first queries see few.
    const double share = whole_tiles && mask.hides_later
                             ? 1. - 0.5 * min_of(queries, keys) / max_of(queries, keys)
                             : 1.;
    const int least_keys = !whole_tiles ? few_keys : 2 * tiles <= at_once ? 1024 : 2048;
    const auto most =
        static_cast<int>(min_of<int64_t>(keys / least_keys, ceil_div<int64_t>(2 * at_once, tiles)));
    const auto time = [&](int splits) {
        const double price = whole_tiles && splits > 1 ? 1.3 : 1.;
        const double filled = waves(share * tiles * splits, at_once, share == 1.);
        return price * max_of(filled, 1.) / splits * keys / 128;
    };
    if (share * tiles >= at_once) return 1;
    double least = time(1);
    for (int splits = 2; splits <= most; ++splits) least = min_of(least, time(splits));
    int splits = 1;
    while (0.95 * time(splits) > least) ++splits;
    return splits;
}

// How many SMs run clusters of `splits` CTAs, one CTA each.
inline int sms_of_clusters(int splits, const GpuModel& gpu) {
    return splits <= 2 ? gpu.sms : gpu.cluster_sms;
}

// Of a tile in decode.cuh: a cluster, or several equal ones.
struct DecodeSplits {
    int splits = 1;
    int cluster = 1;
};

// The splits of each of `tiles` in decode.cuh: a cluster, or several, which combine their results
// through global memory. Where every SM has a CTA, memory is the limit, or L2. Fitted to the table
// in docs/notes/019-one-sequence.md.
//
// With 8 bits a CTA computes twice as many scores from the same bytes, and that counts where an SM
// has two CTAs and others none. So there are also clusters of two, which all SMs run. Fitted to the
// table in docs/notes/038-8-bit-decoding.md.
inline DecodeSplits decode_splits(const AttentionParams& params, const MaskSummary& mask,
                                  int64_t tiles, tuning::Fa3DecodeTile tile, int ctas_per_sm,
                                  const GpuModel& gpu) {
    const bool of_8_bits = has_8_bit_keys(params);
    const int64_t bytes = int64_t{params.batch} * mask.keys_seen * params.heads_k *
                          row_pair_bytes(params, head_dims(params));
    const int keys = keys_of_16_bits(params, mask.keys_seen);
    // More than eight rows, and pages, take more instructions for the bytes of 8 bits.
    const bool is_slow = tile != tuning::Fa3DecodeTile::kFewRows || params.pages.table != nullptr;
    // What 128 keys take in a CTA that nothing but itself limits, and if memory or L2 is the limit.
    const double alone =
        (tile == tuning::Fa3DecodeTile::kManyRows ? 0.6 : 0.36) * (!of_8_bits ? 1.
                                                                   : is_slow  ? 1.7
                                                                              : 1.32);
    const double of_memory = bytes <= gpu.l2_share ? 0.6 : 0.95;
    const auto time = [&](DecodeSplits x) {
        const int64_t ctas = tiles * x.splits;
        const int sms = sms_of_clusters(x.cluster, gpu);
        const int64_t at_once = int64_t{ctas_per_sm} * sms;
        const auto wave = [&](int64_t of_ctas) {
            if (of_ctas == 0) return 0.;
            const double full = static_cast<double>(of_ctas) / gpu.sms;
            const double own = alone * (of_8_bits ? ceil_div<int64_t>(of_ctas, sms) : 1);
            return 1.2 + ceil_div(keys, 128 * x.splits) * max_of(own, of_memory * full);
        };
        const double several = !of_8_bits ? 1.7 : is_slow ? 1.9 : 2.4;
        const double combination = x.splits == 1 ? 0. : x.splits == x.cluster ? 0.5 : several;
        return static_cast<double>(ctas / at_once) * wave(at_once) + wave(ctas % at_once) +
               combination;
    };
    DecodeSplits best;
    const auto consider = [&](DecodeSplits x) {
        if (time(x) < time(best)) best = x;
    };
    for (int splits = 2; splits < kMaxClusterSplits; splits *= 2) consider({splits, splits});
    for (int clusters = 1; clusters <= kMaxClusters; ++clusters)
        consider({clusters * kMaxClusterSplits, kMaxClusterSplits});
    for (int clusters = 2; of_8_bits && clusters <= kMaxClusters; ++clusters)
        consider({clusters * 2, 2});
    return best;
}

// Splits by length in decode.cuh have a CTA at least so many keys: one more cluster takes as long
// (an estimate).
inline constexpr int kMinKeysByLength = 1024;

// May lengths, on the device, be so different that splits by length gain something? Not for one
// sequence, nor if none has keys for two clusters of `ctas`.
inline bool lengths_may_matter(const AttentionParams& params, const MaskSummary& mask, int ctas) {
    const int longest =
        mask.keys_seen < mean_keys(params) ? mask.keys_seen : params.seqlen_k;  // of any sequence
    return is_varlen(params) && params.batch > 1 &&
           keys_of_16_bits(params, longest) >= 2 * kMinKeysByLength * ctas;
}

// As many clusters as params.num_splits would make of equal lengths, or as fill the GPU if those do
// not, but no more than fill it twice: more need memory, and idle CTAs, and gain nothing.
inline SplitsByLength splits_by_length(const ForwardParams& params, const QueryTiles& tiles,
                                       int ctas, int ctas_per_sm, const GpuModel& gpu) {
    constexpr int kBlock = 16;  // of 16 bits
    const int at_once = ctas_per_sm * sms_of_clusters(ctas, gpu) / ctas;
    const int of_queries = ceil_div(params.seqlen_q, tiles.queries);
    const int sequences = params.cu_seqlens_q != nullptr ? max_of(params.batch, of_queries)
                                                         : params.batch * of_queries;
    const int equal = sequences * params.num_splits / ctas;
    return {.clusters =
                max_of(min_of(equal, ceil_div(2 * at_once, tiles.heads)), at_once / tiles.heads),
            .least = kMinKeysByLength / kBlock * ctas};
}

// The CTAs of a Q tile with fixed splits (schedule/split_kv.cuh): one if tiles fill the GPU, since
// what several store takes memory, and time. But few rows of unequal lengths are spread over more.
inline int fixed_split_ctas(const ForwardParams& params, int64_t tiles, int heads_per_tile,
                            int head_dim_v, const GpuModel& gpu) {
    constexpr int64_t kMaxBytes = int64_t{256} << 20;
    constexpr int kFewRows = 32;
    const int64_t bytes = 4 * params.num_splits * statistics_rows(params) * head_dim_v;
    const bool spread = is_varlen(params) && mean_queries(params) * heads_per_tile <= kFewRows;
    if (tiles == 0 || bytes > kMaxBytes || (tiles >= gpu.sms && !spread)) return 1;
    const int64_t wanted = ceil_div<int64_t>((spread ? 8 : 2) * gpu.sms, tiles);
    return static_cast<int>(min_of<int64_t>(params.num_splits, wanted));
}

// --- The gradient of a bias, by FA3's kernel ---

// The tiles of scores that a tile of dbias is summed over, masked ones included.
inline int64_t dbias_walk(const BackwardParams& params, int block_q, int block_kv) {
    const int (&sizes)[4] = params.bias.sizes;
    return int64_t{sizes[0] == 1 ? params.batch : 1} * (sizes[1] == 1 ? params.heads_q : 1) *
           (sizes[2] == 1 ? max_of(ceil_div(mean_queries(params), block_q), 1) : 1) *
           (sizes[3] == 1 ? max_of(ceil_div(mean_keys(params), block_kv), 1) : 1);
}

// The CTAs of a tile's cluster. A CTA takes the time of so many tiles of scores to begin, and to
// add its sums to the others' (an estimate). Of a GPC's 16 SMs, some have 18, a cluster of 3, 5, 6
// or 7 leaves some idle.
inline int dbias_ctas(const BackwardParams& params, int block_q, int block_kv,
                      const GpuModel& gpu) {
    constexpr int kOverhead = 5;
    constexpr int kGpc = 16;
    const int64_t tiles = dbias_tile_count(params.bias, block_q, block_kv);
    const int64_t walk = dbias_walk(params, block_q, block_kv);
    const auto time = [&](int64_t ctas) {
        const int sms = sms_of_clusters(static_cast<int>(ctas), gpu);
        const int64_t at_once = max_of<int64_t>(sms / kGpc * (kGpc / ctas) + sms % kGpc / ctas, 1);
        return ceil_div(tiles, at_once) * (kOverhead + ceil_div(walk, ctas));
    };
    int best = 1;
    for (int ctas = 2; ctas <= min_of<int64_t>(walk, kMaxClusterSplits); ++ctas)
        if (time(ctas) < time(best)) best = ctas;
    return best;
}

// The CTAs that share the walk of a tile of dbias, where batch elements or heads share the bias.
// Their sums are stored and added, which takes the time of a step for so many elements (estimates).
inline int shared_bias_ctas(const BackwardParams& params, const GpuModel& gpu) {
    constexpr int kOverhead = 5;
    constexpr int kElementsPerStep = 750'000;
    constexpr int kMost = 8;
    constexpr int kBlock = tuning::kSharedBiasTile.block_q;
    const int64_t tiles = dbias_tile_count(params.bias, kBlock, kBlock);
    const int64_t walk = dbias_walk(params, kBlock, kBlock);
    const auto time = [&](int64_t ctas) {
        const int64_t stored = ctas == 1 ? 0 : ctas * tiles * (kBlock * kBlock) / kElementsPerStep;
        return ceil_div<int64_t>(tiles * ctas, gpu.sms) * (kOverhead + ceil_div(walk, ctas)) +
               stored;
    };
    int best = 1;
    for (int ctas = 2; ctas <= min_of<int64_t>(walk, kMost); ++ctas)
        if (time(ctas) < time(best)) best = ctas;
    return best;
}

// --- Rows that TMA cannot address ---

// Is a forward of FA3 with copies of such rows faster than FA2's, which loads rows from any
// address? FA2 takes longer by what memory needs to move three rows of K and V for each key and
// tile of queries (an estimate from a forward of 4,096 tokens at d 64 on an H100). So short calls
// with long keys, as in decoding, may not pay. Of seqused_k half the keys are taken to be in use.
inline bool copies_pay(const Call& call) {
    const AttentionParams& params = call.params;
    int64_t moved = 0;
    for (const Operand& x : call.operands)
        if (!x.is_reached_by_tma() && call.may_copy(x)) moved += 2 * x.aligned_copy().bytes();
    const int keys = summary_of(params).keys_seen / (params.seqused_k == nullptr ? 1 : 2);
    return moved <= int64_t{3} * keys *
                        tile_count(params, {params.heads_q, tuning::kForwardBlockQ}) *
                        row_pair_bytes(params, head_dims(params));
}

// FA3 has no splits with a bias. Is the GPU busy without them?
inline bool bias_pays(const Call& call) {
    const AttentionParams& params = call.params;
    if (params.bias.data == nullptr || params.seqlen_k <= 2 * tuning::kFa2SplitKeys) return true;
    return 2 * tile_count(params, {params.heads_q, tuning::kForwardBlockQ}) > call.gpu.sms;
}

// --- FA3's backward ---

// A CTA has a KV tile and goes over all queries of its head, in all query heads of the group.
// If such CTAs are too few for the GPU, too unequal, or have too many rows in L2, groups are cut
// into equal parts; and where that does not suffice and all queries see all keys (cross attention
// to few keys), the Q tiles of each head. For the kernels each part is a KV head, with the same K
// and V as the other parts, and with gradients of its own. These are summed afterwards, always in
// the same order (kernels/common/sum_parts.cuh).
struct Parts {
    int groups;   // into which a group is cut
    int queries;  // and the queries of each head
};

// The time of a part of a tile that has `rows` of Q. A part costs 1.2 %, and the time of 300 rows:
// it writes its dK and dV in float32, which are then read again.
inline double part_time(int64_t rows, int parts) {
    const auto whole = static_cast<double>(rows);
    return (1 + parts * (.012 + 300. / whole)) * whole / 64 / parts;
}

// The number from 1 to `most` that divides `whole` with the least time, to 3 %.
template <class Time>
int best_parts(int64_t most, int whole, Time time) {
    int best = 1;
    for (int parts = 2; parts <= most; ++parts)
        if (whole % parts == 0 && time(parts) < .97 * time(best)) best = parts;
    return best;
}

// The factor of the time with each of unequal tiles in so many parts, for what CTAs share. `wide`:
// as for choose_parts().
//
// Under a causal mask the CTAs of a head get out of step, and share its rows only while they are in
// L2: each 64 MB beyond the first costs 8 %, with more than 32,768 keys 3 %. In deterministic mode
// they keep in step, as a head's tiles add in turn: few heads wait for each other, many have too
// many rows at work.
inline double sharing_factor(const BackwardParams& params, const MaskSummary& mask, bool wide,
                             const GpuModel& gpu, int parts) {
    constexpr int64_t kKeysAtWork = 2 * 128 * 128;  // two waves of tiles of 128 keys
    if (params.deterministic && !wide) {            // with varlen of one sequence, as measured
        const auto heads =
            static_cast<double>(int64_t{params.heads_k} * tensor_batches(params) * parts);
        return 1 + .6 / heads + .2 * max_of(0., heads / 16 - 1);
    }
    if (!mask.hides_later || mask.hides_earlier) return 1;
    // Q, dO and dQ's sums of the tiles at work at a time, over what stays in L2.
    const HeadDims dims = head_dims(params);
    const int64_t heads_at_work = ceil_div<int64_t>(kKeysAtWork, max_of(mean_keys(params), 1));
    const int64_t rows = min_of<int64_t>(heads_at_work * mean_queries(params), kKeysAtWork);
    const int64_t bytes =
        rows * group_or_one(params) *
        (wide ? row_pair_bytes(params, dims) : row_pair_bytes_with_dq(params, dims));
    const double in_l2 = static_cast<double>(bytes) / static_cast<double>(2 * gpu.l2_share);
    return 1 + (mean_keys(params) <= kKeysAtWork ? .08 : .03) * max_of(0., in_l2 / parts - 1);
}

// The parts of a call with `key_tiles` of a head. A part of few queries has too little to do. wide:
// for the kernels of wide heads, which do not add to dQ in memory, and cannot cut queries. Equal
// tiles come in waves. Of unequal ones, under a mask or in sequences of several lengths, the
// longest takes twice the mean, and a CTA waits at the end. Fitted to the tables in
// docs/notes/018-few-kv-heads.md.
inline Parts choose_parts(const BackwardParams& params, const MaskSummary& mask, int64_t key_tiles,
                          bool wide, const GpuModel& gpu) {
    constexpr int kMinRows = 512;  // of Q, of a part
    const int group = params.heads_q / params.heads_k;
    const bool varlen = params.cu_seqlens_q != nullptr;
    const bool equal = !mask.is_masked() && !varlen;
    const int64_t tiles = key_tiles * params.heads_k * tensor_batches(params);
    const int64_t rows = int64_t{group} * mean_queries(params);
    if (tiles == 0) return {1, 1};
    // With each of `of` tiles in so many parts.
    const auto filled = [&](int64_t of, int parts) {
        return waves(static_cast<double>(of * parts), gpu.sms, equal);
    };
    const int64_t most = rows / kMinRows;
    const int groups = best_parts(min_of<int64_t>(most, group), group, [&](int parts) {
        if (equal) return part_time(rows, parts) * filled(tiles, parts);
        return part_time(rows, parts) * max_of(2., filled(tiles, parts) + (varlen ? .5 : .1)) *
               sharing_factor(params, mask, wide, gpu, parts);
    });
    if (!equal || wide || tiles * groups >= gpu.sms) return {groups, 1};
    // Any number divides the Q tiles well enough.
    return {groups, best_parts(min_of<int64_t>(most / groups, gpu.sms), 0, [&](int parts) {
                return part_time(rows / groups, parts) * filled(tiles * groups, parts);
            })};
}

// With a mask of tiles. A KV tile has one list of Q tiles: if heads differ, it has one query head.
// With many queries, too, which then costs little: the host does not know how long the lists are,
// and a KV tile that all queries see may take longer than all others of its CTA.
inline Parts masked_parts(const BackwardParams& params) {
    constexpr int kManyQueries = 8192;
    const bool alone = has_masks_within_groups(params) || params.seqlen_q >= kManyQueries;
    return {alone ? params.heads_q / params.heads_k : 1, 1};
}

// How many heads of K and V, of all batches, have their dS in memory at a time: all, or an equal
// share of them. The limit is two and a half times the size of q, out and their gradients, which is
// linear in the sequence length, or 576 MiB if that is less. 0 if one head exceeds it, or with
// varlen: the host does not know the lengths of the sequences.
inline int ds_heads_at_a_time(const BackwardParams& params, const DSWorkspaceTiles& tiles) {
    constexpr int64_t kMaxBytes = int64_t{576} << 20;
    const int64_t rows = int64_t{params.heads_q} * params.batch * params.seqlen_q;
    const int64_t most = min_of(kMaxBytes, rows * 5 * row_pair_bytes(params, head_dims(params)));
    const int64_t bytes = ds_head_bytes(params, tiles);
    if (params.cu_seqlens_q != nullptr || bytes > most) return 0;
    const int64_t heads = max_of<int64_t>(int64_t{params.heads_k} * params.batch, 1);
    const int64_t passes = ceil_div(heads, min_of(most / bytes, heads));
    return static_cast<int>(ceil_div(heads, passes));
}

}  // namespace flash_ext
