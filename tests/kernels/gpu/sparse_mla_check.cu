// Tests the sparse MLA forward kernel against float64 results of the CPU, then times it.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o sparse_mla_check tests/kernels/gpu/sparse_mla_check.cu cuda/sparse_mla/*.cu \
//       cuda/sparse_mla/tiers.cc
//   ./sparse_mla_check [test|small|bench|portable|profile] [seed]
// With JAX_DSA_TIER=portable the portable kernels run. `portable` times them with other traits.
// A wrong lse means wrong scores (Q K^T). A correct lse with a wrong output means a wrong product
// with V.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "gpu/check.cuh"
#include "gpu/selected_keys.cuh"
#include "sparse_mla/fwd.cuh"
#include "sparse_mla/portable_fwd_launch.h"

using jax_dsa::SparseMlaFwdParams;

using Launch = cudaError_t (*)(const SparseMlaFwdParams&);

cudaError_t launch_shipped(const SparseMlaFwdParams& p) {
  return jax_dsa::launch_sparse_mla_fwd(p, nullptr);
}
template <int kD>
cudaError_t launch_grid(const SparseMlaFwdParams& p) {
  const auto kernel = jax_dsa::sparse_mla::fwd_kernel<kD>;
  constexpr int kBytes = sizeof(jax_dsa::mla::Shared<kD>);
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const int64_t work_tiles = jax_dsa::sparse_mla::work_tile_count(p);
  kernel<<<work_tiles, jax_dsa::mla::kThreads, kBytes>>>(p);
  return cudaGetLastError();
}
cudaError_t launch_one_work_tile(const SparseMlaFwdParams& p) {
  return p.dim == 576 ? launch_grid<576>(p) : launch_grid<512>(p);
}
struct Variant {
  const char* name;
  Launch launch;
};
const Variant kVariants[] = {
    {"shipped", launch_shipped},
    {"64 rows, one work tile per CTA", launch_one_work_tile},
};

// Launches the portable kernel with given traits; see mla::PortableTraits.
template <int kRows, int kGroups, int kKeys, int kScoreKeys, int kSlots, int kCtas>
cudaError_t launch_traits(const SparseMlaFwdParams& params) {
  using namespace jax_dsa;
  if (params.dim != 576) return cudaErrorInvalidValue;
  SparseMlaDecodeParams p = {params};
  p.batch_rows = p.keys, p.splits = 1;
  return sparse_mla::launch_portable<
      mla::PortableTraits<576, kRows, kGroups, kKeys, kScoreKeys, kSlots, kCtas>, false>(
      sparse_mla::Decode(p), nullptr);
}
const Variant kPortable64[] = {
    {"64 heads, 32 keys x 3 (227)", launch_traits<32, 2, 32, 16, 3, 1>},
    {"64 heads, 32 keys x 3, wide (227)", launch_traits<32, 2, 32, 32, 3, 1>},
    {"64 heads, 16 keys x 5 (227)", launch_traits<32, 2, 16, 16, 5, 1>},
    {"64 heads, 16 keys x 3 (163)", launch_traits<32, 2, 16, 16, 3, 1>},
    {"32 heads, 32 keys x 3 (163)", launch_traits<32, 1, 32, 16, 3, 1>},
    {"32 heads, 16 keys x 3, 2 CTAs", launch_traits<32, 1, 16, 16, 3, 2>},
    {"32 heads, 16 keys x 2, 2 CTAs (99)", launch_traits<32, 1, 16, 16, 2, 2>},
    {"16 heads, 32 keys x 2, 2 CTAs (99)", launch_traits<16, 1, 32, 16, 2, 2>},
};
const Variant kPortable16[] = {
    {"32 heads, 16 keys x 3, 2 CTAs", launch_traits<32, 1, 16, 16, 3, 2>},
    {"32 heads, 16 keys x 2, 2 CTAs (99)", launch_traits<32, 1, 16, 16, 2, 2>},
    {"16 heads, 32 keys x 2, 2 CTAs (99)", launch_traits<16, 1, 32, 16, 2, 2>},
    {"16 heads, 64 keys x 2 (227)", launch_traits<16, 1, 64, 16, 2, 1>},
};

struct Case {
  const char* name;
  int B, T, S, N, G, D, K;
  Mode mode = kValid;
  bool ends = false, lengths = false;
  int sinks = 0;  // 1: [N], 2: [B, N]
  bool poison = true;
  float q_size = 1.f;
  int samples = 96;
};

