// Linears whose weights are 4 or 8 bit codes with a scale for each group of columns.
//
// A weight is kept in tiles of 32 outputs. A tile holds its codes in steps of 4 columns (8 bits) or 8 columns (4 bits);
// a step is two vectors of 64 bytes: 16 outputs times 4 bytes. In a byte of two 4 bit codes the lower one is of column b,
// the upper one of column 4 + b. Codes are unsigned and have a zero-point; scales stand as [tile][group][32].
// So one vector instruction (vpdpbusd) multiplies 4 columns of 16 outputs, and a row's inputs are broadcast. Where it is missing, many rows are
// multiplied as panels.h says.
//
// Codes of 8 bits may stand in two planes, of their upper and of their lower four bits, each as codes of 4 bits stand. Who needs but
// the upper ones, such as a drafter, reads half of the memory.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "words.h"

namespace smelt {
namespace {

#if defined(SMELT_AVX512)
constexpr int kPanel = 6;  // as many rows of int8 as have all their sums in registers
constexpr int kTall = 8;   // of 8 bit codes, with a group's sums alone in registers: up to 16 rows 1.03 to 1.16 times as fast (Zen 4, by hand)
#else
constexpr int kPanel = 3, kTall = 3;  // a quarter of the registers
#endif
// From so many rows on matrix tiles are used, where there are any: tried on an Emerald Rapids. What short groups cost between products is not less
// for few rows, and codes of 4 bits are widened for vector instructions as well.
constexpr int tile_rows(Form form, int64_t group) { return group > 256 ? 12 : form == kFour ? 13 : form == kPlanes ? 17 : 25; }
constexpr int64_t kPiece = 512 << 10;  // bytes of a weight that a thread takes at a time: its next ones were not asked for

// Up to as many rows of int8 are multiplied by two tiles at a time; tried on Zen 4 and Emerald Rapids (there 5 to 8 rows were 1.1 to 1.4 times as
// fast), with 1024 to 8192 columns.
#if defined(SMELT_AVX512) && defined(SMELT_AMD)
constexpr int kPaired = 4;
constexpr int paired(Form form, int64_t columns) {
    return form == kEight ? 4 : (form == kFour ? 1 : 3) + (columns < 4096 ? 0 : 1);
}
#elif defined(SMELT_AVX512)
constexpr int kPaired = 8;
constexpr int paired(Form form, int64_t) { return form == kPlanes ? 6 : kPaired; }  // with 8 rows two planes in a cache took 1.2 times as long
#else
constexpr int kPaired = 1;
constexpr int paired(Form form, int64_t) { return form == kPlanes ? 0 : 1; }  // two planes are two streams already
#endif

template <Form kForm>
inline __m512i add_products(__m512i sum, __m512i codes, __m512i inputs) {
    return kForm == kFour ? add_small_products(sum, codes, inputs) : _mm512_dpbusd_epi32(sum, codes, inputs);
}

inline __m512i broadcast4(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return _mm512_set1_epi32(four);
}

// So that a compiler gives registers to other sums first.
template <class T>
inline void keep_in_memory(T& sums) { asm volatile("" : : "r"(&sums) : "memory"); }

// Adds the products of a step; a tile is `bytes` after the one before it.
template <Form kForm, int kSums, int kVectors>
[[gnu::always_inline]] SMELT_KEEPS_SUMS inline void add_step(const uint8_t* code, const uint8_t* low, int64_t bytes, const int8_t* in,
                                                             __m512i (&sum)[kSums][kVectors]) {
    __m512i stored[kVectors], lower[kVectors], four[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
        const int64_t from = v / 2 * bytes + v % 2 * 64;
        stored[v] = _mm512_loadu_si512(code + from);
        if constexpr (kForm == kPlanes) lower[v] = _mm512_loadu_si512(low + from);
        four[v] = first_columns<kForm>(stored[v], lower[v]);
    }
#pragma GCC unroll 16
    for (int s = 0; s < kSums; s++) {
        const __m512i inputs = broadcast4(in + 4 * s);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) sum[s][v] = add_products<kForm>(sum[s][v], four[v], inputs);
    }
    if constexpr (kForm == kEight) return;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) four[v] = second_columns<kForm>(stored[v], lower[v]);
#pragma GCC unroll 16
    for (int s = 0; s < kSums; s++) {
        const __m512i inputs = broadcast4(in + 4 * (kSums + s));
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) sum[s][v] = add_products<kForm>(sum[s][v], four[v], inputs);
    }
}

