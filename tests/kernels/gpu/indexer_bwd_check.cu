// Tests the indexer's backward kernels against float64 on the CPU, then times them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o indexer_bwd_check tests/kernels/gpu/indexer_bwd_check.cu \
//       cuda/indexer/*.cu cuda/indexer/tiers.cc cuda/topk/cluster.cu cuda/topk/dispatch.cu
//   ./indexer_bwd_check [test|small|bench|profile] [seed]
// The reference makes the kernels' two roundings (g and w q to bf16). What remains is the float32
// summation and the rounding of dq. Where a score is so close to 0 that its ReLU mask bit may be 0
// or 1, the contribution of that bit is allowed as an error. How to locate a failure: wrong
// dweights mean wrong scores. If dweights are right and dq is wrong, the second product is wrong.
// If both are right and dk is wrong, the layout of the ReLU mask or the second kernel is wrong.
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "gpu/check.cuh"
#include "indexer/bwd_keys.cuh"

using jax_dsa::IndexerBwdParams;
using bf16 = __nv_bfloat16;

// Returns a random value from roughly a normal distribution of unit variance, the same on the host.
__host__ __device__ inline float random_value(uint64_t seed, int64_t i) {
  const uint64_t h = mix(seed * 0x1000003 + i);
  int sum = 0;
  for (int k = 0; k < 4; ++k) sum += static_cast<int>(h >> (16 * k) & 0xffff);
  return static_cast<float>(sum - 131070) * (1.f / 37837.f);
}
template <typename T>
__global__ void fill_random(T* x, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x)
    x[i] = T(random_value(seed, i));
}
template <typename T>
__global__ void poison_rows(T* x, const uint8_t* used, int64_t rows, int width) {
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x)
    if (!used[r])
      for (int i = threadIdx.x; i < width; i += blockDim.x) x[r * width + i] = T(NAN);
}

// Fills the slots of each query with K distinct keys that it sees, ascending, then with -1. With
// `alike`, neighbouring queries mostly select the same keys. Each thread processes one query.
__global__ void select_keys(int32_t* indices, int T, int S, int K, uint64_t seed, bool alike) {
  const int64_t t = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (t >= T) return;
  const int visible = S - T + static_cast<int>(t) + 1;
  int taken = 0;
  for (int s = 0; s < visible && taken < K; ++s) {
    uint64_t h = mix(seed + t * 0x100000001 + s);
    if (alike && h % 16 != 0) h = mix(seed + (t / 64) * 0x100000001 + s);
    const double r = (h >> 11) * 0x1p-53;
    if (r * (visible - s) < K - taken) indices[t * K + taken++] = s;
  }
  while (taken < K) indices[t * K + taken++] = -1;
}

// ---- test --------------------------------------------------------------------------------------

enum Mode { kDistinct, kAlike, kArbitrary, kOneKey };
struct Case {
  const char* name;
  int B, T, S, J, C, K;
  Mode mode = kDistinct;
  bool scale = false, relu = true;
  int tokens = INT_MAX, keys = INT_MAX;  // number of queries and of keys that are compared
};

struct Error {
  double worst = 0, top = 0;
  int64_t nans = 0;
  void add(double got, double expected, double allowed) {
    nans += std::isnan(got);
    worst = std::max(worst, std::fabs(got - expected) - allowed);
    top = std::max(top, std::fabs(expected));
  }
  bool good() const { return nans == 0 && worst <= 1e-4 * top + 1e-6; }
};

double rounded(float x) { return __bfloat162float(__float2bfloat16(x)); }

