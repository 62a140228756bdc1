// What all kernels share: conversions between bfloat16 and float32, reductions.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "threads.h"

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define SMELT_AVX512
#else
#include "avx2.h"
#endif

// For functions whose loops add to many vectors. GCC (12 was looked at) otherwise copies each of them to another register and
// back at every step: as many instructions again as multiply.
#if defined(__GNUC__) && !defined(__clang__)
#define SMELT_KEEPS_SUMS __attribute__((optimize("no-tree-coalesce-vars")))
#else
#define SMELT_KEEPS_SUMS
#endif

namespace smelt {

using bf16 = uint16_t;

inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}

// To the nearest, halves to even.
inline bf16 narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40);
    return bf16((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline __m512 widen16(__m256i values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

// Processors from 2022 on have instructions for bfloat16; before them, the same results take two or three others.
#if defined(SMELT_AVX512) && defined(__AVX512BF16__)
#define SMELT_BF16
inline __m256i narrow16(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

// The numbers of `low`, then those of `high`.
inline __m512i narrow32(__m512 high, __m512 low) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// Adds the products of both bfloat16 numbers of each lane.
inline __m512 add_pairs(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#else
inline __m256i narrow16(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}

inline __m512i narrow32(__m512 high, __m512 low) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(narrow16(low)), narrow16(high), 1);
}

inline __m512 add_pairs(__m512 sum, __m512i a, __m512i b) {
    const __m512i upper = _mm512_set1_epi32(int32_t(0xffff0000));
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, upper)), _mm512_castsi512_ps(_mm512_and_si512(b, upper)), sum);
}
#endif

inline __m512 load16(const bf16* from) { return widen16(_mm256_loadu_si256((const __m256i*)from)); }

inline __m512 load16(const bf16* from, __mmask16 mask) { return widen16(_mm256_maskz_loadu_epi16(mask, from)); }

inline __m512 load16(const float* from) { return _mm512_loadu_ps(from); }

inline void store16(bf16* to, __m512 values) { _mm256_storeu_si256((__m256i*)to, narrow16(values)); }

inline void store16(bf16* to, __m512 values, __mmask16 mask) {
    _mm256_mask_storeu_epi16(to, mask, narrow16(values));
}

inline __m512 narrowed(__m512 values) { return widen16(narrow16(values)); }

// The lanes of the first `count` numbers, all of them from 16 on.
inline __mmask16 first(int64_t count) { return count >= 16 ? __mmask16(0xffff) : __mmask16((1u << count) - 1); }

// e^x to about one unit in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
inline __m512 exp16(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(y, n);
}

#if defined(SMELT_AVX512)
// As avx2.h explains them.
constexpr int kNarrowSums = 0;
inline __m512i add_small_products(__m512i sum, __m512i codes, __m512i inputs) { return _mm512_dpbusd_epi32(sum, codes, inputs); }
inline __m512i widened_sums(__m512i sums) { return sums; }
#endif

}  // namespace smelt
