// The constexpr code of csrc as a Python module, for tests/test_native.py: masks, tile ranges, the
// scheduler, shared-memory layout, dropout bits and the lists of plan/. No CUDA, no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/call.h"
#include "plan/cost.h"
#include "plan/tuning.h"
#include "plan/tuning_backward.h"
#include "plan/workspace_rows.cuh"
#include "problem/dropout.cuh"
#include "problem/mask.cuh"
#include "problem/params.h"
#include "problem/sequences.cuh"
#include "problem/tile_mask.cuh"
#include "schedule/dbias_tiles.cuh"
#include "schedule/row_tiles.cuh"
#include "schedule/split_kv.cuh"
#include "schedule/tile_numbers.cuh"
#include "schedule/tile_order.cuh"
#include "tile/swizzle.cuh"

namespace py = pybind11;
using namespace flash_ext;

namespace {

using Pair = std::pair<int, int>;

constexpr GpuModel kH200 = gpu_model(9, 0, 232448, 132, 50 << 20);

Pair pair_of(Interval interval) { return {interval.begin, interval.end}; }
Interval interval_of(Pair pair) { return {pair.first, pair.second}; }

std::vector<int> numbers_of(VisibleTiles tiles) {
    std::vector<int> numbers;
    for (int i = tiles.begin; i < tiles.end; ++i) numbers.push_back(tiles.tile(i));
    return numbers;
}

// (number, is it of a partial block?) of the KV tiles that a row of runs lists, from the last one
// to the first, for each split of them.
template <int kPerBlock>
std::vector<std::vector<Pair>> listed_kv_tiles(const std::vector<int>& row, int seqlen_k,
                                               int splits) {
    std::vector<std::vector<Pair>> all(splits);
    for (int split = 0; split < splits; ++split) {
        auto tiles = ListedTiles<kPerBlock>::of_runs(
            {row.data()}, seqlen_k, kMaskBlock / kPerBlock,
            [&](const VisibleTiles& seen) { return split_of(seen, split, splits); });
        for (int i = tiles.end - 1; i >= tiles.begin; --i, tiles.step({row.data()})) {
            all[split].push_back({tiles.ahead[0], tiles.is_partial(i)});
            if (i > 1 && split == 0) {  // what is loaded ahead
                auto next = tiles;
                next.step({row.data()});
                if (next.ahead[0] != tiles.ahead[1] || next.ahead[1] != tiles.ahead[2]) return {};
            }
        }
    }
    return all;
}

// (head, number, partial?) of the Q tiles of a KV block, whose rows of runs, a query head each, are
// side by side.
template <int kPerBlock>
std::vector<std::array<int, 3>> listed_q_tiles(const std::vector<int>& rows, int heads,
                                               int seqlen_q) {
    BackwardParams params{};
    params.heads_q = heads;
    params.heads_k = 1;
    params.tile_mask.kv_tiles = params.tile_mask.q_tiles = rows.data();
    params.tile_mask.kv_blocks = 1;
    params.tile_mask.q_row = static_cast<int>(rows.size()) / heads;
    params.tile_mask.heads = heads;
    Sequence sequence{};
    sequence.seqlen_q = seqlen_q;
    const QTileList<kPerBlock> list{params, sequence, {0, 0}, 0, 0};
    std::vector<std::array<int, 3>> all;
    for (ListedQTile x = list.first(); x.head >= 0; x = list.next(x))
        all.push_back({x.head, x.tile, x.partial});
    return all;
}

// Window sides as the ops take them: -1 is unlimited.
BandMask band_mask(int seqlen_q, int seqlen_k, int left, int right) {
    const auto side = [](int window) { return window < 0 ? BandMask::kUnlimited : window; };
    return {seqlen_q, seqlen_k, side(left), side(right)};
}

// {columns of an atom, bytes of the tile, byte offset of every (row, chunk)}.
using Layout = std::tuple<int, int, std::vector<std::vector<int>>>;

template <int kRows, int kCols>
Layout layout() {
    using Tile = SharedTile<uint16_t, kRows, kCols>;
    std::vector<std::vector<int>> offsets(kRows);
    for (int row = 0; row < kRows; ++row)
        for (int chunk = 0; chunk < kCols / Tile::kChunk; ++chunk)
            offsets[row].push_back(Tile::offset(row, chunk));
    return {Tile::kAtomCols, Tile::kBytes, offsets};
}

template <int kRows>
Layout layout_of_width(int cols) {
    switch (cols) {
        case 32:
            return layout<kRows, 32>();
        case 64:
            return layout<kRows, 64>();
        case 80:
            return layout<kRows, 80>();
        case 96:
            return layout<kRows, 96>();
        case 128:
            return layout<kRows, 128>();
        case 192:
            return layout<kRows, 192>();
        case 256:
            return layout<kRows, 256>();
        default:
            throw py::value_error("no such width");
    }
}

using Offsets = std::optional<std::vector<int>>;

// Lengths and offsets of a batch, and what csrc makes of them.
struct Batch {
    BackwardParams params{};
    Offsets cu_seqlens_q, cu_seqlens_k, seqused_k;

