// What the kernels for weights of codes share; linear_codes.cpp says how those lie in memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace smelt {

constexpr int kTile = 32;

// How codes stand: of 4 bits, of 8, or of 8 in two planes.
enum Form { kFour, kEight, kPlanes };

constexpr int64_t bits_of(Form form) { return form == kEight ? 8 : 4; }  // of what stands in one place

constexpr int zero_of(Form form) { return form == kFour ? 8 : 128; }

inline Form form_of(const Codes& w) { return w.bits == 4 ? kFour : w.lower ? kPlanes : kEight; }

// How many bytes of a tile's codes are asked for in advance, and of two tiles at a time, whose codes are multiplied as fast as they come. On AMD's
// Zen 4 as in linear_dense.cpp: by way of the second cache 1.1 to 1.25 times as fast where memory is fast, 1.05 times where others use it. How
// far was tried, on Intel's Emerald Rapids, too (1.02 to 1.17 times as fast as 2048); there is no rule in it.
#if defined(SMELT_AMD)
constexpr auto kHint = _MM_HINT_T1;
constexpr int ahead_of(Form form) { return form == kPlanes ? 4096 : 6144; }
constexpr int kPairsAhead = 1024;
#else
constexpr auto kHint = _MM_HINT_T0;
#if defined(SMELT_AVX512)
constexpr int kPairsAhead = 4096;
#else
constexpr int kPairsAhead = 2048;
#endif
constexpr int ahead_of(Form) { return kPairsAhead; }
#endif

// A step's codes of its first 4 columns, and of the 4 after them, from what is stored, or from two planes.
template <Form kForm>
inline __m512i first_columns(__m512i stored, __m512i lower) {
    const __m512i nibble = _mm512_set1_epi8(15);
    if (kForm == kEight) return stored;
    if (kForm == kFour) return _mm512_and_si512(stored, nibble);
    return _mm512_or_si512(_mm512_slli_epi16(_mm512_and_si512(stored, nibble), 4), _mm512_and_si512(lower, nibble));
}

template <Form kForm>
inline __m512i second_columns(__m512i stored, __m512i lower) {
    const __m512i nibble = _mm512_set1_epi8(15);
    if (kForm == kFour) return _mm512_and_si512(_mm512_srli_epi16(stored, 4), nibble);
    return _mm512_or_si512(_mm512_andnot_si512(nibble, stored), _mm512_and_si512(_mm512_srli_epi16(lower, 4), nibble));
}

template <class Scale>
inline __m512 scales_at(const void* scales, int64_t place) {
    return load16((const Scale*)scales + place);
}

// Inputs rounded to int8; for each group of a row's columns a scale, and what to add for the weights' zero-point: minus the
// sum of the codes, times the zero-point if it is the same for all weights.
//
// Where the checkpoint fixes the scale, codes are what its own arithmetic gives: quotients are bfloat16 before they are rounded.
//
// With two parts, inputs are integers of 16 bits: how many times 256 they are is a row of its own here, and the rest the next one. Scales
// are powers of two, so that bfloat16 numbers down to a 64th of their group's largest are not changed. A group has up to 128 columns then.
// Where codes have 16 bits themselves they stand in one row, and columns 1 and 2 of each 4 in the other order (panels.h).
//
// Such rows stand in panels of up to `most`; a panel holds [4 columns][row][4 codes], or of 16 bits [2 columns][row][2 codes], so that a step of
// the loop over columns reads one stretch of memory, whatever the number of rows. Room is made for a multiple of `multiple` rows.
template <class Code>
struct Rounded {
    static constexpr bool kWide = sizeof(Code) == 2;
    static constexpr int64_t kStep = 4 / sizeof(Code);  // columns
    static constexpr int kExponent = 14;        // of the largest number of 16 bits, of which one is the sign
    static constexpr float kLargest = 32639.0f;  // that has two parts of int8

    std::vector<Code> codes;
    std::vector<float> scales;
    std::vector<int32_t> less;
    int64_t rows, columns, group, panels, height;  // rows of inputs, and how many of them a panel has
    int zero;
    float fixed;

    Rounded(const bf16* x, int64_t rows, int64_t columns, int64_t group, int parts, int64_t most, int64_t multiple, int zero, float fixed, int threads)
        : rows(rows), columns(columns), group(group), zero(zero), fixed(fixed) {
        const int64_t groups = columns / group, apart = kWide ? 1 : parts;  // rows that a row takes
        panels = (apart * rows + most - 1) / most;
        height = (rows + panels - 1) / panels;
        codes.resize((apart * rows + multiple - 1) / multiple * multiple * columns);
        scales.resize(rows * groups);
        less.resize(rows * groups);
        spread(threads, rows * groups, std::max<int64_t>(1, 16384 / group), [&](int64_t i) {
            const int64_t row = i / groups, g = i % groups, panel = row / height, stride = kStep * apart * height_of(panel);
            Code* to = codes.data() + apart * (panel * height * columns + kStep * (row - panel * height)) + g * group / kStep * stride;
            const bf16* from = x + row * columns + g * group;
            if (parts == 2) return split_group(from, to, stride, i);
            fixed > 0 ? round_group<true>(from, to, stride, i) : round_group<false>(from, to, stride, i);
        });
    }

