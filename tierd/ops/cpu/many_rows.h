// Prefill, and groups of many heads: up to kRowTile rows share each key, so the time goes into
// arithmetic. The lanes are rows: q is transposed once, a number of K or V is one factor for all
// rows, and the softmax runs down the lanes with nothing to add across them.
//
//     scores [tokens][rows] = K [tokens][D] . Q^T [D][rows]
//     values [Dv][rows]    += V^T [Dv][tokens] . weights [tokens][rows]
//
// Both are `multiply`. A tile of K or V is first unpacked to floats, or with AVX512-BF16 to pairs
// of bf16 (two columns of K, two tokens of V), whatever its type and wherever its tokens lie.
#pragma once
#include "rows.h"
#include "tile.h"

namespace tierd {
namespace TIERD_ISA {

struct Floating {
  using Unit = float;
  static constexpr int kPacked = 1;  // numbers in a Unit

  static Floats multiply_add(Floats sum, float a, Floats b) { return a * b + sum; }

  template <class Stored>
  static void unpack_keys(float* to, const Stored* from, int dim) {
    for (int d = 0; d < dim; d += kLanes) store(to + d, load(from + d));
  }
  template <class Stored>
  static void unpack_values(float* to, const Stored* from, const Stored*, int dim) {
    unpack_keys(to, from, dim);
  }
  static void put_weights(float* to, Floats weights, Floats) { store(to, weights); }
};

#if defined(__AVX512BF16__)
struct BfloatPacked {
  using Unit = uint32_t;
  static constexpr int kPacked = 2;

  static Floats multiply_add(Floats sum, uint32_t a, Floats b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
  }
  static Words pair(Floats even, Floats odd) {
    return (Words)even >> 16 | ((Words)odd & 0xffff0000);
  }

  template <class Stored>
  static void unpack_keys(uint32_t* to, const Stored* from, int dim) {
    for (int d = 0; d < dim; d += kLanes) store((Bfloat16*)to + d, load(from + d));
  }
  static void unpack_keys(uint32_t* to, const Bfloat16* from, int dim) {
    memcpy(to, from, sizeof(Bfloat16) * dim);
  }
  template <class Stored>
  static void unpack_values(uint32_t* to, const Stored* even, const Stored* odd, int dim) {
    for (int d = 0; d < dim; d += kLanes) store_bits(to + d, pair(load(even + d), load(odd + d)));
  }
  static void put_weights(uint32_t* to, Floats even, Floats odd) {
    store_bits(to, pair((Floats)(rounded_to_bfloat16(even) << 16),
                        (Floats)(rounded_to_bfloat16(odd) << 16)));
  }
};
#endif

constexpr int kHeight = 4;                      // tokens or columns in registers
constexpr int kBreadth = kLanes == 16 ? 4 : 2;  // vectors of rows in registers

// A product's left side: element (i, k) lies at base[i * row + k * column].
template <class Unit>
struct Left {
  const Unit* base;
  int64_t row, column;
};

// For kHeight values of i and N vectors of rows:
//     result[i][rows] = decay[rows] * result[i][rows] + factor * (left . right)[i][rows]
// Without decay, the result so far counts as 0. A tile's sum begins at 0 and is added once, so its
// rounding does not grow with the number of tiles.
template <class Kind, int N>
inline void multiply_block(float* result, const float* decay, float factor,
                           const Left<typename Kind::Unit>& left, const typename Kind::Unit* right,
                           int depth, int width) {
  Floats sum[kHeight][N];
#pragma GCC unroll 4
  for (int i = 0; i < kHeight; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) sum[i][j] = Floats{};
  const typename Kind::Unit* a = left.base;
  for (int k = 0; k < depth; k++, a += left.column, right += width) {
    Floats b[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) b[j] = load_bits<Floats>(right + j * kLanes);
#pragma GCC unroll 4
    for (int i = 0; i < kHeight; i++)
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) sum[i][j] = Kind::multiply_add(sum[i][j], a[i * left.row], b[j]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kHeight; i++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) {
      float* to = result + i * width + j * kLanes;
      const Floats tile = sum[i][j] * splat(factor);
      store(to, decay ? load(to) * load(decay + j * kLanes) + tile : tile);
    }
}

template <class Kind>
inline void multiply(float* result, const float* decay, float factor,
                     Left<typename Kind::Unit> left, const typename Kind::Unit* right, int height,
                     int depth, int width) {
  for (int i = 0; i < height; i += kHeight) {
    Left<typename Kind::Unit> block = {left.base + i * left.row, left.row, left.column};
    float* to = result + (int64_t)i * width;
    int j = 0;
    for (; j + kBreadth * kLanes <= width; j += kBreadth * kLanes)
      multiply_block<Kind, kBreadth>(to + j, decay ? decay + j : nullptr, factor, block, right + j,
                                     depth, width);
    for (; j < width; j += kLanes)
      multiply_block<Kind, 1>(to + j, decay ? decay + j : nullptr, factor, block, right + j, depth,
                              width);
  }
}

// Scratch of one head's rows; `width` rows, padded to whole vectors.
template <class Kind>
struct ManyRows {
  int width;
  float *max, *sum, *decay, *slope;          // [rows]
  int32_t *position, *first_key, *last_key;  // [rows]
  typename Kind::Unit* query;                // [D / kPacked][rows]
  float* scores;                             // [kMaxTile][rows]
  typename Kind::Unit* weights;              // [kMaxTile / kPacked][rows]
  typename Kind::Unit* tokens;               // [kMaxTile][D / kPacked], or [kMaxTile / kPacked][Dv]
  float* values;                             // [Dv][rows]
  Keys all_seen;                             // keys seen by all rows