bool run_case(const Case& c, const Variant& variant, uint64_t seed) {
  const int64_t tokens = int64_t{c.B} * c.T;
  const int64_t nq = tokens * c.N * c.D, nkv = int64_t{c.B} * c.S * c.G * c.D;
  const int64_t no = tokens * c.N * 512, nl = tokens * c.N;
  const SelectedKeys selected(c, seed);

  bf16 *q = device<bf16>(nq), *kv = device<bf16>(nkv), *out = device<bf16>(no);
  float *max_logit = device<float>(nl), *log_sum = device<float>(nl);
  int32_t *d_idx = upload(selected.indices), *d_ends = upload(selected.ends),
          *d_lengths = upload(selected.lengths);
  float* d_sinks = upload(selected.sinks);
  const std::vector<uint8_t> used = selected.used_rows();
  uint8_t* d_used = upload(used);
  if (nq) fill_random<<<1024, 256>>>(q, nq, seed * 2 + 1, c.q_size);
  if (nkv) fill_random<<<1024, 256>>>(kv, nkv, seed * 2 + 2, 1.f);
  if (nkv) poison_rows<<<1024, 128>>>(kv, d_used, used.size(), c.D);
  CHECK(cudaGetLastError());
  SparseMlaFwdParams p = {};
  p.q = q, p.kv = kv, p.indices = d_idx, p.out = out;
  p.max_logit = max_logit, p.log_sum = log_sum;
  p.ends = c.ends ? d_ends : nullptr;
  p.topk_length = c.lengths ? d_lengths : nullptr;
  p.sinks = c.sinks ? d_sinks : nullptr;
  p.sinks_stride = c.sinks == 2 ? c.N : 0;
  p.batch = c.B, p.queries = c.T, p.keys = c.S, p.heads = c.N, p.groups = c.G, p.slots = c.K;
  p.dim = c.D, p.scale = 1.f / std::sqrt(static_cast<float>(c.D));

  std::vector<bf16> h_out(no), again(no);
  std::vector<float> h_max(nl), h_lse(nl), lse_again(nl);
  for (int run = 0; run < 2; ++run) {
    CHECK(cudaMemset(out, 0xff, no * 2));
    CHECK(cudaMemset(max_logit, 0xff, nl * 4));
    CHECK(cudaMemset(log_sum, 0xff, nl * 4));
    CHECK(variant.launch(p));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy((run ? again : h_out).data(), out, no * 2, cudaMemcpyDeviceToHost));
    std::vector<float>& lse = run ? lse_again : h_lse;
    CHECK(cudaMemcpy(h_max.data(), max_logit, nl * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(lse.data(), log_sum, nl * 4, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < nl; ++i) lse[i] += h_max[i];
  }
  const bool same = !memcmp(h_out.data(), again.data(), no * 2) &&
                    !memcmp(h_lse.data(), lse_again.data(), nl * 4);
  int64_t nans = 0;
  for (auto x : h_out) nans += std::isnan(__bfloat162float(x));
  for (auto x : h_lse) nans += std::isnan(x);

  double err_out = 0, err_lse = 0, top = 0, dot = 0, aa = 0, bb = 0;
  std::vector<double> s(c.K), ref(512), row(c.D);
  for (int i = 0; i < c.samples && nl > 0; ++i) {
    const int64_t at = i < 16 ? std::min<int64_t>(i, nl - 1) : selected.random(7, i) % nl;
    const int64_t t = at / c.N;
    const int h = at % c.N, g = h / (c.N / c.G);
    for (int d = 0; d < c.D; ++d)
      row[d] = __bfloat162float(random_value(seed * 2 + 1, at * c.D + d, c.q_size));
    double big = -INFINITY;
    auto key = [&](int k, int d) {
      const int64_t r = selected.key_row(t, g, k);
      return static_cast<double>(__bfloat162float(random_value(seed * 2 + 2, r * c.D + d, 1.f)));
    };
    for (int k = 0; k < c.K; ++k) {
      s[k] = -INFINITY;
      if (!selected.valid(t, g, k)) continue;
      double sum = 0;
      for (int d = 0; d < c.D; ++d) sum += row[d] * key(k, d);
      s[k] = sum * p.scale;
      big = std::max(big, s[k]);
    }
    double total = 0;
    std::fill(ref.begin(), ref.end(), 0.);
    for (int k = 0; k < c.K; ++k) {
      if (s[k] == -INFINITY) continue;
      const double e = std::exp(s[k] - big);
      total += e;
      if (e > 1e-9)
        for (int d = 0; d < 512; ++d) ref[d] += e * key(k, d);
    }
    const double want = total > 0 ? big + std::log(total) : -INFINITY;
    double gate = total > 0 ? 1 / total : 0;
    if (c.sinks && total > 0) gate /= 1 + std::exp(selected.sink(t, h) - want);
    const double got = h_lse[at];
    err_lse = std::max(err_lse, got == want       ? 0.
                                : std::isnan(got) ? INFINITY
                                                  : std::fabs(got - want));
    for (int d = 0; d < 512; ++d) {
      const double x = __bfloat162float(h_out[at * 512 + d]), y = ref[d] * gate;
      const double e = std::fabs(x - y);
      err_out = std::max(err_out, std::isnan(e) ? INFINITY : e);
      top = std::max(top, std::fabs(y));
      dot += x * y, aa += x * x, bb += y * y;
    }
  }
  const double cosine = aa + bb > 0 ? 1 - 2 * dot / (aa + bb) : 0;
  const bool good = nans == 0 && same && err_lse < 2e-3 * std::max(1.f, c.q_size) &&
                    err_out <= 0.006 * top + 1e-6 && cosine < 1e-5;
  printf("%-4s %-34s %-22s lse err %.2e  out err %.2e of %.2e  cos %.1e  nan %lld  %s\n",
         good ? "ok" : "BAD", c.name, variant.name, err_lse, err_out, top, cosine, (long long)nans,
         same ? "repeats" : "DIFFERS");
  fflush(stdout);
  for (void* x : {(void*)q, (void*)kv, (void*)out, (void*)max_logit, (void*)log_sum, (void*)d_idx,
                  (void*)d_ends, (void*)d_lengths, (void*)d_sinks, (void*)d_used})
    CHECK(cudaFree(x));
  return good;
}

void bench(int T, int S, int N, int D, int K, bool ascending,
           std::span<const Variant> variants = kVariants) {
  const int64_t nq = int64_t{T} * N * D, nkv = int64_t{S} * D, no = int64_t{T} * N * 512;
  bf16 *q = device<bf16>(nq), *kv = device<bf16>(nkv), *out = device<bf16>(no);
  float *max_logit = device<float>(int64_t{T} * N), *log_sum = device<float>(int64_t{T} * N);
  int32_t* idx = device<int32_t>(int64_t{T} * K);
  fill_random<<<1024, 256>>>(q, nq, 1, 1.f);
  fill_random<<<1024, 256>>>(kv, nkv, 2, 1.f);
  bench_indices<<<1024, 256>>>(idx, T, K, S - T, ascending);
  SparseMlaFwdParams p = {};
  p.q = q, p.kv = kv, p.indices = idx, p.out = out;
  p.max_logit = max_logit, p.log_sum = log_sum;
  p.batch = 1, p.queries = T, p.keys = S, p.heads = N, p.groups = 1, p.slots = K, p.dim = D;
  p.scale = 1.f / std::sqrt(static_cast<float>(D));
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  // Alternate between the variants, so that clocks and heat are the same for all. The pause lets
  // the device cool down.
  std::vector<std::vector<float>> ms(variants.size());
  for (int round = 0; round < 3; ++round) {
    for (size_t v = 0; v < variants.size(); ++v) {
      usleep(150000);
      for (int i = 0; i < 5; ++i) {
        CHECK(cudaEventRecord(a));
        CHECK(variants[v].launch(p));
        CHECK(cudaEventRecord(b));
        CHECK(cudaEventSynchronize(b));
        float x;
        CHECK(cudaEventElapsedTime(&x, a, b));
        if (i >= 1) ms[v].push_back(x);
      }
    }
  }
  for (size_t v = 0; v < variants.size(); ++v) {
    if (ms[v].empty()) continue;
    std::sort(ms[v].begin(), ms[v].end());
    const float mid = ms[v][ms[v].size() / 2];
    const double flops = 2. * T * N * K * (D + 512) * 1e-9;
    printf("T%d S%d N%d D%d K%d %s  %-36s %.3f ms  %.0f TFLOPS (best %.0f, worst %.0f)\n", T, S, N,
           D, K, ascending ? "ascending" : "random", variants[v].name, mid, flops / mid,
           flops / ms[v][0], flops / ms[v].back());
  }
  fflush(stdout);
  for (void* x : {(void*)q, (void*)kv, (void*)out, (void*)max_logit, (void*)log_sum, (void*)idx})
    CHECK(cudaFree(x));
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 20240607;
  printf("seed %llu\n", (unsigned long long)seed);
  const Case cases[] = {
      {"one tile, 64 heads", 1, 1, 64, 64, 1, 576, 64},
      {"two tiles", 1, 1, 128, 64, 1, 576, 128},
      {"K 2048", 1, 3, 4096, 128, 1, 576, 2048},
      {"K 2048, D 512, sharp", 1, 3, 4096, 128, 1, 512, 2048, kValid, false, false, 0, true, 12.f},
      {"sharp, many work tiles", 2, 213, 700, 128, 1, 576, 320, kValid, true, true, 1, true, 12.f},
      {"adversarial", 2, 62, 333, 96, 1, 576, 201, kAdversarial, true, false, 2},
      {"adversarial, lengths", 3, 31, 100, 40, 1, 512, 131, kAdversarial, false, true, 1},
      {"tails, groups", 2, 41, 300, 40, 4, 576, 300, kTails, false, false, 1},
      {"tails, many work tiles", 1, 600, 900, 65, 1, 576, 700, kTails, true},
      {"one head a group", 1, 7, 99, 5, 5, 512, 77, kTails, false, true},
      {"16 heads, K 2048", 1, 3, 4096, 16, 1, 576, 2048},
      {"16 heads, sharp, many work tiles", 2, 413, 700, 16, 1, 576, 320, kValid, true, true, 1,
       true, 12.f},
      {"9 heads, adversarial, lengths", 2, 162, 333, 9, 1, 512, 201, kAdversarial, true, true, 2},
      {"32 heads, sharp", 1, 213, 700, 32, 1, 576, 320, kValid, true, false, 1, true, 12.f},
      {"20 heads, tails", 1, 300, 900, 20, 1, 512, 700, kTails, false, true, 1},
      {"16 heads, long keys", 1, 2, 4000000, 16, 1, 576, 512, kValid, false, false, 0, false},
      {"K 0", 1, 5, 10, 16, 1, 576, 0},
      {"S 0", 1, 5, 0, 16, 1, 576, 66},
      {"K 1", 1, 300, 50, 16, 1, 576, 1, kAdversarial},
      {"K > S", 1, 20, 30, 128, 1, 576, 260},
      {"long keys", 1, 2, 4000000, 64, 1, 576, 512, kValid, false, false, 0, false},
  };
  if (what == "test" || what == "small") {
    int bad = 0;
    for (const Variant& v : kVariants) {
      for (const Case& c : cases) {
        const bool first = &v == kVariants;
        if (what == "small" && (!first || int64_t{c.B} * c.T * c.N * c.K > 1000000)) continue;
        if (!first && &c > cases + 4) continue;
        Case tried = c;
        if (!first) tried.samples = 24;
        bad += !run_case(tried, v, seed);
      }
    }
    printf(bad ? "FAILED %d\n" : "all good\n", bad);
    return bad != 0;
  }
  if (what == "profile") {
    bench(1024, 8192, 128, 576, 2048, false);
    return 0;
  }
  if (what == "portable") {
    bench(4096, 8192, 128, 576, 2048, false, kPortable64);
    bench(4096, 8192, 32, 576, 2048, false, kPortable16);
    bench(4096, 8192, 16, 576, 2048, false, kPortable16);
    return 0;
  }
  bench(4096, 8192, 128, 576, 2048, false);
  bench(4096, 8192, 128, 576, 2048, true);
  bench(4096, 32768, 128, 576, 2048, false);
  bench(4096, 131072, 128, 576, 2048, false);
  bench(4096, 131072, 128, 576, 2048, true);
  bench(4096, 8192, 64, 576, 2048, false);
  bench(4096, 8192, 64, 512, 512, false);
  bench(4096, 8192, 128, 512, 1024, false);
  for (int heads : {16, 32}) {
    for (int dim : {576, 512}) bench(4096, 8192, heads, dim, 2048, false);
    bench(4096, 32768, heads, 576, 2048, false);
    bench(4096, 131072, heads, 576, 2048, false);
  }
  return 0;
}
