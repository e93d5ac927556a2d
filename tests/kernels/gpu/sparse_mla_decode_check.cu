// Tests the sparse MLA decode kernels against float64 results of the CPU, then times them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o sparse_mla_decode_check tests/kernels/gpu/sparse_mla_decode_check.cu \
//       cuda/sparse_mla/*.cu cuda/sparse_mla/tiers.cc
//   ./sparse_mla_decode_check [test|small|bench|records|two|profile] [seed]
// `small` is for compute-sanitizer. `records` times the cases that matter to users of FP8 caches,
// and `two` DeepSeek-V4's decode step over two caches.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
#include <utility>

#include "gpu/cache_bench.cuh"
#include "gpu/call_graph.cuh"
#include "gpu/check.cuh"
#include "mla/records.cuh"
#include "problems/record_values.h"
#include "problems/sparse_mla_cache.h"
#include "sparse_mla/sparse_mla_decode.h"

using namespace jax_dsa;
using namespace sparse_mla_problem;

// ---- test --------------------------------------------------------------------------------------

// The arrays of a source on the GPU.
struct Held {
  const Source& x;
  uint8_t* kv = upload(x.cache.rows);
  int32_t *indices = upload(x.cache.indices), *table = upload(x.cache.page_table);
  int32_t *ends = upload(x.ends), *lengths = upload(x.lengths);

  explicit Held(const Source& source) : x(source) {}
  Held(const Held&) = delete;
  ~Held() {
    for (void* v : {(void*)kv, (void*)indices, (void*)table, (void*)ends, (void*)lengths}) {
      CHECK(cudaFree(v));
    }
  }
  template <typename Keys>
  void set(Keys& p) const {
    p.kv = kv, p.indices = indices, p.page_table = x.paged() ? table : nullptr;
    p.ends = x.c.ends ? ends : nullptr, p.topk_length = x.c.lengths ? lengths : nullptr;
  }
};

bool run_case(const DecodeCase& tried, uint64_t seed) {
  const Case& c = tried.c;
  const Step step = make_step(tried, seed);
  const Problem& x = step.problem;
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads;
  const int64_t work_tiles = sparse_mla_decode_work_tiles(c.batch, c.queries, c.heads, c.groups);
  const int slots = static_cast<int>(sparse_mla_decode_slots(c.slots, tried.extra_slots));
  const int splits =
      tried.splits ? tried.splits : sparse_mla_decode_splits(work_tiles, slots, num_sms());
  const int64_t partials = sparse_mla_decode_partial_count(work_tiles, splits);
  const int64_t partial_row_count = sparse_mla_decode_row_count(work_tiles, splits);
  SparseMlaDecodeParams p = decode_shapes(step, splits);
  std::deque<Held> held;
  for (const Source& source : step.sources) held.emplace_back(source);
  held[0].set(p);
  if (held.size() > 1) held[1].set(p.extra);
  bf16 *q = upload(x.q), *out = device<bf16>(rows * 512);
  float *sinks = upload(x.sinks), *max_logit = device<float>(rows), *log_sum = device<float>(rows);
  float* partial = device<float>(partials);
  float2* partial_rows = device<float2>(partial_row_count);
  p.q = q, p.out = out, p.max_logit = max_logit, p.log_sum = log_sum;
  p.sinks = c.sinks ? sinks : nullptr;
  p.partial = partial, p.partial_rows = partial_rows;
  std::vector<bf16> got[2];
  std::vector<float> got_max[2], got_sum[2];
  for (int run = 0; run < 2; ++run) {
    CHECK(cudaMemset(out, 0xff, rows * 512 * 2));
    CHECK(cudaMemset(max_logit, 0xff, rows * 4));
    CHECK(cudaMemset(log_sum, 0xff, rows * 4));
    CHECK(cudaMemset(partial, 0xff, partials * 4));
    CHECK(cudaMemset(partial_rows, 0xff, partial_row_count * 8));
    CHECK(launch_sparse_mla_decode(p, nullptr));
    CHECK(cudaDeviceSynchronize());
    got[run] = download(out, rows * 512);
    got_max[run] = download(max_logit, rows), got_sum[run] = download(log_sum, rows);
  }
  const bool same = !std::memcmp(got[0].data(), got[1].data(), rows * 512 * 2) &&
                    !std::memcmp(got_sum[0].data(), got_sum[1].data(), rows * 4);
  Error out_error, lse_error;
  std::mt19937_64 random(seed);
  for (int64_t i = 0; i < std::min<int64_t>(rows, 200); ++i) {
    const int64_t r = i < 64 ? std::min(i, rows - 1) : random() % rows;
    const Row want = attend(x, r / c.heads, r % c.heads);
    lse_error.add(got_sum[0][r], log_sum_for(want, got_max[0][r]));
    for (int d = 0; d < 512; ++d) {
      out_error.add(__bfloat162float(got[0][r * 512 + d]), want.out[d]);
    }
  }
  int64_t nans = 0;
  if (tried.layout.scales != kWithNans && tried.extra.scales != kWithNans) {
    for (bf16 v : got[0]) nans += std::isnan(__bfloat162float(v));
    for (float v : got_sum[0]) nans += std::isnan(v);
  }
  const bool good = same && nans == 0 && lse_error.good(3e-4) && out_error.good(6e-3);
  printf("%-4s %-28s %2d splits  lse %.1e of %.1e  out %.1e of %.1e  nan %lld  %s\n",
         good ? "ok" : "BAD", c.name, splits, lse_error.worst, lse_error.top, out_error.worst,
         out_error.top, (long long)nans, same ? "repeats" : "DIFFERS");
  fflush(stdout);
  for (void* v : {(void*)q, (void*)out, (void*)sinks, (void*)max_logit, (void*)log_sum,
                  (void*)partial, (void*)partial_rows}) {
    CHECK(cudaFree(v));
  }
  return good;
}

