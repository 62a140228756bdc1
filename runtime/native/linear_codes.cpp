// Linears whose weights are 4 or 8 bit codes with a scale for each group of columns.
//
// A weight is kept in tiles of 32 outputs. A tile holds its codes in steps of 4 columns (8 bits) or 8 columns (4 bits);
// a step is two vectors of 64 bytes: 16 outputs times 4 bytes. In a byte of two 4 bit codes the lower one is of column b,
// the upper one of column 4 + b. Codes are unsigned and have a zero-point; scales stand as [tile][group][32].
// So one vector instruction (vpdpbusd) multiplies 4 columns of 16 outputs, and a row's inputs are broadcast.
//
// Codes of 8 bits may stand in two planes, of their upper and of their lower four bits, each as codes of 4 bits stand. Who needs but
// the upper ones, such as a drafter, reads half of the memory.
#include "codes.h"

#include <algorithm>
#include <vector>

namespace smelt {
namespace {

constexpr int kPanel = 6;      // as many rows as have all their sums in registers
constexpr int kPaired = 3;      // up to as many are multiplied by two tiles at a time
constexpr int kTileRows = 16;  // from here on matrix tiles are used, where there are any
constexpr int64_t kPiece = 512 << 10;  // bytes of a weight that a thread takes at a time: its next ones were not asked for

// How codes stand: of 4 bits, of 8, or of 8 in two planes.
enum Form { kFour, kEight, kPlanes };

constexpr int64_t bits_of(Form form) { return form == kEight ? 8 : 4; }  // of what stands in one place

constexpr int zero_of(Form form) { return form == kFour ? 8 : 128; }

// How many bytes of a tile's codes are asked for in advance, and of two tiles at a time, whose codes are multiplied as fast as they come. On AMD's
// Zen 4 as in linear_dense.cpp: by way of the second cache 1.1 to 1.25 times as fast where memory is fast, 1.05 times where others use it. How
// far was tried; there is no rule in it.
#if defined(SMELT_AMD)
constexpr auto kHint = _MM_HINT_T1;
constexpr int ahead_of(Form form) { return form == kPlanes ? 4096 : 6144; }
constexpr int kPairsAhead = 1024;
#else
constexpr auto kHint = _MM_HINT_T0;
constexpr int ahead_of(Form) { return 2048; }
constexpr int kPairsAhead = 2048;
#endif
constexpr int kAhead = 2048, kExactAhead = 4096;  // where inputs are not rounded: of a tile, of two

// Of a step's codes in two planes: of 4 columns, and of the 4 after them.
inline __m512i first_columns(__m512i upper, __m512i lower) {
    const __m512i nibble = _mm512_set1_epi8(15);
    return _mm512_or_si512(_mm512_slli_epi16(_mm512_and_si512(upper, nibble), 4), _mm512_and_si512(lower, nibble));
}

inline __m512i second_columns(__m512i upper, __m512i lower) {
    const __m512i nibble = _mm512_set1_epi8(15);
    return _mm512_or_si512(_mm512_andnot_si512(nibble, upper), _mm512_and_si512(_mm512_srli_epi16(lower, 4), nibble));
}

// Scales are those of 8 bits, of which a step of the upper four is sixteen.
inline __m512 whole(const Codes& w, __m512 total) { return w.upper ? _mm512_mul_ps(total, _mm512_set1_ps(16)) : total; }

inline __m512i broadcast4(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return _mm512_set1_epi32(four);
}

// Some rows by one tile, inputs rounded to int8: exact sums within a group, float32 over groups.
// `next` codes are asked for meanwhile, `next_step` bytes at each step.
template <Form kForm, int kRows, class Scale>
SMELT_KEEPS_SUMS void tile_int8(const Codes& w, const Rounded& x, int64_t row, int64_t tile, const uint8_t* next, int64_t next_step, bf16* out) {
    constexpr int64_t step = kForm == kEight ? 4 : 8;
    const int64_t columns = w.columns, groups = columns / w.group, pieces = columns / x.group, per = w.group / x.group;
    const int64_t begin = tile * columns * kTile * bits_of(kForm) / 8;
    const uint8_t *code = w.codes + begin, *low = w.lower + (kForm == kPlanes ? begin : 0);
    const int8_t* in = x.codes.data() + row * columns;
    __m512 total[kRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) total[r][0] = total[r][1] = _mm512_setzero_ps();
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int64_t p = 0; p < pieces; p++) {
        const int64_t place = (tile * groups + p / per) * kTile;
        __m512i sum[kRows][2];
        if (w.zeros) {
            const __m512i zero0 = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + place)));
            const __m512i zero1 = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + place + 16)));
