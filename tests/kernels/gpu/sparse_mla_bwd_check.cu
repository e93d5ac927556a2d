// Tests the sparse MLA backward kernel against float64 results of the CPU, then times it.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o sparse_mla_bwd_check tests/kernels/gpu/sparse_mla_bwd_check.cu cuda/sparse_mla/*.cu \
//       cuda/sparse_mla/tiers.cc
//   ./sparse_mla_bwd_check [test|small|bench|profile] [seed]
// Wrong dq with correct dkv, or the reverse, tells which kind of work tile is wrong. If both are
// wrong, P or dS is.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "gpu/check.cuh"
#include "problems/sparse_mla_problem.h"
#include "sparse_mla/sparse_mla.h"

using namespace jax_dsa;
using namespace sparse_mla_problem;

// Allocates enough for all queries without rows, and for `at_once` queries by rows.
void allocate_workspace(SparseMlaBwdParams& p, int64_t at_once) {
  SparseMlaBwdParams rows = p;
  rows.by_rows = true, rows.queries_at_once = at_once;
  p.counters = device<uint8_t>(
      std::max(sparse_mla_bwd_counter_bytes(p), sparse_mla_bwd_counter_bytes(rows)));
  p.p_ds = device<uint8_t>(std::max(sparse_mla_bwd_p_ds_bytes(p), sparse_mla_bwd_p_ds_bytes(rows)));
  p.order = device<int32_t>(sparse_mla_bwd_order_bytes(p) / 4);
}

bool run_case(const Case& c, uint64_t seed) {
  const Problem x = make(c, seed);
  const Gradients want = differentiate(x, seed);
  SparseMlaBwdParams p = {};
  p.q = upload(x.q), p.kv = upload(x.kv), p.indices = upload(x.indices);
  p.ends = c.ends ? upload(x.ends) : nullptr;
  p.topk_length = c.lengths ? upload(x.lengths) : nullptr;
  p.dout = upload(want.dout), p.max_logit = upload(want.max_logit),
  p.log_sum = upload(want.log_sum), p.out = upload(want.out);
  p.dlse = upload(want.dlse);
  p.dq = device<bf16>(want.dq.size()), p.dkv = device<float>(want.dkv.size());
  p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
  p.groups = c.groups, p.slots = c.slots, p.dim = c.dim, p.scale = x.scale;
  const int64_t queries = p.batch * p.queries, at_once = std::max<int64_t>(1, queries * 2 / 5);
  p.queries_at_once = queries;
  allocate_workspace(p, at_once);
  const RowOrder order = order_rows(x, at_once);
  p.row_order = upload(order.order), p.row_key = upload(order.key);
  const int64_t row_bytes = at_once * sparse_mla_bwd_query_rows(p) * c.dim * 2;
  p.rows = device<uint8_t>(row_bytes);

  // Run twice with atomic reductions and twice by rows in three steps. The latter must repeat bit
  // for bit.
  bool good = true;
  std::vector<bf16> dq_before;
  std::vector<float> dkv_before;
  for (int run = 0; run < 4; ++run) {
    const bool rows = run >= 2;
    CHECK(cudaMemset(p.dq, 0xff, want.dq.size() * 2));
    CHECK(cudaMemset(p.dkv, 0xff, want.dkv.size() * 4));
    CHECK(cudaMemset(p.rows, 0xff, row_bytes));
    p.by_rows = rows, p.queries_at_once = rows ? at_once : queries;
    CHECK(cudaMemset(p.counters, 0xff, sparse_mla_bwd_counter_bytes(p)));
    CHECK(cudaMemset(p.p_ds, 0xff, sparse_mla_bwd_p_ds_bytes(p)));
    CHECK(cudaMemset(p.order, 0xff, sparse_mla_bwd_order_bytes(p)));
    CHECK(launch_sparse_mla_bwd(p, nullptr));
    CHECK(cudaDeviceSynchronize());
    const auto dq = download(static_cast<bf16*>(p.dq), want.dq.size());
    const auto dkv = download(p.dkv, want.dkv.size());
    Error dq_error, dkv_error;
    for (size_t i = 0; i < dq.size(); ++i) dq_error.add(__bfloat162float(dq[i]), want.dq[i]);
    for (size_t i = 0; i < dkv.size(); ++i) {
      const int column = i % c.dim;
      dkv_error.add(dkv[rows ? i : i - column + sparse_mla_dkv_place(column)], want.dkv[i]);
    }
    const bool same = run < 3 || (!memcmp(dq.data(), dq_before.data(), dq.size() * 2) &&
                                  !memcmp(dkv.data(), dkv_before.data(), dkv.size() * 4));
    const bool right = dq_error.good(2e-2) && dkv_error.good(2e-2) && same;
    printf("%-4s %-24s %s  dq err %.2e of %.2e  dkv err %.2e of %.2e%s\n", right ? "ok" : "BAD",
           c.name, rows ? "rows      " : "reductions", dq_error.worst, dq_error.top,
           dkv_error.worst, dkv_error.top, same ? "" : "  DIFFERS");
    good = good && right;
    dq_before = dq, dkv_before = dkv;
  }
  fflush(stdout);
  for (const void* a :
       {p.q, p.kv, (const void*)p.indices, (const void*)p.ends, (const void*)p.topk_length, p.dout,
        (const void*)p.max_logit, (const void*)p.log_sum, p.out, (const void*)p.dlse,
        (const void*)p.dq, (const void*)p.dkv, (const void*)p.counters, (const void*)p.p_ds,
        (const void*)p.order, (const void*)p.rows, (const void*)p.row_order,
        (const void*)p.row_key}) {
    CHECK(cudaFree(const_cast<void*>(a)));
  }
  return good;
}

