// Linears whose weights are 4 or 8 bit codes with a scale for each group of columns.
//
// A weight is kept in tiles of 32 outputs. A tile holds its codes in steps of 4 columns (8 bits) or 8 columns (4 bits);
// a step is two vectors of 64 bytes: 16 outputs times 4 bytes. In a byte of two 4 bit codes the lower one is of column b,
// the upper one of column 4 + b. Codes are unsigned and have a zero-point; scales stand as [tile][group][32].
// So one vector instruction (vpdpbusd) multiplies 4 columns of 16 outputs, and a row's inputs are broadcast.
#include "codes.h"

#include <algorithm>
#include <vector>

namespace smelt {
namespace {

constexpr int kPanel = 6;      // as many rows as have all their sums in registers
constexpr int kAhead = 1024;   // bytes of weights that are asked for in advance
constexpr int kFarAhead = 4096;  // where codes are multiplied as fast as they come
constexpr int kTileRows = 16;  // from here on matrix tiles are used, where there are any

inline __m512i broadcast4(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return _mm512_set1_epi32(four);
}

// Some rows by one tile, inputs rounded to int8: exact sums within a group, float32 over groups.
// `next` codes are asked for meanwhile, `next_step` bytes at each step.
template <int kBits, int kRows, class Scale>
SMELT_KEEPS_SUMS void tile_int8(const Codes& w, const Rounded& x, int64_t row, int64_t tile, const uint8_t* next, int64_t next_step, bf16* out) {
    constexpr int64_t step = kBits == 4 ? 8 : 4;
    const int64_t columns = w.columns, groups = columns / w.group, pieces = columns / x.group, per = w.group / x.group;
    const uint8_t* code = w.codes + tile * columns * kTile * kBits / 8;
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
                _mm_prefetch((const char*)code + kAhead, _MM_HINT_T0);
                _mm_prefetch((const char*)code + kAhead + 64, _MM_HINT_T0);
            } else {
                _mm_prefetch((const char*)next, _MM_HINT_T1);
                next += next_step;
            }
            if constexpr (kBits == 4) {
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
            total[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][0]), _mm512_mul_ps(scale0, mine), total[r][0]);
            total[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][1]), _mm512_mul_ps(scale1, mine), total[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) store_tile(w, tile, out + (row + r) * w.outputs, total[r][0], total[r][1]);
}

template <int kBits, class Scale>
void panel_int8(const Codes& w, const Rounded& x, int64_t panel, int64_t place, int64_t panels, int64_t tile, bf16* out) {
    const int64_t row = panel * x.height;
    // With several panels, each asks for its part of the next tile; with one, memory is waited for anyway.
    const int64_t bytes = w.columns * kTile * kBits / 8, step = panels > 1 ? std::max<int64_t>(1, 128 / panels) : 0;
    const uint8_t* next = w.codes + (tile + 1) * bytes + place * bytes / panels;
    switch (x.height_of(panel)) {
        case 6: return tile_int8<kBits, 6, Scale>(w, x, row, tile, next, step, out);
        case 5: return tile_int8<kBits, 5, Scale>(w, x, row, tile, next, step, out);
        case 4: return tile_int8<kBits, 4, Scale>(w, x, row, tile, next, step, out);
        case 3: return tile_int8<kBits, 3, Scale>(w, x, row, tile, next, step, out);
        case 2: return tile_int8<kBits, 2, Scale>(w, x, row, tile, next, step, out);
        case 1: return tile_int8<kBits, 1, Scale>(w, x, row, tile, next, step, out);
    }
}

