// One or two rows of inputs of 16 bits by codes of 8, for processors that have no instruction which multiplies bytes and adds four products: there
// bytes are widened to 16 bits anyway, and an input of 16 bits takes no longer than one of 8. More rows, which do not wait for memory, are faster in
// panels.h. Results are those of linear_codes.cpp's loops, to the bit.
#pragma once

#include "panels.h"

#if defined(SMELT_PANELS)
namespace smelt {

SMELT_INLINE __m256i broadcast_pair(const int16_t* from) {
    int32_t pair;
    std::memcpy(&pair, from, 4);
    return _mm256_set1_epi32(pair);
}

SMELT_INLINE __m256i add_pairs_of_words(__m256i sum, __m256i codes, __m256i inputs) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes, inputs));
    asm("" : "+x"(sum));  // as in avx2.h
    return sum;
}

// Adds the products of four columns of 16 outputs by some rows: of the first and third column, then of the others.
template <int kRows>
SMELT_INLINE void add_words(__m512i bytes, const int16_t* in, __m512i (&sum)[kRows]) {
    const __m512i even = _mm512_and_si512(bytes, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(bytes, 8);
    asm volatile("" : "+r"(in));  // so that the compiler gives no registers to what it has read
#pragma GCC unroll 2
    for (int r = 0; r < kRows; r++) {
        const __m256i first = broadcast_pair(in + 2 * r);
        sum[r] = {add_pairs_of_words(sum[r].low, even.low, first), add_pairs_of_words(sum[r].high, even.high, first)};
        const __m256i second = broadcast_pair(in + 2 * (kRows + r));
        sum[r] = {add_pairs_of_words(sum[r].low, odd.low, second), add_pairs_of_words(sum[r].high, odd.high, second)};
    }
}

// One row by two tiles, or two by one, of which all sums are in registers.
template <Form kForm, int kRows, int kTiles, class Scale>
SMELT_KEEPS_SUMS void words_by_tiles(const Codes& w, const Rounded<int16_t>& x, int64_t tile, bf16* out) {
    constexpr int kVectors = 2 * kTiles, ahead = kTiles == 2 ? kPairsAhead : ahead_of(kForm);
    constexpr int64_t step = kForm == kEight ? 4 : 8;
    const int64_t columns = w.columns, groups = columns / w.group, pieces = columns / x.group, per = w.group / x.group;
    const int64_t bytes = columns * kTile * bits_of(kForm) / 8;
    const uint8_t *code = w.codes + tile * bytes, *low = w.lower + (kForm == kPlanes ? tile * bytes : 0);
    const int16_t* in = x.codes.data();
    __m512 total[kVectors][kRows];
    for (int i = 0; i < kVectors * kRows; i++) total[i / kRows][i % kRows] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pieces; p++) {
        __m512i sum[kVectors][kRows];
#pragma GCC unroll 16
        for (int i = 0; i < kVectors * kRows; i++) sum[i / kRows][i % kRows] = _mm512_setzero_si512();
        for (int64_t i = 0; i < x.group; i += step, code += 128, low += kForm == kPlanes ? 128 : 0, in += step * kRows) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                const int64_t at = v / 2 * bytes + v % 2 * 64;
                _mm_prefetch((const char*)code + at + ahead, kHint);
                if constexpr (kForm == kPlanes) _mm_prefetch((const char*)low + at + ahead, kHint);
                const __m512i stored = _mm512_loadu_si512(code + at), lower = kForm == kPlanes ? _mm512_loadu_si512(low + at) : stored;
                add_words<kRows>(first_columns<kForm>(stored, lower), in, sum[v]);
                if constexpr (kForm == kPlanes) add_words<kRows>(second_columns<kForm>(stored, lower), in + 4 * kRows, sum[v]);
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            const int64_t place = ((tile + v / 2) * groups + p / per) * kTile + v % 2 * 16;
            const __m512 scale = scales_at<Scale>(w.scales, place);
            __m512i zero = _mm512_set1_epi32(1);
            if (w.zeros) zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + place)));
#pragma GCC unroll 2
            for (int r = 0; r < kRows; r++) {
                const int64_t at = r * pieces + p;
                const __m512i less = _mm512_mullo_epi32(zero, _mm512_set1_epi32(x.less[at]));
                const __m512 found = _mm512_cvtepi32_ps(_mm512_add_epi32(sum[v][r], less));
                total[v][r] = _mm512_fmadd_ps(found, _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[at])), total[v][r]);
            }
        }
    }
    for (int v = 0; v < kVectors; v++)
        for (int r = 0; r < kRows; r++) store_vector(w, tile * kTile + v * 16, out + r * w.outputs, total[v][r]);
}

}  // namespace smelt
#endif
