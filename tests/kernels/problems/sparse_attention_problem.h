// Test problems of sparse attention and their solutions in float64, for the emulator and the GPU.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "problems/values_16.h"
#include "sparse_attention/sparse_attention.h"

namespace jax_dsa {

enum class Lists {
  kSimilar,     // a list keeps 15 of 16 blocks of the list of the query before it
  kRandom,      // distinct blocks, unrelated to those of other queries
  kDuplicates,  // few blocks, most of them several times
  kInvalid,     // half of the slots name no block, and some lists do not name any
};

struct SparseAttentionCase {
  const char* name;
  int batch, queries, keys, heads, groups, dim, value_dim, slots, block_size;
  Lists lists = Lists::kRandom;
  bool causal = false;
  int64_t first_position = 0;  // the position of the first query
  int sink_blocks = 0, local_blocks = 0;
  bool tail_block = false;
  bool packed = false;   // several sequences with padding around them
  bool lengths = false;  // batch entries have different numbers of keys
  bool topk_length = false;
  bool sinks = false;
  DType dtype = DType::kBF16;
  float scale = 0.f;  // 0 means dim^-1/2
  float level = 0.f;  // q.k of the first half of the keys, or 0 for random keys
  bool nan = false;   // the first KV head's first key has a NaN value, and the last one's is NaN
};

// Makes lists of distinct blocks, one after the other.
class ListMaker {
 public:
  ListMaker(int slots, int blocks, uint64_t seed)
      : slots_(slots), named_(blocks, -1), random_(seed) {}

  // Writes a list of blocks below `visible`. It keeps most blocks of the list `before`, if that is
  // not null. Slots are -1 if there are not enough blocks.
  void make(int32_t* list, const int32_t* before, int64_t visible) {
    visible = std::min<int64_t>(visible, named_.size());
    ++list_;
    if (visible <= slots_) {
      for (int i = 0; i < slots_; ++i) list[i] = i < visible ? i : -1;
      return;
    }
    for (int i = 0; i < slots_; ++i) {
      list[i] = before ? before[i] : -1;
      if (list[i] >= 0) named_[list[i]] = list_;
    }
    if (before) {  // On average, a sixteenth of the slots get other blocks, if there are as many.
      const int64_t wanted = slots_ / 16 + (random_() % 16 < slots_ % 16u);
      for (int64_t n = std::min(wanted, visible - slots_); n > 0; --n) {
        list[random_() % slots_] = -1;
      }
    }
    for (int i = 0; i < slots_; ++i) {
      while (list[i] < 0) {
        const auto block = static_cast<int32_t>(random_() % visible);
        if (named_[block] == list_) continue;
        list[i] = block, named_[block] = list_;
      }
    }
  }

 private:
  int slots_;
  int64_t list_ = 0;
  std::vector<int64_t> named_;  // the last list that names a block
  std::mt19937_64 random_;
};

struct SparseAttentionProblem {
  SparseAttentionCase c;
  float scale;
  std::vector<uint16_t> q, k, v;
  std::vector<int32_t> indices, topk_length, positions, starts, lengths;
  std::vector<float> sinks;  // [batch, heads], or empty

  int heads_per_group() const { return c.heads / c.groups; }
  int64_t num_rows() const { return int64_t{c.batch} * c.queries * c.heads; }
  int64_t num_keys() const { return int64_t{c.batch} * c.keys * c.groups; }
  // Returns the batch entry and query of a row of the output, and its KV head.
  int64_t query_of(int64_t row) const { return row / c.heads; }
  int group_of(int64_t row) const { return static_cast<int>(row % c.heads) / heads_per_group(); }

