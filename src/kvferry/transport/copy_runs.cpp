// Copies runs that lie anywhere in memory to a chunk, where they lie side by side, or back.
//
// Compiled where it runs (compiled_copies.py). Memory that was not touched for a while takes 100 ns and more to come, in
// which hundreds of bytes could be copied: so what comes next is asked for while the bytes before it are copied.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t AHEAD_BYTES = 4096;  // how much is asked for beforehand
constexpr int64_t LINE_BYTES = 64;

struct Side {
    const int64_t* rows;     // the address of each run of the pattern, of a block that is 0 bytes away
    const int64_t* lengths;  // of each of these
    const int64_t* steps;    // how far away each block is
    uint64_t num_rows, num_steps;
    uint64_t first, stop;    // which runs are copied, counted row by row, each with all its steps
};

struct Cursor {
    const Side& side;
    uint64_t run, row, step;

    explicit Cursor(const Side& side)
        : side(side), run(side.first), row(side.first / side.num_steps), step(side.first % side.num_steps) {}
    bool is_over() const { return run == side.stop; }
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

template <bool is_gather>
void copy(const Side& side, char* chunk) {
    Cursor now{side}, ahead{side};
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
            memcpy(chunk, now.at(), length);
        else
            memcpy(now.at(), chunk, length);
        chunk += length;
    }
}

}  // namespace

extern "C" void kvferry_gather(const Side* side, char* chunk) {
    if (side->num_steps) copy<true>(*side, chunk);
}

extern "C" void kvferry_scatter(const Side* side, char* chunk) {
    if (side->num_steps) copy<false>(*side, chunk);
}
