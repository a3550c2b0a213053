// Copies, or clears, many runs of bytes in one launch.
//
// The runs are given as products. A term is a pattern of P runs, repeated for B pairs of blocks: run (p, b) goes from
// src[p] + src_steps[b] to dst[p] + dst_steps[b], and all runs of a term are `words_per_run` words of one width
// long. So a million runs are a few thousand numbers, and every thread finds its own word by division.
//
// A term's words, run after run, are cut into tiles; a warp copies a tile at a time. A tile takes all its loads before
// its first store, which keeps enough of them in flight. A tile inside of one run, as nearly all are of long ones, looks
// its addresses up once. Tiles are numbered over all terms, and a launch takes those from `first_tile` up to
// `stop_tile`: long copies are several launches, so that other work gets in between.
//
// Host and device agree on `Term` and on the tile (copy_kernel.py). The same text compiles for a CPU, where tests run it.

typedef unsigned long long u64;
typedef unsigned int u32;

#ifndef KVFERRY_CPU
#define WARP_SIZE 32
#else
#define WARP_SIZE KVFERRY_CPU_LANES
#endif
#define WORDS_PER_LANE 8
#define TILE_WORDS (WARP_SIZE * WORDS_PER_LANE)

struct Term {
  u64 src;           // address of P source addresses; 0: fill with zeros
  u64 dst;           // address of P destination addresses
  u64 src_steps;     // address of B distances
  u64 dst_steps;     // address of B distances
  u64 first_tile;    // tiles of all terms before this one
  u64 num_words;     // of all its runs
  u32 words_per_run;
  u32 pattern_runs;  // P
  u32 word_bytes;    // 1, 2, 4, 8 or 16
  u32 unused;
};

struct alignas(16) Word16 { u32 x, y, z, w; };

#ifndef KVFERRY_CPU
__device__ __forceinline__ Word16 load(const Word16* at) {
  uint4 v = __ldcs(reinterpret_cast<const uint4*>(at));
  return Word16{v.x, v.y, v.z, v.w};
}
__device__ __forceinline__ void store(Word16* at, Word16 v) {
  __stcs(reinterpret_cast<uint4*>(at), make_uint4(v.x, v.y, v.z, v.w));
}
template <class Word> __device__ __forceinline__ Word load(const Word* at) { return __ldcs(at); }
template <class Word> __device__ __forceinline__ void store(Word* at, Word v) { __stcs(at, v); }
#define KVFERRY_DEVICE __device__ __forceinline__
#else
template <class Word> static Word load(const Word* at) { return *at; }
template <class Word> static void store(Word* at, Word v) { *at = v; }
#define KVFERRY_DEVICE static
#endif

KVFERRY_DEVICE u64 at(u64 array, u64 index) { return reinterpret_cast<const u64*>(array)[index]; }

// One lane's words of a tile that lies inside of one run: its addresses are looked up once, and every word is there.
template <class Word>
KVFERRY_DEVICE void copy_one_run(const Term& term, u32 pattern, u64 pair, u32 inside, u32 lane) {
  const u64 first = (u64)(inside + lane) * sizeof(Word);
  Word* to = reinterpret_cast<Word*>(at(term.dst, pattern) + at(term.dst_steps, pair) + first);
  Word words[WORDS_PER_LANE] = {};
  if (term.src) {
    const Word* from = reinterpret_cast<const Word*>(at(term.src, pattern) + at(term.src_steps, pair) + first);
#pragma unroll
    for (u32 k = 0; k < WORDS_PER_LANE; ++k) words[k] = load(from + k * WARP_SIZE);
  }
#pragma unroll
  for (u32 k = 0; k < WORDS_PER_LANE; ++k) store(to + k * WARP_SIZE, words[k]);
}

