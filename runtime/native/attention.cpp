// The cache of keys and values, and the attention to it that gives a token the same numbers whatever runs beside it.
//
// Keys stand so that 16 positions' scores are one vector, values so that 16 numbers of the outcome are: no sums across lanes.
// In int8 and float8, every position and head has a scale of its own.
#include "stored.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace smelt {
namespace {

constexpr int64_t kTogether = 8;  // tokens of a sequence that attend together

inline int8_t kept(float value, float inverse, int8_t*) {
    return int8_t(std::max(-127.0f, std::min(127.0f, std::nearbyint(value * inverse))));
}

inline Float8 kept(float value, float inverse, Float8*) {
    // To float16 scaled down by 256 with 3 bits of mantissa, halves to even; 448 is the largest.
    const float clamped = std::max(-448.0f, std::min(448.0f, value * inverse));
    uint32_t bits;
    std::memcpy(&bits, &clamped, 4);
    const uint32_t sign = bits >> 24 & 0x80;
    const float size = std::fabs(clamped);
    if (size < 0.015625f) return Float8{uint8_t(sign | uint32_t(std::nearbyint(size * 512)))};  // below the normal numbers
    std::memcpy(&bits, &size, 4);
    bits += 0x7ffff + (bits >> 20 & 1);
    return Float8{uint8_t(sign | ((bits >> 20) - (120 << 3)))};
}

template <class T>
float scale_of(const float* values, int64_t size) {
    float most = 0;
    for (int64_t i = 0; i < size; i++) most = std::max(most, std::fabs(values[i]));
    return most / (std::is_same_v<T, int8_t> ? 127.0f : 448.0f);
}

// A row's scale, and the number in it that gets the lowest code whatever its quotient says (quant/row_rounding.py); NaN if none.
struct RowScale {
    float scale, lowest = NAN;
};

// Quotients are bfloat16 before they are rounded.
inline int8_t coded(float value, const RowScale& row, const Rule& rule, int8_t*) {
    if (value == row.lowest) return int8_t(rule.least);
    return int8_t(std::nearbyint(std::max(rule.least, std::min(rule.most, widen(narrow(value / row.scale))))));
}

inline Float8 coded(float value, const RowScale& row, const Rule&, Float8* type) {
    return kept(widen(narrow(value / row.scale)), 1.0f, type);
}

RowScale scale_by_rule(const Rule& rule, const float* fixed, int64_t head, const float* values, int64_t size) {
    if (fixed) return {fixed[head]};
    float most = 0;
    for (int64_t i = 0; i < size; i++) most = std::max(most, std::fabs(values[i]));
    const float scale = widen(narrow(most / rule.half));
    if (scale > 0) return {scale, -most};
    return {0.0078125f};  // bfloat16's epsilon, as compressed-tensors has it
}

template <class T>
void store_by_rule(const Cache& cache, int64_t slot, int64_t head, const float* key, const float* value) {
    const int64_t size = cache.size, length = cache.block;
    const int64_t place = slot / length * cache.heads + head, inside = slot % length;
    const Rule& rule = cache.rule;
    T* keys = keys_of<T>(cache, place) + 2 * inside;
    T* values = values_of<T>(cache, place) + inside / 2 * 2 * size + inside % 2;
    const RowScale of_key = scale_by_rule(rule, rule.keys, head, key, size), of_value = scale_by_rule(rule, rule.values, head, value, size);
    for (int64_t i = 0; i < size; i++) keys[i / 2 * 2 * length + i % 2] = coded(key[i], of_key, rule, (T*)nullptr);
    for (int64_t i = 0; i < size; i++) values[2 * i] = coded(value[i], of_value, rule, (T*)nullptr);
    cache.key_scales[place * length + inside] = of_key.scale;
    cache.value_scales[place * length + inside] = of_value.scale;
}

template <class T>
void store_token(const Cache& cache, int64_t slot, int64_t head, const float* key, const float* value) {
    const int64_t size = cache.size, length = cache.block;
    const int64_t place = slot / length * cache.heads + head, inside = slot % length;
    T* keys = keys_of<T>(cache, place) + 2 * inside;
    T* values = values_of<T>(cache, place) + inside / 2 * 2 * size + inside % 2;
    const float key_scale = scale_of<T>(key, size), value_scale = scale_of<T>(value, size);
    const float key_inverse = key_scale > 0 ? 1 / key_scale : 0, value_inverse = value_scale > 0 ? 1 / value_scale : 0;
    for (int64_t i = 0; i < size; i++) keys[i / 2 * 2 * length + i % 2] = kept(key[i], key_inverse, (T*)nullptr);
    for (int64_t i = 0; i < size; i++) values[2 * i] = kept(value[i], value_inverse, (T*)nullptr);
    if (cache.key_scales) {
        cache.key_scales[place * length + inside] = key_scale;
        cache.value_scales[place * length + inside] = value_scale;
    }
}

// What is kept as it is moves in pairs of numbers, or by 16.
void store_plain(const Cache& cache, int64_t slot, int64_t head, const bf16* key, const bf16* value) {
    const int64_t size = cache.size, length = cache.block;
    const int64_t place = slot / length * cache.heads + head, inside = slot % length;
    bf16* keys = keys_of<bf16>(cache, place) + 2 * inside;
    for (int64_t i = 0; i < size; i += 2) std::memcpy(keys + i * length, key + i, 4);
    bf16* values = values_of<bf16>(cache, place) + inside / 2 * 2 * size;
    const int shift = inside % 2 * 16;
    const __mmask32 halves = inside % 2 ? 0xaaaaaaaa : 0x55555555;
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 there = first(size - i);
        const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, value + i)), shift);
        _mm512_mask_storeu_epi16(values + 2 * i, _pdep_u32(there, 0x55555555) * 3 & halves, wide);
    }
}

