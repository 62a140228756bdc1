// Of a bfloat16 weight some columns of some outputs, widened to float32 once for all rows that are multiplied by them: for processors without
// AVX-512. Each sum is what linear_dense.cpp's other kernels give: lanes are the same, and so is the order of what is added to them.
#pragma once

#include "simd.h"

#include <array>

namespace smelt {

template <int kOutputs, int64_t kColumns>
class Widened {
public:
    // From an output to the next there are `stride` numbers. Of `next`, which lies alike, as much is asked for.
    void take(const bf16* weight, int64_t stride, int64_t columns, const bf16* next) {
        int64_t k = 0;
        for (; k + kStep <= columns; k += kStep)
            for (int n = 0; n < kOutputs; n++) {
                _mm_prefetch((const char*)(next + n * stride + k), _MM_HINT_T1);
                put(k, n, _mm512_loadu_si512(weight + n * stride + k));
            }
        if (k == columns) return;
        for (int n = 0; n < kOutputs; n++) put(k, n, _mm512_maskz_loadu_epi16((__mmask32(1) << (columns - k)) - 1, weight + n * stride + k));
    }

    // Adds the products by kRows rows. From a row of x to the next there are kStep numbers, then come the next columns.
    template <int kRows>
    void add_products(const bf16* x, int64_t columns, __m512 (&sum)[kRows][kOutputs]) const {
        add_half<kRows, 0>(x, columns, sum);  // the sums of both halves would need twice as many registers
        add_half<kRows, 1>(x, columns, sum);
    }

private:
    static constexpr int64_t kStep = 32;  // columns of a vector
    struct Outputs {
        __m256 of[kOutputs];
    };

    static __m256 even(__m256i values) { return _mm256_castsi256_ps(_mm256_slli_epi32(values, 16)); }
    static __m256 odd(__m256i values) { return _mm256_castsi256_ps(_mm256_and_si256(values, _mm256_set1_epi32(int32_t(0xffff0000)))); }

    void put(int64_t column, int output, __m512i values) {
        Outputs* to = numbers_.data() + column / kStep * 4;
        to[0].of[output] = even(values.low);
        to[1].of[output] = odd(values.low);
        to[2].of[output] = even(values.high);
        to[3].of[output] = odd(values.high);
    }

    // A function of its own: in a larger one GCC (12 was looked at) has fewer registers for sums.
    template <int kRows, int kHalf>
    [[gnu::noinline]] SMELT_KEEPS_SUMS void add_half(const bf16* x, int64_t columns, __m512 (&sum)[kRows][kOutputs]) const {
        __m256 mine[kRows][kOutputs];
#pragma GCC unroll 16
        for (int i = 0; i < kRows * kOutputs; i++) {
            const __m512& whole = sum[i / kOutputs][i % kOutputs];
            mine[i / kOutputs][i % kOutputs] = kHalf ? whole.high : whole.low;
        }
        const Outputs* w = numbers_.data() + 2 * kHalf;
        for (int64_t k = 0; k < columns; k += kStep, x += kRows * kStep, w += 4) {
#pragma GCC unroll 2
            for (int place = 0; place < 2; place++) {
                Outputs taken = w[place];
#pragma GCC unroll 4
                for (int n = 0; n < kOutputs; n++) asm("" : "+x"(taken.of[n]));  // GCC would read it again for each row
#pragma GCC unroll 4
                for (int r = 0; r < kRows; r++) {
                    const __m256i values = _mm256_load_si256((const __m256i*)(x + r * kStep) + kHalf);
                    const __m256 in = place ? odd(values) : even(values);
#pragma GCC unroll 4
                    for (int n = 0; n < kOutputs; n++) mine[r][n] = _mm256_fmadd_ps(taken.of[n], in, mine[r][n]);
                }
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < kRows * kOutputs; i++) {
            __m512& whole = sum[i / kOutputs][i % kOutputs];
            (kHalf ? whole.high : whole.low) = mine[i / kOutputs][i % kOutputs];
        }
    }

    std::array<Outputs, kColumns / kStep * 4> numbers_;
};

}  // namespace smelt
