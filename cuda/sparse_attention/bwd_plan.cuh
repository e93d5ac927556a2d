// Traits, work items and shared memory of the dK and dV kernel of sparse attention. See
// bwd_dkv.cuh.
#pragma once

#include "common/limits.h"
#include "common/ring.cuh"
#include "common/tile.cuh"
#include "sparse_attention/bwd_inverse.cuh"
#include "sparse_attention/bwd_rows.cuh"

namespace jax_dsa::sparse_attention {

// P on its way from warpgroup 0 to warpgroup 1, if each computes only one of dK and dV.
template <int kBuffers, int kBytes>
struct PBuffers {
  // Fragments: 16 bytes of each thread for 16 columns, then those of the next 16 columns.
  uint8_t p[kBuffers][kBytes];
  uint64_t full[kBuffers], free[kBuffers];
};
template <int kBytes>
struct PBuffers<0, kBytes> {};

// kD: maximum dim of queries and keys. kE: maximum dim of values. kKeys: keys of a work item, 64 or
// 128.
template <DType kType_, int kD_, int kE_, int kKeys_>
struct DkvTraits {
  static constexpr DType kType = kType_;
  static constexpr int kD = kD_, kE = kE_, kKeys = kKeys_;
  static constexpr int kDBlocks = kD / 64, kEBlocks = kE / 64;
  static constexpr int kKeyBlockBytes = kKeys * 128;  // of 64 columns
  static constexpr int kPBuffers = kKeys > kTile ? 0 : 2;
  // Rows of q and dout of a step. With 256 dims, shared memory then holds three steps.
  static constexpr int kRows = kD <= 192 && kE <= 128 ? 64 : 48;
  static constexpr int kRowsBytes = kRows * 128;  // of 64 columns
  // Whether K and V are read into registers. This halves what their products read from shared
  // memory. With 256 dims or 128 keys, registers are scarce.
  static constexpr bool kInRegisters = kD <= 192 && kE <= 128 && kKeys == kTile;
  static constexpr int kStages = kD <= 64 ? 8 : kD <= 128 && kKeys == kTile ? 5 : kD <= 192 ? 4 : 3;
  static constexpr int kThreads = 384;
  static constexpr int kConsumerRegisters = kD <= 128 && kKeys == kTile ? 208 : 216;
  static constexpr int kProducerRegisters = kConsumerRegisters == 208 ? 88 : 72;
  static_assert(registers_fit(1, 2, kConsumerRegisters, kProducerRegisters));

  // Returns whether an entry of an inverse list sees key `key` of the tile. See InverseLists::keys.
  __device__ static bool sees(uint64_t keys, int key) {
    return kKeys > kTile ? key < static_cast<int>(keys) : keys >> key & 1;
  }
  static constexpr uint64_t kAllSeen = kKeys > kTile ? uint64_t{kKeys} : ~uint64_t{0};
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
  uint8_t k[Tr::kDBlocks][Tr::kKeyBlockBytes];
  uint8_t v[Tr::kEBlocks][Tr::kKeyBlockBytes];
  uint8_t q[Tr::kStages][Tr::kDBlocks][Tr::kRowsBytes];
  uint8_t dout[Tr::kStages][Tr::kEBlocks][Tr::kRowsBytes];
  [[no_unique_address]] PBuffers<Tr::kPBuffers, kTile * Tr::kRows * 2> passed;
  float lse[Tr::kStages][Tr::kRows];  // in log2 units; 0 for huge rows
  float delta[Tr::kStages][Tr::kRows];
  HugeRow huge_rows[Tr::kStages][Tr::kRows];
  // Which rows see a key. The bits of a key are in the order that column_bit gives.
  uint64_t seen[Tr::kStages][Tr::kKeys];
  uint64_t entry_columns[Tr::kRows];  // the columns of an entry of a step, in the same order
  uint8_t entry_of_row[Tr::kRows];    // the entry of a step that a row belongs to
  uint8_t flags[Tr::kStages];         // DkvFlags
  DkvItem item;
  uint64_t item_full, item_free;
  uint64_t kv_full;  // K and V of the item are loaded, if it needs them
  uint64_t full[Tr::kStages], free[Tr::kStages];
};

// Returns the place of a column (a row of q) among the 64 bits of a key. The lanes of a quad have
// 16 bits each: a byte for their even columns and one for their odd columns, in descending order,
// so that a shift by column / 8 brings the bits of both columns to the top of the bytes.
__host__ __device__ constexpr int column_bit(int column) {
  return column % 8 / 2 * 16 + column % 2 * 8 + 7 - column / 8;
}

}  // namespace jax_dsa::sparse_attention
