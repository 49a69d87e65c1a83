#include <stdexcept>
#include <string>

#include "api/attention.h"

// Since torch 2.13: the message of an error that a function of the stable ABI reports.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

// Of Python's stable ABI. Weak: a program without Python has neither.
extern "C" __attribute__((weak)) void* PyImport_ImportModule(const char* name);
extern "C" __attribute__((weak)) void* PyObject_GetAttrString(void* object, const char* name);

// As in torch/csrc/Exceptions.h, which is no header of the stable ABI: the base of exceptions that
// torch raises as the Python type that they name. The runtime compares classes by name, so nothing
// is linked. A torch without this class would raise RuntimeError.
namespace torch {
struct __attribute__((visibility("default"))) PyTorchError : std::exception {
    explicit PyTorchError(const std::string& message) : msg(message) {}
    virtual void* python_type() = 0;
    const char* what() const noexcept override { return msg.c_str(); }
    std::string msg;
};
}  // namespace torch

namespace flash_ext {
namespace {

struct OutOfMemory : torch::PyTorchError {
    using PyTorchError::PyTorchError;
    void* python_type() override {  // torch holds the GIL
        return PyObject_GetAttrString(PyImport_ImportModule("torch"), "OutOfMemoryError");
    }
};

}  // namespace

void throw_out_of_memory(const std::string& message) {
    if (PyImport_ImportModule == nullptr) throw std::runtime_error(message);
    throw OutOfMemory(message);
}

void throw_failure(const std::string& otherwise) {
    const std::string why = torch_exception_get_what_without_backtrace != nullptr
                                ? torch_exception_get_what_without_backtrace()
                                : otherwise;
    if (why.find("CUDA out of memory") != std::string::npos) throw_out_of_memory(why);
    throw std::runtime_error(why);
}

}  // namespace flash_ext
