// Checks of the indexer's forward kernels on the emulator against a float64 reference.
#pragma once

#include <cuda_bf16.h>

#include <climits>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "common/tile.cuh"
#include "far_rows.h"
#include "indexer/indexer.h"

using namespace jax_dsa;

struct Case {
  const char* name;
  int batch, queries, keys, heads;
  bool scale = false, relu = true;
  int page_tiles = 0;      // key tiles per page; 0 means no pages
  bool own_pools = false;  // whether each request has a pool of its own
  bool whole_rows = true;
  bool far = false;  // whether each pool begins with so many pages that offsets pass 32 bits
};

template <IndexerDType kDType>
struct Element;
template <>
struct Element<IndexerDType::kBF16> {
  using Type = __nv_bfloat16;
  static Type random(uint64_t bits, float x) { return __float2bfloat16(x); }
  static double value(Type x) { return __bfloat162float(x); }
  static Type nan() { return __float2bfloat16(NAN); }
};
template <>
struct Element<IndexerDType::kE4M3> {
  using Type = uint8_t;
  static Type random(uint64_t bits, float) { return bits % 64 | bits % 2 << 7; }  // at most 1.875
  static double value(Type x) { return emulator::e4m3_at(&x); }
  static Type nan() { return 0x7f; }
};

inline int failures = 0;

using Launch = cudaError_t (*)(const IndexerFwdParams&, cudaStream_t);

// Runs one case. With pages, `c.keys` is a multiple of the page size, and the second page of each
// request is unmapped.
template <IndexerDType kDType, int kChannels>
void run(Launch launch, const Case& c, const emulator::Options& options) {
  using E = Element<kDType>;
  std::mt19937_64 random(options.seed);
  std::normal_distribution<float> normal;
  const int64_t tokens = int64_t{c.batch} * c.queries, keys = int64_t{c.batch} * c.keys;
  std::vector<typename E::Type> q(tokens * c.heads * kChannels + 16), k(keys * kChannels + 16);
  std::vector<float> weights(tokens * c.heads), scale(keys), out(tokens * c.keys + 4, 7.f);
  for (auto& x : q) x = E::random(random(), normal(random));
  for (auto& x : k) x = E::random(random(), normal(random));
  for (auto& x : weights) x = normal(random);
  for (auto& x : scale) x = normal(random);
  std::vector<int32_t> starts, ends;
  for (int64_t t = 0; t < tokens; ++t) {
    starts.push_back(t % 3 ? 0 : static_cast<int>(random() % (c.keys + 9)) - 4);
    ends.push_back(t % 7 == 5 ? -3 : static_cast<int>(random() % (c.keys + 9)));
  }
  const bool paged = c.page_tiles > 0;
  const int page_size = paged ? c.page_tiles * kTile : c.keys;
  const auto seen = [&](int64_t t, int s) {
    return s >= starts[t] && s < ends[t] && !(paged && s / page_size == 1);
  };
  for (int64_t key = 0; key < keys; ++key) {
    bool used = false;
    for (int t = 0; t < c.queries; ++t) used |= seen(key / c.keys * c.queries + t, key % c.keys);
    for (int i = 0; i < kChannels && !used; ++i) k[key * kChannels + i] = E::nan();
    if (!used) scale[key] = NAN;
  }

  IndexerFwdParams p = {};
  p.q = q.data(), p.k = k.data(), p.weights = weights.data();
  p.k_scale = c.scale ? scale.data() : nullptr;
  p.starts = starts.data(), p.ends = ends.data(), p.out = out.data();
  p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
  p.channels = kChannels, p.dtype = kDType, p.relu = c.relu, p.whole_rows = c.whole_rows;
  const int per_request = c.keys / page_size, pools = c.own_pools ? c.batch : 1;
  const int pages = c.batch / pools * per_request + 2;
  std::vector<int32_t> table(c.batch * per_request);
  std::vector<typename E::Type> pool(int64_t{pools} * pages * page_size * kChannels + 16, E::nan());
  std::vector<float> pool_scale(int64_t{pools} * pages * page_size, NAN);
  if (paged) {
    const int elements = page_size * kChannels;
    for (int i = 0; i < c.batch * per_request; ++i) {
      const int page = pages - 2 - (c.own_pools ? i % per_request : i);
      const int at = (c.own_pools ? i / per_request * pages : 0) + page;
      table[i] = i % per_request == 1 ? (i < per_request ? -1 : pages) : page;
      std::copy_n(&k[int64_t{i} * elements], elements, &pool[int64_t{at} * elements]);
      std::copy_n(&scale[i * page_size], page_size, &pool_scale[at * page_size]);
    }
    p.pools = pools, p.pages = pages;
    p.pages_per_request = per_request, p.page_size = page_size;
  }
  const int64_t row_bytes = kChannels * sizeof(typename E::Type);
  const int64_t far = c.far ? emulator::far_rows(row_bytes, page_size) : 0;
  const int64_t pool_rows = int64_t{pages} * page_size;
  const emulator::FarRows far_pool(pool.data(), pools, pool_rows * row_bytes, far * row_bytes);
  const emulator::FarRows far_scale(pool_scale.data(), pools, pool_rows * 4, far * 4);
  table = emulator::far_positions(table, far / page_size);
  if (paged) {
    p.page_table = table.data(), p.pages += far / page_size;
    p.k = far_pool.data();
    p.k_scale = c.scale ? reinterpret_cast<const float*>(far_scale.data()) : nullptr;
  }
  emulator::machine.options = options;
  emulator::require(launch(p, nullptr));

  double worst = 0, top = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int s = 0; s < c.keys; ++s) {
      if (!c.whole_rows && (s < starts[t] || s >= ends[t])) continue;
      const int64_t key = t / c.queries * c.keys + s;
      double expected = 0;
      for (int j = 0; j < c.heads; ++j) {
        double x = 0;
        for (int i = 0; i < kChannels; ++i) {
          x += E::value(q[(t * c.heads + j) * kChannels + i]) * E::value(k[key * kChannels + i]);
        }
        expected += weights[t * c.heads + j] * (c.relu ? std::max(x, 0.) : x);
      }
      expected = seen(t, s) ? c.scale ? expected * scale[key] : expected : -INFINITY;
      const double e =
          out[t * c.keys + s] == expected ? 0 : std::fabs(out[t * c.keys + s] - expected);
      worst = std::max(worst, std::isnan(e) ? INFINITY : e);
      if (seen(t, s)) top = std::max(top, std::fabs(expected));
    }
  }
  for (int i = 0; i < 4; ++i) worst += std::fabs(out[tokens * c.keys + i] - 7.f);
  const bool good = worst <= 1e-5 * top + 1e-6;
  printf("%-4s %-16s %s %s seed %llu  %.1e of %.1e\n", good ? "ok" : "BAD", c.name,
         options.late_wgmma ? "late wgmma, " : "early wgmma,",
         options.late_copies ? "late copies, " : "early copies,", (unsigned long long)options.seed,
         worst, top);
  fflush(stdout);
  failures += !good;
}