    Batch(int batch, int heads_q, int seqlen_q, int seqlen_k, Offsets cu_q, Offsets cu_k,
          Offsets used)
        : cu_seqlens_q(std::move(cu_q)), cu_seqlens_k(std::move(cu_k)), seqused_k(std::move(used)) {
        params.batch = batch;
        params.heads_q = heads_q;
        params.seqlen_q = seqlen_q;
        params.seqlen_k = seqlen_k;
        params.cu_seqlens_q = cu_seqlens_q ? cu_seqlens_q->data() : nullptr;
        params.cu_seqlens_k = cu_seqlens_k ? cu_seqlens_k->data() : nullptr;
        params.seqused_k = seqused_k ? seqused_k->data() : nullptr;
        params.row_groups = row_groups(params);
        params.padding_row = padding_row(params);
    }
    Batch(const Batch&) = delete;

    // Of a sequence as sequence_of() takes it.
    static int number(const Sequence& s) { return s.batch + s.seq_idx; }

    // (number, batch, q_begin, k_begin, seqlen_q, seqlen_k, rows_k)
    using Facts = std::tuple<int, int, int, int, int, int, int>;
    static Facts facts(const Sequence& s) {
        return {number(s), s.batch, s.q_begin, s.k_begin, s.seqlen_q, s.seqlen_k, s.rows_k};
    }

    std::vector<Facts> sequences(bool may_be_varlen) const {
        std::vector<Facts> all;
        for (int i = 0; i < sequence_count(params); ++i)
            all.push_back(facts(may_be_varlen ? sequence_of<true>(params, i)
                                              : sequence_of<false>(params, i)));
        return all;
    }

    // (number of the sequence, tile) of every tile number of a head.
    std::vector<Pair> tiles(bool keys, int block) const {
        const int rows = keys ? params.seqlen_k : params.seqlen_q;
        std::vector<Pair> all;
        for (int batch = 0; batch < tensor_batches(params); ++batch)
            for (int i = 0; i < tile_numbers(params, rows, block); ++i) {
                const SequenceTile tile =
                    keys ? tile_of<true, Rows::kKeys>(params, batch, i, block)
                         : tile_of<true, Rows::kQueries>(params, batch, i, block);
                all.emplace_back(number(tile.sequence), tile.tile);
            }
        return all;
    }

    // (number in the batch, is it one of the batch?) of each sequence
    std::vector<std::pair<int, bool>> owners() const {
        std::vector<std::pair<int, bool>> all;
        for (int i = 0; i < sequence_count(params); ++i) {
            const Sequence s = sequence_of<true>(params, i);
            all.emplace_back(s.index(), s.is_owned(params));
        }
        return all;
    }

    // The workspace row of query 0 of each sequence, and how many rows there are, without padding.
    std::pair<std::vector<int64_t>, int64_t> workspace(int head) const {
        std::vector<int64_t> rows;
        for (int i = 0; i < sequence_count(params); ++i)
            rows.push_back(workspace_row(params, sequence_of<true>(params, i), head, 0));
        return {rows, params.padding_row};
    }

    // (number of the sequence, tile, head) of the CTAs of the passes before and after the backward.
    template <int kBlockQ>
    std::vector<std::tuple<int, int, int>> q_tile_indices() const {
        std::vector<std::tuple<int, int, int>> all;
        for (int i = 0; i < q_tile_count(params, kBlockQ); ++i) {
            const QTileIndex index = q_tile_index<true>(params, i, kBlockQ);
            all.emplace_back(number(index.tile.sequence), index.tile.tile, index.head);
        }
        return all;
    }

