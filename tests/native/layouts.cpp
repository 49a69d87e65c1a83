// Matrix descriptors, and which lane has which element of a tile, as a Python module, for
// tests/test_layouts.py; with what loads.cpp and results.cpp add.
#include <map>
#include <string>

#include "kernels/fa3/decode_blocks.cuh"
#include "kernels/fa3/decode_scales.cuh"
#include "lanes.h"
#include "problem/hide_by_words.cuh"
#include "problem/score.cuh"
#include "tile/gemm.cuh"
#include "tile/wgmma.cuh"

namespace flash_ext {
namespace {

// --- wgmma ---

// The descriptors of all steps along K of an operand in a tile at `address`.
std::vector<uint64_t> descriptors(int bytes, int rows, int cols, bool mn_major, uint32_t address,
                                  int first_row, uint32_t moved) {
    const auto of = [&](auto operand, int steps) {
        operand.move(moved);
        std::vector<uint64_t> all;
        for (int k = 0; k < steps; ++k) all.push_back(operand.at(k));
        return all;
    };
    return visit_tile(bytes, rows, cols, [&](auto tile) {
        using Tile = decltype(tile);
        return mn_major ? of(MNMajor<Tile>(address), rows / 16)
                        : of(KMajor<Tile>(address, first_row), Tile::kRowBytes / 32);
    });
}

// --- Fragments ---

// What the 32 lanes have of an operand: of A for 16 rows, of B for 16 columns.
using Registers = std::vector<std::array<uint32_t, 4>>;

template <class Load>
Registers registers_of_lanes(Load load) {
    Registers all(32);
    device::run_warp(0, [&](int lane) {
        uint32_t registers[4];
        load(registers);
        std::copy(registers, registers + 4, all[lane].begin());
    });
    return all;
}

template <class Operand>
Registers load_block(int first_row, int first_col_block, int mn, int k) {
    return registers_of_lanes([&](uint32_t (&registers)[4]) {
        const Operand operand(0, first_row, first_col_block);
        if constexpr (requires { operand.load_a(registers, mn, k); }) {
            operand.load_a(registers, mn, k);
        } else {
            operand.load_b(registers, mn, k);
        }
    });
}

// Of a tile whose elements are numbered, row by row.
Registers fragments(const std::string& operand, int cols, int first_row, int first_col_block,
                    int mn, int k) {
    return visit_width<Half, 64>(cols, [&](auto tile) -> Registers {
        // Warps share the columns of an atom with more than one block.
        using Tile = std::conditional_t<decltype(tile)::kBlocksPerAtom == 1,
                                        SharedTile<Half, 64, 64>, decltype(tile)>;
        for (int row = 0; row < Tile::kRows; ++row)
            for (int col = 0; col < Tile::kCols; ++col) {
                const auto number = static_cast<uint16_t>(row * Tile::kCols + col);
                std::memcpy(storage + Tile::offset(row, col / 8) + col % 8 * 2, &number, 2);
            }
        const std::map<std::string, Registers (*)(int, int, int, int)> loads{
            {"A from rows", load_block<AFromRows<Tile>>},
            {"A from columns", load_block<AFromColumns<Tile>>},
            {"A from columns, every second", load_block<AFromColumns<Tile, 2>>},
            {"B from rows", load_block<BFromRows<Tile>>},
            {"B from columns", load_block<BFromColumns<Tile>>},
            {"B from columns, every second", load_block<BFromColumns<Tile, 2>>}};
        return loads.at(operand)(first_row, first_col_block, mn, k);
    });
}

// --- Bytes as operands of halves (tile/bytes.cuh) ---

constexpr int kByteKeys = 32;

// All A operands of a tile of 32 keys (bytes, row by row), of K by steps of 16 columns or of V by
// steps of 16 keys: [step][m][lane].
template <class Byte, int kCols, bool kOfKeys>
std::vector<std::vector<Registers>> byte_operands(const std::vector<uint8_t>& bytes) {
    using Tile = SharedTile<Byte, kByteKeys, kCols>;
    using Operand = std::conditional_t<kOfKeys, AFromByteRows<Tile>, AFromByteColumns<Tile>>;
    constexpr int kSteps = kOfKeys ? kCols / 16 : kByteKeys / 16;
    constexpr int kBlocks = kOfKeys ? kByteKeys / 16 : kCols / 16;
    for (int row = 0; row < kByteKeys; ++row)
        for (int col = 0; col < kCols; ++col)
            storage[Tile::offset(row, col / 16) + col % 16] = bytes[row * kCols + col];
    std::vector all(kSteps, std::vector(kBlocks, Registers(32)));
    device::run_warp(0, [&](int lane) {
        const Operand operand(0);
        for (int k = 0; k < kSteps; ++k)
            for (int m = 0; m < kBlocks; ++m) {
                uint32_t loaded[4], a[4];
                operand.load_bytes(loaded, kOfKeys ? m : m / 2, kOfKeys ? k / 2 : k);
                operand.to_a(a, loaded, (kOfKeys ? k : m) % 2);
                std::copy(a, a + 4, all[k][m][lane].begin());
            }
    });
    return all;
}

std::vector<std::vector<Registers>> any_byte_operands(bool is_signed, bool of_keys, int cols,
                                                      const std::vector<uint8_t>& bytes) {
    const auto of = [&]<class Byte, int kCols>(Byte, std::integral_constant<int, kCols>) {
        return of_keys ? byte_operands<Byte, kCols, true>(bytes)
                       : byte_operands<Byte, kCols, false>(bytes);
    };
    const auto of_width = [&](auto byte) {
        switch (cols) {
            case 64:
                return of(byte, std::integral_constant<int, 64>{});
            case 128:
                return of(byte, std::integral_constant<int, 128>{});
            case 256:
                return of(byte, std::integral_constant<int, 256>{});
        }
        throw py::value_error("no such width");
    };
    return is_signed ? of_width(Int8{}) : of_width(Float8{});
}

// The B operands of 32 rows of Q (bfloat16, row by row) as the decoding kernel stores them, times
// 2^power, of the second 16: [step][lane].
template <int kCols>
std::vector<Registers> halves_of_q(const std::vector<uint16_t>& q, int head_dim, int power) {
    using Tile = BInOrder<32, kCols>;
    std::memset(storage, 0xff, Tile::kBytes);
    for (int row = 0; row < 32; ++row)
        for (int lane = 0; lane < 32; ++lane) {
            threadIdx = {unsigned(lane)};
            RowToHalves<Tile> halves;
            halves.load(reinterpret_cast<const __half*>(&q[row * head_dim]), row < 31, head_dim);
            halves.template store<Half>(0, row, power);
        }
    std::vector all(kCols / 16, Registers(32));
    for (int lane = 0; lane < 32; ++lane) {
        threadIdx = {unsigned(lane)};
        const Tile operand(0);
        for (int k = 0; k < kCols / 16; ++k)
            std::memcpy(all[k][lane].data(), storage + operand.address(1, k), 16);
    }
    return all;
}

std::vector<Registers> any_halves_of_q(int cols, const std::vector<uint16_t>& q, int head_dim,
                                       int power) {
    return cols == 64    ? halves_of_q<64>(q, head_dim, power)
           : cols == 128 ? halves_of_q<128>(q, head_dim, power)
                         : halves_of_q<256>(q, head_dim, power);
}

using ByteColumns = QueriesAsColumns<BInOrder<16, 64>, SharedTile<Float8, kByteKeys, 64>,
                                     SharedTile<Float8, kByteKeys, 64>, 16>;

// P^T as B, in bfloat16, of 16 keys from 16 k on and 16 queries: each element 7 query + key.
Registers transposed_p(int k) {
    Registers all(32);
    device::shuffle = device::shuffle_of_warp;
    device::given.clear();
    device::run_warp(0, [&](int lane) {
        ByteColumns::Scores p;
        p.for_each(
            [&](float& x, int key, int query) { x = 7 * (query + lane_col()) + key + lane_row(); });
        uint32_t b[2][2];
        ByteColumns::transpose(b, p, k);
        std::copy(&b[0][0], &b[0][0] + 4, all[lane].begin());
    });
    device::shuffle = nullptr;
    return all;
}

// The rows (16 queries, 64 columns) as they are stored of a result O^T whose lanes have these
// elements [lane][m][n][i].
std::vector<std::vector<float>> stored_columns(
    const std::vector<std::vector<std::vector<std::array<float, 4>>>>& given) {
    std::vector all(16, std::vector<float>(64));
    for (int lane = 0; lane < 32; ++lane) {
        threadIdx = {unsigned(lane)};
        ByteColumns::Output o;
        for (int m = 0; m < o.kM; ++m)
            for (int n = 0; n < 2; ++n) std::copy_n(given[lane][m][n].begin(), 4, o.v[m][n]);
        for (int n = 0; n < 2; ++n)
            for (int i = 0; i < 2; ++i)
                ByteColumns::for_each_pair_of_row(o, n, i, [&](float x, float y, int col) {
                    all[8 * n + ByteColumns::row_of_lane(i)][col] = x;
                    all[8 * n + ByteColumns::row_of_lane(i)][col + 1] = y;
                });
    }
    return all;
}

// Of an accumulator, in bfloat16: 16 columns from 16 k on, each element 16 row + column - 16 k.
Registers from_accumulator(int k) {
    return registers_of_lanes([&](uint32_t (&registers)[4]) {
        RegisterTile<16, 64> acc;
        for (int n = 0; n < 8; ++n)
            for (int i = 0; i < 4; ++i)
                acc.v[0][n][i] =
                    (lane_row() + i / 2 * 8) * 16 + (8 * n + lane_col() + i % 2) - 16 * k;
        AFromRegisters<Half, RegisterTile<16, 64>>{acc}.load_a(registers, 0, k);
    });
}

// Which elements of 16 x kCols scores remain, of rows with these visible columns.
template <int kRows, int kCols>
std::vector<std::vector<bool>> masked(const std::vector<std::pair<int, int>>& visible,
                                      int first_col) {
    std::vector<std::vector<bool>> all(kRows, std::vector<bool>(kCols));
    for (int lane = 0; lane < 32; ++lane) {
        threadIdx = {unsigned(lane)};
        RegisterTile<kRows, kCols> scores;
        scores.clear();
        mask_scores(scores, first_col,
                    [&](int row) { return Interval{visible[row].first, visible[row].second}; });
        for (int m = 0; m < kRows / 16; ++m)
            for (int n = 0; n < kCols / 8; ++n)
                for (int i = 0; i < 4; ++i)
                    all[16 * m + lane_row() + i / 2 * 8][8 * n + lane_col() + i % 2] =
                        scores.v[m][n][i] == 0.f;
    }
    return all;
}

// The same by the words of queries, four each: of rows, or (by_keys) of columns. The other side are
// keys from first_key on.
template <int kRows, int kCols>
std::vector<std::vector<bool>> hidden(const std::vector<std::array<uint32_t, 4>>& given, bool bits,
                                      int first_key, bool by_keys) {
    std::vector<std::vector<bool>> all(kRows, std::vector<bool>(kCols));
    const auto* words = reinterpret_cast<const MaskWords*>(given.data());
    for (int lane = 0; lane < 32; ++lane) {
        threadIdx = {unsigned(lane)};
        using Scores = RegisterTile<kRows, kCols>;
        Scores scores;
        scores.clear();
        if (by_keys) {
            hide_queries(scores, visible_elements<Scores>(words, bits, first_key));
        } else {
            const auto of_row = [&](int row) -> const MaskWords& { return words[row]; };
            hide_keys(scores, of_row, bits, /*none=*/false, first_key);
        }
        for (int m = 0; m < kRows / 16; ++m)
            for (int n = 0; n < kCols / 8; ++n)
                for (int i = 0; i < 4; ++i)
                    all[16 * m + lane_row() + i / 2 * 8][8 * n + lane_col() + i % 2] =
                        scores.v[m][n][i] == 0.f;
    }
    return all;
}

// The elements that dropout keeps of a tile, whose rows are kRows.
template <OptionSet kOptions, Rows kRows, int kHeight, int kWidth>
std::vector<std::vector<bool>> kept(const DropoutMask& mask, int first_query, int first_key) {
    using Scores = RegisterTile<kHeight, kWidth>;
    std::vector<std::vector<bool>> all(kHeight, std::vector<bool>(kWidth));
    device::run_warp(0, [&](int) {
        for_each_keep<kOptions, kRows, Scores>(
            mask, first_query, first_key, [&](int m, int n, int i, bool keep) {
                all[16 * m + lane_row() + i / 2 * 8][8 * n + lane_col() + i % 2] = keep;
            });
    });
    return all;
}

// The same of P as the operand of P V.
template <int kWidth>
std::vector<std::vector<bool>> kept_pairs(const DropoutMask& mask, int first_query, int first_key) {
    std::vector<std::vector<bool>> all(16, std::vector<bool>(kWidth));
    device::run_warp(0, [&](int) {
        RegisterOperand<kWidth> p;
        for (auto& block : p.v)
            for (uint32_t& pair : block) pair = 0x12345678;
        drop_pairs<kWidth>(p, mask,
                           mask.place(first_query / 2 + lane_row(), first_key / 2 + lane_col()));
        for (int n = 0; n < kWidth / 16; ++n)
            for (int i = 0; i < 8; ++i) {
                const uint32_t half = p.v[n][i / 2] >> 16 * (i % 2) & 0xffff;
                all[lane_row() + i / 2 % 2 * 8][16 * n + lane_col() + i / 4 * 8 + i % 2] =
                    half == (i % 2 == 0 ? 0x5678 : 0x1234);
            }
    });
    return all;
}

}  // namespace
}  // namespace flash_ext

