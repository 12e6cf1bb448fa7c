// A call cut into items, each the work of one thread at a time.
//
// How a sequence is cut follows from its own lengths only, never from the batch or the number of
// threads, and each row's sums are taken in one order; so its result is the same bits in any
// company. Cutting by heads is free: heads share nothing.
//
// A row is one query head of one query token, as seen from its KV head:
//     row = query token of the sequence * group + query head within the group
#pragma once
#include "arguments.h"

namespace tierd {

struct Sequence {
  int32_t index;
  int32_t first_token;  // row of q and out
  int32_t num_queries;
  int32_t num_keys;

  int32_t position(int32_t query) const { return num_keys - num_queries + query; }
};

struct Keys {
  int32_t first, last;
};

// The keys that a query at this position may see.
inline Keys visible(const Arguments& a, const Sequence& s, int32_t position) {
  int32_t first = a.window_left >= 0 ? position - a.window_left : 0;
  return {first > 0 ? first : 0, a.causal ? position + 1 : s.num_keys};
}

struct Item {
  Sequence sequence;
  int32_t first_head, last_head;  // KV heads
  int32_t first_row, last_row;    // of each of these heads
  Keys keys;
  int32_t chunk, num_chunks;  // of the sequence's keys
  // With several chunks: where in the scratch the sequence's parts begin, [Hkv, rows, num_chunks]
  // of part_floats. With one, the item writes to out and lse itself.
  int64_t first_part;
};

struct Scratch {
  float* parts;     // shared by all items of a call
  char* workspace;  // of the thread; 64-byte aligned
};

// The unfinished sum of a row over some keys: sum of weights exp(score - max), and of weight * v.
struct Part {
  float max, sum;
  float values[1];  // v_dim
};

inline int64_t part_floats(const Arguments& a) { return a.v_dim + 2; }

// What one instruction set offers.
struct Kernels {
  const char* name;
  int64_t (*workspace_nbytes)(const Arguments&);
  // `then` is what the thread does next, if that is few rows of as many heads, else null.
  void (*few_rows)(const Arguments&, const Item&, const Item* then, const Scratch&);
  void (*many_rows)(const Arguments&, const Item&, const Scratch&);
  // Merge the parts of rows [first_row, last_row) of the item's heads, and write them.
  void (*merge)(const Arguments&, const Item&, const Scratch&);
};

// few_rows takes up to this many; many_rows any number up to kRowTile.
constexpr int32_t kFewRows = 8;
constexpr int32_t kRowTile = 64;

namespace generic {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512bf16 {
extern const Kernels kernels;
}

}  // namespace tierd