bool run_case(const Case& c, uint64_t seed) {
  const int64_t tokens = int64_t{c.B} * c.T, all_keys = int64_t{c.B} * c.S;
  const int64_t nq = tokens * c.J * c.C, nk = all_keys * c.C, nw = tokens * c.J;
  const int64_t ni = tokens * c.K, ng = jax_dsa::indexer_bwd_relu_mask_words(tokens, c.K);
  auto random = [&](uint64_t stream, uint64_t i) { return mix(mix(seed + stream) + i); };

  int32_t* d_indices = device<int32_t>(ni);
  for (int b = 0; b < c.B && c.T > 0; ++b) {
    select_keys<<<(c.T + 63) / 64, 64>>>(d_indices + int64_t{b} * c.T * c.K, c.T, c.S, c.K,
                                         seed + b, c.mode == kAlike);
  }
  CHECK(cudaGetLastError());
  std::vector<int32_t> indices = download(d_indices, ni);
  const int boundary[] = {INT_MIN, -1, c.S, INT_MAX, 0, c.S - 1};
  for (int64_t i = 0; i < ni; ++i) {
    if (c.mode == kOneKey) indices[i] = c.S / 2;
    if (c.mode != kArbitrary) continue;
    const uint64_t r = random(1, i);
    indices[i] = r % 3 && c.S ? static_cast<int>((r >> 8) % c.S) : boundary[(r >> 40) % 6];
    if (i / c.K % 5 == 3) indices[i] = boundary[(r >> 40) % 4];
  }
  CHECK(cudaMemcpy(d_indices, indices.data(), ni * 4, cudaMemcpyHostToDevice));
  auto is_valid = [&](int64_t i) { return indices[i] >= 0 && indices[i] < c.S; };
  std::vector<uint8_t> used(all_keys), open(ni);
  for (int64_t i = 0; i < ni; ++i) {
    open[i] = is_valid(i);
    if (open[i]) used[i / c.K / c.T * c.S + indices[i]] = 1;
  }

  bf16 *q = device<bf16>(nq), *k = device<bf16>(nk), *dq = device<bf16>(nq);
  float *w = device<float>(nw), *g = device<float>(ni), *ks = device<float>(all_keys);
  float *dk = device<float>(nk), *dw = device<float>(nw), *dks = device<float>(all_keys);
  uint64_t* relu_mask = device<uint64_t>(ng);
  uint8_t *d_used = upload(used), *d_open = upload(open);
  fill_random<<<1024, 256>>>(q, nq, seed * 8 + 1);
  fill_random<<<1024, 256>>>(k, nk, seed * 8 + 2);
  fill_random<<<1024, 256>>>(w, nw, seed * 8 + 3);
  fill_random<<<1024, 256>>>(g, ni, seed * 8 + 4);
  fill_random<<<1024, 256>>>(ks, all_keys, seed * 8 + 5);
  poison_rows<<<1024, 128>>>(k, d_used, all_keys, c.C);
  poison_rows<<<1024, 32>>>(g, d_open, ni, 1);
  CHECK(cudaGetLastError());
  const std::vector<bf16> h_q = download(q, nq), h_k = download(k, nk);
  const std::vector<float> h_w = download(w, nw), h_g = download(g, ni);
  const std::vector<float> h_ks = download(ks, all_keys);

  IndexerBwdParams p = {};
  p.q = q, p.k = k, p.weights = w, p.indices = d_indices, p.grad = g;
  p.dq = dq, p.dk = dk, p.dweights = dw, p.relu_mask = relu_mask;
  if (c.scale) p.k_scale = ks, p.dk_scale = dks;
  p.batch = c.B, p.queries = c.T, p.keys = c.S, p.slots = c.K, p.heads = c.J, p.channels = c.C;
  p.relu = c.relu;
  std::vector<bf16> h_dq[2];
  std::vector<float> h_dw[2], h_dk, h_dks;
  for (int run = 0; run < 2; ++run) {
    CHECK(cudaMemset(dq, 0xff, nq * 2));
    CHECK(cudaMemset(dk, 0xff, nk * 4));
    CHECK(cudaMemset(dw, 0xff, nw * 4));
    CHECK(cudaMemset(dks, 0xff, all_keys * 4));
    CHECK(cudaMemset(relu_mask, 0xff, ng * 8));
    CHECK(jax_dsa::launch_indexer_bwd(p, nullptr));
    CHECK(cudaDeviceSynchronize());
    h_dq[run] = download(dq, nq), h_dw[run] = download(dw, nw);
    h_dk = download(dk, nk), h_dks = download(dks, all_keys);
  }
  const bool same = !memcmp(h_dq[0].data(), h_dq[1].data(), nq * 2) &&
                    !memcmp(h_dw[0].data(), h_dw[1].data(), nw * 4);

  // Returns the score of slot i and head j, and whether its mask bit may be 0 or 1.
  auto score = [&](int64_t i, int j, bool* unsure) {
    const int64_t token = i / c.K, key = token / c.T * c.S + indices[i];
    double x = 0, size = 0;
    for (int d = 0; d < c.C; ++d) {
      const double y = double(__bfloat162float(h_q[(token * c.J + j) * c.C + d])) *
                       __bfloat162float(h_k[key * c.C + d]);
      x += y;
      size += std::fabs(y);
    }
    *unsure = c.relu && std::fabs(x) < 1e-5 * size;
    return x;
  };
  Error dq_error, dw_error, dk_error, dks_error;
  std::vector<double> sum(c.C), slack(c.C);
  for (int n = 0; n < std::min<int64_t>(tokens, c.tokens); ++n) {
    const int64_t token = c.tokens == INT_MAX ? n
                          : n < 2             ? n * (tokens - 1)
                                              : random(2, n) % tokens;
    for (int j = 0; j < c.J; ++j) {
      double dw_sum = 0;
      std::fill(sum.begin(), sum.end(), 0.);
      std::fill(slack.begin(), slack.end(), 0.);
      const int64_t row = token * c.J + j;
      for (int64_t i = token * c.K; i < (token + 1) * c.K; ++i) {
        if (!is_valid(i)) continue;
        const int64_t key = token / c.T * c.S + indices[i];
        bool unsure;
        const double x = score(i, j, &unsure);
        const float gi = c.scale ? h_g[i] * h_ks[key] : h_g[i];
        const bool on = !c.relu || x > 0;
        if (on) dw_sum += double(gi) * x;
        for (int d = 0; d < c.C && (on || unsure); ++d) {
          const double y = h_w[row] * rounded(gi) * __bfloat162float(h_k[key * c.C + d]);
          if (on) sum[d] += y;
          if (unsure) slack[d] += std::fabs(y);
        }
      }
      dw_error.add(h_dw[0][row], dw_sum, 0);
      for (int d = 0; d < c.C; ++d) {
        dq_error.add(__bfloat162float(h_dq[0][row * c.C + d]), sum[d],
                     slack[d] + std::fabs(sum[d]) / 256);
      }
    }
  }

  // Collect the slots of every key that is compared.
  std::vector<int64_t> compared;
  for (int64_t n = 0; n < std::min<int64_t>(all_keys, c.keys); ++n) {
    compared.push_back(c.keys == INT_MAX ? n
                       : n < 2           ? n * (all_keys - 1)
                                         : random(3, n) % all_keys);
  }
  std::sort(compared.begin(), compared.end());
  compared.erase(std::unique(compared.begin(), compared.end()), compared.end());
  std::vector<int> place(all_keys, -1);
  for (size_t n = 0; n < compared.size(); ++n) place[compared[n]] = static_cast<int>(n);
  std::vector<std::vector<int64_t>> slots(compared.size());
  for (int64_t i = 0; i < ni; ++i) {
    if (!is_valid(i)) continue;
    const int at = place[i / c.K / c.T * c.S + indices[i]];
    if (at >= 0) slots[at].push_back(i);
  }
  for (size_t n = 0; n < compared.size(); ++n) {
    const int64_t key = compared[n];
    std::fill(sum.begin(), sum.end(), 0.);
    std::fill(slack.begin(), slack.end(), 0.);
    for (int64_t i : slots[n]) {
      for (int j = 0; j < c.J; ++j) {
        const int64_t row = i / c.K * c.J + j;
        bool unsure;
        const bool on = score(i, j, &unsure) > 0 || !c.relu;
        for (int d = 0; d < c.C && (on || unsure); ++d) {
          const double y =
              rounded(h_g[i]) * rounded(h_w[row] * __bfloat162float(h_q[row * c.C + d]));
          if (on) sum[d] += y;
          if (unsure) slack[d] += std::fabs(y);
        }
      }
    }
    double dks_sum = 0, dks_slack = 0;
    for (int d = 0; d < c.C; ++d) {
      const double kd = used[key] ? __bfloat162float(h_k[key * c.C + d]) : 0;
      dks_sum += sum[d] * kd;
      dks_slack += slack[d] * std::fabs(kd);
      const double scale = c.scale ? h_ks[key] : 1;
      dk_error.add(h_dk[key * c.C + d], sum[d] * scale, slack[d] * std::fabs(scale));
    }
    if (c.scale) dks_error.add(h_dks[key], dks_sum, dks_slack);
  }
  const bool good =
      same && dq_error.good() && dw_error.good() && dk_error.good() && dks_error.good();
  printf("%-4s %-24s", good ? "ok" : "BAD", c.name);
  const char* names[] = {"dq", "dw", "dk", "dk_scale"};
  const Error* errors[] = {&dq_error, &dw_error, &dk_error, &dks_error};
  for (int i = 0; i < 4; ++i) {
    printf("  %s %.1e of %.1e", names[i], std::max(errors[i]->worst, 0.), errors[i]->top);
    if (errors[i]->nans) printf(" (%lld NaN)", (long long)errors[i]->nans);
  }
  printf("  %s\n", same ? "repeats" : "DIFFERS");
  fflush(stdout);
  for (void* x :
       {(void*)q, (void*)k, (void*)dq, (void*)w, (void*)g, (void*)ks, (void*)dk, (void*)dw,
        (void*)dks, (void*)relu_mask, (void*)d_used, (void*)d_open, (void*)d_indices})
    CHECK(cudaFree(x));
  return good;
}