// One lane's words of a tile over several runs, or over the end of the last one: each word's addresses are looked up.
template <class Word>
KVFERRY_DEVICE void copy_several_runs(const Term& term, u64 num_words, u32 first_pattern, u64 first_pair,
                                      u32 first_inside, u32 lane) {
  Word words[WORDS_PER_LANE];
  Word* to[WORDS_PER_LANE];
  const bool is_clear = term.src == 0;
#pragma unroll
  for (u32 k = 0; k < WORDS_PER_LANE; ++k) {
    const u32 word = lane + k * WARP_SIZE;
    to[k] = 0;
    words[k] = Word{};
    if (word >= num_words) continue;
    u32 inside = first_inside + word;
    const u32 run = inside / term.words_per_run;
    inside -= run * term.words_per_run;
    u32 pattern = first_pattern + run;
    const u32 pairs = pattern / term.pattern_runs;
    pattern -= pairs * term.pattern_runs;
    const u64 pair = first_pair + pairs;
    to[k] = reinterpret_cast<Word*>(at(term.dst, pattern) + at(term.dst_steps, pair)) + inside;
    if (!is_clear)
      words[k] = load(reinterpret_cast<const Word*>(at(term.src, pattern) + at(term.src_steps, pair)) + inside);
  }
#pragma unroll
  for (u32 k = 0; k < WORDS_PER_LANE; ++k)
    if (to[k]) store(to[k], words[k]);
}

// One lane's words of one tile. All arithmetic but two divisions per tile is of 32 bits.
template <class Word> KVFERRY_DEVICE void copy_tile(const Term& term, u64 tile, u32 lane) {
  const u64 first_word = tile * TILE_WORDS;
  const u64 run = first_word / term.words_per_run;
  const u32 inside = (u32)(first_word - run * term.words_per_run);
  const u64 pair = run / term.pattern_runs;
  const u32 pattern = (u32)(run - pair * term.pattern_runs);
  if (inside + TILE_WORDS <= term.words_per_run)
    copy_one_run<Word>(term, pattern, pair, inside, lane);
  else
    copy_several_runs<Word>(term, term.num_words - first_word, pattern, pair, inside, lane);
}

KVFERRY_DEVICE void copy_tiles(const Term* terms, u32 num_terms, u64 tile, u64 stop_tile, u64 step, u32 lane) {
  if (num_terms == 0) return;  // a launch that only loads the kernel: the table holds whatever was there before
  u32 low = 0;
  for (u32 high = num_terms; high - low > 1;) {
    const u32 middle = (low + high) / 2;
    if (terms[middle].first_tile <= tile) low = middle; else high = middle;
  }
  for (; tile < stop_tile; tile += step) {
    while (low + 1 < num_terms && terms[low + 1].first_tile <= tile) ++low;
    const Term term = terms[low];
    const u64 inside = tile - term.first_tile;
    switch (term.word_bytes) {
      case 16: copy_tile<Word16>(term, inside, lane); break;
      case 8: copy_tile<u64>(term, inside, lane); break;
      case 4: copy_tile<u32>(term, inside, lane); break;
      case 2: copy_tile<unsigned short>(term, inside, lane); break;
      default: copy_tile<unsigned char>(term, inside, lane); break;
    }
  }
}

#ifndef KVFERRY_CPU
extern "C" __global__ void __launch_bounds__(512)
copy_runs(const Term* terms, u64 num_terms, u64 first_tile, u64 stop_tile) {
  const u64 warp = (u64)blockIdx.x * (blockDim.x / WARP_SIZE) + threadIdx.x / WARP_SIZE;
  const u64 num_warps = (u64)gridDim.x * (blockDim.x / WARP_SIZE);
  copy_tiles(terms, (u32)num_terms, first_tile + warp, stop_tile, num_warps, threadIdx.x % WARP_SIZE);
}
#else
extern "C" void copy_runs(const Term* terms, u64 num_terms, u64 first_tile, u64 stop_tile, u64 num_warps) {
  for (u64 warp = 0; warp < num_warps; ++warp)
    for (u32 lane = 0; lane < WARP_SIZE; ++lane)
      copy_tiles(terms, (u32)num_terms, first_tile + warp, stop_tile, num_warps, lane);
}
#endif