    static constexpr int kDBiasQ = 4, kDBiasKV = 8;

    int64_t dbias_tiles(std::array<int, 4> sizes) {
        std::ranges::copy(sizes, params.bias.sizes);
        return dbias_tile_count(params.bias, kDBiasQ, kDBiasKV);
    }

    // (number of the sequence, head, first query, first key) of a CTA's share of the walk of a tile
    // of dbias, and the tile (batch, head, Q tile, KV tile).
    using DBiasShare = std::pair<std::vector<std::array<int, 4>>, std::array<int, 4>>;
    DBiasShare dbias_share(std::array<int, 4> sizes, Pair window, int number, int cta, int ctas) {
        std::ranges::copy(sizes, params.bias.sizes);
        const BandMask mask = band_mask(0, 0, window.first, window.second);
        params.window_left = mask.window_left;
        params.window_right = mask.window_right;
        const DBiasTile own = dbias_tile(params.bias, number, kDBiasQ, kDBiasKV);
        DBiasHead now;
        std::vector<std::array<int, 4>> all;
        DBiasWalk<kDBiasQ, kDBiasKV>{params, now, cta, ctas}.for_each(own, [&](int query, int key) {
            all.push_back({Batch::number(now.sequence), now.head, query, key});
        });
        return {all, {own.batch, own.head, own.q_tile, own.kv_tile}};
    }

    std::vector<int64_t> statistics(int head) const {
        std::vector<int64_t> all;
        for (int i = 0; i < sequence_count(params); ++i)
            all.push_back(statistics_offset(params, sequence_of<true>(params, i), head));
        return all;
    }
};

}  // namespace

