// The kernels of one instruction set: compiled once for each, with TIERD_ISA its name.
#include "few_rows.h"
#include "many_rows.h"

namespace tierd {
namespace TIERD_ISA {
namespace {

void any_few_rows(const Arguments& a, const Item& item, const Item* then, const Scratch& scratch) {
  // Pairs are for results of 16 bits, where their rounding does not show, and need whole vectors.
  const bool pairs =
      a.q_dtype != kFloat32 && a.head_dim % (2 * kLanes) == 0 && a.v_dim % (2 * kLanes) == 0;
  switch (a.cache_dtype) {
    case kFloat32:
      return few_rows<Singles<float>>(a, item, then, scratch);
    case kBfloat16:
#if defined(__AVX512BF16__)
      if (pairs) return few_rows<BfloatPairs>(a, item, then, scratch);
#endif
      return few_rows<Singles<Bfloat16>>(a, item, then, scratch);
    case kFloat16:
      return few_rows<Singles<Float16>>(a, item, then, scratch);
    case kInt8:
#if defined(__AVX2__)
      if (pairs) return few_rows<IntegerPairs>(a, item, then, scratch);
#endif
      return few_rows<Singles<int8_t>>(a, item, then, scratch);
    case kFloat8E4m3:
      return few_rows<Singles<E4m3>>(a, item, then, scratch);
    case kFloat8E5m2:
      return few_rows<Singles<E5m2>>(a, item, then, scratch);
  }
  (void)pairs;
}

template <class Kind>
void many_rows_of(const Arguments& a, const Item& item, const Scratch& scratch) {
  switch (a.cache_dtype) {
    case kFloat32:
      return many_rows<Kind, float>(a, item, scratch);
    case kBfloat16:
      return many_rows<Kind, Bfloat16>(a, item, scratch);
    case kFloat16:
      return many_rows<Kind, Float16>(a, item, scratch);
    case kInt8:
      return many_rows<Kind, int8_t>(a, item, scratch);
    case kFloat8E4m3:
      return many_rows<Kind, E4m3>(a, item, scratch);
    case kFloat8E5m2:
      return many_rows<Kind, E5m2>(a, item, scratch);
  }
}

void any_many_rows(const Arguments& a, const Item& item, const Scratch& scratch) {
#if defined(__AVX512BF16__)
  // Types of 8 bits are exact in bf16; float16 is not.
  if (a.q_dtype == kBfloat16 && a.cache_dtype != kFloat16)
    return many_rows_of<BfloatPacked>(a, item, scratch);
#endif
  many_rows_of<Floating>(a, item, scratch);
}

void merge(const Arguments& a, const Item& item, const Scratch& scratch) {
  for (int32_t h = item.first_head; h < item.last_head; h++)
    for (int32_t r = item.first_row; r < item.last_row; r++) merge_row(a, item, scratch, h, r);
}

int64_t workspace_nbytes(const Arguments& a) {
  const int64_t few = few_rows_nbytes(a), many = ManyRows<Floating>::nbytes(a);
  return few > many ? few : many;
}

#define TIERD_TEXT(x) #x
#define TIERD_NAME(x) TIERD_TEXT(x)
}  // namespace

extern const Kernels kernels;
const Kernels kernels = {TIERD_NAME(TIERD_ISA), workspace_nbytes, any_few_rows, any_many_rows,
                         merge};

}  // namespace TIERD_ISA
}  // namespace tierd
