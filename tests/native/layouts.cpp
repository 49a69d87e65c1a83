// Layouts of device code as a Python module, for tests/test_layouts.py: tensor maps and what TMA
// loads by them, matrix descriptors, and which lane has which element of a tile. Lanes run one
// after another.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "device.h"
#include "kernels/fa3/backward.cuh"
#include "kernels/fa3/decode_blocks.cuh"
#include "kernels/fa3/decode_scales.cuh"
#include "kernels/fa3/forward_fp8.cuh"
#include "kernels/fp8/transpose_v.cuh"
#include "problem/hide_by_words.cuh"
#include "problem/score.cuh"
#include "tile/gemm.cuh"
#include "tile/tensor_map.cuh"
#include "tile/transpose.cuh"
#include "tile/wgmma.cuh"

namespace py = pybind11;

namespace flash_ext {
cudaError_t backward_preprocess(const BackwardParams&, int, cudaStream_t) { return cudaSuccess; }
cudaError_t tile_bias(const Bias&, ElementType, const TiledBias&, cudaStream_t) {
    return cudaSuccess;
}
}  // namespace flash_ext

void __syncwarp() {}
void __syncthreads() {}

namespace device {

std::vector<std::array<uint64_t, 5>> loads;   // by TMA
std::vector<std::array<uint64_t, 3>> copies;  // by cp.async: address, source, is it valid?

void note(Event event, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e) {
    if (event == Event::kLoad) loads.push_back({a, b, c, d, e});
    if (event == Event::kCopy) copies.push_back({a, c, d});
}
bool runs_launches = false;
void launch(unsigned ctas, unsigned threads, size_t, std::function<void()> body) {
    if (!runs_launches) return;
    gridDim = {ctas};
    blockDim = {threads};
    for (blockIdx = {0}; blockIdx.x < ctas; ++blockIdx.x)
        for (threadIdx = {0}; threadIdx.x < threads; ++threadIdx.x) body();
}

// ldmatrix and stmatrix of a warp. A warp runs twice: what its lanes load depends on the addresses
// of all of them.
struct Matrices {
    uint32_t address[32];
    uint32_t registers[32][4];
    bool transposed;

    // Where register i of a lane has its element e.
    char* element(int lane, int i, int e) const {
        const int row = transposed ? 2 * (lane % 4) + e : lane / 4;
        const int column = transposed ? lane / 4 : 2 * (lane % 4) + e;
        return storage + address[8 * i + row] + 2 * column;
    }
};
std::vector<Matrices> matrix_loads, matrix_stores;
size_t load_number = 0, store_number = 0;
bool addresses_are_known = false;

Matrices& matrices(std::vector<Matrices>& all, size_t number) {
    if (number >= all.size()) all.resize(number + 1);
    return all[number];
}

void load_matrices(uint32_t (&registers)[4], uint32_t address, bool transposed) {
    Matrices& x = matrices(matrix_loads, load_number++);
    const int lane = threadIdx.x % 32;
    x.address[lane] = address;
    x.transposed = transposed;
    if (addresses_are_known)
        for (int i = 0; i < 4; ++i)
            for (int e = 0; e < 2; ++e)
                std::memcpy(reinterpret_cast<char*>(&registers[i]) + 2 * e, x.element(lane, i, e),
                            2);
}

void store_matrices(uint32_t address, const uint32_t (&registers)[4], bool transposed) {
    Matrices& x = matrices(matrix_stores, store_number++);
    const int lane = threadIdx.x % 32;
    x.address[lane] = address;
    x.transposed = transposed;
    std::copy(registers, registers + 4, x.registers[lane]);
}

// Shuffles of a warp that runs twice, as above: what its lanes have given, call by call.
std::vector<std::array<int64_t, 32>> given;
size_t shuffle_number = 0;

int64_t shuffle_of_warp(int64_t x, int lane) {
    if (shuffle_number >= given.size()) given.resize(shuffle_number + 1);
    std::array<int64_t, 32>& lanes = given[shuffle_number++];
    if (!addresses_are_known) lanes[threadIdx.x % 32] = x;
    return lanes[lane];
}

// Calls body(lane) for a warp, whose stores come last.
template <class Body>
void run_warp(int warp, Body body) {
    matrix_loads.clear();
    matrix_stores.clear();
    for (bool second : {false, true}) {
        addresses_are_known = second;
        for (int lane = 0; lane < 32; ++lane) {
            load_number = store_number = shuffle_number = 0;
            threadIdx = {unsigned(32 * warp + lane)};
            body(lane);
        }
    }
    for (const Matrices& x : matrix_stores)
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i)
                for (int e = 0; e < 2; ++e)
                    std::memcpy(x.element(lane, i, e),
                                reinterpret_cast<const char*>(&x.registers[lane][i]) + 2 * e, 2);
}

}  // namespace device

