// Random inputs of sparse MLA and attn_dist for the check programs: queries and keys whose elements
// the host can recompute, and indices with all kinds of invalid slots.
#pragma once

#include <cuda_bf16.h>

#include <climits>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gpu/check.cuh"

using bf16 = __nv_bfloat16;

// Nearly normal with unit variance, and exactly reproducible on the host.
__host__ __device__ inline bf16 random_value(uint64_t seed, int64_t i, float size) {
  const uint64_t h = mix(seed * 0x1000003 + i);
  int sum = 0;
  for (int k = 0; k < 4; ++k) sum += static_cast<int>(h >> (16 * k) & 0xffff);
  return __float2bfloat16(static_cast<float>(sum - 131070) * (size / 37837.f));
}
__global__ void fill_random(bf16* x, int64_t n, uint64_t seed, float size) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x)
    x[i] = random_value(seed, i, size);
}
// Sets the rows of unused keys to NaN.
__global__ void poison_rows(bf16* kv, const uint8_t* used, int64_t rows, int dim) {
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x)
    if (!used[r])
      for (int i = threadIdx.x; i < dim; i += blockDim.x) kv[r * dim + i] = __float2bfloat16(NAN);
}
// Fills the slots of query t, which sees visible_first + t keys: random, or distinct and ascending.
// A query has a list for each of G KV heads.
__global__ void bench_indices(int32_t* idx, int T, int K, int visible_first, bool ascending,
                              int G = 1) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < int64_t{T} * G * K;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int t = i / K / G, k = i % K, visible = visible_first + t;
    const uint64_t h = mix(i);
    idx[i] = ascending ? (int)(((double)k + (h >> 12) * 0x1p-52) * visible / K) : h % visible;
  }
}

// kAdversarial: half of the indices are invalid or extreme, and some queries have only such ones.
// kTails: the last slots of most rows are -1.
enum Mode { kValid, kAdversarial, kTails };

// The indices of a case, and the arrays that limit them. `Case` must have the members B, T, S, N,
// G, K, mode, ends, lengths, sinks and poison.
template <typename Case>
struct SelectedKeys {
  Case c;
  uint64_t seed;
  std::vector<int32_t> indices, ends, lengths;
  std::vector<float> sinks;

  SelectedKeys(const Case& c, uint64_t seed) : c(c), seed(seed) {
    const int64_t tokens = int64_t{c.B} * c.T;
    indices.resize(tokens * c.G * c.K), ends.resize(tokens), lengths.resize(tokens);
    for (int64_t t = 0; t < tokens; ++t) {
      ends[t] = static_cast<int>(random(1, t) % (c.S + 20)) - 5;
      lengths[t] = static_cast<int>(random(2, t) % (c.K + 9)) - 4;
      for (int g = 0; g < c.G; ++g) {
        const int64_t row = t * c.G + g;
        const int64_t tail = random(3, row) % 3 == 0 ? 0 : random(4, row) % (c.K + 1);
        for (int k = 0; k < c.K; ++k) {
          const uint64_t r = random(5, row * c.K + k);
          int v = c.S ? static_cast<int>(r % c.S) : 0;
          if (c.mode == kAdversarial) {
            const int odd[] = {INT_MIN, -1, c.S, INT_MAX, 0, c.S - 1};
            if (r >> 40 & 1) v = odd[(r >> 48) % 6];
            if (t % 5 == 3) v = odd[(r >> 48) % 4];
          }
          if (c.mode == kTails && k >= tail) v = -1;
          indices[row * c.K + k] = v;
        }
      }
    }
    sinks.resize(c.sinks == 2 ? c.B * c.N : c.N);
    for (size_t i = 0; i < sinks.size(); ++i) {
      sinks[i] = (random(6, i) % 1000) / 100.f - 3.f;
      if (i % 7 == 2) sinks[i] = INFINITY;
      if (i % 7 == 4) sinks[i] = -INFINITY;
    }
  }

  uint64_t random(uint64_t stream, uint64_t i) const { return mix(mix(seed + stream) + i); }
  int index(int64_t token, int group, int slot) const {
    return indices[(token * c.G + group) * c.K + slot];
  }
  bool valid(int64_t token, int group, int slot) const {
    const int key = index(token, group, slot);
    return key >= 0 && key < c.S && (!c.ends || key < ends[token]) &&
           (!c.lengths || slot < lengths[token]);
  }
  // Returns the row of a slot's key among the keys of all batch entries and groups.
  int64_t key_row(int64_t token, int group, int slot) const {
    return (token / c.T * c.S + index(token, group, slot)) * c.G + group;
  }
  double sink(int64_t token, int head) const {
    return c.sinks ? sinks[(c.sinks == 2 ? token / c.T * c.N : 0) + head] : -INFINITY;
  }
  // Returns for each row of keys whether a valid slot selects it, or true without `poison`.
  std::vector<uint8_t> used_rows() const {
    std::vector<uint8_t> used(int64_t{c.B} * c.S * c.G, c.poison ? 0 : 1);
    for (int64_t t = 0; t < int64_t{c.B} * c.T; ++t)
      for (int g = 0; g < c.G; ++g)
        for (int k = 0; k < c.K; ++k)
          if (valid(t, g, k)) used[key_row(t, g, k)] = 1;
    return used;
  }
};
