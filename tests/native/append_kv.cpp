// kernels/common/append_kv.cuh as a Python module, for tests/test_append_kv.py. Threads run one
// after another; numbers are bfloat16 and not rounded.
#include "kernels/common/append_kv.cuh"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <functional>
#include <stdexcept>
#include <vector>

#include "launches.h"

namespace flash_ext {
namespace {

template <class T>
const T* pointer(uint64_t address) {
    return reinterpret_cast<const T*>(address);
}

// Addresses and strides of a tensor.
struct View {
    uint64_t data;
    std::array<int64_t, 3> strides;

    operator TensorView() const {
        return {reinterpret_cast<void*>(data), strides[0], strides[1], strides[2]};
    }
};

AppendedRows rows(View from, View to, std::array<int, 3> sizes, uint64_t cu_seqlens,
                  bool into_cache, bool rotated, bool at_one_position) {
    return {from,       to,      sizes[0],       sizes[1], sizes[2], pointer<int>(cu_seqlens),
            into_cache, rotated, at_one_position};
}

// `strides`: of the descales, and the last block.
void quantize_rows(AppendedRows& x, bool to_int8, uint64_t descale, std::array<int64_t, 4> strides,
                   bool by_column) {
    x.quantized = true;
    x.to_int8 = to_int8;
    x.descale = {pointer<float>(descale), strides[0], strides[1], strides[2],
                 static_cast<int>(strides[3])};
    x.by_column = by_column;
}

// The lengths with the new rows.
std::vector<int> append(int bits, bool whole, const std::vector<int>& cache_seqlens,
                        int64_t capacity, uint64_t table, std::array<int64_t, 3> pages,
                        uint64_t cos, uint64_t sin, std::array<int, 2> angles, bool interleaved,
                        const std::vector<int>& begins, const std::vector<AppendedRows>& tensors) {
    AppendKVParams params{};
    params.element_type = bits == 8 ? ElementType::kInt8 : ElementType::kBFloat16;
    params.whole = whole;
    params.batch = static_cast<int>(cache_seqlens.size());
    params.cache_seqlens = cache_seqlens.data();
    std::vector<int> used(cache_seqlens.size());
    params.seqused_k = used.data();
    params.capacity = capacity;
    params.pages = {pointer<int>(table), pages[0], static_cast<int>(pages[1]),
                    static_cast<int>(pages[2])};
    params.rotary = {pointer<void>(cos), pointer<void>(sin), true,         angles[0],
                     2 * angles[1],      interleaved,        begins.data()};
    for (const AppendedRows& x : tensors) params.tensors[params.count++] = x;
    if (append_kv(params, nullptr) != cudaSuccess) throw std::runtime_error("no kernel");
    return used;
}

}  // namespace
}  // namespace flash_ext

PYBIND11_MODULE(flash_ext_append_kv, m) {
    namespace py = pybind11;
    using namespace flash_ext;
    py::class_<View>(m, "View").def(py::init<uint64_t, std::array<int64_t, 3>>());
    py::class_<AppendedRows>(m, "Rows").def(py::init(&rows)).def("quantize", &quantize_rows);
    m.def("append", &append);
}