// name, B, T, S, N, G, D, K, adversarial, ends, lengths, sinks, size of q; records, page size,
// holes; splits; S and K of the second cache and its layout
const DecodeCase kCases[] = {
    {{"one tile", 1, 1, 64, 64, 1, 576, 64}, {}, 1},
    {{"two tiles", 1, 1, 128, 64, 1, 576, 128}, {}, 2},
    {{"adversarial", 3, 2, 90, 20, 1, 576, 331, true, true, true, 2}, {}, 3},
    {{"groups, sharp", 1, 2, 70, 6, 3, 512, 200, false, true, false, 1, 12.f}, {}, 2},
    {{"more splits than tiles", 1, 1, 70, 70, 1, 512, 70, false, false, false, 1}, {}, 5},
    {{"no slots", 1, 2, 10, 16, 1, 576, 0}, {}, 2},
    {{"no keys", 1, 2, 0, 16, 1, 576, 65}, {}, 2},
    {{"pages", 3, 1, 91, 16, 1, 576, 400, true, true, true, 1}, {false, 7, true}, 2},
    {{"pages, whole", 2, 1, 90, 16, 2, 512, 130, true, true}, {false, 15, true}, 1},
    {{"records", 3, 2, 90, 40, 1, 576, 331, true, true, true, 2}, {true}, 1},
    {{"records in pages", 1, 2, 96, 32, 2, 576, 333, true, false, true}, {true, 16, true}, 2},
    {{"records, any scales", 1, 2, 90, 16, 1, 576, 200}, {true, 0, false, kLeast}, 1},
    {{"records, wide scales", 1, 1, 90, 16, 1, 576, 270}, {true, 0, false, kWide}, 2},
    {{"records with NaN", 3, 3, 90, 16, 1, 576, 40}, {true, 0, false, kWithNans}, 1},
    {{"page records", 2, 2, 96, 40, 1, 512, 331, true, true, true, 2}, {true, 16, true}, 1},
    {{"page records, wide scales", 1, 1, 90, 16, 2, 512, 270}, {true, 15, false, kWide}, 2},
    {{"page records with NaN", 3, 3, 90, 16, 1, 512, 40}, {true, 6, false, kWithNans}, 1},
    {{"two caches", 2, 2, 91, 20, 1, 576, 100, true, true, true, 2},
     {false, 7, true},
     3,
     48,
     210,
     {false, 12, true}},
    {{"two caches, no first slot", 2, 1, 10, 16, 1, 512, 0}, {}, 2, 70, 140},
    {{"two caches of records", 2, 1, 90, 16, 1, 576, 70, true}, {true}, 1, 80, 130, {true, 16}},
    {{"two caches of page records", 2, 2, 128, 40, 1, 512, 100, true, true, true, 1},
     {true, 64},
     2,
     160,
     333,
     {true, 10, true}},
    {{"V4, 1 request", 1, 1, 128, 128, 1, 512, 128, false, true, true, 1},
     {true, 64},
     0,
     4096,
     1024,
     {true, 64}},
    {{"V4, 9 requests", 9, 1, 128, 64, 1, 512, 128, true, true, true, 1},
     {true, 64, true},
     0,
     2048,
     512,
     {true, 64, true}},
    {{"V4, 70 requests of bf16", 70, 2, 128, 64, 1, 512, 128, false, true, true, 1},
     {false, 64},
     0,
     512,
     512,
     {false, 32, true}},
    {{"one request", 1, 1, 4096, 128, 1, 576, 2048}, {}, 0},
    {{"one request, records, pages", 1, 1, 4096, 128, 1, 576, 2048}, {true, 64}, 0},
    {{"8 requests", 8, 1, 3000, 128, 1, 576, 2048, true, true, true, 1}, {}, 0},
    {{"8 requests, pages", 8, 1, 3001, 128, 1, 576, 2048, true, true, true}, {false, 1}, 0},
    {{"8 requests, records", 8, 1, 3000, 128, 1, 576, 2048, true, true, true}, {true}, 0},
    {{"70 requests", 70, 2, 500, 128, 1, 576, 512, true, true, true, 2}, {}, 0},
    {{"70 requests, records", 70, 2, 504, 64, 1, 576, 512, true, true, true}, {true, 63, true}, 0},
    {{"D 512, sharp", 4, 8, 2000, 128, 1, 512, 1024, false, true, true, 1, 12.f}, {}, 0},
    {{"64 splits", 1, 1, 5000, 16, 1, 576, 4200, true}, {}, 64},
};

