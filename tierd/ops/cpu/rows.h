// Where a row of q comes from and where its result goes.
#pragma once
#include "vector.h"
#include "work.h"

namespace tierd {
namespace TIERD_ISA {

struct RowPlace {
  int64_t token;     // of q and out
  int32_t head;      // query head
  int32_t position;  // in the sequence

  RowPlace(const Arguments& a, const Sequence& s, int32_t kv_head, int32_t row) {
    const int32_t group = a.group(), query = row / group;
    token = s.first_token + query;
    head = kv_head * group + row % group;
    position = s.position(query);
  }
};

template <class Stored>
inline void to_floats(float* to, const void* from, int64_t offset, int n) {
  const Stored* start = (const Stored*)from + offset;
  for (int i = 0; i < n; i += kLanes) store(to + i, load(start + i));
}

inline void load_query(float* to, const Arguments& a, const RowPlace& place) {
  const int64_t offset = place.token * a.q_token + place.head * a.q_head;
  if (a.q_dtype == kFloat32) to_floats<float>(to, a.q, offset, a.head_dim);
  if (a.q_dtype == kBfloat16) to_floats<Bfloat16>(to, a.q, offset, a.head_dim);
  if (a.q_dtype == kFloat16) to_floats<Float16>(to, a.q, offset, a.head_dim);
}

template <class Stored>
inline void store_scaled(void* to, int64_t offset, const float* from, float factor, int n) {
  Stored* start = (Stored*)to + offset;
  for (int i = 0; i < n; i += kLanes) store(start + i, load(from + i) * splat(factor));
}

// Divide the values by the sum of the weights, of which a sink is one more, and write the row.
inline void finish_row(const Arguments& a, const RowPlace& place, float max, float sum,
                       const float* values) {
  float factor = 1;
  if (a.sinks) {
    const float sink = a.sinks[place.head], both = larger(max, sink);
    factor = expf(max - both);  // 0 where no key was seen
    sum = sum * factor + expf(sink - both);
    max = both;
  }
  factor = sum == 0 ? 0 : factor / sum;
  const int64_t offset = place.token * a.out_token + place.head * a.out_head;
  if (a.q_dtype == kFloat32) store_scaled<float>(a.out, offset, values, factor, a.v_dim);
  if (a.q_dtype == kBfloat16) store_scaled<Bfloat16>(a.out, offset, values, factor, a.v_dim);
  if (a.q_dtype == kFloat16) store_scaled<Float16>(a.out, offset, values, factor, a.v_dim);
  if (a.lse) a.lse[place.token * a.lse_token + place.head * a.lse_head] = max + logf(sum);
}

inline Part* part_of(const Arguments& a, const Item& item, const Scratch& scratch, int32_t kv_head,
                     int32_t row, int chunk) {
  const int32_t num_rows = item.sequence.num_queries * a.group();
  const int64_t index = ((int64_t)kv_head * num_rows + row) * item.num_chunks + chunk;
  return (Part*)(scratch.parts + item.first_part + index * part_floats(a));
}

// A row's sums over the item's keys are done: to the output, or to its part.
inline void put_row(const Arguments& a, const Item& item, const Scratch& scratch, int32_t kv_head,
                    int32_t row, float max, float sum, const float* values) {
  if (item.num_chunks == 1) {
    finish_row(a, RowPlace(a, item.sequence, kv_head, row), max, sum, values);
    return;
  }
  Part* part = part_of(a, item, scratch, kv_head, row, item.chunk);
  part->max = max;
  part->sum = sum;
  memcpy(part->values, values, sizeof(float) * a.v_dim);
}

// Parts are merged in the order of their keys, whoever made them.
inline void merge_row(const Arguments& a, const Item& item, const Scratch& scratch, int32_t kv_head,
                      int32_t row) {
  float* values = (float*)scratch.workspace;
  float max = -INFINITY, sum = 0;
  for (int c = 0; c < item.num_chunks; c++)
    max = larger(max, part_of(a, item, scratch, kv_head, row, c)->max);
  for (int d = 0; d < a.v_dim; d++) values[d] = 0;
  for (int c = 0; c < item.num_chunks; c++) {
    const Part* part = part_of(a, item, scratch, kv_head, row, c);
    const float weight = part->max == -INFINITY ? (part->sum == 0 ? 0 : 1) : expf(part->max - max);
    sum += weight * part->sum;
    for (int d = 0; d < a.v_dim; d += kLanes)
      store(values + d, multiply_add(splat(weight), load(part->values + d), load(values + d)));
  }
  finish_row(a, RowPlace(a, item.sequence, kv_head, row), max, sum, values);
}

}  // namespace TIERD_ISA
}  // namespace tierd
