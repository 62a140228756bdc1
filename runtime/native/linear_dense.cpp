// Linears with bfloat16 weights [outputs, columns]. A row's numbers are the same whatever the other rows are: each of its sums has
// sixteen lanes, to which its columns are added in order, and the lanes are added up at the end.
#include "kernels.h"
#include "simd.h"
#if !defined(SMELT_AVX512)
#include "dense_avx2.h"
#endif

#include <algorithm>
#include <memory>
#include <optional>

namespace smelt {
namespace {

constexpr int64_t kStep = 32;       // columns that an instruction takes
constexpr int64_t kPanel = 4;        // rows that are multiplied at a time
constexpr int64_t kTogether = 128;  // rows that are multiplied with it there

// Rows that are all multiplied by a weight as it comes from memory.
#if defined(SMELT_BF16)
constexpr int64_t kFew = 8;
#else
constexpr int64_t kFew = kPanel;  // more would take most of the time for computing, and more registers than there are
#endif

// How weights are asked for in advance, how many of a row's columns, and whether all panels ask for a part of the next piece or the
// first one for all of it. On AMD's Zen 4 few lines can be under way to the first cache, and little fits in it: by way of the second one
// products of 1 to 8 rows were 1.05 to 1.5 times as fast. Of many rows kPiece columns are multiplied at a time, so that a weight's piece stays
// in the first cache; on Zen 4 what is put away between pieces costs more than reading from the second one: 12 to 256 rows of 4096 columns and
// more were 1.04 to 1.09 times as fast with longer pieces.
#if defined(SMELT_AMD) && defined(SMELT_AVX512)
constexpr auto kHint = _MM_HINT_T1;
constexpr int64_t kAhead = 1024;
constexpr bool kAllAsk = true;
constexpr int64_t kPiece = 8192;
#elif defined(SMELT_AVX512)
constexpr auto kHint = _MM_HINT_T0;
constexpr int64_t kAhead = 512;
constexpr bool kAllAsk = false;
constexpr int64_t kPiece = 2048;
#else
constexpr auto kHint = _MM_HINT_T0;
constexpr int64_t kAhead = 512;
constexpr int64_t kPiece = 512;
#endif

constexpr int64_t kCached = 4 << 20;  // bytes of a weight that may still be in a cache from the last step

// Outputs that few rows and many rows are multiplied by at a time: as many as have their sums in registers.
#if defined(SMELT_AVX512)
constexpr int kTaken = 4, kMany = 6;
#else
constexpr int kTaken = 2, kMany = 12;  // many by tiles
#endif

// By how many of them a row's columns are multiplied before they are read again, of a weight that comes from memory. Presumably what Zen 4
// misses when it runs ahead takes the places of what is asked for in advance, and reading again slows it down. While memory was fast 3 to 6 rows were 1.15 to
// 1.3 times as fast; a weight in a cache took 1.3 times as long.
#if defined(SMELT_AMD) && defined(SMELT_AVX512)
constexpr int taken_at_a_time(int rows) { return rows == 1 ? kTaken : rows <= 6 ? 1 : 2; }
constexpr int64_t kPacked = 2;  // from as many rows on they are packed then
#else
constexpr int taken_at_a_time(int) { return kTaken; }
constexpr int64_t kPacked = kPanel + 1;
#endif

inline __mmask32 first32(int64_t count) { return count >= 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1; }

inline __m512i load32(const bf16* from) { return _mm512_loadu_si512(from); }

inline __m512i load32(const bf16* from, __mmask32 mask) { return _mm512_maskz_loadu_epi16(mask, from); }

template <int kOutputs, int kRows>
using Sums = __m512[kRows][kOutputs];

// Adds the products of some columns to `sum`. From a row of x to the next there are `across` numbers, from a step of its columns to
// the next `along`; they are read again after kAtATime outputs. Of `next`, which lies like the weight, the same columns of kAsked outputs are
// asked for.
template <int kOutputs, int kRows, int kAsked, int kAtATime>
[[gnu::always_inline]] SMELT_KEEPS_SUMS inline void add_products(const bf16* weight, int64_t stride, const bf16* next, const bf16* x,
                                                                 int64_t across, int64_t along, int64_t columns,
                                                                 Sums<kOutputs, kRows>& sum) {
    int64_t k = 0;
    for (; k + kStep <= columns; k += kStep, x += along) {
#pragma GCC unroll 8
        for (int n = 0; n < kAsked; n++) _mm_prefetch((const char*)(next + n * stride + k), kHint);
        if constexpr (kAtATime < kOutputs) {
#pragma GCC unroll 8
            for (int n = 0; n < kOutputs; n += kAtATime) {
                __m512i w[kAtATime];
#pragma GCC unroll 8
                for (int i = 0; i < kAtATime; i++)
                    if (n + i < kOutputs) w[i] = load32(weight + (n + i) * stride + k);
                const bf16* again = x;
                asm volatile("" : "+r"(again));  // so that the compiler does not keep what it has read
#pragma GCC unroll 8
                for (int r = 0; r < kRows; r++) {
                    const __m512i in = load32(again + r * across);
#pragma GCC unroll 8
                    for (int i = 0; i < kAtATime; i++)
                        if (n + i < kOutputs) sum[r][n + i] = add_pairs(sum[r][n + i], w[i], in);
                }
            }
            continue;
        }
        // Whichever are fewer stay in registers.
        if constexpr (kRows <= kOutputs) {
            __m512i in[kRows];
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++) in[r] = load32(x + r * across);
#pragma GCC unroll 8
            for (int n = 0; n < kOutputs; n++) {
                const __m512i w = load32(weight + n * stride + k);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; r++) sum[r][n] = add_pairs(sum[r][n], w, in[r]);
            }
        } else {
            __m512i w[kOutputs];
#pragma GCC unroll 8
            for (int n = 0; n < kOutputs; n++) w[n] = load32(weight + n * stride + k);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++) {
                const __m512i in = load32(x + r * across);
#pragma GCC unroll 8
                for (int n = 0; n < kOutputs; n++) sum[r][n] = add_pairs(sum[r][n], w[n], in);
            }
        }
    }
    if (k == columns) return;
    const __mmask32 mask = first32(columns - k);
