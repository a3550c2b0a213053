// Sums up cells in device memory, to the numbers that numpy finds (core/digest_cells.py): a cell's sum is that of its
// words times their keys, a term's sum that of its cells' sums times their weights, all modulo 2^64.
// Word (r, i) of cell c is at first + cells[c] + rows[r] + i words.
//
// A term is one chunk of tokens of one state: its cells lie alike. A warp takes a tile at a time. Where there are many
// cells, a tile is one segment (as many words as the lanes of a cell hold keys of) of many cells: the keys stay in
// registers. Where there are few, as of a recurrent state, which is one cell of a million words, it is many segments.
// Short cells share a warp. Loads of several steps are under way at a time, each of 16 bytes where all lies so.
//
// Tiles are numbered over all terms, and a launch takes those from `first_tile` up to `stop_tile`. What the tiles of a
// term find is added up in its sum, which begins as zero.
//
// Host and device agree on `Term` and on the tile (digest_table.py). The same text compiles for a CPU, where tests run it.

typedef unsigned long long u64;
typedef unsigned int u32;

#ifndef KVFERRY_CPU
#define WARP_SIZE 32
#define KVFERRY_DEVICE __device__ __forceinline__
#else
#define WARP_SIZE KVFERRY_CPU_LANES
#define KVFERRY_DEVICE
#endif
#define TILE_STEPS 16
#define STEPS_AT_ONCE 4
#define LANE_WORDS 4

struct Term {
  u64 first;         // address of the first item of block 0
  u64 cells;         // address of the distance of each cell
  u64 weights;       // address of the key of each cell
  u64 rows;          // address of the distances of the rows of a cell
  u64 keys;          // address of a key for each word of a cell
  u64 sum;           // address of the sum
  u64 first_tile;    // tiles of all terms before this one
  u32 num_cells;
  u32 row_words;
  u32 cell_words;
  u32 cell_lanes;    // lanes that share a cell: 1, 2, 4 ... 32
  u32 cell_tiles;    // tiles side by side over the cells; as many again for the next segments
  u32 is_long;       // whether a tile is many segments of few cells
  u32 word_bytes;    // 1, 2 or 4
  u32 unit_bytes;    // 1, 2 or 4: what all words are aligned to, as far as they are long; 16: four words are
};

struct alignas(16) Four { u32 words[LANE_WORDS]; };

#ifndef KVFERRY_CPU
KVFERRY_DEVICE u64 at(u64 array, u64 index) { return __ldg(reinterpret_cast<const u64*>(array) + index); }
template <class Unit> __device__ __forceinline__ u64 load_unit(u64 address) {
  return __ldcs(reinterpret_cast<const Unit*>(address));
}
KVFERRY_DEVICE Four load_four(u64 address) {
  const uint4 four = __ldcs(reinterpret_cast<const uint4*>(address));
  return {{four.x, four.y, four.z, four.w}};
}
KVFERRY_DEVICE void add_up(u64 place, u64 sum, u32 lane) {
  for (u32 half = WARP_SIZE / 2; half; half /= 2) sum += __shfl_down_sync(0xffffffffu, sum, half);
  if (lane == 0) atomicAdd(reinterpret_cast<u64*>(place), sum);
}
#else
static u64 at(u64 array, u64 index) { return reinterpret_cast<const u64*>(array)[index]; }
template <class Unit> static u64 load_unit(u64 address) { return *reinterpret_cast<const Unit*>(address); }
static Four load_four(u64 address) { return *reinterpret_cast<const Four*>(address); }
static void add_up(u64 place, u64 sum, u32) { *reinterpret_cast<u64*>(place) += sum; }
#endif

// Bytes from the start of a cell to a word of it.
KVFERRY_DEVICE u64 distance(const Term& term, u32 word) {
  const u32 row = word / term.row_words;
  return at(term.rows, row) + (u64)(word - row * term.row_words) * term.word_bytes;
}

// One lane's words of one segment, read one by one, whatever they are aligned to: put together from units.
// Words past the end of the cell have the key 0, and the first word stands for them.
template <u32 WORD_BYTES, class Unit> struct OneByOne {
  u64 keys[LANE_WORDS], distances[LANE_WORDS];

  KVFERRY_DEVICE OneByOne(const Term& term, u32 segment, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < LANE_WORDS; ++i) {
      const u64 word = ((u64)segment * LANE_WORDS + i) * term.cell_lanes + lane;
      const bool is_inside = word < term.cell_words;
      distances[i] = distance(term, is_inside ? (u32)word : 0);
      keys[i] = is_inside ? at(term.keys, word) : 0;
    }
  }
  KVFERRY_DEVICE u64 sum(u64 cell) const {
    u64 sum = 0;
#pragma unroll
    for (u32 i = 0; i < LANE_WORDS; ++i) {
      u64 word = 0;
#pragma unroll
      for (u32 j = 0; j < WORD_BYTES; j += sizeof(Unit)) word |= load_unit<Unit>(cell + distances[i] + j) << 8 * j;
      sum += keys[i] * word;
    }
    return sum;
  }
};

