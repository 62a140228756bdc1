// What a layer does to each row on its own: norms, the gate of a feed-forward part.
#include "kernels.h"
#include "simd.h"

#include <algorithm>
#include <cmath>

namespace smelt {
namespace {

void norm_row(const Norm& norm, const bf16* x, bf16* out) {
    const int64_t size = norm.size;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 v = load16(x + i, first(size - i));
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 factor = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(squares) / float(size) + norm.eps));
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 mask = first(size - i);
        __m512 v = _mm512_mul_ps(load16(x + i, mask), factor);
        if (norm.rounds_first) {
            v = widen16(narrow16(v));
        }
        store16(out + i, _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, norm.weight + i)), mask);
    }
}

// Calls what with the first of 16 numbers, and which of them there are.
template <class What>
void by_sixteen(int64_t count, int threads, const What& what) {
    constexpr int64_t kPiece = 4096;
    spread(threads, (count + kPiece - 1) / kPiece, 8, [&](int64_t piece) {
        const int64_t end = std::min(count, (piece + 1) * kPiece);
        for (int64_t i = piece * kPiece; i < end; i += 16) what(i, first(end - i));
    });
}

}  // namespace

void rms_norm(const Norm& norm, const bf16* x, int64_t stride, bf16* out, int64_t out_stride, int64_t rows, int64_t heads,
              int threads) {
    spread(threads, rows, std::max<int64_t>(1, 16384 / (norm.size * heads)), [&](int64_t row) {
        for (int64_t head = 0; head < heads; head++)
            norm_row(norm, x + row * stride + head * norm.size, out + row * out_stride + head * norm.size);
    });
}

void gate(int activation, const bf16* x, int64_t rows, int64_t size, bf16* out, int threads) {
    spread(threads, rows * ((size + 255) / 256), 32, [&](int64_t piece) {
        const int64_t pieces = (size + 255) / 256, row = piece / pieces, begin = piece % pieces * 256;
        const bf16 *gates = x + row * 2 * size, *ups = gates + size;
        for (int64_t i = begin; i < std::min(size, begin + 256); i += 16) {
            const __mmask16 mask = first(size - i);
            const __m512 g = load16(gates + i, mask), u = load16(ups + i, mask);
            __m512 active;
            if (activation == kSilu) {
                active = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1), exp16(_mm512_sub_ps(_mm512_setzero_ps(), g))));
            } else {  // the tanh form of gelu: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
                const __m512 cubic = _mm512_mul_ps(_mm512_mul_ps(g, g), _mm512_mul_ps(g, _mm512_set1_ps(0.044715f)));
                const __m512 inner = _mm512_mul_ps(_mm512_add_ps(g, cubic), _mm512_set1_ps(-1.5957691216057308f));
                active = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1), exp16(inner)));
            }
            store16(out + row * size + i, _mm512_mul_ps(widen16(narrow16(active)), u), mask);
        }
    });
}

void add(const bf16* a, const bf16* b, int64_t count, bf16* out, int threads) {
    by_sixteen(count, threads, [&](int64_t i, __mmask16 mask) { store16(out + i, _mm512_add_ps(load16(a + i, mask), load16(b + i, mask)), mask); });
}

void to_float32(const bf16* values, int64_t count, float* out, int threads) {
    by_sixteen(count, threads, [&](int64_t i, __mmask16 mask) { _mm512_mask_storeu_ps(out + i, mask, load16(values + i, mask)); });
}

void logit_statistics(const float* logits, int64_t rows, int64_t size, int64_t* best, float* highest, float* total, int threads) {
    spread(threads, rows, 1, [&](int64_t row) {
        const float* x = logits + row * size;
        __m512 most = _mm512_set1_ps(-INFINITY);  // of each lane
        __m512i at = _mm512_setzero_si512(), here = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        __mmask16 strange = 0;
        for (int64_t i = 0; i < size; i += 16) {
            const __mmask16 there = first(size - i);
            const __m512 v = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), there, x + i);
            strange |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
            const __mmask16 above = _mm512_cmp_ps_mask(v, most, _CMP_GT_OQ);  // so each lane keeps the first of equals
            most = _mm512_mask_mov_ps(most, above, v);
            at = _mm512_mask_mov_epi32(at, above, here);
            here = _mm512_add_epi32(here, _mm512_set1_epi32(16));
        }
        const float largest = _mm512_reduce_max_ps(most);
        const __mmask16 equal = _mm512_cmp_ps_mask(most, _mm512_set1_ps(largest), _CMP_EQ_OQ);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < size; i += 16) {
            const __m512 v = _mm512_maskz_loadu_ps(first(size - i), x + i);
            sum = _mm512_mask_add_ps(sum, first(size - i), sum, exp16(_mm512_sub_ps(v, _mm512_set1_ps(largest))));
        }
        best[row] = _mm512_mask_reduce_min_epi32(equal, at);
        highest[row] = strange ? NAN : largest;
        total[row] = largest + std::log(_mm512_reduce_add_ps(sum));
    });
}

}  // namespace smelt
