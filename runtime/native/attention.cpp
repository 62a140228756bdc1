// The cache of keys and values, and the attention of single tokens to it.
//
// A block of the cache holds, for each head, keys as [size][block] and values as [block][size]: so 16 positions' scores are
// one vector, with no sums across lanes. In int8 and float8, every position and head has a scale of its own.
#include "stored.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace smelt {
namespace {

inline bf16 kept(float value, float, bf16*) { return narrow(value); }

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
    if (std::is_same_v<T, bf16>) return 1;
    float most = 0;
    for (int64_t i = 0; i < size; i++) most = std::max(most, std::fabs(values[i]));
    return most / (std::is_same_v<T, int8_t> ? 127.0f : 448.0f);
}

template <class T>
void store_token(const Cache& cache, int64_t slot, int64_t head, const float* key, const float* value) {
    const int64_t size = cache.size, length = cache.block;
    const int64_t place = slot / length * cache.heads + head, inside = slot % length;
    T* keys = (T*)cache.keys + place * length * size + inside;
    T* values = (T*)cache.values + (place * length + inside) * size;
    const float key_scale = scale_of<T>(key, size), value_scale = scale_of<T>(value, size);
    const float key_inverse = key_scale > 0 ? 1 / key_scale : 0, value_inverse = value_scale > 0 ? 1 / value_scale : 0;
    for (int64_t i = 0; i < size; i++) keys[i * length] = kept(key[i], key_inverse, (T*)nullptr);
    for (int64_t i = 0; i < size; i++) values[i] = kept(value[i], value_inverse, (T*)nullptr);
    if (cache.key_scales) {
        cache.key_scales[place * length + inside] = key_scale;
        cache.value_scales[place * length + inside] = value_scale;
    }
}

inline void turn(bf16* head, const bf16* cosine, const bf16* sine, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 mask = first(half - i);
        const __m512 a = load16(head + i, mask), b = load16(head + half + i, mask);
        const __m512 c = load16(cosine + i, mask), s = load16(sine + i, mask);
        store16(head + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)), mask);
        store16(head + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)), mask);
    }
}

template <class T, int kHeads>
void attend_heads(const Cache& cache, const Attention& a, const float* queries, int64_t head, const int64_t* table, int64_t stop,
                  std::vector<float>& scratch, bf16* out) {
    const int64_t size = cache.size, length = cache.block;
    const int64_t begin = a.window > 0 ? std::max<int64_t>(0, stop - a.window) : 0;
    const int64_t width = (stop - begin + 31) / 16 * 16 + 16;
    scratch.resize(std::max<size_t>(scratch.size(), width * kHeads));
    float* scores = scratch.data();
    float most[kHeads];
    std::fill(most, most + kHeads, -INFINITY);
    for (int64_t p = begin; p < stop;) {
        const int64_t inside = p % length, count = std::min<int64_t>({16, length - inside, stop - p});
        const int64_t place = table[p / length] * cache.heads + head;
        const __mmask16 mask = first(count);
        const T* keys = (const T*)cache.keys + place * length * size + inside;
        __m512 sum[kHeads];
#pragma GCC unroll 16
        for (int h = 0; h < kHeads; h++) sum[h] = _mm512_setzero_ps();
        for (int64_t d = 0; d < size; d++) {
            const __m512 key = wide16(keys + d * length, mask);
#pragma GCC unroll 16
            for (int h = 0; h < kHeads; h++) sum[h] = _mm512_fmadd_ps(key, _mm512_set1_ps(queries[h * size + d]), sum[h]);
        }
        if (cache.key_scales) {
            const __m512 scales = _mm512_maskz_loadu_ps(mask, cache.key_scales + place * length + inside);
#pragma GCC unroll 16
            for (int h = 0; h < kHeads; h++) sum[h] = _mm512_mul_ps(sum[h], scales);
        }
#pragma GCC unroll 16
        for (int h = 0; h < kHeads; h++) {
            if (a.cap > 0) sum[h] = capped(sum[h], a.cap);
            most[h] = std::max(most[h], _mm512_mask_reduce_max_ps(mask, sum[h]));
            _mm512_mask_storeu_ps(scores + h * width + p - begin, mask, sum[h]);
        }
        p += count;
    }
    float total[kHeads];
#pragma GCC unroll 16
    for (int h = 0; h < kHeads; h++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < stop - begin; i += 16) {
            const __mmask16 mask = first(stop - begin - i);
            float* at = scores + h * width + i;
            const __m512 shares = exp16(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, at), _mm512_set1_ps(most[h])));
            sum = _mm512_mask_add_ps(sum, mask, sum, shares);
            _mm512_mask_storeu_ps(at, mask, shares);
        }
        total[h] = _mm512_reduce_add_ps(sum);
    }
    for (int64_t d = 0; d < size; d += 64) {
        __m512 sum[kHeads][4];
#pragma GCC unroll 16
        for (int h = 0; h < kHeads; h++)
#pragma GCC unroll 16
            for (int v = 0; v < 4; v++) sum[h][v] = _mm512_setzero_ps();
        const __mmask16 masks[4] = {first(std::max<int64_t>(0, size - d)), first(std::max<int64_t>(0, size - d - 16)),
                                    first(std::max<int64_t>(0, size - d - 32)), first(std::max<int64_t>(0, size - d - 48))};
        for (int64_t p = begin; p < stop;) {
            const int64_t inside = p % length, count = std::min<int64_t>(length - inside, stop - p);
            const int64_t place = table[p / length] * cache.heads + head;
            for (int64_t i = inside; i < inside + count; i++, p++) {
                const T* values = (const T*)cache.values + (place * length + i) * size + d;
                __m512 value[4];
#pragma GCC unroll 16
                for (int v = 0; v < 4; v++) value[v] = wide16(values + 16 * v, masks[v]);
                const float scale = cache.value_scales ? cache.value_scales[place * length + i] : 1;
#pragma GCC unroll 16
                for (int h = 0; h < kHeads; h++) {
                    const __m512 share = _mm512_set1_ps(scores[h * width + p - begin] * scale);
#pragma GCC unroll 16
                    for (int v = 0; v < 4; v++) sum[h][v] = _mm512_fmadd_ps(share, value[v], sum[h][v]);
                }
            }
        }
#pragma GCC unroll 16
        for (int h = 0; h < kHeads; h++)
#pragma GCC unroll 16
            for (int v = 0; v < 4; v++)
                store16(out + h * size + d + 16 * v, _mm512_mul_ps(sum[h][v], _mm512_set1_ps(1 / total[h])), masks[v]);
    }
}