__global__ void unpack_code_groups(const record_values::CodeGroup* code_groups, uint32_t* values,
                                   int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  mla::unpack_values(code_groups[i].codes, code_groups[i].scale,
                     [&](int j, const uint32_t (&y)[4]) {
                       for (int m = 0; m < 4; ++m) values[i * 16 + j * 4 + m] = y[m];
                     });
}

bool run_values() {
  const auto code_groups = record_values::code_groups();
  const int count = static_cast<int>(code_groups.size());
  record_values::CodeGroup* from = upload(code_groups);
  auto* to = device<uint32_t>(count * 16);
  unpack_code_groups<<<(count + 127) / 128, 128>>>(from, to, count);
  CHECK(cudaGetLastError());
  const auto values = download(to, count * 16);
  int wrong = 0;
  for (int i = 0; i < count; ++i) {
    wrong +=
        record_values::wrong(code_groups[i], reinterpret_cast<const uint16_t*>(&values[i * 16]));
  }
  printf("%-4s values of records: %d of %d wrong\n", wrong ? "BAD" : "ok", wrong, 32 * count);
  CHECK(cudaFree(from));
  CHECK(cudaFree(to));
  return wrong == 0;
}

// ---- bench -------------------------------------------------------------------------------------

// Ascending indices, as top-k returns them.
__global__ void fill_indices(int32_t* x, int64_t rows, int K, int S, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * K;
       i += int64_t{gridDim.x} * blockDim.x) {
    const double within = (mix(seed + i) >> 12) * 0x1p-52;
    x[i] = static_cast<int>((static_cast<double>(i % K) + within) * S / K);
  }
}
// Joins two lists per row. The indices of the first one follow the 8192 keys of the second one.
__global__ void join_indices(int32_t* x, const int32_t* a, const int32_t* b, int64_t rows, int W,
                             int K) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * (W + K);
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / (W + K), slot = i % (W + K);
    x[i] = slot < W ? 8192 + a[row * W + slot] : b[row * K + slot - W];
  }
}