  // Returns the blocks that query `at` = b * queries + t lists and those that are forced.
  std::vector<int64_t> blocks(int64_t at, int g) const {
    const int64_t counted = c.topk_length ? topk_length[at] : c.slots;
    std::vector<int64_t> all;
    for (int i = 0; i < c.slots && i < counted; ++i) {
      all.push_back(indices[(at * c.groups + g) * c.slots + i]);
    }
    if (!c.causal) return all;
    const int64_t position = positions[at], own = position / c.block_size;
    const size_t listed = all.size();
    for (int64_t j = 0; position >= 0 && j <= own && j * c.block_size < c.keys; ++j) {
      const bool tail = c.tail_block && j == own && (position + 1) % c.block_size != 0;
      if (j >= c.sink_blocks && j <= own - c.local_blocks && !tail) continue;
      if (std::find(all.begin(), all.begin() + listed, j) == all.begin() + listed) {
        all.push_back(j);
      }
    }
    return all;
  }
  // Returns the rows of k that query `at` sees. A row is there as often as it counts.
  std::vector<int64_t> seen(int64_t at, int g) const {
    std::vector<int64_t> rows;
    for (const int64_t j : blocks(at, g)) {
      if (j < 0) continue;
      for (int64_t s = j * c.block_size; s < (j + 1) * c.block_size; ++s) {
        if (!lengths.empty() && s >= lengths[at]) break;
        if (c.causal && s > positions[at]) break;
        const int64_t row = s + (c.packed ? starts[at] : 0);
        if (row >= c.keys) break;
        rows.push_back(row);
      }
    }
    return rows;
  }
  // Returns the lists, with pointers to host memory.
  SparseAttentionLists attention_lists() const {
    SparseAttentionLists y = {};
    y.indices = indices.data();
    if (c.topk_length) y.topk_length = topk_length.data();
    if (c.causal) y.positions = positions.data();
    if (c.packed) y.starts = starts.data();
    if (!lengths.empty()) y.lengths = lengths.data();
    y.slots = c.slots, y.block_size = c.block_size;
    y.sink_blocks = c.sink_blocks, y.local_blocks = c.local_blocks, y.tail_block = c.tail_block;
    return y;
  }
  // Sets the sizes and options of the parameters of a kernel.
  template <typename Params>
  void set_sizes(Params& p) const {
    p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
    p.groups = c.groups, p.dim = c.dim, p.value_dim = c.value_dim;
    p.dtype = c.dtype, p.scale = scale;
  }
};

// Sets the position, the first row of keys and the number of keys of each query.
inline void place_queries(SparseAttentionProblem& p) {
  const SparseAttentionCase& c = p.c;
  for (int b = 0; b < c.batch; ++b) {
    // Three sequences, the second of them without keys, and padding before and after them.
    const int q_bounds[] = {c.queries / 16, c.queries / 3, c.queries / 2, c.queries - 1 - b};
    const int k_bounds[] = {c.keys / 20 + b, c.keys / 2 - 3, c.keys / 2 - 3, c.keys - 2};
    for (int t = 0; t < c.queries; ++t) {
      if (!c.packed) {
        p.positions.push_back(static_cast<int32_t>(c.first_position + t));
        const int lengths[] = {c.keys - 7, c.keys + 100, -3};
        if (c.lengths) p.lengths.push_back(lengths[b % 3]);
        continue;
      }
      const int after = std::count_if(q_bounds, q_bounds + 4, [&](int x) { return x <= t; });
      const int i = std::clamp(after - 1, 0, 2);
      const int length = k_bounds[i + 1] - k_bounds[i];
      // The queries of the last sequence are at the end of its keys.
      const int shift = i == 2 ? length - (q_bounds[3] - q_bounds[2]) : 0;
      p.positions.push_back(t - q_bounds[i] + shift);
      p.starts.push_back(k_bounds[i]);
      p.lengths.push_back(after == 0 || after == 4 ? 0 : length);
    }
  }
}

inline void list_blocks(SparseAttentionProblem& p, uint64_t seed) {
  const SparseAttentionCase& c = p.c;
  std::mt19937_64 random(seed);
  const int blocks = (c.keys + c.block_size - 1) / c.block_size;
  const int64_t stride = int64_t{c.groups} * c.slots;
  p.indices.resize(int64_t{c.batch} * c.queries * stride, -1);
  for (int b = 0; b < c.batch; ++b) {
    for (int g = 0; g < c.groups; ++g) {
      ListMaker maker(c.slots, blocks, random());
      for (int t = 0; t < c.queries; ++t) {
        const int64_t at = int64_t{b} * c.queries + t;
        int32_t* const list = p.indices.data() + at * stride + g * c.slots;
        const bool similar = c.lists == Lists::kSimilar;
        maker.make(list, similar && t > 0 ? list - stride : nullptr,
                   similar && c.causal ? std::max<int64_t>(p.positions[at] / c.block_size + 1, 0)
                                       : blocks);
        const int32_t odd[] = {-1, INT_MIN, INT_MAX, blocks, blocks + 1, -7};
        for (int i = 0; i < c.slots; ++i) {
          if (c.lists == Lists::kDuplicates) list[i] = list[random() % std::min(c.slots, 3)];
          if (c.lists == Lists::kInvalid && (t % 5 == 3 || random() % 2))
            list[i] = odd[random() % 6];
        }
      }
    }
  }
  for (int64_t at = 0; at < int64_t{c.batch} * c.queries; ++at) {
    p.topk_length.push_back(static_cast<int>(random() % (c.slots + 6)) - 2);
  }
}

inline SparseAttentionProblem make_sparse_attention(const SparseAttentionCase& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  SparseAttentionProblem p = {c};
  p.scale = c.scale != 0.f ? c.scale : 1 / std::sqrt(float(c.dim));
  const auto fill = [&](std::vector<uint16_t>& x, int64_t n) {
    x.resize(n + 8);
    for (auto& y : x) y = to_16(c.dtype, normal(random));
  };
  fill(p.q, p.num_rows() * c.dim);
  fill(p.k, p.num_keys() * c.dim);
  fill(p.v, p.num_keys() * c.value_dim);
  if (c.level != 0.f) {  // Two dimensions alone make the scores. Those of 1e9 are then exact.
    for (size_t i = 0; i < p.q.size(); ++i) p.q[i] = to_16(c.dtype, i % c.dim < 2 ? 1.f : 0.f);
    for (int64_t key = 0; key < p.num_keys(); ++key) {
      const int64_t s = key / c.groups % c.keys;
      if (s >= c.keys / 2) continue;
      p.k[key * c.dim] = to_16(c.dtype, c.level);
      p.k[key * c.dim + 1] = to_16(c.dtype, s % 3 * 64.f);
    }
  }
  if (c.nan) p.v[3] = p.k[(c.groups - 1) * c.dim] = to_16(c.dtype, NAN);
  if (c.sinks) {
    for (int i = 0; i < c.batch * c.heads; ++i) {
      p.sinks.push_back(i % 4 == 1 ? INFINITY : i % 4 == 2 ? -INFINITY : 3 * normal(random));
    }
  }
  place_queries(p);
  list_blocks(p, random());
  // Keys and values that no query of their group sees, and queries that see no key, are NaN.
  std::vector<bool> is_seen(p.num_keys());
  for (int64_t at = 0; at < int64_t{c.batch} * c.queries; ++at) {
    for (int g = 0; g < c.groups; ++g) {
      const std::vector<int64_t> rows = p.seen(at, g);
      for (const int64_t s : rows) is_seen[(at / c.queries * c.keys + s) * c.groups + g] = true;
      if (!rows.empty()) continue;
      const int64_t size = int64_t{p.heads_per_group()} * c.dim;
      uint16_t* const first = &p.q[(at * c.groups + g) * size];
      std::fill(first, first + size, to_16(c.dtype, NAN));
    }
  }
  for (int64_t key = 0; key < p.num_keys(); ++key) {
    if (is_seen[key]) continue;
    std::fill_n(&p.k[key * c.dim], c.dim, to_16(c.dtype, NAN));
    std::fill_n(&p.v[key * c.value_dim], c.value_dim, to_16(c.dtype, key % 2 ? NAN : INFINITY));
  }
  return p;
}

// ---- solutions ---------------------------------------------------------------------------------

// The results of the forward pass. The output is without sinks.
struct SparseForward {
  std::vector<double> out, max_logit, log_sum;
};

// The inputs of a problem as floating-point numbers.
struct SparseValues {
  std::vector<float> q, k, v;