inline void rotate(bf16* head, const bf16* cosine, const bf16* sine, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 mask = first(half - i);
        const __m512 a = load16(head + i, mask), b = load16(head + half + i, mask);
        const __m512 c = load16(cosine + i, mask), s = load16(sine + i, mask);
        store16(head + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)), mask);
        store16(head + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)), mask);
    }
}

// Tokens of one sequence, one after the other, that attend together. What is seen by none of them is not read.
struct Seen {
    const int64_t* table;
    int64_t window, length, tokens, stop, begin, end;  // the last one's stop; blocks of the table

    Seen(const int64_t* table, int64_t stop, int64_t tokens, int64_t window, int64_t length)
        : table(table), window(window), length(length), tokens(tokens), stop(stop), begin(first(0) / length),
          end((stop + length - 1) / length) {}

    int64_t stop_of(int64_t token) const { return stop - (tokens - 1 - token); }
    int64_t first(int64_t token) const { return window > 0 ? std::max<int64_t>(0, stop_of(token) - window) : 0; }
    // The positions inside a block that a token sees.
    int64_t low(int64_t block, int64_t token) const { return std::max<int64_t>(0, first(token) - block * length); }
    int64_t high(int64_t block, int64_t token) const { return std::min(length, stop_of(token) - block * length); }
};

// Some tokens and some heads of the cache; a query is one query head of one token. Blocks are gone through in the order in which
// they lie in memory, all heads of one before the next: memory gives long stretches several times as fast as pieces. So scores and
// sums of all heads are kept.
//
// A token's numbers are the same alone and beside others: what others see and it does not has no share, and so adds zero.
struct Task {
    const Cache& cache;
    const Attention& attention;
    const Seen& seen;
    int64_t shared;        // query heads that share a head
    const bf16* queries;   // [heads][tokens][shared][size]
    float* scores;         // [queries][blocks seen, each filled up to 16s]
    bf16* shares;          // the same
    float* sums;           // [queries][size, filled up to 64s]
    int64_t filled, width, room;

    int64_t place(int64_t block, int64_t head) const { return seen.table[block] * cache.heads + head; }
    // What is read a little later, to be asked for now.
    int64_t later(int64_t block, int64_t head) const { return place(std::min(block + 2, seen.end - 1), head); }
    int64_t token(int64_t query) const { return query / shared % seen.tokens; }
    float* scores_at(int64_t query, int64_t block) const { return scores + query * width + (block - seen.begin) * filled; }
    bf16* shares_at(int64_t query, int64_t block) const { return shares + query * width + (block - seen.begin) * filled; }
};