#pragma GCC unroll 8
    for (int n = 0; n < kOutputs; n++)
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++)
            sum[r][n] = add_pairs(sum[r][n], load32(weight + n * stride + k, mask), load32(x + r * across, mask));
}

// Four stages that add up the lanes of sixteen vectors together: lanes that are 8, 4, 2 and 1 apart.
inline __m512 lanes_8_apart(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)); }
inline __m512 lanes_4_apart(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); }
inline __m512 lanes_2_apart(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee)); }
inline __m512 lanes_1_apart(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)); }

// Adds up the lanes of each sum from row kFrom on, adds the bias, and stores the first `rows` rows.
template <int kOutputs, int kRows, int kFrom = 0, int kWidth = kOutputs>
[[gnu::always_inline]] SMELT_KEEPS_SUMS inline void store_totals(const Sums<kWidth, kRows>& sum, const bf16* bias, int64_t rows,
                                                                 int64_t outputs, bf16* out) {
    const __m512 none = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int n = 0; n < kOutputs; n += 4) {
        const int taken = std::min(4, kOutputs - n);
        __m512 part[4];
#pragma GCC unroll 8
        for (int j = 0; j < 4; j++) {
            __m512 row[kPanel];
#pragma GCC unroll 8
            for (int r = 0; r < kPanel; r++)
                row[r] = kFrom + r < kRows && j < taken ? sum[std::min(kFrom + r, kRows - 1)][n + std::min(j, taken - 1)] : none;
            part[j] = lanes_4_apart(lanes_8_apart(row[0], row[1]), lanes_8_apart(row[2], row[3]));
        }
        const __m512 total = lanes_1_apart(lanes_2_apart(part[0], part[1]), lanes_2_apart(part[2], part[3]));
        const __mmask8 mask = (1 << taken) - 1;
        const __m512 shift = bias ? _mm512_broadcast_f32x4(_mm512_castps512_ps128(load16(bias + n, mask))) : none;
        const __m256i found = narrow16(_mm512_add_ps(total, shift));
        const __m128i upper = _mm256_castsi256_si128(found), lower = _mm256_extracti128_si256(found, 1);
        bf16* to = out + n;
        _mm_mask_storeu_epi16(to, mask, upper);
        if (rows > 1) _mm_mask_storeu_epi16(to + outputs, mask, _mm_unpackhi_epi64(upper, upper));
        if (rows > 2) _mm_mask_storeu_epi16(to + 2 * outputs, mask, lower);
        if (rows > 3) _mm_mask_storeu_epi16(to + 3 * outputs, mask, _mm_unpackhi_epi64(lower, lower));
    }
    if constexpr (kFrom + kPanel < kRows)
        store_totals<kOutputs, kRows, kFrom + kPanel, kWidth>(sum, bias, rows - kPanel, outputs, out + kPanel * outputs);
}

