// Linears with weights of codes on matrix tiles, for many rows, whose inputs are rounded to int8.
//
// A tile's codes are widened to bytes and multiplied with 32 rows at a time. Sums are exact within a group, and scaled outside of the matrix tiles.
#include "codes.h"
#include "tiles.h"

#include <algorithm>
#include <memory>
#include <vector>

#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace smelt {
namespace {

constexpr int64_t kPair = 32;  // rows that are multiplied at a time
constexpr int kMostPairs = 2;  // of them for which codes are widened some columns at a time

bool used = false, used_for_dense = false;

// Columns that an instruction takes; 0: the groups fit none.
int step_of(int64_t group) { return group % 64 == 0 ? 64 : group % 32 == 0 ? 32 : 0; }

// Codes in places of 4 bits as bytes, in the order of 8 bit codes.
template <Form kForm>
void widen_codes(const uint8_t* codes, const uint8_t* lower, int64_t columns, uint8_t* to) {
    for (int64_t k = 0; k < columns; k += 8, codes += 128, lower += kForm == kPlanes ? 128 : 0, to += 256)
        for (int half = 0; half < 128; half += 64) {
            const __m512i stored = _mm512_loadu_si512(codes + half), low = kForm == kPlanes ? _mm512_loadu_si512(lower + half) : stored;
            _mm512_storeu_si512(to + half, first_columns<kForm>(stored, low));
            _mm512_storeu_si512(to + 128 + half, second_columns<kForm>(stored, low));
        }
}

// A row of a tile. Loads of lines that cross the cache's take twice as long.
struct alignas(64) Line {
    uint8_t bytes[64];
};

// Rounded inputs as tiles read them: for 16 rows each, for each step of columns [row][columns].
class Inputs {
public:
    Inputs(const Rounded<int8_t>& x, int step, int threads)
        : columns_(x.columns), codes_(std::make_unique_for_overwrite<Line[]>((x.codes.size() + sizeof(Line) - 1) / sizeof(Line))) {
        const int64_t blocks = x.codes.size() / (16 * columns_);
        spread(threads, blocks, 1, [&](int64_t block) {
            uint8_t* to = (uint8_t*)codes_.get() + block * 16 * columns_;
            for (int64_t k = 0; k < columns_; k += step)
                for (int64_t row = 16 * block; row < 16 * (block + 1); row++, to += step) std::memcpy(to, x.codes.data() + row * columns_ + k, step);
        });
    }

    const uint8_t* at(int64_t row, int64_t column) const { return (const uint8_t*)codes_.get() + row * columns_ + 16 * column; }

private:
    int64_t columns_;
    std::unique_ptr<Line[]> codes_;
};

// A tile's codes as bytes, some columns at a time, each while those before them are multiplied: memory and multiplication go on together.
template <Form kForm>
class Bytes {
public:
    static constexpr int64_t kMost = 256;  // columns at a time

    Bytes(const Codes& w, int64_t tile, int64_t together) : together_(together), columns_(w.columns) {
        const int64_t begin = tile * columns_ * kTile * bits_of(kForm) / 8;
        codes_ = w.codes + begin;
        lower_ = w.lower + (kForm == kPlanes ? begin : 0);
        widen(0);
    }

    // Those of `together` columns.
    const uint8_t* at(int64_t column) {
        if constexpr (kForm == kEight) {
            ask(codes_ + column * kTile, together_ * kTile);
            return codes_ + column * kTile;
        }
        if (column + together_ < columns_) widen(column + together_);
        return room_[column / together_ % 2];
    }

private:
    void widen(int64_t column) {
        if constexpr (kForm == kEight) return;
        const int64_t from = column * kTile / 2;
        if constexpr (kForm == kFour) ask(codes_ + from, together_ * kTile / 2);  // two streams are asked for by the processor itself
        widen_codes<kForm>(codes_ + from, lower_ + from, together_, room_[column / together_ % 2]);
    }

