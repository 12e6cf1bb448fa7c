// The op's entry: check what the integer tensors hold, cut the batch into items, let the threads of
// the caller's OpenMP pool take them. Knows no instruction set but to choose one.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "work.h"

namespace tierd {
namespace {

constexpr int32_t kFewRowsChunk = 512;    // keys of an item when the rows are few
constexpr int32_t kManyRowsChunk = 2048;  // and when there are more, but a single tile of them

enum Status : int32_t { kDone, kWrongValues, kNoSuchIsa, kNoMemory };

bool has(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has(kAvx2);
    case kAvx512Bf16:
      return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
             has(kAvx512);
    default:
      return isa == kGeneric;
  }
#else
  return isa == kGeneric;
#endif
}

const Kernels* kernels_of(Isa isa) {
  if (!has(isa)) return nullptr;
  switch (isa) {
#if defined(__x86_64__)
    case kAvx512Bf16:
      return &avx512bf16::kernels;
    case kAvx512:
      return &avx512::kernels;
    case kAvx2:
      return &avx2::kernels;
#endif
    default:
      return &generic::kernels;
  }
}

const Kernels* choose(int32_t isa) {
  if (isa != kBest) return kernels_of((Isa)isa);
  static const Kernels* const best = [] {
    for (Isa each : {kAvx512Bf16, kAvx512, kAvx2})
      if (const Kernels* found = kernels_of(each)) return found;
    return &generic::kernels;
  }();
  return best;
}

Sequence sequence_of(const Arguments& a, int32_t index) {
  const int32_t start = a.cu_seqlens_q[index];
  return {index, start, a.cu_seqlens_q[index + 1] - start, a.seq_lens[index]};
}

bool right_values(const Arguments& a, const Sequence& s, int32_t start) {
  if (s.first_token != start || s.num_queries < 0 || s.num_queries > a.max_seqlen_q) return false;
  if (s.num_keys < 0 || (s.num_keys > 0 && s.num_keys < s.num_queries)) return false;
  if (s.num_keys > a.table_width * a.block_size) return false;
  const int32_t first = s.num_keys ? visible(a, s, s.position(0)).first / a.block_size : 0;
  const int32_t last = (int32_t)(((int64_t)s.num_keys + a.block_size - 1) / a.block_size);
  const int32_t* row = a.block_table + s.index * a.table_row;
  uint32_t largest = 0;  // a negative id is a large one
  for (int32_t i = first; i < last; i++) largest = std::max(largest, (uint32_t)row[i]);
  return first >= last || largest < (uint64_t)a.num_blocks;
}

bool right_values(const Arguments& a) {
  int32_t start = 0;
  for (int32_t b = 0; b < a.batch_size; b++) {
    const Sequence s = sequence_of(a, b);
    if (!right_values(a, s, start)) return false;
    start = s.first_token + s.num_queries;
  }
  return (a.batch_size ? start : 0) == a.num_tokens && a.cu_seqlens_q[0] == 0;
}

// The items of a call, in the order in which they are taken, and room for the parts of rows.
class Plan {
 public:
  void make(const Arguments& a) {
    items_.clear();
    merges_.clear();
    int64_t num_floats = 0;
    for (int32_t b = 0; b < a.batch_size; b++) add(a, sequence_of(a, b), num_floats);
    if ((int64_t)parts_.size() < num_floats) parts_.resize(num_floats);
    share_heads(a);
  }

  const std::vector<Item>& items() const { return items_; }
  const std::vector<Item>& merges() const { return merges_; }
  float* parts() { return parts_.data(); }

 private:
  void add(const Arguments& a, const Sequence& s, int64_t& num_floats) {
    const int32_t num_rows = s.num_queries * a.group();
    const bool few = num_rows <= kFewRows;
    for (int32_t row = 0; row < num_rows; row += kRowTile) {
      const int32_t last_row = std::min(num_rows, row + kRowTile);
      Item item = {s, 0, a.num_kv_heads, row, last_row, keys_of(a, s, row, last_row),
                   0, 1, num_floats};
      // One tile of rows is cut along its keys; several are work enough for all threads.
      if (num_rows <= kRowTile)
        num_floats += cut(a, item, few ? kFewRowsChunk : kManyRowsChunk);
      else
        items_.push_back(item);
    }
  }

  static Keys keys_of(const Arguments& a, const Sequence& s, int32_t row, int32_t last_row) {
    if (s.num_keys == 0) return {0, 0};
    return {visible(a, s, s.position(row / a.group())).first,
            visible(a, s, s.position((last_row - 1) / a.group())).last};
  }

