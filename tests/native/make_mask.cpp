// kernels/common/make_mask.cuh as a Python module, for tests/test_make_mask.py.
#include "kernels/common/make_mask.cuh"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <functional>
#include <utility>

#include "launches.h"

namespace flash_ext {
namespace {

// Its address, 0 for none, and its strides.
struct Input {
    uint64_t data;
    std::array<int64_t, 4> strides;

    template <class T>
    operator MaskInput<T>() const {
        MaskInput<T> input{reinterpret_cast<const T*>(data)};
        std::copy(strides.begin(), strides.end(), input.strides);
        return input;
    }
};

template <class T>
T* result(uint64_t address) {
    return reinterpret_cast<T*>(address);
}

// sizes: Bm, Hm, Sq, Sk; rows: the ints of rows of kv_tiles and q_tiles.
bool make(std::array<int, 4> sizes, Input dense, Input intervals, Input kinds, uint64_t hulls,
          uint64_t kv_tiles, uint64_t q_tiles, uint64_t words, std::array<int, 2> rows) {
    MakeMaskParams params{};
    params.batch = sizes[0];
    params.heads = sizes[1];
    params.seqlen_q = sizes[2];
    params.seqlen_k = sizes[3];
    params.q_blocks = ceil_div(sizes[2], kMaskBlock);
    params.kv_blocks = ceil_div(sizes[3], kMaskBlock);
    params.dense = dense;
    params.intervals = intervals;
    params.kinds = kinds;
    params.new_kinds = result<uint8_t>(kinds.data);
    params.hulls = result<BlockHulls>(hulls);
    params.kv_tiles = result<int>(kv_tiles);
    params.q_tiles = result<int>(q_tiles);
    params.words = result<uint32_t>(words);
    params.kv_row = rows[0];
    params.q_row = rows[1];
    const device::Lockstep lockstep;
    return make_mask(params, nullptr) == cudaSuccess;
}

}  // namespace
}  // namespace flash_ext

PYBIND11_MODULE(flash_ext_make_mask, m) {
    namespace py = pybind11;
    using namespace flash_ext;
    py::class_<Input>(m, "Input").def(py::init<uint64_t, std::array<int64_t, 4>>());
    m.def("make", &make);
    // The bytes of a dense mask that were read by more than one at a time, since the last call.
    m.def("loads", [] {
        return std::pair(std::exchange(device::lowest_load, UINTPTR_MAX),
                         std::exchange(device::highest_load, 0));
    });
}
