// Tests the indexer's forward kernels against a float64 reference and times them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o indexer_check tests/kernels/gpu/indexer_check.cu cuda/indexer/*.cu \
//       cuda/indexer/tiers.cc cuda/topk/cluster.cu cuda/topk/dispatch.cu
//   ./indexer_check [test|small|bench|decode|profile] [seed]
// `bench` times the kernels for many queries; `decode` times those for few and for many queries.
// The reference runs on the GPU, for every element of small cases. The CPU checks some of it again.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "gpu/call_graph.cuh"
#include "gpu/check.cuh"
#include "gpu/indexer_data.cuh"
#include "indexer/launch.cuh"
#include "topk/topk.h"

constexpr auto kBF16 = IndexerDType::kBF16, kE4M3 = IndexerDType::kE4M3;

bool run_case(const Case& c, uint64_t seed) {
  Data data(c, seed);
  IndexerFwdParams& p = data.p;
  const bool small = data.out_size < 20000000;
  Errors* errors = device<Errors>(1);
  CHECK(cudaMemset(errors, 0, sizeof(Errors)));
  fill_word<<<1024, 256>>>(reinterpret_cast<uint32_t*>(p.out), data.out_size, kPoison);
  CHECK(jax_dsa::launch_indexer_fwd(p, nullptr));
  CHECK(cudaDeviceSynchronize());
  std::vector<int64_t> tokens;
  const int64_t step = std::max<int64_t>(1, data.out_size * c.J * c.C / 3000000000);
  for (int64_t i = 0; i < data.tokens; i += step) tokens.push_back(i);
  tokens.push_back(data.tokens - 1);
  int64_t* device_tokens = upload(tokens);
  compare_logits<<<2048, 128>>>(p, device_tokens, tokens.size(), errors);
  float* first = nullptr;
  if (small) {  // Run the kernel again with another output, whose bits must be the same.
    first = p.out;
    p.out = device<float>(data.out_size);
    fill_word<<<1024, 256>>>(reinterpret_cast<uint32_t*>(p.out), data.out_size, kPoison);
    CHECK(jax_dsa::launch_indexer_fwd(p, nullptr));
  }
  check_written<<<1024, 256>>>(reinterpret_cast<uint32_t*>(p.out),
                               reinterpret_cast<uint32_t*>(first), data.out_size, errors);
  CHECK(cudaDeviceSynchronize());
  const Errors e = download_as<Errors>(errors, 1)[0];
  // Check a few elements on the CPU.
  int cpu_bad = 0;
  const double allowed = c.dtype == IndexerDType::kBF16 ? 2e-6 : 3e-4;
  if (small) {
    const int bytes = c.dtype == IndexerDType::kBF16 ? 2 : 1;
    const auto q = download_as<char>(p.q, data.q_size * bytes);
    const auto k = download_as<char>(p.k, data.k_size * bytes);
    const auto w = download_as<float>(p.weights, data.tokens * c.J);
    const auto scale =
        download_as<float>(p.k_scale ? p.k_scale : nullptr, p.k_scale ? data.keys : 0);
    const auto out = download_as<float>(p.out, data.out_size);
    IndexerFwdParams h = p;
    h.q = q.data(), h.k = k.data(), h.weights = w.data();
    h.k_scale = p.k_scale ? scale.data() : nullptr;
    h.starts = data.starts.data(), h.ends = data.ends.data();
    if (p.page_table) h.page_table = data.table.data();
    for (int i = 0; i < 200; ++i) {
      const int64_t at = mix(seed + 77 + i) % data.out_size;
      double value, size;
      logit(h, at / c.S, at % c.S, value, size);
      const bool same = std::isfinite(value) ? std::fabs(out[at] - value) <= allowed * size
                        : std::isnan(value)  ? std::isnan(out[at])
                                             : out[at] == value;
      cpu_bad += !same;
    }
    CHECK(cudaFree(first));
  }
  float worst;
  std::memcpy(&worst, &e.worst, 4);
  const bool good =
      !e.unwritten && !e.wrong_inf && !e.wrong_nan && !e.changed && !cpu_bad && worst <= allowed;
  printf("%-4s %-34s B%d T%d S%d J%d C%d %s: error %.1e", good ? "ok" : "BAD", c.name, c.B, c.T,
         c.S, c.J, c.C, c.dtype == IndexerDType::kBF16 ? "bf16" : "e4m3", worst);
  if (!good) {
    printf("  unwritten %llu, inf %llu, nan %llu, changed %llu, cpu %d", e.unwritten, e.wrong_inf,
           e.wrong_nan, e.changed, cpu_bad);
  }
  printf("\n");
  CHECK(cudaFree(errors));
  CHECK(cudaFree(device_tokens));
  return good;
}

