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

// Addresses of first tokens, offsets of q and of k, and numbers of first keys; 0 for none. numbers:
// of documents, the sides of the window, whether it has the first keys, and the stride of their
// numbers.
Documents documents_of(Input ids, bool ids_have_64_bits, std::array<uint64_t, 4> addresses,
                       std::array<int, 5> numbers) {
    Documents documents{.ids = reinterpret_cast<const void*>(ids.data),
                        .ids_have_64_bits = ids_have_64_bits,
                        .ids_strides = {ids.strides[0], ids.strides[1]},
                        .first_tokens = result<FirstTokens>(addresses[0]),
                        .cu_seqlens_q = result<int>(addresses[1]),
                        .cu_seqlens_k = result<int>(addresses[2]),
                        .count = numbers[0],
                        .first_keys = result<int>(addresses[3]),
                        .first_keys_stride = numbers[4]};
    const auto side = [](int window) { return window < 0 ? BandMask::kUnlimited : window; };
    documents.mask = {side(numbers[1]), side(numbers[2]), numbers[3] != 0};
    return documents;
}

// sizes: Bm, Hm, Sq, Sk; rows: the ints of rows of kv_tiles and q_tiles.
bool make(std::array<int, 4> sizes, Input dense, Input intervals, Input kinds,
          const Documents& documents, uint64_t hulls, uint64_t kv_tiles, uint64_t q_tiles,
          uint64_t words, std::array<int, 2> rows) {
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
    params.documents = documents;
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
    py::class_<Documents>(m, "Documents").def(py::init<>()).def(py::init(&documents_of));
    m.def("make", &make);
    // The bytes of a dense mask that were read by more than one at a time, since the last call.
    m.def("loads", [] {
        return std::pair(std::exchange(device::lowest_load, UINTPTR_MAX),
                         std::exchange(device::highest_load, 0));
    });
}