PYBIND11_MODULE(flash_ext_layouts, m) {
    using namespace flash_ext;
    bind_loads(m);
    bind_results(m);
    m.def("chunks", &chunks);
    m.def("descriptors", &descriptors);
    m.def("row_numbers", [](uint32_t address) { return RowNumbers<64>(address).at(0); });
    m.def("fragments", &fragments);
    m.def("from_accumulator", &from_accumulator);
    m.def("byte_operands", &any_byte_operands);
    m.def("halves_of_q", &any_halves_of_q);
    m.def("transposed_p", &transposed_p);
    m.def("stored_columns", &stored_columns);
    m.def("power_to_halves", [](float largest) {
        const int power = power_to_halves(largest);
        return std::tuple(power, to_power_of_two(power), to_power_of_two(-power));
    });
    m.def("masked",
          [](int rows, int cols, const std::vector<std::pair<int, int>>& visible, int first_col) {
              const auto kernel = rows == 32   ? masked<32, 64>
                                  : cols == 80 ? masked<16, 80>
                                               : masked<16, 128>;
              return kernel(visible, first_col);
          });
    m.def("kept", [](int rows, int cols, bool pairs, bool by_keys, std::array<int64_t, 3> numbers,
                     uint32_t threshold, int first_query, int first_key) {
        using enum Rows;
        constexpr OptionSet kPairs = OptionSet::kDropout;
        constexpr OptionSet kSingle = OptionSet::kDropout | OptionSet::kRareScale;
        const DropoutMask mask(numbers[0], numbers[1], numbers[2], threshold);
        const auto of = [&]<OptionSet kOptions, Rows kRows>() {
            return (rows == 32   ? kept<kOptions, kRows, 32, 64>
                    : cols == 16 ? kept<kOptions, kRows, 16, 16>
                                 : kept<kOptions, kRows, 16, 32>)(mask, first_query, first_key);
        };
        return pairs
                   ? (by_keys ? of.operator()<kPairs, kKeys>() : of.operator()<kPairs, kQueries>())
                   : (by_keys ? of.operator()<kSingle, kKeys>()
                              : of.operator()<kSingle, kQueries>());
    });
    m.def("kept_pairs",
          [](std::array<int64_t, 3> numbers, uint32_t threshold, int first_query, int first_key) {
              const DropoutMask mask(numbers[0], numbers[1], numbers[2], threshold);
              return kept_pairs<64>(mask, first_query, first_key);
          });
    m.def("hidden_by_words",
          [](int rows, int cols, const std::vector<std::array<uint32_t, 4>>& words, bool bits,
             int first_key, bool by_keys) {
              const auto kernel = rows == 32   ? hidden<32, 64>
                                  : cols == 64 ? hidden<16, 64>
                                               : hidden<16, 128>;
              return kernel(words, bits, first_key, by_keys);
          });
}
