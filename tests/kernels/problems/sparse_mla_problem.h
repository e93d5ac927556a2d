// Random problems for sparse MLA and their float64 results. The tests of its kernels share them on
// the emulator and on a GPU.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace sparse_mla_problem {

using bf16 = __nv_bfloat16;

struct Case {
  const char* name;
  int batch, queries, keys, heads, groups, dim, slots;
  bool adversarial = false, ends = false, lengths = false;
  int sinks = 0;  // 1: [N], 2: [B, N]
  float q_size = 1.f;
  bool sorted = false;    // distinct keys in ascending order, as top-k selects them
  int shared_tiles = 0;   // at least this many key tiles are common to neighboring queries
  float common_keys = 0;  // fraction of sorted keys that the previous query selects too
  float huge = 0;  // the score of all keys of every second batch entry, and of every third key
  bool infinite = false;  // the first selected key has an infinite value; all its scores are -inf
  bool poisoned = false;  // the first query has a NaN in its first head
};

struct Problem {
  Case c;
  std::vector<bf16> q, kv;
  std::vector<int32_t> indices, ends, lengths;
  std::vector<float> sinks;
  float scale;

  bool counts(int64_t token, int group, int slot) const {
    const int key = index(token, group, slot);
    return key >= 0 && key < c.keys && (!c.ends || key < ends[token]) &&
           (!c.lengths || slot < lengths[token]);
  }
  int index(int64_t token, int group, int slot) const {
    return indices[(token * c.groups + group) * c.slots + slot];
  }
  // Returns the row of a slot's key among the keys of all batch entries and groups.
  int64_t key_row(int64_t token, int group, int slot) const {
    return (token / c.queries * c.keys + index(token, group, slot)) * c.groups + group;
  }
  const bf16* key(int64_t token, int group, int slot) const {
    return &kv[key_row(token, group, slot) * c.dim];
  }
};

inline Problem make(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Problem p = {c};
  const int64_t tokens = int64_t{c.batch} * c.queries;
  p.scale = 0.8f / std::sqrt(float(c.dim));  // not the usual scale, so that a kernel cannot take it
                                             // for granted
  p.q.resize(tokens * c.heads * c.dim);
  p.kv.resize(int64_t{c.batch} * c.keys * c.groups * c.dim + 8);
  for (auto& x : p.q) x = __float2bfloat16(normal(random) * c.q_size);
  for (auto& x : p.kv) x = __float2bfloat16(normal(random));
  p.indices.resize(tokens * c.groups * c.slots);
  const int odd[] = {INT_MIN, -1, c.keys, INT_MAX, 0, c.keys - 1};
  for (auto& x : p.indices) {
    x = c.keys ? static_cast<int>(random() % c.keys) : 0;
    if (c.adversarial && random() % 2) x = odd[random() % 6];
  }
  for (int64_t row = 0; row < tokens * c.groups && c.sorted; ++row) {
    std::vector<int> all(c.keys), some;
    std::iota(all.begin(), all.end(), 0);
    std::sample(all.begin(), all.end(), std::back_inserter(some), c.slots, random);
    if (row / c.groups % c.queries > 0) {
      const auto before = p.indices.begin() + (row - c.groups) * c.slots;
      for (size_t i = 0; i < some.size(); ++i) {
        const bool there = std::count(some.begin(), some.end(), before[i]) > 0;
        if (!there && std::generate_canonical<float, 24>(random) < c.common_keys)
          some[i] = before[i];
      }
      std::sort(some.begin(), some.end());
    }
    some.resize(c.slots, -1);
    std::copy(some.begin(), some.end(), p.indices.begin() + row * c.slots);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    p.ends.push_back(static_cast<int>(random() % (c.keys + 20)) - 5);
    p.lengths.push_back(static_cast<int>(random() % (c.slots + 9)) - 4);
    if (c.adversarial && t % 5 == 3) {
      for (int i = 0; i < c.groups * c.slots; ++i) {
        p.indices[t * c.groups * c.slots + i] = odd[random() % 4];
      }
    }
  }
  p.sinks.resize(c.sinks == 2 ? c.batch * c.heads : c.heads);
  for (size_t i = 0; i < p.sinks.size(); ++i) {
    p.sinks[i] = i % 7 == 2 ? INFINITY : i % 7 == 4 ? -INFINITY : normal(random) * 2;
  }
  // The last dimension alone makes the scores, with a scale that rounds.
  for (size_t i = 0; c.huge != 0 && i < p.q.size(); ++i) {
    p.scale = 0.9f;
    p.q[i] = __float2bfloat16(i % c.dim == size_t(c.dim) - 1 ? 1.f : 0.f);
  }
  for (int64_t row = 0; c.huge != 0 && row < int64_t{c.batch} * c.keys * c.groups; ++row) {
    if (row / c.groups / c.keys % 2 == 1 || row / c.groups % 3 == 0)
      p.kv[(row + 1) * c.dim - 1] = __float2bfloat16(c.huge);
  }
  if (c.infinite) {
    constexpr int kColumn = 5;
    for (size_t i = kColumn; i < p.q.size(); i += c.dim) p.q[i] = __float2bfloat16(-1.f);
    p.kv[p.key_row(0, 0, 0) * c.dim + kColumn] = __float2bfloat16(INFINITY);
  }
  if (c.poisoned) p.q[0] = __float2bfloat16(NAN);
  // Keys that no slot selects become NaN.
  std::vector<bool> used(int64_t{c.batch} * c.keys * c.groups);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int g = 0; g < c.groups; ++g) {
      for (int k = 0; k < c.slots; ++k) {
        if (p.counts(t, g, k)) used[p.key_row(t, g, k)] = true;
      }
    }
  }
  for (size_t r = 0; r < used.size(); ++r) {
    for (int i = 0; i < c.dim && !used[r]; ++i) p.kv[r * c.dim + i] = __float2bfloat16(NAN);
  }
  return p;
}

