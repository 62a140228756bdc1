// Many rows by one tile of codes, where there is no instruction that multiplies bytes and adds four products (codes_avx2.h): a stretch of columns by
// all panels of rows, then the next one. Results are those of linear_codes.cpp's loops, to the bit.
#pragma once

#include <algorithm>

#include "codes.h"
#include "codes_avx2.h"

#if defined(SMELT_PANELS)
namespace smelt {

constexpr int64_t kStretch = 128;      // columns
constexpr int64_t kTogetherRows = 96;  // that a tile is read for

// Codes of 8 bits from those of two planes, as they would stand without planes.
inline void join_planes(const uint8_t* code, const uint8_t* low, int64_t columns, uint8_t* to) {
    for (int64_t i = 0; i < columns * kTile / 2; i += 128, to += 256)
        for (int half = 0; half < 128; half += 64) {
            const __m512i stored = _mm512_loadu_si512(code + i + half), lower = _mm512_loadu_si512(low + i + half);
            _mm512_store_si512(to + half, first_columns<kPlanes>(stored, lower));
            _mm512_store_si512(to + 128 + half, second_columns<kPlanes>(stored, lower));
        }
}

template <class Code>
inline void add_products(int64_t rows, const uint8_t* codes, const Code* x, int64_t columns, __m512i* sums, const uint8_t* asked) {
    switch (rows) {
        case 6: return add_products<6>(codes, x, columns, sums, asked);
        case 5: return add_products<5>(codes, x, columns, sums, asked);
        case 4: return add_products<4>(codes, x, columns, sums, asked);
        case 3: return add_products<3>(codes, x, columns, sums, asked);
        case 2: return add_products<2>(codes, x, columns, sums, asked);
        case 1: return add_products<1>(codes, x, columns, sums, asked);
    }
}

// The panels from `begin` to `end`, of up to kTogetherRows rows, by one tile.
template <Form kForm, int kParts, class Code, class Scale>
void panels_by_tile(const Codes& w, const Rounded<Code>& x, int64_t begin, int64_t end, int64_t tile, bf16* out) {
    const int64_t columns = w.columns, groups = columns / w.group, pieces = columns / x.group, per = w.group / x.group;
    const int64_t row = begin * x.height, rows = std::min(end * x.height, x.rows) - row;
    alignas(64) uint8_t joined[kForm == kPlanes ? kStretch * kTile : 64];
    alignas(64) __m512i sum[2][kTogetherRows * kParts];
    alignas(64) __m512 total[2][kTogetherRows];
    for (int64_t r = 0; r < rows; r++) total[0][r] = total[1][r] = _mm512_setzero_ps();
    int64_t from = tile * columns * kTile * bits_of(kForm) / 8;  // where codes stand
    for (int64_t p = 0; p < pieces; p++) {
        const auto place = [&](int vector) { return (tile * groups + p / per) * kTile + vector * 16; };
        for (int vector = 0; vector < 2; vector++) {
            __m512i zero = _mm512_set1_epi32(1);
            if (w.zeros) zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + place(vector))));
            for (int64_t r = 0; r < rows; r++) {
                // Of a row's parts the last one has what is added for all.
                if constexpr (kParts == 2) sum[vector][2 * r] = _mm512_setzero_si512();
                sum[vector][kParts * (r + 1) - 1] = _mm512_mullo_epi32(zero, _mm512_set1_epi32(x.less[(row + r) * pieces + p]));
            }
        }
        for (int64_t at = 0; at < x.group; at += kStretch) {
            const int64_t count = std::min(kStretch, x.group - at), bytes = count * kTile * bits_of(kForm) / 8;
            if constexpr (kForm == kPlanes) join_planes(w.codes + from, w.lower + from, count, joined);
            for (int vector = 0; vector < 2; vector++) {
                const uint8_t* codes = (kForm == kPlanes ? joined : w.codes + from) + 64 * vector;
                // Meanwhile others are asked for: with each vector one half of what this loop reads, or one plane.
                const uint8_t* asked = (kForm == kPlanes && vector ? w.lower : w.codes) + from + ahead_of(kForm);
                if (kForm != kPlanes) asked += vector * bytes / 2;
                for (int64_t panel = begin; panel < end; panel++) {
                    const int64_t high = kParts * x.height_of(panel);
                    const Code* in = x.codes.data() + kParts * panel * x.height * columns + high * (p * x.group + at);
                    add_products(high, codes, in, count, sum[vector] + kParts * (panel - begin) * x.height, panel == begin ? asked : codes);
                }
            }
            from += bytes;
        }
        for (int vector = 0; vector < 2; vector++) {
            const __m512 scale = scales_at<Scale>(w.scales, place(vector));
            for (int64_t r = 0; r < rows; r++) {
                const int64_t at = (row + r) * pieces + p;
                __m512i all = sum[vector][kParts * r];
                // Nothing overflows: with two parts a group has up to 128 columns.
                if constexpr (kParts == 2) all = _mm512_add_epi32(_mm512_slli_epi32(all, 8), sum[vector][2 * r + 1]);
                __m512 found = _mm512_cvtepi32_ps(all);
                if (kForm == kFour && w.upper) found = _mm512_add_ps(found, half_of(x.less[at]));
                total[vector][r] = _mm512_fmadd_ps(found, _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[at])), total[vector][r]);
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) store_tile(w, tile, out + (row + r) * w.outputs, total[0][r], total[1][r]);
}

}  // namespace smelt
#endif
