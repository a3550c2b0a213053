// Sums up the cells of blocks in device memory, to the numbers that numpy finds (core/digest_cells.py): a cell's sum is
// that of its words times their keys, modulo 2^64. Word (r, i) of cell c of block b is at
// first + blocks[b] + cells[c] + rows[r] + i words.
//
// A term is one state of a request. Its cells are cut into tiles of at most TILE_WORDS words, and a warp takes a tile at
// a time: so a recurrent state, which is one cell of a million words, is the work of many. Tiles are numbered over all
// terms, and a launch takes those from `first_tile` up to `stop_tile`. What the tiles of a cell find is added up in
// `sums`, which begin as zeros.
//
// Host and device agree on `Term` and on the tile (digest_kernel.py). The same text compiles for a CPU, where tests run it.

typedef unsigned long long u64;
typedef unsigned int u32;

#ifndef KVFERRY_CPU
#define WARP_SIZE 32
#define KVFERRY_DEVICE __device__ __forceinline__
#else
#define WARP_SIZE KVFERRY_CPU_LANES
#define KVFERRY_DEVICE static
#endif
#define TILE_WORDS 1024

struct Term {
  u64 first;         // address of the first item of block 0
  u64 blocks;        // address of the distance of each block
  u64 cells;         // address of the distances of C cells
  u64 rows;          // address of the distances of R rows
  u64 keys;          // address of R x row_words keys
  u64 sums;          // address of a sum for each cell of each block
  u64 first_tile;    // tiles of all terms before this one
  u32 tiles_per_cell;
  u32 num_cells;     // C
  u32 row_words;
  u32 cell_words;    // R x row_words
  u32 word_bytes;    // 1, 2 or 4
  u32 unit_bytes;    // 1, 2 or 4: what all words are aligned to, as far as they are long
};

KVFERRY_DEVICE u64 at(u64 array, u64 index) { return reinterpret_cast<const u64*>(array)[index]; }

#ifndef KVFERRY_CPU
template <class Unit> __device__ __forceinline__ u64 load_unit(u64 address) {
  return __ldcs(reinterpret_cast<const Unit*>(address));
}
KVFERRY_DEVICE void add_up(u64 sums, u64 cell, u64 sum, u32 lane) {
  for (u32 half = WARP_SIZE / 2; half; half /= 2) sum += __shfl_down_sync(0xffffffffu, sum, half);
  if (lane == 0) atomicAdd(reinterpret_cast<u64*>(sums) + cell, sum);
}
#else
template <class Unit> static u64 load_unit(u64 address) { return *reinterpret_cast<const Unit*>(address); }
static void add_up(u64 sums, u64 cell, u64 sum, u32) { reinterpret_cast<u64*>(sums)[cell] += sum; }
#endif

// A word, whatever it is aligned to: put together from units.
template <u32 WORD_BYTES, class Unit> KVFERRY_DEVICE u64 load(u64 address) {
  u64 word = 0;
#pragma unroll
  for (u32 i = 0; i < WORD_BYTES; i += sizeof(Unit)) word |= load_unit<Unit>(address + i) << 8 * i;
  return word;
}

// One lane's words of one tile.
template <u32 WORD_BYTES, class Unit> KVFERRY_DEVICE u64 lane_sum(const Term& term, u64 cell, u32 first_word, u32 lane) {
  const u64 block = cell / term.num_cells;
  const u64 base = term.first + at(term.blocks, block) + at(term.cells, cell - block * term.num_cells);
  const u32 left = term.cell_words - first_word, stop = first_word + (left < TILE_WORDS ? left : TILE_WORDS);
  u32 word = first_word + lane;
  u32 row = word / term.row_words, inside = word - row * term.row_words;
  u64 sum = 0;
#pragma unroll 4
  for (; word < stop; word += WARP_SIZE) {
    sum += at(term.keys, word) * load<WORD_BYTES, Unit>(base + at(term.rows, row) + (u64)inside * WORD_BYTES);
    inside += WARP_SIZE;
    if (inside >= term.row_words) {
      const u32 rows = inside / term.row_words;
      row += rows;
      inside -= rows * term.row_words;
    }
  }
  return sum;
}

KVFERRY_DEVICE void sum_tiles(const Term* terms, u32 num_terms, u64 tile, u64 stop_tile, u64 step, u32 lane) {
  u32 low = 0;
  for (u32 high = num_terms; high - low > 1;) {
    const u32 middle = (low + high) / 2;
    if (terms[middle].first_tile <= tile) low = middle; else high = middle;
  }
  for (; tile < stop_tile; tile += step) {
    while (low + 1 < num_terms && terms[low + 1].first_tile <= tile) ++low;
    const Term term = terms[low];
    const u64 inside = tile - term.first_tile;
    const u64 cell = inside / term.tiles_per_cell;
    const u32 first_word = (u32)(inside - cell * term.tiles_per_cell) * TILE_WORDS;
    u64 sum;
    switch (term.word_bytes * 8 + term.unit_bytes) {
      case 4 * 8 + 4: sum = lane_sum<4, u32>(term, cell, first_word, lane); break;
      case 4 * 8 + 2: sum = lane_sum<4, unsigned short>(term, cell, first_word, lane); break;
      case 4 * 8 + 1: sum = lane_sum<4, unsigned char>(term, cell, first_word, lane); break;
      case 2 * 8 + 2: sum = lane_sum<2, unsigned short>(term, cell, first_word, lane); break;
      case 2 * 8 + 1: sum = lane_sum<2, unsigned char>(term, cell, first_word, lane); break;
      default: sum = lane_sum<1, unsigned char>(term, cell, first_word, lane); break;
    }
    add_up(term.sums, cell, sum, lane);
  }
}

#ifndef KVFERRY_CPU
extern "C" __global__ void __launch_bounds__(512)
sum_cells(const Term* terms, u64 num_terms, u64 first_tile, u64 stop_tile) {
  const u64 warp = (u64)blockIdx.x * (blockDim.x / WARP_SIZE) + threadIdx.x / WARP_SIZE;
  const u64 num_warps = (u64)gridDim.x * (blockDim.x / WARP_SIZE);
  sum_tiles(terms, (u32)num_terms, first_tile + warp, stop_tile, num_warps, threadIdx.x % WARP_SIZE);
}
#else
extern "C" void sum_cells(const Term* terms, u64 num_terms, u64 first_tile, u64 stop_tile, u64 num_warps) {
  for (u64 warp = 0; warp < num_warps; ++warp)
    for (u32 lane = 0; lane < WARP_SIZE; ++lane)
      sum_tiles(terms, (u32)num_terms, first_tile + warp, stop_tile, num_warps, lane);
}
#endif
