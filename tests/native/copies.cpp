// kernels/common/copy_rows.cuh as a Python module, for tests/test_copy_rows.py. Threads run one
// after another.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <functional>
#include <vector>

#include "kernels/common/copy_rows.cuh"
#include "launches.h"

namespace flash_ext {
namespace {

// Its address, strides and sizes, and the address of its copy.
struct Tensor {
    uint64_t given;
    std::array<int64_t, 3> strides;
    std::array<int, 4> sizes;
    uint64_t copy;
};

RowCopy row_copy(const Tensor& x, const TensorView* copy) {
    const TensorView given{reinterpret_cast<void*>(x.given), x.strides[0], x.strides[1],
                           x.strides[2]};
    return {given, copy, x.sizes[0], x.sizes[1], x.sizes[2], x.sizes[3]};
}

}  // namespace
}  // namespace flash_ext

PYBIND11_MODULE(flash_ext_copies, m) {
    namespace py = pybind11;
    using namespace flash_ext;
    py::class_<Tensor>(m, "Tensor")
        .def(py::init<uint64_t, std::array<int64_t, 3>, std::array<int, 4>, uint64_t>())
        .def("unit_bytes", [](const Tensor& x) { return unit_bytes(row_copy(x, nullptr)); });
    m.def("copy_rows", [](const std::vector<Tensor>& tensors, bool back) {
        TensorView views[5];
        RowCopies copies;
        for (const Tensor& x : tensors) {
            views[copies.count].data = reinterpret_cast<void*>(x.copy);
            copies.all[copies.count] = row_copy(x, &views[copies.count]);
            ++copies.count;
        }
        return copy_rows(copies, back, nullptr) == cudaSuccess;
    });
}
