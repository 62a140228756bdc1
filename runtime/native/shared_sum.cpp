// Sums over processes of one machine, through memory that they share. Each has a mark and room for two of its parts there, which it
// fills in turn: before it fills one again all have marked the next one, and so have read this one.
#include "kernels.h"
#include "simd.h"

#include <atomic>
#include <ctime>

namespace smelt {
namespace {

struct alignas(64) Mark {
    std::atomic<uint64_t> turn;  // the last one whose part is there
};
static_assert(sizeof(Mark) == kSharedMark && std::atomic<uint64_t>::is_always_lock_free);

constexpr Threads::Nanoseconds kSpinning = 100'000;  // then it sleeps in between: a sleep takes 50 microseconds at least

Mark& mark(const Shared& shared, int rank) { return reinterpret_cast<Mark*>(shared.memory)[rank]; }

uint8_t* part(const Shared& shared, int rank, uint64_t turn) {
    return shared.memory + shared.count * kSharedMark + (2 * rank + int64_t(turn % 2)) * shared.room;
}

bool all_there(const Shared& shared, uint64_t turn, Threads::Nanoseconds patience) {
    const Threads::Nanoseconds begun = Threads::now();
    for (int rank = 0; rank < shared.count; rank++)
        while (mark(shared, rank).turn.load(std::memory_order_acquire) < turn) {
            const Threads::Nanoseconds waited = Threads::now() - begun;
            if (waited > patience) return false;
            if (waited < kSpinning) {
                _mm_pause();
            } else {
                const timespec pause{0, 1};
                nanosleep(&pause, nullptr);
            }
        }
    return true;
}

float number(const bf16* values, int64_t i) { return widen(values[i]); }
float number(const float* values, int64_t i) { return values[i]; }
void put(bf16* to, float value) { *to = narrow(value); }
void put(float* to, float value) { *to = value; }

// In the order of ranks, so that all have the same bits.
template <class Number>
void add_parts(const Shared& shared, uint64_t turn, int64_t count, Number* out) {
    constexpr int64_t kAtATime = 1024;
    float sums[kAtATime];
    for (int64_t begin = 0; begin < count; begin += kAtATime) {
        const int64_t some = std::min(kAtATime, count - begin);
        std::memset(sums, 0, sizeof sums);
        for (int rank = 0; rank < shared.count; rank++) {
            const Number* values = reinterpret_cast<const Number*>(part(shared, rank, turn)) + begin;
            for (int64_t i = 0; i < some; i++) sums[i] += number(values, i);
        }
        for (int64_t i = 0; i < some; i++) put(out + begin + i, sums[i]);
    }
}

}  // namespace

void share_part(const Shared& shared, uint64_t turn, const void* values, int64_t bytes) {
    std::memcpy(part(shared, shared.rank, turn), values, bytes);
    mark(shared, shared.rank).turn.store(turn, std::memory_order_release);
}

bool sum_parts(const Shared& shared, uint64_t turn, void* out, int64_t count, bool wide, int64_t patience) {
    if (!all_there(shared, turn, patience)) return false;
    wide ? add_parts(shared, turn, count, static_cast<float*>(out)) : add_parts(shared, turn, count, static_cast<bf16*>(out));
    return true;
}

}  // namespace smelt
