// Tests the kernel of sparse attention over caches against float64 on the CPU, then times it.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o sparse_attention_decode_check tests/kernels/gpu/sparse_attention_decode_check.cu \
//       cuda/sparse_attention/*.cu cuda/sparse_attention/tiers.cc
//   ./sparse_attention_decode_check [test|small|bench] [substring of case names]
// `small` is for compute-sanitizer.
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>

#include "gpu/check.cuh"
#include "gpu/rates.cuh"
#include "problems/sparse_decode_problem.h"

namespace jax_dsa {
namespace {

using namespace sparse_decode_problem;

// ---- test --------------------------------------------------------------------------------------

// Larger than the cases of the emulator.
const Case kLargeCases[] = {
    {"one request, 16 blocks", 1, 1, 9000, 64, 4, 128, 16, 128, {.sinks = 1, .full = true}},
    {"70 requests", 70, 1, 2000, 32, 2, 128, 16, 64, {.page_size = 80, .sinks = 2}},
    {"300 requests", 300, 1, 700, 16, 1, 64, 8, 32},
    {"8 queries", 3, 8, 1500, 48, 2, 256, 200, 4, {.page_size = 100, .pools = true}},
    {"70 requests, fp8", 70, 1, 2000, 32, 2, 128, 16, 64, {.fp8 = true, .factors = true}},
    {"40 requests, fp8, 256 dims", 40, 2, 900, 24, 2, 256, 100, 4, {.fp8 = true}},
    {"33 requests, invariant", 33, 1, 3000, 64, 4, 128, 16, 128, {.batch_invariant = true}},
};

bool test(const Case& c, uint64_t seed) {
  const Problem x = make(c, seed);
  Memory memory;
  SparseAttentionDecodeParams p = shapes(x);
  p.q = memory.put(x.q), p.k = memory.put(x.k), p.v = memory.put(x.v);
  if (c.with.factors) p.k_scale = memory.put(x.k_scale), p.v_scale = memory.put(x.v_scale);
  p.blocks = memory.put(x.blocks), p.ends = memory.put(x.ends);
  if (c.with.sinks) p.sinks = memory.put(x.sinks);
  if (c.with.page_size > 0) p.page_table = memory.put(x.page_table);
  const int64_t rows = x.num_rows();
  auto* const out = memory.room<uint16_t>(rows * c.dim);
  p.out = out, p.max_logit = memory.room<float>(rows), p.log_sum = memory.room<float>(rows);
  memory.require(launch_sparse_attention_decode(p, nullptr));
  const std::vector<uint16_t> first = memory.get(out, rows * c.dim);
  const Errors errors(solve(x), first, memory.get(p.max_logit, rows), memory.get(p.log_sum, rows));
  memory.require(launch_sparse_attention_decode(p, nullptr));
  const bool same = first == memory.get(out, rows * c.dim);
  const bool good = errors.good() && same;
  printf("%-4s %-28s out %.1e  max %.1e  sum %.1e  %s\n", good ? "ok" : "BAD", c.name, errors.out,
         errors.max_logit, errors.log_sum, same ? "repeats" : "DIFFERS");
  fflush(stdout);
  return good;
}

int test_all(bool small, const char* filter) {
  int bad = 0;
  const auto run = [&](const auto& cases, int seeds) {
    for (const Case& c : cases) {
      for (int seed = 1; seed <= seeds && strstr(c.name, filter); ++seed) bad += !test(c, seed);
    }
  };
  run(kCases, small ? 1 : 8);
  if (!small) run(kLargeCases, 2);
  printf(bad ? "FAILED %d\n" : "all good\n", bad);
  return bad != 0;
}

// ---- bench -------------------------------------------------------------------------------------

// N 64, G 4, D 128, lists of 16 blocks of 128.
struct Bench {
  const char* name;
  int batch, keys;
  bool fp8 = false;
};
const Bench kBenches[] = {
    {"B 1, S 131072", 1, 131072}, {"B 1, S 131072, fp8", 1, 131072, true},
    {"B 8, S 32768", 8, 32768},   {"B 8, S 32768, fp8", 8, 32768, true},
    {"B 64, S 8192", 64, 8192},   {"B 64, S 8192, fp8", 64, 8192, true},
    {"B 128, S 4096", 128, 4096}, {"B 128, S 4096, fp8", 128, 4096, true},
};

// Every launch has other lists, so that few requests do not find their keys in the L2 cache.
void bench(const char* filter) {
  constexpr int kHeads = 64, kGroups = 4, kDim = 128, kSlots = 16, kBlock = 128, kLists = 32;
  Rates rates(96, 30);
  for (const Bench& b : kBenches) {
    if (!strstr(b.name, filter)) continue;
    Memory memory;
    std::mt19937 random(7);
    std::vector<int32_t> blocks, numbers(b.keys / kBlock);
    std::iota(numbers.begin(), numbers.end(), 0);
    const int64_t lists = int64_t{b.batch} * kGroups;
    for (int64_t i = 0; i < kLists * lists; ++i) {
      for (int j = 0; j < kSlots; ++j) {
        std::swap(numbers[j], numbers[j + random() % (numbers.size() - j)]);
        blocks.push_back(numbers[j]);
      }
    }
    const int64_t rows = int64_t{b.batch} * b.keys * kGroups, out_rows = int64_t{b.batch} * kHeads;
    const int element = b.fp8 ? 1 : 2;
    const auto cache = [&] {
      auto* const x = memory.room<uint32_t>(rows * kDim * element / 4);
      fill<<<2048, 256>>>(x, rows * kDim * element / 4);
      CHECK(cudaGetLastError());
      return x;
    };
    SparseAttentionDecodeParams p = {};
    p.k = cache(), p.v = cache(), p.q = memory.put(std::vector<uint16_t>(out_rows * kDim, 0x3c00));
    if (b.fp8) p.k_scale = p.v_scale = memory.put(std::vector<float>(rows, 0.01f));
    p.ends = memory.put(std::vector<int32_t>(b.batch, b.keys));
    p.out = memory.room<uint16_t>(out_rows * kDim);
    p.max_logit = memory.room<float>(out_rows), p.log_sum = memory.room<float>(out_rows);
    p.batch = b.batch, p.queries = 1, p.keys = p.batch_rows = b.keys, p.heads = kHeads;
    p.groups = kGroups, p.dim = kDim, p.slots = kSlots, p.block_size = kBlock, p.scale = 0.088f;
    p.fp8 = b.fp8;
    const int32_t* const first = memory.put(blocks);
    const double row_bytes = kDim * element + (b.fp8 ? 4 : 0);
    const double bytes = 2. * lists * kSlots * kBlock * row_bytes + 4. * out_rows * kDim;
    for (const int splits : {0, 1, 2, 4, 8, 16}) {
      p.splits = splits;
      int64_t launch = 0;
      const std::string name = std::string(b.name) + (splits ? ", " + std::to_string(splits) : "");
      rates.print(name, bytes, [&] {
        p.blocks = first + launch++ % kLists * lists * kSlots;
        return launch_sparse_attention_decode(p, nullptr);
      });
      fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace jax_dsa

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "test";
  const char* const filter = argc > 2 ? argv[2] : "";
  if (mode != "bench") return jax_dsa::test_all(mode == "small", filter);
  jax_dsa::bench(filter);
  return 0;
}