// The same for 4 bits, one vector of codes after another, so that few registers hold anything but sums.
template <int kSums, int kVectors>
[[gnu::always_inline]] SMELT_KEEPS_SUMS inline void add_narrow_step(const uint8_t* code, int64_t bytes, const int8_t* in,
                                                                    __m512i (&sum)[kSums][kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
        const __m512i stored = _mm512_loadu_si512(code + v / 2 * bytes + v % 2 * 64);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512i four = half ? second_columns<kFour>(stored, stored) : first_columns<kFour>(stored, stored);
            const int8_t* again = in + 4 * kSums * half;
            asm volatile("" : "+r"(again));  // so that the compiler does not keep what it has read
#pragma GCC unroll 16
            for (int s = 0; s < kSums; s++) sum[s][v] = add_small_products(sum[s][v], four, broadcast4(again + 4 * s));
        }
    }
}

// Some rows by one tile, or few by two: memory answers two streams faster than one. Sums are exact within a group, float32 over groups.
// Where `next_step` is not 0, `next` codes are asked for meanwhile, so many bytes on at each step, instead of this tile's own.
template <Form kForm, int kRows, int kParts, int kTiles, class Scale>
SMELT_KEEPS_SUMS void rows_by_tiles(const Codes& w, const Rounded<int8_t>& x, int64_t row, int64_t tile, const uint8_t* next, int64_t next_step,
                                    bf16* out) {
    constexpr int64_t step = kForm == kEight ? 4 : 8;
    constexpr bool kNarrow = kForm == kFour && kNarrowSums > 0;
    constexpr int kSums = kRows * kParts, kVectors = 2 * kTiles, ahead = kTiles == 2 ? kPairsAhead : ahead_of(kForm);
    const int64_t columns = w.columns, groups = columns / w.group, pieces = columns / x.group, per = w.group / x.group;
    const int64_t bytes = columns * kTile * bits_of(kForm) / 8, begin = tile * bytes;
    const uint8_t *code = w.codes + begin, *low = w.lower + (kForm == kPlanes ? begin : 0);
    const int8_t* in = x.codes.data() + row * kParts * columns;
    __m512 total[kRows][kVectors];
#pragma GCC unroll 32
    for (int i = 0; i < kVectors * kRows; i++) total[i / kVectors][i % kVectors] = _mm512_setzero_ps();
    if constexpr (kRows > kPanel) keep_in_memory(total);
    for (int64_t p = 0; p < pieces; p++) {
        const auto place = [&](int v) { return ((tile + v / 2) * groups + p / per) * kTile + v % 2 * 16; };
        __m512i sum[kSums][kVectors];
#pragma GCC unroll 16
        for (int s = 0; s < kSums; s++) {
            // Of a row's parts the last one has what is added for all.
            const __m512i less = s % kParts == kParts - 1 ? _mm512_set1_epi32(x.less[(row + s / kParts) * pieces + p]) : _mm512_setzero_si512();
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) sum[s][v] = less;
        }
        if (w.zeros) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                const __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + place(v))));
#pragma GCC unroll 16
                for (int s = kParts - 1; s < kSums; s += kParts) sum[s][v] = _mm512_mullo_epi32(zero, sum[s][v]);
            }
        }
        const int64_t steps = x.group / step, most = kNarrow ? kNarrowSums / 2 : steps;
        for (int64_t done = 0; done < steps; done += most) {
            __m512i narrow[kSums][kVectors];
#pragma GCC unroll 32
            for (int i = 0; i < kSums * kVectors; i++) narrow[i / kVectors][i % kVectors] = _mm512_setzero_si512();
            for (int64_t i = done; i < std::min(done + most, steps); i++, code += 128, in += step * kSums) {
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; v++) {
                    const int64_t from = v / 2 * bytes + v % 2 * 64;
                    if (next_step == 0) _mm_prefetch((const char*)code + from + ahead, kHint);
                    if constexpr (kForm == kPlanes) _mm_prefetch((const char*)low + from + ahead, kHint);
                }
                if (next_step != 0) {
                    _mm_prefetch((const char*)next, _MM_HINT_T1);
                    next += next_step;
                }
                if constexpr (kNarrow) add_narrow_step(code, bytes, in, narrow);
                else add_step<kForm>(code, low, bytes, in, sum);
                if constexpr (kForm == kPlanes) low += 128;
            }
            if constexpr (!kNarrow) continue;