  ManyRows(const Arguments& a, int num_rows, char* workspace) {
    width = (num_rows + kLanes - 1) / kLanes * kLanes;
    float* room = (float*)workspace;
    auto take = [&](int64_t n) {
      float* start = room;
      room += (n + 15) / 16 * 16;
      return start;
    };
    max = take(width), sum = take(width), decay = take(width), slope = take(width);
    position = (int32_t*)take(width), first_key = (int32_t*)take(width);
    last_key = (int32_t*)take(width);
    query = (typename Kind::Unit*)take(a.head_dim * width);
    scores = take(kMaxTile * width);
    weights = (typename Kind::Unit*)take(kMaxTile * width);
    tokens = (typename Kind::Unit*)take(kMaxTile * larger(a.head_dim, a.v_dim));
    values = take(a.v_dim * width);
  }

  static int64_t nbytes(const Arguments& a) {
    const int64_t per_row = 7 + a.head_dim + 2 * kMaxTile + a.v_dim;
    return sizeof(float) * (kRowTile * per_row + kMaxTile * larger(a.head_dim, a.v_dim) + 16 * 16);
  }
};

template <class Kind>
inline void begin_head(ManyRows<Kind>& w, const Arguments& a, const Item& item, int32_t head) {
  float q[512];
  w.all_seen = {0, INT32_MAX};
  for (int r = 0; r < w.width; r++) {
    // Rows that pad a vector repeat the last one; nobody reads their result.
    const RowPlace place(a, item.sequence, head, smaller(item.first_row + r, item.last_row - 1));
    const Keys keys = visible(a, item.sequence, place.position);
    w.max[r] = -INFINITY;
    w.sum[r] = 0;
    w.slope[r] = a.alibi_slopes ? a.alibi_slopes[place.head] : 0;
    w.position[r] = place.position;
    w.first_key[r] = keys.first;
    w.last_key[r] = keys.last;
    w.all_seen = {larger(w.all_seen.first, keys.first), smaller(w.all_seen.last, keys.last)};
    load_query(q, a, place);
    typename Kind::Unit packed[512];
    Kind::unpack_keys(packed, q, a.head_dim);
    for (int d = 0; d < a.head_dim / Kind::kPacked; d++)
      w.query[(int64_t)d * w.width + r] = packed[d];
  }
  memset(w.values, 0, sizeof(float) * a.v_dim * w.width);
}

// Scores of kLanes rows with one token, from the dot products: everything done by position.
template <class Kind>
inline Floats score(const Arguments& a, const ManyRows<Kind>& w, Floats x, float factor,
                    int32_t token, int row, bool all_seen) {
  x *= splat(factor);
  if (a.softcap > 0) x = soft_capped(x, a.softcap);
  if (a.alibi_slopes) {
    const Ints distance = token - load_bits<Ints>(w.position + row);
    x += load(w.slope + row) * __builtin_convertvector(distance, Floats);
  }
  if (all_seen) return x;
  const Ints first = load_bits<Ints>(w.first_key + row), last = load_bits<Ints>(w.last_key + row);
  return where((first <= token) & (last > token), x, splat(-INFINITY));
}

// The online softmax over a tile, kLanes rows at a time: scores to weights, sums and decay.
template <class Kind>
inline void weigh(ManyRows<Kind>& w, const Arguments& a, const Tile& tile, const Scales* scales) {
  const bool all_seen =
      tile.first >= w.all_seen.first && tile.first + tile.count <= w.all_seen.last;
  for (int row = 0; row < w.width; row += kLanes) {
    float* s = w.scores + row;
    const Floats old = load(w.max + row);
    Floats max = old;
    for (int i = 0; i < tile.count; i++) {
      const float factor = scales ? a.scale * scales->k[i] : a.scale;
      const Floats x = score(a, w, load(s + i * w.width), factor, tile.first + i, row, all_seen);
      store(s + i * w.width, x);
      max = larger(x, max);
    }
    store(w.max + row, max);
    // No key yet: any finite maximum makes weights of 0 here, and of NaN if the scores are NaN.
    max = where(max == splat(-INFINITY), Floats{}, max);
    const Floats decay = exponential(old - max);
    store(w.decay + row, decay);
    Floats sum = {};
    for (int i = 0; i < kMaxTile; i += Kind::kPacked) {
      Floats weight[2] = {};
      for (int j = 0; j < Kind::kPacked && i + j < tile.count; j++) {
        weight[j] = exponential(load(s + (i + j) * w.width) - max);
        sum += weight[j];
        if (scales) weight[j] *= splat(scales->v[i + j]);
      }
      Kind::put_weights(w.weights + i / Kind::kPacked * w.width + row, weight[0], weight[1]);
    }
    store(w.sum + row, load(w.sum + row) * decay + sum);
  }
}

template <class Kind>
inline void end_head(ManyRows<Kind>& w, const Arguments& a, const Item& item,
                     const Scratch& scratch, int32_t head) {
  float values[512];
  for (int32_t row = item.first_row; row < item.last_row; row++) {
    const int r = row - item.first_row;
    for (int d = 0; d < a.v_dim; d++) values[d] = w.values[(int64_t)d * w.width + r];
    put_row(a, item, scratch, head, row, w.max[r], w.sum[r], values);
  }
}

template <class Kind, class Stored>
inline void attend_tile(ManyRows<Kind>& w, const Arguments& a, int32_t head, const Tile& tile,
                        const Tile* next) {
  constexpr int kPacked = Kind::kPacked;
  const Stored* k = (const Stored*)a.k + head * a.k_head;
  const Stored* v = (const Stored*)a.v + head * a.v_head;
  Scales scales;
  float v_scale = 1;
  if (a.k_scale) {
    scales.gather(a, tile, head);
    v_scale = scales.normalise_values();
  }
  const int key_units = a.head_dim / kPacked;
  const int padded = (tile.count + kHeight - 1) / kHeight * kHeight;
  for (int i = 0; i < padded; i++) {
    Kind::unpack_keys(w.tokens + i * key_units, k + tile.k[i], a.head_dim);
    if (next) prefetch(k + next->k[i], a.head_dim * sizeof(Stored));
  }
  multiply<Kind>(w.scores, nullptr, 1, {w.tokens, key_units, 1}, w.query, padded, key_units,
                 w.width);
  weigh(w, a, tile, a.k_scale ? &scales : nullptr);
  for (int i = 0; i < padded; i += kPacked) {
    Kind::unpack_values(w.tokens + i / kPacked * a.v_dim, v + tile.v[i],
                        v + tile.v[i + kPacked - 1], a.v_dim);
    if (next)
      for (int j = 0; j < kPacked; j++) prefetch(v + next->v[i + j], a.v_dim * sizeof(Stored));
  }
  multiply<Kind>(w.values, w.decay, v_scale, {w.tokens, 1, a.v_dim}, w.weights, a.v_dim,
                 padded / kPacked, w.width);
}

template <class Kind, class Stored>
void many_rows(const Arguments& a, const Item& item, const Scratch& scratch) {
  ManyRows<Kind> w(a, item.last_row - item.first_row, scratch.workspace);
  Tile tiles[2];
  for (int32_t head = item.first_head; head < item.last_head; head++) {
    begin_head(w, a, item, head);
    int current = 0;
    if (item.keys.first < item.keys.last)
      fill(tiles[0], a, item.sequence, item.keys.first, item.keys.last);
    for (int32_t first = item.keys.first; first < item.keys.last; first += kMaxTile) {
      const Tile& tile = tiles[current];
      Tile& next = tiles[current ^= 1];
      const bool is_last = first + kMaxTile >= item.keys.last;
      if (!is_last) fill(next, a, item.sequence, first + kMaxTile, item.keys.last);
      attend_tile<Kind, Stored>(w, a, head, tile, is_last ? nullptr : &next);
    }
    end_head(w, a, item, scratch, head);
  }
}

}  // namespace TIERD_ISA
}  // namespace tierd