    [[gnu::always_inline]] static void ask(const uint8_t* from, int64_t bytes) {
        for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)from + i + ahead_of(kForm), kHint);
    }

    const uint8_t *codes_, *lower_;
    int64_t together_, columns_;
    alignas(64) uint8_t room_[kForm == kEight ? 1 : 2][kMost * kTile];
};

// The same of bytes that are all there.
class AllBytes {
public:
    explicit AllBytes(const uint8_t* codes) : codes_(codes) {}
    const uint8_t* at(int64_t column) { return codes_ + column * kTile; }

private:
    const uint8_t* codes_;
};

// Up to kPairs times 32 rows by one tile, `together` columns at a time.
template <int kPairs, class Tiles, class Scale, class Source>
void rows_by_tile(Tiles& tiles, int step, int64_t together, const Codes& w, Source& codes, const Rounded<int8_t>& x, const Inputs& inputs,
                  int64_t row, int64_t tile, bf16* out) {
    const int64_t columns = w.columns, groups = columns / w.group, pieces = columns / x.group, per = w.group / x.group;
    const int64_t rows = std::min(kPairs * kPair, x.rows - row);
    alignas(64) int32_t sums[kPairs * kPair][kTile];
    alignas(64) float totals[kPairs * kPair][kTile] = {};
    for (int64_t p = 0; p < pieces; p++) {
        const int64_t first = p * x.group, last = first + x.group - together;
        if (kPairs == 1) zero_sums(tiles);
        for (int64_t begin = first; begin <= last; begin += together) {
            const uint8_t* bytes = codes.at(begin);
            for (int pair = 0; pair < kPairs; pair++) {
                const int64_t from = pair * kPair;
                const bool below = rows - from > 16;
                const uint8_t* right = bytes;
                if (kPairs > 1 && begin == first) zero_sums(tiles);
                else if (kPairs > 1) load_sums(tiles, sums[from], sizeof sums[0], below, true);
                for (int64_t k = begin; k < begin + together; k += step, right += step * kTile) {
                    tiles.template load<6>(right, 128);
                    tiles.template load<7>(right + 64, 128);
                    tiles.template load<4>(inputs.at(row + from, k), step);
                    tiles.template multiply<0, 4, 6>();
                    tiles.template multiply<1, 4, 7>();
                    if (below) {
                        tiles.template load<5>(inputs.at(row + from + 16, k), step);
                        tiles.template multiply<2, 5, 6>();
                        tiles.template multiply<3, 5, 7>();
                    }
                }
                if (kPairs > 1) store_sums(tiles, sums[from], sizeof sums[0], below, true);
            }
        }
        if (kPairs == 1) store_sums(tiles, sums, sizeof sums[0], rows > 16, true);
        const int64_t place = (tile * groups + p / per) * kTile;
        for (int half = 0; half < 2; half++) {
            const int64_t at = 16 * half;
            const __m512 scale = scales_at<Scale>(w.scales, place + at);
            const auto total = [&]<bool kZeros>() {
                __m512i zero;
                if (kZeros) zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(w.zeros + place + at)));
                for (int64_t r = 0; r < rows; r++) {
                    const int64_t mine = (row + r) * pieces + p;
                    __m512i less = _mm512_set1_epi32(x.less[mine]);
                    if (kZeros) less = _mm512_mullo_epi32(zero, less);
                    __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(sums[r] + at), less));
                    if (w.upper) sum = _mm512_add_ps(sum, half_of(x.less[mine]));
                    const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[mine]));
                    _mm512_store_ps(totals[r] + at, _mm512_fmadd_ps(sum, factor, _mm512_load_ps(totals[r] + at)));
                }
            };
            w.zeros ? total.template operator()<true>() : total.template operator()<false>();
        }
    }
    for (int64_t r = 0; r < rows; r++)
        store_tile(w, tile, out + (row + r) * w.outputs, _mm512_load_ps(totals[r]), _mm512_load_ps(totals[r] + 16));
}