// Scores of the positions of `kBlocks` blocks for `kQueries` queries that share a head.
template <class T, int kQueries, int kBlocks>
SMELT_KEEPS_SUMS void score_blocks(const Task& t, int64_t head, int64_t query, int64_t block) {
    const Cache& cache = t.cache;
    const int64_t size = cache.size, length = cache.block;
    const bf16* queries = t.queries + query * size;
    const T *keys[kBlocks], *later[kBlocks];
    for (int b = 0; b < kBlocks; b++) {
        keys[b] = keys_of<T>(cache, t.place(block + b, head));
        later[b] = keys_of<T>(cache, t.later(block + b, head));
    }
    for (int64_t i = 0; i < t.filled; i += 16) {
        const __mmask16 there = first(length - i);
        __m512 sum[kQueries][kBlocks];
#pragma GCC unroll 16
        for (int q = 0; q < kQueries * kBlocks; q++) sum[q / kBlocks][q % kBlocks] = _mm512_setzero_ps();
        for (int64_t pair = 0; pair < size / 2; pair++) {
            const int64_t at = (pair * length + i) * 2;
            __m512i key[kBlocks];
#pragma GCC unroll 16
            for (int b = 0; b < kBlocks; b++) {
                _mm_prefetch((const char*)(later[b] + at), _MM_HINT_T1);
                key[b] = pairs16(keys[b] + at, there);
            }
#pragma GCC unroll 16
            for (int q = 0; q < kQueries; q++) {
                const __m512i two = broadcast_pair(queries + q * size + 2 * pair);
#pragma GCC unroll 16
                for (int b = 0; b < kBlocks; b++) sum[q][b] = add_pairs(sum[q][b], key[b], two);
            }
        }
#pragma GCC unroll 16
        for (int b = 0; b < kBlocks; b++) {
            __m512 scale = _mm512_set1_ps(t.attention.scale);
            if (cache.key_scales)
                scale = _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(there, cache.key_scales + t.place(block + b, head) * length + i));
#pragma GCC unroll 16
            for (int q = 0; q < kQueries; q++) {
                __m512 score = _mm512_mul_ps(sum[q][b], scale);
                if (t.attention.cap > 0) score = capped(score, t.attention.cap);
                // What is not seen may be anything.
                const int64_t token = t.token(query + q), low = t.seen.low(block + b, token) - i, high = t.seen.high(block + b, token) - i;
                const __mmask16 mask = first(std::max<int64_t>(0, high)) & ~first(std::max<int64_t>(0, low));
                _mm512_storeu_ps(t.scores_at(query + q, block + b) + i, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), mask, score));
            }
        }
    }
}

// Scores of one query become shares, which add up to one as what is returned times each.
__m512 share_out(float* scores, int64_t width) {
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    __m512 most = nothing, sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) most = _mm512_max_ps(_mm512_loadu_ps(scores + i), most);
    const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int64_t i = 0; i < width; i += 16) {
        const __m512 score = _mm512_loadu_ps(scores + i);
        const __mmask16 seen = _mm512_cmp_ps_mask(score, nothing, _CMP_NEQ_UQ);
        const __m512 share = _mm512_maskz_mov_ps(seen, exp16(_mm512_sub_ps(score, largest)));
        sum = _mm512_add_ps(sum, share);
        _mm512_storeu_ps(scores + i, share);
    }
    return _mm512_set1_ps(1 / _mm512_reduce_add_ps(sum));
}

// Shares times `factor` as values are multiplied by them: in bfloat16, with the values' scales.
void weigh(const Task& t, int64_t head, int64_t query, __m512 factor) {
    const Cache& cache = t.cache;
    for (int64_t block = t.seen.begin; block < t.seen.end; block++) {
        const int64_t low = t.seen.low(block, 0), high = t.seen.high(block, t.seen.tokens - 1), place = t.place(block, head);
        const float* scores = t.scores_at(query, block);
        bf16* shares = t.shares_at(query, block);
        for (int64_t i = low / 16 * 16; i < high; i += 16) {
            __m512 share = _mm512_mul_ps(_mm512_loadu_ps(scores + i), factor);
            if (cache.value_scales) {
                const __mmask16 mask = first(high - i) & ~first(std::max<int64_t>(0, low - i));
                share = _mm512_mul_ps(share, _mm512_maskz_loadu_ps(mask, cache.value_scales + place * cache.block + i));
            }
            store16(shares + i, share);
        }
    }
}

