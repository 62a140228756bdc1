// The kernels that bindings.cpp gives to Python. Pointers are to contiguous memory; nothing is checked here.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace smelt {

using bf16 = uint16_t;

struct Float8 {  // e4m3
    uint8_t bits;
};

// A quantized weight, packed as linear_codes.cpp describes.
struct Codes {
    const uint8_t* codes;  // of 8 bits with `lower`: their upper four
    const uint8_t* lower;  // the lower four bits of codes of 8; null: they are not apart
    const void* scales;
    const uint8_t* zeros;  // null: half of the codes' range
    const bf16* bias;      // null: none
    int64_t outputs, columns, group;
    int bits;
    bool upper;         // of 4 bits: they are the upper half of 8, and stand for the middle of what these may be
    bool wide_scales;   // float32 instead of bfloat16
    float input_scale;  // of all inputs that are rounded; 0: computed from each group of them
};

// out[rows, outputs] = x[rows, columns] times the weight. `group` inputs are rounded together: to int8, or with two `parts` to 16 bits.
void linear_codes(const Codes& weight, const bf16* x, int64_t rows, int64_t group, int parts, bf16* out, int threads);

// What linear_codes gives with one part, to the bit, on matrix tiles; emulated, for tests, where this processor has none or they are not used.
void linear_tiles(const Codes& weight, const bf16* x, int64_t rows, int64_t group, bf16* out, int threads);

// Whether tiles can compute it with so many inputs rounded together.
bool tiles_take(int64_t group);

// Ask the system for matrix tiles, and let linear_codes use them from now on, and with `dense` products by bfloat16 weights, too. False if there
// are none.
bool use_tiles(bool dense);

bool tiles_are_used();

// out[rows, outputs] = x[rows, columns] times a weight [outputs, columns] of bfloat16.
void linear_dense(const bf16* weight, const bf16* bias, const bf16* x, int64_t rows, int64_t outputs, int64_t columns, bf16* out,
                  int threads);

// The same in another order, on matrix tiles; emulated, for tests, where this processor has none or they are not used.
void dense_tiles(const bf16* weight, const bf16* bias, const bf16* x, int64_t rows, int64_t outputs, int64_t columns, bf16* out, int threads);

// Whether the processor's tiles compute them, and so `linear` as well, for any number of rows.
bool dense_tiles_are_used();

struct Norm {
    const float* weight;
    int64_t size;
    float eps;
    bool rounds_first;  // to bfloat16, before it multiplies by the weight
};

// Root mean square norms of `heads` parts of each row.
void rms_norm(const Norm& norm, const bf16* x, int64_t stride, bf16* out, int64_t out_stride, int64_t rows, int64_t heads,
              int threads);

enum { kSilu, kGeluTanh };

// out[rows, size] = activation(x[rows, :size]) * x[rows, size:]
void gate(int activation, const bf16* x, int64_t rows, int64_t size, bf16* out, int threads);

void add(const bf16* a, const bf16* b, int64_t count, bf16* out, int threads);

void to_float32(const bf16* values, int64_t count, float* out, int threads);

// Of each row: the place of the largest number (the first of several), that number (NaN if any is), and log of the sum of e^x.
void logit_statistics(const float* logits, int64_t rows, int64_t size, int64_t* best, float* highest, float* total, int threads);

// A row of logits to choose a token from.
struct Draw {
    const float* logits;
    int64_t size;  // how many there are
    float temperature;  // 0: the largest
    int64_t top_k;      // 0: all
    float top_p, min_p;
    uint64_t seed;  // of the noise, with `length`, how many tokens the sequence has
    uint32_t length;
    int64_t count;  // of tokens to rank
};

struct Ranked {
    float value;  // against the first one's, which is 1
    int32_t id;
};

// The tokens that were best, the chosen one first; none if a logit is NaN, or none is finite. 
void draw_tokens(const std::vector<Draw>& draws, std::vector<Ranked>* found, int threads);

enum { kBfloat16, kInt8, kFloat8 };