namespace flash_ext {
namespace {

using Half = __nv_bfloat16;
using Strides = std::array<int64_t, 3>;  // of batch, row and head

// --- Tiles of any of these shapes ---

template <class Element, int kRows, class Visit>
auto visit_width(int cols, Visit visit) {
    switch (cols) {
        case 32:
            return visit(SharedTile<Element, kRows, 32>{});
        case 64:
            return visit(SharedTile<Element, kRows, 64>{});
        case 80:
            if constexpr (sizeof(Element) == 2) return visit(SharedTile<Element, kRows, 80>{});
            break;
        case 96:
            return visit(SharedTile<Element, kRows, 96>{});
        case 128:
            return visit(SharedTile<Element, kRows, 128>{});
        case 192:
            return visit(SharedTile<Element, kRows, 192>{});
        case 256:
            return visit(SharedTile<Element, kRows, 256>{});
    }
    throw py::value_error("no such width");
}

template <class Element, class Visit>
auto visit_shape(int rows, int cols, Visit visit) {
    switch (rows) {
        case 64:
            return visit_width<Element, 64>(cols, visit);
        case 80:
            return visit_width<Element, 80>(cols, visit);
        default:
            throw py::value_error("no such height");
    }
}

template <class Visit>
auto visit_tile(int bytes, int rows, int cols, Visit visit) {
    return bytes == 1 ? visit_shape<Float8>(rows, cols, visit)
                      : visit_shape<Half>(rows, cols, visit);
}

// The address of every 16-byte chunk of every row.
std::vector<std::vector<int>> chunks(int bytes, int rows, int cols) {
    return visit_tile(bytes, rows, cols, [](auto tile) {
        using Tile = decltype(tile);
        std::vector<std::vector<int>> all(Tile::kRows);
        for (int row = 0; row < Tile::kRows; ++row)
            for (int chunk = 0; chunk < Tile::kCols / Tile::kChunk; ++chunk)
                all[row].push_back(Tile::offset(row, chunk));
        return all;
    });
}

// --- TMA ---

struct Map {
    uint64_t address;
    std::vector<uint64_t> sizes, strides;
    std::vector<uint32_t> box;
    int swizzle;  // bytes
};

Map described(const CUtensorMap& map) {
    const int swizzle = map.swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                        : map.swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                                                                   : 32;
    return {reinterpret_cast<uint64_t>(map.address),
            {map.sizes, map.sizes + map.rank},
            {map.strides, map.strides + map.rank - 1},
            {map.box, map.box + map.rank},
            swizzle};
}

TensorView view_of(uint64_t address, Strides strides) {
    return {reinterpret_cast<void*>(address), strides[0], strides[1], strides[2]};
}

// A map of the tensor, and the loads of a tile from row `row` on of a head.
auto load_tile_by_tma(int bytes, int rows, int cols, bool in_boxes, uint64_t address,
                      Strides strides, int head_dim, std::array<int, 4> head_rows, int row,
                      uint32_t shared) {
    return visit_tile(bytes, rows, cols, [&](auto tile) {
        using Tile = decltype(tile);
        const TensorView view = view_of(address, strides);
        const auto [batch, head, begin, count] = head_rows;
        const TensorRows tensor =
            KeyRows{batch, begin, count}.tensor_rows<typename Tile::Element>(view, head);
        CUtensorMap map;
        device::loads.clear();
        if (in_boxes) {
            encode_tensor_map<Tile>(map, view, head_dim, 16);
            tensor.template load<Tile, 16>(map, shared, 0, row);
        } else {
            encode_tensor_map<Tile>(map, view, head_dim);
            tensor.template load<Tile>(map, shared, 0, row);
        }
        return std::pair(described(map), device::loads);
    });
}

// --- Pages ---

// A head of a sequence with this table, of pages of `size` rows.
struct Paged {
    std::vector<int> table;
    int count, size, head, keys;