// Adds the values of some blocks, each times its share.
template <class T, int kQueries>
SMELT_KEEPS_SUMS void add_blocks(const Task& t, int64_t head, int64_t query, int64_t begin, int64_t end) {
    const Cache& cache = t.cache;
    const int64_t size = cache.size;
    for (int64_t d = 0; d < size; d += 64) {
        const __mmask16 masks[4] = {first(std::max<int64_t>(0, size - d)), first(std::max<int64_t>(0, size - d - 16)),
                                    first(std::max<int64_t>(0, size - d - 32)), first(std::max<int64_t>(0, size - d - 48))};
        __m512 sum[kQueries][4];
#pragma GCC unroll 16
        for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 16
            for (int v = 0; v < 4; v++) sum[q][v] = _mm512_loadu_ps(t.sums + (query + q) * t.room + d + 16 * v);
        for (int64_t block = begin; block < end; block++) {
            const int64_t low = t.seen.low(block, 0), high = t.seen.high(block, t.seen.tokens - 1);
            const T *values = values_of<T>(cache, t.place(block, head)), *later = values_of<T>(cache, t.later(block, head));
            const bf16* shares = t.shares_at(query, block);
            for (int64_t i = low / 2 * 2; i < high; i += 2) {
                // Of a pair's two positions one may be unseen, and so anything.
                const __m512i counts = _mm512_set1_epi32((i >= low ? 0x0000ffff : 0) | (i + 1 < high ? 0xffff0000 : 0));
                __m512i value[4];
#pragma GCC unroll 16
                for (int v = 0; v < 4; v++) {
                    const int64_t at = i * size + 2 * d + 32 * v;
                    _mm_prefetch((const char*)(later + at), _MM_HINT_T1);
                    value[v] = _mm512_and_si512(counts, pairs16(values + at, masks[v]));
                }
#pragma GCC unroll 16
                for (int q = 0; q < kQueries; q++) {
                    const __m512i share = broadcast_pair(shares + q * t.width + i);
#pragma GCC unroll 16
                    for (int v = 0; v < 4; v++) sum[q][v] = add_pairs(sum[q][v], value[v], share);
                }
            }
        }
#pragma GCC unroll 16
        for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 16
            for (int v = 0; v < 4; v++) _mm512_storeu_ps(t.sums + (query + q) * t.room + d + 16 * v, sum[q][v]);
    }
}

// Calls what with kMost, 4, 2 or 1 queries at a time and the first of them, for `count` from `query` on.
template <int kMost, class What>
inline void by_queries(int64_t query, int64_t count, const What& what) {
    const int64_t end = query + count;
    for (; query + kMost <= end; query += kMost) what(std::integral_constant<int, kMost>(), query);
    for (; query + 4 <= end; query += 4) what(std::integral_constant<int, 4>(), query);
    for (; query + 2 <= end; query += 2) what(std::integral_constant<int, 2>(), query);
    for (; query < end; query++) what(std::integral_constant<int, 1>(), query);
}

// `tokens` from `token` on, one after the other in a sequence, and the cache's heads `begin` to `end`.
template <class T>
void attend_tokens(const Cache& cache, const Attention& a, int64_t token, int64_t tokens, int64_t begin, int64_t end) {
    thread_local std::vector<float> scratch;
    thread_local std::vector<bf16> halves;
    const int64_t size = cache.size, shared = a.heads / cache.heads, together = tokens * shared, queries = (end - begin) * together;
    const Seen seen(a.tables + token * a.table_width, a.stops[token + tokens - 1], tokens, a.window, cache.block);
    const int64_t filled = (cache.block + 15) / 16 * 16, width = (seen.end - seen.begin) * filled, room = (size + 63) / 64 * 64;
    const auto at_least = [](auto& vector, int64_t count) {
        if ((int64_t)vector.size() < count) vector.resize(count);
        return vector.data();
    };
    float *scores = at_least(scratch, queries * (width + room)), *sums = scores + queries * width;
    bf16 *ordered = at_least(halves, queries * (width + size)), *shares = ordered + queries * size;
    std::fill(sums, sums + queries * room, 0.0f);
    for (int64_t head = begin; head < end; head++)
        for (int64_t i = 0; i < tokens; i++)
            std::memcpy(ordered + ((head - begin) * tokens + i) * shared * size, a.queries + a.rows[token + i] * a.stride + head * shared * size,
                        shared * size * sizeof(bf16));
    const Task task{cache, a, seen, shared, ordered, scores, shares, sums, filled, width, room};
    for (int64_t block = seen.begin; block < seen.end;) {
        const bool two = seen.end - block > 1;
        for (int64_t head = begin; head < end; head++)
            by_queries<8>((head - begin) * together, together, [&](auto count, int64_t query) {
                if (two) score_blocks<T, count(), 2>(task, head, query, block);
                else score_blocks<T, count(), 1>(task, head, query, block);
            });
        block += two ? 2 : 1;
    }
    for (int64_t query = 0; query < queries; query++) {
        const __m512 factor = share_out(scores + query * width, width);
        weigh(task, begin + query / together, query, factor);
    }
    // All blocks of a few queries together, where they are few enough to stay in the cache that the next ones read them from.
    const int64_t blocks = end - begin == 1 ? seen.end - seen.begin : 1;
    for (int64_t block = seen.begin; block < seen.end; block += blocks)
        for (int64_t head = begin; head < end; head++)
            by_queries<4>((head - begin) * together, together,
                          [&](auto count, int64_t query) { add_blocks<T, count()>(task, head, query, block, block + blocks); });
    for (int64_t query = 0; query < queries; query++) {
        const int64_t head = begin + query / together, row = a.rows[token + task.token(query)];
        bf16* out = a.out + (row * a.heads + head * shared + query % shared) * size;
        for (int64_t d = 0; d < size; d += 16) store16(out + d, _mm512_loadu_ps(sums + query * room + d), first(size - d));
    }
}

