// A call of hierarchical tree attention on the GPU, and its timing, for the check programs in
// this folder.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "gpu/check.cuh"
#include "htree/htree.h"
#include "problems/htree_problem.h"

using htree_problem::bf16;
using namespace jax_dsa;

// Runs the modes `test` and `small`: run(seed) returns the number of cases that failed.
template <typename Run>
int report(uint64_t seed, Run run) {
  if (seed == 0) seed = 20261123;
  printf("seed %llu\n", (unsigned long long)seed);
  const int bad = run(seed);
  printf(bad ? "FAILED %d\n" : "all good\n", bad);
  return bad != 0;
}

// The device arrays of a call.
struct Call : Memory {
  HTreeBuildParams build = {};
  HTreeFwdParams p = {};

  Call(int64_t batch, int64_t tokens, int64_t queries, int64_t heads, int64_t groups, int64_t dim,
       int64_t compression, int64_t top_k, bool wants_selected, int64_t rows) {
    build.batch = p.batch = batch, build.tokens = p.tokens = tokens;
    build.groups = p.groups = groups, build.dim = p.dim = dim;
    build.compression = p.compression = compression, build.top_k = p.top_k = top_k;
    build.rope_base = 10000;
    p.queries = queries, p.heads = heads, p.scale = 1.f / std::sqrt(static_cast<float>(dim));
    const HTreeLayers layers = htree_layers(tokens, compression, top_k);
    build.k = room<bf16>(batch * tokens * groups * dim);
    build.v = room<bf16>(batch * tokens * groups * dim);
    build.tree = room<bf16>(batch * groups * layers.blocks * 2 * compression * dim);
    build.rotations = room<float>(compression * top_k * dim);
    build.workspace = room<uint8_t>(htree_build_workspace(build));
    p.q = room<bf16>(batch * queries * heads * dim);
    p.positions = room<int32_t>(batch * queries);
    p.tree = build.tree, p.rotations = build.rotations;
    p.out = room<bf16>(batch * queries * heads * dim);
    p.max_logit = room<float>(batch * queries * heads);
    p.log_sum = room<float>(batch * queries * heads);
    const int64_t slots = batch * queries * groups * (layers.count - 1) * top_k;
    if (wants_selected) p.selected = room<int16_t>(slots);
    p.workspace_bytes = htree_fwd_workspace(p, rows ? rows : batch * queries * groups);
    p.workspace = room<uint8_t>(p.workspace_bytes);
  }
};

template <typename T>
void put(const void* to, const std::vector<T>& x) {
  CHECK(cudaMemcpy(const_cast<void*>(to), x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
}

__global__ void fill(bf16* x, int64_t n, uint64_t seed, int64_t row, int64_t repeats, float noise) {
  const auto normal = [](uint64_t h) {  // approximately normal
    int sum = 0;
    for (int k = 0; k < 4; ++k) sum += static_cast<int>(h >> (16 * k) & 0xffff);
    return static_cast<float>(sum - 131070) / 37837.f;
  };
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t shared = i / row / repeats * row + i % row;
    x[i] = __float2bfloat16(normal(mix(seed * 0x1000003 + shared)) +
                            (noise > 0 ? noise * normal(mix(~seed * 0x1000003 + i)) : 0.f));
  }
}
__global__ void count_up(int32_t* x, int64_t n) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    x[i] = static_cast<int32_t>(i);
  }
}

struct Timer {
  std::vector<std::pair<cudaEvent_t, cudaEvent_t>> spans;
  template <typename F>
  void operator()(F launch) {
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    CHECK(cudaEventRecord(a));
    CHECK(launch());
    CHECK(cudaEventRecord(b));
    spans.push_back({a, b});
  }
  float total() {
    float sum = 0;
    for (auto [a, b] : spans) {
      float ms;
      CHECK(cudaEventSynchronize(b));
      CHECK(cudaEventElapsedTime(&ms, a, b));
      CHECK(cudaEventDestroy(a));
      CHECK(cudaEventDestroy(b));
      sum += ms;
    }
    spans.clear();
    return sum;
  }
};

// Returns how often a query visits a block, in all layers and in those that select, for r = 16
// and queries at all tokens.
inline std::array<double, 2> count_pairs(int64_t queries, int64_t top_k, int layers) {
  std::array<double, 2> pairs = {};
  for (int64_t t = 0; t < queries; t += 37) {
    int64_t n = 0;
    for (int l = layers - 1; l >= 0; --l) {
      const int64_t last = t >> (4 * l);
      n = l + 1 == layers ? last + 1 : 16 * (std::min<int64_t>(n, top_k) - 1) + last % 16 + 1;
      pairs[0] += 37. * (n + 15) / 16;
      if (l > 0) pairs[1] += 37. * (n + 15) / 16;
    }
  }
  return pairs;
}