// How a checkpoint wants keys and values rounded: its own arithmetic, in bfloat16.
struct Rule {
    const float *keys, *values;  // scales of each head; null: computed from each head of a token
    float half, least, most;     // of the codes: half their range, and its ends; half is 0 where there is no rule
};

// One layer's keys and values, as stored.h describes.
struct Cache {
    void *keys, *values;
    float *key_scales, *value_scales;  // [block][head][position in block]; null in bfloat16
    int64_t heads, size, block;
    int kind;
    Rule rule;
};

// Where the keys and values of a step's rows go: each row's own slot, and further ones of some rows.
struct Places {
    const int64_t *slots, *also_rows, *also_slots;
    int64_t also;
};

// Rotates queries and keys in `heads` [tokens, query heads + key heads + value heads, size] and stores keys and values.
void rotate_and_store(const Cache& cache, bf16* heads, int64_t tokens, int64_t query_heads, const bf16* cosines, const bf16* sines,
                      int64_t half, const Places& places, int threads);

struct Attention {
    const bf16* queries;  // of a row: [heads, size]
    int64_t stride, heads;
    bf16* out;  // [rows, heads, size]
    const int64_t *rows, *tables, *stops;
    int64_t tokens, table_width;
    float scale, cap;  // cap 0: none
    int64_t window;    // 0: none
};

// A run of tokens at consecutive positions of one sequence, the first at `start`; each sees itself and what is before it.
struct RunAttention {
    const bf16* queries;  // of the run's first token: [heads, size]
    int64_t stride, heads;
    bf16* out;  // [tokens, heads, size]
    const int64_t* table;
    int64_t tokens, start;
    float scale, cap;
    int64_t window;
    bool tiles;  // on matrix tiles, emulated where there are none, if heads are of a multiple of 32 numbers
};

void attend_run(const Cache& cache, const RunAttention& attention, int threads);

// Each token attends to the first `stops` positions of its own table of blocks.
void attend(const Cache& cache, const Attention& attention, int threads);

// A linear of either kind, and how it is computed for a number of rows.
struct Linear {
    std::optional<Codes> codes;
    int64_t group, exact_rows;  // of codes: up to exact_rows inputs have two parts
    const bf16 *dense, *bias;   // without codes
    int64_t outputs, columns;
};

void linear(const Linear& weight, const bf16* x, int64_t rows, bf16* out, int threads);

// A layer whose parts are all known here: attention, then a gated feed-forward part, each normed before, after or both;
// either may be missing.
struct Layer {
    std::optional<Norm> before_attention, query_norm, key_norm, after_attention, before_mlp, after_mlp;
    std::optional<Linear> query_key_value, out, gate_up, down;
    int64_t heads, window;
    float scale, cap;
    int activation, rope;  // which of the step's rotations; -1: none
};

struct Rotation {
    const bf16 *cosines, *sines;
    int64_t half;
};

// Where the states before a layer are copied to, rows that are stride elements apart.
struct Taken {
    int64_t layer;
    bf16* to;
    int64_t stride;
};

// All layers for single tokens, hidden [rows, width] in place. One call: between calls from Python the cores would wait.
void decode(const std::vector<Layer>& layers, const std::vector<Cache>& caches, bf16* hidden, int64_t rows, int64_t width,
            const std::vector<Rotation>& rotations, const Places& places, const int64_t* order, const int64_t* tables,
            const int64_t* stops, int64_t table_width, const std::vector<Taken>& taken, int threads);

// Memory that processes share: a mark of each, then `room` bytes twice for each.
constexpr int64_t kSharedMark = 64;
struct Shared {
    uint8_t* memory;
    int rank, count;
    int64_t room;
};

// Leaves this process' part of a sum there, up to room bytes; turns are counted from 1.
void share_part(const Shared& shared, uint64_t turn, const void* values, int64_t bytes);

// All parts' sum, of float32 (wide) or bfloat16; false if some are not there within so many nanoseconds.
bool sum_parts(const Shared& shared, uint64_t turn, void* out, int64_t count, bool wide, int64_t patience);

}  // namespace smelt