template <class T>
void attend_all(const Cache& cache, const Attention& a, int threads) {
    const int64_t size = cache.size, shared = a.heads / cache.heads;
    std::vector<std::vector<float>> scratch(std::max(1, threads));
    spread(threads, a.tokens * cache.heads, 1, [&](int64_t item) {
        const int64_t token = item / cache.heads, head = item % cache.heads, row = a.rows[token];
        std::vector<float>& mine = scratch[threads > 1 ? omp_get_thread_num() : 0];
        std::vector<float> queries(shared * size);
        const bf16* from = a.queries + row * a.stride + head * shared * size;
        for (int64_t i = 0; i < shared * size; i++) queries[i] = widen(from[i]) * a.scale;
        bf16* out = a.out + (row * a.heads + head * shared) * size;
        const int64_t* table = a.tables + token * a.table_width;
        int64_t h = 0;
        for (; h + 4 <= shared; h += 4)
            attend_heads<T, 4>(cache, a, queries.data() + h * size, head, table, a.stops[token], mine, out + h * size);
        for (; h + 2 <= shared; h += 2)
            attend_heads<T, 2>(cache, a, queries.data() + h * size, head, table, a.stops[token], mine, out + h * size);
        for (; h < shared; h++)
            attend_heads<T, 1>(cache, a, queries.data() + h * size, head, table, a.stops[token], mine, out + h * size);
    });
}

}  // namespace

void rotate_and_store(const Cache& cache, bf16* heads, int64_t tokens, int64_t query_heads, const bf16* cosines, const bf16* sines,
                      int64_t half, const int64_t* slots, int threads) {
    const int64_t size = cache.size, width = (query_heads + 2 * cache.heads) * size;
    spread(threads, tokens, std::max<int64_t>(1, 8192 / width), [&](int64_t token) {
        bf16* row = heads + token * width;
        if (half > 0)
            for (int64_t h = 0; h < query_heads + cache.heads; h++)
                turn(row + h * size, cosines + token * half, sines + token * half, half);
        std::vector<float> wide(2 * cache.heads * size);
        for (int64_t i = 0; i < 2 * cache.heads * size; i++) wide[i] = widen(row[query_heads * size + i]);
        for (int64_t h = 0; h < cache.heads; h++) {
            const float *key = wide.data() + h * size, *value = key + cache.heads * size;
            if (cache.kind == kBfloat16) store_token<bf16>(cache, slots[token], h, key, value);
            if (cache.kind == kInt8) store_token<int8_t>(cache, slots[token], h, key, value);
            if (cache.kind == kFloat8) store_token<Float8>(cache, slots[token], h, key, value);
        }
    });
}

void attend(const Cache& cache, const Attention& a, int threads) {
    if (cache.kind == kBfloat16) attend_all<bf16>(cache, a, threads);
    if (cache.kind == kInt8) attend_all<int8_t>(cache, a, threads);
    if (cache.kind == kFloat8) attend_all<Float8>(cache, a, threads);
}

}  // namespace smelt