#pragma GCC unroll 16
            for (int r = 0; r < kRows; r++) {
                const __m512i minus = _mm512_set1_epi32(x.less[(row + r) * pieces + p]);
                sum[r][0] = _mm512_mullo_epi32(zero0, minus);
                sum[r][1] = _mm512_mullo_epi32(zero1, minus);
            }
        } else {
#pragma GCC unroll 16
            for (int r = 0; r < kRows; r++) sum[r][0] = sum[r][1] = _mm512_set1_epi32(x.less[(row + r) * pieces + p]);
        }
        for (int64_t i = 0; i < x.group / step; i++, code += 128, in += step * kRows) {
            const __m512i a = _mm512_loadu_si512(code), b = _mm512_loadu_si512(code + 64);
            if (next_step == 0) {
                _mm_prefetch((const char*)code + ahead_of(kForm), kHint);
                _mm_prefetch((const char*)code + ahead_of(kForm) + 64, kHint);
            } else {
                _mm_prefetch((const char*)next, _MM_HINT_T1);
                next += next_step;
            }
            if constexpr (kForm == kPlanes) {
                const __m512i c = _mm512_loadu_si512(low), d = _mm512_loadu_si512(low + 64);
                _mm_prefetch((const char*)low + ahead_of(kForm), kHint);
                _mm_prefetch((const char*)low + ahead_of(kForm) + 64, kHint);
                low += 128;
                const __m512i a0 = first_columns(a, c), b0 = first_columns(b, d);
#pragma GCC unroll 16
                for (int r = 0; r < kRows; r++) {
                    const __m512i four = broadcast4(in + 4 * r);
                    sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], a0, four);
                    sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], b0, four);
                }
                const __m512i a1 = second_columns(a, c), b1 = second_columns(b, d);
#pragma GCC unroll 16
                for (int r = 0; r < kRows; r++) {
                    const __m512i four = broadcast4(in + 4 * (kRows + r));
                    sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], a1, four);
                    sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], b1, four);
                }
            } else if constexpr (kForm == kFour) {
                const __m512i a0 = _mm512_and_si512(a, nibble), b0 = _mm512_and_si512(b, nibble);
#pragma GCC unroll 16
                for (int r = 0; r < kRows; r++) {
                    const __m512i four = broadcast4(in + 4 * r);
                    sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], a0, four);
                    sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], b0, four);
                }
                const __m512i a1 = _mm512_and_si512(_mm512_srli_epi16(a, 4), nibble);
                const __m512i b1 = _mm512_and_si512(_mm512_srli_epi16(b, 4), nibble);
