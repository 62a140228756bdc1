// Choosing tokens from rows of logits: temperature, top-k, top-p, min-p, and the noise of a sequence.
//
// A sample is the largest quotient of a token's probability and exponential noise. Only quotients that can be among the largest
// are computed: noise is never less than the uniform number u that it is made of, -log(1 - u).
#include "kernels.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace smelt {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kReach = 12;  // by so many temperatures below the largest logit are those that filters look at first

struct Token {
    float logit, share;  // e^(logit over temperature), against the largest one's
    int32_t id;
};

// The best of a row so far, the first one best; of equals those that came first.
class Ranking {
public:
    explicit Ranking(int64_t count) : count_(count) {}

    // What a further one has to exceed.
    float bound() const { return int64_t(best_.size()) < count_ ? kNothing : best_.back().value; }

    void add(float value, int32_t id) {
        if (!(value > bound())) return;
        if (int64_t(best_.size()) == count_) best_.pop_back();
        const auto place = std::find_if(best_.begin(), best_.end(), [&](const Ranked& each) { return each.value < value; });
        best_.insert(place, {value, id});
    }

    const std::vector<Ranked>& best() const { return best_; }

private:
    int64_t count_;
    std::vector<Ranked> best_;
};

// Four words of Philox (Salmon et al., 2011; ten rounds) of each of sixteen numbers.
inline void philox16(__m512i numbers, uint32_t length, uint64_t seed, __m512i* words) {
    const __m512i one = _mm512_set1_epi32(int(0xD2511F53u)), other = _mm512_set1_epi32(int(0xCD9E8D57u));
    const auto products = [](__m512i x, __m512i factor, __m512i& upper) {
        const __m512i even = _mm512_mul_epu32(x, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), factor);
        upper = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xAAAA, odd);
        return _mm512_mask_mov_epi32(even, 0xAAAA, _mm512_slli_epi64(odd, 32));
    };
    uint32_t first = uint32_t(seed), second = uint32_t(seed >> 32);
    __m512i a = numbers, b = _mm512_set1_epi32(int(length)), c = _mm512_setzero_si512(), d = c;
    for (int round = 0; round < 10; round++) {
        __m512i upper_a, upper_c;
        const __m512i lower_a = products(a, one, upper_a), lower_c = products(c, other, upper_c);
        a = _mm512_xor_si512(_mm512_xor_si512(upper_c, b), _mm512_set1_epi32(int(first)));
        c = _mm512_xor_si512(_mm512_xor_si512(upper_a, d), _mm512_set1_epi32(int(second)));
        b = lower_c;
        d = lower_a;
        first += 0x9E3779B9u;
        second += 0xBB67AE85u;
    }
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

// Above 0 and at most 1; the upper half of the words counts down from the largest.
inline __m512 uniform16(__m512i words) {
    const __m512i least = _mm512_min_epu32(words, _mm512_xor_si512(words, _mm512_set1_epi32(-1)));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(least), _mm512_set1_ps(4.6566127342e-10f), _mm512_set1_ps(2.3283064e-10f));
}

// Of sixteen tokens, those whose quotients may be among the best.
inline void rank16(Ranking& ranking, __m512 shares, __m512 uniform, __mmask16 there, const int32_t* ids) {
    const float bound = std::max(0.0f, ranking.bound());
    __mmask16 left = _mm512_mask_cmp_ps_mask(there, shares, _mm512_mul_ps(uniform, _mm512_set1_ps(bound)), _CMP_GT_OQ);
    if (!left) return;
    alignas(64) float share[16], u[16];
    _mm512_store_ps(share, shares);
    _mm512_store_ps(u, uniform);
    for (; left; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        ranking.add(share[lane] / -std::log1p(-u[lane]), ids[lane]);
    }
}

// e^x, and 0 where that is next to nothing.
inline __m512 share16(__m512 x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ), exp16(x)); }

struct Row {
    const float* logits;
    int64_t size;
    float highest, inverse;  // of the temperature

