// c10::OutOfMemoryError made by torch's own constructor, found by name at run time: nothing is
// linked. Assumed of its layout: it is smaller than kBytes, has no members beyond those of
// c10::Error, and begins with the pointer to its table of virtual functions.
#include "api/out_of_memory.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <typeinfo>

// Since torch 2.13: the message of an error that a function of the stable ABI reports.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace flash_ext {
namespace {

// As c10::SourceLocation, which the constructor's name includes.
struct SourceLocation {
    const char* function;
    const char* file;
    uint32_t line;
};

void destroy(void* error) { static_cast<std::exception*>(error)->~exception(); }

}  // namespace

void throw_out_of_memory(const std::string& message) {
    constexpr size_t kBytes = 4096;
    const auto construct = reinterpret_cast<void (*)(void*, SourceLocation, std::string)>(
        dlsym(RTLD_DEFAULT,
              "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_"
              "traitsIcESaIcEEE"));
    auto* const type =
        static_cast<std::type_info*>(dlsym(RTLD_DEFAULT, "_ZTIN3c1016OutOfMemoryErrorE"));
    auto* const table = static_cast<void**>(dlsym(RTLD_DEFAULT, "_ZTVN3c1016OutOfMemoryErrorE"));
    if (construct == nullptr || type == nullptr || table == nullptr)
        throw std::runtime_error(message);
    void* const error = abi::__cxa_allocate_exception(kBytes);
    construct(error, {__func__, __FILE__, __LINE__}, message);
    *static_cast<void**>(error) = table + 2;  // after the offset to the top and the type
    abi::__cxa_throw(error, type, destroy);
}

void throw_failure(const std::string& otherwise) {
    const std::string why = torch_exception_get_what_without_backtrace != nullptr
                                ? torch_exception_get_what_without_backtrace()
                                : otherwise;
    if (why.find("CUDA out of memory") != std::string::npos) throw_out_of_memory(why);
    throw std::runtime_error(why);
}

}  // namespace flash_ext