// Calls `body` with `count` as a constant, from kLeast to kMost.
template <int kLeast, int kMost, class Body>
inline void with_constant(int64_t count, const Body& body) {
    if (count >= kMost) return body.template operator()<kMost>();
    if constexpr (kMost > kLeast) with_constant<kLeast, kMost - 1>(count, body);
}

// Few rows: reading the weight is what takes the time. Outputs follow each other in memory, so those after these are asked for at the end.
template <int kOutputs, int kRows, int kAtATime>
SMELT_KEEPS_SUMS void few_rows(const bf16* weight, const bf16* bias, const bf16* x, int64_t across, int64_t along, int64_t outputs,
                               int64_t columns, bf16* out) {
    Sums<kOutputs, kRows> sum;
#pragma GCC unroll 32
    for (int i = 0; i < kRows * kOutputs; i++) sum[i / kOutputs][i % kOutputs] = _mm512_setzero_ps();
    const int64_t first = std::max<int64_t>(0, columns - kAhead) / kStep * kStep;
    add_products<kOutputs, kRows, kOutputs, kAtATime>(weight, columns, weight + kAhead, x, across, along, first, sum);
    add_products<kOutputs, kRows, kOutputs, kAtATime>(weight + first, columns, weight + kOutputs * columns, x + first / kStep * along, across,
                                                      along, columns - first, sum);
    store_totals<kOutputs, kRows>(sum, bias, kRows, outputs, out);
}

// Rows packed in panels of `height`, in the order in which they are multiplied: for each piece of columns, for each panel, for each step of the
// piece's columns, for each row. Read in their own order, long rows would come in many streams, and in the same places of a cache.
class Panels {
public:
#if defined(SMELT_AVX512)
    using Number = bf16;
#else
    using Number = float;  // widened once for all outputs
#endif
    struct alignas(64) Line {
        Number numbers[kStep];
    };

    Panels(const bf16* x, int64_t rows, int64_t columns, int64_t height, int threads)
        : height_(height),
          steps_((columns + kStep - 1) / kStep),
          count_((rows + height - 1) / height),
          lines_(std::make_unique_for_overwrite<Line[]>(count_ * height * steps_)) {
        spread(threads, count_, std::max<int64_t>(1, (64 << 10) / (columns * height)), [&](int64_t panel) {
            for (int64_t step = 0; step < steps_; step++)
                for (int64_t r = 0; r < height; r++) {
                    const int64_t row = panel * height + r, k = step * kStep;
                    const __mmask32 mask = row < rows ? first32(columns - k) : 0;
                    const __m512i numbers = _mm512_maskz_loadu_epi16(mask, x + row * columns + k);
#if defined(SMELT_AVX512)
                    _mm512_store_si512(&lines_[line(panel, step) + r], numbers);
#else
                    put_widened(lines_[line(panel, step) + r].numbers, numbers);
#endif
                }
        });
    }

    const Number* at(int64_t panel, int64_t column) const { return lines_[line(panel, column / kStep)].numbers; }

private:
    int64_t line(int64_t panel, int64_t step) const {
        constexpr int64_t kSteps = kPiece / kStep;
        const int64_t before = step / kSteps * kSteps, length = std::min(kSteps, steps_ - before);
        return (before * count_ + panel * length + step - before) * height_;
    }

