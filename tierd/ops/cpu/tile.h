// The tokens of a tile: where each one's keys, values and scales lie, whatever the block size.
#pragma once
#include "vector.h"
#include "work.h"

namespace tierd {
namespace TIERD_ISA {

constexpr int kMaxTile = 64;  // tokens, at most

struct Tile {
  int32_t first, count;
  int32_t num_runs, run[kMaxTile + 1];  // tokens of one block: run[r] up to run[r + 1]
  int64_t k[kMaxTile], v[kMaxTile];     // element offsets, without the head's
  int64_t k_scale[kMaxTile], v_scale[kMaxTile];

  int run_length(int r) const { return run[r + 1] - run[r]; }
};

// Past the last token the tile repeats it, so that kernels may read whole vectors of tokens.
inline void fill(Tile& tile, const Arguments& a, const Sequence& s, int32_t first, int32_t last,
                 int size = kMaxTile) {
  const int32_t* table = a.block_table + s.index * a.table_row;
  tile.first = first;
  tile.count = smaller(last - first, size);
  int32_t column = first / a.block_size, slot = first % a.block_size;
  tile.num_runs = 0;
  for (int i = 0; i < tile.count; column++, slot = 0) {
    tile.run[tile.num_runs++] = i;
    const int64_t block = table[column];
    const int end = smaller(tile.count, i + a.block_size - slot);
    for (; i < end; i++, slot++) {
      tile.k[i] = block * a.k_block + slot * a.k_slot;
      tile.v[i] = block * a.v_block + slot * a.v_slot;
      if (a.k_scale) {
        tile.k_scale[i] = block * a.k_scale_block + slot * a.k_scale_slot;
        tile.v_scale[i] = block * a.v_scale_block + slot * a.v_scale_slot;
      }
    }
  }
  tile.run[tile.num_runs] = tile.count;
  for (int i = tile.count, last_one = tile.count - 1; i < size; i++) {
    tile.k[i] = tile.k[last_one];
    tile.v[i] = tile.v[last_one];
    tile.k_scale[i] = tile.k_scale[last_one];
    tile.v_scale[i] = tile.v_scale[last_one];
  }
}

// The scales of one head's tokens of a tile.
struct Scales {
  alignas(64) float k[kMaxTile], v[kMaxTile];

  void gather(const Arguments& a, const Tile& tile, int32_t head, int size = kMaxTile) {
    gather(k, a.k_scale + head * a.k_scale_head, tile.k_scale, a.k_scale_slot, tile, size);
    gather(v, a.v_scale + head * a.v_scale_head, tile.v_scale, a.v_scale_slot, tile, size);
  }

  // Divide the values' scales by the largest, which is returned. Weights are rounded after they are
  // scaled; a scale shared by all tokens would round all in one direction.
  float normalise_values() {
    float top = 0;
    for (int i = 0; i < kMaxTile; i++) top = larger(top, fabsf(v[i]));
    for (int i = 0; i < kMaxTile; i++) v[i] = top > 0 ? v[i] / top : 0;
    return top;
  }

 private:
  static void gather(float* to, const float* from, const int64_t* offset, int64_t slot_stride,
                     const Tile& tile, int size) {
    for (int i = tile.count; i < size; i++) to[i] = from[offset[i]];
    for (int run = 0; run < tile.num_runs; run++) {
      const int first = tile.run[run], last = tile.run[run + 1];
      const float one = from[offset[first]];
      for (int i = first; i < last; i++) to[i] = slot_stride ? from[offset[i]] : one;
    }
  }
};

// Rows of a later tile, fetched while an earlier one is computed.
//
// They are listed in the order of memory, all heads of a block's keys, then of its values: the
// longer the run of addresses, the faster it comes. And they are asked for evenly over the time of
// the computation: more at once than the machine can have outstanding would stop it.
class Ahead {
 public:
  // The share of one of the item's heads.
  void list(const Arguments& a, const Tile& tile, const Item& item, int element_nbytes, int step) {
    const int heads = item.last_head - item.first_head;
    nbytes_ = (int64_t)larger(a.head_dim, a.v_dim) * element_nbytes;
    count_ = next_ = credit_ = 0;
    byte_ = 0;
    int run = 0, row = step * 2 * tile.count;  // of 2 * heads times the tile's tokens
    for (; row >= 2 * heads * tile.run_length(run); run++) row -= 2 * heads * tile.run_length(run);
    while (count_ < 2 * tile.count) {
      const int length = tile.run_length(run), unit = row / length;
      const int64_t head = item.first_head + unit % heads;
      const bool values = unit >= heads;
      const char* base = values ? (const char*)a.v + head * a.v_head * element_nbytes
                                : (const char*)a.k + head * a.k_head * element_nbytes;
      const int64_t* offset = (values ? tile.v : tile.k) + tile.run[run];
      for (int i = row % length; i < length && count_ < 2 * tile.count; i++, row++)
        row_[count_++] = base + offset[i] * element_nbytes;
      if (row == 2 * heads * length) run++, row = 0;
    }
  }

  // What to pass to `fetch` in each of `times` calls, to have `eighths` of the list fetched.
  int portion(int eighths, int times) const {
    return count_ * (int)((nbytes_ + kPiece - 1) / kPiece) * eighths * (kOnePiece / 8) / times;
  }

  void fetch(int portion) {
    for (credit_ += portion; credit_ >= kOnePiece && next_ < count_; credit_ -= kOnePiece) {
      prefetch(row_[next_] + byte_, kPiece);
      byte_ += kPiece;
      if (byte_ >= nbytes_) byte_ = 0, next_++;
    }
  }

 private:
  static constexpr int kPiece = 64, kOnePiece = 1 << 10;
  const char* row_[2 * kMaxTile];
  int64_t nbytes_ = 0, byte_ = 0;
  int count_ = 0, next_ = 0, credit_ = 0;
};

}  // namespace TIERD_ISA
}  // namespace tierd
