// Vectors of kLanes floats in the instruction set that this file is compiled for.
//
// Everything lives in a namespace of that set's name: the same header is compiled several times
// into one library, and the linker keeps only one of two inline functions with one name. For the
// same reason no templates of the standard library are used below this point.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace tierd {
namespace TIERD_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;  // not 16: GCC spills wider vectors than the machine has
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};

template <class Vector>
inline Vector load_bits(const void* from) {
  Vector x;
  memcpy(&x, from, sizeof x);
  return x;
}
template <class Vector>
inline void store_bits(void* to, Vector x) {
  memcpy(to, &x, sizeof x);
}

inline Floats splat(float x) { return Floats{} + x; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats where(Ints condition, Floats a, Floats b) { return condition ? a : b; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
inline float larger(float a, float b) { return a > b ? a : b; }

inline Ints lane_numbers() {
  Ints x;
  for (int i = 0; i < kLanes; i++) x[i] = i;
  return x;
}

// ---- Loads: any stored type as floats ----

inline Words widen(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  return __builtin_convertvector(load_bits<Halves>(from), Words);
#endif
}

inline Words widen(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return __builtin_convertvector(load_bits<Bytes>(from), Words);
#endif
}

// A small float's magnitude, shifted so that its mantissa is in place, times 2^(difference of the
// exponents' biases): right for subnormals too. All ones in the exponent are left to the caller.
inline Floats rescale_magnitude(Words shifted, float power) {
  return (Floats)shifted * splat(power);
}

inline Floats with_sign(Floats magnitude, Words sign) { return (Floats)((Words)magnitude | sign); }

inline Floats load(const float* from) { return load_bits<Floats>(from); }

inline Floats load(const Bfloat16* from) { return (Floats)(widen(&from->bits) << 16); }

inline Floats load(const Float16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  Words x = widen(&from->bits), magnitude = x & 0x7fff;
  Floats y = rescale_magnitude(magnitude << 13, 0x1p112f);
  Words special = (Words)(magnitude >= 0x7c00) & 0x7f800000;
  return with_sign((Floats)((Words)y | special), (x & 0x8000) << 16);
#endif
}

inline Floats load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  return __builtin_convertvector(load_bits<SignedBytes>(from), Floats);
#endif
}

inline Floats load(const E4m3* from) {
  Words x = widen(&from->bits), magnitude = x & 0x7f;
  Words y = (Words)rescale_magnitude(magnitude << 20, 0x1p120f);
  Words nan = (Words)(magnitude == 0x7f) & 0x7fc00000;  // there is no infinity
  return with_sign((Floats)(y | nan), (x & 0x80) << 24);
}

inline Floats load(const E5m2* from) {
  Words x = widen(&from->bits), magnitude = x & 0x7f;
  Words y = (Words)rescale_magnitude(magnitude << 21, 0x1p112f);
  Words special = (Words)(magnitude >= 0x7c) & 0x7f800000;
  return with_sign((Floats)(y | special), (x & 0x80) << 24);
}

// ---- Stores: floats rounded to nearest, ties to even ----

inline Words rounded_to_bfloat16(Floats x) {  // the bits, in the low half of each word
  Words bits = (Words)x;
  Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (x == x) ? rounded : Words{} + 0x7fc0;
}

inline void store(float* to, Floats x) { store_bits(to, x); }

inline void store(Bfloat16* to, Floats x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)rounded_to_bfloat16(x)));
#else
  store_bits(to, __builtin_convertvector(rounded_to_bfloat16(x), Halves));
#endif
}

inline void store(Float16* to, Floats x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, 0));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, 0));
#else
  // Adding a power of two rounds the magnitude at the place where float16 ends: 13 bits below its
  // own exponent, or at 2^-24 where float16 is subnormal. 65520 and more are infinity.
  Words sign = (Words)x & 0x80000000, magnitude = (Words)x & 0x7fffffff;
  Words normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  Words subnormal = (Words)((Floats)magnitude + splat(0.5f)) - 0x3f000000;
  Words y = (magnitude < 0x38800000) ? subnormal : normal;
  y = (magnitude >= 0x477ff000) ? Words{} + 0x7c00 : y;
  y = (magnitude > 0x7f800000) ? Words{} + 0x7e00 : y;
  store_bits(to, __builtin_convertvector(y | (sign >> 16), Halves));
#endif
}

// ---- Across lanes ----

inline float largest(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float y = x[0];
  for (int i = 1; i < kLanes; i++) y = larger(y, x[i]);
  return y;
#endif
}

inline float sum(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float y = 0;
  for (int i = 0; i < kLanes; i++) y += x[i];
  return y;
#endif
}

// kLanes vectors to one: lane i holds the sum of vector i.
inline Floats sums(const Floats* x) {
#if defined(__AVX512F__)
  __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    __m512 u = (__m512)x[2 * i], w = (__m512)x[2 * i + 1];
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(u, w), _mm512_unpackhi_ps(u, w));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    b[i] = _mm512_add_ps(_mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44),
                         _mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  return (Floats)_mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88),
                               _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
#elif defined(__AVX2__)
  auto four = [&](int i) {
    return _mm256_hadd_ps(_mm256_hadd_ps((__m256)x[i], (__m256)x[i + 1]),
                          _mm256_hadd_ps((__m256)x[i + 2], (__m256)x[i + 3]));
  };
  __m256 low = four(0), high = four(4);
  return (Floats)_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                               _mm256_permute2f128_ps(low, high, 0x31));
#else
  Floats y;
  for (int i = 0; i < kLanes; i++) y[i] = sum(x[i]);
  return y;
#endif
}

// ---- Functions ----

// e^x for x <= 0, within 2 units in the last place; 0 for -inf, NaN for NaN.
inline Floats exponential(Floats x) {
  const Floats log2e = splat(1.44269504088896341f), least = splat(-104.0f);
  x = (x < least) ? least : x;
  Floats y = x * log2e;
#if defined(__AVX512F__)
  Floats whole = (Floats)_mm512_roundscale_ps((__m512)y, 8);
#else
  Floats whole = (y + splat(0x1.8p23f)) - splat(0x1.8p23f);
#endif
  Floats r = y - whole, p = splat(1.5353362e-4f);
  p = multiply_add(p, r, splat(1.3398874e-3f));
  p = multiply_add(p, r, splat(9.6180299e-3f));
  p = multiply_add(p, r, splat(5.5503324e-2f));
  p = multiply_add(p, r, splat(2.4022650e-1f));
  p = multiply_add(p, r, splat(6.9314718e-1f));
  p = multiply_add(p, r, splat(1.0f));
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  Floats power = (Floats)((__builtin_convertvector(whole, Ints) + 127) << 23);
  return (x < splat(-87.0f)) ? Floats{} : p * power;
#endif
}

inline Floats soft_capped(Floats x, float cap) {  // cap * tanh(x / cap)
  Floats y = x * splat(1.0f / cap);
  Floats e = exponential((Floats)((Words)y | 0x80000000) * splat(2.0f));
  Floats magnitude = (splat(1.0f) - e) / (splat(1.0f) + e) * splat(cap);
  return with_sign(magnitude, (Words)y & 0x80000000);
}

// Into the first-level cache: a tile and the next one fit, and Zen 5 is slower with the second.
inline void prefetch(const void* from, int64_t nbytes) {
  for (int64_t i = 0; i < nbytes; i += 64) __builtin_prefetch((const char*)from + i, 0, 3);
}

}  // namespace TIERD_ISA
}  // namespace tierd
