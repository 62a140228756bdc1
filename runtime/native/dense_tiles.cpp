// Linears with bfloat16 weights [outputs, columns] on matrix tiles, for any number of rows.
//
// Weights are the left side as they lie, inputs the right side, so that few rows are narrow tiles. A row's numbers are the same
// whatever the other rows are: a tile's columns are added as the processor does it, 32 at a time in order.
#include <algorithm>
#include <memory>
#include <vector>

#include "kernels.h"
#include "tiles.h"

namespace smelt {
namespace {

constexpr int64_t kSide = 16;  // outputs, and rows, of a tile
constexpr int64_t kStep = 32;  // columns that an instruction takes
constexpr int64_t kBlock = 32, kPair = 32;  // outputs and rows that are multiplied at a time
// Of more rows so many columns are multiplied at a time, by up to so many blocks of outputs and so many rows: a block's weights stay in the second
// cache while rows pass by, and the rows' columns while blocks do.
constexpr int64_t kPiece = 2048, kBlocks = 8, kMost = 256;

#if defined(SMELT_AVX512)
inline void transpose(__m512i (&v)[kSide]) {
    __m512i a[kSide];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 16; j += 8) {
            a[j + i] = _mm512_shuffle_i32x4(v[j + i], v[j + i + 4], 0x88);
            a[j + i + 4] = _mm512_shuffle_i32x4(v[j + i], v[j + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        v[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
    }
}
#endif

// Numbers of 4 bytes: from [16][16] at `from`, `stride` bytes from line to line.
inline void transposed(const void* from, int64_t stride, uint32_t (&to)[kSide][kSide]) {
#if defined(SMELT_AVX512)
    __m512i lines[kSide];
    for (int i = 0; i < kSide; i++) lines[i] = _mm512_loadu_si512((const uint8_t*)from + i * stride);
    transpose(lines);
    for (int i = 0; i < kSide; i++) _mm512_store_si512(to[i], lines[i]);
#else
    for (int i = 0; i < kSide; i++)
        for (int j = 0; j < kSide; j++) std::memcpy(&to[j][i], (const uint8_t*)from + i * stride + 4 * j, 4);
#endif
}

// Rows as the right side of tiles: of 16 rows at a time (a panel) for each step [16 pairs of columns][rows][2].
class Inputs {
public:
    Inputs(const bf16* x, int64_t rows, int64_t columns, int threads)
        : narrow_(rows <= kPair),
          rows_(rows),
          steps_((columns + kStep - 1) / kStep),
          numbers_(std::make_unique_for_overwrite<Line[]>(panels() * kSide * steps_)) {
        spread(threads, panels() * steps_, std::max<int64_t>(1, std::min<int64_t>(64, steps_)), [&](int64_t i) {
            const int64_t panel = i / steps_, k = i % steps_ * kStep, row = panel * kSide, length = std::min(kStep, columns - k);
            const int64_t taken = std::min(kSide, rows - row);
            if (narrow_ && taken <= kFew) return put_few(x + row * columns + k, columns, taken, length, (uint32_t*)at(panel, k));
            alignas(64) bf16 lines[kSide][kStep];
            alignas(64) uint32_t pairs[kSide][kSide];
            if (taken < kSide || length < kStep) {
                std::memset(lines, 0, sizeof lines);
                for (int64_t r = 0; r < taken; r++) std::memcpy(lines[r], x + (row + r) * columns + k, length * sizeof(bf16));
                transposed(lines, sizeof lines[0], pairs);
            } else {
                transposed(x + row * columns + k, columns * sizeof(bf16), pairs);
            }
            const int64_t width = this->width(panel);
            uint8_t* to = (uint8_t*)at(panel, k);
            for (int pair = 0; pair < kSide; pair++) std::memcpy(to + pair * 4 * width, pairs[pair], 4 * width);
        });
    }

    int64_t panels() const { return (rows_ + kSide - 1) / kSide; }

    // Rows of a panel: all have sixteen where tiles pass several pairs of panels.
    int64_t width(int64_t panel) const { return narrow_ ? std::min(kSide, rows_ - panel * kSide) : kSide; }

    const bf16* at(int64_t panel, int64_t column) const { return (const bf16*)(numbers_.get() + panel * kSide * steps_) + column * width(panel); }

private:
    static constexpr int64_t kFew = 4;  // rows that are put one after the other

    static void put_few(const bf16* x, int64_t columns, int64_t rows, int64_t length, uint32_t* to) {
        for (int64_t r = 0; r < rows; r++) {
            alignas(64) uint32_t pairs[kSide] = {};
            std::memcpy(pairs, x + r * columns, length * sizeof(bf16));
            for (int pair = 0; pair < kSide; pair++) to[pair * rows + r] = pairs[pair];
        }
    }

    struct alignas(64) Line {
        bf16 numbers[kStep];
    };

    bool narrow_;
    int64_t rows_, steps_;
    std::unique_ptr<Line[]> numbers_;
};

// A block's weights for some columns, as the left side of tiles.
struct Weights {
    const bf16* at;
    int64_t line, half, step;  // numbers from an output to the next, to the sixteenth, and from a step to the next

    Weights(const bf16* from, int64_t columns) : at(from), line(columns), half(kSide * columns), step(kStep) {}

    // A copy of fewer outputs or columns than tiles take, with zeros for those that are not there.
    Weights(const bf16* from, int64_t columns, int64_t outputs, int64_t length, std::vector<bf16>& copy)
        : line(kStep), half(kSide * kStep), step(kBlock * kStep) {
        copy.assign((length + kStep - 1) / kStep * step, 0);
        for (int64_t n = 0; n < outputs; n++)
            for (int64_t k = 0; k < length; k += kStep)
                std::copy_n(from + n * columns + k, std::min(kStep, length - k), copy.data() + k * kBlock + n * kStep);
        at = copy.data();
    }
};

// What is asked for meanwhile, at each step: columns of some outputs.
struct Asked {
    const bf16* from;
    int64_t columns, outputs;
};

template <bool kTwo, class Tiles>
[[gnu::always_inline]] inline void add_products(Tiles& tiles, const Weights& w, const bf16* x, const bf16* y, int64_t width, int64_t width_2,
                                                int64_t steps, const Asked& asked) {
    const bf16* weight = w.at;
    for (int64_t step = 0; step < steps; step++, weight += w.step, x += kStep * width, y += kStep * width_2) {
        tiles.template load<6>(x, 4 * width);
        tiles.template load<4>(weight, w.line * sizeof(bf16));
        tiles.template multiply_bf16<0, 4, 6>();
        tiles.template load<5>(weight + w.half, w.line * sizeof(bf16));
        tiles.template multiply_bf16<2, 5, 6>();
        if constexpr (kTwo) {
            tiles.template load<7>(y, 4 * width_2);
            tiles.template multiply_bf16<1, 4, 7>();
            tiles.template multiply_bf16<3, 5, 7>();
        }
        for (int64_t n = 0; n < asked.outputs; n++) _mm_prefetch((const char*)(asked.from + n * asked.columns + step * kStep), _MM_HINT_T1);
    }
}

// Sums of a block of outputs by two panels of rows.
struct alignas(64) Sums {
    float of[kBlock][kPair];
};

// Adds the bias of `count` outputs, and stores `rows` rows.
void store_rows(const Sums& sums, const bf16* bias, int64_t rows, int64_t count, int64_t outputs, bf16* out) {
    for (int panel = 0; panel < 2; panel++)
        for (int half = 0; half < 2; half++) {
            const int64_t taken = std::min(kSide, rows - panel * kSide), n = half * kSide;
            if (taken <= 0 || count <= n) continue;
            alignas(64) uint32_t by_row[kSide][kSide];
            transposed(sums.of[n] + panel * kSide, sizeof sums.of[0], by_row);
            const __mmask16 mask = first(count - n);
            const __m512 shift = bias ? load16(bias + n, mask) : _mm512_setzero_ps();
            for (int64_t r = 0; r < taken; r++)
                store16(out + (panel * kSide + r) * outputs + n, _mm512_add_ps(load16((const float*)by_row[r]), shift), mask);
        }
}

struct Job {
    const bf16 *weight, *bias, *x;
    int64_t rows, outputs, columns;
    bf16* out;
};

// The outputs from `n` to `stop` by rows from `begin` to `end`, up to kMost.
template <class Tiles>
void multiply_part(const Job& job, const Inputs& inputs, int64_t begin, int64_t end, int64_t n, int64_t stop) {
    const int64_t columns = job.columns, panel = begin / kSide, pairs = (end - begin + kPair - 1) / kPair;
    const int64_t width = inputs.width(panel), width_2 = end - begin > kSide ? inputs.width(panel + 1) : kSide;
    const int64_t piece = pairs == 1 ? columns : kPiece, blocks = (stop - n + kBlock - 1) / kBlock;
    thread_local std::vector<bf16> copy;
    thread_local std::vector<Sums> sums;
    sums.resize(pairs * blocks);
    Tiles tiles{TileShapes(2 * kStep, width, width_2)};
    for (int64_t k = 0; k < columns; k += piece) {
        const int64_t length = std::min(piece, columns - k), steps = (length + kStep - 1) / kStep;
        const bool last = k + length == columns;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t at = n + block * kBlock, taken = std::min(kBlock, stop - at);
            const bf16* from = job.weight + at * columns + k;
            const bool whole = taken == kBlock && length % kStep == 0;
            const Weights weights = whole ? Weights(from, columns) : Weights(from, columns, taken, length, copy);
            // What comes next is the next block's piece, or the next piece of the first block.
            const bf16* next = from + kBlock * columns;
            if (block + 1 == blocks) next = last ? job.weight + stop * columns : job.weight + n * columns + k + length;
            const int64_t share = pairs == 1 ? 0 : (kBlock + pairs - 1) / pairs;  // the processor itself follows lines that are read once
            for (int64_t p = 0; p < pairs; p++) {
                Sums& mine = sums[block * pairs + p];
                const bool two = begin + p * kPair + kSide < end;
                if (k) load_sums(tiles, mine.of, sizeof mine.of[0], true, two);
                else zero_sums(tiles);
                const Asked asked{next + p * share * columns, columns, std::clamp<int64_t>(kBlock - p * share, 0, share)};
                const bf16 *x = inputs.at(panel + 2 * p, k), *y = two ? inputs.at(panel + 2 * p + 1, k) : nullptr;
                if (two) add_products<true>(tiles, weights, x, y, width, width_2, steps, asked);
                else add_products<false>(tiles, weights, x, x, width, width, steps, asked);
                store_sums(tiles, mine.of, sizeof mine.of[0], true, two);
                if (!last) continue;
                const int64_t row = begin + p * kPair;
                store_rows(mine, job.bias ? job.bias + at : nullptr, end - row, taken, job.outputs, job.out + row * job.outputs + at);
            }
        }
    }
}

template <class Tiles>
void multiply(const Job& job, int threads) {
    const Inputs inputs(job.x, job.rows, job.columns, threads);
    const int64_t rounds = (job.rows + kMost - 1) / kMost, blocks = std::clamp<int64_t>(job.outputs / (kBlock * 4 * threads), 1, kBlocks);
    const int64_t part = blocks * kBlock, parts = (job.outputs + part - 1) / part;
    spread(threads, rounds * parts, 1, [&](int64_t i) {
        const int64_t begin = i / parts * kMost, n = i % parts * part;
        multiply_part<Tiles>(job, inputs, begin, std::min(job.rows, begin + kMost), n, std::min(job.outputs, n + part));
    });
}

}  // namespace

void dense_tiles(const bf16* weight, const bf16* bias, const bf16* x, int64_t rows, int64_t outputs, int64_t columns, bf16* out, int threads) {
    if (rows == 0) return;
    const Job job{weight, bias, x, rows, outputs, columns, out};
#if defined(SMELT_DENSE_TILES)
    if (dense_tiles_are_used()) return multiply<ProcessorTiles>(job, threads);
#endif
    multiply<EmulatedTiles>(job, threads);
}

}  // namespace smelt
