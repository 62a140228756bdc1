// A processor's matrix tiles (AMX): eight registers of 16 rows of 64 bytes, and their emulation.
//
// Instructions are written out, because the compiler's own functions for them do not tell it which memory they read.
#pragma once

#include <cstdint>
#include <cstring>

namespace smelt {

// Numbers 0 to 3 hold sums [16 rows][16 outputs], 4 and 5 inputs [16 rows][step], 6 and 7 weights [step / 4][16 outputs][4].
struct TileShapes {
    alignas(64) uint8_t bytes[64] = {1};

    explicit TileShapes(int step) {
        for (int tile = 0; tile < 8; tile++) {
            const uint16_t width = tile == 4 || tile == 5 ? step : 64;
            std::memcpy(bytes + 16 + 2 * tile, &width, 2);
            bytes[48 + tile] = tile >= 6 ? step / 4 : 16;
        }
    }

    int width(int tile) const { return bytes[16 + 2 * tile]; }
    int rows(int tile) const { return bytes[48 + tile]; }
};

#ifdef __AMX_INT8__

struct ProcessorTiles {
    explicit ProcessorTiles(int step) {
        const TileShapes shapes(step);
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

    // Adds signed inputs times unsigned weights.
    template <int kSums, int kInputs, int kWeights>
    void multiply() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kInputs), "i"(kWeights));
    }
};

#endif

struct EmulatedTiles {
    TileShapes shapes;
    alignas(64) uint8_t tiles[8][16][64];

    explicit EmulatedTiles(int step) : shapes(step) { std::memset(tiles, 0xee, sizeof tiles); }

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

    template <int kSums, int kInputs, int kWeights>
    void multiply() {
        for (int m = 0; m < shapes.rows(kSums); m++)
            for (int n = 0; n < 16; n++) {
                int32_t sum;
                std::memcpy(&sum, &tiles[kSums][m][4 * n], 4);
                for (int k = 0; k < shapes.width(kInputs); k++)
                    sum += int32_t(int8_t(tiles[kInputs][m][k])) * int32_t(tiles[kWeights][k / 4][4 * n + k % 4]);
                std::memcpy(&tiles[kSums][m][4 * n], &sum, 4);
            }
    }
};

}  // namespace smelt