    // Of the logits from i on.
    __m512 shares(__m512 logits) const {
        return share16(_mm512_mul_ps(_mm512_sub_ps(logits, _mm512_set1_ps(highest)), _mm512_set1_ps(inverse)));
    }
    __m512 load(int64_t i) const { return _mm512_mask_loadu_ps(_mm512_set1_ps(kNothing), first(size - i), logits + i); }
};

// The largest logit; NaN if there is a NaN.
float highest(const float* logits, int64_t size) {
    __m512 most = _mm512_set1_ps(kNothing);
    __mmask16 strange = 0;
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 v = _mm512_mask_loadu_ps(_mm512_set1_ps(kNothing), first(size - i), logits + i);
        strange |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        most = _mm512_max_ps(most, v);
    }
    return strange ? NAN : _mm512_reduce_max_ps(most);
}

void take_likeliest(const float* logits, int64_t size, Ranking& ranking) {
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 there = first(size - i);
        const __m512 v = _mm512_maskz_loadu_ps(there, logits + i);
        for (__mmask16 left = _mm512_mask_cmp_ps_mask(there, v, _mm512_set1_ps(ranking.bound()), _CMP_GT_OQ); left; left &= left - 1)
            ranking.add(logits[i + __builtin_ctz(left)], int32_t(i + __builtin_ctz(left)));
    }
}

void sample_from_all(const Row& row, const Draw& draw, Ranking& ranking) {
    // A vector of words is of every fourth token: four vectors of groups, transposed, are of 64 tokens in their order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    alignas(64) int32_t ids[16];
    for (int64_t i = 0; i < row.size; i += 64) {
        __m512i w[4];
        philox16(_mm512_add_epi32(order, _mm512_set1_epi32(int(i / 4))), draw.length, draw.seed, w);
        const __m512i low = _mm512_unpacklo_epi32(w[0], w[1]), high = _mm512_unpackhi_epi32(w[0], w[1]);
        const __m512i low2 = _mm512_unpacklo_epi32(w[2], w[3]), high2 = _mm512_unpackhi_epi32(w[2], w[3]);
        const __m512i words[4] = {_mm512_unpacklo_epi64(low, low2), _mm512_unpackhi_epi64(low, low2),
                                  _mm512_unpacklo_epi64(high, high2), _mm512_unpackhi_epi64(high, high2)};
        for (int64_t part = 0, from = i; part < 4 && from < row.size; part++, from += 16) {
            _mm512_store_si512(ids, _mm512_add_epi32(_mm512_set1_epi32(int(from)), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
            rank16(ranking, row.shares(row.load(from)), uniform16(words[part]), first(row.size - from), ids);
        }
    }
}

void sample_from(const std::vector<Token>& tokens, const Draw& draw, Ranking& ranking) {
    alignas(64) int32_t ids[16];
    alignas(64) float shares[16];
    const int64_t count = int64_t(tokens.size());
    for (int64_t i = 0; i < count; i += 16) {
        const int64_t here = std::min<int64_t>(16, count - i);
        for (int64_t lane = 0; lane < 16; lane++) {
            ids[lane] = lane < here ? tokens[i + lane].id : 0;
            shares[lane] = lane < here ? tokens[i + lane].share : 0;
        }
        const __m512i each = _mm512_load_si512(ids), place = _mm512_and_si512(each, _mm512_set1_epi32(3));
        __m512i w[4];
        philox16(_mm512_srli_epi32(each, 2), draw.length, draw.seed, w);
        __m512i words = w[0];
        for (int word = 1; word < 4; word++)
            words = _mm512_mask_mov_epi32(words, _mm512_cmpeq_epi32_mask(place, _mm512_set1_epi32(word)), w[word]);
        rank16(ranking, _mm512_load_ps(shares), uniform16(words), first(here), ids);
    }
}

// Tokens whose logits are not below `least`; returns the sum of the shares of all tokens.
double collect(const Row& row, float least, std::vector<Token>& found) {
    found.clear();
    __m512 sum = _mm512_setzero_ps();
    alignas(64) float logits[16], shares[16];
    for (int64_t i = 0; i < row.size; i += 16) {
        const __m512 v = row.load(i), share = row.shares(v);
        sum = _mm512_add_ps(sum, share);
        __mmask16 left = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(v, _mm512_set1_ps(kNothing), _CMP_GT_OQ), v, _mm512_set1_ps(least), _CMP_GE_OQ);
        if (!left) continue;
        _mm512_store_ps(logits, v);
        _mm512_store_ps(shares, share);
        for (; left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            found.push_back({logits[lane], shares[lane], int32_t(i + lane)});
        }
    }
    return _mm512_reduce_add_ps(sum);
}

template <class Weight>
double sum_of(const Token* begin, const Token* end, const Weight& weight) {
    double sum = 0;
    for (; begin != end; begin++) sum += weight(*begin);
    return sum;
}

// Drops all tokens below the logit at which those not below it reach `target` of the weights.
template <class Weight>
void keep_until(std::vector<Token>& tokens, double target, const Weight& weight) {
    Token *begin = tokens.data(), *end = begin + tokens.size();
    float least = kNothing;
    while (begin != end) {
        float a = begin->logit, b = begin[(end - begin) / 2].logit, c = end[-1].logit;
        const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
        Token* equal = std::partition(begin, end, [&](const Token& each) { return each.logit > pivot; });
        const double over = sum_of(begin, equal, weight);
        if (over >= target) {
            end = equal;
            continue;
        }
        Token* below = std::partition(equal, end, [&](const Token& each) { return each.logit == pivot; });
        target -= over + sum_of(equal, below, weight);
        least = pivot;
        if (target <= 0) break;
        begin = below;
    }
    tokens.erase(std::remove_if(tokens.begin(), tokens.end(), [&](const Token& each) { return each.logit < least; }), tokens.end());
}

// The tokens that top-k, top-p and min-p leave, in this order.
void filter(const Row& row, const Draw& draw, std::vector<Token>& tokens) {
    const bool some = draw.top_k > 0 && draw.top_k < row.size;
    const auto one = [](const Token&) { return 1.0; };
    const auto share = [](const Token& each) { return double(each.share); };
    double total = collect(row, row.highest - kReach / row.inverse, tokens);
    const auto too_few = [&] {
        if (some) return int64_t(tokens.size()) < draw.top_k;
        // min-p alone looks no further down than it keeps.
        return draw.top_p < 1 ? sum_of(tokens.data(), tokens.data() + tokens.size(), share) < draw.top_p * total
                              : draw.min_p < std::exp(-kReach);
    };
    if (too_few()) total = collect(row, kNothing, tokens);
    if (some) {
        keep_until(tokens, double(draw.top_k), one);
        total = sum_of(tokens.data(), tokens.data() + tokens.size(), share);
    }
    if (draw.top_p < 1) keep_until(tokens, draw.top_p * total, share);
    if (draw.min_p > 0)
        tokens.erase(std::remove_if(tokens.begin(), tokens.end(), [&](const Token& each) { return each.share < draw.min_p; }), tokens.end());
}

}  // namespace

