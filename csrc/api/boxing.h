// Between the dispatcher and C++: the options of a schema as parameters, and calls of other ops.
#pragma once

#include <torch/csrc/stable/library.h>

#include <exception>
#include <string>
#include <utility>

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

// The options as parameters, as the dispatcher passes them, and gathered.
#define OPTION_PARAMETERS                                                                      \
    std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right,       \
        double softcap, std::optional<Tensor> alibi_slopes, std::optional<Tensor> bias,        \
        std::optional<Tensor> sink, std::optional<Tensor> cu_seqlens_q,                        \
        std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> seqused_k, double dropout_p, \
        std::optional<Tensor> rng_state, std::optional<Tensor> q_descale,                      \
        std::optional<Tensor> k_descale, std::optional<Tensor> v_descale,                      \
        std::optional<torch::headeronly::ScalarType> out_dtype, bool deterministic, Text variant
#define OPTIONS                                                                                 \
    Options {                                                                                   \
        scale, causal, window_left, window_right, softcap, std::move(alibi_slopes),             \
            std::move(bias), std::move(sink), std::move(cu_seqlens_q), std::move(cu_seqlens_k), \
            std::move(seqused_k), dropout_p, std::move(rng_state), std::move(q_descale),        \
            std::move(k_descale), std::move(v_descale), out_dtype, deterministic,               \
            std::move(variant.value)                                                            \
    }

namespace flash_ext {

// What one of our kernels has thrown below call_op: torch keeps only its text.
inline thread_local std::exception_ptr thrown;

// Calls the op with the arguments on `stack`, and leaves its results there. An error of our own
// kernels keeps its type.
void call_op(const char* name, StableIValue* stack);

// A str of a schema. As a std::string torch 2.11 to 2.13 would not free it: 48 bytes a call.
struct Text {
    std::string value;
};

}  // namespace flash_ext

template <>
struct torch::stable::detail::ToImpl<flash_ext::Text> {
    static flash_ext::Text call(StableIValue value, uint64_t /*version*/, bool /*internal*/) {
        const StringHandle handle = to<StringHandle>(value);
        const char* characters = "";
        torch_string_c_str(handle, &characters);
        flash_ext::Text text{characters};
        torch_delete_string(handle);
        return text;
    }
};