// ---- bench -------------------------------------------------------------------------------------

using Launch = void (*)(const IndexerBwdParams&, int blocks);

void launch_all(const IndexerBwdParams& p, int) { CHECK(jax_dsa::launch_indexer_bwd(p, nullptr)); }
template <int kC>
void launch_queries(const IndexerBwdParams& p, int blocks) {
  using namespace jax_dsa::indexer_bwd;
  constexpr int kBytes = sizeof(QueryShared<kC>);
  CHECK(cudaFuncSetAttribute(queries_kernel<kC>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kBytes));
  queries_kernel<kC><<<blocks, kQueryThreads, kBytes>>>(p);
  CHECK(cudaGetLastError());
}
// Reads the ReLU mask that an earlier launch has stored.
template <int kC, int kPartition>
void launch_keys(const IndexerBwdParams& p, int blocks) {
  using namespace jax_dsa::indexer_bwd;
  constexpr int kBytes = sizeof(KeyShared<kC, kPartition>);
  const auto kernel = keys_kernel<kC, kPartition>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<blocks, kKeyThreads, kBytes>>>(p, 1);
  CHECK(cudaGetLastError());
}
struct Variant {
  const char* name;
  int channels;  // the number of channels it supports; 0 means any
  Launch launch;
};
const Variant kVariants[] = {
    {"shipped", 0, launch_all},
    {"queries kernel alone", 128, launch_queries<128>},
    {"keys kernel alone", 128, launch_keys<128, 4096>},
    {"keys kernel, partition 2048", 128, launch_keys<128, 2048>},
};