enum Kind { kFlat, kPages, kRecords, kOddRecords };
const char* const kKinds[] = {"bf16", "bf16 pages", "fp8 pages",
                              "fp8 pages, scales no powers of two"};

// Times one call, in microseconds, for the chosen number of splits and numbers around it.
void bench(int B, int T, int S, int N, int D, int K, Kind kind, double rate) {
  constexpr int kPageSize = 64;
  const bool records = kind == kRecords || kind == kOddRecords;
  const int row_bytes = records ? kMlaRecordBytes : D * 2;
  const int64_t rows = int64_t{B} * S, tokens = int64_t{B} * T;
  const int64_t selected = tokens * K * row_bytes;
  const int sets = static_cast<int>(std::clamp<int64_t>((int64_t{200} << 20) / selected, 2, 32));
  auto* kv = device<uint8_t>(rows * row_bytes);
  if (records) {
    fill_records<<<2048, 128>>>(kv, rows, kind == kOddRecords ? 0.9f : 1.f, 1);
  } else {
    fill_bf16<<<2048, 256>>>(reinterpret_cast<bf16*>(kv), rows * D, 1);
  }
  auto *q = device<bf16>(tokens * N * D), *out = device<bf16>(tokens * N * 512);
  auto* max_logit = device<float>(tokens * N);
  auto* log_sum = device<float>(tokens * N);
  auto* indices = device<int32_t>(sets * tokens * K);
  auto* table = device<int32_t>(rows / kPageSize);
  fill_bf16<<<2048, 256>>>(q, tokens * N * D, 2);
  fill_indices<<<2048, 256>>>(indices, sets * tokens, K, S, 3);
  fill_table<<<256, 256>>>(table, rows / kPageSize);
  CHECK(cudaDeviceSynchronize());
  const int64_t work_tiles = sparse_mla_decode_work_tiles(B, T, N, 1);
  const int chosen = sparse_mla_decode_splits(work_tiles, K, num_sms());
  std::vector<int> tried = {chosen};
  for (int n : {1, chosen / 2, chosen + 1, chosen * 2}) {
    const bool fits = n >= 1 && n <= (K + 63) / 64 && n <= kSparseMlaMaxSplits;
    if (fits && std::find(tried.begin(), tried.end(), n) == tried.end()) tried.push_back(n);
  }
  const double floor_us = (selected + tokens * N * (D + 512) * 2) / rate * 1e-6;
  printf("B%d T%d S%d N%d D%d K%d %s: bytes over bandwidth %.1f us\n", B, T, S, N, D, K,
         kKinds[kind], floor_us);
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  for (int splits : tried) {
    auto* partial = device<float>(sparse_mla_decode_partial_count(work_tiles, splits));
    auto* partial_rows = device<float2>(sparse_mla_decode_row_count(work_tiles, splits));
    SparseMlaDecodeParams p = {};
    p.q = q, p.kv = kv, p.out = out, p.partial = partial, p.partial_rows = partial_rows;
    p.max_logit = max_logit, p.log_sum = log_sum;
    p.batch = B, p.queries = T, p.keys = S, p.heads = N, p.groups = 1, p.slots = K, p.dim = D;
    p.scale = 1 / std::sqrt(float(D)), p.records = records, p.splits = splits;
    p.batch_rows = kind == kFlat ? S : 0;
    if (kind != kFlat) {
      p.page_table = table;
      p.page_size = kPageSize;
      p.page_slots = S / kPageSize;
      p.pages = static_cast<int>(rows / kPageSize);
    }
    // The calls alternate between enough selections to miss the L2.
    const CallGraph calls(sets, stream, [&](int i) {
      p.indices = indices + i * tokens * K;
      return launch_sparse_mla_decode(p, stream);
    });
    const std::vector<float> us = calls.times(10);
    const double mid = us[us.size() / 2];
    printf("  %2d splits%s %7.1f us (best %.1f, worst %.1f)  %.2f of the bandwidth  %.0f TFLOPS\n",
           splits, splits == chosen ? ", chosen:" : ":        ", mid, us[0], us.back(),
           floor_us / mid, 2. * tokens * N * K * (D + 512) / mid * 1e-6);
    fflush(stdout);
    CHECK(cudaFree(partial));
    CHECK(cudaFree(partial_rows));
  }
  CHECK(cudaStreamDestroy(stream));
  for (void* v : {(void*)kv, (void*)q, (void*)out, (void*)max_logit, (void*)log_sum, (void*)indices,
                  (void*)table}) {
    CHECK(cudaFree(v));
  }
}