    int64_t height_, steps_, count_;
    std::unique_ptr<Line[]> lines_;
};

#if defined(SMELT_AVX512)
template <int kOutputs>
SMELT_KEEPS_SUMS void many_rows(const bf16* weight, const bf16* bias, const Panels& x, int64_t row, int64_t rows, int64_t outputs,
                                int64_t columns, bf16* out) {
    constexpr int64_t kAlong = kPanel * kStep;
    alignas(64) Sums<kOutputs, kPanel> sums[kTogether / kPanel];  // between pieces
    const int64_t asking = kAllAsk ? (rows + kPanel - 1) / kPanel : 1, asked = (kOutputs + asking - 1) / asking;  // outputs by a panel
    for (int64_t k = 0; k < columns; k += kPiece) {
        const int64_t length = std::min(kPiece, columns - k);
        const bool last = k + length == columns;
        const bf16* next = weight + (last ? kOutputs * columns : k + kPiece);  // the next piece; after the last one that of the next outputs
        for (int64_t r = 0; r < rows; r += kPanel) {
            Sums<kOutputs, kPanel>& kept = sums[r / kPanel];
            Sums<kOutputs, kPanel> sum;
#pragma GCC unroll 32
            for (int i = 0; i < kPanel * kOutputs; i++)
                sum[i / kOutputs][i % kOutputs] = k ? kept[i / kOutputs][i % kOutputs] : _mm512_setzero_ps();
            const bf16* in = x.at((row + r) / kPanel, k);
            const int64_t begin = r / kPanel * asked;
            with_constant<0, kOutputs>(begin < kOutputs ? asked : 0, [&]<int kAsked>() {
                add_products<kOutputs, kPanel, kAsked, kOutputs>(weight + k, columns, next + begin * columns, in, kStep, kAlong, length, sum);
            });
            if (last) {
                store_totals<kOutputs, kPanel>(sum, bias, rows - r, outputs, out + r * outputs);
                continue;
            }
#pragma GCC unroll 32
            for (int i = 0; i < kPanel * kOutputs; i++) kept[i / kOutputs][i % kOutputs] = sum[i / kOutputs][i % kOutputs];
        }
    }
}

#else
// Columns of three outputs of a weight; what is not whole is copied, with zeros behind it.
class WeightTile {
public:
    // Of `next`, which lies alike, as much will be asked for.
    void take(const bf16* weight, int64_t stride, int64_t taken, int64_t columns, const bf16* next) {
        steps_ = (columns + kStep - 1) / kStep;
        next_ = next;
        asks_ = stride;
        at_ = weight;
        stride_ = stride;
        if (taken == kTileOutputs && columns % kStep == 0) return;
        at_ = copy_[0];
        stride_ = kPiece;
        std::memset(copy_, 0, sizeof copy_);
        for (int64_t n = 0; n < taken; n++) std::memcpy(copy_[n], weight + n * stride, columns * sizeof(bf16));
    }

    // Adds the products by a panel. Each of the first ones asks for a part of what comes next: all at once would wait for memory, and
    // then nothing would be under way.
    void add_products(const float* x, int64_t panel, TileSums& sums) const {
        if (panel == 0) {
            add_half<0, true>(at_, stride_, next_, x, steps_, sums);
            add_half<1, true>(at_, stride_, next_ + asks_, x, steps_, sums);
        } else if (panel == 1) {
            add_half<0, true>(at_, stride_, next_ + 2 * asks_, x, steps_, sums);
            add_half<1, false>(at_, stride_, nullptr, x, steps_, sums);
        } else {
            add_half<0, false>(at_, stride_, nullptr, x, steps_, sums);
            add_half<1, false>(at_, stride_, nullptr, x, steps_, sums);
        }
    }

private:
    const bf16 *at_, *next_;
    int64_t stride_, asks_, steps_;
    bf16 copy_[kTileOutputs][kPiece];
};

