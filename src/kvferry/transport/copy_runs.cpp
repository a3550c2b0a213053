// Copies runs that lie anywhere in memory to a chunk, where they lie side by side, or back.
//
// Compiled where it runs (compiled_copies.py). Memory that was not touched for a while takes 100 ns and more to come, in
// which hundreds of bytes could be copied: so what comes next is asked for while the bytes before it are copied. And
// what is written is not read again by this processor: where it can be told so, it is.
//
// Several threads copy one chunk together, part by part: whoever is awake takes the next one, the caller first.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

constexpr int64_t AHEAD_BYTES = 4096;  // how much is asked for beforehand
constexpr int64_t LINE_BYTES = 64;

struct Side {
    const int64_t* rows;     // the address of each run of the pattern, of a block that is 0 bytes away
    const int64_t* lengths;  // of each of these
    const int64_t* steps;    // how far away each block is
    uint64_t num_rows, num_steps;
    char* chunk;
    uint64_t num_parts;
    const int64_t* firsts;   // the first run of each part, counted row by row, each with all its steps; and the end
    const int64_t* offsets;  // where each part begins in the chunk
};

struct Cursor {
    const Side& side;
    uint64_t run, stop, row, step;

    Cursor(const Side& side, uint64_t part)
        : side(side),
          run(side.firsts[part]),
          stop(side.firsts[part + 1]),
          row(run / side.num_steps),
          step(run % side.num_steps) {}
    bool is_over() const { return run == stop; }
    char* at() const { return reinterpret_cast<char*>(side.rows[row] + side.steps[step]); }
    int64_t length() const { return side.lengths[row]; }
    void next() {
        ++run;
        if (++step == side.num_steps) {
            step = 0;
            ++row;
        }
    }
};

// Copies bytes that nobody reads soon from here.
inline void put(char* to, const char* from, int64_t num_bytes) {
#ifdef __aarch64__
    for (; num_bytes >= LINE_BYTES; to += LINE_BYTES, from += LINE_BYTES, num_bytes -= LINE_BYTES)
        asm volatile(
            "ldp q0, q1, [%1]\n ldp q2, q3, [%1, 32]\n stnp q0, q1, [%0]\n stnp q2, q3, [%0, 32]"
            ::"r"(to), "r"(from) : "v0", "v1", "v2", "v3", "memory");
#endif
    memcpy(to, from, num_bytes);
}

template <bool is_gather>
void copy(const Side& side, uint64_t part) {
    Cursor now{side, part}, ahead{side, part};
    char* chunk = side.chunk + side.offsets[part];
    int64_t bytes_ahead = 0;
    for (; !now.is_over(); now.next()) {
        const int64_t length = now.length();
        for (; !ahead.is_over() && bytes_ahead - length < AHEAD_BYTES; ahead.next()) {
            const char* line = ahead.at();
            const int64_t wanted = ahead.length() < AHEAD_BYTES ? ahead.length() : AHEAD_BYTES;
            for (int64_t i = 0; i < wanted; i += LINE_BYTES) __builtin_prefetch(line + i, is_gather ? 0 : 1, 0);
            bytes_ahead += ahead.length();
        }
        bytes_ahead -= length;
        if (is_gather)
            put(chunk, now.at(), length);
        else
            put(now.at(), chunk, length);
        chunk += length;
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);  // such writes are seen late, but not after this
}

struct Job {
    const Side& side;
    void (*copy)(const Side&, uint64_t);
    std::atomic<uint64_t> next{0};
    int num_helpers = 0;  // who are at it, beside the caller

    void work() {
        for (uint64_t part; (part = next++) < side.num_parts;) copy(side, part);
    }
};

// Threads that help whoever copies. It is never given up: they may be asleep in it when the process ends.
class Helpers {
    std::mutex mutex;
    std::condition_variable come, gone;
    std::deque<Job*> jobs;
    const pid_t process = getpid();

    void help() {
        std::unique_lock<std::mutex> lock{mutex};
        for (;;) {
            come.wait(lock, [this] { return !jobs.empty(); });
            Job& job = *jobs.front();
            ++job.num_helpers;
            lock.unlock();
            job.work();
            lock.lock();
            forget(job);
            if (!--job.num_helpers) gone.notify_all();
        }
    }

    void forget(Job& job) {
        const auto at = std::find(jobs.begin(), jobs.end(), &job);
        if (at != jobs.end()) jobs.erase(at);
    }

  public:
    explicit Helpers(unsigned number) {
        try {
            for (unsigned i = 0; i < number; ++i) std::thread{[this] { help(); }}.detach();
        } catch (const std::system_error&) {
            // The host has no room for more threads: those that are there help. An exception would end the process.
        }
    }

    void run(Job& job) {
        if (process != getpid()) return job.work();  // a child that was forked has no other thread
        {
            const std::lock_guard<std::mutex> lock{mutex};
            jobs.push_back(&job);
        }
        come.notify_all();
        job.work();
        std::unique_lock<std::mutex> lock{mutex};
        forget(job);
        gone.wait(lock, [&job] { return !job.num_helpers; });
    }
};

Helpers* helpers = nullptr;

template <bool is_gather>
void run(const Side& side) {
    Job job{side, copy<is_gather>};
    if (helpers && side.num_parts > 1)
        helpers->run(job);
    else
        job.work();
}

}  // namespace

// How many threads help from now on; once.
extern "C" void kvferry_help(unsigned number) {
    if (number && !helpers) helpers = new Helpers{number};
}

extern "C" void kvferry_gather(const Side* side) { run<true>(*side); }

extern "C" void kvferry_scatter(const Side* side) { run<false>(*side); }