#pragma GCC unroll 32
            for (int i = 0; i < kSums * kVectors; i++) {
                __m512i& all = sum[i / kVectors][i % kVectors];
                all = _mm512_add_epi32(all, widened_sums(narrow[i / kVectors][i % kVectors]));
            }
        }
        __m512 scale[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) scale[v] = scales_at<Scale>(w.scales, place(v));
        if constexpr (kRows > kPanel) keep_in_memory(total);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) {
            const int64_t at = (row + r) * pieces + p;
            const __m512 mine = _mm512_set1_ps(x.scales[at]);
            __m512 found[kVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                __m512i all = sum[r * kParts][v];
                // Nothing overflows: with two parts a group has up to 128 columns.
                if constexpr (kParts == 2) all = _mm512_add_epi32(_mm512_slli_epi32(all, 8), sum[r * kParts + 1][v]);
                found[v] = _mm512_cvtepi32_ps(all);
            }
            if (kForm == kFour && w.upper) {
                const __m512 half = half_of(x.less[at]);
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; v++) found[v] = _mm512_add_ps(found[v], half);
            }
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) total[r][v] = _mm512_fmadd_ps(found[v], _mm512_mul_ps(scale[v], mine), total[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kTiles * kRows; i++) {
        const int r = i / kTiles, t = i % kTiles;
        store_tile(w, tile + t, out + (row + r) * w.outputs, total[r][2 * t], total[r][2 * t + 1]);
    }
}

template <Form kForm, int kParts, class Scale>
void panel_by_two_tiles(const Codes& w, const Rounded<int8_t>& x, int64_t tile, bf16* out) {
    const auto rows = [&]<int kRows>() {
        if constexpr (kRows * kParts > kPaired) std::abort();  // paired() allows no more
        else rows_by_tiles<kForm, kRows, kParts, 2, Scale>(w, x, 0, tile, nullptr, 0, out);
    };
    switch (x.rows) {
        case 8: return rows.template operator()<8>();
        case 7: return rows.template operator()<7>();
        case 6: return rows.template operator()<6>();
        case 5: return rows.template operator()<5>();
        case 4: return rows.template operator()<4>();
        case 3: return rows.template operator()<3>();
        case 2: return rows.template operator()<2>();
        case 1: return rows.template operator()<1>();
    }
}

template <Form kForm, int kParts, class Scale>
void panel_by_tile(const Codes& w, const Rounded<int8_t>& x, int64_t panel, int64_t place, int64_t panels, int64_t tile, bf16* out) {
    const int64_t row = panel * x.height;
    // With several panels, each asks for its part of the next tile; with one, memory is waited for anyway.
    const int64_t bytes = w.columns * kTile * bits_of(kForm) / 8, step = panels > 1 ? std::max<int64_t>(1, 128 / panels) : 0;
    const uint8_t* next = w.codes + (tile + 1) * bytes + place * bytes / panels;
    const auto rows = [&]<int kRows>() {
        if constexpr (kRows > std::max(kParts == 1 ? kTall : kPanel / kParts, kPaired / kParts)) std::abort();  // no panel is higher
        else rows_by_tiles<kForm, kRows, kParts, 1, Scale>(w, x, row, tile, next, step, out);
    };
    switch (x.height_of(panel)) {
        case 8: return rows.template operator()<8>();
        case 7: return rows.template operator()<7>();
        case 6: return rows.template operator()<6>();
        case 5: return rows.template operator()<5>();
        case 4: return rows.template operator()<4>();
        case 3: return rows.template operator()<3>();
        case 2: return rows.template operator()<2>();
        case 1: return rows.template operator()<1>();
    }
}

// How many tiles a thread takes at a time: kPiece bytes of them, or four if they are larger, but few enough that each thread takes some eight times.
inline int64_t piece_of(const Codes& w, int64_t tiles, int threads) {
    return std::max<int64_t>(1, std::min(tiles / (8 * threads), std::max<int64_t>(4, kPiece * 8 / (w.columns * kTile * w.bits))));
}

template <Form kForm, int kParts, class Scale>
void multiply(const Codes& w, const bf16* x, int64_t rows, int64_t group, bf16* out, int threads) {
    const int64_t tiles = (w.outputs + kTile - 1) / kTile;
    const bool pairs = kParts * rows <= paired(kForm, w.columns) && tiles >= 4 * threads;  // fewer pairs would leave threads without work
    const bool tall = kForm != kFour && kParts == 1 && rows <= 2 * kTall;
    const int most = pairs ? kPaired : tall ? kTall : kPanel / kParts * kParts;
    const Rounded<int8_t> rounded(x, rows, w.columns, group, kParts, most, most, w.zeros ? 1 : zero_of(kForm), w.input_scale, threads);
    const int64_t piece = piece_of(w, tiles, threads);
    if (pairs) {
        spread(threads, (tiles + 1) / 2, (piece + 1) / 2, [&](int64_t pair) {
            if (2 * pair + 1 < tiles) return panel_by_two_tiles<kForm, kParts, Scale>(w, rounded, 2 * pair, out);
            panel_by_tile<kForm, kParts, Scale>(w, rounded, 0, 0, 1, 2 * pair, out);
        });
        return;
    }
    // As many panels at a time as stay in the second cache while tiles pass by.
    const int64_t together = std::max<int64_t>(1, (384 << 10) / (w.columns * kParts * rounded.height));
    const int64_t rounds = (rounded.panels + together - 1) / together;
    spread(threads, rounds * tiles, piece, [&](int64_t i) {
        const int64_t begin = i / tiles * together, end = std::min(begin + together, rounded.panels);
        for (int64_t panel = begin; panel < end; panel++)
            panel_by_tile<kForm, kParts, Scale>(w, rounded, panel, panel - begin, end - begin, i % tiles, out);
    });
}