    Pages pages(int box_rows = 0) const {
        return {table.data(), static_cast<int64_t>(table.size()), count, size, box_rows};
    }
};

// A map of the pages, and the loads of a tile from key `key` on, in boxes of so many rows.
auto load_pages_by_tma(int bytes, int rows, int cols, int box_rows, uint64_t address,
                       Strides strides, int head_dim, const Paged& paged, int key,
                       uint32_t shared) {
    return visit_tile(bytes, rows, cols, [&](auto tile) {
        using Tile = decltype(tile);
        const TensorView view = view_of(address, strides);
        const Pages pages = paged.pages(box_rows);
        CUtensorMap map;
        device::loads.clear();
        encode_tensor_map<Tile>(map, view, head_dim, box_rows);
        const PagedKeyRows keys{pages, pages.table, paged.keys};
        for (int row = 0; row < Tile::kRows; row += box_rows) {
            const PagedKeyRows::Place place = keys.at(key + row);
            keys.tensor_rows<typename Tile::Element>(view, paged.head, place, key + row)
                .template load_boxes<Tile>(map, shared + row * Tile::kPitch, 0, place.row);
        }
        return std::pair(described(map), device::loads);
    });
}

// The copies of two tiles of 2-byte elements, one after the other, by a CTA of kThreads threads.
template <class Tile, int kThreads>
auto copies_of_pages(const TensorView& view, int head_dim, const Paged& paged,
                     std::array<int, 2> first_keys) {
    const Pages pages = paged.pages();
    const PagedKeyRows keys{pages, pages.table, paged.keys};
    std::array<std::vector<std::array<uint64_t, 3>>, 2> found;
    device::shuffle = device::shuffle_of_warp;
    for (int warp = 0; warp < kThreads / 32; ++warp) {
        std::array<std::vector<std::array<uint64_t, 3>>, 2> last[32];
        device::given.clear();
        device::run_warp(warp, [&](int lane) {
            PagedKeyCursor<Tile, kThreads, false, typename Tile::Element> cursor;
            cursor.start(keys, view, paged.head, first_keys[0]);
            for (int i = 0; i < 2; ++i) {
                device::copies.clear();
                cursor.template load<false>(0, keys, view, paged.head, head_dim, true,
                                            first_keys[i], first_keys[1]);
                last[lane][i] = device::copies;
            }
        });
        for (const auto& of_lane : last)
            for (int i = 0; i < 2; ++i)
                found[i].insert(found[i].end(), of_lane[i].begin(), of_lane[i].end());
    }
    device::shuffle = nullptr;
    return found;
}

auto load_pages_by_copies(int threads, int cols, uint64_t address, Strides strides, int head_dim,
                          const Paged& paged, std::array<int, 2> first_keys) {
    const TensorView view = view_of(address, strides);
    const auto by = [&](auto tile, auto of) {
        return copies_of_pages<decltype(tile), of.value>(view, head_dim, paged, first_keys);
    };
    if (threads == 32)  // a warp of decode.cuh
        return visit_width<Half, 16>(
            cols, [&](auto tile) { return by(tile, std::integral_constant<int, 32>{}); });
    return visit_width<Half, 64>(cols, [&](auto tile) {
        return threads == 128 ? by(tile, std::integral_constant<int, 128>{})
                              : by(tile, std::integral_constant<int, 256>{});
    });
}

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

// --- Stores ---

// V^T of a tile of V, from its bytes and to them, row by row.
template <int kKeys, int kCols>
std::vector<uint8_t> transposed(const std::vector<uint8_t>& v) {
    using Source = SharedTile<Float8, kKeys, kCols>;
    using Target = SharedTile<Float8, kCols, kKeys>;
    for (int key = 0; key < kKeys; ++key)
        for (int col = 0; col < kCols; ++col)
            storage[Source::offset(key, col / 16) + col % 16] = v[key * kCols + col];
    for (int warp = 0; warp < 2; ++warp)
        device::run_warp(warp,
                         [&](int) { transpose_fp8<Source, Target, 2>(0, Source::kBytes, warp); });
    std::vector<uint8_t> all;
    for (int col = 0; col < kCols; ++col)
        for (int key = 0; key < kKeys; ++key)
            all.push_back(storage[Source::kBytes + Target::offset(col, key / 16) + key % 16]);
    return all;
}

// What transpose_kernel makes of V (rows, heads, columns) in varlen sequences, or without offsets
// in a batch of `batch`, and where channel 0 and key 0 of each of them and of a head are. Of 16
// bits with scales of channels, from the maxima over kSumDivisor.
template <class Element>
std::pair<std::vector<uint8_t>, std::vector<int64_t>> transposed_v(
    std::vector<uint8_t> v, int batch, int heads, int cols, const std::vector<int>& cu_seqlens,
    const std::vector<int>& seqused, std::vector<float> amax) {
    const bool varlen = !cu_seqlens.empty();
    const int batches = varlen ? 1 : batch;
    const int row = heads * cols, rows = static_cast<int>(v.size() / sizeof(Element)) / row;
    std::vector<float> descale(amax.size());
    QuantizeParams params{};
    params.batch = batch;
    params.rows = rows / batches;
    params.heads = heads;
    params.head_dim = cols;
    params.cu_seqlens = varlen ? cu_seqlens.data() : nullptr;
    params.seqused = seqused.empty() ? nullptr : seqused.data();
    params.x = {v.data(), int64_t{params.rows} * row, row, cols};
    params.scales = Scales::kChannel;
    params.amax = amax.data();
    params.descale = descale.data();
    params.numerator = kMaxFloat8 / kSumDivisor;
    params.least_amax = params.numerator / kMaxFactor;
    const int keys = transposed_keys(params.rows, batch, varlen);
    std::vector<uint8_t> all(int64_t{batches} * heads * cols * keys, 0xee);
    params.transposed = transposed_view(all.data(), heads, cols, keys);
    device::runs_launches = true;
    launch_transpose<Element>(params, nullptr);
    device::runs_launches = false;

    std::vector<int64_t> offsets;
    for (int number = 0; number < batch; ++number)
        for (int head = 0; head < heads; ++head) {
            Sequence s{varlen ? 0 : number, varlen ? number + 1 : 0, 0,
                       varlen ? cu_seqlens[number] : 0};
            offsets.push_back(transposed_v_offset(params.transposed, s, head));
        }
    offsets.push_back(keys);
    return {all, offsets};
}

// A map of V^T, and the loads of a tile from key `key` on of `keys` keys that begin at `offset`.
auto load_columns(int rows, int cols, uint64_t address, int64_t row_bytes, int64_t offset, int keys,
                  int key, uint32_t shared) {
    return visit_tile(1, rows, cols, [&](auto tile) {
        using Tile = decltype(tile);
        CUtensorMap map;
        device::loads.clear();
        encode_transposed_map<Tile>(map, reinterpret_cast<void*>(address), Tile::kRows - 16,
                                    row_bytes);
        tensor_columns(offset, keys).template load<Tile>(map, shared, 0, key);
        return std::pair(described(map), device::loads);
    });
}

// read(state) of an FP8 consumer that has loaded the descales of a KV tile, of a sequence with so
// many keys in use.
template <int kHeadDim, class Read>
auto with_descales(Fa3ForwardParams params, int keys, int kv_tile, Read read) {
    constexpr auto kTuning =
        tuning::fa3_forward_fp8_shape({kHeadDim, kHeadDim}, tuning::Fa3ForwardTile::kUsual);
    using Kernel = Fa3ForwardFp8<Float8, kHeadDim, kHeadDim, tuning::kVarlen, kTuning>;
    params.heads_q = params.heads_k = 1;
    threadIdx = {128};
    const Kernel kernel(params);
    typename Kernel::Scores scores;
    typename Kernel::Output out;
    typename Kernel::Softmax softmax;
    typename Kernel::State x{scores, out, softmax};
    x.kv_tile = kv_tile;
    QueryTile& tile = kernel.work_tiles[x.tile];
    tile = {};
    tile.sequence.seqlen_k = keys;
    kernel.begin_scales(x, tile);
    kernel.load_k_scales(x);
    return read(x);
}

// K's descales of a KV tile of 256 keys.
std::array<float, 2> key_descales(const std::vector<float>& descales, int keys, int kv_tile) {
    Fa3ForwardParams params{};
    params.k_descale.data = descales.data();
    params.k_descale.last_stride = 1;
    params.k_descale.last_block = static_cast<int>(descales.size()) - 1;
    return with_descales<128>(params, keys, kv_tile,
                              [](const auto& x) { return std::array{x.k_scale[0], x.k_scale[1]}; });
}

// Without descales: may a maximum be so large that rows are looked at, to be cooled?
template <int kHeadDim>
bool may_be_large(double scale) {
    Fa3ForwardParams params{};
    params.scale_log2 = static_cast<float>(scale * kLog2e);
    return with_descales<kHeadDim>(params, 512, 0, [](const auto& x) { return x.may_be_large; });
}

// dS^T in shared memory, (key, query), where that of key i and query j is kBlockQ i + j.
template <int kHeadDim>
std::vector<std::vector<int>> stored_ds() {
    constexpr auto kTuning =
        tuning::fa3_backward_shape({kHeadDim, kHeadDim}, tuning::kVarlen, false);
    using Kernel = Fa3Backward<Half, kHeadDim, kHeadDim, tuning::kVarlen, kTuning>;
    using Tile = typename Kernel::DSTile;
    constexpr int kBlockQ = Kernel::kBlockQ;
    static const Fa3BackwardParams params{};
    for (int warp = 4; warp < 12; ++warp)
        device::run_warp(warp, [&](int) {
            typename Kernel::Operand rdS;
            for (int k = 0; k < kBlockQ / 16; ++k)
                for (int i = 0; i < 4; ++i) {
                    const int key = 16 * (warp - 4) + lane_row() + i % 2 * 8;
                    const int query = 16 * k + i / 2 * 8 + lane_col();
                    const uint32_t number = kBlockQ * key + query;
                    rdS.v[k][i] = (number + 1) << 16 | number;
                }
            Kernel(params).store_ds(rdS, 1);
        });
    const char* stage = shared_storage<typename Kernel::SharedStorage>().ds[1];
    std::vector<std::vector<int>> all(Kernel::kBlockKV);
    for (int key = 0; key < Kernel::kBlockKV; ++key)
        for (int query = 0; query < kBlockQ; ++query) {
            const int row = kTuning.transpose_dq ? query : key;
            const int col = kTuning.transpose_dq ? key : query;
            uint16_t number;
            std::memcpy(&number, stage + Tile::offset(row, col / 8) + col % 8 * 2, 2);
            all[key].push_back(number);
        }
    return all;
}

}  // namespace
}  // namespace flash_ext

