// Decode: few rows share each key, so the time goes into reading the cache once, in order of
// memory. All heads of a tile of tokens are done before the next tile, because the heads of a block
// lie together; meanwhile the next tile is fetched, be it the next item's first.
#pragma once
#include "pairs.h"
#include "rows.h"

namespace tierd {
namespace TIERD_ISA {

// What a row of q carries along its keys.
struct Row {
  Floats sum;  // per lane; added up at the end
  float max;
  float factor;  // from dot product to score
  float slope;
  int32_t position;
  Keys keys;  // visible
};

struct FewRows {  // scratch of one item, rows counted from its first head
  float* values;  // [rows][v_dim]
  void* query;    // [rows][head_dim] of the kind's Query
  Row* rows;
};

// Rows per head, such that tiles of four, two and one row make them up.
inline int32_t padded_rows(const Item& item) {
  const int32_t n = item.last_row - item.first_row;
  return n % kRows == 3 ? n + 1 : n;
}

inline void make_row(Row& row, const Arguments& a, const Item& item, const RowPlace& place) {
  row.sum = Floats{};
  row.max = -INFINITY;
  row.slope = a.alibi_slopes ? a.alibi_slopes[place.head] : 0;
  row.position = place.position;
  row.keys = visible(a, item.sequence, place.position);
}

// Scores, in place, from the dot products of a row: everything that is done to them by position.
template <int kTile>
inline void score_row(const Arguments& a, const Row& row, const Tile& tile, const float* k_scale,
                      float* s) {
  const bool all_seen = tile.first >= row.keys.first && tile.first + tile.count <= row.keys.last &&
                        tile.count == kTile;
  const int32_t last = smaller(row.keys.last, tile.first + tile.count);
  for (int i = 0; i < kTile; i += kLanes) {
    Floats x = load(s + i) * splat(row.factor);
    if (k_scale) x *= load(k_scale + i);
    if (a.softcap > 0) x = soft_capped(x, a.softcap);
    const Ints position = lane_numbers() + (tile.first + i);
    if (a.alibi_slopes)
      x += splat(row.slope) * __builtin_convertvector(position - row.position, Floats);
    if (!all_seen) x = where((position >= row.keys.first) & (position < last), x, splat(-INFINITY));
    store(s + i, x);
  }
}

// One step of the online softmax: scores to weights exp(score - max), in place. Returns what the
// sums so far must be multiplied by.
template <int kTile>
inline float weigh_row(Row& row, float* s) {
  Floats most = splat(-INFINITY);
  for (int i = 0; i < kTile; i += kLanes) most = larger(load(s + i), most);
  const float old = row.max;
  row.max = larger(largest(most), old);
  // No key yet: any finite maximum makes weights of 0 here, and of NaN if the scores are NaN.
  const Floats max = splat(row.max == -INFINITY ? 0 : row.max);
  float decay = 1;
  if (row.max > old) {
    decay = old == -INFINITY ? 0 : expf(old - row.max);
    row.sum *= splat(decay);
  }
  for (int i = 0; i < kTile; i += kLanes) {
    const Floats weight = exponential(load(s + i) - max);
    row.sum += weight;
    store(s + i, weight);
  }
  return decay;
}

template <class Kind, int R>
inline void attend_rows(const Arguments& a, const Tile& tile, const Scales* scales, Row* rows,
                        const typename Kind::Query* query, float* values,
                        const Tokens<typename Kind::Element>& keys,
                        const Tokens<typename Kind::Element>& tokens, Ahead& ahead) {
  constexpr int kTile = tile_size<typename Kind::Element>();
  Scores scores;
  dot_keys<Kind, R>(scores, query, keys, ahead);
  for (int r = 0; r < R; r++) {
    float* s = scores.at[r];
    score_row<kTile>(a, rows[r], tile, scales ? scales->k : nullptr, s);
    const float decay = weigh_row<kTile>(rows[r], s);
    ahead.fetch(ahead.portion(kWeighTime, R));
    if (decay != 1)
      for (int d = 0; d < a.v_dim; d += kLanes)
        store(values + r * a.v_dim + d, load(values + r * a.v_dim + d) * splat(decay));
    if (scales)
      for (int i = 0; i < kTile; i += kLanes) store(s + i, load(s + i) * load(scales->v + i));
  }
  Kind::template add_values<R>(values, scores, tokens, ahead);
}

template <class Kind>
inline void attend_head(const Arguments& a, const Tile& tile, const Scales* scales,
                        int32_t num_rows, Row* rows, const typename Kind::Query* query,
                        float* values, const Tokens<typename Kind::Element>& keys,
                        const Tokens<typename Kind::Element>& tokens, Ahead& ahead) {
  for (int32_t r = 0; r < num_rows; r += kRows) {
    const typename Kind::Query* q = query + (int64_t)r * a.head_dim;
    float* v = values + (int64_t)r * a.v_dim;
    if (num_rows - r == 1)
      attend_rows<Kind, 1>(a, tile, scales, rows + r, q, v, keys, tokens, ahead);
    else if (num_rows - r == 2)
      attend_rows<Kind, 2>(a, tile, scales, rows + r, q, v, keys, tokens, ahead);
    else
      attend_rows<Kind, 4>(a, tile, scales, rows + r, q, v, keys, tokens, ahead);
  }
}

template <class Kind>
inline FewRows begin_rows(const Arguments& a, const Item& item, char* workspace) {
  const int32_t padded = padded_rows(item), heads = item.last_head - item.first_head;
  FewRows w;
  w.rows = (Row*)workspace;
  w.values = (float*)(w.rows + (int64_t)heads * padded);
  w.query = w.values + (int64_t)heads * padded * a.v_dim;
  memset(w.values, 0, sizeof(float) * heads * padded * a.v_dim);
  float q[512];
  for (int32_t i = 0; i < heads * padded; i++) {
    // Rows that pad a tile repeat the last one; nobody reads their result.
    const int32_t row = smaller(item.first_row + i % padded, item.last_row - 1);
    const RowPlace place(a, item.sequence, item.first_head + i / padded, row);
    make_row(w.rows[i], a, item, place);
    load_query(q, a, place);
    typename Kind::Query* to = (typename Kind::Query*)w.query + (int64_t)i * a.head_dim;
    w.rows[i].factor = a.scale * Kind::prepare(to, q, a.head_dim);
  }
  return w;
}

template <class Kind>
inline void end_rows(const Arguments& a, const Item& item, const Scratch& scratch,
                     const FewRows& w) {
  const int32_t padded = padded_rows(item);
  for (int32_t h = item.first_head; h < item.last_head; h++)
    for (int32_t r = item.first_row; r < item.last_row; r++) {
      const int64_t i = (int64_t)(h - item.first_head) * padded + (r - item.first_row);
      float* values = w.values + i * a.v_dim;
      if (Kind::kInterleaved) restore_order(values, a.v_dim);
      put_row(a, item, scratch, h, r, w.rows[i].max, sum(w.rows[i].sum), values);
    }
}

template <class Kind>
void few_rows(const Arguments& a, const Item& item, const Item* then, const Scratch& scratch) {
  using Element = typename Kind::Element;
  using Query = typename Kind::Query;
  constexpr int kTile = tile_size<Element>();
  const int32_t padded = padded_rows(item);
  const FewRows w = begin_rows<Kind>(a, item, scratch.workspace);
  Tile tiles[2];
  Scales scales;
  Ahead ahead;
  int current = 0;
  if (item.keys.first < item.keys.last)
    fill(tiles[0], a, item.sequence, item.keys.first, item.keys.last, kTile);
  for (int32_t first = item.keys.first; first < item.keys.last; first += kTile) {
    const Tile& tile = tiles[current];
    Tile& next = tiles[current ^= 1];
    const bool is_last = first + kTile >= item.keys.last;
    const Item* owner = is_last ? then : &item;  // of the next tile
    if (owner) {
      const int32_t next_first = is_last ? then->keys.first : first + kTile;
      fill(next, a, owner->sequence, next_first, owner->keys.last, kTile);
    }
    for (int32_t h = item.first_head; h < item.last_head; h++) {
      if (owner) ahead.list(a, next, *owner, sizeof(Element), h - item.first_head);
      const Tokens<Element> keys{(const Element*)a.k + h * a.k_head, tile.k, a.head_dim};
      const Tokens<Element> values{(const Element*)a.v + h * a.v_head, tile.v, a.v_dim};
      if (a.k_scale) scales.gather(a, tile, h, kTile);
      const int64_t row = (int64_t)(h - item.first_head) * padded;
      attend_head<Kind>(a, tile, a.k_scale ? &scales : nullptr, padded, w.rows + row,
                        (const Query*)w.query + row * a.head_dim, w.values + row * a.v_dim, keys,
                        values, ahead);
    }
  }
  end_rows<Kind>(a, item, scratch, w);
}

inline int64_t few_rows_nbytes(const Arguments& a) {
  const int64_t rows = (int64_t)a.num_kv_heads * kFewRows;
  return rows * (sizeof(Row) + sizeof(float) * (a.head_dim + a.v_dim));
}

}  // namespace TIERD_ISA
}  // namespace tierd
