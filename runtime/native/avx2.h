// Vectors of 512 bits as two of 256, for processors with AVX2 and without AVX-512. They have the names of Intel's own types and
// functions, which those of namespace smelt hide, so that the kernels are written once. Here are the functions that they use, no more.
//
// Each rounds as Intel's does and adds in the same order. Masked loads and stores touch no memory but what the mask names.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

// Some compilers have macros of these names.
#undef _mm512_cmp_ps_mask
#undef _mm512_cmpeq_epi32_mask
#undef _mm512_extracti64x4_epi64
#undef _mm512_inserti64x4
#undef _mm512_mask_cmp_ps_mask
#undef _mm512_roundscale_ps
#undef _mm512_setr_epi32
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_ps

#define SMELT_INLINE [[gnu::always_inline]] inline

namespace smelt {

struct __m512 {
    __m256 low, high;
};

struct __m512i {
    __m256i low, high;
};

// What is done to both halves alike, of as many vectors as there are arguments.
#define SMELT_OF_ONE(type, name, half) \
    SMELT_INLINE type _mm512_##name(type a) { return {half(a.low), half(a.high)}; }
#define SMELT_OF_TWO(type, name, half) \
    SMELT_INLINE type _mm512_##name(type a, type b) { return {half(a.low, b.low), half(a.high, b.high)}; }
#define SMELT_OF_THREE(type, name, half) \
    SMELT_INLINE type _mm512_##name(type a, type b, type c) { return {half(a.low, b.low, c.low), half(a.high, b.high, c.high)}; }
#define SMELT_SHIFT(name) \
    SMELT_INLINE __m512i _mm512_##name(__m512i a, int bits) { return {_mm256_##name(a.low, bits), _mm256_##name(a.high, bits)}; }
#define SMELT_EVERYWHERE(type, name, number) \
    SMELT_INLINE type _mm512_##name(number value) { return {_mm256_##name(value), _mm256_##name(value)}; }

SMELT_OF_TWO(__m512, add_ps, _mm256_add_ps)
SMELT_OF_TWO(__m512, sub_ps, _mm256_sub_ps)
SMELT_OF_TWO(__m512, mul_ps, _mm256_mul_ps)
SMELT_OF_TWO(__m512, div_ps, _mm256_div_ps)
SMELT_OF_TWO(__m512, max_ps, _mm256_max_ps)
SMELT_OF_TWO(__m512, min_ps, _mm256_min_ps)
SMELT_OF_THREE(__m512, fmadd_ps, _mm256_fmadd_ps)
SMELT_OF_THREE(__m512, fmsub_ps, _mm256_fmsub_ps)
SMELT_OF_THREE(__m512, fnmadd_ps, _mm256_fnmadd_ps)
SMELT_OF_TWO(__m512i, add_epi32, _mm256_add_epi32)
SMELT_OF_TWO(__m512i, sub_epi32, _mm256_sub_epi32)
SMELT_OF_TWO(__m512i, mullo_epi32, _mm256_mullo_epi32)
SMELT_OF_TWO(__m512i, mul_epu32, _mm256_mul_epu32)
SMELT_OF_TWO(__m512i, max_epi32, _mm256_max_epi32)
SMELT_OF_TWO(__m512i, min_epi32, _mm256_min_epi32)
SMELT_OF_TWO(__m512i, min_epu32, _mm256_min_epu32)
SMELT_OF_TWO(__m512i, and_si512, _mm256_and_si256)
SMELT_OF_TWO(__m512i, andnot_si512, _mm256_andnot_si256)
SMELT_OF_TWO(__m512i, or_si512, _mm256_or_si256)
SMELT_OF_TWO(__m512i, xor_si512, _mm256_xor_si256)
SMELT_OF_TWO(__m512i, unpackhi_epi32, _mm256_unpackhi_epi32)
SMELT_OF_TWO(__m512i, unpackhi_epi64, _mm256_unpackhi_epi64)
SMELT_OF_TWO(__m512i, unpacklo_epi32, _mm256_unpacklo_epi32)
SMELT_OF_TWO(__m512i, unpacklo_epi64, _mm256_unpacklo_epi64)
SMELT_SHIFT(slli_epi16)
SMELT_SHIFT(slli_epi32)
SMELT_SHIFT(slli_epi64)
SMELT_SHIFT(srai_epi32)
SMELT_SHIFT(srli_epi16)
SMELT_SHIFT(srli_epi32)
SMELT_SHIFT(srli_epi64)
SMELT_EVERYWHERE(__m512, set1_ps, float)
SMELT_EVERYWHERE(__m512i, set1_epi8, char)
SMELT_EVERYWHERE(__m512i, set1_epi16, short)
SMELT_EVERYWHERE(__m512i, set1_epi32, int)

SMELT_INLINE __m512 _mm512_setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
SMELT_INLINE __m512i _mm512_setzero_si512() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
SMELT_INLINE __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k, int l, int m,
                                       int n, int o, int p) {
    return {_mm256_setr_epi32(a, b, c, d, e, f, g, h), _mm256_setr_epi32(i, j, k, l, m, n, o, p)};
}
SMELT_INLINE __m512 _mm512_broadcast_f32x4(__m128 four) { return {_mm256_set_m128(four, four), _mm256_set_m128(four, four)}; }