// How many tokens from one on follow each other in one sequence.
int64_t run_length(const Attention& a, int64_t token, int64_t most) {
    const auto table = [&](int64_t of) { return a.tables + of * a.table_width; };
    int64_t count = 1;
    while (count < most && token + count < a.tokens && a.stops[token + count] == a.stops[token] + count &&
           std::equal(table(token), table(token) + a.table_width, table(token + count)))
        count++;
    return count;
}

template <class T>
void attend_all(const Cache& cache, const Attention& a, int threads) {
    std::vector<int64_t> starts;
    for (int64_t token = 0; token < a.tokens; token += run_length(a, token, kTogether)) starts.push_back(token);
    const int64_t runs = starts.size();
    starts.push_back(a.tokens);
    // As many parts of the heads as give every thread some work; one head at a time of several tokens, whose scores are many.
    const int64_t parts = runs < a.tokens ? cache.heads : std::min<int64_t>(cache.heads, (2 * threads + a.tokens - 1) / a.tokens);
    spread(threads, runs * parts, 1, [&](int64_t item) {
        const int64_t part = item % parts, token = starts[item / parts];
        attend_tokens<T>(cache, a, token, starts[item / parts + 1] - token, part * cache.heads / parts, (part + 1) * cache.heads / parts);
    });
}

}  // namespace

void rotate_and_store(const Cache& cache, bf16* heads, int64_t tokens, int64_t query_heads, const bf16* cosines, const bf16* sines,
                      int64_t half, const Places& places, int threads) {
    const int64_t size = cache.size, width = (query_heads + 2 * cache.heads) * size;
    const auto store = [&](const bf16* row, int64_t slot) {
        if (cache.kind == kBfloat16) {
            const bf16 *keys = row + query_heads * size, *values = keys + cache.heads * size;
            for (int64_t h = 0; h < cache.heads; h++) store_plain(cache, slot, h, keys + h * size, values + h * size);
            return;
        }
        thread_local std::vector<float> wide;
        wide.resize(2 * cache.heads * size);
        for (int64_t i = 0; i < 2 * cache.heads * size; i++) wide[i] = widen(row[query_heads * size + i]);
        for (int64_t h = 0; h < cache.heads; h++) {
            const float *key = wide.data() + h * size, *value = key + cache.heads * size;
            const bool ruled = cache.rule.half > 0;
            if (cache.kind == kInt8) (ruled ? store_by_rule<int8_t> : store_token<int8_t>)(cache, slot, h, key, value);
            if (cache.kind == kFloat8) (ruled ? store_by_rule<Float8> : store_token<Float8>)(cache, slot, h, key, value);
        }
    };
    spread(threads, tokens, std::max<int64_t>(1, 8192 / width), [&](int64_t token) {
        bf16* row = heads + token * width;
        if (half > 0)
            for (int64_t h = 0; h < query_heads + cache.heads; h++)
                rotate(row + h * size, cosines + token * half, sines + token * half, half);
        store(row, places.slots[token]);
    });
    for (int64_t i = 0; i < places.also; i++) store(heads + places.also_rows[i] * width, places.also_slots[i]);
}

void attend(const Cache& cache, const Attention& a, int threads) {
    if (cache.kind == kBfloat16) attend_all<bf16>(cache, a, threads);
    if (cache.kind == kInt8) attend_all<int8_t>(cache, a, threads);
    if (cache.kind == kFloat8) attend_all<Float8>(cache, a, threads);
}

}  // namespace smelt
