// Linears with weights of codes on matrix tiles, for many rows, whose inputs are rounded to int8.
//
// A tile's codes are widened to bytes once and then multiplied with 32 rows at a time. Sums are exact within a group, and
// scaled outside of the matrix tiles.
#include "codes.h"
#include "tiles.h"

#include <algorithm>
#include <vector>

#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace smelt {
namespace {

constexpr int64_t kRows = 32;

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

template <class Tiles, class Scale>
void rows_by_tile(Tiles& tiles, int step, const Codes& w, const uint8_t* codes, const Rounded<int8_t>& x, int64_t row, int64_t tile, bf16* out) {
    const int64_t columns = w.columns, groups = columns / w.group, pieces = columns / x.group, per = w.group / x.group;
    const int64_t rows = std::min(kRows, x.rows - row);
    const int8_t *upper = x.codes.data() + row * columns, *lower = upper + 16 * columns;
    alignas(64) int32_t sums[kRows][kTile];
    alignas(64) float totals[kRows][kTile] = {};
    for (int64_t p = 0; p < pieces; p++) {
        tiles.template zero<0>();
        tiles.template zero<1>();
        tiles.template zero<2>();
        tiles.template zero<3>();
        for (int64_t k = p * x.group; k < (p + 1) * x.group; k += step) {
            tiles.template load<6>(codes + k * kTile, 128);
            tiles.template load<7>(codes + k * kTile + 64, 128);
            tiles.template load<4>(upper + k, columns);
            tiles.template multiply<0, 4, 6>();
            tiles.template multiply<1, 4, 7>();
            if (rows > 16) {
                tiles.template load<5>(lower + k, columns);
                tiles.template multiply<2, 5, 6>();
                tiles.template multiply<3, 5, 7>();
            }
        }
        tiles.template store<0>(sums[0], sizeof sums[0]);
        tiles.template store<1>(sums[0] + 16, sizeof sums[0]);
        if (rows > 16) {
            tiles.template store<2>(sums[16], sizeof sums[0]);
            tiles.template store<3>(sums[16] + 16, sizeof sums[0]);
        }
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

template <class Tiles, class Scale>
void multiply(const Codes& w, const bf16* x, int64_t rows, int64_t group, bf16* out, int threads) {
    const Form form = form_of(w);
    const Rounded<int8_t> rounded(x, rows, w.columns, group, 1, 1, kRows, w.zeros ? 1 : zero_of(form), w.input_scale, threads);
    const int64_t tiles = (w.outputs + kTile - 1) / kTile, bytes = w.columns * kTile * bits_of(form) / 8;
    // As many rows at a time as stay in the second cache while tiles pass by.
    const int64_t together = std::max<int64_t>(1, (1 << 20) / (w.columns * kRows)) * kRows;
    const int64_t rounds = (rows + together - 1) / together;
    const int step = step_of(group);
    spread(threads, rounds * tiles, 1, [&](int64_t i) {
        const int64_t tile = i % tiles, begin = i / tiles * together;
        const uint8_t* codes = w.codes + tile * bytes;
        if (form != kEight) {
            thread_local std::vector<uint8_t> wide;
            wide.resize(w.columns * kTile);
            if (form == kFour) widen_codes<kFour>(codes, nullptr, w.columns, wide.data());
            else widen_codes<kPlanes>(codes, w.lower + tile * bytes, w.columns, wide.data());
            codes = wide.data();
        }
        Tiles set{TileShapes(step)};
        for (int64_t row = begin; row < std::min(rows, begin + together); row += kRows)
            rows_by_tile<Tiles, Scale>(set, step, w, codes, rounded, row, tile, out);
    });
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
    if (used) return (w.wide_scales ? multiply<ProcessorTiles, float> : multiply<ProcessorTiles, bf16>)(w, x, rows, group, out, threads);
#endif
    (w.wide_scales ? multiply<EmulatedTiles, float> : multiply<EmulatedTiles, bf16>)(w, x, rows, group, out, threads);
}

}  // namespace smelt