// The same, for words of four bytes that lie side by side in fours: a row is some fours.
struct FourAtOnce {
  u64 keys[LANE_WORDS], start;

  KVFERRY_DEVICE FourAtOnce(const Term& term, u32 segment, u32 lane) {
    const u64 word = ((u64)segment * term.cell_lanes + lane) * LANE_WORDS;
    const bool is_inside = word < term.cell_words;
    start = distance(term, is_inside ? (u32)word : 0);
#pragma unroll
    for (u32 i = 0; i < LANE_WORDS; ++i) keys[i] = is_inside ? at(term.keys, word + i) : 0;
  }
  KVFERRY_DEVICE u64 sum(u64 cell) const {
    const Four four = load_four(cell + start);
    u64 sum = 0;
#pragma unroll
    for (u32 i = 0; i < LANE_WORDS; ++i) sum += keys[i] * four.words[i];
    return sum;
  }
};

// One segment of many cells. Cells past the last have the weight 0, and the first cell stands for them.
template <class Words> KVFERRY_DEVICE u64 sum_of_cells(const Term& term, u32 segment, u64 cell, u32 lane, u32 step) {
  const Words words(term, segment, lane);
  u64 sum = 0;
  for (u32 i = 0; i < TILE_STEPS && cell < term.num_cells; i += STEPS_AT_ONCE) {
#pragma unroll
    for (u32 j = 0; j < STEPS_AT_ONCE; ++j, cell += step) {
      const bool is_there = cell < term.num_cells;
      const u64 index = is_there ? cell : 0;
      sum += (is_there ? at(term.weights, index) : 0) * words.sum(term.first + at(term.cells, index));
    }
  }
  return sum;
}

// Many segments of one cell, which has all lanes of its warp: so there is one for each tile.
template <class Words> KVFERRY_DEVICE u64 sum_of_segments(const Term& term, u32 segment, u64 cell, u32 lane) {
  const u64 base = term.first + at(term.cells, cell);
  const u32 segments = (term.cell_words - 1) / (term.cell_lanes * LANE_WORDS) + 1;
  u64 sum = 0;
  for (u32 i = 0; i < TILE_STEPS && segment < segments; i += STEPS_AT_ONCE) {
#pragma unroll
    for (u32 j = 0; j < STEPS_AT_ONCE; ++j, ++segment) sum += Words(term, segment, lane).sum(base);
  }
  return sum * at(term.weights, cell);
}

// What one lane finds in a tile of a term.
template <class Words> KVFERRY_DEVICE u64 lane_sum(const Term& term, u64 tile, u32 lane) {
  const u64 down = tile / term.cell_tiles, across = tile - down * term.cell_tiles;
  const u32 step = WARP_SIZE / term.cell_lanes;
  const u32 own_cell = lane / term.cell_lanes, own_lane = lane - own_cell * term.cell_lanes;
  if (term.is_long)
    return sum_of_segments<Words>(term, (u32)down * TILE_STEPS, across * step + own_cell, own_lane);
  return sum_of_cells<Words>(term, (u32)down, across * step * TILE_STEPS + own_cell, own_lane, step);
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
    u64 sum;
    switch (term.word_bytes * 32 + term.unit_bytes) {
      case 4 * 32 + 16: sum = lane_sum<FourAtOnce>(term, inside, lane); break;
      case 4 * 32 + 4: sum = lane_sum<OneByOne<4, u32>>(term, inside, lane); break;
      case 4 * 32 + 2: sum = lane_sum<OneByOne<4, unsigned short>>(term, inside, lane); break;
      case 4 * 32 + 1: sum = lane_sum<OneByOne<4, unsigned char>>(term, inside, lane); break;
      case 2 * 32 + 2: sum = lane_sum<OneByOne<2, unsigned short>>(term, inside, lane); break;
      case 2 * 32 + 1: sum = lane_sum<OneByOne<2, unsigned char>>(term, inside, lane); break;
      default: sum = lane_sum<OneByOne<1, unsigned char>>(term, inside, lane); break;
    }
    add_up(term.sum, sum, lane);
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