template <class Tiles, class Scale, Form kForm>
void multiply(const Codes& w, const bf16* x, int64_t rows, int64_t group, bf16* out, int threads) {
    const Rounded<int8_t> rounded(x, rows, w.columns, group, 1, 1, kPair, w.zeros ? 1 : zero_of(kForm), w.input_scale, threads);
    const int step = step_of(group);
    const Inputs inputs(rounded, step, threads);
    const int64_t tiles = (w.outputs + kTile - 1) / kTile, bytes = w.columns * kTile * bits_of(kForm) / 8;
    int64_t together = group;  // columns
    for (int64_t part = 1; together > Bytes<kForm>::kMost; part++)
        if (group % (part * step) == 0) together = group / part;
    if (rows <= kMostPairs * kPair) {
        const int64_t piece = std::clamp<int64_t>(tiles / (8 * threads), 1, std::max<int64_t>(1, (128 << 10) / bytes));
        return spread(threads, tiles, piece, [&](int64_t tile) {
            Tiles set{TileShapes(step)};
            Bytes<kForm> codes(w, tile, together);
            const auto by_tile = rows <= kPair ? rows_by_tile<1, Tiles, Scale, Bytes<kForm>> : rows_by_tile<kMostPairs, Tiles, Scale, Bytes<kForm>>;
            by_tile(set, step, together, w, codes, rounded, inputs, 0, tile, out);
        });
    }
    // As many rows at a time as stay in the second cache while tiles pass by.
    const int64_t most = std::max<int64_t>(1, (1 << 20) / (w.columns * kPair)) * kPair;
    const int64_t rounds = (rows + most - 1) / most;
    spread(threads, rounds * tiles, 1, [&](int64_t i) {
        const int64_t tile = i % tiles, begin = i / tiles * most;
        thread_local std::vector<Line> wide;
        const uint8_t* codes = w.codes + tile * bytes;
        if constexpr (kForm != kEight) {
            wide.resize(w.columns * kTile / sizeof(Line));
            widen_codes<kForm>(codes, w.lower + (kForm == kPlanes ? tile * bytes : 0), w.columns, (uint8_t*)wide.data());
            codes = (const uint8_t*)wide.data();
        }
        AllBytes all(codes);
        Tiles set{TileShapes(step)};
        for (int64_t row = begin; row < std::min(rows, begin + most); row += kPair)
            rows_by_tile<1, Tiles, Scale>(set, step, together, w, all, rounded, inputs, row, tile, out);
    });
}

template <class Tiles>
void multiply(const Codes& w, const bf16* x, int64_t rows, int64_t group, bf16* out, int threads) {
    const auto by = [&]<Form kForm>() {
        (w.wide_scales ? multiply<Tiles, float, kForm> : multiply<Tiles, bf16, kForm>)(w, x, rows, group, out, threads);
    };
    switch (form_of(w)) {
        case kFour: return by.template operator()<kFour>();
        case kEight: return by.template operator()<kEight>();
        case kPlanes: return by.template operator()<kPlanes>();
    }
}

}  // namespace

bool tiles_take(int64_t group) { return step_of(group) > 0; }

bool use_tiles(bool dense) {
#ifdef __AMX_INT8__
    constexpr int kRequest = 0x1023, kTileData = 18;  // arch_prctl: permission to use the state of tiles
    used = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#endif
#ifdef SMELT_DENSE_TILES
    used_for_dense = used && dense;
#endif
    return used;
}

bool tiles_are_used() { return used; }

bool dense_tiles_are_used() { return used_for_dense; }

void linear_tiles(const Codes& w, const bf16* x, int64_t rows, int64_t group, bf16* out, int threads) {
#ifdef __AMX_INT8__
    if (used) return multiply<ProcessorTiles>(w, x, rows, group, out, threads);
#endif
    multiply<EmulatedTiles>(w, x, rows, group, out, threads);
}

}  // namespace smelt
