// Reading the numbers that a cache of keys and values may hold.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace smelt {

template <class T>
__m512 wide16(const T* from, __mmask16 mask);

template <>
inline __m512 wide16<bf16>(const bf16* from, __mmask16 mask) {
    return load16(from, mask);
}

template <>
inline __m512 wide16<int8_t>(const int8_t* from, __mmask16 mask) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, from)));
}

// float8 e4m3's bits, moved, are a float16 that is 256 times too small.
template <>
inline __m512 wide16<Float8>(const Float8* from, __mmask16 mask) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(mask, &from->bits));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256));
}

inline __m512 capped(__m512 scores, float cap) {
    const __m512 twice = _mm512_mul_ps(scores, _mm512_set1_ps(2 / cap));
    const __m512 below = _mm512_add_ps(exp16(twice), _mm512_set1_ps(1));  // tanh(x) = 1 - 2 / (e^2x + 1)
    return _mm512_mul_ps(_mm512_sub_ps(_mm512_set1_ps(1), _mm512_div_ps(_mm512_set1_ps(2), below)), _mm512_set1_ps(cap));
}

}  // namespace smelt
