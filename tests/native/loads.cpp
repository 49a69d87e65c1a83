// Tensor maps and what TMA loads by them, and where the keys of tiles are, dense and in pages, for
// tests/test_layouts.py.
#include "lanes.h"
#include "problem/key_rows.cuh"
#include "tile/tensor_map.cuh"

namespace flash_ext {
namespace {

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
        return {.table = table.data(),
                .stride = static_cast<int64_t>(table.size()),
                .count = count,
                .size = size,
                .box_rows = box_rows};
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

// --- V^T ---

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

}  // namespace

void bind_loads(py::module_& m) {
    py::class_<Map>(m, "Map")
        .def_readonly("address", &Map::address)
        .def_readonly("sizes", &Map::sizes)
        .def_readonly("strides", &Map::strides)
        .def_readonly("box", &Map::box)
        .def_readonly("swizzle", &Map::swizzle);
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
    m.def("load_columns", &load_columns);
}

}  // namespace flash_ext
