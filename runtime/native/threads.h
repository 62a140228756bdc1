// Loops over OpenMP's threads, on fewer of them while another process has a core.
//
// A loop ends when all threads have come to its end. One whose core another process has comes some milliseconds later, and most
// loops here take less: a busy neighbour then costs more than a thread is worth. So an account is kept of what each loop gained
// or lost by its last thread, from how long the first thread waited for the others. Where it is overdrawn, the next loops have
// one thread fewer, until it is time to try again. What is computed does not depend on it: a piece of a loop is the same whoever
// does it.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace smelt {

class Threads {
public:
    using Nanoseconds = int64_t;

    static Nanoseconds now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    // What the calling thread has computed: without the time in which another one had its core.
    static Nanoseconds computed() {
        timespec time;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return Nanoseconds(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
    }

    // How many of `most` threads to use at a time.
    int count(int most, Nanoseconds at) {
        const int fewer = fewer_.load(std::memory_order_relaxed);
        if (fewer == 0) return most;
        if (at < until_.load(std::memory_order_relaxed)) return std::max(1, most - fewer);
        fewer_.store(fewer - 1, std::memory_order_relaxed);
        until_.store(at + pause_.load(std::memory_order_relaxed), std::memory_order_relaxed);
        return std::max(1, most - fewer + 1);
    }

    // A loop of `count` items took `time`; the first of `threads`, of `most`, did `mine` of them, some at a time, and computed for `busy`,
    // until `at`.
    void seen(int most, int threads, int64_t count, int64_t piece, int64_t mine, Nanoseconds busy, Nanoseconds time, Nanoseconds at) {
        if (mine == 0) return;
        const double each = double(busy) / double(mine);
        // Fewer threads would each have had more of the memory's speed: somewhere between none of what the last one adds and all.
        const double without = each * double(count) / (threads - 1) * (1 - 0.5 / threads);
        const double gain = without - std::max(double(busy), double(time) - each * double(piece));
        const Nanoseconds credit = std::min(kMost, credit_.load(std::memory_order_relaxed) + Nanoseconds(gain));
        credit_.store(std::max<Nanoseconds>(0, credit), std::memory_order_relaxed);
        if (credit >= 0) return;
        const Nanoseconds pause = pause_.load(std::memory_order_relaxed);
        // Soon after the last time: it will stay like this for a while.
        const Nanoseconds next = at - until_.load(std::memory_order_relaxed) < 2 * pause ? std::min(2 * pause, kLongest) : kShortest;
        pause_.store(next, std::memory_order_relaxed);
        until_.store(at + next, std::memory_order_relaxed);
        fewer_.store(most - threads + 1, std::memory_order_relaxed);
    }

private:
    static constexpr Nanoseconds kMost = 10'000'000;  // interrupted now and then, threads are still worth having
    static constexpr Nanoseconds kShortest = 10'000'000, kLongest = 320'000'000;

    std::atomic<int> fewer_{0};
    std::atomic<Nanoseconds> until_{0}, pause_{kShortest}, credit_{0};
};

inline Threads threads_now;

// Calls body(i) for 0 <= i < count, on up to `most` threads; pieces are handed out as threads get free.
template <class Body>
void spread(int most, int64_t count, int64_t piece, const Body& body) {
    const Threads::Nanoseconds begun = Threads::now();
    const int threads = most <= 1 || count <= piece ? 1 : threads_now.count(most, begun);
    if (threads == 1) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    int64_t mine = 0;  // of the first thread
    Threads::Nanoseconds busy = -Threads::computed();
#pragma omp parallel num_threads(threads)
    {
        int64_t each = 0;
#pragma omp for schedule(dynamic, piece) nowait
        for (int64_t i = 0; i < count; i++) {
            body(i);
            each++;
        }
        if (omp_get_thread_num() == 0) {
            mine = each;
            busy += Threads::computed();
        }
    }
    const Threads::Nanoseconds over = Threads::now();
    threads_now.seen(most, threads, count, piece, mine, busy, over - begun, over);
}

}  // namespace smelt
