// P and dS from scores, element by element. Each element needs a value of its query, such as lse.
// Rows of scores are queries, or keys where everything is computed transposed.
#pragma once

#include "problem/score.cuh"
#include "problem/sequences.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace flash_ext {

// The sum of the products of eight elements.
template <class Element>
FLASH_DEVICE float dot(const uint4& a, const uint4& b) {
    const auto* x = reinterpret_cast<const Element*>(&a);
    const auto* y = reinterpret_cast<const Element*>(&b);
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += ptx::to_float(x[j]) * ptx::to_float(y[j]);
    return sum;
}

struct RowStatistics {
    float lse_log2;  // +inf for a row that sees no key, which makes its P zero
    float delta;     // without dropout's factor
};

// From rowsum(dO * O), lse and its gradient.
FLASH_DEVICE RowStatistics statistics_of(float dot, float lse, float dlse,
                                         float inverse_ds_factor) {
    if (lse == -INFINITY) return {INFINITY, 0.f};
    return {lse * kLog2e, (dot - dlse) * inverse_ds_factor};
}

// From one value per column: the values of this thread's two columns in block n of eight columns.
FLASH_DEVICE float2 column_pair(const float* of_columns, int n) {
    return *reinterpret_cast<const float2*>(of_columns + 8 * n + lane_col());
}

// visit(m, n, i, number) for all elements of a thread's scores, with the value of the element's
// query. numbers[0] belongs to the first query.
template <Rows kRows, class Scores, class Visit>
FLASH_DEVICE void for_each_with_query(const float* numbers, Visit visit) {
    if constexpr (kRows == Rows::kQueries) {
        for_each_row<Scores::kRows>([&](int m, int i, int row) {
            const float number = numbers[row];
#pragma unroll
            for (int n = 0; n < Scores::kN; ++n) {
                visit(m, n, 2 * i, number);
                visit(m, n, 2 * i + 1, number);
            }
        });
    } else {
#pragma unroll
        for (int n = 0; n < Scores::kN; ++n) {
            const float2 pair = column_pair(numbers, n);
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int m = 0; m < Scores::kM; ++m)
#pragma unroll
                    for (int i = 0; i < 2; ++i) visit(m, n, 2 * i + e, e == 0 ? pair.x : pair.y);
        }
    }
}

// Subtracts from scores the references of their queries (large_lse.cuh), most of which are 0. Only
// by rounding can a difference exceed 0.
// With `lse`: the scores already hold -lse / scale, but not in rows with a reference, where it is
// subtracted here.
template <Rows kRows, class Scores>
FLASH_DEVICE void subtract_references(Scores& s, const float* references,
                                      const float* lse = nullptr, float scale = 1.f) {
    const float inverse_scale = 1.f / scale;
    for_each_with_query<kRows, Scores>(references, [&](int m, int n, int i, float reference) {
        if (reference == 0.f) return;
        float& x = s.v[m][n][i];
        x = fminf(x - reference, 0.f);
        const int query =
            kRows == Rows::kQueries ? 16 * m + lane_row() + i / 2 * 8 : 8 * n + lane_col() + i % 2;
        if (lse != nullptr) x -= lse[query] * inverse_scale;
    });
}

// From S to P = 2^(S scale - lse), in place. Queries without keys have lse = +inf here, so P = 0.
template <Rows kRows, class Scores>
FLASH_DEVICE void exponentiate(Scores& s, const float* lse, float scale) {
    for_each_with_query<kRows, Scores>(lse, [&](int m, int n, int i, float lse_of_query) {
        s.v[m][n][i] = ptx::ex2(s.v[m][n][i] * scale - lse_of_query);
    });
}

// The same where S is already S - lse / scale.
template <class Scores>
FLASH_DEVICE void exponentiate(Scores& s, float scale) {
    s.map([&](float x) { return ptx::ex2(x * scale); });
}

// From dP to dS = P * (dP - delta), in place.
template <Rows kRows, class Scores>
FLASH_DEVICE void softmax_gradient(Scores& dp, const Scores& p, const float* minus_delta) {
    for_each_with_query<kRows, Scores>(minus_delta, [&](int m, int n, int i, float of_query) {
        dp.v[m][n][i] = p.v[m][n][i] * (dp.v[m][n][i] + of_query);
    });
}

// With a softcap alone P waits for dP, since the gradient of scores needs tanh, too. Of what a mask
// hides tanh becomes a number that is finite, as its derivative is then.
template <class Scores>
FLASH_DEVICE void keep_finite(Scores& tanh) {
    tanh.map([](float x) { return fmaxf(x, -0x1p60f); });
}
// From tanh to P, and from dP - delta to dS, in place.
template <Rows kRows, class Scores>
FLASH_DEVICE void softcap_gradient(Scores& tanh, Scores& ds, const float* lse, float cap) {
    for_each_with_query<kRows, Scores>(lse, [&](int m, int n, int i, float lse_of_query) {
        float& x = tanh.v[m][n][i];
        const float derivative = fmaf(-x, x, 1.f);
        x = ptx::ex2(x * cap - lse_of_query);
        ds.v[m][n][i] *= x * derivative;
    });
}
// From dP to dP - delta, in place.
template <Rows kRows, class Scores>
FLASH_DEVICE void subtract_delta(Scores& dp, const float* minus_delta) {
    for_each_with_query<kRows, Scores>(
        minus_delta, [&](int m, int n, int i, float of_query) { dp.v[m][n][i] += of_query; });
}

// With dropout, of tiles whose rows are keys: from dP to dS = P * (Z dP ds_factor - delta), and
// from P to Z P, in place.
template <OptionSet kOptions, class Scores>
FLASH_DEVICE void dropout_gradient(Scores& dp, Scores& p, const DropoutMask& mask, int first_query,
                                   int first_key, const float* minus_delta, float ds_factor) {
    for_each_keep<kOptions, Rows::kKeys, Scores>(
        mask, first_query, first_key, [&](int m, int n, int i, bool keep) {
            const float2 of_queries = column_pair(minus_delta, n);
            float& x = dp.v[m][n][i];
            float& y = p.v[m][n][i];
            x = y * ((keep ? x * ds_factor : 0.f) + (i % 2 == 0 ? of_queries.x : of_queries.y));
            if (!keep) y = 0.f;
        });
}

// An element of dbias.
template <class Element>
FLASH_DEVICE void store_dbias(const BackwardParams& params, int64_t index, float x) {
    if (params.bias.type == BiasType::kFloat32) {
        static_cast<float*>(params.dbias)[index] = x;
    } else {
        static_cast<Element*>(params.dbias)[index] = ptx::from_float<Element>(x);
    }
}

}  // namespace flash_ext