// `taken` outputs, three at a time by a panel's piece while that is in the first cache.
void many_rows(const bf16* weight, const bf16* bias, const Panels& x, int64_t row, int64_t rows, int64_t taken, int64_t outputs, int64_t columns,
               bf16* out) {
    constexpr int64_t kTiles = kMany / kTileOutputs;
    const int64_t tiles = (taken + kTileOutputs - 1) / kTileOutputs;
    TileSums sums[kTogether / kPanel][kTiles];
    std::memset((void*)sums, 0, (rows + kPanel - 1) / kPanel * sizeof sums[0]);
    WeightTile weights[kTiles];
    for (int64_t k = 0; k < columns; k += kPiece) {
        const int64_t length = std::min(kPiece, columns - k);
        const bool last = k + length == columns;
        const int64_t next = last ? taken * columns : k + kPiece;  // the next piece; after the last one that of the next outputs
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t n = t * kTileOutputs;
            const bf16* from = weight + n * columns;
            weights[t].take(from + k, columns, std::min(kTileOutputs, taken - n), length, from + next);
        }
        for (int64_t r = 0; r < rows; r += kPanel)
            for (int64_t t = 0; t < tiles; t++) {
                TileSums& sum = sums[r / kPanel][t];
                weights[t].add_products(x.at((row + r) / kPanel, k), r / kPanel, sum);
                if (!last) continue;
                const int64_t n = t * kTileOutputs;
                with_constant<1, kTileOutputs>(taken - n, [&]<int kCount>() {
                    store_totals<kCount, kPanel, 0, kTileOutputs>(sum.of, bias ? bias + n : nullptr, rows - r, outputs, out + r * outputs + n);
                });
            }
    }
}
#endif

}  // namespace

void linear_dense(const bf16* weight, const bf16* bias, const bf16* x, int64_t rows, int64_t outputs, int64_t columns, bf16* out,
                  int threads) {
    if (rows == 0) return;
    if (rows <= kFew) {
        const bool cached = outputs * columns * int64_t(sizeof(bf16)) < kCached;
        std::optional<Panels> packed;
        const bf16* in = x;
#if defined(SMELT_AVX512)
        if (rows > kPanel || (rows >= kPacked && !cached)) packed.emplace(x, rows, columns, rows, threads);
        if (packed) in = packed->at(0, 0);
#endif
        const int64_t across = packed ? kStep : columns, along = packed ? rows * kStep : kStep;
        const int64_t blocks = (outputs + kTaken - 1) / kTaken;
        spread(threads, blocks, std::max<int64_t>(1, std::min<int64_t>(blocks / (8 * threads), (64 << 10) / columns)), [&](int64_t i) {
            const int64_t n = i * kTaken;
            with_constant<1, kTaken>(outputs - n, [&]<int kCount>() {
                with_constant<1, kFew>(rows, [&]<int kRows>() {
                    const auto multiply = cached ? few_rows<kCount, kRows, kTaken> : few_rows<kCount, kRows, taken_at_a_time(kRows)>;
                    multiply(weight + n * columns, bias ? bias + n : nullptr, in, across, along, outputs, columns, out + n);
                });
            });
        });
        return;
    }
    const Panels panels(x, rows, columns, kPanel, threads);
    const int64_t blocks = (outputs + kMany - 1) / kMany, rounds = (rows + kTogether - 1) / kTogether;
    spread(threads, rounds * blocks, std::clamp<int64_t>(rounds * blocks / (8 * threads), 1, 8), [&](int64_t i) {
        const int64_t n = i % blocks * kMany, row = i / blocks * kTogether, count = std::min(kTogether, rows - row);
        const bf16* shift = bias ? bias + n : nullptr;
        bf16* to = out + row * outputs + n;
#if defined(SMELT_AVX512)
        with_constant<1, kMany>(outputs - n, [&]<int kCount>() {
            many_rows<kCount>(weight + n * columns, shift, panels, row, count, outputs, columns, to);
        });
#else
        many_rows(weight + n * columns, shift, panels, row, count, std::min<int64_t>(kMany, outputs - n), outputs, columns, to);
#endif
    });
}

}  // namespace smelt