template <typename F>
std::vector<float> time_ms(int count, F run) {
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  std::vector<float> ms;
  for (int i = 0; i <= count; ++i) {
    CHECK(cudaEventRecord(a));
    run();
    CHECK(cudaEventRecord(b));
    CHECK(cudaEventSynchronize(b));
    float x;
    CHECK(cudaEventElapsedTime(&x, a, b));
    if (i > 0) ms.push_back(x);
  }
  return ms;
}

void bench(const Case& c) {
  Data data(c, 5);
  double pairs = 0;
  for (int64_t i = 0; i < data.tokens; ++i) pairs += std::max(0, data.ends[i] - data.starts[i]);
  std::vector<float> ms;
  for (int round = 0; round < 3; ++round) {
    usleep(100000);  // lets the device cool down
    for (float x : time_ms(5, [&] { CHECK(jax_dsa::launch_indexer_fwd(data.p, nullptr)); })) {
      ms.push_back(x);
    }
  }
  std::sort(ms.begin(), ms.end());
  const double flops = pairs * 2 * c.J * c.C * 1e-9;
  const float mid = ms[ms.size() / 2];
  printf("%-28s %.3f ms  %.0f TFLOPS (best %.0f, worst %.0f)\n", c.name, mid, flops / mid,
         flops / ms[0], flops / ms.back());
}

double bench_copy() {
  const size_t bytes = size_t{1} << 30;
  char *a = device<char>(bytes), *b = device<char>(bytes);
  std::vector<float> ms =
      time_ms(7, [&] { CHECK(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice)); });
  std::sort(ms.begin(), ms.end());
  const double rate = 2. * bytes / ms[3] * 1e-9;
  printf("device copy %.2f TB/s\n", rate);
  CHECK(cudaFree(a));
  CHECK(cudaFree(b));
  return rate;
}

// ---- few queries -------------------------------------------------------------------------------

// Returns the microseconds per call, measured in a graph of calls. Each call uses another of `sets`
// sets of inputs, so that its keys are not in L2. `launch` gets the index of the set.
template <typename F>
float graph_us(int sets, F launch) {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  const std::vector<float> us = CallGraph(std::max(sets, 8), stream, [&](int i) {
                                  launch(i % sets, stream);
                                  return cudaSuccess;
                                }).times(10);
  CHECK(cudaStreamDestroy(stream));
  return us[us.size() / 2];
}

using Launch = cudaError_t (*)(const IndexerFwdParams&, cudaStream_t);