// Times DeepSeek-V4's decode step: a window of 128 keys and K of 8192 compressed keys. The same
// keys lie in one cache of bf16, in two, and in two caches of page records. Rounds of the three are
// interleaved.
void bench_two_caches(int B, int N, int K, double rate) {
  constexpr int kWindow = 128, kKeys = 8192, kPageSize = 64, kDim = 512, kRounds = 5;
  enum { kOne, kTwo, kTwoOfRecords };
  const int64_t selected = int64_t{B} * (kWindow + K) * kDim * 2;
  const int sets = static_cast<int>(std::clamp<int64_t>((int64_t{200} << 20) / selected, 2, 32));
  const int64_t rows[] = {int64_t{B} * kWindow, int64_t{B} * kKeys, int64_t{B} * (kWindow + kKeys)};
  uint8_t *cache[3], *records[2];
  int32_t *table[3], *picks[3];
  for (int i = 0; i < 3; ++i) {
    cache[i] = device<uint8_t>(rows[i] * kDim * 2);
    fill_bf16<<<2048, 256>>>(reinterpret_cast<bf16*>(cache[i]), rows[i] * kDim, i);
    table[i] = device<int32_t>(rows[i] / kPageSize);
    fill_table<<<256, 256>>>(table[i], rows[i] / kPageSize);
    if (i == 2) break;
    records[i] = device<uint8_t>(rows[i] * kMlaPageRecordBytes);
    fill_page_records<<<2048, 128>>>(records[i], rows[i] / kPageSize, kPageSize, i);
  }
  const int slots[] = {kWindow, K, kWindow + K};
  for (int i = 0; i < 3; ++i) picks[i] = device<int32_t>(int64_t{sets} * B * slots[i]);
  fill_indices<<<2048, 256>>>(picks[0], int64_t{sets} * B, kWindow, kWindow, 3);
  fill_indices<<<2048, 256>>>(picks[1], int64_t{sets} * B, K, kKeys, 4);
  join_indices<<<2048, 256>>>(picks[2], picks[0], picks[1], int64_t{sets} * B, kWindow, K);
  auto *q = device<bf16>(int64_t{B} * N * kDim), *out = device<bf16>(int64_t{B} * N * 512);
  auto *max_logit = device<float>(B * N), *log_sum = device<float>(B * N);
  fill_bf16<<<2048, 256>>>(q, int64_t{B} * N * kDim, 2);
  CHECK(cudaDeviceSynchronize());
  const int64_t work_tiles = sparse_mla_decode_work_tiles(B, 1, N, 1);
  const int splits = sparse_mla_decode_splits(work_tiles, kWindow + K, num_sms());
  auto* partial = device<float>(sparse_mla_decode_partial_count(work_tiles, splits));
  auto* partial_rows = device<float2>(sparse_mla_decode_row_count(work_tiles, splits));
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  std::deque<CallGraph> calls;
  for (const int kind : {kOne, kTwo, kTwoOfRecords}) {
    SparseMlaDecodeParams p = {};
    p.q = q, p.out = out, p.max_logit = max_logit, p.log_sum = log_sum;
    p.partial = partial, p.partial_rows = partial_rows;
    p.batch = B, p.queries = 1, p.heads = N, p.groups = 1, p.dim = kDim;
    p.scale = 1 / std::sqrt(float(kDim)), p.records = kind == kTwoOfRecords, p.splits = splits;
    const auto set = [&](auto& keys, int i) {
      keys.kv = p.records ? records[i] : cache[i];
      keys.page_table = table[i], keys.page_size = kPageSize, keys.slots = slots[i];
      keys.pages = static_cast<int>(rows[i] / kPageSize), keys.page_slots = keys.pages / B;
      keys.keys = int64_t{keys.page_slots} * kPageSize;
    };
    set(p, kind == kOne ? 2 : 0);
    if (kind != kOne) set(p.extra, 1);
    calls.emplace_back(sets, stream, [&](int i) {
      const int64_t first = int64_t{i} * B;
      p.indices = picks[kind == kOne ? 2 : 0] + first * p.slots;
      if (kind != kOne) p.extra.indices = picks[1] + first * K;
      return launch_sparse_mla_decode(p, stream);
    });
  }
  std::vector<float> us[3];
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < 3; ++i) us[i].push_back(calls[i].times(10)[5]);
  }
  for (auto& x : us) std::sort(x.begin(), x.end());
  const double floor_us = (selected + int64_t{B} * N * (kDim + 512) * 2) / rate * 1e-6;
  const float one = us[kOne][kRounds / 2], two = us[kTwo][kRounds / 2];
  const float packed = us[kTwoOfRecords][kRounds / 2];
  printf(
      "B%-3d N%-3d K128+%-4d %2d splits  bf16 bytes %5.1f us  one cache %6.1f us  two %6.1f us "
      "(%.2f)  two of records %6.1f us (%.2f)\n",
      B, N, K, splits, floor_us, one, two, two / one, packed, packed / one);
  fflush(stdout);
  calls.clear();
  CHECK(cudaStreamDestroy(stream));
  for (void* v : {(void*)cache[0], (void*)cache[1], (void*)cache[2], (void*)records[0],
                  (void*)records[1], (void*)table[0], (void*)table[1], (void*)table[2],
                  (void*)picks[0], (void*)picks[1], (void*)picks[2], (void*)q, (void*)out,
                  (void*)max_logit, (void*)log_sum, (void*)partial, (void*)partial_rows}) {
    CHECK(cudaFree(v));
  }
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "test";
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 20240607;
  printf("seed %llu\n", (unsigned long long)seed);
  if (what == "test" || what == "small") {
    int bad = !run_values();
    for (const DecodeCase& c : kCases) {
      if (what == "small" && int64_t{c.c.batch} * c.c.slots > 1500) continue;
      bad += !run_case(c, seed);
    }
    printf(bad ? "FAILED %d\n" : "all good\n", bad);
    return bad != 0;
  }
  const double rate = copy_rate();
  printf("device copy %.2f TB/s\n", rate);
  if (what == "profile") {
    bench(8, 1, 32768, 128, 576, 2048, kRecords, rate);
    return 0;
  }
  if (what == "two") {
    for (const auto& [N, K] : {std::pair(64, 512), std::pair(128, 1024)}) {
      for (int B : {1, 64, 128}) bench_two_caches(B, N, K, rate);
    }
    return 0;
  }
  if (what == "records") {
    for (int B : {1, 8, 64, 128}) bench(B, 1, 8192, 128, 576, 2048, kRecords, rate);
    for (int B : {64, 128}) bench(B, 1, 8192, 64, 576, 2048, kRecords, rate);
    for (int N : {64, 128}) bench(64, 1, 8192, N, 576, 2048, kFlat, rate);
    return 0;
  }
  for (Kind kind : {kFlat, kPages, kRecords}) {
    for (int B : {1, 8, 64, 128}) bench(B, 1, 32768, 128, 576, 2048, kind, rate);
  }
  bench(64, 1, 32768, 128, 576, 2048, kOddRecords, rate);
  for (int B : {64, 128}) bench(B, 1, 8192, 128, 576, 2048, kRecords, rate);
  for (int B : {64, 128}) bench(B, 1, 8192, 64, 576, 2048, kRecords, rate);
  for (int N : {16, 64}) {
    for (int B : {1, 64}) {
      bench(B, 1, 32768, N, 576, 2048, kFlat, rate);
      bench(B, 1, 32768, N, 576, 2048, kRecords, rate);
    }
  }
  bench(1, 1, 32768, 128, 576, 640, kFlat, rate);
  bench(8, 4, 32768, 128, 576, 2048, kFlat, rate);
  bench(64, 1, 32768, 128, 512, 1024, kFlat, rate);
  return 0;
}
