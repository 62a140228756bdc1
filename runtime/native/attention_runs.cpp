// Attention of a run of tokens: a prompt, or a piece of one, over the cache.
//
// Keys and values of a head are first gathered from their blocks, as bfloat16: keys as [16 positions][pair of numbers] and
// values as [pair of positions][16 numbers]. Then every few queries that share the head compute their scores, the shares
// of those, and the sum of values. Scores of few queries stay in the cache however long the sequence is.
#include "attention_tiles.h"
#include "stored.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace smelt {
namespace {

// Pairs times the scale of each lane, or of each half of a lane, rounded.
inline __m512i scaled(__m512i pairs, __m512 even_scale, __m512 odd_scale) {
    const __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), even_scale);
    const __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000))), odd_scale);
    const __m512i low = _mm512_cvtepu16_epi32(narrow16(even));
    return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow16(odd)), 16));
}

// 16 positions from a multiple of 16 on.
template <class T>
void pack(const Cache& cache, const int64_t* table, int64_t head, int64_t stop, const Packed& to, int64_t vector) {
    const int64_t size = cache.size, length = cache.block, from = to.begin + 16 * vector;
    const int64_t end = std::min(from + 16, stop);
    const auto place = [&](int64_t position) { return table[position / length] * cache.heads + head; };
    for (int64_t pair = 0; pair < to.pairs; pair++) _mm512_storeu_si512((void*)to.key(vector, pair), _mm512_setzero_si512());
    for (int64_t p = from; p < end;) {
        const int64_t inside = p % length, count = std::min(length - inside, end - p);
        const T* keys = keys_of<T>(cache, place(p)) + 2 * inside;
        const __mmask16 mask = first(count);
        __m512 scales = _mm512_setzero_ps();
        if (cache.key_scales) scales = _mm512_maskz_loadu_ps(mask, cache.key_scales + place(p) * length + inside);
        for (int64_t pair = 0; pair < to.pairs; pair++) {
            __m512i found = pairs16(keys + pair * length * 2, mask);
            if (cache.key_scales) found = scaled(found, scales, scales);
            _mm512_mask_storeu_epi32((void*)(to.key(vector, pair) + 2 * (p - from)), mask, found);
        }
        p += count;
    }
    for (int64_t p = from; p < from + 16; p += 2) {
        // Two positions, each in the lower or the upper half of a pair, or past the end.
        const T* halves[2] = {nullptr, nullptr};
        float scales[2] = {1, 1};
        bool upper[2] = {false, false};
        for (int i = 0; i < 2 && p + i < end; i++) {
            const int64_t inside = (p + i) % length;
            halves[i] = values_of<T>(cache, place(p + i)) + inside / 2 * 2 * size;
            upper[i] = inside % 2;
            if (cache.value_scales) scales[i] = cache.value_scales[place(p + i) * length + inside];
        }
        const bool whole = halves[0] == halves[1] && halves[0];
        for (int64_t n = 0; n < to.numbers; n++) {
            const __mmask16 mask = first(size - 16 * n);
            __m512i found = _mm512_setzero_si512();
            if (whole) {
                found = pairs16(halves[0] + 32 * n, mask);
            } else {
                if (halves[0]) {
                    const __m512i low = pairs16(halves[0] + 32 * n, mask);
                    found = upper[0] ? _mm512_srli_epi32(low, 16) : _mm512_and_si512(low, _mm512_set1_epi32(0xffff));
                }
                if (halves[1]) {
                    const __m512i high = pairs16(halves[1] + 32 * n, mask);
                    found = _mm512_or_si512(found, upper[1] ? _mm512_and_si512(high, _mm512_set1_epi32(0xffff0000)) : _mm512_slli_epi32(high, 16));
                }
            }
            if (cache.value_scales) found = scaled(found, _mm512_set1_ps(scales[0]), _mm512_set1_ps(scales[1]));
            _mm512_storeu_si512((void*)to.value(vector, (p - from) / 2, n), found);
        }
    }
}

inline __m512i load32(const bf16* from) { return _mm512_loadu_si512(from); }

// Scores and sums of values on vector instructions.
struct ByVectors {
    static constexpr int kRows = 8;
    static constexpr int64_t kPositions = 16;  // that are seen together
    static constexpr bool kScaled = true;      // scores are multiplied by the scale