  explicit SparseValues(const SparseAttentionProblem& x)
      : q(decode(x, x.q)), k(decode(x, x.k)), v(decode(x, x.v)) {}
  static std::vector<float> decode(const SparseAttentionProblem& x,
                                   const std::vector<uint16_t>& bits) {
    std::vector<float> y;
    for (const uint16_t b : bits) y.push_back(from_16(x.c.dtype, b));
    return y;
  }
};

inline double dot(const float* a, const float* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += double(a[i]) * b[i];
  return sum;
}

// Calls visit(row, keys, scores) for each row of the output that sees a key. `keys` are numbers of
// (batch entry, row of k, KV head).
template <typename Visit>
void for_each_row(const SparseAttentionProblem& x, const SparseValues& values, Visit visit) {
  const SparseAttentionCase& c = x.c;
  std::vector<int64_t> keys;
  std::vector<double> scores;
  for (int64_t row = 0; row < x.num_rows(); ++row) {
    const int64_t at = x.query_of(row);
    if (row % x.heads_per_group() == 0) {
      keys = x.seen(at, x.group_of(row));
      for (int64_t& s : keys) s = (at / c.queries * c.keys + s) * c.groups + x.group_of(row);
    }
    if (keys.empty()) continue;
    scores.clear();
    for (const int64_t key : keys) {
      const double sum = dot(&values.q[row * c.dim], &values.k[key * c.dim], c.dim);
      scores.push_back(static_cast<float>(x.scale * sum));
    }
    visit(row, keys, scores);
  }
}

inline SparseForward solve_forward(const SparseAttentionProblem& x) {
  const SparseAttentionCase& c = x.c;
  const SparseValues values(x);
  SparseForward y;
  y.out.resize(x.num_rows() * c.value_dim);
  y.max_logit.resize(x.num_rows(), -INFINITY), y.log_sum.resize(x.num_rows());
  for_each_row(x, values, [&](int64_t row, const auto& keys, const auto& scores) {
    const bool nan =
        std::any_of(scores.begin(), scores.end(), [](double s) { return std::isnan(s); });
    const double max_score = nan ? NAN : *std::max_element(scores.begin(), scores.end());
    double total = 0;
    double* const out = &y.out[row * c.value_dim];
    for (size_t i = 0; i < keys.size(); ++i) {
      const double p = std::exp(scores[i] - max_score);
      total += p;
      for (int e = 0; e < c.value_dim; ++e) out[e] += p * values.v[keys[i] * c.value_dim + e];
    }
    for (int e = 0; e < c.value_dim; ++e) out[e] /= total;
    y.max_logit[row] = max_score, y.log_sum[row] = std::log(total);
  });
  return y;
}

// Returns the output with sinks.
inline std::vector<double> with_sinks(const SparseAttentionProblem& x, const SparseForward& y) {
  std::vector<double> out = y.out;
  for (size_t i = 0; i < out.size() && x.c.sinks; ++i) {
    const int64_t row = i / x.c.value_dim;
    const double sink =
        x.sinks[x.query_of(row) / x.c.queries * x.c.heads + row % x.c.heads] - y.max_logit[row];
    out[i] = y.max_logit[row] == -INFINITY ? 0 : out[i] / (1 + std::exp(sink - y.log_sum[row]));
  }
  return out;
}

struct SparseGradients {
  std::vector<double> dq, dk, dv;
};

// The results of the forward pass, and the gradients of these results.
struct SparseBackwardInputs {
  std::vector<uint16_t> out, dout;
  std::vector<float> max_logit, log_sum, dlse;
};

inline SparseBackwardInputs make_backward_inputs(const SparseAttentionProblem& x, uint64_t seed) {
  const SparseAttentionCase& c = x.c;
  std::mt19937_64 random(seed + 1000);
  std::normal_distribution<float> normal;
  const SparseForward results = solve_forward(x);
  SparseBackwardInputs y;
  y.max_logit.assign(results.max_logit.begin(), results.max_logit.end());
  y.log_sum.assign(results.log_sum.begin(), results.log_sum.end());
  for (const double out : results.out) {
    const bool empty = y.max_logit[y.out.size() / c.value_dim] == -INFINITY;
    y.out.push_back(to_16(c.dtype, static_cast<float>(out)));
    y.dout.push_back(to_16(c.dtype, empty ? NAN : normal(random)));
  }
  y.out.resize(y.out.size() + 8), y.dout.resize(y.dout.size() + 8);
  for (const float max_logit : y.max_logit) {
    y.dlse.push_back(max_logit == -INFINITY ? NAN : normal(random));
  }
  return y;
}

inline SparseGradients solve_backward(const SparseAttentionProblem& x,
                                      const SparseBackwardInputs& inputs) {
  const SparseAttentionCase& c = x.c;
  const SparseValues values(x);
  const std::vector<float> out = SparseValues::decode(x, inputs.out);
  const std::vector<float> dout = SparseValues::decode(x, inputs.dout);
  SparseGradients y;
  y.dq.resize(x.num_rows() * c.dim);
  y.dk.resize(x.num_keys() * c.dim), y.dv.resize(x.num_keys() * c.value_dim);
  for_each_row(x, values, [&](int64_t row, const auto& keys, const auto& scores) {
    const float* const grad = &dout[row * c.value_dim];
    const double delta = dot(&out[row * c.value_dim], grad, c.value_dim) - inputs.dlse[row];
    for (size_t i = 0; i < keys.size(); ++i) {
      const int64_t key = keys[i];
      const double p = std::exp(scores[i] - inputs.max_logit[row] - inputs.log_sum[row]);
      const double dp = dot(grad, &values.v[key * c.value_dim], c.value_dim);
      const double ds = x.scale * p * (dp - delta);
      for (int e = 0; e < c.value_dim; ++e) y.dv[key * c.value_dim + e] += p * grad[e];
      for (int d = 0; d < c.dim; ++d) {
        y.dq[row * c.dim + d] += ds * values.k[key * c.dim + d];
        y.dk[key * c.dim + d] += ds * values.q[row * c.dim + d];
      }
    }
  });
  return y;
}

// Returns the largest error of float32 gradients, relative to 1 + |expected|.
inline double difference(const std::vector<float>& got, const std::vector<double>& expected) {
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::fabs(got[i] - expected[i]) / (1 + std::fabs(expected[i]));
    worst = std::max(worst, std::isnan(error) ? INFINITY : error);
  }
  return worst;
}

