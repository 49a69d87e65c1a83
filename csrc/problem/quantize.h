// Quantization of q, k or v to 8 bits, e4m3 or int8, x = x_8bit * descale: the parameters of its
// kernels.
#pragma once

#include <cstdint>

#include "tile/tensor_view.h"

namespace flash_ext {

// What shares a scale: everything; the rows of a head; 128 rows of a head; a column of a head.
enum class Scales { kTensor, kHead, kBlock, kChannel };

// Rows of a block scale. The FP8 kernels of FA3 count on it.
inline constexpr int kScaleRows = 128;
inline constexpr int kMaxQuantizeDim = 256;
inline constexpr float kMaxFloat8 = 448.f;  // of e4m3
inline constexpr float kMaxInt8 = 127.f;

// The kernels multiply numbers by powers of two, which cancel, so that nothing overflows and no
// number of bfloat16 loses a digit.
//
// Sums of up to 256 numbers, each less a mean, may exceed float32's largest number. So they are
// divided by kSumDivisor, as all maxima are; a difference alone by kDifferenceDivisor.
inline constexpr int kSumDivisor = 512;
inline constexpr int kDifferenceDivisor = 2;
// The factor from numbers to results is at most this. A smaller maximum counts as the one with this
// factor.
inline constexpr float kMaxFactor = 0x1p126f;
// int8 results are rounded in this unit. Otherwise numbers of bfloat16 would need a larger factor.
inline constexpr float kInt8Unit = 0x1p-12f;

struct QuantizeParams {
    ElementType element_type;
    int batch;  // B: sequences
    int rows;   // S; with varlen the total number of rows
    int heads;
    int head_dim;      // D, a multiple of 16
    int hadamard_dim;  // the largest power of two that divides D

    TensorView x;                     // (B, S, H, D), rows on 16-byte boundaries
    uint8_t* x_8bit = nullptr;        // (B, S, H, D), contiguous
    TensorView transposed;            // (B, H, D, keys) in the place of x_8bit, if it has data
    bool to_int8 = false;             // otherwise e4m3; with block scales only
    const int* cu_seqlens = nullptr;  // (B + 1), of varlen
    const int* seqused = nullptr;     // (B), the rows in use; others become zeros
    const int8_t* signs = nullptr;    // (D), 1 or -1; null: no rotation
    const float* mean = nullptr;      // (B, H, D), subtracted first

    Scales scales = Scales::kTensor;
    bool finds_maxima = false;  // a first pass, of scales of a tensor or of heads
    int blocks = 0;             // of descale, per head
    float* amax = nullptr;      // (1), (B, H) or (B, H, D), workspace; not for block scales
    // The factor from numbers to results is numerator / amax, with amax no less than least_amax.
    float numerator = 0.f;
    float least_amax = 0.f;
    double descale_of_1 = 0.;  // descale is this times amax
    float* descale = nullptr;  // (1), (B, H), (B, H, blocks) or (B, H, D)

    // The mean over rows, of which sums are taken first.
    float* sums = nullptr;      // (tensor batches, tiles, H, D), workspace
    float* mean_out = nullptr;  // (B, H, D)
};

}  // namespace flash_ext