// Other types of the same bits, and other numbers.
SMELT_INLINE __m512 _mm512_castsi512_ps(__m512i a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
SMELT_INLINE __m512i _mm512_castps_si512(__m512 a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
SMELT_INLINE __m128 _mm512_castps512_ps128(__m512 a) { return _mm256_castps256_ps128(a.low); }
SMELT_INLINE __m256i _mm512_castsi512_si256(__m512i a) { return a.low; }
SMELT_INLINE __m512i _mm512_castsi256_si512(__m256i a) { return {a, a}; }
SMELT_INLINE __m512i _mm512_inserti64x4(__m512i a, __m256i b, int place) { return place ? __m512i{a.low, b} : __m512i{b, a.high}; }
SMELT_INLINE __m256i _mm512_extracti64x4_epi64(__m512i a, int place) { return place ? a.high : a.low; }
SMELT_INLINE __m512 _mm512_cvtepi32_ps(__m512i a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
SMELT_INLINE __m512i _mm512_cvtps_epi32(__m512 a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
SMELT_INLINE __m512i _mm512_cvtepu16_epi32(__m256i a) {
    return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))};
}
SMELT_INLINE __m512i _mm512_cvtepu8_epi16(__m256i a) {
    return {_mm256_cvtepu8_epi16(_mm256_castsi256_si128(a)), _mm256_cvtepu8_epi16(_mm256_extracti128_si256(a, 1))};
}
SMELT_INLINE __m512i _mm512_cvtepu8_epi32(__m128i a) { return {_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))}; }
SMELT_INLINE __m512i _mm512_cvtepi8_epi32(__m128i a) { return {_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))}; }
SMELT_INLINE __m512 _mm512_cvtph_ps(__m256i a) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
}
SMELT_INLINE __m256i _mm512_cvtepi32_epi16(__m512i a) {
    const __m256i last = _mm256_set1_epi32(0xffff);
    const __m256i mixed = _mm256_packus_epi32(_mm256_and_si256(a.low, last), _mm256_and_si256(a.high, last));
    return _mm256_permute4x64_epi64(mixed, 0xd8);  // packed by lanes of 128 bits
}
SMELT_INLINE __m128i _mm512_cvtepi32_epi8(__m512i a) {
    const __m256i words = _mm256_and_si256(_mm512_cvtepi32_epi16(a), _mm256_set1_epi16(0xff));
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

SMELT_INLINE __m512 _mm512_abs_ps(__m512 a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
SMELT_INLINE __m512 _mm512_roundscale_ps(__m512 a, int) {  // to whole numbers, halves to even
    return {_mm256_round_ps(a.low, 8), _mm256_round_ps(a.high, 8)};
}
// By 2^n for a whole n, in two steps, since 2^n alone may be too large or too small for a number.
SMELT_INLINE __m256 scaled_by_power(__m256 a, __m256 n) {
    const __m256i whole = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(n, _mm256_set1_ps(-252)), _mm256_set1_ps(252)));
    const __m256i part = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, part), bias = _mm256_set1_epi32(127);
    const auto power = [&](__m256i exponent) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, bias), 23)); };
    return _mm256_mul_ps(_mm256_mul_ps(a, power(part)), power(rest));
}
SMELT_OF_TWO(__m512, scalef_ps, scaled_by_power)

