// Reading the numbers that a cache of keys and values may hold.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace smelt {

// Keys of a block and head stand as [pair of numbers][position][2], values as [pair of positions][number][2]: vdpbf16ps
// multiplies such pairs in 16 lanes and adds them up. A block of an odd number of positions ends with a pair of which one counts.
template <class T>
T* keys_of(const Cache& cache, int64_t place) {
    return (T*)cache.keys + place * (cache.size / 2) * cache.block * 2;
}

template <class T>
T* values_of(const Cache& cache, int64_t place) {
    return (T*)cache.values + place * ((cache.block + 1) / 2) * cache.size * 2;
}

// 16 lanes of two numbers as bfloat16, which holds what is stored exactly, without its scale.
template <class T>
__m512i pairs16(const T* from, __mmask16 lanes);

template <>
inline __m512i pairs16<bf16>(const bf16* from, __mmask16 lanes) {
    return _mm512_maskz_loadu_epi32(lanes, from);
}

template <>
inline __m512i pairs16<int8_t>(const int8_t* from, __mmask16 lanes) {
    const __m256i bytes = _mm256_maskz_loadu_epi16(lanes, from);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return narrow32(high, low);
}

// float8 e4m3's bits, moved, are a float16 that is 256 times too small.
template <>
inline __m512i pairs16<Float8>(const Float8* from, __mmask16 lanes) {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi16(lanes, from));
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8);
    const __m512i half = _mm512_or_si512(sign, _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x7f)), 7));
    const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(half)), high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    const __m512 larger = _mm512_set1_ps(256);
    return narrow32(_mm512_mul_ps(high, larger), _mm512_mul_ps(low, larger));
}

inline __m512i broadcast_pair(const bf16* from) {
    int32_t both;
    std::memcpy(&both, from, 4);
    return _mm512_set1_epi32(both);
}

inline __m512 capped(__m512 scores, float cap) {
    const __m512 twice = _mm512_mul_ps(scores, _mm512_set1_ps(2 / cap));
    const __m512 below = _mm512_add_ps(exp16(twice), _mm512_set1_ps(1));  // tanh(x) = 1 - 2 / (e^2x + 1)
    return _mm512_mul_ps(_mm512_sub_ps(_mm512_set1_ps(1), _mm512_div_ps(_mm512_set1_ps(2), below)), _mm512_set1_ps(cap));
}

}  // namespace smelt
