// Tests the pooling of blocks of tokens against float64 on the CPU, then times it.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -o gated_pool_check \
//       benchmarks/micro/gated_pool_check.cu cuda/gated_pool/dispatch.cu
//   ./gated_pool_check [test|small|bench]
// Rates count what must be read and written: values, gates and keys, and in the backward pass the
// gradients of all three. The copy's count bytes read and written.
#include <algorithm>
#include <string>

#include "../../tests/emulator/gated_pool_problem.h"
#include "common/launch.cuh"
#include "gated_pool/pool.cuh"
#include "rates.cuh"

namespace {

using namespace gated_pool_problem;
using jax_dsa::GatedPoolBwdParams;
using jax_dsa::GatedPoolFwdParams;

template <int kBlocks>
cudaError_t launch_variant(const GatedPoolBwdParams& x) {
  using namespace jax_dsa::gated_pool;
  const int tiles = jax_dsa::ceil_div(x.in.dim, Few::kTile);
  const auto slots = static_cast<int>(jax_dsa::ceil_div(x.in.tokens, int64_t{x.in.ratio}));
  return jax_dsa::launch_blocks(bwd_kernel<DType::kBF16, Few, false, kBlocks>, x.parts * tiles,
                                kThreads, sizeof(BiasShared), nullptr, x, slots, tiles);
}

// Documents of 1000 tokens, which no ratio divides.
void bench_shape(Rates& rates, int64_t tokens, int ratio, int halves, int dim, DType dtype,
                 bool variants) {
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
  const int64_t parts = jax_dsa::gated_pool_parts(1, tokens, ratio, halves, dim);
  bwd.dbias = memory.room<float>(8 * parts * ratio * halves * dim);
  bwd.parts = parts;
  std::vector<int32_t> starts;
  for (int64_t t = 0; t < tokens; ++t) starts.push_back(static_cast<int32_t>(t / 1000 * 1000));
  const auto* const documents = memory.put(starts);
  const std::string shape = "T" + std::to_string(tokens) + " D" + std::to_string(dim) + " ratio " +
                            std::to_string(ratio) + (halves == 2 ? " overlapping" : "") +
                            (dtype == DType::kF32 ? " f32" : "");
  const double once = double(size) * (2 * n + keys), twice = double(size) * (4 * n + keys);
  for (const bool packed : {false, true}) {
    fwd.in.starts = bwd.in.starts = packed ? documents : nullptr;
    const std::string of = shape + (packed ? ", documents" : "");
    rates.print(of + ", fwd", once, [&] { return jax_dsa::launch_gated_pool_fwd(fwd, nullptr); });
    rates.print(of + ", bwd", twice, [&] { return jax_dsa::launch_gated_pool_bwd(bwd, nullptr); });
  }
  bwd.in.starts = nullptr;
  if (!variants) return;
  for (const int64_t quarters : {2, 3, 6, 8, 16}) {
    bwd.parts = std::max<int64_t>(1, parts * quarters / 4);
    const std::string of = "  " + std::to_string(bwd.parts) + " parts, at most ";
    rates.print(of + "4 blocks, bwd", twice, [&] { return launch_variant<4>(bwd); });
    rates.print(of + "3 blocks, bwd", twice, [&] { return launch_variant<3>(bwd); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  setvbuf(stdout, nullptr, _IOLBF, 0);
  if (what != "bench") {
    std::vector<Case> cases(std::begin(kCases), std::end(kCases));
    if (what == "test") {  // more than run at a time
      cases.push_back({"many keys, documents", 3, 5000, 4, 2, 512, DType::kBF16, true});
      cases.push_back({"many keys, f32", 2, 6001, 4, 2, 128, DType::kF32});
      cases.push_back({"many long blocks, documents", 2, 9000, 128, 1, 256, DType::kBF16, true});
    }
    int bad = 0;
    for (const Case& c : cases) {
      Memory memory;
      bad += !run(c, 1, memory);
    }
    printf(bad ? "FAILED %d\n" : "all good\n", bad);
    return bad != 0;
  }
  Rates rates(10, 52);
  bench_shape(rates, 32768, 4, 2, 512, DType::kBF16, true);
  bench_shape(rates, 131072, 4, 2, 512, DType::kBF16, false);
  bench_shape(rates, 32768, 4, 2, 128, DType::kBF16, false);
  bench_shape(rates, 32768, 128, 1, 512, DType::kBF16, false);
  bench_shape(rates, 131072, 128, 1, 512, DType::kBF16, false);
  bench_shape(rates, 32768, 4, 2, 512, DType::kF32, false);
  return 0;
}
