// Products of bfloat16 rows and weights for processors with AVX2 and no AVX-512: four rows by three outputs at a time, whose sums take twelve of
// sixteen registers. In assembly, since GCC (12 was looked at) keeps some of these sums in memory, or reads rows again for each output. Each sum is
// what linear_dense.cpp's other kernels give: lanes are the same, and so is the order of what is added to them.
#pragma once

#include "simd.h"

namespace smelt {

constexpr int64_t kTileRows = 4;
constexpr int64_t kTileOutputs = 3;

// Sums of four rows by three outputs.
struct alignas(64) TileSums {
    __m512 of[kTileRows][kTileOutputs];
};

// Writes 32 columns in the order in which they are multiplied: of both halves the even ones, then the odd ones.
inline void put_widened(float* to, __m512i values) {
    const auto even = [](__m256i half) { return _mm256_castsi256_ps(_mm256_slli_epi32(half, 16)); };
    const auto odd = [](__m256i half) { return _mm256_castsi256_ps(_mm256_and_si256(half, _mm256_set1_epi32(int32_t(0xffff0000)))); };
    _mm256_store_ps(to, even(values.low));
    _mm256_store_ps(to + 8, odd(values.low));
    _mm256_store_ps(to + 16, even(values.high));
    _mm256_store_ps(to + 24, odd(values.high));
}

// clang-format off
#define SMELT_ROW(offset, a, b, c)                  \
    "vmovaps " offset "(%[x]), %%ymm15\n\t"         \
    "vfmadd231ps %%ymm15, %%ymm12, %%ymm" a "\n\t"  \
    "vfmadd231ps %%ymm15, %%ymm13, %%ymm" b "\n\t"  \
    "vfmadd231ps %%ymm15, %%ymm14, %%ymm" c "\n\t"
#define SMELT_WEIGHTS                               \
    "vmovdqu (%[w]), %%ymm12\n\t"                   \
    "vmovdqu (%[w],%[stride]), %%ymm13\n\t"         \
    "vmovdqu (%[w],%[stride],2), %%ymm14\n\t"
#define SMELT_ALL_SUMS(move)                        \
    move("0", "0") move("64", "1") move("128", "2") move("192", "3") move("256", "4") move("320", "5") \
    move("384", "6") move("448", "7") move("512", "8") move("576", "9") move("640", "10") move("704", "11")
#define SMELT_READ(offset, sum) "vmovaps " offset "(%[sums]), %%ymm" sum "\n\t"
#define SMELT_WRITE(offset, sum) "vmovaps %%ymm" sum ", " offset "(%[sums])\n\t"

// Adds half of each vector's products to the same half of the sums.
//     weight: of the first output; from one to the next there are `stride` numbers.
//     asked: as many columns of some output, to be asked for in advance.
//     x: for each 32 columns four rows, as put_widened writes them.
//     steps: of 32 columns, at least one.
template <int kHalf, bool kAsks>
inline void add_half(const bf16* weight, int64_t stride, const bf16* asked, const float* x, int64_t steps, TileSums& sums) {
    alignas(32) static constexpr uint32_t kOdd[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
    const char* w = (const char*)weight + 32 * kHalf;
    const char* in = (const char*)x + 64 * kHalf;
    char* to = (char*)&sums + 32 * kHalf;
#define SMELT_STEPS(ask)                                                                                             \
    asm volatile(SMELT_ALL_SUMS(SMELT_READ)                                                                          \
                 "1:\n\t" ask                                                                                        \
                 SMELT_WEIGHTS                                                                                       \
                 "vpslld $16, %%ymm12, %%ymm12\n\t"                                                                  \
                 "vpslld $16, %%ymm13, %%ymm13\n\t"                                                                  \
                 "vpslld $16, %%ymm14, %%ymm14\n\t"                                                                  \
                 SMELT_ROW("0", "0", "1", "2") SMELT_ROW("128", "3", "4", "5")                                       \
                 SMELT_ROW("256", "6", "7", "8") SMELT_ROW("384", "9", "10", "11")                                   \
                 SMELT_WEIGHTS                                                                                       \
                 "vpand %[odd], %%ymm12, %%ymm12\n\t"                                                                \
                 "vpand %[odd], %%ymm13, %%ymm13\n\t"                                                                \
                 "vpand %[odd], %%ymm14, %%ymm14\n\t"                                                                \
                 SMELT_ROW("32", "0", "1", "2") SMELT_ROW("160", "3", "4", "5")                                      \
                 SMELT_ROW("288", "6", "7", "8") SMELT_ROW("416", "9", "10", "11")                                   \
                 "add $64, %[w]\n\t"                                                                                 \
                 "add $512, %[x]\n\t"                                                                                \
                 "dec %[steps]\n\t"                                                                                  \
                 "jnz 1b\n\t" SMELT_ALL_SUMS(SMELT_WRITE)                                                            \
                 : [w] "+r"(w), [x] "+r"(in), [steps] "+r"(steps), [asked] "+r"(asked)                               \
                 : [stride] "r"(stride * int64_t(sizeof(bf16))), [sums] "r"(to), [odd] "m"(kOdd)                                             \
                 : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",   \
                   "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")
    if constexpr (kAsks)
        SMELT_STEPS("prefetcht1 (%[asked])\n\t"
                    "add $64, %[asked]\n\t");
    else
        SMELT_STEPS("");
#undef SMELT_STEPS
}
#undef SMELT_ROW
#undef SMELT_WEIGHTS
#undef SMELT_ALL_SUMS
#undef SMELT_READ
#undef SMELT_WRITE
// clang-format on

}  // namespace smelt