#if defined(SMELT_PANELS)
template <Form kForm, class Scale>
void multiply_words(const Codes& w, const Rounded<int16_t>& x, int64_t tiles, int64_t piece, bf16* out, int threads) {
    if (x.rows == 2) return spread(threads, tiles, piece, [&](int64_t tile) { words_by_tiles<kForm, 2, 1, Scale>(w, x, tile, out); });
    if (tiles < 4 * threads) return spread(threads, tiles, piece, [&](int64_t tile) { words_by_tiles<kForm, 1, 1, Scale>(w, x, tile, out); });
    spread(threads, (tiles + 1) / 2, (piece + 1) / 2, [&](int64_t pair) {
        if (2 * pair + 1 < tiles) return words_by_tiles<kForm, 1, 2, Scale>(w, x, 2 * pair, out);
        words_by_tiles<kForm, 1, 1, Scale>(w, x, 2 * pair, out);
    });
}

// With codes of 8 bits, inputs of two parts are of 16 bits in one.
template <Form kForm, int kParts, class Scale>
void multiply_panels(const Codes& w, const bf16* x, int64_t rows, int64_t group, bf16* out, int threads) {
    using Code = std::conditional_t<kForm == kFour, int8_t, int16_t>;
    constexpr int64_t kApart = kForm == kFour ? kParts : 1;
    const Rounded<Code> rounded(x, rows, w.columns, group, kParts, kPanelRows, 1, w.zeros ? 1 : zero_of(kForm), w.input_scale, threads);
    const int64_t tiles = (w.outputs + kTile - 1) / kTile, piece = piece_of(w, tiles, threads);
    if constexpr (kForm != kFour)
        if (rows <= 2) return multiply_words<kForm, Scale>(w, rounded, tiles, piece, out, threads);
    const int64_t fit = (384 << 10) / (w.columns * kApart * int64_t(sizeof(Code)));
    const int64_t together = std::max<int64_t>(1, std::min(kTogetherRows, fit) / rounded.height);
    const int64_t rounds = (rounded.panels + together - 1) / together;
    spread(threads, rounds * tiles, piece, [&](int64_t i) {
        const int64_t begin = i / tiles * together, end = std::min(begin + together, rounded.panels);
        panels_by_tile<kForm, kApart, Code, Scale>(w, rounded, begin, end, i % tiles, out);
    });
}

// Up to so many rows it takes no longer to multiply bytes as they stand.
constexpr int64_t few_rows(Form form, int parts) { return parts == 1 ? 3 : form == kFour ? 1 : 0; }
#endif

template <Form kForm>
void multiply(const Codes& w, const bf16* x, int64_t rows, int64_t group, int parts, bf16* out, int threads) {
    const auto by = [&]<int kParts, class Scale>() {
#if defined(SMELT_PANELS)
        if (rows > few_rows(kForm, kParts)) return multiply_panels<kForm, kParts, Scale>(w, x, rows, group, out, threads);
#endif
        multiply<kForm, kParts, Scale>(w, x, rows, group, out, threads);
    };
    if (parts == 2) return w.wide_scales ? by.template operator()<2, float>() : by.template operator()<2, bf16>();
    w.wide_scales ? by.template operator()<1, float>() : by.template operator()<1, bf16>();
}

}  // namespace

void linear_codes(const Codes& w, const bf16* x, int64_t rows, int64_t group, int parts, bf16* out, int threads) {
    const Form form = form_of(w);
    if (parts == 1 && rows >= tile_rows(form, group) && tiles_are_used() && tiles_take(group)) return linear_tiles(w, x, rows, group, out, threads);
    switch (form) {
        case kFour: return multiply<kFour>(w, x, rows, group, parts, out, threads);
        case kEight: return multiply<kEight>(w, x, rows, group, parts, out, threads);
        case kPlanes: return multiply<kPlanes>(w, x, rows, group, parts, out, threads);
    }
}

}  // namespace smelt