// ---- timing ------------------------------------------------------------------------------------

// Nearly normal with unit variance.
__global__ void fill_random(bf16* x, int64_t n, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint64_t h = mix(seed * 0x1000003 + i);
    int sum = 0;
    for (int k = 0; k < 4; ++k) sum += static_cast<int>(h >> (16 * k) & 0xffff);
    x[i] = __float2bfloat16(static_cast<float>(sum - 131070) / 37837.f);
  }
}
// Query t sees visible_first + t + 1 keys. Its slots are distinct and ascending if there are enough
// keys.
__global__ void fill_indices(int32_t* indices, int queries, int slots, int visible_first) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < int64_t{queries} * slots;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int visible = visible_first + static_cast<int>(i / slots) + 1;
    const int slot = i % slots;
    indices[i] = visible <= slots ? (slot < visible ? slot : -1)
                                  : (int)((slot + (mix(i) >> 12) * 0x1p-52) * visible / slots);
  }
}

template <typename F>
float milliseconds(F launch) {
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  std::vector<float> ms;
  for (int round = 0; round < 2; ++round) {
    usleep(150000);
    for (int i = 0; i < 5; ++i) {
      CHECK(cudaEventRecord(a));
      launch();
      CHECK(cudaEventRecord(b));
      CHECK(cudaEventSynchronize(b));
      float x;
      CHECK(cudaEventElapsedTime(&x, a, b));
      if (i > 0) ms.push_back(x);
    }
  }
  std::sort(ms.begin(), ms.end());
  return ms[ms.size() / 2];
}

