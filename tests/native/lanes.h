// Lanes of a warp on the host, one after another, and tiles of shapes that are known at run time:
// what loads.cpp, layouts.cpp and results.cpp share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <vector>

#include "device.h"
#include "kernels/common/launch.cuh"
#include "ptx/float8.cuh"
#include "tile/copy.cuh"
#include "tile/swizzle.cuh"

namespace py = pybind11;

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

// The functions of each file.
void bind_loads(py::module_& m);
void bind_results(py::module_& m);

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

}  // namespace
}  // namespace flash_ext
