// The two products of attention, scores = Q K^T and values += P V, for up to four rows at once
// with the lanes along the head dimension: a K or V row is loaded once for all of them.
//
// A kind says how numbers are multiplied: Singles as floats; those in pairs.h two to a lane.
#pragma once
#include "tile.h"

namespace tierd {
namespace TIERD_ISA {

constexpr int kRows = 4;

// Weights and scores of a row tile, [row][token].
struct alignas(64) Scores {
  float at[kRows][kMaxTile];
};

// Keys or values of one head of a tile.
template <class Element>
struct Tokens {
  const Element* base;
  const int64_t* offset;
  int dim;

  const Element* row(int i) const { return base + offset[i]; }
};

// Tokens of a tile: one head's keys and values, and the next one's, fit the first-level cache.
template <class Element>
constexpr int tile_size() {
  return sizeof(Element) == 1 ? 64 : 32;
}

// Of the time of a tile, in eighths: how long each step takes, to spread the fetching by.
constexpr int kDotTime = 3, kWeighTime = 1, kAddTime = 4;

// scores[r][i] = q[r] . k[i] for all tokens of a tile. kLanes sums are kept in registers, of R rows
// and kLanes / R tokens; then they are folded to one vector together.
template <class Kind, int R>
inline void dot_keys(Scores& scores, const typename Kind::Query* q,
                     const Tokens<typename Kind::Element>& keys, Ahead& ahead) {
  constexpr int kTokens = kLanes / R, kCount = tile_size<typename Kind::Element>();
  const int portion = ahead.portion(kDotTime, kCount / kTokens);
  for (int first = 0; first < kCount; first += kTokens) {
    typename Kind::Sums sum[kLanes];
    const typename Kind::Element* k[kTokens];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) sum[i] = typename Kind::Sums{};
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; i++) k[i] = keys.row(first + i);
    ahead.fetch(portion);
    for (int d = 0; d < keys.dim; d += Kind::kWidth) {
      typename Kind::Vector x[kTokens];
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; i++) x[i] = Kind::load_element(k[i] + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const auto y = Kind::load_query(q + r * keys.dim + d);
#pragma GCC unroll 16
        for (int i = 0; i < kTokens; i++)
          sum[r * kTokens + i] = Kind::dot(sum[r * kTokens + i], y, x[i]);
      }
    }
    Floats as_floats[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) as_floats[i] = Kind::to_floats(sum[i]);
    alignas(64) float folded[kLanes];
    store(folded, sums(as_floats));
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
      memcpy(scores.at[r] + first, folded + r * kTokens, sizeof(float) * kTokens);
  }
}

template <class Stored>
struct Singles {
  using Element = Stored;
  using Query = float;
  using Vector = Floats;
  using Sums = Floats;
  static constexpr int kWidth = kLanes;
  static constexpr bool kInterleaved = false;

  static Floats load_element(const Stored* from) { return load(from); }
  static Floats load_query(const float* from) { return load(from); }
  static Floats dot(Floats sum, Floats a, Floats b) { return multiply_add(a, b, sum); }
  static Floats to_floats(Floats x) { return x; }

  // The query as this kind multiplies it; returns what its scores are to be multiplied by.
  static float prepare(float* to, const float* q, int dim) {
    memcpy(to, q, sizeof(float) * dim);
    return 1;
  }

  template <int R, int N>
  static void add_columns(float* values, const Scores& weights, int d, const Tokens<Stored>& tokens,
                          Ahead& ahead, int portion) {
    Floats sum[R][N];
    for (int r = 0; r < R; r++)
      for (int j = 0; j < N; j++) sum[r][j] = load(values + r * tokens.dim + d + j * kLanes);
    for (int i = 0; i < tile_size<Stored>(); i++) {
      const Stored* v = tokens.row(i) + d;
      ahead.fetch(portion);
      Floats x[N];
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) x[j] = load(v + j * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++)
          sum[r][j] = multiply_add(splat(weights.at[r][i]), x[j], sum[r][j]);
    }
    for (int r = 0; r < R; r++)
      for (int j = 0; j < N; j++) store(values + r * tokens.dim + d + j * kLanes, sum[r][j]);
  }

  // values[r] += weights[r] . v, as many columns at a time as there are registers for.
  template <int R>
  static void add_values(float* values, const Scores& weights, const Tokens<Stored>& tokens,
                         Ahead& ahead) {
    constexpr int kColumns = kLanes == 16 ? 4 : 2;
    const int portion =
        ahead.portion(kAddTime, tile_size<Stored>() * tokens.dim / (kColumns * kLanes));
    int d = 0;
    for (; d + kColumns * kLanes <= tokens.dim; d += kColumns * kLanes)
      add_columns<R, kColumns>(values, weights, d, tokens, ahead, portion);
    for (; d < tokens.dim; d += kLanes)
      add_columns<R, 1>(values, weights, d, tokens, ahead, portion);
  }
};

}  // namespace TIERD_ISA
}  // namespace tierd