PYBIND11_MODULE(flash_ext_native, m) {
    py::class_<BandMask>(m, "BandMask")
        .def(py::init(&band_mask))
        .def("key_range", [](const BandMask& x, int query) { return pair_of(x.key_range(query)); })
        .def("query_range", [](const BandMask& x, int key) { return pair_of(x.query_range(key)); })
        .def("keys_of", [](const BandMask& x,
                           Pair queries) { return pair_of(x.keys_of(interval_of(queries))); })
        .def("queries_of",
             [](const BandMask& x, Pair keys) { return pair_of(x.queries_of(interval_of(keys))); })
        .def("is_full", [](const BandMask& x, Pair queries, Pair keys) {
            return x.is_full(interval_of(queries), interval_of(keys));
        });
    // (most keys of a query, may first keys be hidden, last ones, does every query see all, is it a
    // triangle?) of one dense sequence.
    m.def("mask_summary", [](const BandMask& mask) {
        AttentionParams params{};
        params.batch = 1;
        params.seqlen_q = mask.seqlen_q;
        params.seqlen_k = mask.seqlen_k;
        params.window_left = mask.window_left;
        params.window_right = mask.window_right;
        const MaskSummary x = summary_of(params);
        return std::tuple(x.keys_seen, x.hides_earlier, x.hides_later, x.sees_all, x.is_triangle);
    });
    // Of tiles of `block` keys: the numbers of those that queries see, and the indices of those of
    // which all see every key; of tiles of `block` queries: those that see keys, and that see all.
    m.def("kv_tiles", [](const BandMask& mask, Pair queries, int block) {
        return numbers_of(VisibleTiles::of_queries(mask, interval_of(queries), block));
    });
    m.def("full_kv_tiles", [](const BandMask& mask, Pair queries, int block) {
        return pair_of(VisibleTiles::full_for(mask, interval_of(queries), block));
    });
    m.def("last_kv_tile", [](const BandMask& mask, Pair queries, int block) {
        return VisibleTiles::last_seen_by(mask, interval_of(queries), block);
    });
    m.def("q_tiles", [](const BandMask& mask, Pair keys, int block) {
        return numbers_of(VisibleTiles::of_keys<true>(mask, interval_of(keys), block));
    });
    m.def("full_q_tiles", [](const BandMask& mask, Pair keys, int block) {
        return pair_of(VisibleTiles::seeing_all(mask, interval_of(keys), block));
    });
    m.def("listed_kv_tiles", [](const std::vector<int>& row, int keys, int block, int splits) {
        return block == 32   ? listed_kv_tiles<4>(row, keys, splits)
               : block == 64 ? listed_kv_tiles<2>(row, keys, splits)
                             : listed_kv_tiles<1>(row, keys, splits);
    });
    m.def("block_kind", [](const std::vector<int>& row, int block) {
        return static_cast<int>(kind_of({row.data()}, block));
    });
    m.def("blocks_hull",
          [](const std::vector<int>& row) { return pair_of(blocks_hull({row.data()})); });
    m.def("listed_q_tiles", [](const std::vector<int>& rows, int heads, int queries, int block) {
        return block == 32   ? listed_q_tiles<4>(rows, heads, queries)
               : block == 64 ? listed_q_tiles<2>(rows, heads, queries)
                             : listed_q_tiles<1>(rows, heads, queries);
    });
    // (sequence, tile, first row, rows, rows in use) of every tile of a head, batch by batch.
    m.def("row_tiles", [](int batch, int rows, const std::optional<std::vector<int>>& cu_seqlens,
                          const std::optional<std::vector<int>>& seqused, int block) {
        QuantizeParams params{};
        params.batch = batch;
        params.rows = rows;
        params.cu_seqlens = cu_seqlens ? cu_seqlens->data() : nullptr;
        params.seqused = seqused ? seqused->data() : nullptr;
        std::vector<std::array<int, 5>> all;
        params.heads = 1;
        for (uint32_t i = 0;; ++i) {
            const RowTile tile = row_tile(params, i, block);
            if (!tile.is_valid) return all;
            all.push_back({tile.sequence, tile.tile, tile.begin, tile.rows, tile.used});
        }
    });
    // (batch, tile, head) of a dense batch's tiles.
    m.def("row_tiles_of_heads", [](int batch, int rows, int heads, int block) {
        QuantizeParams params{};
        params.batch = batch;
        params.rows = rows;
        params.heads = heads;
        std::vector<std::array<int, 3>> all;
        for (uint32_t i = 0;; ++i) {
            const RowTile tile = row_tile(params, i, block);
            if (!tile.is_valid) return all;
            all.push_back({tile.batch, tile.tile, tile.head});
        }
    });
    m.def("quotient", [](int n, int divisor) { return n / Divisor(divisor); });
    m.def("tile_interval", [](int tile, int block) { return pair_of(tile_interval(tile, block)); });

    py::class_<TileOrder>(m, "TileOrder")
        .def(py::init([](int tiles, int heads, int batch, int l2_group_heads) {
            return TileOrder{tiles, heads, batch, l2_group_heads};
        }))
        .def_readonly("l2_group_heads", &TileOrder::l2_group_heads)
        .def_readonly("tiles_at_once", &TileOrder::tiles_at_once);
    m.def("with_whole_heads", [](const TileOrder& order, int64_t bytes_per_head) {
        return with_whole_heads(order, bytes_per_head, kH200);
    });
    m.def("tiles_at_once", [](int seqlen, int heads, int window_right, bool varlen) {
        const int lengths = seqlen;
        AttentionParams params{};
        params.batch = 1;
        params.heads_q = params.heads_k = heads;
        params.seqlen_q = params.seqlen_k = seqlen;
        params.window_left = BandMask::kUnlimited;
        params.window_right = window_right;
        params.seqused_k = varlen ? &lengths : nullptr;
        return forward_tile_order(params, summary_of(params), {heads, 128}, {128, 128}, 1, kH200, 1,
                                  true)
            .tiles_at_once;
    });
    m.def("make_tile_order",
          [](int tiles, int heads, int batch, bool tiles_differ, int64_t bytes, int ctas_per_sm) {
              return make_tile_order(tiles, heads, batch, tiles_differ, bytes, ctas_per_sm, kH200);
          });
    m.def("work_tile", [](int linear, const TileOrder& order) {
        const WorkTile tile = work_tile(linear, order);
        return std::tuple(tile.tile_index, tile.head, tile.batch);
    });
    m.def("work_tile", [](int linear, TileOrder order, int first) {
        order.first = first;
        const WorkTile tile = work_tile_with_first(linear, order);
        return std::tuple(tile.tile_index, tile.head, tile.batch);
    });
    m.def("longest_first", &longest_first);
    py::class_<Batch>(m, "Batch")
        .def(py::init<int, int, int, int, Offsets, Offsets, Offsets>())
        .def("sequences", &Batch::sequences)
        .def("tiles", &Batch::tiles)
        .def("owners", &Batch::owners)
        .def("workspace", &Batch::workspace)
        .def("q_tile_indices", &Batch::q_tile_indices<32>)
        .def("statistics", &Batch::statistics)
        .def("dbias_tiles", &Batch::dbias_tiles)
        .def("dbias_share", &Batch::dbias_share);
    m.attr("workspace_rows") = kWorkspaceRows;

    m.def("layout", [](int rows, int cols) {
        switch (rows) {
            case 16:
                return layout_of_width<16>(cols);
            case 64:
                return layout_of_width<64>(cols);
            default:
                throw py::value_error("no such height");
        }
    });

    m.def("is_kept", [](int64_t seed, int64_t offset, int64_t head, uint32_t threshold, int row,
                        int col) {
        const DropoutMask mask(seed, offset, head, threshold);
        const uint32_t place = mask.place(DropoutMask::counter(row), DropoutMask::counter(col));
        return mask.keep(mask.word(place), row / 8 % 2, col / 8 % 2);
    });

    m.attr("variants") = std::vector<std::string>(kVariantNames, kVariantNames + kVariants);
    std::set<Pair> head_dims;  // that any kernel has
    const auto add = [&](const auto& table) {
        for (const auto& row : table) head_dims.emplace(row.head_dims.qk, row.head_dims.v);
    };
    add(tuning::kFa1Forward), add(tuning::kFa1Backward), add(tuning::kFa2Forward);
    add(tuning::kFa2Backward), add(tuning::kFa3Forward), add(tuning::kFa3Decode);
    add(tuning::kFa3ForwardFp8), add(tuning::kFa3Backward), add(tuning::kFa3BackwardWide);
    m.attr("head_dims") = std::vector<Pair>(head_dims.begin(), head_dims.end());
    m.attr("max_head_dim") = tuning::kMaxHeadDim;
    m.def("padded_head_dims", [](int head_dim, int head_dim_v) -> std::optional<Pair> {
        const auto* row = tuning::find_row(tuning::kFa2Forward, {head_dim, head_dim_v});
        if (row == nullptr) return std::nullopt;
        return Pair{row->head_dims.qk, row->head_dims.v};
    });

    // Queries or keys of the tile that says how often a plain pass reads the other side; of FA3's
    // forward without options see fa3_tile.
    m.def("tiles", [](int head_dim) {
        using namespace tuning;
        const HeadDims dims{head_dim, head_dim};
        const Fa2ForwardShape fa2 = fa2_forward_shape(dims, kDense);
        const HeadDims fa1 = find_row(kFa1Forward, dims)->head_dims;
        const MmaBackwardShape fa1_back = row_of(kFa1Backward, fa1).plain;
        const MmaBackwardShape fa2_back = fa2_backward_shape(dims, kDense);
        const Fa3ForwardShape fa3 = fa3_forward_shape(dims, kFa3Scores, Fa3ForwardTile::kSmallQ);
        return std::map<std::pair<std::string, std::string>, int>{
            {{"fa1", "forward"}, row_of(kFa1Forward, fa1).block_kv},
            {{"fa1", "forward, less memory"}, row_of(kFa1Forward, fa1).small_block_kv},
            {{"fa2", "forward"}, fa2.rows_per_warp * fa2.warps},
            {{"fa3", "forward with options"}, 64 * fa3.consumers},
            {{"fa1", "backward"}, fa1_back.keys_per_warp * fa1_back.warps_kv},
            {{"fa2", "backward"}, fa2_back.keys_per_warp * fa2_back.warps_kv}};
    });
    // (rows, keys) of the tiles of FA3's forward of so many heads, sequences counted apart.
    m.def("fa3_tile", [](Pair dims, int heads, int queries, int keys, Pair window, bool varlen) {
        const auto bound = [](int x) { return x < 0 ? BandMask::kUnlimited : x; };
        AttentionParams params{};
        params.batch = 1;
        params.heads_q = heads;
        params.seqlen_q = queries;
        params.seqlen_k = keys;
        params.window_left = bound(window.first);
        params.window_right = bound(window.second);
        params.seqused_k = varlen ? &keys : nullptr;
        params.scale = 1.f;
        params.aligned = true;
        const HeadDims padded =
            tuning::find_row(tuning::kFa3Forward, {dims.first, dims.second})->head_dims;
        const int64_t smallest = tile_count(params, {heads, tuning::kForwardBlockQ});
        const auto tile =
            fa3_forward_tile(padded, params, summary_of(params), smallest <= kH200.sms, kH200);
        const tuning::Fa3ForwardShape found =
            tuning::fa3_forward_shape(padded, tuning::kVarlen, tile);
        return Pair{64 * found.consumers, found.block_kv};
    });
    // Of one query of a dense batch at head dim 128, with `group` query heads on a head of keys.
    m.def("decode_splits", [](int batch, int heads_k, int group, int keys) {
        using enum tuning::Fa3DecodeTile;
        AttentionParams params{};
        params.batch = batch;
        params.heads_q = params.heads_k = heads_k;
        params.seqlen_q = group;
        params.seqlen_k = keys;
        params.window_left = params.window_right = BandMask::kUnlimited;
        params.head_dim = params.head_dim_v = 128;
        constexpr auto kRow = tuning::row_of(tuning::kFa3Decode, {128, 128});
        const auto tile = group <= kRow.few_rows.rows ? kFewRows : kManyRows;
        return decode_splits(params, summary_of(params), int64_t{batch} * heads_k, tile,
                             tuning::fa3_decode_shape(kRow, tile).ctas_per_sm, kH200)
            .splits;
    });
    // The fixed splits of number `cta` of the CTAs of a Q tile that sees tiles begin to end - 1.
    m.def("fixed_splits", [](int begin, int end, int block_kv, int cta, int ctas) {
        const Interval all = fixed_splits({begin, end}, fixed_split_tiles(block_kv));
        std::vector<int> found;
        for (int i = last_fixed_split(all, cta, ctas); i >= 0; i = next_fixed_split(all, i, ctas))
            found.push_back(i);
        return found;
    });
    m.attr("many_queries") = tuning::kManyQueries;

    // Of one dense sequence.
    m.def("num_splits", [](int64_t tiles, int queries, int keys, int left, int right, int at_once) {
        AttentionParams params{};
        params.batch = 1;
        params.seqlen_q = queries;
        params.seqlen_k = keys;
        params.window_left = left < 0 ? BandMask::kUnlimited : left;
        params.window_right = right < 0 ? BandMask::kUnlimited : right;
        return num_splits(params, summary_of(params), tiles, 1, at_once, 512);
    });
    // (pack_gqa_log2, tiles) at head dim 128 of a dense batch, or of `batch` varlen sequences of
    // `queries` and `keys` in all.
    m.def("query_tiles",
          [](int batch, int heads_q, int heads_k, int queries, int keys, bool varlen, int window) {
              static const int somewhere = 0;
              AttentionParams params{};
              params.batch = batch;
              params.heads_q = heads_q;
              params.heads_k = heads_k;
              params.seqlen_q = queries;
              params.seqlen_k = keys;
              params.head_dim = params.head_dim_v = 128;
              params.window_left = window < 0 ? BandMask::kUnlimited : window;
              params.window_right = BandMask::kUnlimited;
              if (window >= 0) params.window_right = 0;
              if (varlen) params.cu_seqlens_q = params.cu_seqlens_k = &somewhere;
              const QueryTiles tiles =
                  query_tiles(params, summary_of(params), tuning::kForwardBlockQ, true);
              return std::make_pair(tiles.pack_gqa_log2, tile_count(params, tiles));
          });
    m.def("split_of", [](Pair all, int split, int splits) {
        return numbers_of(split_of({all.first, all.second}, split, splits));
    });
    // Where shared memory suffices for them.
    m.def("fa2_ctas_per_sm", [](int head_dim, int head_dim_v, bool general) {
        using namespace tuning;
        const HeadDims dims = find_row(kFa2Forward, {head_dim, head_dim_v})->head_dims;
        return fa2_forward_shape(dims, general ? kAllOptions : kVarlenSplits).ctas_per_sm;
    });
}