#pragma GCC unroll 16
                for (int r = 0; r < kRows; r++) {
                    const __m512i four = broadcast4(in + 4 * (kRows + r));
                    sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], a1, four);
                    sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], b1, four);
                }
            } else {
#pragma GCC unroll 16
                for (int r = 0; r < kRows; r++) {
                    const __m512i four = broadcast4(in + 4 * r);
                    sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], a, four);
                    sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], b, four);
                }
            }
        }
        const __m512 scale0 = scales_at<Scale>(w.scales, place), scale1 = scales_at<Scale>(w.scales, place + 16);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) {
            const __m512 mine = _mm512_set1_ps(x.scales[(row + r) * pieces + p]);
            __m512 left = _mm512_cvtepi32_ps(sum[r][0]), right = _mm512_cvtepi32_ps(sum[r][1]);
            if (kForm == kFour && w.upper) {  // half of the sum of the inputs' codes, of which less has -8 times as much
                const __m512 half = _mm512_set1_ps(float(x.less[(row + r) * pieces + p]) / -16);
                left = _mm512_add_ps(left, half);
                right = _mm512_add_ps(right, half);
            }
            total[r][0] = _mm512_fmadd_ps(left, _mm512_mul_ps(scale0, mine), total[r][0]);
            total[r][1] = _mm512_fmadd_ps(right, _mm512_mul_ps(scale1, mine), total[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) store_tile(w, tile, out + (row + r) * w.outputs, whole(w, total[r][0]), whole(w, total[r][1]));
}

// Few rows by two tiles: memory answers two streams faster than one. Of each tile what tile_int8 gives.
template <Form kForm, int kRows, class Scale>
SMELT_KEEPS_SUMS void two_tiles_int8(const Codes& w, const Rounded& x, int64_t tile, bf16* out) {
    constexpr int64_t step = kForm == kEight ? 4 : 8;
    const int64_t columns = w.columns, groups = columns / w.group, pieces = columns / x.group, per = w.group / x.group;
    const int64_t bytes = columns * kTile * bits_of(kForm) / 8, begin = tile * bytes;
    const uint8_t *code = w.codes + begin, *low = w.lower + (kForm == kPlanes ? begin : 0);
    const int8_t* in = x.codes.data();
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 total[kRows][4];
#pragma GCC unroll 16
    for (int i = 0; i < 4 * kRows; i++) total[i / 4][i % 4] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pieces; p++) {
        const auto place = [&](int v) { return ((tile + v / 2) * groups + p / per) * kTile + v % 2 * 16; };
        __m512i sum[kRows][4];
#pragma GCC unroll 16
        for (int i = 0; i < 4 * kRows; i++) {
            sum[i / 4][i % 4] = _mm512_set1_epi32(x.less[i / 4 * pieces + p]);
            if (!w.zeros) continue;
            const __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + place(i % 4))));
            sum[i / 4][i % 4] = _mm512_mullo_epi32(zero, sum[i / 4][i % 4]);
        }
        for (int64_t i = 0; i < x.group / step; i++, code += 128, in += step * kRows) {
            __m512i a[4], b[4];  // of 4 columns, and of the 4 after them
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) {
                const int64_t from = v / 2 * bytes + v % 2 * 64;
                a[v] = _mm512_loadu_si512(code + from);
                _mm_prefetch((const char*)code + from + kPairsAhead, kHint);
                if constexpr (kForm == kPlanes) {
                    const __m512i upper = a[v], lower = _mm512_loadu_si512(low + from);
                    _mm_prefetch((const char*)low + from + kPairsAhead, kHint);
                    a[v] = first_columns(upper, lower);
                    b[v] = second_columns(upper, lower);
                } else if constexpr (kForm == kFour) {
                    b[v] = _mm512_and_si512(_mm512_srli_epi16(a[v], 4), nibble);
                    a[v] = _mm512_and_si512(a[v], nibble);
                }
            }
            if constexpr (kForm == kPlanes) low += 128;
#pragma GCC unroll 16
            for (int r = 0; r < kRows; r++) {
                const __m512i four = broadcast4(in + 4 * r);
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], a[v], four);
            }
            if constexpr (kForm == kEight) continue;
