// A processor's matrix tiles (AMX): eight registers of 16 rows of 64 bytes, and their emulation.
//
// Instructions are written out, because the compiler's own functions for them do not tell it which memory they read.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define SMELT_DENSE_TILES
#endif

namespace smelt {

// Numbers 4 and 5 hold the left side, 16 rows of `step` bytes, 6 and 7 the right side, [step / 4][columns][4 bytes], and 0 to 3 sums, of 4 by 6, 4
// by 7, 5 by 6 and 5 by 7. Numbers 6 and 7 may have fewer than 16 columns.
struct TileShapes {
    alignas(64) uint8_t bytes[64] = {1};

    explicit TileShapes(int step, int columns_6 = 16, int columns_7 = 16) {
        for (int tile = 0; tile < 8; tile++) {
            const uint16_t width = tile == 4 || tile == 5 ? step : 4 * (tile % 2 ? columns_7 : columns_6);
            std::memcpy(bytes + 16 + 2 * tile, &width, 2);
            bytes[48 + tile] = tile >= 6 ? step / 4 : 16;
        }
    }

    int width(int tile) const { return bytes[16 + 2 * tile]; }
    int rows(int tile) const { return bytes[48 + tile]; }
};

#ifdef __AMX_INT8__

struct ProcessorTiles {
    explicit ProcessorTiles(const TileShapes& shapes) {
        asm volatile("ldtilecfg (%0)" ::"r"(shapes.bytes) : "memory");
    }
    ~ProcessorTiles() { asm volatile("tilerelease" ::: "memory"); }

    template <int kTile>
    void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
    }

    template <int kTile>
    void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
    }

    template <int kTile>
    void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
    }

    // Adds signed bytes on the left times unsigned ones on the right.
    template <int kSums, int kLeft, int kRight>
    void multiply() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
    }

#ifdef SMELT_DENSE_TILES
    // Adds bfloat16 numbers on the left times those on the right.
    template <int kSums, int kLeft, int kRight>
    void multiply_bf16() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
    }
#endif
};

#endif

struct EmulatedTiles {
    TileShapes shapes;
    alignas(64) uint8_t tiles[8][16][64];

    explicit EmulatedTiles(const TileShapes& shapes) : shapes(shapes) { std::memset(tiles, 0xee, sizeof tiles); }

    template <int kTile>
    void zero() {
        std::memset(tiles[kTile], 0, sizeof tiles[kTile]);
    }

    template <int kTile>
    void load(const void* from, int64_t stride) {
        for (int row = 0; row < shapes.rows(kTile); row++)
            std::memcpy(tiles[kTile][row], (const uint8_t*)from + row * stride, shapes.width(kTile));
    }

    template <int kTile>
    void store(void* to, int64_t stride) {
        for (int row = 0; row < shapes.rows(kTile); row++)
            std::memcpy((uint8_t*)to + row * stride, tiles[kTile][row], shapes.width(kTile));
    }

    template <int kSums, int kLeft, int kRight>
    void multiply() {
        for (int m = 0; m < 16; m++)
            for (int n = 0; n < shapes.width(kRight) / 4; n++) {
                int32_t sum = at<int32_t>(kSums, m, n);
                for (int k = 0; k < shapes.width(kLeft); k++)
                    sum += int32_t(int8_t(tiles[kLeft][m][k])) * int32_t(tiles[kRight][k / 4][4 * n + k % 4]);
                put(kSums, m, n, sum);
            }
    }

    // The processor adds up the products of even and of odd places apart, and then both to what was there; subnormal numbers are zero.
    template <int kSums, int kLeft, int kRight>
    void multiply_bf16() {
        for (int m = 0; m < 16; m++)
            for (int n = 0; n < shapes.width(kRight) / 4; n++) {
                float part[2] = {};
                for (int k = 0; k < shapes.width(kLeft) / 2; k++) {
                    const float left = normal(widen(at<bf16>(kLeft, m, k))), right = normal(widen(at<bf16>(kRight, k / 2, 2 * n + k % 2)));
                    part[k % 2] = normal(std::fmaf(left, right, part[k % 2]));
                }
                put(kSums, m, n, normal(at<float>(kSums, m, n) + normal(part[0] + part[1])));
            }
    }

private:
    template <class T>
    T at(int tile, int row, int column) const {
        T value;
        std::memcpy(&value, &tiles[tile][row][column * sizeof(T)], sizeof(T));
        return value;
    }

    template <class T>
    void put(int tile, int row, int column, T value) {
        std::memcpy(&tiles[tile][row][column * sizeof(T)], &value, sizeof(T));
    }

    static float normal(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value; }
};

template <class Tiles>
void zero_sums(Tiles& tiles) {
    tiles.template zero<0>();
    tiles.template zero<1>();
    tiles.template zero<2>();
    tiles.template zero<3>();
}

// The four sums as a square of 32 lines of 32 numbers, `stride` bytes from line to line; without what is below or beside the first where nothing is.
template <class Tiles>
void store_sums(Tiles& tiles, void* square, int64_t stride, bool below, bool beside) {
    uint8_t *to = (uint8_t*)square, *under = to + 16 * stride;
    tiles.template store<0>(to, stride);
    if (beside) tiles.template store<1>(to + 64, stride);
    if (below) tiles.template store<2>(under, stride);
    if (below && beside) tiles.template store<3>(under + 64, stride);
}

template <class Tiles>
void load_sums(Tiles& tiles, const void* square, int64_t stride, bool below, bool beside) {
    const uint8_t *from = (const uint8_t*)square, *under = from + 16 * stride;
    tiles.template load<0>(from, stride);
    if (beside) tiles.template load<1>(from + 64, stride);
    if (below) tiles.template load<2>(under, stride);
    if (below && beside) tiles.template load<3>(under + 64, stride);
}

}  // namespace smelt