std::vector<Ranked> draw_tokens(const Draw& draw) {
    const int64_t size = draw.size;
    Ranking ranking(draw.count);
    const float most = highest(draw.logits, size);
    if (!std::isfinite(most)) return {};
    if (draw.temperature == 0) {
        take_likeliest(draw.logits, size, ranking);
    } else {
        const Row row{draw.logits, size, most, 1 / draw.temperature};
        if ((draw.top_k > 0 && draw.top_k < size) || draw.top_p < 1 || draw.min_p > 0) {
            static thread_local std::vector<Token> tokens;
            filter(row, draw, tokens);
            sample_from(tokens, draw, ranking);
        } else {
            sample_from_all(row, draw, ranking);
        }
    }
    std::vector<Ranked> found = ranking.best();
    const float best = found.empty() ? 0 : found[0].value;
    for (Ranked& each : found) each.value = draw.temperature == 0 ? std::exp(each.value - best) : each.value / best;
    while (!found.empty() && found.back().value == 0) found.pop_back();
    return found;
}

void draw_tokens(const std::vector<Draw>& draws, std::vector<Ranked>* found, int threads) {
    spread(threads, int64_t(draws.size()), 1, [&](int64_t i) { found[i] = draw_tokens(draws[i]); });
}

}  // namespace smelt