  // Returns the floats that the parts need.
  int64_t cut(const Arguments& a, Item item, int32_t chunk) {
    const Keys all = item.keys;
    item.num_chunks = std::max(1, (all.last - all.first + chunk - 1) / chunk);
    for (item.chunk = 0; item.chunk < item.num_chunks; item.chunk++) {
      item.keys.first = all.first + item.chunk * chunk;
      item.keys.last = std::min(all.last, item.keys.first + chunk);
      items_.push_back(item);
    }
    if (item.num_chunks == 1) return 0;
    merges_.push_back(item);
    return (int64_t)a.num_kv_heads * item.last_row * item.num_chunks * part_floats(a);
  }

  // Few items for many threads: cut each by heads too.
  void share_heads(const Arguments& a) {
    const int64_t wanted = 4 * (int64_t)a.num_threads;
    const int64_t now = (int64_t)items_.size();
    if (now == 0 || now >= wanted || a.num_kv_heads == 1) return;
    const int32_t pieces = (int32_t)std::min<int64_t>(a.num_kv_heads, (wanted + now - 1) / now);
    const int32_t heads = (a.num_kv_heads + pieces - 1) / pieces;
    whole_.swap(items_);
    items_.clear();
    for (Item item : whole_)
      for (int32_t h = 0; h < a.num_kv_heads; h += heads) {
        item.first_head = h;
        item.last_head = std::min(a.num_kv_heads, h + heads);
        items_.push_back(item);
      }
  }

  std::vector<Item> items_, merges_, whole_;
  std::vector<float> parts_;
};

// Scratch of one thread, kept between calls.
char* workspace(int64_t nbytes) {
  struct Room {
    char* memory = nullptr;
    int64_t nbytes = 0;
    ~Room() { free(memory); }
  };
  thread_local Room room;
  if (room.nbytes < nbytes) {
    free(room.memory);
    room.nbytes = 0;
    room.memory = (char*)aligned_alloc(64, (nbytes + 63) / 64 * 64);
    if (room.memory) room.nbytes = nbytes;
  }
  return room.memory;
}

bool is_few(const Arguments& a, const Item& item) {
  return item.sequence.num_queries * a.group() <= kFewRows;
}

bool can_be_fetched(const Arguments& a, const Item& item, const Item& then) {
  return is_few(a, then) && then.keys.first < then.keys.last &&
         then.last_head - then.first_head == item.last_head - item.first_head;
}

void attend(const Arguments& a, const Kernels& kernels, const Item& item, const Item* then,
            const Scratch& scratch) {
  if (!is_few(a, item)) return kernels.many_rows(a, item, scratch);
  kernels.few_rows(a, item, then && can_be_fetched(a, item, *then) ? then : nullptr, scratch);
}

bool run(const Arguments& a, const Kernels& kernels, Plan& plan) {
  const int64_t nbytes = kernels.workspace_nbytes(a);
  const std::vector<Item>&items = plan.items(), &merges = plan.merges();
  const int64_t num_items = (int64_t)items.size(), num_merges = (int64_t)merges.size();
  const int threads = (int)std::max<int64_t>(1, std::min<int64_t>(a.num_threads, num_items));
  std::atomic<int64_t> taken{0};
  bool done = true;
#pragma omp parallel num_threads(threads) reduction(&& : done)
  {
    const Scratch scratch = {plan.parts(), workspace(nbytes)};
    done = done && scratch.workspace;
    // A thread takes an item before it begins the one it has, to know what to fetch at its end.
    for (int64_t next = taken++; next < num_items && done;) {
      const Item& item = items[next];
      next = taken++;
      attend(a, kernels, item, next < num_items ? &items[next] : nullptr, scratch);
    }
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_merges; i++)
      if (done) kernels.merge(a, merges[i], scratch);
  }
  return done;
}

}  // namespace
}  // namespace tierd

#define TIERD_API extern "C" __attribute__((visibility("default")))

TIERD_API int32_t tierd_paged_attention(const tierd::Arguments* a) {
  using namespace tierd;
  const Kernels* kernels = choose(a->isa);
  if (!kernels) return kNoSuchIsa;
  if (!right_values(*a)) return kWrongValues;
  try {
    thread_local Plan plan;
    plan.make(*a);
    return run(*a, *kernels, plan) ? kDone : kNoMemory;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

// The name of the instruction set that a call with this `isa` uses, or null.
TIERD_API const char* tierd_isa_name(int32_t isa) {
  const tierd::Kernels* kernels = tierd::choose(isa);
  return kernels ? kernels->name : nullptr;
}