#pragma GCC unroll 16
            for (int r = 0; r < kRows; r++) {
                const __m512i four = broadcast4(in + 4 * (kRows + r));
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], b[v], four);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < 4 * kRows; i++) {
            const int r = i / 4, v = i % 4;
            const int64_t at = r * pieces + p;
            __m512 found = _mm512_cvtepi32_ps(sum[r][v]);
            if (kForm == kFour && w.upper) found = _mm512_add_ps(found, _mm512_set1_ps(float(x.less[at]) / -16));
            total[r][v] = _mm512_fmadd_ps(found, _mm512_mul_ps(scales_at<Scale>(w.scales, place(v)), _mm512_set1_ps(x.scales[at])), total[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 2 * kRows; i++)
        store_tile(w, tile + i % 2, out + i / 2 * w.outputs, whole(w, total[i / 2][i % 2 * 2]), whole(w, total[i / 2][i % 2 * 2 + 1]));
}

template <Form kForm, class Scale>
void pair_int8(const Codes& w, const Rounded& x, int64_t tile, bf16* out) {
    switch (x.rows) {
        case 3: return two_tiles_int8<kForm, 3, Scale>(w, x, tile, out);
        case 2: return two_tiles_int8<kForm, 2, Scale>(w, x, tile, out);
        case 1: return two_tiles_int8<kForm, 1, Scale>(w, x, tile, out);
    }
}

template <Form kForm, class Scale>
void panel_int8(const Codes& w, const Rounded& x, int64_t panel, int64_t place, int64_t panels, int64_t tile, bf16* out) {
    const int64_t row = panel * x.height;
    // With several panels, each asks for its part of the next tile; with one, memory is waited for anyway.
    const int64_t bytes = w.columns * kTile * bits_of(kForm) / 8, step = panels > 1 ? std::max<int64_t>(1, 128 / panels) : 0;
    const uint8_t* next = w.codes + (tile + 1) * bytes + place * bytes / panels;
    switch (x.height_of(panel)) {
        case 6: return tile_int8<kForm, 6, Scale>(w, x, row, tile, next, step, out);
        case 5: return tile_int8<kForm, 5, Scale>(w, x, row, tile, next, step, out);
        case 4: return tile_int8<kForm, 4, Scale>(w, x, row, tile, next, step, out);
        case 3: return tile_int8<kForm, 3, Scale>(w, x, row, tile, next, step, out);
        case 2: return tile_int8<kForm, 2, Scale>(w, x, row, tile, next, step, out);
        case 1: return tile_int8<kForm, 1, Scale>(w, x, row, tile, next, step, out);
    }
}

// Codes less 8, as bfloat16; the table stands twice, so that a fifth bit of the index does not matter.
alignas(64) constexpr bf16 kLess8[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

// Codes less 7.5: the upper half of 8 bits, with the middle of what the lower half may be.
alignas(64) constexpr bf16 kLessMiddle[32] = {
    0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020, 0xbfc0, 0xbf00, 0x3f00, 0x3fc0, 0x4020, 0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0,
    0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020, 0xbfc0, 0xbf00, 0x3f00, 0x3fc0, 0x4020, 0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0};

// Some rows by one tile, inputs as they are.
template <Form kForm, int kRows, class Scale>
void tile_exact(const Codes& w, const bf16* x, const float* sums, int64_t row, int64_t tile, bf16* out) {
    const int64_t columns = w.columns, groups = columns / w.group;
    const int64_t begin = tile * columns * kTile * bits_of(kForm) / 8;
    const uint8_t *code = w.codes + begin, *low = w.lower + (kForm == kPlanes ? begin : 0);
    __m512 total[kRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) total[r][0] = total[r][1] = _mm512_setzero_ps();
    const __m512i table = _mm512_load_si512(w.upper ? kLessMiddle : kLess8);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t place = (tile * groups + g) * kTile;
        __m512 sum[kRows][2];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
        if constexpr (kForm == kFour) {
            for (int64_t k = g * w.group, end = k + w.group; k < end; k += 8, code += 128) {
                __m512i a = _mm512_loadu_si512(code), b = _mm512_loadu_si512(code + 64);
                _mm_prefetch((const char*)code + kAhead, _MM_HINT_T0);
                _mm_prefetch((const char*)code + kAhead + 64, _MM_HINT_T0);
#pragma GCC unroll 16
                for (int pair = 0; pair < 4; pair++) {
                    const __m512i left = _mm512_permutexvar_epi16(a, table);
                    const __m512i right = _mm512_permutexvar_epi16(b, table);
#pragma GCC unroll 16
                    for (int r = 0; r < kRows; r++) {
                        int32_t two;
                        std::memcpy(&two, x + (row + r) * columns + k + 2 * pair, 4);
                        const __m512i both = _mm512_set1_epi32(two);
                        sum[r][0] = add_pairs(sum[r][0], left, both);
                        sum[r][1] = add_pairs(sum[r][1], right, both);
                    }
                    a = _mm512_srli_epi16(a, 4);
                    b = _mm512_srli_epi16(b, 4);
                }
            }
        } else {
            const __m512i bias = _mm512_set1_epi32(int32_t(0x80808080));
            for (int64_t k = g * w.group, end = k + w.group; k < end; k += 4) {
                __m512i a = _mm512_loadu_si512(code), b = _mm512_loadu_si512(code + 64);
                if constexpr (kForm == kPlanes) {
                    // A step of both planes gives two of these; the second one asks for what comes later.
                    const __m512i c = _mm512_loadu_si512(low), d = _mm512_loadu_si512(low + 64);
                    const bool second = k & 4;
                    a = second ? second_columns(a, c) : first_columns(a, c);
                    b = second ? second_columns(b, d) : first_columns(b, d);
                    if (second) {
                        for (const uint8_t* from : {code, low}) {
                            _mm_prefetch((const char*)from + kAhead, _MM_HINT_T0);
                            _mm_prefetch((const char*)from + kAhead + 64, _MM_HINT_T0);
                        }
                        code += 128;
                        low += 128;
                    }
                } else {
                    _mm_prefetch((const char*)code + kAhead, _MM_HINT_T0);
                    _mm_prefetch((const char*)code + kAhead + 64, _MM_HINT_T0);
                    code += 128;
                }
                a = _mm512_xor_si512(a, bias);
                b = _mm512_xor_si512(b, bias);
#pragma GCC unroll 16
                for (int byte = 3; byte >= 0; byte--) {
                    const __m512 left = _mm512_cvtepi32_ps(_mm512_srai_epi32(a, 24));
                    const __m512 right = _mm512_cvtepi32_ps(_mm512_srai_epi32(b, 24));
#pragma GCC unroll 16
                    for (int r = 0; r < kRows; r++) {
                        const __m512 one = _mm512_set1_ps(widen(x[(row + r) * columns + k + byte]));
                        sum[r][0] = _mm512_fmadd_ps(left, one, sum[r][0]);
                        sum[r][1] = _mm512_fmadd_ps(right, one, sum[r][1]);
                    }
                    a = _mm512_slli_epi32(a, 8);
                    b = _mm512_slli_epi32(b, 8);
                }
            }
        }
        const __m512 scale0 = scales_at<Scale>(w.scales, place), scale1 = scales_at<Scale>(w.scales, place + 16);
        if (w.zeros) {
            const __m512 half = _mm512_set1_ps(zero_of(kForm));
            const __m512 zero0 = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + place))));
            const __m512 zero1 = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + place + 16))));
