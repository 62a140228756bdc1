// Linears with bfloat16 weights [outputs, columns]. A row's numbers are the same whatever the other rows are: each of its sums has
// sixteen lanes, to which its columns are added in order, and the lanes are added up at the end.
#include "kernels.h"
#include "simd.h"

#include <algorithm>
#include <memory>

namespace smelt {
namespace {

constexpr int64_t kStep = 32;       // columns that an instruction takes
constexpr int64_t kPanel = 4;        // rows that are multiplied at a time
constexpr int64_t kAhead = 512;     // columns of a weight's row that are asked for in advance
constexpr int64_t kPiece = 2048;    // columns at a time of many rows, so that a weight's piece stays in the first cache
constexpr int64_t kTogether = 128;  // rows that are multiplied with it there

inline __mmask32 first32(int64_t count) { return count >= 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1; }

inline __m512i load32(const bf16* from) { return _mm512_loadu_si512(from); }

inline __m512i load32(const bf16* from, __mmask32 mask) { return _mm512_maskz_loadu_epi16(mask, from); }

template <int kOutputs, int kRows>
using Sums = __m512[kRows][kOutputs];

// Adds the products of some columns to `sum`. From a row of x to the next there are `across` numbers, from a step of its columns to
// the next `along`; the weight's numbers that lie `ahead` of those multiplied are asked for.
template <int kOutputs, int kRows, bool kAsks>
[[gnu::always_inline]] SMELT_KEEPS_SUMS inline void add_products(const bf16* weight, int64_t stride, int64_t ahead, const bf16* x,
                                                                 int64_t across, int64_t along, int64_t columns,
                                                                 Sums<kOutputs, kRows>& sum) {
    int64_t k = 0;
    for (; k + kStep <= columns; k += kStep, x += along) {
        __m512i in[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) in[r] = load32(x + r * across);
#pragma GCC unroll 8
        for (int n = 0; n < kOutputs; n++) {
            const bf16* from = weight + n * stride + k;
            if constexpr (kAsks) _mm_prefetch((const char*)(from + ahead), _MM_HINT_T0);
            const __m512i w = load32(from);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++) sum[r][n] = add_pairs(sum[r][n], w, in[r]);
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

// Adds up the lanes of each sum, adds the bias, and stores the first `rows` rows.
template <int kOutputs, int kRows>
[[gnu::always_inline]] SMELT_KEEPS_SUMS inline void store_totals(const Sums<kOutputs, kRows>& sum, const bf16* bias, int64_t rows,
                                                                 int64_t outputs, bf16* out) {
    static_assert(kRows <= kPanel);
    const __m512 none = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int n = 0; n < kOutputs; n += 4) {
        const int taken = std::min(4, kOutputs - n);
        __m512 part[4];
#pragma GCC unroll 8
        for (int j = 0; j < 4; j++) {
            __m512 row[kPanel];
#pragma GCC unroll 8
            for (int r = 0; r < kPanel; r++) row[r] = r < kRows && j < taken ? sum[std::min(r, kRows - 1)][n + std::min(j, taken - 1)] : none;
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
}

// Calls `body` with `count` as a constant, at most kMost.
template <int kMost, class Body>
inline void with_constant(int64_t count, const Body& body) {
    if (count >= kMost) return body.template operator()<kMost>();
    if constexpr (kMost > 1) with_constant<kMost - 1>(count, body);
}

// Few rows: reading the weight is what takes the time.
template <int kOutputs, int kRows>
SMELT_KEEPS_SUMS void few_rows(const bf16* weight, const bf16* bias, const bf16* x, int64_t outputs, int64_t columns, bf16* out) {
    Sums<kOutputs, kRows> sum;
#pragma GCC unroll 32
    for (int i = 0; i < kRows * kOutputs; i++) sum[i / kOutputs][i % kOutputs] = _mm512_setzero_ps();
    add_products<kOutputs, kRows, true>(weight, columns, kAhead, x, columns, kStep, columns, sum);
    store_totals<kOutputs, kRows>(sum, bias, kRows, outputs, out);
}

// Rows packed in panels of kPanel, in the order in which they are multiplied: for each piece of columns, for each panel, for each step of the piece's
// columns, for each row. Read in their own order, long rows would come in many streams, and in the same places of a cache.
class Panels {
public:
    struct alignas(64) Line {
        bf16 numbers[kStep];
    };

    Panels(const bf16* x, int64_t rows, int64_t columns, int threads)
        : steps_((columns + kStep - 1) / kStep),
          count_((rows + kPanel - 1) / kPanel),
          lines_(std::make_unique_for_overwrite<Line[]>(count_ * kPanel * steps_)) {
        spread(threads, count_, std::max<int64_t>(1, (64 << 10) / (columns * kPanel)), [&](int64_t panel) {
            for (int64_t step = 0; step < steps_; step++)
                for (int64_t r = 0; r < kPanel; r++) {
                    const int64_t row = panel * kPanel + r, k = step * kStep;
                    const __mmask32 mask = row < rows ? first32(columns - k) : 0;
                    _mm512_store_si512(&lines_[line(panel, step) + r], _mm512_maskz_loadu_epi16(mask, x + row * columns + k));
                }
        });
    }

    const bf16* at(int64_t panel, int64_t column) const { return lines_[line(panel, column / kStep)].numbers; }

private:
    int64_t line(int64_t panel, int64_t step) const {
        constexpr int64_t kSteps = kPiece / kStep;
        const int64_t before = step / kSteps * kSteps, length = std::min(kSteps, steps_ - before);
        return (before * count_ + panel * length + step - before) * kPanel;
    }

    int64_t steps_, count_;
    std::unique_ptr<Line[]> lines_;
};

template <int kOutputs>
SMELT_KEEPS_SUMS void many_rows(const bf16* weight, const bf16* bias, const Panels& x, int64_t row, int64_t rows, int64_t outputs,
                                int64_t columns, bf16* out) {
    constexpr int64_t kAlong = kPanel * kStep;
    alignas(64) Sums<kOutputs, kPanel> sums[kTogether / kPanel];  // between pieces
    for (int64_t k = 0; k < columns; k += kPiece) {
        const int64_t length = std::min(kPiece, columns - k);
        const bool last = k + length == columns;
        const int64_t ahead = last ? kOutputs * columns - k : kPiece;  // the next piece, the last one's is of the next outputs
        for (int64_t r = 0; r < rows; r += kPanel) {
            Sums<kOutputs, kPanel>& kept = sums[r / kPanel];
            Sums<kOutputs, kPanel> sum;
#pragma GCC unroll 32
            for (int i = 0; i < kPanel * kOutputs; i++)
                sum[i / kOutputs][i % kOutputs] = k ? kept[i / kOutputs][i % kOutputs] : _mm512_setzero_ps();
            const bf16* in = x.at((row + r) / kPanel, k);
            if (r == 0)
                add_products<kOutputs, kPanel, true>(weight + k, columns, ahead, in, kStep, kAlong, length, sum);
            else
                add_products<kOutputs, kPanel, false>(weight + k, columns, ahead, in, kStep, kAlong, length, sum);
            if (last) {
                store_totals<kOutputs, kPanel>(sum, bias, rows - r, outputs, out + r * outputs);
                continue;
            }
#pragma GCC unroll 32
            for (int i = 0; i < kPanel * kOutputs; i++) kept[i / kOutputs][i % kOutputs] = sum[i / kOutputs][i % kOutputs];
        }
    }
}

}  // namespace

void linear_dense(const bf16* weight, const bf16* bias, const bf16* x, int64_t rows, int64_t outputs, int64_t columns, bf16* out,
                  int threads) {
    if (rows <= kPanel) {
        constexpr int kOutputs = 4;
        const int64_t blocks = (outputs + kOutputs - 1) / kOutputs;
        spread(threads, blocks, std::max<int64_t>(1, std::min<int64_t>(blocks / (8 * threads), (64 << 10) / columns)), [&](int64_t i) {
            const int64_t n = i * kOutputs;
            with_constant<kOutputs>(outputs - n, [&]<int kCount>() {
                with_constant<kPanel>(rows, [&]<int kRows>() {
                    few_rows<kCount, kRows>(weight + n * columns, bias ? bias + n : nullptr, x, outputs, columns, out + n);
                });
            });
        });
        return;
    }
    constexpr int kOutputs = 6;
    const Panels panels(x, rows, columns, threads);
    const int64_t blocks = (outputs + kOutputs - 1) / kOutputs, rounds = (rows + kTogether - 1) / kTogether;
    spread(threads, rounds * blocks, std::clamp<int64_t>(rounds * blocks / (8 * threads), 1, 8), [&](int64_t i) {
        const int64_t n = i % blocks * kOutputs, row = i / blocks * kTogether;
        with_constant<kOutputs>(outputs - n, [&]<int kCount>() {
            many_rows<kCount>(weight + n * columns, bias ? bias + n : nullptr, panels, row, std::min(kTogether, rows - row), outputs, columns,
                              out + row * outputs + n);
        });
    });
}

}  // namespace smelt