// Codes less 8, as bfloat16; the table stands twice, so that a fifth bit of the index does not matter.
alignas(64) constexpr bf16 kLess8[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

// Some rows by one tile, inputs as they are.
template <int kBits, int kRows, class Scale>
void tile_exact(const Codes& w, const bf16* x, const float* sums, int64_t row, int64_t tile, bf16* out) {
    const int64_t columns = w.columns, groups = columns / w.group;
    const uint8_t* code = w.codes + tile * columns * kTile * kBits / 8;
    __m512 total[kRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) total[r][0] = total[r][1] = _mm512_setzero_ps();
    const __m512i table = _mm512_load_si512(kLess8);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t place = (tile * groups + g) * kTile;
        __m512 sum[kRows][2];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
        if constexpr (kBits == 4) {
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
            for (int64_t k = g * w.group, end = k + w.group; k < end; k += 4, code += 128) {
                __m512i a = _mm512_xor_si512(_mm512_loadu_si512(code), bias);
                __m512i b = _mm512_xor_si512(_mm512_loadu_si512(code + 64), bias);
                _mm_prefetch((const char*)code + kAhead, _MM_HINT_T0);
                _mm_prefetch((const char*)code + kAhead + 64, _MM_HINT_T0);
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
            const __m512 half = _mm512_set1_ps(1 << (kBits - 1));
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
    for (int r = 0; r < kRows; r++) store_tile(w, tile, out + (row + r) * w.outputs, total[r][0], total[r][1]);
}

// One row by two tiles of 4 bit codes: their sums do not wait for each other. Of each tile what tile_exact gives.
template <class Scale>
SMELT_KEEPS_SUMS void two_tiles_exact(const Codes& w, const bf16* x, const float* sums, int64_t tile, bf16* out) {
    const int64_t columns = w.columns, groups = columns / w.group, bytes = columns * kTile / 2;
    const uint8_t* code = w.codes + tile * bytes;
    const __m512i table = _mm512_load_si512(kLess8);
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
                _mm_prefetch((const char*)from + kFarAhead, _MM_HINT_T0);
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
    store_tile(w, tile, out, total[0], total[1]);
    store_tile(w, tile + 1, out, total[2], total[3]);
}

template <int kBits, class Scale>
void rows_exact(const Codes& w, const bf16* x, const float* sums, int64_t rows, int64_t tile, bf16* out) {
    int64_t row = 0;
    for (; rows >= 4; row += 4, rows -= 4) tile_exact<kBits, 4, Scale>(w, x, sums, row, tile, out);
    switch (rows) {
        case 3: return tile_exact<kBits, 3, Scale>(w, x, sums, row, tile, out);
        case 2: return tile_exact<kBits, 2, Scale>(w, x, sums, row, tile, out);
        case 1: return tile_exact<kBits, 1, Scale>(w, x, sums, row, tile, out);
    }
}

template <int kBits, class Scale>
void multiply_int8(const Codes& w, const bf16* x, int64_t rows, int64_t group, bf16* out, int threads) {
    const Rounded rounded(x, rows, w.columns, group, kPanel, kPanel, w.zeros ? 1 : 1 << (kBits - 1), w.input_scale, threads);
    const int64_t tiles = (w.outputs + kTile - 1) / kTile;
    // As many panels at a time as stay in the second cache while tiles pass by.
    const int64_t together = std::max<int64_t>(1, (384 << 10) / (w.columns * rounded.height));
    const int64_t rounds = (rounded.panels + together - 1) / together;
    spread(threads, rounds * tiles, std::max<int64_t>(1, std::min<int64_t>(tiles / (8 * threads), 4)), [&](int64_t i) {
        const int64_t begin = i / tiles * together, end = std::min(begin + together, rounded.panels);
        for (int64_t panel = begin; panel < end; panel++) panel_int8<kBits, Scale>(w, rounded, panel, panel - begin, end - begin, i % tiles, out);
    });
}

template <int kBits, class Scale>
void multiply_exact(const Codes& w, const bf16* x, int64_t rows, bf16* out, int threads) {
    const int64_t columns = w.columns, groups = columns / w.group, tiles = (w.outputs + kTile - 1) / kTile;
    std::vector<bf16> ordered;
    std::vector<float> sums;
    if (w.zeros) {
        sums.resize(rows * groups);
        for (int64_t i = 0; i < rows * groups; i++)
            for (int64_t k = 0; k < w.group; k++) sums[i] += widen(x[i * w.group + k]);
    }
    if (kBits == 4) {
        // A word's four codes are of columns 0 4 1 5 or 2 6 3 7, from its lowest bits up.
        static const int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
        ordered.resize(rows * columns);
        for (int64_t k = 0; k < rows * columns; k += 8)
            for (int i = 0; i < 8; i++) ordered[k + i] = x[k + order[i]];
        x = ordered.data();
    }
    const int64_t piece = std::max<int64_t>(1, std::min<int64_t>(tiles / (8 * threads), 8));
    if (kBits == 4 && rows == 1) {
        spread(threads, (tiles + 1) / 2, (piece + 1) / 2, [&](int64_t pair) {
            if (2 * pair + 1 < tiles) return two_tiles_exact<Scale>(w, x, sums.data(), 2 * pair, out);
            rows_exact<kBits, Scale>(w, x, sums.data(), rows, 2 * pair, out);
        });
        return;
    }
    spread(threads, tiles, piece, [&](int64_t tile) { rows_exact<kBits, Scale>(w, x, sums.data(), rows, tile, out); });
}

}  // namespace

void linear_codes(const Codes& w, const bf16* x, int64_t rows, int64_t group, bf16* out, int threads) {
    if (rows >= kTileRows && tiles_are_used() && tiles_take(w, group)) return linear_tiles(w, x, rows, group, out, threads);
    if (group == 0) {
        if (w.bits == 4)
            w.wide_scales ? multiply_exact<4, float>(w, x, rows, out, threads) : multiply_exact<4, bf16>(w, x, rows, out, threads);
        else
            w.wide_scales ? multiply_exact<8, float>(w, x, rows, out, threads) : multiply_exact<8, bf16>(w, x, rows, out, threads);
        return;
    }
    if (w.bits == 4)
        w.wide_scales ? multiply_int8<4, float>(w, x, rows, group, out, threads)
                      : multiply_int8<4, bf16>(w, x, rows, group, out, threads);
    else
        w.wide_scales ? multiply_int8<8, float>(w, x, rows, group, out, threads)
                      : multiply_int8<8, bf16>(w, x, rows, group, out, threads);
}

}  // namespace smelt
