// Attention of a run of tokens on matrix tiles, and what it shares with attention on vector instructions (attention_runs.cpp).
#pragma once

#include <vector>

#include "tiles.h"

namespace smelt {

// One head's keys and values, positions `begin` to `stop`, filled up with zeros.
struct Packed {
    int64_t begin, vectors, pairs, numbers;  // vectors of 16 positions; pairs of numbers; vectors of 16 numbers
    bf16 *keys, *values;

    const bf16* key(int64_t vector, int64_t pair) const { return keys + (vector * pairs + pair) * 32; }
    const bf16* value(int64_t vector, int64_t two, int64_t number) const {
        return values + ((vector * 8 + two) * numbers + number) * 32;
    }
};

struct Scratch {
    std::vector<float> scores, sums;
    std::vector<bf16> shares, queries;
};

// Queries that share a head; query r sees the positions from first_seen[r] to stops[r].
struct Rows {
    static constexpr int kMost = 32;
    int count = 0;
    const bf16* queries[kMost];
    bf16* outs[kMost];
    int64_t first_seen[kMost], stops[kMost];
};

// Vectors of positions that some of the rows see, and where a row's scores and shares stand.
struct Reach {
    int64_t low, high, stride;
};

// Scores and sums of values on matrix tiles, of heads of a multiple of 32 numbers: rows are the left side, keys and values the right side as they
// are packed.
template <class Tiles>
struct ByTiles {
    static constexpr int kRows = 32;
    static constexpr int64_t kPositions = 32;
    static constexpr bool kScaled = false;

    static void scores(const Packed& head, const Reach& reach, const bf16* query, int64_t size, float, float* scores) {
        Tiles tiles{TileShapes(64)};
        for (int64_t v = reach.low; v < reach.high; v += 2) {
            zero_sums(tiles);
            for (int64_t n = 0; n < size; n += 32) add_tiles(tiles, query + n, size, head.key(v, n / 2), head.key(v + 1, n / 2), 64);
            float* to = scores + 16 * (v - reach.low);
            store_sums(tiles, to, reach.stride * sizeof(float), true, true);
        }
    }

    static void sums(const Packed& head, const Reach& reach, const Rows& rows, int64_t size, const float* inverse, Scratch& scratch) {
        scratch.sums.resize(kRows * size);
        const bf16* shares = scratch.shares.data();
        float* sums = scratch.sums.data();
        {
            Tiles tiles{TileShapes(64)};
            for (int64_t n = 0; n < head.numbers; n += 2) {
                zero_sums(tiles);
                for (int64_t v = reach.low; v < reach.high; v += 2)
                    add_tiles(tiles, shares + 16 * (v - reach.low), reach.stride, head.value(v, 0, n), head.value(v, 0, n + 1), 64 * head.numbers);
                store_sums(tiles, sums + 16 * n, size * sizeof(float), true, true);
            }
        }
        for (int r = 0; r < rows.count; r++)
            for (int64_t n = 0; n < size; n += 16)
                store16(rows.outs[r] + n, _mm512_mul_ps(load16(sums + r * size + n), _mm512_set1_ps(inverse[r])));
    }

private:
    // 32 rows of the left side by two tiles of the right one.
    static void add_tiles(Tiles& tiles, const bf16* left, int64_t stride, const bf16* right, const bf16* right_2, int64_t bytes) {
        tiles.template load<6>(right, bytes);
        tiles.template load<4>(left, stride * sizeof(bf16));
        tiles.template multiply_bf16<0, 4, 6>();
        tiles.template load<7>(right_2, bytes);
        tiles.template multiply_bf16<1, 4, 7>();
        tiles.template load<5>(left + 16 * stride, stride * sizeof(bf16));
        tiles.template multiply_bf16<2, 5, 6>();
        tiles.template multiply_bf16<3, 5, 7>();
    }
};

}  // namespace smelt