    static void scores(const Packed& head, const Reach& reach, const bf16* query, int64_t, float factor, float* scores) {
        const __m512 scale = _mm512_set1_ps(factor);
        for (int64_t v = reach.low; v < reach.high; v += 2) {
            const bool both = v + 1 < reach.high;
            __m512 sum[kRows][2];
#pragma GCC unroll 16
            for (int r = 0; r < kRows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
            for (int64_t pair = 0; pair < head.pairs; pair++) {
                const __m512i k0 = load32(head.key(v, pair)), k1 = load32(head.key(both ? v + 1 : v, pair));
#pragma GCC unroll 16
                for (int r = 0; r < kRows; r++) {
                    const __m512i q = broadcast_pair(query + (r * head.pairs + pair) * 2);
                    sum[r][0] = add_pairs(sum[r][0], k0, q);
                    sum[r][1] = add_pairs(sum[r][1], k1, q);
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < kRows; r++) {
                float* to = scores + r * reach.stride + 16 * (v - reach.low);
                _mm512_storeu_ps(to, _mm512_mul_ps(sum[r][0], scale));
                if (both) _mm512_storeu_ps(to + 16, _mm512_mul_ps(sum[r][1], scale));
            }
        }
    }

    static void sums(const Packed& head, const Reach& reach, const Rows& rows, int64_t size, const float* inverse, Scratch& scratch) {
        const bf16* shares = scratch.shares.data();
        for (int64_t n = 0; n < head.numbers; n += 2) {
            const bool both = n + 1 < head.numbers;
            __m512 sum[kRows][2];
#pragma GCC unroll 16
            for (int r = 0; r < kRows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
            for (int64_t v = reach.low; v < reach.high; v++)
                for (int64_t two = 0; two < 8; two++) {
                    const __m512i v0 = load32(head.value(v, two, n)), v1 = load32(head.value(v, two, both ? n + 1 : n));
#pragma GCC unroll 16
                    for (int r = 0; r < kRows; r++) {
                        const __m512i share = broadcast_pair(shares + r * reach.stride + 16 * (v - reach.low) + 2 * two);
                        sum[r][0] = add_pairs(sum[r][0], v0, share);
                        sum[r][1] = add_pairs(sum[r][1], v1, share);
                    }
                }
            for (int r = 0; r < rows.count; r++) {
                const __m512 divided = _mm512_set1_ps(inverse[r]);
                store16(rows.outs[r] + 16 * n, _mm512_mul_ps(sum[r][0], divided), first(size - 16 * n));
                if (both) store16(rows.outs[r] + 16 * n + 16, _mm512_mul_ps(sum[r][1], divided), first(size - 16 * n - 16));
            }
        }
    }
};

// The shares of a row's scores at `width` positions, the first of which is `begin`; returns the inverse of their sum.
template <bool kScaled>
float put_shares(const RunAttention& a, float* scores, int64_t begin, int64_t width, int64_t first_seen, int64_t stop, bf16* shares) {
    const int64_t from = first_seen - begin, to = stop - begin;
    const auto seen = [&](int64_t i) { return __mmask16(first(std::max<int64_t>(0, to - i)) & ~first(std::max<int64_t>(0, from - i))); };
    const __m512 scale = _mm512_set1_ps(a.scale);
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < width; i += 16) {
        __m512 score = _mm512_loadu_ps(scores + i);
        if (!kScaled) score = _mm512_mul_ps(score, scale);
        if (a.cap > 0) score = capped(score, a.cap);
        if (!kScaled || a.cap > 0) _mm512_storeu_ps(scores + i, score);
        most = _mm512_mask_max_ps(most, seen(i), most, score);
    }
    const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
        const __m512 share = _mm512_maskz_mov_ps(seen(i), exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + i), largest)));
        total = _mm512_add_ps(total, share);
        store16(shares + i, share);
    }
    return 1 / _mm512_reduce_add_ps(total);
}