// Times the causal case, with the queries at the end of the keys.
void bench(int T, int S, int N, int D, int K) {
  const int64_t nq = int64_t{T} * N * D, no = int64_t{T} * N * 512;
  bf16 *q = device<bf16>(nq), *kv = device<bf16>(int64_t{S} * D);
  bf16 *out = device<bf16>(no), *dout = device<bf16>(no);
  float *max_logit = device<float>(int64_t{T} * N), *log_sum = device<float>(int64_t{T} * N);
  float* dlse = device<float>(int64_t{T} * N);
  int32_t* indices = device<int32_t>(int64_t{T} * K);
  fill_random<<<1024, 256>>>(q, nq, 1);
  fill_random<<<1024, 256>>>(kv, int64_t{S} * D, 2);
  fill_random<<<1024, 256>>>(dout, no, 3);
  fill_indices<<<1024, 256>>>(indices, T, K, S - T);
  SparseMlaFwdParams f = {};
  f.q = q, f.kv = kv, f.indices = indices, f.out = out, f.max_logit = max_logit;
  f.log_sum = log_sum;
  f.batch = 1, f.queries = T, f.keys = S, f.heads = N, f.groups = 1, f.slots = K, f.dim = D;
  f.scale = 1.f / std::sqrt(static_cast<float>(D));
  SparseMlaBwdParams p = {};
  p.q = q, p.kv = kv, p.indices = indices, p.dout = dout, p.max_logit = max_logit,
  p.log_sum = log_sum, p.out = out, p.dlse = dlse;
  p.dq = device<bf16>(nq), p.dkv = device<float>(int64_t{S} * D);
  p.batch = 1, p.queries = T, p.keys = S, p.heads = N, p.groups = 1, p.slots = K, p.dim = D;
  p.scale = f.scale, p.queries_at_once = T;
  allocate_workspace(p, 512);
  const float fwd = milliseconds([&] { CHECK(launch_sparse_mla_fwd(f, nullptr)); });
  CHECK(cudaMemset(dlse, 0, int64_t{T} * N * 4));
  const float bwd = milliseconds([&] { CHECK(launch_sparse_mla_bwd(p, nullptr)); });
  // By rows, 512 queries at a time. The time excludes the sort that finds each key's rows.
  const Problem selected = {
      .c = {.batch = 1, .queries = T, .keys = S, .heads = N, .groups = 1, .dim = D, .slots = K},
      .indices = download(indices, int64_t{T} * K)};
  const RowOrder order = order_rows(selected, 512);
  p.row_order = upload(order.order), p.row_key = upload(order.key);
  p.by_rows = true, p.queries_at_once = 512;
  p.rows = device<bf16>(p.queries_at_once * sparse_mla_bwd_query_rows(p) * D);
  const float by_rows = milliseconds([&] { CHECK(launch_sparse_mla_bwd(p, nullptr)); });
  const auto filled = std::count_if(selected.indices.begin(), selected.indices.end(),
                                    [](int32_t index) { return index >= 0; });
  const double pairs = 2e-9 * N * filled, flops = pairs * (3 * D + 2 * 512);
  printf("T%d-S%d-N%d-D%d-K%d  fwd %.3f ms %.0f TFLOPS  bwd %.3f ms %.0f  by rows %.3f ms %.0f\n",
         T, S, N, D, K, fwd, pairs * (D + 512) / fwd, bwd, flops / bwd, by_rows, flops / by_rows);
  fflush(stdout);
  for (void* a : {(void*)q, (void*)kv, (void*)out, (void*)dout, (void*)max_logit, (void*)log_sum,
                  (void*)dlse, (void*)indices, p.dq, (void*)p.dkv, p.counters, p.p_ds,
                  (void*)p.order, p.rows, (void*)p.row_order, (void*)p.row_key}) {
    CHECK(cudaFree(a));
  }
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 20240607;
  printf("seed %llu\n", (unsigned long long)seed);
  const Case cases[] = {
      {"one tile", 1, 1, 64, 64, 1, 576, 64},
      {"four tiles", 1, 2, 300, 64, 1, 576, 256},
      {"two head tiles", 1, 62, 300, 128, 1, 576, 150},
      {"D 512", 1, 213, 300, 128, 1, 512, 130},
      {"three head tiles", 1, 5, 300, 160, 1, 576, 200},
      {"adversarial", 2, 62, 333, 96, 1, 576, 201, true, true, false, 2},
      {"adversarial, lengths", 3, 31, 100, 40, 1, 512, 131, true, false, true, 1},
      {"groups", 2, 41, 300, 40, 4, 576, 300, true, false, false, 1},
      {"sharp", 1, 9, 700, 128, 1, 576, 320, false, true, true, 1, 12.f},
      {"one head a group", 1, 7, 99, 5, 5, 512, 77, true, false, true},
      {"selected by top-k", 2, 63, 900, 64, 1, 576, 600, false, false, false, 0, 1.f, true},
      {"KV partitions", 1, 41, 12000, 64, 1, 576, 1100, false, false, true, 0, 1.f, true},
      {"KV partitions, two head tiles", 1, 11, 12000, 128, 1, 512, 1300},
      {"repeated keys", 1, 41, 200, 24, 1, 512, 1100, false, false, true},
      {"no slots", 1, 5, 10, 16, 1, 576, 0},
      {"no keys", 1, 5, 0, 16, 1, 576, 66},
      {"one slot", 1, 300, 50, 16, 1, 576, 1, true},
      {"K 2048", 1, 2, 4096, 128, 1, 576, 2048},
      {"16 heads", 1, 64, 900, 16, 1, 576, 600, false, false, false, 0, 1.f, true},
      {"16 heads, adversarial", 2, 60, 333, 16, 1, 576, 201, true, true, true, 2},
      {"16 heads, few queries", 1, 9, 300, 16, 1, 576, 200, true, true, true},
      {"16 heads, K 2048", 1, 8, 4096, 16, 1, 576, 2048},
      {"16 heads, KV partitions", 1, 64, 40000, 16, 1, 576, 1100, false, false, true, 0, 1.f, true},
      {"8 heads, repeated keys", 1, 64, 200, 8, 1, 512, 700, false, false, true},
      {"24 heads, sharp", 2, 62, 700, 24, 1, 576, 320, false, true, true, 1, 12.f},
      {"32 heads", 1, 62, 4096, 32, 1, 512, 2048, false, true, false, 0, 1.f, true},
  };
  if (what == "test" || what == "small") {
    int bad = 0;
    for (const Case& c : cases) {
      if (what == "small" && int64_t{c.batch} * c.queries * c.heads * c.slots > 100000) continue;
      bad += !run_case(c, seed);
    }
    printf(bad ? "FAILED %d\n" : "all good\n", bad);
    return bad != 0;
  }
  if (what == "profile") {
    bench(1024, 8192, 128, 576, 2048);
    return 0;
  }
  for (int heads : {128, 64, 32, 16}) {
    for (int keys : {4096, 8192, 32768, 131072}) bench(4096, keys, heads, 576, 2048);
  }
  bench(4096, 8192, 64, 512, 512);
  bench(4096, 8192, 128, 512, 1024);
  return 0;
}