// Both patterns that are used of each kind choose numbers from `a` for the lower half of what they give, from `b` for the upper one.
SMELT_INLINE __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int pattern) {
    switch (pattern) {
        case 0x44: return {_mm256_shuffle_ps(a.low, b.low, 0x44), _mm256_shuffle_ps(a.high, b.high, 0x44)};
        case 0xee: return {_mm256_shuffle_ps(a.low, b.low, 0xee), _mm256_shuffle_ps(a.high, b.high, 0xee)};
        case 0x88: return {_mm256_shuffle_ps(a.low, b.low, 0x88), _mm256_shuffle_ps(a.high, b.high, 0x88)};
        case 0xdd: return {_mm256_shuffle_ps(a.low, b.low, 0xdd), _mm256_shuffle_ps(a.high, b.high, 0xdd)};
    }
    __builtin_unreachable();
}
SMELT_INLINE __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int pattern) {
    switch (pattern) {
        case 0x44: return {a.low, b.low};
        case 0xee: return {a.high, b.high};
        case 0x88: return {_mm256_permute2f128_ps(a.low, a.high, 0x20), _mm256_permute2f128_ps(b.low, b.high, 0x20)};
        case 0xdd: return {_mm256_permute2f128_ps(a.low, a.high, 0x31), _mm256_permute2f128_ps(b.low, b.high, 0x31)};
    }
    __builtin_unreachable();
}

// Memory.
SMELT_INLINE __m512 _mm512_loadu_ps(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
SMELT_INLINE __m512 _mm512_load_ps(const float* from) { return _mm512_loadu_ps(from); }
SMELT_INLINE void _mm512_storeu_ps(float* to, __m512 a) {
    _mm256_storeu_ps(to, a.low);
    _mm256_storeu_ps(to + 8, a.high);
}
SMELT_INLINE void _mm512_store_ps(float* to, __m512 a) { _mm512_storeu_ps(to, a); }
SMELT_INLINE __m512i _mm512_loadu_si512(const void* from) {
    return {_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)from + 1)};
}
SMELT_INLINE __m512i _mm512_load_si512(const void* from) { return _mm512_loadu_si512(from); }
SMELT_INLINE void _mm512_storeu_si512(void* to, __m512i a) {
    _mm256_storeu_si256((__m256i*)to, a.low);
    _mm256_storeu_si256((__m256i*)to + 1, a.high);
}
SMELT_INLINE void _mm512_store_si512(void* to, __m512i a) { _mm512_storeu_si512(to, a); }

