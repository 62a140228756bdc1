// Products of codes and rows of inputs for processors with AVX2 that have no instruction which multiplies bytes and adds four products. Up to six
// rows by 16 outputs at a time, whose sums take twelve of sixteen registers. In assembly, since GCC (12 was looked at) keeps some of these sums in
// memory, or reads inputs again for each of them.
//
// Codes of 8 bits become words, since products of two bytes do not fit in 16 bits; so inputs may have 16 bits, too, in as many instructions. Products
// of codes of 4 bits by bytes are added up in 16 bits while they fit.
#pragma once

#include <cstdint>

#include "simd.h"

#if !defined(SMELT_AVX512) && !defined(__AVXVNNI__)
#define SMELT_PANELS

namespace smelt {

constexpr int kPanelRows = 6;

// clang-format off
#define SMELT_ROW(multiply, add, offset, a, b)                \
    "vpbroadcastd " offset "(%[x]), %%ymm14\n\t"              \
    multiply " %%ymm14, %%ymm12, %%ymm15\n\t"                 \
    add " %%ymm15, %%ymm" a ", %%ymm" a "\n\t"                \
    multiply " %%ymm14, %%ymm13, %%ymm14\n\t"                 \
    add " %%ymm14, %%ymm" b ", %%ymm" b "\n\t"
#define SMELT_ROWS_1(...) SMELT_ROW(__VA_ARGS__, "0", "0", "1")
#define SMELT_ROWS_2(...) SMELT_ROWS_1(__VA_ARGS__) SMELT_ROW(__VA_ARGS__, "4", "2", "3")
#define SMELT_ROWS_3(...) SMELT_ROWS_2(__VA_ARGS__) SMELT_ROW(__VA_ARGS__, "8", "4", "5")
#define SMELT_ROWS_4(...) SMELT_ROWS_3(__VA_ARGS__) SMELT_ROW(__VA_ARGS__, "12", "6", "7")
#define SMELT_ROWS_5(...) SMELT_ROWS_4(__VA_ARGS__) SMELT_ROW(__VA_ARGS__, "16", "8", "9")
#define SMELT_ROWS_6(...) SMELT_ROWS_5(__VA_ARGS__) SMELT_ROW(__VA_ARGS__, "20", "10", "11")
#define SMELT_SUMS_1(each) each("0", "0") each("32", "1")
#define SMELT_SUMS_2(each) SMELT_SUMS_1(each) each("64", "2") each("96", "3")
#define SMELT_SUMS_3(each) SMELT_SUMS_2(each) each("128", "4") each("160", "5")
#define SMELT_SUMS_4(each) SMELT_SUMS_3(each) each("192", "6") each("224", "7")
#define SMELT_SUMS_5(each) SMELT_SUMS_4(each) each("256", "8") each("288", "9")
#define SMELT_SUMS_6(each) SMELT_SUMS_5(each) each("320", "10") each("352", "11")
#define SMELT_READ(offset, sum) "vmovdqa " offset "(%[sums]), %%ymm" sum "\n\t"
#define SMELT_WRITE(offset, sum) "vmovdqa %%ymm" sum ", " offset "(%[sums])\n\t"
#define SMELT_CLEAR(offset, sum) "vpxor %%xmm" sum ", %%xmm" sum ", %%xmm" sum "\n\t"
#define SMELT_WIDEN(offset, sum)                              \
    "vpmaddwd %[ones], %%ymm" sum ", %%ymm" sum "\n\t"        \
    "vpaddd " offset "(%[sums]), %%ymm" sum ", %%ymm" sum "\n\t" SMELT_WRITE(offset, sum)
#define SMELT_STORED                                          \
    "vmovdqu (%[codes]), %%ymm12\n\t"                         \
    "vmovdqu 32(%[codes]), %%ymm13\n\t"
#define SMELT_MASKED                                          \
    "vpand %[mask], %%ymm12, %%ymm12\n\t"                     \
    "vpand %[mask], %%ymm13, %%ymm13\n\t"
#define SMELT_SHIFTED(bits)                                   \
    "vpsrlw $" bits ", %%ymm12, %%ymm12\n\t"                  \
    "vpsrlw $" bits ", %%ymm13, %%ymm13\n\t"
#define SMELT_STEP(rows, unpacked, ...)                       \
    SMELT_STORED unpacked SMELT_ROWS_##rows(__VA_ARGS__)      \
    "add $4*" #rows ", %[x]\n\t"
#define SMELT_EIGHT_STEPS(rows) SMELT_STEP(rows, SMELT_MASKED, "vpmaddwd", "vpaddd") SMELT_STEP(rows, SMELT_SHIFTED("8"), "vpmaddwd", "vpaddd")
#define SMELT_FOUR_STEPS(rows) \
    SMELT_STEP(rows, SMELT_MASKED, "vpmaddubsw", "vpaddw") SMELT_STEP(rows, SMELT_SHIFTED("4") SMELT_MASKED, "vpmaddubsw", "vpaddw")
#define SMELT_PRODUCTS(rows, before, after, steps_of)                                                             \
    if constexpr (kRows == rows)                                                                                  \
        asm volatile(SMELT_SUMS_##rows(before)                                                                    \
                     "1:\n\t"                                                                                     \
                     "prefetcht1 (%[asked])\n\t" steps_of(rows)                                                   \
                     "add $64, %[asked]\n\t"                                                                      \
                     "sub $-128, %[codes]\n\t"                                                                    \
                     "dec %[steps]\n\t"                                                                           \
                     "jnz 1b\n\t" SMELT_SUMS_##rows(after)                                                        \
                     : [x] "+r"(x), [codes] "+r"(codes), [steps] "+r"(steps), [asked] "+r"(asked)                 \
                     : [sums] "r"(sums), [mask] "m"(kMask), [ones] "m"(kOnes)                                     \
                     : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",    \
                       "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")
#define SMELT_ANY_PRODUCTS(...)          \
    SMELT_PRODUCTS(1, __VA_ARGS__);      \
    SMELT_PRODUCTS(2, __VA_ARGS__);      \
    SMELT_PRODUCTS(3, __VA_ARGS__);      \
    SMELT_PRODUCTS(4, __VA_ARGS__);      \
    SMELT_PRODUCTS(5, __VA_ARGS__);      \
    SMELT_PRODUCTS(6, __VA_ARGS__)

struct alignas(32) SixteenWords {
    uint16_t all[16];
    constexpr explicit SixteenWords(uint16_t value) : all{} {
        for (uint16_t& each : all) each = value;
    }
};
constexpr SixteenWords kOnes(1);

// Adds a panel's products by codes of 16 outputs to as many sums of each row.
//     codes: steps of 4 columns of 8 bits that are 128 bytes apart.
//     x: of each step [columns 0 and 2, then 1 and 3][row][2].
//     asked: for each step a cache line to be asked for in advance.
template <int kRows>
inline void add_products(const uint8_t* codes, const int16_t* x, int64_t columns, __m512i* sums, const uint8_t* asked) {
    static constexpr SixteenWords kMask(0x00ff);
    int64_t steps = columns / 4;
    SMELT_ANY_PRODUCTS(SMELT_READ, SMELT_WRITE, SMELT_EIGHT_STEPS);
}

// The same of 8 columns of 4 bits a step, and x [columns 0 to 3, then 4 to 7][row][4]. As many products as fit are added up in 16 bits.
template <int kRows>
inline void add_products(const uint8_t* codes, const int8_t* x, int64_t columns, __m512i* sums, const uint8_t* asked) {
    static constexpr SixteenWords kMask(0x0f0f);
    constexpr int64_t most = 4 * kNarrowSums;
    for (int64_t at = 0; at < columns; at += most) {
        int64_t steps = (columns - at < most ? columns - at : most) / 8;
        SMELT_ANY_PRODUCTS(SMELT_CLEAR, SMELT_WIDEN, SMELT_FOUR_STEPS);
    }
}
// clang-format on

#undef SMELT_ROW
#undef SMELT_ROWS_1
#undef SMELT_ROWS_2
#undef SMELT_ROWS_3
#undef SMELT_ROWS_4
#undef SMELT_ROWS_5
#undef SMELT_ROWS_6
#undef SMELT_SUMS_1
#undef SMELT_SUMS_2
#undef SMELT_SUMS_3
#undef SMELT_SUMS_4
#undef SMELT_SUMS_5
#undef SMELT_SUMS_6
#undef SMELT_READ
#undef SMELT_WRITE
#undef SMELT_CLEAR
#undef SMELT_WIDEN
#undef SMELT_STORED
#undef SMELT_MASKED
#undef SMELT_SHIFTED
#undef SMELT_STEP
#undef SMELT_EIGHT_STEPS
#undef SMELT_FOUR_STEPS
#undef SMELT_PRODUCTS
#undef SMELT_ANY_PRODUCTS

}  // namespace smelt
#endif
