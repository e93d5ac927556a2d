// Tests the sparse attention kernels against float64 on the CPU, then times them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o sparse_attention_check tests/kernels/gpu/sparse_attention_check.cu \
//       cuda/sparse_attention/*.cu cuda/sparse_attention/tiers.cc
//   ./sparse_attention_check [test|small|bench|profile] [substring of case names]
// `small` is for compute-sanitizer.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "gpu/check.cuh"
#include "gpu/random_bf16.cuh"
#include "problems/sparse_attention_problem.h"

namespace jax_dsa {
namespace {

// ---- test --------------------------------------------------------------------------------------

// Copies the lists of a problem to the device.
SparseAttentionLists upload_lists(Memory& memory, const SparseAttentionProblem& x) {
  SparseAttentionLists y = x.attention_lists();
  y.indices = memory.put(x.indices);
  if (y.topk_length) y.topk_length = memory.put(x.topk_length);
  if (y.positions) y.positions = memory.put(x.positions);
  if (y.starts) y.starts = memory.put(x.starts);
  if (y.lengths) y.lengths = memory.put(x.lengths);
  return y;
}

bool test_forward(const SparseAttentionProblem& x, bool print) {
  const SparseAttentionCase& c = x.c;
  const SparseForward expected = solve_forward(x);
  const std::vector<double> expected_out = with_sinks(x, expected);
  Memory memory;
  SparseAttentionFwdParams p = {};
  x.set_sizes(p);
  p.lists = upload_lists(memory, x);
  p.q = memory.put(x.q), p.k = memory.put(x.k), p.v = memory.put(x.v);
  auto* const out = memory.room<uint16_t>(expected_out.size());
  const size_t rows = expected.log_sum.size();
  p.out = out, p.max_logit = memory.room<float>(rows), p.log_sum = memory.room<float>(rows);
  if (c.sinks) p.sinks = memory.put(x.sinks), p.sinks_stride = c.heads;
  p.workspace = memory.room(sparse_attention_fwd_workspace_bytes(p));
  memory.require(launch_sparse_attention_fwd(p, nullptr));
  const double error = difference(c.dtype, memory.get(out, expected_out.size()), expected_out);
  const double max_error = row_difference(memory.get(p.max_logit, rows), expected.max_logit);
  const double sum_error = row_difference(memory.get(p.log_sum, rows), expected.log_sum);
  const bool good = error < 0.02 && std::max(max_error, sum_error) < 1e-4;
  if (print || !good) {
    printf("%-4s forward   %-38s out %.1e  max %.1e  sum %.1e\n", good ? "ok" : "BAD", c.name,
           error, max_error, sum_error);
  }
  return good;
}

bool test_backward(const SparseAttentionProblem& x, uint64_t seed, bool print) {
  const SparseAttentionCase& c = x.c;
  const SparseBackwardInputs inputs = make_backward_inputs(x, seed);
  const SparseGradients expected = solve_backward(x, inputs);
  Memory memory;
  SparseAttentionBwdParams p = {};
  x.set_sizes(p);
  p.lists = upload_lists(memory, x);
  p.q = memory.put(x.q), p.k = memory.put(x.k), p.v = memory.put(x.v);
  p.out = memory.put(inputs.out), p.dout = memory.put(inputs.dout);
  p.max_logit = memory.put(inputs.max_logit), p.log_sum = memory.put(inputs.log_sum);
  p.dlse = memory.put(inputs.dlse);
  auto* const dq = memory.room<uint16_t>(expected.dq.size());
  p.dq = dq;
  p.dk = memory.room<float>(expected.dk.size()), p.dv = memory.room<float>(expected.dv.size());
  p.workspace = memory.room(sparse_attention_bwd_workspace_bytes(p));
  memory.require(launch_sparse_attention_bwd(p, nullptr));
  const auto dk = memory.get(p.dk, expected.dk.size()), dv = memory.get(p.dv, expected.dv.size());
  const double q_error = query_difference(x, memory.get(dq, expected.dq.size()), expected.dq);
  const double k_error = difference(dk, expected.dk), v_error = difference(dv, expected.dv);
  memory.require(launch_sparse_attention_bwd(p, nullptr));
  const bool same = memory.get(p.dk, dk.size()) == dk && memory.get(p.dv, dv.size()) == dv;
  const bool good = std::max({q_error, k_error, v_error}) < gradient_tolerance(c) && same;
  if (print || !good) {
    printf("%-4s backward  %-38s dq %.1e  dk %.1e  dv %.1e%s\n", good ? "ok" : "BAD", c.name,
           q_error, k_error, v_error, same ? "" : "  BITS DIFFER");
  }
  return good;
}

int test(bool small, const char* filter) {
  int failures = 0;
  for (const SparseAttentionCase& c : kSparseAttentionCases) {
    if (!strstr(c.name, filter)) continue;
    for (uint64_t seed = 1; seed <= (small ? 1 : 3); ++seed) {
      const SparseAttentionProblem x = make_sparse_attention(c, seed);
      failures += !test_forward(x, seed == 1);
      failures += !test_backward(x, seed, seed == 1);
      fflush(stdout);
    }
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}

// ---- bench -------------------------------------------------------------------------------------

// Causal lists of distinct blocks.
struct Bench {
  const char* name;
  int queries, heads, groups, dim, value_dim, slots, block_size;
  bool similar, tail_block = false;
};

constexpr Bench kBenches[] = {
    {"T8192 16 blocks of 128, similar", 8192, 64, 4, 128, 128, 16, 128, true},
    {"T8192 16 blocks of 128, random", 8192, 64, 4, 128, 128, 16, 128, false},
    {"T8192 16 blocks of 64, similar", 8192, 64, 4, 128, 128, 16, 64, true},
    {"T8192 16 blocks of 64, random", 8192, 64, 4, 128, 128, 16, 64, false},
    {"T32768 16 blocks of 128, similar", 32768, 64, 4, 128, 128, 16, 128, true},
    {"T32768 16 blocks of 128, random", 32768, 64, 4, 128, 128, 16, 128, false},
    {"T32768 16 blocks of 64, similar", 32768, 64, 4, 128, 128, 16, 64, true},
    {"T32768 16 blocks of 64, random", 32768, 64, 4, 128, 128, 16, 64, false},
    {"T32768 D192 E128 16 of 64, similar", 32768, 64, 4, 192, 128, 16, 64, true},
    {"T8192 N24 D256 2048 of 1, similar", 8192, 24, 2, 256, 256, 2048, 1, true},
    {"T32768 N24 D256 128 of 16, similar", 32768, 24, 2, 256, 256, 128, 16, true, true},
    {"T32768 N24 D256 64 of 32, similar", 32768, 24, 2, 256, 256, 64, 32, true, true},
    {"T32768 N24 D256 32 of 64, similar", 32768, 24, 2, 256, 256, 32, 64, true, true},
    {"T32768 N24 D256 512 of 4, similar", 32768, 24, 2, 256, 256, 512, 4, true, true},
    {"T32768 N24 D256 512 of 4, random", 32768, 24, 2, 256, 256, 512, 4, false, true},
};

struct BenchLists {
  std::vector<int32_t> indices, positions;
  double pairs = 0;       // of a query and a key that it sees, summed over the KV heads
  double similarity = 0;  // mean length of the union of 8 neighbouring lists by that of a list
};

BenchLists make_lists(const Bench& b) {
  constexpr int kNeighbours = 8;
  BenchLists y;
  const int64_t stride = int64_t{b.groups} * b.slots;
  y.indices.resize(b.queries * stride);
  double lengths = 0, unions = 0;
  for (int g = 0; g < b.groups; ++g) {
    const int blocks = (b.queries + b.block_size - 1) / b.block_size;
    ListMaker maker(b.slots, blocks, g + 1);
    std::vector<int> named(blocks, -1);  // by which neighbours last
    for (int t = 0; t < b.queries; ++t) {
      int32_t* const list = &y.indices[t * stride + g * b.slots];
      const int own = t / b.block_size;
      // A list includes the query's own block unless that is seen as the tail.
      const bool before = b.similar && t > 0;
      maker.make(list, before ? list - stride : nullptr, b.tail_block ? own : own + 1);
      if (!b.tail_block && std::find(list, list + b.slots, own) == list + b.slots) list[0] = own;
      std::sort(list, list + b.slots);
      if (b.tail_block) y.pairs += t % b.block_size + 1;
      for (int i = 0; i < b.slots; ++i) {
        if (list[i] < 0) continue;
        y.pairs += std::min(b.block_size, t + 1 - list[i] * b.block_size);
        lengths += 1;
        if (named[list[i]] != t / kNeighbours) unions += kNeighbours;
        named[list[i]] = t / kNeighbours;
      }
    }
  }
  y.similarity = unions / lengths;
  for (int t = 0; t < b.queries; ++t) y.positions.push_back(t);
  return y;
}

struct Arrays {
  Memory memory;
  SparseAttentionFwdParams forward = {};
  SparseAttentionBwdParams backward = {};
  double pairs, similarity;

  explicit Arrays(const Bench& b) {
    const BenchLists lists = make_lists(b);
    pairs = lists.pairs, similarity = lists.similarity;
    const int64_t rows = int64_t{b.queries} * b.heads, keys = int64_t{b.queries} * b.groups;
    auto& f = forward;
    f.q = random(rows * b.dim, 1), f.k = random(keys * b.dim, 2);
    f.v = random(keys * b.value_dim, 3), f.out = memory.room<uint16_t>(rows * b.value_dim);
    f.max_logit = memory.room<float>(rows), f.log_sum = memory.room<float>(rows);
    f.lists.indices = memory.put(lists.indices), f.lists.positions = memory.put(lists.positions);
    f.lists.slots = b.slots, f.lists.block_size = b.block_size;
    f.lists.tail_block = b.tail_block;
    f.batch = 1, f.queries = f.keys = b.queries, f.heads = b.heads, f.groups = b.groups;
    f.dim = b.dim, f.value_dim = b.value_dim, f.dtype = DType::kBF16;
    f.scale = 1 / std::sqrt(float(b.dim));
    f.workspace = memory.room(sparse_attention_fwd_workspace_bytes(f));
    auto& g = backward;
    g.q = f.q, g.k = f.k, g.v = f.v, g.out = f.out, g.lists = f.lists;
    g.max_logit = f.max_logit, g.log_sum = f.log_sum;
    g.dout = random(rows * b.value_dim, 4);
    g.dlse = memory.put(std::vector<float>(rows));
    g.dq = memory.room<uint16_t>(rows * b.dim);
    g.dk = memory.room<float>(keys * b.dim), g.dv = memory.room<float>(keys * b.value_dim);
    g.batch = 1, g.queries = g.keys = b.queries, g.heads = b.heads, g.groups = b.groups;
    g.dim = b.dim, g.value_dim = b.value_dim, g.dtype = DType::kBF16, g.scale = f.scale;
    g.workspace = memory.room(sparse_attention_bwd_workspace_bytes(g));
  }
  uint16_t* random(int64_t n, uint64_t seed) {
    return fill_random_bf16(memory.room<uint16_t>(n), n, seed);
  }
};

template <typename F>
float milliseconds(F launch) {
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  CHECK(cudaEventRecord(a));
  CHECK(launch());
  CHECK(cudaEventRecord(b));
  CHECK(cudaEventSynchronize(b));
  float ms;
  CHECK(cudaEventElapsedTime(&ms, a, b));
  CHECK(cudaEventDestroy(a));
  CHECK(cudaEventDestroy(b));
  return ms;
}

// Prints medians of runs. Both passes take turns, so that changes of the clock affect both.
void bench(const char* filter) {
  constexpr int kRuns = 11;
  printf("%-38s %10s %10s %8s   %11s %8s\n", "", "similarity", "forward ms", "TFLOPS",
         "backward ms", "TFLOPS");
  for (const Bench& b : kBenches) {
    if (!strstr(b.name, filter)) continue;
    const Arrays x(b);
    std::vector<float> forward, backward;
    for (int run = -1; run < kRuns; ++run) {  // the first run warms up
      const float f = milliseconds([&] { return launch_sparse_attention_fwd(x.forward, nullptr); });
      const float g =
          milliseconds([&] { return launch_sparse_attention_bwd(x.backward, nullptr); });
      if (run >= 0) forward.push_back(f), backward.push_back(g);
    }
    std::sort(forward.begin(), forward.end());
    std::sort(backward.begin(), backward.end());
    const double unit = x.pairs * (b.heads / b.groups) * 2e-9;  // of the keys that queries see
    printf("%-38s %10.2f %10.3f %8.0f   %11.3f %8.0f\n", b.name, x.similarity, forward[kRuns / 2],
           unit * (b.dim + b.value_dim) / forward[kRuns / 2], backward[kRuns / 2],
           unit * (3 * b.dim + 2 * b.value_dim) / backward[kRuns / 2]);
    fflush(stdout);
  }
}

int run(const std::string& mode, const char* filter) {
  if (mode == "test" || mode == "small") return test(mode == "small", filter);
  if (mode == "profile") {  // one launch of each direction
    for (const Bench& b : kBenches) {
      if (!strstr(b.name, filter)) continue;
      const Arrays x(b);
      CHECK(launch_sparse_attention_fwd(x.forward, nullptr));
      CHECK(launch_sparse_attention_bwd(x.backward, nullptr));
      CHECK(cudaDeviceSynchronize());
    }
  } else {
    bench(filter);
  }
  return 0;
}

}  // namespace
}  // namespace jax_dsa

int main(int argc, char** argv) {
  return jax_dsa::run(argc > 1 ? argv[1] : "test", argc > 2 ? argv[2] : "");
}