// Masks are numbers with a bit for each lane.
SMELT_INLINE __m256i lanes_of(int mask) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask), bits), bits);
}
SMELT_INLINE __m512i _mm512_mask_mov_epi32(__m512i otherwise, __mmask16 mask, __m512i a) {
    return {_mm256_blendv_epi8(otherwise.low, a.low, lanes_of(mask)), _mm256_blendv_epi8(otherwise.high, a.high, lanes_of(mask >> 8))};
}
SMELT_INLINE __m512 _mm512_mask_mov_ps(__m512 otherwise, __mmask16 mask, __m512 a) {
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_castps_si512(otherwise), mask, _mm512_castps_si512(a)));
}
SMELT_INLINE __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 a) { return _mm512_mask_mov_ps(_mm512_setzero_ps(), mask, a); }
SMELT_INLINE __m512 _mm512_mask_max_ps(__m512 otherwise, __mmask16 mask, __m512 a, __m512 b) {
    return _mm512_mask_mov_ps(otherwise, mask, _mm512_max_ps(a, b));
}
SMELT_INLINE __m512 _mm512_mask_add_ps(__m512 otherwise, __mmask16 mask, __m512 a, __m512 b) {
    return _mm512_mask_mov_ps(otherwise, mask, _mm512_add_ps(a, b));
}
SMELT_INLINE __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
    const auto both = [](__m256 low, __m256 high) { return __mmask16(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8); };
    switch (how) {
        case _CMP_EQ_OQ: return both(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ));
        case _CMP_GE_OQ: return both(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ));
        case _CMP_GT_OQ: return both(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ));
        case _CMP_NEQ_UQ: return both(_mm256_cmp_ps(a.low, b.low, _CMP_NEQ_UQ), _mm256_cmp_ps(a.high, b.high, _CMP_NEQ_UQ));
        case _CMP_UNORD_Q: return both(_mm256_cmp_ps(a.low, b.low, _CMP_UNORD_Q), _mm256_cmp_ps(a.high, b.high, _CMP_UNORD_Q));
    }
    __builtin_unreachable();
}
SMELT_INLINE __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 mask, __m512 a, __m512 b, int how) { return mask & _mm512_cmp_ps_mask(a, b, how); }
SMELT_INLINE __mmask16 _mm512_cmpeq_epi32_mask(__m512i a, __m512i b) {
    const auto half = [](__m256i x, __m256i y) { return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x, y))); };
    return __mmask16(half(a.low, b.low) | half(a.high, b.high) << 8);
}
SMELT_INLINE __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* from) {
    if (mask == 0xffff) return _mm512_loadu_ps(from);
    return {_mm256_maskload_ps(from, lanes_of(mask)), _mm256_maskload_ps(from + 8, lanes_of(mask >> 8))};
}
SMELT_INLINE __m512 _mm512_mask_loadu_ps(__m512 otherwise, __mmask16 mask, const float* from) {
    return mask == 0xffff ? _mm512_loadu_ps(from) : _mm512_mask_mov_ps(otherwise, mask, _mm512_maskz_loadu_ps(mask, from));
}
SMELT_INLINE __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* from) {
    return _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, (const float*)from));
}
SMELT_INLINE void _mm512_mask_storeu_epi32(void* to, __mmask16 mask, __m512i a) {
    if (mask == 0xffff) return _mm512_storeu_si512(to, a);
    _mm256_maskstore_epi32((int*)to, lanes_of(mask), a.low);
    _mm256_maskstore_epi32((int*)to + 8, lanes_of(mask >> 8), a.high);
}
SMELT_INLINE void _mm512_mask_storeu_ps(float* to, __mmask16 mask, __m512 a) { _mm512_mask_storeu_epi32(to, mask, _mm512_castps_si512(a)); }

// Of 16 bits there are no masked instructions: one number after another, at the end of a row or between numbers that stay.
template <int kNumbers>
inline void read_some(uint16_t* to, uint32_t mask, const void* from) {
    for (int i = 0; i < kNumbers; i++) to[i] = mask >> i & 1 ? ((const uint16_t*)from)[i] : 0;
}
template <int kNumbers>
inline void write_some(void* to, uint32_t mask, const uint16_t* from) {
    for (int i = 0; i < kNumbers; i++)
        if (mask >> i & 1) ((uint16_t*)to)[i] = from[i];
}
SMELT_INLINE __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* from) {
    if (mask == 0xffff) return _mm256_loadu_si256((const __m256i*)from);
    alignas(32) uint16_t some[16];
    read_some<16>(some, mask, from);
    return _mm256_load_si256((const __m256i*)some);
}
SMELT_INLINE __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* from) {
    return {_mm256_maskz_loadu_epi16(mask, from), _mm256_maskz_loadu_epi16(mask >> 16, (const uint16_t*)from + 16)};
}
SMELT_INLINE void _mm256_mask_storeu_epi16(void* to, __mmask16 mask, __m256i a) {
    if (mask == 0xffff) return _mm256_storeu_si256((__m256i*)to, a);
    alignas(32) uint16_t all[16];
    _mm256_store_si256((__m256i*)all, a);
    write_some<16>(to, mask, all);
}
SMELT_INLINE void _mm512_mask_storeu_epi16(void* to, __mmask32 mask, __m512i a) {
    _mm256_mask_storeu_epi16(to, mask, a.low);
    _mm256_mask_storeu_epi16((uint16_t*)to + 16, mask >> 16, a.high);
}
SMELT_INLINE void _mm_mask_storeu_epi16(void* to, __mmask8 mask, __m128i a) {
    if (mask == 0xf) return _mm_storel_epi64((__m128i*)to, a);
    alignas(16) uint16_t all[8];
    _mm_store_si128((__m128i*)all, a);
    write_some<8>(to, mask, all);
}

