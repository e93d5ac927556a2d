// Tests gated pooling against float64 on the CPU, or times it.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o gated_pool_check tests/kernels/gpu/gated_pool_check.cu cuda/gated_pool/dispatch.cu \
//       cuda/gated_pool/mean.cu
//   ./gated_pool_check [test|small|bench]
// Rates count the bytes that must be read and written: values, gates and keys, and in the backward
// pass the gradients of all three. Those of the copy count the bytes that it reads and writes.
#include <algorithm>
#include <string>

#include "common/launch.cuh"
#include "gated_pool/pool.cuh"
#include "gpu/rates.cuh"
#include "problems/gated_pool_problem.h"

namespace {

using namespace gated_pool_problem;
using jax_dsa::GatedPoolBwdParams;
using jax_dsa::GatedPoolFwdParams;

// Times both passes, also with documents of 1000 tokens, a length that 128 does not divide.
void bench_shape(Rates& rates, int64_t tokens, int ratio, int halves, int dim, DType dtype) {
  Memory memory;
  const int64_t n = tokens * halves * dim, keys = tokens / ratio * dim;
  GatedPoolFwdParams fwd = {};
  fwd.in.batch = 1, fwd.in.tokens = tokens, fwd.in.dtype = dtype;
  fwd.in.ratio = ratio, fwd.in.halves = halves, fwd.in.dim = dim;
  const auto filled = [&](int64_t bytes) {
    auto* const x = memory.room<uint8_t>(bytes);
    fill<<<1024, 256>>>(reinterpret_cast<uint32_t*>(x), bytes / 4);
    return x;
  };
  const int size = bytes_of(dtype);
  fwd.in.values = filled(n * size), fwd.in.gates = filled(n * size);
  fwd.in.bias = reinterpret_cast<float*>(filled(int64_t{ratio} * halves * dim * 4));
  fwd.out = memory.room<uint8_t>(keys * size);
  GatedPoolBwdParams bwd = {};
  bwd.in = fwd.in;
  bwd.dout = filled(keys * size);
  bwd.dvalues = memory.room<uint8_t>(n * size), bwd.dgates = memory.room<uint8_t>(n * size);
  const int64_t splits = jax_dsa::gated_pool_bwd_splits(1, tokens, ratio, halves, dim);
  bwd.sums = memory.room<float>(splits * (ratio * halves + 1) * dim);
  bwd.splits = splits;
  std::vector<int32_t> starts;
  for (int64_t t = 0; t < tokens; ++t) starts.push_back(static_cast<int32_t>(t / 1000 * 1000));
  const auto* const documents = memory.put(starts);
  const std::string shape = "T" + std::to_string(tokens) + " D" + std::to_string(dim) + " ratio " +
                            std::to_string(ratio) + (halves == 2 ? " overlapping" : "") +
                            (dtype == DType::kF32 ? " f32" : "");
  const double once = double(size) * (2 * n + keys), twice = double(size) * (4 * n + keys);
  const int64_t slots = tokens / ratio;
  fwd.squares = memory.room<float>(jax_dsa::gated_pool_tiles(ratio, halves, dim) * slots);
  bwd.dsquares = reinterpret_cast<float*>(filled(slots * 4));
  const auto* const scale = reinterpret_cast<float*>(filled(dim * 4));
  for (const std::string with : {"", ", scaled", ", documents"}) {
    fwd.in.starts = bwd.in.starts = with == ", documents" ? documents : nullptr;
    fwd.in.scale = bwd.in.scale = with == ", scaled" ? scale : nullptr;
    const std::string name = shape + with;
    rates.print(name + ", fwd", once, [&] { return jax_dsa::launch_gated_pool_fwd(fwd, nullptr); });
    rates.print(name + ", bwd", twice,
                [&] { return jax_dsa::launch_gated_pool_bwd(bwd, nullptr); });
  }
}

// Times both passes of mean pooling, also with documents of 1000 tokens.
void bench_mean(Rates& rates, int64_t tokens, int ratio, int dim, DType dtype) {
  Memory memory;
  const int64_t n = tokens * dim * bytes_of(dtype);
  jax_dsa::MeanPoolParams p = {};
  p.batch = 1, p.tokens = tokens, p.ratio = ratio, p.dim = dim, p.dtype = dtype;
  p.factor = 1.f / static_cast<float>(ratio);
  auto *const values = memory.room(n), *const keys = memory.room(n / ratio);
  fill<<<1024, 256>>>(reinterpret_cast<uint32_t*>(values), n / 4);
  fill<<<1024, 256>>>(reinterpret_cast<uint32_t*>(keys), n / ratio / 4);
  std::vector<int32_t> starts;
  for (int64_t t = 0; t < tokens; ++t) starts.push_back(static_cast<int32_t>(t / 1000 * 1000));
  const auto* const documents = memory.put(starts);
  const std::string shape = "mean T" + std::to_string(tokens) + " D" + std::to_string(dim) +
                            " ratio " + std::to_string(ratio);
  for (const bool packed : {false, true}) {
    p.starts = packed ? documents : nullptr;
    const std::string name = shape + (packed ? ", documents" : "");
    p.from = values, p.to = keys;
    rates.print(name + ", fwd", double(n + n / ratio),
                [&] { return jax_dsa::launch_mean_pool_fwd(p, nullptr); });
    p.from = keys, p.to = values;
    rates.print(name + ", bwd", double(n + n / ratio),
                [&] { return jax_dsa::launch_mean_pool_bwd(p, nullptr); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  setvbuf(stdout, nullptr, _IOLBF, 0);
  if (what != "bench") {
    int bad = 0;
    const auto check = [&](const Case& c, bool scaled) {
      Memory memory;
      bad += !run(c, scaled, 1, memory);
      if (c.halves == 1 && !scaled) bad += !run_mean(c, 1, memory);
    };
    for (const Case& c : kCases) check(c, false), check(c, true);
    if (what == "test") {  // more CTAs than run at a time
      check({"many keys, documents", 3, 5000, 4, 2, 512, DType::kBF16, true}, true);
      check({"many keys, f32", 2, 6001, 4, 2, 128, DType::kF32}, true);
      check({"many keys of one half, documents", 3, 5001, 4, 1, 512, DType::kBF16, true}, false);
      check({"many long blocks, documents", 2, 9000, 128, 1, 256, DType::kBF16, true}, true);
    }
    printf(bad ? "FAILED %d\n" : "all good\n", bad);
    return bad != 0;
  }
  Rates rates(10, 52);
  bench_shape(rates, 32768, 4, 2, 512, DType::kBF16);
  bench_shape(rates, 131072, 4, 2, 512, DType::kBF16);
  bench_shape(rates, 32768, 4, 2, 128, DType::kBF16);
  bench_shape(rates, 32768, 128, 1, 512, DType::kBF16);
  bench_shape(rates, 131072, 128, 1, 512, DType::kBF16);
  bench_shape(rates, 32768, 4, 2, 512, DType::kF32);
  bench_shape(rates, 131072, 4, 1, 128, DType::kBF16);
  bench_shape(rates, 1048576, 4, 1, 128, DType::kBF16);
  bench_mean(rates, 131072, 4, 128, DType::kBF16);
  bench_mean(rates, 1048576, 4, 128, DType::kBF16);
  bench_mean(rates, 1048576, 16, 128, DType::kBF16);
  return 0;
}