#pragma GCC unroll 16
            for (int r = 0; r < kRows; r++) {
                const __m512 mine = _mm512_set1_ps(sums[(row + r) * groups + g]);
                sum[r][0] = _mm512_fmadd_ps(_mm512_sub_ps(half, zero0), mine, sum[r][0]);
                sum[r][1] = _mm512_fmadd_ps(_mm512_sub_ps(half, zero1), mine, sum[r][1]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) {
            total[r][0] = _mm512_fmadd_ps(sum[r][0], scale0, total[r][0]);
            total[r][1] = _mm512_fmadd_ps(sum[r][1], scale1, total[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) store_tile(w, tile, out + (row + r) * w.outputs, whole(w, total[r][0]), whole(w, total[r][1]));
}

// One row by two tiles of 4 bit codes: their sums do not wait for each other. Of each tile what tile_exact gives.
template <class Scale>
SMELT_KEEPS_SUMS void two_tiles_exact(const Codes& w, const bf16* x, const float* sums, int64_t tile, bf16* out) {
    const int64_t columns = w.columns, groups = columns / w.group, bytes = columns * kTile / 2;
    const uint8_t* code = w.codes + tile * bytes;
    const __m512i table = _mm512_load_si512(w.upper ? kLessMiddle : kLess8);
    __m512 total[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) total[v] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512 sum[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) sum[v] = _mm512_setzero_ps();
        for (int64_t k = g * w.group, end = k + w.group; k < end; k += 8, code += 128) {
            __m512i c[4];
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) {
                const uint8_t* from = code + v / 2 * bytes + v % 2 * 64;
                c[v] = _mm512_loadu_si512(from);
                _mm_prefetch((const char*)from + kExactAhead, kHint);
            }
#pragma GCC unroll 4
            for (int pair = 0; pair < 4; pair++) {
                int32_t two;
                std::memcpy(&two, x + k + 2 * pair, 4);
                const __m512i both = _mm512_set1_epi32(two);
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) {
                    sum[v] = add_pairs(sum[v], _mm512_permutexvar_epi16(c[v], table), both);
                    c[v] = _mm512_srli_epi16(c[v], 4);
                }
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const int64_t place = ((tile + v / 2) * groups + g) * kTile + v % 2 * 16;
            if (w.zeros) {
                const __m512 zero = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + place))));
                sum[v] = _mm512_fmadd_ps(_mm512_sub_ps(_mm512_set1_ps(8), zero), _mm512_set1_ps(sums[g]), sum[v]);
            }
            total[v] = _mm512_fmadd_ps(sum[v], scales_at<Scale>(w.scales, place), total[v]);
        }
    }
    store_tile(w, tile, out, whole(w, total[0]), whole(w, total[1]));
    store_tile(w, tile + 1, out, whole(w, total[2]), whole(w, total[3]));
}

template <Form kForm, class Scale>
void rows_exact(const Codes& w, const bf16* x, const float* sums, int64_t rows, int64_t tile, bf16* out) {
    int64_t row = 0;
    for (; rows >= 4; row += 4, rows -= 4) tile_exact<kForm, 4, Scale>(w, x, sums, row, tile, out);
    switch (rows) {
        case 3: return tile_exact<kForm, 3, Scale>(w, x, sums, row, tile, out);
        case 2: return tile_exact<kForm, 2, Scale>(w, x, sums, row, tile, out);
        case 1: return tile_exact<kForm, 1, Scale>(w, x, sums, row, tile, out);
    }
}