template <IndexerDType kDType>
void bench_few(int B, int T, int S, int J, int page, double rate) {
  using namespace jax_dsa::indexer;
  constexpr int kC = 128, kK = 2048;
  const Case c = {"", kDType, B, T, S, J, kC, kFull, true, kDType == kE4M3, false, page};
  const int64_t row_bytes = kC * (kDType == kBF16 ? 2 : 1);
  const int64_t bytes = int64_t{B} * S * (row_bytes + (c.scale ? 4 : 0));
  const int sets = static_cast<int>(std::clamp<int64_t>((int64_t{200} << 20) / bytes, 1, 32));
  // All sets share one pool. Each has its own pages or its own batch entries.
  Case all = c;
  all.B = B * sets;
  Data data(all, 5);
  int32_t* indices = device<int32_t>(data.tokens * kK);
  float* values = device<float>(data.tokens * kK);
  const auto of_set = [&](int set) {
    IndexerFwdParams p = data.p;
    p.batch = B;
    const int64_t request = int64_t{set} * B, token = request * T;
    p.q = static_cast<const char*>(p.q) + token * J * row_bytes;
    p.whole_rows = false;
    p.weights += token * J, p.starts += token, p.ends += token, p.out += token * S;
    if (page > 0) {
      p.page_table += request * p.pages_per_request;
    } else {
      p.k = static_cast<const char*>(p.k) + request * S * row_bytes;
      if (p.k_scale) p.k_scale += request * S;
    }
    return p;
  };
  const auto logits = [&](Launch launch) {
    return graph_us(sets, [&](int set, cudaStream_t s) { CHECK(launch(of_set(set), s)); });
  };
  const auto select = [&](int set, cudaStream_t s) {
    const IndexerFwdParams p = of_set(set);
    const int64_t at = int64_t{set} * B * T * kK;
    CHECK(jax_dsa::launch_topk(
        {p.out, p.starts, p.ends, indices + at, values + at, int64_t{B} * T, S, kK}, s));
  };
  const float many = logits(launch_layout<kDType, kC>);
  const float few = logits(jax_dsa::launch_indexer_fwd);
  const float topk = graph_us(sets, select);
  const float both = graph_us(sets, [&](int set, cudaStream_t s) {
    CHECK(jax_dsa::launch_indexer_fwd(of_set(set), s));
    select(set, s);
  });
  const double floor_us = bytes / rate * 1e-6;
  printf("%s B%d T%d S%d J%d %s: %.1f us of keys; many %.1f, few %.1f us (%.2f of the copy), ",
         kDType == kBF16 ? "bf16" : "e4m3", B, T, S, J, page ? "paged" : "flat", floor_us, many,
         few, floor_us / few);
  if (J == 64 && T == 1) {
    const float two = logits(launch_decode<DecodeTraits<kDType, kC, 64, 1, 2>>);
    printf("with two warpgroups %.1f, ", two);
  }
  printf("top-k %.1f, few and top-k %.1f us\n", topk, both);
  CHECK(cudaFree(indices));
  CHECK(cudaFree(values));
}

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "test";
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : time(nullptr);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  printf("seed %llu\n", (unsigned long long)seed);
  const Case cases[] = {
      {"one tile", kE4M3, 1, 8, 64, 64, 128, kFull, true, false, false},
      {"one tile, no relu", kBF16, 1, 8, 64, 64, 128, kFull, false, false, false},
      {"causal", kE4M3, 1, 213, 700, 64, 128},
      {"causal", kBF16, 1, 213, 701, 64, 128},
      {"random ranges", kE4M3, 2, 62, 1339, 64, 128, kRandom},
      {"random ranges", kBF16, 3, 62, 333, 64, 128, kRandom, true, false},
      {"packed", kE4M3, 1, 1000, 1003, 32, 128, kPacked},
      {"packed", kBF16, 2, 500, 505, 32, 128, kPacked, true, false},
      {"few heads", kE4M3, 1, 99, 257, 5, 64, kRandom},
      {"few heads", kBF16, 1, 99, 257, 16, 64, kRandom, false, true},
      {"one head", kBF16, 2, 33, 130, 1, 32},
      {"odd heads", kE4M3, 2, 33, 130, 63, 32},
      {"odd heads", kBF16, 2, 33, 130, 33, 64},
      {"odd heads", kE4M3, 2, 41, 190, 17, 128, kRandom, false},
      {"16 heads", kE4M3, 2, 70, 190, 16, 32, kRandom},
      {"32 heads", kBF16, 1, 70, 190, 31, 32, kRandom},
      {"64 heads", kE4M3, 1, 70, 190, 64, 64, kRandom},
      {"nothing seen", kE4M3, 1, 100, 9001, 64, 128, kNone},
      {"one query", kBF16, 5, 1, 4099, 64, 128, kFull},
      {"one key", kE4M3, 3, 50, 1, 64, 128, kRandom},
      {"keys beyond T, no queries see", kBF16, 1, 300, 77, 32, 64},
      {"many work tiles", kE4M3, 1, 4000, 4001, 64, 128, kCausal},
      {"many work tiles", kBF16, 2, 2050, 3001, 64, 128, kRandom},
      {"many work tiles", kE4M3, 7, 900, 1025, 32, 64, kPacked},
      {"one query", kE4M3, 3, 1, 4099, 64, 128, kRandom},
      {"one query, pages", kE4M3, 130, 1, 1024, 64, 128, kRandom, true, true, true, 64},
      {"two queries, pages", kE4M3, 5, 2, 2304, 64, 128, kRandom, false, true, true, 128},
      {"three queries", kBF16, 4, 3, 777, 64, 128, kRandom},
      {"four queries, pages", kBF16, 3, 4, 1344, 63, 128, kRandom, true, true, true, 192},
      {"four queries", kE4M3, 7, 4, 1001, 32, 64, kCausal},
      {"two queries", kBF16, 9, 2, 333, 20, 32, kRandom, true, false},
      {"three queries, few heads", kE4M3, 200, 3, 130, 9, 128, kRandom},
      {"nothing seen, few queries", kE4M3, 9, 2, 901, 64, 128, kNone},
      {"small, pages", kE4M3, 3, 2, 448, 64, 128, kRandom, true, true, true, 64},
      {"beyond 2^31", kE4M3, 1, 32771, 65601, 3, 32, kCausal, true, true, false},
  };
  if (mode == "test" || mode == "small") {
    int bad = 0;
    for (const Case& c : cases) {
      const int64_t work = int64_t{c.B} * c.T * c.S;
      if (mode == "small" && work > 30000) continue;
      bad += !run_case(c, seed);
    }
    printf(bad ? "FAILED %d\n" : "all good\n", bad);
    return bad != 0;
  }
  const Case fp8 = {"fp8 T4096 S8192 J64", kE4M3, 1, 4096, 8192, 64, 128, kFull, true, true, false};
  if (mode == "profile") {
    Data data(fp8, 5);
    for (int i = 0; i < 2; ++i) CHECK(jax_dsa::launch_indexer_fwd(data.p, nullptr));
    CHECK(cudaDeviceSynchronize());
    return 0;
  }
  const double rate = bench_copy();
  if (mode == "decode") {
    for (int S : {8192, 131072}) {
      for (int B : {1, 8, 64, 128}) bench_few<kE4M3>(B, 1, S, 64, 64, rate);
    }
    for (int T : {2, 3, 4}) bench_few<kE4M3>(64, T, 65536, 64, 64, rate);
    bench_few<kE4M3>(64, 1, 131072, 32, 64, rate);
    bench_few<kE4M3>(64, 4, 131072, 32, 64, rate);
    bench_few<kE4M3>(64, 1, 131072, 64, 0, rate);
    for (int S : {8192, 131072}) bench_few<kBF16>(64, 1, S, 64, 64, rate);
    bench_few<kBF16>(64, 4, 65536, 64, 0, rate);
    return 0;
  }
  bench(fp8);
  bench({"fp8 T4096 S32768 J64", kE4M3, 1, 4096, 32768, 64, 128, kFull, true, true, false});
  bench({"fp8 T4096 S8192 J32", kE4M3, 1, 4096, 8192, 32, 128, kFull, true, true, false});
  bench(
      {"bf16 T8192 S8192 J64 causal", kBF16, 1, 8192, 8192, 64, 128, kCausal, true, false, false});
  bench({"bf16 T8192 S8192 J64", kBF16, 1, 8192, 8192, 64, 128, kFull, true, false, false});
  bench({"fp8 T8192 S8192 J64", kE4M3, 1, 8192, 8192, 64, 128, kFull, true, true, false});
  bench({"fp8 T8192 S8192 J64 causal", kE4M3, 1, 8192, 8192, 64, 128, kCausal, true, true, false});
  bench({"fp8 T4096 S131072 J64 causal", kE4M3, 1, 4096, 131072, 64, 128, kCausal, true, true,
         false});
  return 0;
}
