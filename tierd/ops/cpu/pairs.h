// Kinds that multiply and add two 16-bit numbers per lane and step, at twice the rate of floats.
//
//   BfloatPairs   bf16 caches; q and the weights are rounded to bf16, sums are floats.
//   IntegerPairs  int8 caches; q and the weights become 16-bit fixed point, a scale per row, which
//                 is finer than bf16; sums are exact, below 2^7 * 2^15 * 512 = 2^31.
#pragma once
#include "dots.h"

namespace tierd {
namespace TIERD_ISA {

#if defined(__AVX2__)
// 16-bit numbers, two to a lane.
#if defined(__AVX512F__)
inline Ints wide(const int8_t* from) {
  return (Ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
}
inline Ints low_pairs(Ints a, Ints b) {
  return (Ints)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
}
inline Ints high_pairs(Ints a, Ints b) {
  return (Ints)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
}
inline Ints dot_integers(Ints sum, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
  return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
}
inline Ints rounded(Floats x) { return (Ints)_mm512_cvtps_epi32((__m512)x); }
#else
inline Ints wide(const int8_t* from) {
  return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
}
inline Ints low_pairs(Ints a, Ints b) {
  return (Ints)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
}
inline Ints high_pairs(Ints a, Ints b) {
  return (Ints)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
}
inline Ints dot_integers(Ints sum, Ints a, Ints b) {
  return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
inline Ints rounded(Floats x) { return (Ints)_mm256_cvtps_epi32((__m256)x); }
#endif

// What both kinds of pairs share: V rows of two tokens are interleaved, so that a lane holds one
// column of both. The instructions do that in runs of eight columns, and `values` stays in their
// order, low vector then high, until `restore_order`.
template <class Kind, class Stored>
struct Pairs {
  using Element = Stored;
  using Vector = Ints;
  static constexpr int kWidth = 2 * kLanes;
  static constexpr bool kInterleaved = true;

  template <int R, int N>  // N vectors of kWidth columns
  static void add_columns(float* values, const uint32_t (*weights)[kMaxTile / 2],
                          const float* factor, int d, const Tokens<Stored>& tokens, Ahead& ahead,
                          int portion) {
    typename Kind::Sums sum[R][2 * N];
    for (int r = 0; r < R; r++)
      for (int j = 0; j < 2 * N; j++)
        sum[r][j] = Kind::begin(values + r * tokens.dim + d + j * kLanes);
    for (int i = 0; i < tile_size<Stored>(); i += 2) {
      const Stored *even = tokens.row(i) + d, *odd = tokens.row(i + 1) + d;
      ahead.fetch(portion);
      Ints x[2 * N];
#pragma GCC unroll 2
      for (int j = 0; j < N; j++) {
        const Ints a = Kind::load_element(even + j * kWidth),
                   b = Kind::load_element(odd + j * kWidth);
        x[2 * j] = low_pairs(a, b);
        x[2 * j + 1] = high_pairs(a, b);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 2 * N; j++)
          sum[r][j] = Kind::dot(sum[r][j], Ints{} + (int32_t)weights[r][i / 2], x[j]);
    }
    for (int r = 0; r < R; r++)
      for (int j = 0; j < 2 * N; j++)
        Kind::end(values + r * tokens.dim + d + j * kLanes, sum[r][j], factor[r]);
  }

  template <int R>
  static void add_values(float* values, const Scores& weights, const Tokens<Stored>& tokens,
                         Ahead& ahead) {
    constexpr int kVectors = kLanes == 16 ? 2 : 1;
    const int portion =
        ahead.portion(kAddTime, tile_size<Stored>() / 2 * tokens.dim / (kVectors * kWidth));
    alignas(64) uint32_t pairs[R][kMaxTile / 2];
    float factor[R];
    for (int r = 0; r < R; r++) factor[r] = Kind::pair_up(pairs[r], weights.at[r]);
    int d = 0;
    for (; d + kVectors * kWidth <= tokens.dim; d += kVectors * kWidth)
      add_columns<R, kVectors>(values, pairs, factor, d, tokens, ahead, portion);
    for (; d < tokens.dim; d += kWidth)
      add_columns<R, 1>(values, pairs, factor, d, tokens, ahead, portion);
  }
};

struct IntegerPairs : Pairs<IntegerPairs, int8_t> {
  using Query = int16_t;
  using Sums = Ints;

  static Ints load_element(const int8_t* from) { return wide(from); }
  static Ints load_query(const int16_t* from) { return load_bits<Ints>(from); }
  static Ints dot(Ints sum, Ints a, Ints b) { return dot_integers(sum, a, b); }
  static Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

  static float prepare(int16_t* to, const float* q, int dim) {
    float most = 0;
    bool finite = true;
    for (int i = 0; i < dim; i++) {
      most = larger(most, fabsf(q[i]));
      finite &= fabsf(q[i]) < INFINITY;
    }
    const float factor = most / 32767, inverse = most > 0 ? 32767 / most : 0;
    for (int i = 0; i < dim; i++) to[i] = finite ? (int16_t)lrintf(q[i] * inverse) : 0;
    return finite ? factor : NAN;
  }

  static float pair_up(uint32_t* to, const float* weights) {
    Floats most = {};
    for (int i = 0; i < tile_size<int8_t>(); i += kLanes) most = larger(load(weights + i), most);
    const float top = largest(most);
    const Floats inverse = splat(top > 0 ? 32767 / top : 0);
    for (int i = 0; i < tile_size<int8_t>(); i += kLanes) {
      const Ints x = rounded(load(weights + i) * inverse);
      store_bits((uint16_t*)to + i, __builtin_convertvector((Words)x, Halves));
    }
    return top / 32767;
  }

  static Ints begin(const float*) { return Ints{}; }
  static void end(float* to, Ints sum, float factor) {
    store(to, multiply_add(to_floats(sum), splat(factor), load(to)));
  }
};
#endif

#if defined(__AVX512BF16__)
struct BfloatPairs : Pairs<BfloatPairs, Bfloat16> {
  using Query = Bfloat16;
  using Sums = Floats;

  static Ints load_element(const Bfloat16* from) { return load_bits<Ints>(from); }
  static Ints load_query(const Bfloat16* from) { return load_bits<Ints>(from); }
  static Floats dot(Floats sum, Ints a, Ints b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  static Floats to_floats(Floats x) { return x; }

  static float prepare(Bfloat16* to, const float* q, int dim) {
    for (int i = 0; i < dim; i += kLanes) store(to + i, load(q + i));
    return 1;
  }

  static float pair_up(uint32_t* to, const float* weights) {
    for (int i = 0; i < tile_size<Bfloat16>(); i += kLanes)
      store_bits((uint16_t*)to + i, (__m256i)_mm512_cvtneps_pbh((__m512)load(weights + i)));
    return 1;
  }

  static Floats begin(const float* from) { return load(from); }
  static void end(float* to, Floats sum, float) { store(to, sum); }
};
#endif

// From the order of Pairs to that of the columns.
inline void restore_order(float* values, int dim) {
  float x[2 * kLanes];
  for (int d = 0; d < dim; d += 2 * kLanes) {
    memcpy(x, values + d, sizeof x);
    for (int i = 0; i < kLanes; i += 4) {
      memcpy(values + d + 2 * i, x + i, 4 * sizeof(float));
      memcpy(values + d + 2 * i + 4, x + kLanes + i, 4 * sizeof(float));
    }
  }
}

}  // namespace TIERD_ISA
}  // namespace tierd