void bench(int T, int S, int J, int C, int K, bool alike, size_t variants) {
  const int64_t nq = int64_t{T} * J * C, nk = int64_t{S} * C, nw = int64_t{T} * J;
  const int64_t ni = int64_t{T} * K;
  bf16 *q = device<bf16>(nq), *k = device<bf16>(nk), *dq = device<bf16>(nq);
  float *w = device<float>(nw), *g = device<float>(ni), *dk = device<float>(nk);
  float* dw = device<float>(nw);
  uint64_t* relu_mask = device<uint64_t>(jax_dsa::indexer_bwd_relu_mask_words(T, K));
  int32_t* indices = device<int32_t>(ni);
  fill_random<<<1024, 256>>>(q, nq, 1);
  fill_random<<<1024, 256>>>(k, nk, 2);
  fill_random<<<1024, 256>>>(w, nw, 3);
  fill_random<<<1024, 256>>>(g, ni, 4);
  select_keys<<<(T + 63) / 64, 64>>>(indices, T, S, K, 5, alike);
  CHECK(cudaGetLastError());
  IndexerBwdParams p = {};
  p.q = q, p.k = k, p.weights = w, p.indices = indices, p.grad = g;
  p.dq = dq, p.dk = dk, p.dweights = dw, p.relu_mask = relu_mask;
  p.batch = 1, p.queries = T, p.keys = S, p.slots = K, p.heads = J, p.channels = C;
  p.relu = true;
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  // Interleave the variants, so that clocks and temperature are the same for all.
  std::vector<std::vector<float>> ms(variants);
  for (int round = 0; round < 3; ++round) {
    for (size_t v = 0; v < variants; ++v) {
      if (kVariants[v].channels != 0 && kVariants[v].channels != C) continue;
      usleep(150000);
      for (int i = 0; i < 6; ++i) {
        CHECK(cudaEventRecord(a));
        kVariants[v].launch(p, num_sms());
        CHECK(cudaEventRecord(b));
        CHECK(cudaEventSynchronize(b));
        float x;
        CHECK(cudaEventElapsedTime(&x, a, b));
        if (i >= 1) ms[v].push_back(x);
      }
    }
  }
  const std::vector<int32_t> selected = download(indices, ni);
  const auto filled =
      std::count_if(selected.begin(), selected.end(), [](int32_t index) { return index >= 0; });
  const double flops = 6e-9 * filled * J * C;
  for (size_t v = 0; v < variants; ++v) {
    if (ms[v].empty()) continue;
    std::sort(ms[v].begin(), ms[v].end());
    const float mid = ms[v][ms[v].size() / 2];
    printf("T%d S%d J%d C%d K%d %-9s %-26s %.3f ms", T, S, J, C, K, alike ? "alike" : "random",
           kVariants[v].name, mid);
    if (v == 0) {
      printf("  %.0f TFLOPS (best %.0f, worst %.0f)", flops / mid, flops / ms[v][0],
             flops / ms[v].back());
    }
    printf("\n");
  }
  fflush(stdout);
  for (void* x : {(void*)q, (void*)k, (void*)dq, (void*)w, (void*)g, (void*)dk, (void*)dw,
                  (void*)relu_mask, (void*)indices})
    CHECK(cudaFree(x));
}

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "test";
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 20240607;
  printf("seed %llu\n", (unsigned long long)seed);
  const Case cases[] = {
      {"one tile", 1, 1, 64, 64, 128, 64},
      {"one slot", 1, 3, 5, 64, 128, 1},
      {"ring of tiles", 1, 9, 1000, 64, 128, 700},
      {"many work tiles", 1, 1500, 1700, 64, 128, 100, kDistinct, false, true, 40, 40},
      {"partitions", 1, 20, 20000, 64, 128, 1000, kDistinct, false, true, 20, 2000},
      {"alike", 2, 37, 9000, 64, 128, 500, kAlike, false, true, 30, 1500},
      {"arbitrary, few keys", 2, 62, 90, 64, 128, 130, kArbitrary},
      {"arbitrary, k_scale", 2, 33, 700, 40, 128, 201, kArbitrary, true},
      {"one key", 1, 17, 100, 64, 128, 150, kOneKey},
      {"J 17 C 64", 3, 21, 300, 17, 64, 128, kDistinct},
      {"J 32 C 32, k_scale", 1, 29, 300, 32, 32, 77, kArbitrary, true},
      {"no relu", 1, 21, 300, 64, 128, 96, kDistinct, true, false},
      {"K > S", 1, 20, 30, 64, 128, 260},
      {"K 0", 1, 5, 10, 16, 128, 0},
      {"S 0", 1, 5, 0, 16, 128, 66},
      {"T 0", 1, 0, 10, 16, 128, 66},
      {"K 8192", 1, 3, 9000, 64, 128, 8192, kDistinct, false, true, 2, 100},
      {"K 2048", 1, 4096, 8192, 64, 128, 2048, kDistinct, false, true, 4, 12},
  };
  if (mode == "test" || mode == "small") {
    int bad = 0;
    for (const Case& c : cases) {
      if (mode == "small" && int64_t{c.B} * c.T * c.K > 40000) continue;
      bad += !run_case(c, seed);
    }
    printf(bad ? "FAILED %d\n" : "all good\n", bad);
    return bad != 0;
  }
  const size_t variants = std::size(kVariants);
  if (mode == "profile") {
    bench(2048, 8192, 64, 128, 2048, false, 1);
    return 0;
  }
  bench(4096, 4096, 64, 128, 2048, false, variants);
  bench(4096, 8192, 64, 128, 2048, false, variants);
  bench(4096, 8192, 64, 128, 2048, true, variants);
  bench(4096, 32768, 64, 128, 2048, false, variants);
  bench(4096, 32768, 64, 128, 2048, true, variants);
  bench(4096, 131072, 64, 128, 2048, false, variants);
  bench(4096, 131072, 64, 128, 2048, true, variants);
  bench(4096, 8192, 32, 128, 2048, false, 1);
  bench(4096, 8192, 64, 64, 2048, false, 1);
  return 0;
}
