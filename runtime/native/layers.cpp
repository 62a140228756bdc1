// Layers in one go, for steps in which every sequence adds one token.
#include "kernels.h"
#include "simd.h"

#include <algorithm>
#include <vector>

namespace smelt {
namespace {

void add(bf16* to, const bf16* what, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 mask = first(count - i);
        store16(to + i, _mm512_add_ps(load16(to + i, mask), load16(what + i, mask)), mask);
    }
}

const bf16* normed_in_place(const std::optional<Norm>& norm, bf16* x, int64_t rows, int64_t width, int threads) {
    if (norm) rms_norm(*norm, x, width, x, width, rows, 1, threads);
    return x;
}

struct Room {
    std::vector<bf16> normed, projected, attended, both, gated, delta;
};

}  // namespace

void linear(const Linear& weight, const bf16* x, int64_t rows, bf16* out, int threads) {
    if (weight.codes)
        linear_codes(*weight.codes, x, rows, weight.group, rows <= weight.exact_rows ? 2 : 1, out, threads);
    else
        (dense_tiles_are_used() ? dense_tiles : linear_dense)(weight.dense, weight.bias, x, rows, weight.outputs, weight.columns, out, threads);
}

void decode(const std::vector<Layer>& layers, const std::vector<Cache>& caches, bf16* hidden, int64_t rows, int64_t width,
            const std::vector<Rotation>& rotations, const Places& places, const int64_t* order, const int64_t* tables,
            const int64_t* stops, int64_t table_width, const std::vector<Taken>& taken, int threads) {
    Room room;
    const auto normed = [&](const std::optional<Norm>& norm, const bf16* x) {
        if (!norm) return x;
        rms_norm(*norm, x, width, room.normed.data(), width, rows, 1, threads);
        return (const bf16*)room.normed.data();
    };
    room.normed.resize(rows * width);
    auto next_cache = caches.begin();  // of those that attend
    for (size_t number = 0; number < layers.size(); number++) {
        const Layer& l = layers[number];
        for (const Taken& each : taken)
            for (int64_t row = 0; each.layer == (int64_t)number && row < rows; row++)
                std::copy_n(hidden + row * width, width, each.to + row * each.stride);
        room.delta.resize(rows * width);
        bf16* delta = room.delta.data();

        if (l.query_key_value) {
            const Cache& cache = *next_cache++;
            const int64_t heads = l.heads * cache.size, shared = cache.heads * cache.size, all = heads + 2 * shared;
            room.projected.resize(rows * all);
            room.attended.resize(rows * heads);
            bf16* projected = room.projected.data();
            linear(*l.query_key_value, normed(l.before_attention, hidden), rows, projected, threads);
            // A norm of the whole width, or one of each head.
            if (l.query_norm) rms_norm(*l.query_norm, projected, all, projected, all, rows, heads / l.query_norm->size, threads);
            if (l.key_norm)
                rms_norm(*l.key_norm, projected + heads, all, projected + heads, all, rows, shared / l.key_norm->size, threads);
            const Rotation rotation = l.rope < 0 ? Rotation{nullptr, nullptr, 0} : rotations[l.rope];
            rotate_and_store(cache, projected, rows, l.heads, rotation.cosines, rotation.sines, rotation.half, places, threads);
            attend(cache,
                   Attention{projected, all, l.heads, room.attended.data(), order, tables, stops, rows, table_width, l.scale, l.cap,
                             l.window},
                   threads);
            linear(*l.out, room.attended.data(), rows, delta, threads);
            add(hidden, normed_in_place(l.after_attention, delta, rows, width, threads), rows * width);
        }
        if (l.gate_up) {
            room.both.resize(rows * l.gate_up->outputs);
            room.gated.resize(rows * l.down->columns);
            linear(*l.gate_up, normed(l.before_mlp, hidden), rows, room.both.data(), threads);
            gate(l.activation, room.both.data(), rows, l.down->columns, room.gated.data(), threads);
            linear(*l.down, room.gated.data(), rows, delta, threads);
            add(hidden, normed_in_place(l.after_mlp, delta, rows, width, threads), rows * width);
        }
    }
}

}  // namespace smelt
