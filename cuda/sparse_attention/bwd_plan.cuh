// Traits, work items and shared memory of the dK and dV kernel of sparse attention. See
// bwd_dkv.cuh.
#pragma once

#include "common/limits.h"
#include "common/ring.cuh"
#include "common/tile.cuh"
#include "sparse_attention/bwd_inverse.cuh"
#include "sparse_attention/bwd_rows.cuh"

namespace jax_dsa::sparse_attention {

inline constexpr int kPBuffers = 2;  // P on its way from warpgroup 0 to warpgroup 1

// kD: maximum dim of queries and keys. kE: maximum dim of values.
template <DType kType_, int kD_, int kE_>
struct DkvTraits {
  static constexpr DType kType = kType_;
  static constexpr int kD = kD_, kE = kE_;
  static constexpr int kDBlocks = kD / 64, kEBlocks = kE / 64;
  // Rows of q and dout of a step. With 256 dims, shared memory then holds three steps.
  static constexpr int kRows = kD <= 192 && kE <= 128 ? 64 : 48;
  static constexpr int kRowsBytes = kRows * 128;  // of 64 columns
  // Whether K and V are read into registers. This halves what their products read from shared
  // memory. With 256 dims, registers are scarce.
  static constexpr bool kInRegisters = kD <= 192 && kE <= 128;
  static constexpr int kStages = kD <= 64 ? 8 : kD <= 128 ? 5 : kD <= 192 ? 4 : 3;
  static constexpr int kThreads = 384;
  static constexpr int kConsumerRegisters = kD <= 128 ? 208 : 216;
  static constexpr int kProducerRegisters = kD <= 128 ? 88 : 72;
  static_assert(registers_fit(1, 2, kConsumerRegisters, kProducerRegisters));
};

// How the rows of q and dout are divided into steps. A step has several entries of an inverse list,
// and a row for each head of these queries.
struct StepShape {
  int heads;    // of a KV head
  int entries;  // of a step

  StepShape(int heads, int rows) : heads(heads), entries(rows / heads) {}
  // Returns the number of steps of a list of `count` entries.
  __device__ int steps(int count) const { return ceil_div(count, entries); }
};

// What a CTA processes next. See InverseItem.
struct DkvItem {
  int batch, group;
  int key;    // the first key of the tile
  int steps;  // 0 if no query sees the keys
  int entries;
  int64_t first;  // the first entry
  int part;
  bool several;           // the tile has several parts
  bool done;              // there are no more items
  uint32_t* parts_added;  // see InverseLists
};

// Scores of a step with any of these flags need more work.
enum DkvFlags { kSomeHidden = 1, kHugeRows = 2 };

template <typename Tr>
struct alignas(1024) DkvShared {
  uint8_t k[Tr::kDBlocks][kBlockBytes];
  uint8_t v[Tr::kEBlocks][kBlockBytes];
  uint8_t q[Tr::kStages][Tr::kDBlocks][Tr::kRowsBytes];
  uint8_t dout[Tr::kStages][Tr::kEBlocks][Tr::kRowsBytes];
  uint8_t p[kPBuffers][kTile * Tr::kRows * 2];  // fragments: 16 bytes of each thread, 16 columns
  float lse[Tr::kStages][Tr::kRows];            // in log2 units; 0 for huge rows
  float delta[Tr::kStages][Tr::kRows];
  HugeRow huge_rows[Tr::kStages][Tr::kRows];
  // Which rows see a key. The bits of a key are in the order that column_bit gives.
  uint64_t seen[Tr::kStages][kTile];
  uint64_t entry_columns[Tr::kRows];  // the columns of an entry of a step, in the same order
  uint8_t entry_of_row[Tr::kRows];    // the entry of a step that a row belongs to
  uint8_t flags[Tr::kStages];         // DkvFlags
  DkvItem item;
  uint64_t item_full, item_free;
  uint64_t kv_full;  // K and V of the item are loaded, if it needs them
  uint64_t full[Tr::kStages], free[Tr::kStages];
  uint64_t p_full[kPBuffers], p_free[kPBuffers];
};

// Returns the place of a column (a row of q) among the 64 bits of a key. The lanes of a quad have
// 16 bits each: a byte for their even columns and one for their odd columns, in descending order,
// so that a shift by column / 8 brings the bits of both columns to the top of the bytes.
__host__ __device__ constexpr int column_bit(int column) {
  return column % 8 / 2 * 16 + column % 2 * 8 + 7 - column / 8;
}

}  // namespace jax_dsa::sparse_attention