    int64_t height_of(int64_t panel) const { return std::min(height, rows - panel * height); }

    // The largest of a group, and whether one is not a number.
    float largest_of(const bf16* x, bool& strange) const {
        __m512 most = _mm512_setzero_ps();
        __mmask16 found = 0;
        for (int64_t k = 0; k < group; k += 16) {
            const __m512 v = load16(x + k, first(group - k));
            found |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
            most = _mm512_max_ps(most, _mm512_abs_ps(v));
        }
        strange = found != 0;
        return _mm512_reduce_max_ps(most);
    }

    // 16 codes from column k of a group on.
    void put(__m512i values, int64_t k, Code* to, int64_t stride) const {
        alignas(32) Code each[16];
        if constexpr (kWide) {
            constexpr int kOrder = _MM_SHUFFLE(3, 1, 2, 0);
            const __m256i swapped = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(_mm512_cvtepi32_epi16(values), kOrder), kOrder);
            _mm256_store_si256((__m256i*)each, swapped);
        } else {
            _mm_store_si128((__m128i*)each, _mm512_cvtepi32_epi8(values));
        }
        const int64_t steps = std::min<int64_t>(16, group - k) / kStep;
        for (int64_t i = 0; i < steps; i++) std::memcpy(to + (k / kStep + i) * stride, each + kStep * i, 4);
    }

    template <bool kFixed>
    void round_group(const bf16* x, Code* to, int64_t stride, int64_t place) {
        bool strange;
        const float largest = largest_of(x, strange), scale = kFixed ? fixed : largest / 127.5f;
        const __m512 divisor = _mm512_set1_ps(largest > 0 ? scale : 1);
        __m512i sum = _mm512_setzero_si512();
        for (int64_t k = 0; k < group; k += 16) {
            __m512 quotient = _mm512_div_ps(load16(x + k, first(group - k)), divisor);
            if (kFixed) quotient = _mm512_min_ps(narrowed(quotient), _mm512_set1_ps(127));
            const __m512i code = _mm512_cvtps_epi32(quotient);
            const __m512i kept = _mm512_max_epi32(_mm512_min_epi32(code, _mm512_set1_epi32(127)), _mm512_set1_epi32(-128));
            sum = _mm512_add_epi32(sum, kept);
            put(kept, k, to, stride);
        }
        // What is not a number must reach the logits, not vanish in a cast.
        scales[place] = !strange && (kFixed || std::isfinite(largest)) ? scale : NAN;
        less[place] = -zero * _mm512_reduce_add_epi32(sum);
    }

    void split_group(const bf16* x, Code* to, int64_t stride, int64_t place) {
        bool strange;
        const float largest = largest_of(x, strange);
        const bool sound = !strange && std::isfinite(largest);
        int exponent = sound && largest > 0 ? kExponent - std::ilogb(largest) : 0;
        if (sound && std::ldexp(largest, exponent) > kLargest) exponent--;
        const __m512 factor = _mm512_set1_ps(float(exponent));
        __m512i sum = _mm512_setzero_si512();
        for (int64_t k = 0; k < group; k += 16) {
            const __m512i code = _mm512_cvtps_epi32(_mm512_scalef_ps(load16(x + k, first(group - k)), factor));
            sum = _mm512_add_epi32(sum, code);
            if constexpr (kWide) {
                put(code, k, to, stride);
                continue;
            }
            const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
            put(upper, k, to, stride);
            put(_mm512_sub_epi32(code, _mm512_slli_epi32(upper, 8)), k, to + 4, stride);
        }
        scales[place] = sound ? std::ldexp(1.0f, -exponent) : NAN;
        less[place] = sound ? -zero * _mm512_reduce_add_epi32(sum) : 0;
    }
};

// The upper four of 8 bits stand for the middle of what these may be. What that adds to a group's sum is half of the sum of the inputs' codes, of
// which `less` has -8 times as much.
inline __m512 half_of(int32_t less) { return _mm512_set1_ps(float(less) / -16); }

// The outputs from `at` on, up to 16 of them.
inline void store_vector(const Codes& w, int64_t at, bf16* to, __m512 values) {
    if (at >= w.outputs) return;
    if (w.upper) values = _mm512_mul_ps(values, _mm512_set1_ps(16));  // scales are those of 8 bits
    const __mmask16 there = first(w.outputs - at);
    if (w.bias) values = _mm512_add_ps(values, load16(w.bias + at, there));
    store16(to + at, values, there);
}

inline void store_tile(const Codes& w, int64_t tile, bf16* to, __m512 low, __m512 high) {
    store_vector(w, tile * kTile, to, low);
    store_vector(w, tile * kTile + 16, to, high);
}

}  // namespace smelt