// The order in which the backward pass sums rows: for every `count` tokens, rows in the order of
// their keys. See `row_order` and `row_key` in sparse_mla.h.
struct RowOrder {
  std::vector<int32_t> order;
  std::vector<uint32_t> key;
};
inline RowOrder order_rows(const Problem& p, int64_t count) {
  const Case& c = p.c;
  const int64_t tokens = int64_t{c.batch} * c.queries,
                nowhere = int64_t{c.batch} * c.keys * c.groups;
  const int head_tiles = (c.heads / c.groups + 127) / 128, padded = (c.slots + 63) / 64 * 64;
  RowOrder to;
  for (int64_t first = 0; first < tokens; first += count) {
    std::vector<std::vector<int>> lists(nowhere + 1);
    int row = 0;
    for (int64_t t = first; t < std::min(first + count, tokens); ++t) {
      for (int i = 0; i < c.groups * head_tiles * padded; ++i, ++row) {
        const int group = i / (head_tiles * padded), slot = i % padded;
        const bool counts = slot < c.slots && p.counts(t, group, slot);
        lists[counts ? p.key_row(t, group, slot) : nowhere].push_back(row);
      }
    }
    for (const auto& list : lists) {
      to.order.insert(to.order.end(), list.begin(), list.end());
      to.key.resize(to.order.size(), first / count * (nowhere + 1) + (&list - lists.data()));
    }
  }
  return to;
}

// The result of one head of a token.
struct Row {
  std::vector<double> score, out;  // scores are -inf in invalid slots; the output has the sink's
                                   // gate
  double max_logit, log_sum, gate;
};

inline Row attend(const Problem& p, int64_t token, int head) {
  const Case& c = p.c;
  const int group = head / (c.heads / c.groups);
  Row row = {std::vector<double>(c.slots, -INFINITY), std::vector<double>(512), -INFINITY, 0, 1};
  const bf16* q = &p.q[(token * c.heads + head) * c.dim];
  double top = -INFINITY, total = 0;
  for (int k = 0; k < c.slots; ++k) {
    if (!p.counts(token, group, k)) continue;
    double sum = 0;
    for (int d = 0; d < c.dim; ++d) {
      sum += double(__bfloat162float(q[d])) * __bfloat162float(p.key(token, group, k)[d]);
    }
    row.score[k] = c.huge != 0 ? double(float(sum) * p.scale) : sum * p.scale;
    top = std::isnan(row.score[k]) ? NAN : std::max(top, row.score[k]);
  }
  for (double s : row.score) total += top == -INFINITY ? 0 : std::exp(s - top);
  row.max_logit = top, row.log_sum = total == 0 ? 0 : std::log(total);
  if (c.sinks && total > 0) {
    const double sink = p.sinks[(c.sinks == 2 ? token / c.queries * c.heads : 0) + head];
    row.gate = 1 / (1 + std::exp(sink - top - row.log_sum));
  }
  for (int k = 0; k < c.slots; ++k) {
    if (!p.counts(token, group, k)) continue;
    const double weight = total == 0 ? 0 : row.gate * std::exp(row.score[k] - top - row.log_sum);
    for (int d = 0; d < 512; ++d) {
      row.out[d] += weight * __bfloat162float(p.key(token, group, k)[d]);
    }
  }
  return row;
}

