// Linears with bfloat16 weights [outputs, columns] for few rows, where reading the weights is what takes the time.
#include "kernels.h"
#include "simd.h"

#include <algorithm>

namespace smelt {
namespace {

constexpr int64_t kAhead = 512;  // numbers of a weight's row that are asked for in advance
constexpr int64_t kRowBytes = 384 << 10;  // of inputs

inline __m512bh load32(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }

inline __m512bh load32(const bf16* from, __mmask32 mask) { return (__m512bh)_mm512_maskz_loadu_epi16(mask, from); }

template <int kOutputs, int kRows>
void block(const bf16* weight, const bf16* bias, const bf16* x, int64_t outputs, int64_t columns, bf16* out) {
    __m512 sum[kOutputs][kRows];
#pragma GCC unroll 16
    for (int n = 0; n < kOutputs; n++)
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) sum[n][r] = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + 32 <= columns; k += 32) {
        __m512bh in[kRows];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) in[r] = load32(x + r * columns + k);
#pragma GCC unroll 16
        for (int n = 0; n < kOutputs; n++) {
            const bf16* from = weight + n * columns + k;
            _mm_prefetch((const char*)(from + kAhead), _MM_HINT_T0);
            const __m512bh w = load32(from);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; r++) sum[n][r] = _mm512_dpbf16_ps(sum[n][r], w, in[r]);
        }
    }
    if (k < columns) {
        const __mmask32 mask = (1u << (columns - k)) - 1;
#pragma GCC unroll 16
        for (int n = 0; n < kOutputs; n++)
#pragma GCC unroll 16
            for (int r = 0; r < kRows; r++)
                sum[n][r] = _mm512_dpbf16_ps(sum[n][r], load32(weight + n * columns + k, mask), load32(x + r * columns + k, mask));
    }
#pragma GCC unroll 16
    for (int n = 0; n < kOutputs; n++)
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++)
            out[r * outputs + n] = narrow(_mm512_reduce_add_ps(sum[n][r]) + (bias ? widen(bias[n]) : 0.0f));
}

template <int kOutputs>
void rows_of(const bf16* weight, const bf16* bias, const bf16* x, int64_t rows, int64_t outputs, int64_t columns, bf16* out) {
    for (; rows >= 4; rows -= 4, x += 4 * columns, out += 4 * outputs) block<kOutputs, 4>(weight, bias, x, outputs, columns, out);
    switch (rows) {
        case 3: return block<kOutputs, 3>(weight, bias, x, outputs, columns, out);
        case 2: return block<kOutputs, 2>(weight, bias, x, outputs, columns, out);
        case 1: return block<kOutputs, 1>(weight, bias, x, outputs, columns, out);
    }
}

}  // namespace

void linear_dense(const bf16* weight, const bf16* bias, const bf16* x, int64_t rows, int64_t outputs, int64_t columns, bf16* out,
                  int threads) {
    const int64_t blocks = (outputs + 3) / 4;
    // As many rows at a time as stay in the second cache while weights pass by.
    const int64_t together = std::max<int64_t>(4, kRowBytes / (2 * columns) / 4 * 4), rounds = (rows + together - 1) / together;
    spread(threads, rounds * blocks, std::max<int64_t>(1, std::min<int64_t>(blocks / (8 * threads), (64 << 10) / columns)), [&](int64_t i) {
        const int64_t n = i % blocks * 4, row = i / blocks * together, count = std::min(together, rows - row);
        const bf16 *w = weight + n * columns, *shift = bias ? bias + n : nullptr, *in = x + row * columns;
        bf16* to = out + row * outputs + n;
        switch (std::min<int64_t>(4, outputs - n)) {
            case 4: return rows_of<4>(w, shift, in, count, outputs, columns, to);
            case 3: return rows_of<3>(w, shift, in, count, outputs, columns, to);
            case 2: return rows_of<2>(w, shift, in, count, outputs, columns, to);
            case 1: return rows_of<1>(w, shift, in, count, outputs, columns, to);
        }
    });
}

}  // namespace smelt
