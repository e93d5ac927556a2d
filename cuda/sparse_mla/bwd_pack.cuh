// Queries of few heads are packed: n neighbours of 16 heads are one query of n * 16 heads for the
// backward kernel, which rounds up to 64. In memory they are that already. Its slots are the union
// of theirs, and below each index there is a bit for every 8 heads that have selected the key, for
// whom alone P is not zero. The union is shorter than the lists together, neighbours selecting much
// the same keys, so that all of the backward pass shrinks with it; at worst it is as long.
// (A key with inf or NaN that one of them selects makes NaN of the gradients of all n.)
//
// A block has the n rows of indices. Sorted, which top-k's output is, they are only merged. A key
// that a query selects repeatedly has a slot of its own for every repetition.
#pragma once

#include "sparse_mla/bwd_order.cuh"

namespace jax_dsa::sparse_mla {

// How many neighbouring queries are packed.
inline int packed_queries(const SparseMlaBwdParams& p) {
  int n = p.groups == 1 && p.heads > 0 && p.heads % kMemberHeads == 0 && !p.by_rows &&
                  p.slots > 0 && p.slots <= kOrderSlots && p.keys < INT32_MAX >> kMemberBits
              ? std::max(1, kHeads / p.heads)
              : 1;
  while (n > 1 && (p.queries % n != 0 || n * order_room(p.slots) > kOrderSlots)) n /= 2;
  return n;
}

// The problem with n queries packed into one, but for its slots.
inline SparseMlaBwdParams packed(SparseMlaBwdParams p, int n) {
  if (n == 1) return p;
  p.queries /= n;
  p.count /= n;
  p.heads *= n;
  p.slots *= n;
  p.member_bits = kMemberBits;
  p.ends = nullptr;
  p.topk_length = nullptr;
  return p;
}

// Of a packed problem, the slots, and how many there are of each query. They lie in `order`, too,
// behind what is put in order.
inline int64_t packed_words(const SparseMlaBwdParams& p) {
  return p.member_bits ? p.count * (int64_t{p.slots} + 1) : 0;
}
inline int32_t* packed_slots(const SparseMlaBwdParams& p, const BwdWork& work) {
  return p.order + order_words(p, work);
}

inline int pack_shared_bytes(int room) {
  return (2 * KeyList::words(room) + kOrderThreads / 32) * 4;
}

__global__ void __launch_bounds__(kOrderThreads)
    pack_kernel(const __grid_constant__ SparseMlaBwdParams p, int n, int room, int32_t* indices,
                int32_t* lengths) {
  auto* const shared = &dynamic_shared<int32_t>();
  const KeyList list = {shared, n * room};
  const KeyList merged = {shared + KeyList::words(list.room), list.room};
  int* const warps = shared + 2 * KeyList::words(list.room);
  const int thread = thread_index();
  const int64_t token = int64_t{blockIdx.x} * n;

  // Lists run up and down in turns, as merging them wants.
  for (int q = 0; q < n; ++q) {
    const Slots slots(p, token + q, 0);
    const int bits = p.heads / kMemberHeads, members = ((1 << bits) - 1) << q * bits;
#pragma unroll 8
    for (int i = thread; i < room; i += kOrderThreads) {
      const int index = slots.index(i);
      const int32_t entry = slots.is_valid(index) ? index << kMemberBits | members : kNoKey;
      list[q * room + (q % 2 == 0 ? i : room - 1 - i)] = entry;
    }
  }
  __syncthreads();
  const int run = list.room / kOrderThreads, begin = thread * run;  // this thread's part
  int wrong = 0;
  for (int i = begin; i < begin + run; ++i) {
    if (i % room == 0) continue;
    wrong += i / room % 2 == 0 ? list[i - 1] > list[i] : list[i - 1] < list[i];
  }
  list.sort(block_sum(wrong, warps).x > 0 ? 2 : 2 * room);

  // A key's first entry stands for all of it, but for repetitions of an entry.
  uint32_t stays = 0;  // bit i: this thread's i-th entry
  for (int i = 0; i < run; ++i) {
    const int at = begin + i;
    const int32_t entry = list[at];
    const bool first = at == 0 || list[at - 1] >> kMemberBits != entry >> kMemberBits;
    const bool counts = entry != kNoKey && (first || list[at - 1] == entry);
    stays |= uint32_t{counts} << i;
  }
  const int2 count = block_sum(__popc(stays), warps);
  int to = count.y;
  for (int i = 0; i < run; ++i) {
    if (!(stays >> i & 1)) continue;
    const int at = begin + i;
    int32_t entry = list[at];
    if (at == 0 || list[at - 1] >> kMemberBits != entry >> kMemberBits) {
      for (int j = at + 1; j < list.room && list[j] >> kMemberBits == entry >> kMemberBits; ++j) {
        entry |= list[j];
      }
    }
    merged[to++] = entry;
  }
  __syncthreads();
  for (int i = thread; i < count.x; i += kOrderThreads) {
    indices[int64_t{blockIdx.x} * n * p.slots + i] = merged[i];
  }
  if (thread == 0) lengths[blockIdx.x] = count.x;
}

}  // namespace jax_dsa::sparse_mla
