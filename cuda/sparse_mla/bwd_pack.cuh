// Packs neighbouring queries of few heads: n neighbours of 16 heads are processed as one query of
// 16 n heads, because the backward kernel rounds up to 64 heads. Their q and results already lie in
// memory in this way. The slots of the packed query are the union of theirs. Below each index there
// are mask bits, one for every 8 heads, that say which heads have selected the key. P is nonzero
// only for these. Since neighbours select mostly the same keys, the union is shorter than all lists
// together, and the whole backward pass takes less time. At worst the union is as long. (If one of
// them selects a key with inf or NaN, the gradients of all n become NaN.)
//
// A CTA processes the n rows of indices. If they are sorted, as top-k returns them, it only merges
// them. A key that a query selects repeatedly has one slot for each repetition.
#pragma once

#include "sparse_mla/bwd_order.cuh"

namespace jax_dsa::sparse_mla {

// Returns how many neighbouring queries are packed into one.
inline int packed_queries(const SparseMlaBwdParams& p) {
  int n = p.groups == 1 && p.heads > 0 && p.heads % kHeadsPerMaskBit == 0 && !p.by_rows &&
                  p.slots > 0 && p.slots <= kOrderSlots && p.keys < INT32_MAX >> kHeadMaskBits
              ? std::max(1, kHeads / p.heads)
              : 1;
  while (n > 1 && (p.queries % n != 0 || n * padded_slots(p.slots) > kOrderSlots)) n /= 2;
  return n;
}

// Returns the parameters with n queries packed into one, except for the slots.
inline SparseMlaBwdParams packed(SparseMlaBwdParams p, int n) {
  if (n == 1) return p;
  p.queries /= n;
  p.queries_at_once /= n;
  p.heads *= n;
  p.slots *= n;
  p.head_mask_bits = kHeadMaskBits;
  p.ends = nullptr;
  p.topk_length = nullptr;
  return p;
}

// The packed slots, and the number of slots of each packed query, also lie in `order`, after what
// order_kernel writes.
inline int64_t packed_words(const SparseMlaBwdParams& p) {
  return p.head_mask_bits ? p.queries_at_once * (int64_t{p.slots} + 1) : 0;
}
inline int32_t* packed_slots(const SparseMlaBwdParams& p, const BwdWork& work) {
  return p.order + order_words(p, work);
}

inline int pack_shared_bytes(int capacity) {
  return (2 * KeyList::words(capacity) + kOrderThreads / 32) * 4;
}

__global__ void __launch_bounds__(kOrderThreads)
    pack_kernel(const __grid_constant__ SparseMlaBwdParams p, int n, int capacity, int32_t* indices,
                int32_t* lengths) {
  auto* const shared = &dynamic_shared<int32_t>();
  const KeyList list = {shared, n * capacity};
  const KeyList merged = {shared + KeyList::words(list.capacity), list.capacity};
  int* const warp_sums = shared + 2 * KeyList::words(list.capacity);
  const int thread = thread_index();
  const int64_t token = int64_t{blockIdx.x} * n;

  // Lists are alternately ascending and descending, which the bitonic merge requires.
  for (int q = 0; q < n; ++q) {
    const Slots slots(p, token + q, 0);
    const int bits = p.heads / kHeadsPerMaskBit, head_mask = ((1 << bits) - 1) << q * bits;
#pragma unroll 8
    for (int i = thread; i < capacity; i += kOrderThreads) {
      const int index = slots.index(i);
      const int32_t entry = slots.is_valid(index) ? index << kHeadMaskBits | head_mask : kNoKey;
      list[q * capacity + (q % 2 == 0 ? i : capacity - 1 - i)] = entry;
    }
  }
  __syncthreads();
  const int run = list.capacity / kOrderThreads, begin = thread * run;  // this thread's run
  int wrong = 0;
  for (int i = begin; i < begin + run; ++i) {
    if (i % capacity == 0) continue;
    wrong += i / capacity % 2 == 0 ? list[i - 1] > list[i] : list[i - 1] < list[i];
  }
  list.sort(cta_sum(wrong, warp_sums).x > 0 ? 2 : 2 * capacity);

  // Keep the first entry of each key, and further entries only if they repeat the entry before
  // them: then the same query has selected the key again.
  uint32_t stays = 0;  // bit i: keep this thread's i-th entry
  for (int i = 0; i < run; ++i) {
    const int at = begin + i;
    const int32_t entry = list[at];
    const bool first = at == 0 || list[at - 1] >> kHeadMaskBits != entry >> kHeadMaskBits;
    const bool keep = entry != kNoKey && (first || list[at - 1] == entry);
    stays |= uint32_t{keep} << i;
  }
  const int2 count = cta_sum(__popc(stays), warp_sums);
  int to = count.y;
  for (int i = 0; i < run; ++i) {
    if (!(stays >> i & 1)) continue;
    const int at = begin + i;
    int32_t entry = list[at];
    if (at == 0 || list[at - 1] >> kHeadMaskBits != entry >> kHeadMaskBits) {
      for (int j = at + 1; j < list.capacity && list[j] >> kHeadMaskBits == entry >> kHeadMaskBits;
           ++j) {
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