// Sums and extremes of all lanes, in the order in which compilers add them up with AVX-512.
SMELT_INLINE float _mm512_reduce_add_ps(__m512 a) {
    const __m256 eight = _mm256_add_ps(a.high, a.low);
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(four, _mm_shuffle_ps(four, four, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_shuffle_ps(two, two, 1));
}
SMELT_INLINE float _mm512_reduce_max_ps(__m512 a) {
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_shuffle_ps(four, four, _MM_SHUFFLE(1, 0, 3, 2)));
    return std::max(_mm_cvtss_f32(two), _mm_cvtss_f32(_mm_shuffle_ps(two, two, 1)));
}
SMELT_INLINE int _mm512_reduce_add_epi32(__m512i a) {
    const __m256i eight = _mm256_add_epi32(a.low, a.high);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
SMELT_INLINE int _mm512_mask_reduce_min_epi32(__mmask16 mask, __m512i a) {
    alignas(32) int32_t each[16];
    _mm512_storeu_si512(each, _mm512_mask_mov_epi32(_mm512_set1_epi32(INT32_MAX), mask, a));
    return *std::min_element(each, each + 16);
}

// Adds four products of unsigned by signed bytes to each sum.
SMELT_INLINE __m256i add_four_products(__m256i sum, __m256i codes, __m256i inputs) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, codes, inputs);
#else
    // Products of pairs of bytes fit in no 16 bits: bytes in even places and in odd ones are widened first.
    const __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(codes, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, _mm256_srai_epi16(_mm256_slli_epi16(inputs, 8), 8)));
    asm("" : "+x"(sum));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(odd, _mm256_srai_epi16(inputs, 8)));
    asm("" : "+x"(sum));
    return sum;
#endif
}
SMELT_OF_THREE(__m512i, dpbusd_epi32, add_four_products)

// The same for codes below 16, of which so many products can be added up before a sum is widened; 0: sums are wide.
#if defined(__AVXVNNI__)
constexpr int kNarrowSums = 0;
SMELT_INLINE __m512i add_small_products(__m512i sum, __m512i codes, __m512i inputs) { return _mm512_dpbusd_epi32(sum, codes, inputs); }
SMELT_INLINE __m512i widened_sums(__m512i sums) { return sums; }
#else
constexpr int kNarrowSums = 8;  // of two products of 15 by -128
SMELT_INLINE __m256i add_to_narrow(__m256i sums, __m256i codes, __m256i inputs) {
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, inputs));
    asm("" : "+x"(sums));  // GCC 12 would add up products first, and run out of registers
    return sums;
}
SMELT_INLINE __m512i add_small_products(__m512i sums, __m512i codes, __m512i inputs) {
    return {add_to_narrow(sums.low, codes.low, inputs.low), add_to_narrow(sums.high, codes.high, inputs.high)};
}
SMELT_INLINE __m256i widened_half(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
SMELT_INLINE __m512i widened_sums(__m512i sums) { return {widened_half(sums.low), widened_half(sums.high)}; }
#endif

}  // namespace smelt