PYBIND11_MODULE(flash_ext_layouts, m) {
    using namespace flash_ext;
    py::class_<Map>(m, "Map")
        .def_readonly("address", &Map::address)
        .def_readonly("sizes", &Map::sizes)
        .def_readonly("strides", &Map::strides)
        .def_readonly("box", &Map::box)
        .def_readonly("swizzle", &Map::swizzle);
    m.def("chunks", &chunks);
    m.def("load_tile", &load_tile_by_tma);
    py::class_<Paged>(m, "Paged").def(py::init<std::vector<int>, int, int, int, int>());
    m.def("load_pages", &load_pages_by_tma);
    m.def("copy_pages", &load_pages_by_copies);
    // (address, valid rows) of the tile of 2-byte elements from key first_key on.
    m.def("key_tile",
          [](uint64_t address, Strides strides, std::array<int, 4> head_rows, int first_key) {
              const auto [batch, head, begin, count] = head_rows;
              const auto tile = KeyRows{batch, begin, count}.tile<uint16_t>(
                  view_of(address, strides), head, first_key, 0);
              return std::pair(reinterpret_cast<uint64_t>(tile.data), tile.rows);
          });
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
    m.def("hidden_by_words",
          [](int rows, int cols, const std::vector<std::array<uint32_t, 4>>& words, bool bits,
             int first_key, bool by_keys) {
              const auto kernel = rows == 32   ? hidden<32, 64>
                                  : cols == 64 ? hidden<16, 64>
                                               : hidden<16, 128>;
              return kernel(words, bits, first_key, by_keys);
          });
    m.def("transposed", [](int keys, int cols, const std::vector<uint8_t>& v) {
        return keys == 64 ? transposed<64, 64>(v) : transposed<192, 256>(v);
    });
    m.def("transposed_v", &transposed_v<Float8>);
    m.def("bits_of_keys", &bits_of_keys);
    m.def("quantized_v", &transposed_v<Half>);
    m.def("load_columns", &load_columns);
    m.def("key_descales", &key_descales);
    m.def("may_be_large", [](int head_dim, double scale) {
        return head_dim == 64    ? may_be_large<64>(scale)
               : head_dim == 128 ? may_be_large<128>(scale)
                                 : may_be_large<256>(scale);
    });
    m.def("stored_ds", [](int head_dim) {
        return head_dim == 64   ? stored_ds<64>()
               : head_dim == 96 ? stored_ds<96>()
                                : stored_ds<128>();
    });
}