// How many tiles a thread takes at a time: kPiece bytes of them, or four if they are larger, but few enough that each thread takes some eight times.
inline int64_t piece_of(const Codes& w, int64_t tiles, int threads) {
    return std::max<int64_t>(1, std::min(tiles / (8 * threads), std::max<int64_t>(4, kPiece * 8 / (w.columns * kTile * w.bits))));
}

template <Form kForm, class Scale>
void multiply_int8(const Codes& w, const bf16* x, int64_t rows, int64_t group, bf16* out, int threads) {
    const Rounded rounded(x, rows, w.columns, group, kPanel, kPanel, w.zeros ? 1 : zero_of(kForm), w.input_scale, threads);
    const int64_t tiles = (w.outputs + kTile - 1) / kTile;
    const int64_t piece = piece_of(w, tiles, threads);
    if (rows <= kPaired && tiles >= 4 * threads) {  // fewer pairs would leave threads without work
        spread(threads, (tiles + 1) / 2, (piece + 1) / 2, [&](int64_t pair) {
            if (2 * pair + 1 < tiles) return pair_int8<kForm, Scale>(w, rounded, 2 * pair, out);
            panel_int8<kForm, Scale>(w, rounded, 0, 0, 1, 2 * pair, out);
        });
        return;
    }
    // As many panels at a time as stay in the second cache while tiles pass by.
    const int64_t together = std::max<int64_t>(1, (384 << 10) / (w.columns * rounded.height));
    const int64_t rounds = (rounded.panels + together - 1) / together;
    spread(threads, rounds * tiles, piece, [&](int64_t i) {
        const int64_t begin = i / tiles * together, end = std::min(begin + together, rounded.panels);
        for (int64_t panel = begin; panel < end; panel++) panel_int8<kForm, Scale>(w, rounded, panel, panel - begin, end - begin, i % tiles, out);
    });
}

template <Form kForm, class Scale>
void multiply_exact(const Codes& w, const bf16* x, int64_t rows, bf16* out, int threads) {
    const int64_t columns = w.columns, groups = columns / w.group, tiles = (w.outputs + kTile - 1) / kTile;
    std::vector<bf16> ordered;
    std::vector<float> sums;
    if (w.zeros) {
        sums.resize(rows * groups);
        for (int64_t i = 0; i < rows * groups; i++)
            for (int64_t k = 0; k < w.group; k++) sums[i] += widen(x[i * w.group + k]);
    }
    if (kForm == kFour) {
        // A word's four codes are of columns 0 4 1 5 or 2 6 3 7, from its lowest bits up.
        static const int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
        ordered.resize(rows * columns);
        for (int64_t k = 0; k < rows * columns; k += 8)
            for (int i = 0; i < 8; i++) ordered[k + i] = x[k + order[i]];
        x = ordered.data();
    }
    const int64_t piece = piece_of(w, tiles, threads);
    if (kForm == kFour && rows == 1) {
        spread(threads, (tiles + 1) / 2, (piece + 1) / 2, [&](int64_t pair) {
            if (2 * pair + 1 < tiles) return two_tiles_exact<Scale>(w, x, sums.data(), 2 * pair, out);
            rows_exact<kForm, Scale>(w, x, sums.data(), rows, 2 * pair, out);
        });
        return;
    }
    spread(threads, tiles, piece, [&](int64_t tile) { rows_exact<kForm, Scale>(w, x, sums.data(), rows, tile, out); });
}

template <Form kForm>
void multiply(const Codes& w, const bf16* x, int64_t rows, int64_t group, bf16* out, int threads) {
    if (group == 0)
        w.wide_scales ? multiply_exact<kForm, float>(w, x, rows, out, threads) : multiply_exact<kForm, bf16>(w, x, rows, out, threads);
    else
        w.wide_scales ? multiply_int8<kForm, float>(w, x, rows, group, out, threads)
                      : multiply_int8<kForm, bf16>(w, x, rows, group, out, threads);
}

}  // namespace

void linear_codes(const Codes& w, const bf16* x, int64_t rows, int64_t group, bf16* out, int threads) {
    if (rows >= kTileRows && tiles_are_used() && tiles_take(w, group)) return linear_tiles(w, x, rows, group, out, threads);
    if (w.bits == 4) return multiply<kFour>(w, x, rows, group, out, threads);
    if (w.lower) return multiply<kPlanes>(w, x, rows, group, out, threads);
    multiply<kEight>(w, x, rows, group, out, threads);
}

}  // namespace smelt
