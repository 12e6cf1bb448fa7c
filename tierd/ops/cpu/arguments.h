// One call of the attention op as C sees it: plain numbers and pointers, in the order in which
// cpp.py packs them. Strides are in elements. Nothing here knows torch or an instruction set.
#pragma once
#include <cstdint>

namespace tierd {

enum Dtype : int32_t { kFloat32, kBfloat16, kFloat16, kInt8, kFloat8E4m3, kFloat8E5m2 };

enum Isa : int32_t { kBest, kGeneric, kAvx2, kAvx512, kAvx512Bf16 };

struct Arguments {
  void* out;             // [T, Hq, Dv]
  float* lse;            // [T, Hq], or null
  const void* q;         // [T, Hq, D]
  const void* k;         // [num_blocks, Hkv, block_size, D]
  const void* v;         // [num_blocks, Hkv, block_size, Dv]
  const float* k_scale;  // [num_blocks, Hkv, block_size], or null
  const float* v_scale;
  const int32_t* block_table;   // [B, table_width]
  const int32_t* seq_lens;      // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  const float* alibi_slopes;    // [Hq], or null
  const float* sinks;           // [Hq], or null

  int64_t out_token, out_head;
  int64_t lse_token, lse_head;
  int64_t q_token, q_head;
  int64_t k_block, k_head, k_slot;
  int64_t v_block, v_head, v_slot;
  int64_t k_scale_block, k_scale_head, k_scale_slot;
  int64_t v_scale_block, v_scale_head, v_scale_slot;
  int64_t table_row;
  int64_t num_tokens, num_blocks, table_width, max_seqlen_q;

  int32_t batch_size, num_heads, num_kv_heads, head_dim, v_dim, block_size;
  int32_t q_dtype, cache_dtype;
  int32_t causal, window_left;
  int32_t num_threads, isa;
  float scale, softcap;

  int32_t group() const { return num_heads / num_kv_heads; }
};

}  // namespace tierd