// Returns the difference of the gradients of q. The first two dimensions are left out if they are
// sums of huge keys.
inline double query_difference(const SparseAttentionProblem& x, std::vector<uint16_t> got,
                               std::vector<double> expected) {
  for (size_t i = 0; i < expected.size() && x.c.level != 0.f; i += x.c.dim) {
    got[i] = got[i + 1] = 0, expected[i] = expected[i + 1] = 0;
  }
  return difference(x.c.dtype, got, expected);
}

// Returns the largest relative error that gradients may have. With keys of up to 3e38, dQ is a sum
// of products that cancel, because dS sums up to zero over the keys.
inline double gradient_tolerance(const SparseAttentionCase& c) {
  return c.level != 0.f ? 0.1 : 0.03;
}

inline const SparseAttentionCase kSparseAttentionCases[] = {
    {"one query, one key", 1, 1, 1, 1, 1, 64, 64, 1, 1},
    {"16 heads, blocks of 128, causal", 1, 40, 380, 32, 2, 128, 128, 3, 128, Lists::kSimilar, true,
     350},
    // The backward pass of these takes tiles of 128 keys: of the first two on the emulator, which
    // has 2 or 3 SMs, and of the third one on up to 144 SMs.
    {"32 heads, blocks of 128, several parts", 3, 30, 450, 32, 1, 96, 128, 3, 128, Lists::kRandom,
     true, 420},
    {"duplicates, blocks of 128", 4, 9, 300, 16, 1, 128, 128, 5, 128, Lists::kDuplicates},
    {"2 heads, blocks of 128, many key tiles", 1, 20, 1130, 128, 64, 128, 128, 3, 128,
     Lists::kRandom, true, 1110},
    {"16 heads, blocks of 64", 2, 20, 300, 16, 1, 128, 128, 3, 64},
    {"1 head, blocks of 16, causal", 1, 150, 213, 2, 2, 64, 64, 4, 16, Lists::kSimilar, true},
    {"4 heads, blocks of 32", 1, 70, 213, 8, 2, 64, 64, 3, 32, Lists::kSimilar},
    {"12 heads, blocks of 4, tail, 256 dims", 1, 25, 150, 24, 2, 256, 256, 12, 4, Lists::kSimilar,
     true, 120, 0, 0, true},
    {"32 heads, blocks of 1", 1, 20, 200, 32, 1, 64, 64, 40, 1, Lists::kRandom, true, 180},
    {"blocks of 1, similar, f16",
     1,
     30,
     300,
     16,
     1,
     64,
     64,
     70,
     1,
     Lists::kSimilar,
     true,
     270,
     0,
     0,
     false,
     false,
     false,
     false,
     false,
     DType::kF16},
    {"192 and 128 dims, forced blocks", 1, 30, 400, 16, 1, 192, 128, 2, 64, Lists::kRandom, true,
     370, 1, 2},
    {"forced blocks and tail", 2, 60, 100, 4, 1, 64, 64, 2, 16, Lists::kRandom, true, 30, 2, 1,
     true},
    {"all blocks are forced", 1, 70, 100, 4, 1, 64, 64, 1, 32, Lists::kInvalid, true, 20, 0, 1000},
    {"forced blocks without slots", 1, 70, 100, 4, 1, 64, 64, 0, 16, Lists::kRandom, true, 20, 1,
     1},
    {"positions before the keys", 1, 60, 100, 4, 1, 64, 64, 2, 16, Lists::kRandom, true, -20, 1, 1,
     true},
    {"positions near 2^31", 1, 40, 100, 4, 1, 64, 64, 2, 16, Lists::kRandom, true,
     INT_MAX - int64_t{39}, 1, 2, true},
    {"several ranges of queries", 1, 100, 250, 32, 1, 64, 64, 3, 64, Lists::kRandom, true, 150},
    {"packed", 2, 90, 213, 8, 2, 64, 64, 2, 16, Lists::kRandom, true, 0, 0, 1, false, true},
    {"packed, not causal", 1, 50, 150, 4, 1, 64, 64, 3, 4, Lists::kSimilar, false, 0, 0, 0, false,
     true},
    {"packed, blocks of 128, sinks",
     1,
     40,
     500,
     16,
     1,
     128,
     128,
     1,
     128,
     Lists::kInvalid,
     true,
     0,
     1,
     1,
     false,
     true,
     false,
     false,
     true},
    {"duplicates", 1, 40, 300, 8, 2, 64, 64, 7, 32, Lists::kDuplicates},
    {"duplicates, blocks of 1, causal", 1, 30, 60, 16, 1, 64, 64, 9, 1, Lists::kDuplicates, true,
     30},
    {"1 head, blocks of 1, two tables", 1, 130, 1500, 1, 1, 64, 64, 16, 1},
    {"long lists, forced blocks, packed", 1, 24, 213, 16, 1, 64, 64, 130, 4, Lists::kSimilar, true,
     0, 1, 2, true, true},
    {"long lists, duplicates", 1, 8, 100, 16, 1, 64, 64, 130, 4, Lists::kDuplicates, true, 92},
    {"invalid indices", 1, 40, 200, 16, 1, 64, 64, 6, 16, Lists::kInvalid},
    {"invalid indices, tail", 1, 40, 200, 16, 1, 64, 64, 6, 64, Lists::kInvalid, true, 160, 0, 0,
     true},
    {"lengths and topk_length", 3, 40, 150, 8, 2, 64, 64, 5, 16, Lists::kRandom, false, 0, 0, 0,
     false, false, true, true},
    {"topk_length, forced blocks", 2, 40, 150, 8, 2, 64, 64, 5, 16, Lists::kSimilar, true, 110, 1,
     1, false, false, true, true},
    {"sinks, f16", 2,   40, 150, 16,    2,     64,    64,    4,    16,         Lists::kSimilar,
     true,         100, 0,  0,   false, false, false, false, true, DType::kF16},
    {"odd dims, 3 heads", 2, 100, 150, 6, 2, 72, 40, 3, 16, Lists::kRandom, true, 40},
    {"200 and 136 dims, f16",
     1,
     30,
     150,
     16,
     1,
     200,
     136,
     3,
     32,
     Lists::kRandom,
     false,
     0,
     0,
     0,
     false,
     false,
     false,
     false,
     false,
     DType::kF16},
    {.name = "keys of -1e9",
     .batch = 1,
     .queries = 40,
     .keys = 300,
     .heads = 16,
     .groups = 1,
     .dim = 64,
     .value_dim = 64,
     .slots = 3,
     .block_size = 64,
     .scale = 0.3f,
     .level = -1e9f},
    {.name = "keys of 1e9",
     .batch = 1,
     .queries = 40,
     .keys = 200,
     .heads = 4,
     .groups = 1,
     .dim = 128,
     .value_dim = 128,
     .slots = 3,
     .block_size = 32,
     .scale = 0.5f,
     .level = 1e9f},
    {.name = "keys of -3e38, 256 dims",
     .batch = 1,
     .queries = 20,
     .keys = 150,
     .heads = 12,
     .groups = 1,
     .dim = 256,
     .value_dim = 256,
     .slots = 12,
     .block_size = 4,
     .scale = 0.3f,
     .level = -3e38f},
    {"many queries, one tile of keys", 1, 150, 60, 32, 1, 64, 64, 2, 32},
    {"no keys", 1, 30, 0, 2, 1, 128, 128, 2, 16},
    {"no queries", 1, 0, 30, 2, 1, 128, 128, 2, 16},
    {"no batch entries", 0, 30, 30, 2, 1, 128, 128, 2, 16},
};

// Every query sees every key, so that all outputs have a NaN, whatever their sinks are, and lse and
// the largest score too for the last KV head. For the forward pass only.
inline const SparseAttentionCase kNanBesideSinks = {.name = "a NaN beside sinks",
                                                    .batch = 1,
                                                    .queries = 20,
                                                    .keys = 130,
                                                    .heads = 8,
                                                    .groups = 2,
                                                    .dim = 64,
                                                    .value_dim = 64,
                                                    .slots = 9,
                                                    .block_size = 16,
                                                    .sinks = true,
                                                    .nan = true};

}  // namespace jax_dsa
