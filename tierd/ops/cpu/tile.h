// The tokens of a tile: where each one's keys, values and scales lie, whatever the block size.
#pragma once
#include "vector.h"
#include "work.h"

namespace tierd {
namespace TIERD_ISA {

constexpr int kTile = 64;  // tokens

struct Tile {
  int32_t first, count;
  int64_t k[kTile], v[kTile];  // element offsets, without the head's
  int64_t k_scale[kTile], v_scale[kTile];
};

// Past the last token the tile repeats it, so that kernels may read whole vectors of tokens.
inline void fill(Tile& tile, const Arguments& a, const Sequence& s, int32_t first, int32_t last) {
  const int32_t* table = a.block_table + s.index * a.table_row;
  tile.first = first;
  tile.count = smaller(last - first, kTile);
  int32_t column = first / a.block_size, slot = first % a.block_size;
  for (int i = 0; i < tile.count; column++, slot = 0) {
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
  for (int i = tile.count, last_one = tile.count - 1; i < kTile; i++) {
    tile.k[i] = tile.k[last_one];
    tile.v[i] = tile.v[last_one];
    tile.k_scale[i] = tile.k_scale[last_one];
    tile.v_scale[i] = tile.v_scale[last_one];
  }
}

// The scales of one head's tokens of a tile.
struct Scales {
  alignas(64) float k[kTile], v[kTile];

  void gather(const Arguments& a, const Tile& tile, int32_t head) {
    for (int i = 0; i < kTile; i++) {
      k[i] = a.k_scale[tile.k_scale[i] + head * a.k_scale_head];
      v[i] = a.v_scale[tile.v_scale[i] + head * a.v_scale_head];
    }
  }
};

}  // namespace TIERD_ISA
}  // namespace tierd