// The largest error of a result, and the largest expected magnitude.
struct Error {
  double worst = 0, top = 0;
  void add(double got, double want) {
    const bool same = got == want || (std::isnan(got) && std::isnan(want));
    const double e = same ? 0 : std::fabs(got - want);
    worst = std::max(worst, std::isnan(e) ? INFINITY : e);
    if (std::isfinite(want)) top = std::max(top, std::fabs(want));
  }
  bool good(double relative) const { return worst <= relative * top + 1e-6; }
};

// Returns the log_sum that belongs to another maximum than the largest score.
inline double log_sum_for(const Row& row, double max_logit) {
  return row.log_sum + (row.max_logit == max_logit ? 0 : row.max_logit - max_logit);
}

// Returns whether `max_logit` is NaN exactly if the largest score of the row is NaN.
inline bool agree_on_nan(const Row& row, float max_logit) {
  return std::isnan(max_logit) == std::isnan(row.max_logit);
}

// Gradients of the results, and the expected gradients of the inputs.
struct Gradients {
  std::vector<bf16> dout;  // with the gate of a sink as a factor
  std::vector<bf16> out;
  std::vector<float> max_logit, log_sum, dlse;
  std::vector<double> dq, dkv;
};

inline Gradients differentiate(const Problem& x, uint64_t seed) {
  const Case& c = x.c;
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads;
  Gradients g;
  g.dout.resize(rows * 512);
  g.max_logit.resize(rows);
  g.log_sum.resize(rows);
  g.out.resize(rows * 512);
  g.dlse.resize(rows);
  g.dq.resize(rows * c.dim);
  g.dkv.resize(int64_t{c.batch} * c.keys * c.groups * c.dim);
  const int workers = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::vector<double>> worker_dkv(workers);
  std::vector<std::thread> threads;
  for (int worker = 0; worker < workers; ++worker) {
    threads.emplace_back([&, worker] {
      std::vector<double>& dkv = worker_dkv[worker];
      dkv.resize(g.dkv.size());
      for (int64_t r = worker; r < rows; r += workers) {
        std::mt19937_64 random(seed * 1000003 + r);
        std::normal_distribution<float> normal;
        const int64_t token = r / c.heads;
        const int head = r % c.heads, group = head / (c.heads / c.groups);
        const Row row = attend(x, token, head);
        g.dlse[r] = normal(random);
        double delta = -g.dlse[r];
        double dout[512];
        for (int d = 0; d < 512; ++d) {
          g.dout[r * 512 + d] = __float2bfloat16(normal(random) * row.gate);
          dout[d] = __bfloat162float(g.dout[r * 512 + d]);
          g.out[r * 512 + d] = __float2bfloat16(row.out[d]);
          delta += dout[d] * __bfloat162float(g.out[r * 512 + d]);
        }
        g.max_logit[r] = row.max_logit, g.log_sum[r] = row.log_sum;
        if (row.max_logit == -INFINITY)
          g.dlse[r] = NAN;  // this row has no key, so the gradient must not
                            // reach anything
        for (int k = 0; k < c.slots; ++k) {
          if (row.score[k] == -INFINITY) continue;
          const double p = std::exp(row.score[k] - row.max_logit - row.log_sum);
          const bf16* key = x.key(token, group, k);
          double dp = 0;
          for (int d = 0; d < 512; ++d) dp += dout[d] * __bfloat162float(key[d]);
          const double ds = p * (dp - delta) * x.scale;
          double* dkey = &dkv[key - x.kv.data()];
          for (int d = 0; d < c.dim; ++d) {
            g.dq[r * c.dim + d] += ds * __bfloat162float(key[d]);
            dkey[d] += ds * __bfloat162float(x.q[r * c.dim + d]) + (d < 512 ? p * dout[d] : 0);
          }
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& own : worker_dkv) {
    for (size_t i = 0; i < own.size(); ++i) g.dkv[i] += own[i];
  }
  return g;
}

}  // namespace sparse_mla_problem
