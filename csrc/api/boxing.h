// Between the dispatcher and C++: functions as kernels of ops, and calls of other ops.
#pragma once

#include <torch/csrc/stable/library.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "api/attention.h"

// The device whose kernels this library holds. Tests compile the host side for the CPU. The
// dispatcher finds the device by tensors; ops that take none have the device in their names.
#ifndef FLASH_EXT_DEVICE
#define FLASH_EXT_DEVICE CUDA
#define FLASH_EXT_AUTOGRAD AutogradCUDA
#endif
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define DEVICE_NAME TEXT(FLASH_EXT_DEVICE)

namespace flash_ext {

// What one of our kernels has thrown below call_op: torch keeps only its text.
inline thread_local std::exception_ptr thrown;

// Calls the op with the arguments on `stack`, and leaves its results there. An error of our own
// kernels keeps its type.
void call_op(const char* name, StableIValue* stack);

// Is T an argument for each of its fields()?
template <class T>
concept HasFields = requires(T x) { x.fields(); };

template <class T>
constexpr size_t count_of_arguments() {
    if constexpr (HasFields<T>) return std::tuple_size_v<decltype(T().fields())>;
    return 1;
}

template <class T>
T take(const StableIValue*& stack) {
    if constexpr (HasFields<T>) {
        T x;
        const auto take_all = [&](auto&... field) {
            ((field = take<std::remove_reference_t<decltype(field)>>(stack)), ...);
        };
        std::apply(take_all, x.fields());
        return x;
    } else if constexpr (std::is_same_v<T, std::string>) {
        // torch 2.11 to 2.13 would not free it: 48 bytes a call.
        const auto handle = torch::stable::detail::to<StringHandle>(*stack++);
        const char* characters = "";
        torch_string_c_str(handle, &characters);
        const std::string text = characters;
        torch_delete_string(handle);
        return text;
    } else {
        return torch::stable::detail::to<T>(*stack++);
    }
}

template <class... T>
void put(StableIValue* stack, const std::tuple<T...>& results) {
    torch::stable::detail::box_from_tuple<T...>(stack, results);
}
template <class T>
void put(StableIValue* stack, const T& result) {
    *stack = torch::stable::detail::from(result);
}

// A function as the kernel of an op, as TORCH_BOX makes it, but with Options.
template <auto kFunction>
struct Boxed;

template <class Result, class... Parameters, Result (*kFunction)(Parameters...)>
struct Boxed<kFunction> {
    static void run(StableIValue* stack, uint64_t inputs, uint64_t /*outputs*/) {
        if (inputs != (0 + ... + count_of_arguments<std::remove_cvref_t<Parameters>>()))
            throw std::runtime_error("flash_ext: the schema of an op has other arguments");
        const StableIValue* next = stack;
        std::tuple<std::remove_cvref_t<Parameters>...> arguments{
            take<std::remove_cvref_t<Parameters>>(next)...};  // braces: from left to right
        if constexpr (std::is_void_v<Result>) {
            std::apply(kFunction, arguments);
        } else {
            put(stack, std::apply(kFunction, arguments));
        }
    }
};

template <auto kFunction>
inline constexpr auto boxed = &Boxed<kFunction>::run;

}  // namespace flash_ext