template <class By>
void attend_rows(const Packed& head, const RunAttention& a, int64_t size, const Rows& rows, Scratch& scratch) {
    constexpr int64_t kStep = By::kPositions, kPadding = By::kPositions == 32 ? 32 : 0;  // so that rows are not in the same places of a cache
    const int64_t begin = *std::min_element(rows.first_seen, rows.first_seen + rows.count) - head.begin;
    const int64_t stop = *std::max_element(rows.stops, rows.stops + rows.count) - head.begin;
    const int64_t from = begin / kStep * kStep, width = (stop + kStep - 1) / kStep * kStep - from;
    const Reach reach{from / 16, (from + width) / 16, width + kPadding};
    scratch.scores.resize(std::max<size_t>(scratch.scores.size(), By::kRows * reach.stride));
    scratch.shares.resize(std::max<size_t>(scratch.shares.size(), By::kRows * reach.stride));
    scratch.queries.assign(By::kRows * 2 * head.pairs, 0);
    for (int r = 0; r < rows.count; r++) std::copy_n(rows.queries[r], size, scratch.queries.data() + r * 2 * head.pairs);
    By::scores(head, reach, scratch.queries.data(), size, a.scale, scratch.scores.data());
    float inverse[By::kRows];
    for (int r = 0; r < By::kRows; r++) {
        float* scores = scratch.scores.data() + r * reach.stride;
        bf16* shares = scratch.shares.data() + r * reach.stride;
        if (r < rows.count) inverse[r] = put_shares<By::kScaled>(a, scores, head.begin + from, width, rows.first_seen[r], rows.stops[r], shares);
        else std::fill_n(shares, width, bf16(0));
    }
    By::sums(head, reach, rows, size, inverse, scratch);
}

template <class T, class By>
void attend_packed(const Cache& cache, const RunAttention& a, int threads) {
    constexpr int64_t kStep = By::kPositions;
    const int64_t size = cache.size, group = a.heads / cache.heads, stop = a.start + a.tokens;
    const int64_t begin = a.window > 0 ? std::max<int64_t>(0, a.start + 1 - a.window) / kStep * kStep : 0;
    const int64_t vectors = (stop - begin + kStep - 1) / kStep * kStep / 16, pairs = (size + 1) / 2, numbers = (size + 15) / 16;
    const int64_t key_room = vectors * pairs * 32, value_room = vectors * 8 * numbers * 32;
    std::vector<bf16> room(cache.heads * (key_room + value_room));
    const auto packed = [&](int64_t head) {
        bf16* at = room.data() + head * (key_room + value_room);
        return Packed{begin, vectors, pairs, numbers, at, at + key_room};
    };
    spread(threads, cache.heads * vectors, 4,
           [&](int64_t i) { pack<T>(cache, a.table, i / vectors, stop, packed(i / vectors), i % vectors); });
    const int64_t count = a.tokens * group, blocks = (count + By::kRows - 1) / By::kRows;
    std::vector<Scratch> scratch(std::max(1, threads));
    spread(threads, cache.heads * blocks, By::kRows > 8 ? 1 : 4, [&](int64_t i) {
        // Later tokens see more: handing those out first evens out the threads.
        const int64_t head = i % cache.heads, begin = (blocks - 1 - i / cache.heads) * By::kRows;
        Rows rows;
        rows.count = int(std::min<int64_t>(By::kRows, count - begin));
        for (int r = 0; r < rows.count; r++) {
            const int64_t token = (begin + r) / group, mine = head * group + (begin + r) % group;
            rows.queries[r] = a.queries + token * a.stride + mine * size;
            rows.outs[r] = a.out + (token * a.heads + mine) * size;
            rows.stops[r] = a.start + token + 1;
            rows.first_seen[r] = a.window > 0 ? std::max<int64_t>(0, rows.stops[r] - a.window) : 0;
        }
        attend_rows<By>(packed(head), a, size, rows, scratch[threads > 1 ? omp_get_thread_num() : 0]);
    });
}

template <class By>
void attend(const Cache& cache, const RunAttention& a, int threads) {
    if (cache.kind == kBfloat16) attend_packed<bf16, By>(cache, a, threads);
    if (cache.kind == kInt8) attend_packed<int8_t, By>(cache, a, threads);
    if (cache.kind == kFloat8) attend_packed<Float8, By>(cache, a, threads);
}

}  // namespace

void attend_run(const Cache& cache, const RunAttention& a, int threads) {
    if (!a.tiles || cache.size % 32) return attend<ByVectors>(cache, a, threads);
#ifdef SMELT_DENSE_TILES
    if (dense_tiles_are_used()) return attend<ByTiles<ProcessorTiles>>(cache, a, threads);
#endif
    attend<ByTiles<EmulatedTiles>>(cache, a, threads);
}

}  // namespace smelt
