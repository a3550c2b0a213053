// Sums up the cells of blocks in host memory, to the numbers that numpy finds (core/digest_cells.py): a cell's sum is
// that of its words times their keys, modulo 2^64. Word (c, r, i) of a block is at cells[c] + rows[r] + i words.
//
// Compiled where it runs (compiled_digest.py). Plain loops: the compiler makes vectors of them.

typedef unsigned long long u64;
typedef long long i64;

struct Blocks {
  const char* first;
  const i64* blocks;  // bytes from `first` to each block
  const i64* cells;
  const i64* rows;
  const u64* keys;    // of each word of each row
  u64* sums;          // of each cell of each block
  u64 num_blocks, num_cells, num_rows, row_words, word_bytes;
};

typedef unsigned char Word1;
typedef unsigned short __attribute__((aligned(1), may_alias)) Word2;  // items lie at any address
typedef unsigned int __attribute__((aligned(1), may_alias)) Word4;

static const u64 LANES = 16;

// Cell after cell, each along its rows.
template <class Word> static void along_rows(const Blocks& on) {
  for (u64 b = 0; b < on.num_blocks; ++b)
    for (u64 c = 0; c < on.num_cells; ++c) {
      const char* cell = on.first + on.blocks[b] + on.cells[c];
      u64 sum = 0;
      for (u64 r = 0; r < on.num_rows; ++r) {
        const Word* words = reinterpret_cast<const Word*>(cell + on.rows[r]);
        const u64* keys = on.keys + r * on.row_words;
        for (u64 i = 0; i < on.row_words; ++i) sum += keys[i] * words[i];
      }
      on.sums[b * on.num_cells + c] = sum;
    }
}

// Sixteen cells that lie side by side, word for word: memory that has the token axis innermost.
template <class Word> static void across_cells(const Blocks& on) {
  for (u64 b = 0; b < on.num_blocks; ++b)
    for (u64 c = 0; c < on.num_cells; c += LANES) {
      const char* cell = on.first + on.blocks[b] + on.cells[c];
      u64 sums[LANES] = {};
      for (u64 r = 0; r < on.num_rows; ++r) {
        const Word* words = reinterpret_cast<const Word*>(cell + on.rows[r]);
        const u64 key = on.keys[r];
        for (u64 i = 0; i < LANES; ++i) sums[i] += key * words[i];
      }
      for (u64 i = 0; i < LANES; ++i) on.sums[b * on.num_cells + c + i] = sums[i];
    }
}

static bool is_across(const Blocks& on) {
  if (on.row_words != 1 || on.num_cells % LANES) return false;
  for (u64 c = 0; c < on.num_cells; ++c)
    if (c % LANES && on.cells[c] != on.cells[c - 1] + (i64)on.word_bytes) return false;
  return true;
}

template <class Word> static void sum_words(const Blocks& on) {
  if (is_across(on)) across_cells<Word>(on); else along_rows<Word>(on);
}

extern "C" void kvferry_sum_cells(const Blocks* on) {
  switch (on->word_bytes) {
    case 4: sum_words<Word4>(*on); break;
    case 2: sum_words<Word2>(*on); break;
    default: sum_words<Word1>(*on); break;
  }
}
