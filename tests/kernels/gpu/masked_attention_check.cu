// Tests the masked attention kernels against float64 on the CPU, then times them.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda -Itests/kernels \
//       -o masked_attention_check tests/kernels/gpu/masked_attention_check.cu \
//       cuda/masked_attention/fwd.cu cuda/masked_attention/bwd.cu \
//       cuda/masked_attention/portable_fwd.cu cuda/masked_attention/portable_bwd.cu \
//       cuda/masked_attention/tiers.cc
//   ./masked_attention_check [test|small|bench|variants|portable|profile] [part of case names] \
//       [forward]
// `small` is for compute-sanitizer; `variants` and `portable` time the forward kernels with other
// traits; `forward` leaves out the backward pass. With JAX_DSA_TIER=portable the portable kernels
// run.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "gpu/check.cuh"
#include "gpu/random_bf16.cuh"
#include "masked_attention/fwd_launch.h"
#include "masked_attention/portable_fwd_launch.h"
#include "problems/masked_attention_problem.h"

namespace jax_dsa {
namespace {

// ---- test --------------------------------------------------------------------------------------

// Copies the mask of a problem to the device.
AttentionMask upload_mask(const AttentionProblem& x) {
  AttentionMask m = x.mask();
  if (m.starts) m.starts = upload(x.starts), m.ends = upload(x.ends);
  if (m.q_segments) m.q_segments = upload(x.q_segments), m.kv_segments = upload(x.kv_segments);
  if (m.map_rows) {
    m.map_rows = upload(x.rows), m.tiles = upload(x.tiles), m.bits = upload(x.bits);
  }
  return m;
}

template <typename Params>
void set_sizes(const AttentionCase& c, float scale, Params& p) {
  p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
  p.groups = c.groups, p.dim = c.dim, p.value_dim = c.value_dim;
  p.dtype = c.dtype, p.scale = scale, p.softcap = c.softcap;
}

template <typename T>
T* poisoned(size_t n) {
  T* const p = device<T>(n);
  CHECK(cudaMemset(p, 0xff, n * sizeof(T)));
  return p;
}

bool test_forward(const AttentionProblem& x, bool print) {
  const AttentionCase& c = x.c;
  const ForwardResult expected = solve_forward(x);
  MaskedAttentionFwdParams p = {};
  set_sizes(c, x.scale, p);
  p.mask = upload_mask(x), p.bias = x.attention_bias(upload(x.bias));
  p.q = upload(x.q), p.k = upload(x.k), p.v = upload(x.v);
  auto* const out = poisoned<uint16_t>(expected.out.size());
  const size_t rows = expected.log_sum.size();
  p.out = out, p.max_logit = poisoned<float>(rows), p.log_sum = poisoned<float>(rows);
  if (c.sinks) p.sinks = upload(x.sinks), p.sinks_stride = c.heads;
  p.workspace = poisoned<uint8_t>(masked_attention_fwd_workspace_bytes(p));
  CHECK(launch_masked_attention_fwd(p, nullptr));
  CHECK(cudaDeviceSynchronize());
  const double error = difference(c.dtype, download(out, expected.out.size()), expected.out);
  const double max_error = row_difference(download(p.max_logit, rows), expected.max_logit);
  const double sum_error = row_difference(download(p.log_sum, rows), expected.log_sum);
  const bool good = error < 0.02 && std::max(max_error, sum_error) < 1e-4;
  if (print || !good) {
    printf("%-4s forward   %-32s out %.1e  max %.1e  sum %.1e\n", good ? "ok" : "BAD", c.name,
           error, max_error, sum_error);
  }
  return good;
}

bool test_backward(const AttentionProblem& x, uint64_t seed, bool deterministic, bool print) {
  const AttentionCase& c = x.c;
  const BackwardInputs inputs = make_backward_inputs(x, seed);
  const Gradients expected = solve_backward(x, inputs);
  MaskedAttentionBwdParams p = {};
  p.deterministic = deterministic;
  set_sizes(c, x.scale, p);
  p.mask = upload_mask(x), p.bias = x.attention_bias(upload(x.bias));
  p.q = upload(x.q), p.k = upload(x.k), p.v = upload(x.v);
  p.out = upload(inputs.out);
  p.max_logit = upload(inputs.max_logit), p.log_sum = upload(inputs.log_sum);
  p.dout = upload(inputs.dout), p.dlse = upload(inputs.dlse);
  auto* const dq = poisoned<uint16_t>(expected.dq.size());
  auto* const dk = poisoned<uint16_t>(expected.dk.size());
  auto* const dv = poisoned<uint16_t>(expected.dv.size());
  auto* const dbias = poisoned<uint16_t>(expected.dbias.size());
  p.dq = dq, p.dk = dk, p.dv = dv, p.dbias = dbias;
  p.workspace = poisoned<uint8_t>(masked_attention_bwd_workspace_bytes(p));
  CHECK(launch_masked_attention_bwd(p, nullptr));
  CHECK(cudaDeviceSynchronize());
  const double q_error = query_difference(x, download(dq, expected.dq.size()), expected.dq);
  const double k_error = difference(c.dtype, download(dk, expected.dk.size()), expected.dk);
  const double v_error = difference(c.dtype, download(dv, expected.dv.size()), expected.dv);
  const double bias_error =
      bias_difference(x, download(dbias, expected.dbias.size()), expected.dbias);
  const bool good = std::max({q_error, k_error, v_error, bias_error}) < gradient_tolerance(c);
  if (print || !good) {
    printf("%-4s %s  %-32s dq %.1e  dk %.1e  dv %.1e  dbias %.1e\n", good ? "ok" : "BAD",
           deterministic ? "deterministic" : "backward", c.name, q_error, k_error, v_error,
           bias_error);
  }
  return good;
}

int test(bool small, const char* filter, bool forward_only) {
  int failures = 0;
  for (const AttentionCase& c : kAttentionCases) {
    if (!strstr(c.name, filter)) continue;
    for (uint64_t seed = 1; seed <= (small ? 1 : 3); ++seed) {
      const AttentionProblem x = make_attention(c, seed);
      failures += !test_forward(x, seed == 1);
      if (forward_only) continue;
      failures += !test_backward(x, seed, false, seed == 1);
      if (!x.shares_bias()) failures += !test_backward(x, seed, true, seed == 1);
      fflush(stdout);
    }
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}

// ---- bench -------------------------------------------------------------------------------------

uint16_t* random_bf16(int64_t n, uint64_t seed) {
  return fill_random_bf16(device<uint16_t>(n), n, seed);
}

enum Mask { kDense, kCausalMask, kWindow4096, kDocuments, kEmptyTiles75, kEmptyTiles90, kBits };

struct Bench {
  const char* name;
  int queries, heads, groups, dim, value_dim;
  Mask mask;
  int bias_heads = 0;  // 0: no bias
  bool bias_rows = true;
};

constexpr Bench kBenches[] = {
    {"T16384 N16 D128 dense", 16384, 16, 16, 128, 128, kDense},
    {"T16384 N16 D128 causal", 16384, 16, 16, 128, 128, kCausalMask},
    {"T8192 N128 D192 E128 causal", 8192, 128, 128, 192, 128, kCausalMask},
    {"T8192 N32 G8 D128 causal", 8192, 32, 8, 128, 128, kCausalMask},
    {"T8192 N32 D64 causal", 8192, 32, 32, 64, 64, kCausalMask},
    {"T8192 N16 D256 causal", 8192, 16, 16, 256, 256, kCausalMask},
    {"T8192 N16 D128 75 % empty", 8192, 16, 16, 128, 128, kEmptyTiles75},
    {"T8192 N16 D128 90 % empty", 8192, 16, 16, 128, 128, kEmptyTiles90},
    {"T8192 N16 D128 random bits", 8192, 16, 16, 128, 128, kBits},
    {"64 documents, sum 262144, N4", 262144, 4, 4, 128, 128, kDocuments},
    {"T131072 N4 D128 window 4096", 131072, 4, 4, 128, 128, kWindow4096},
    {"T2048 N16 D128 causal", 2048, 16, 16, 128, 128, kCausalMask},
    {"T4096 N16 D128 without bias", 4096, 16, 16, 128, 128, kDense},
    {"T4096 N16 D128 bias of heads", 4096, 16, 16, 128, 128, kDense, 16},
    {"T4096 N16 D128 bias, causal", 4096, 16, 16, 128, 128, kCausalMask, 16},
    {"T4096 N16 D64 bias of heads", 4096, 16, 16, 64, 64, kDense, 16},
    {"T4096 N16 D256 bias of heads", 4096, 16, 16, 256, 256, kDense, 16},
    {"T4096 N16 D128 one bias for all", 4096, 16, 16, 128, 128, kDense, 1},
    {"T4096 N16 D128 a row of biases", 4096, 16, 16, 128, 128, kDense, 16, false},
    {"T8192 N16 D128 biases, 90 % empty", 8192, 16, 16, 128, 128, kEmptyTiles90, 16},
};

// Makes the mask and returns the number of visible (query, key) pairs per head.
double make_mask(const Bench& b, AttentionMask* m) {
  const int64_t n = b.queries;
  std::mt19937_64 random(7);
  std::vector<int32_t> starts(n, 0), ends(n, n);
  if (b.mask == kCausalMask || b.mask == kWindow4096) {
    for (int64_t t = 0; t < n; ++t) {
      ends[t] = t + 1;
      if (b.mask == kWindow4096) starts[t] = std::max<int64_t>(0, t - 4095);
    }
  }
  if (b.mask == kDocuments) {  // log-uniform lengths from 128 to 16384, scaled to the sum
    std::vector<double> length(64);
    double sum = 0;
    for (auto& x : length) {
      sum += x = 128 * std::exp2(7 * std::uniform_real_distribution<>()(random));
    }
    double at = 0;
    for (size_t i = 0; i < length.size(); ++i) {
      const auto first = static_cast<int64_t>(at);
      at += length[i] * n / sum;
      const int64_t stop = i + 1 == length.size() ? n : static_cast<int64_t>(at);
      for (int64_t t = first; t < stop; ++t) starts[t] = first, ends[t] = t + 1;
    }
  }
  double pairs = 0;
  for (int64_t t = 0; t < n; ++t) pairs += ends[t] - starts[t];
  if (b.mask == kCausalMask || b.mask == kWindow4096 || b.mask == kDocuments) {
    m->starts = upload(starts), m->ends = upload(ends), m->range_stride = 0;
  }
  if (b.mask == kEmptyTiles75 || b.mask == kEmptyTiles90 || b.mask == kBits) {
    const int tiles = static_cast<int>(n / 128);
    std::vector<int32_t> kinds(tiles * tiles), rows(n);
    for (int64_t t = 0; t < n; ++t) rows[t] = t;
    int64_t full = 0;
    for (size_t i = 0; i < kinds.size(); ++i) {
      const double u = std::uniform_real_distribution<>()(random);
      kinds[i] = b.mask == kBits ? i : u < (b.mask == kEmptyTiles75 ? 0.75 : 0.9) ? -2 : -1;
      full += kinds[i] == -1;
    }
    std::vector<uint64_t> bits(b.mask == kBits ? kinds.size() * 256 : 1);
    pairs = full * 128. * 128;
    for (auto& x : bits) {
      x = random();
      if (b.mask == kBits) pairs += __builtin_popcountll(x);
    }
    // A tile of random bits costs as much as a full one.
    if (b.mask == kBits) pairs = n * double(n);
    m->map_rows = upload(rows), m->tiles = upload(kinds);
    m->bits = reinterpret_cast<const uint8_t*>(upload(bits));
    m->slots = kinds.size(), m->map_batch = m->map_heads = 1;
    m->tile_rows = m->tile_columns = tiles, m->block_q = m->block_k = 128;
  }
  return pairs;
}

struct Arrays {
  MaskedAttentionFwdParams forward = {};
  MaskedAttentionBwdParams backward = {};
  double pairs;

  explicit Arrays(const Bench& b) {
    const int64_t n = b.queries;
    AttentionMask mask = {};
    pairs = make_mask(b, &mask);
    auto& f = forward;
    f.q = random_bf16(n * b.heads * b.dim, 1), f.k = random_bf16(n * b.groups * b.dim, 2);
    f.v = random_bf16(n * b.groups * b.value_dim, 3);
    f.out = device<uint16_t>(n * b.heads * b.value_dim);
    f.max_logit = device<float>(n * b.heads), f.log_sum = device<float>(n * b.heads);
    f.mask = mask;
    if (b.bias_heads) {
      const int64_t size = b.bias_heads * (b.bias_rows ? n : 1) * n;
      f.bias = {random_bf16(size, 5), b.bias_rows ? n : 1, 1, b.bias_heads};
      backward.bias = f.bias, backward.dbias = device<uint16_t>(size);
    }
    f.batch = 1, f.queries = f.keys = n, f.heads = b.heads, f.groups = b.groups;
    f.dim = b.dim, f.value_dim = b.value_dim, f.dtype = DType::kBF16;
    f.scale = 1 / std::sqrt(float(b.dim));
    f.workspace = device<uint8_t>(masked_attention_fwd_workspace_bytes(f));
    auto& g = backward;
    g.q = f.q, g.k = f.k, g.v = f.v, g.out = f.out, g.mask = mask;
    g.max_logit = f.max_logit, g.log_sum = f.log_sum;
    g.dout = random_bf16(n * b.heads * b.value_dim, 4);
    auto* const dlse = device<float>(n * b.heads);
    CHECK(cudaMemset(dlse, 0, n * b.heads * 4));
    g.dlse = dlse;
    g.dq = device<uint16_t>(n * b.heads * b.dim), g.dk = device<uint16_t>(n * b.groups * b.dim);
    g.dv = device<uint16_t>(n * b.groups * b.value_dim);
    g.batch = 1, g.queries = g.keys = n, g.heads = b.heads, g.groups = b.groups;
    g.dim = b.dim, g.value_dim = b.value_dim, g.dtype = DType::kBF16, g.scale = f.scale;
    g.workspace = device<uint8_t>(masked_attention_bwd_workspace_bytes(g));
  }
  void free() const {
    const AttentionMask& m = forward.mask;
    for (const void* x : {forward.q,
                          forward.k,
                          forward.v,
                          (const void*)forward.out,
                          (const void*)forward.max_logit,
                          (const void*)forward.log_sum,
                          (const void*)forward.workspace,
                          backward.dout,
                          (const void*)backward.dlse,
                          (const void*)backward.dq,
                          (const void*)backward.dk,
                          (const void*)backward.dv,
                          (const void*)backward.workspace,
                          (const void*)m.starts,
                          (const void*)m.ends,
                          (const void*)m.map_rows,
                          (const void*)m.tiles,
                          (const void*)m.bits,
                          forward.bias.x,
                          (const void*)backward.dbias}) {
      CHECK(cudaFree(const_cast<void*>(x)));
    }
  }
};

__global__ void add_checksum(const void* x, int64_t n, unsigned long long* sum) {
  unsigned long long own = 0;
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < n; i += int64_t{gridDim.x} * 256) {
    own += mix(i * 65536 + static_cast<const uint16_t*>(x)[i]);
  }
  atomicAdd(sum, own);
}
// Returns whether the gradients of 20 runs are bit-identical.
bool same_bits(const MaskedAttentionBwdParams& p) {
  auto* const sums = device<unsigned long long>(20);
  CHECK(cudaMemset(sums, 0, 20 * sizeof(*sums)));
  for (int run = 0; run < 20; ++run) {
    CHECK(launch_masked_attention_bwd(p, nullptr));
    add_checksum<<<1024, 256>>>(p.dq, p.batch * p.queries * p.heads * p.dim, sums + run);
    add_checksum<<<1024, 256>>>(p.dk, p.batch * p.keys * p.groups * p.dim, sums + run);
    add_checksum<<<1024, 256>>>(p.dv, p.batch * p.keys * p.groups * p.value_dim, sums + run);
    CHECK(cudaGetLastError());
  }
  const auto all = download(sums, 20);
  CHECK(cudaFree(sums));
  return std::count(all.begin(), all.end(), all[0]) == 20;
}

// Returns the shortest time per launch of three consecutive launches.
template <typename F>
double milliseconds(F launch) {
  launch();
  return best_milliseconds([&] {
           for (int i = 0; i < 3; ++i) launch();
         }) /
         3;
}

// Returns the bytes per second of a copy, counting reads and writes.
double copy_rate() {
  constexpr int64_t kBytes = int64_t{1} << 29;
  auto* const from = device<uint8_t>(kBytes);
  auto* const to = device<uint8_t>(kBytes);
  CHECK(cudaMemset(from, 1, kBytes));
  const double ms =
      milliseconds([&] { CHECK(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice)); });
  CHECK(cudaFree(from));
  CHECK(cudaFree(to));
  return 2 * kBytes / ms * 1e3;
}

void bench(const char* filter, bool forward_only) {
  const double rate = copy_rate();
  printf("copy %.2f TB/s; biases are read twice and their gradients written: at the copy's rate\n",
         rate * 1e-12);
  printf("%-34s %10s %8s   %10s %8s   %10s %8s\n", "", "forward ms", "TFLOPS", "backward", "TFLOPS",
         "deterministic", "TFLOPS");
  for (const Bench& b : kBenches) {
    if (!strstr(b.name, filter)) continue;
    Arrays x(b);
    const double forward =
        milliseconds([&] { CHECK(launch_masked_attention_fwd(x.forward, nullptr)); });
    const double unit = x.pairs * b.heads * 2e-9, work = unit * (3 * b.dim + 2 * b.value_dim);
    printf("%-34s %10.3f %8.0f", b.name, forward, unit * (b.dim + b.value_dim) / forward);
    if (forward_only) {
      printf("\n");
      x.free();
      continue;
    }
    const double backward =
        milliseconds([&] { CHECK(launch_masked_attention_bwd(x.backward, nullptr)); });
    printf("   %10.3f %8.0f", backward, work / backward);
    x.backward.deterministic = true;
    if (!b.bias_heads || (b.bias_rows && b.bias_heads == b.heads)) {
      const double in_order =
          milliseconds([&] { CHECK(launch_masked_attention_bwd(x.backward, nullptr)); });
      printf("   %10.3f %8.0f%s", in_order, work / in_order,
             same_bits(x.backward) ? "" : "  BITS DIFFER");
    }
    if (b.bias_heads && b.bias_rows) {
      printf("   %.3f ms", 3 * 2 * x.pairs * b.bias_heads / rate * 1e3);
    }
    printf("\n");
    fflush(stdout);
    x.free();
  }
}

// Calls the launcher of a forward kernel with these traits.
template <typename Tr>
cudaError_t launch_variant(const MaskedAttentionFwdParams& p) {
  if constexpr (requires { Tr::kRowTiles; }) {
    Device device;
    CHECK(current_device(&device));
    return masked_attention::launch_portable<Tr>(p, device, nullptr);
  } else {
    return masked_attention::launch<Tr>(p, nullptr);
  }
}

template <typename... Tr>
void time_variants(const char* filter, const Bench& b, std::initializer_list<const char*> names) {
  if (!strstr(b.name, filter)) return;
  const Arrays x(b);
  auto name = names.begin();
  (
      [&] {
        const double ms = milliseconds([&] { CHECK(launch_variant<Tr>(x.forward)); });
        printf("%-32s %-24s %8.3f ms %6.0f TFLOPS\n", b.name, *name++, ms,
               x.pairs * b.heads * 2e-9 * (b.dim + b.value_dim) / ms);
        fflush(stdout);
      }(),
      ...);
  x.free();
}

template <int kD, int kE, int kQInRegisters, bool kUsePingPong, int kWarpgroups = 2>
using Variant = masked_attention::FwdTraits<DType::kBF16, kD, kE, false, false, kWarpgroups,
                                            kQInRegisters, kUsePingPong>;

template <int kQInRegisters, bool kUsePingPong>
using BiasVariant =
    masked_attention::FwdTraits<DType::kBF16, 128, 128, true, true, 2, kQInRegisters, kUsePingPong>;

void variants(const char* filter) {
  for (int i : {0, 1}) {
    time_variants<Variant<128, 128, 8, true>, Variant<128, 128, 4, true>,
                  Variant<128, 128, 0, true>, Variant<128, 128, 8, false>,
                  Variant<128, 128, 0, false>>(
        filter, kBenches[i],
        {"8 in registers", "4 in registers", "0 in registers", "8 in registers, no ping-pong",
         "0 in registers, no ping-pong"});
  }
  time_variants<Variant<192, 128, 0, true>, Variant<192, 128, 4, true>,
                Variant<192, 128, 0, false>>(filter, kBenches[2],
                                             {"0 in registers", "4 in registers", "no ping-pong"});
  time_variants<Variant<64, 64, 0, true, 3>, Variant<64, 64, 4, true>, Variant<64, 64, 0, true>,
                Variant<64, 64, 4, false>>(
      filter, kBenches[4],
      {"3 warpgroups", "4 in registers", "0 in registers", "4 in registers, no ping-pong"});
  time_variants<Variant<256, 256, 4, true>, Variant<256, 256, 0, true>,
                Variant<256, 256, 4, false>>(
      filter, kBenches[5], {"4 in registers", "0 in registers", "4 in registers, no ping-pong"});
  for (const Bench& b : kBenches) {
    if (strcmp(b.name, "T4096 N16 D128 bias of heads")) continue;
    time_variants<BiasVariant<8, true>, BiasVariant<8, false>, BiasVariant<0, false>>(
        filter, b,
        {"8 in registers", "8 in registers, no ping-pong", "0 in registers, no ping-pong"});
  }
}

template <int kD, int kE, int kRowTiles, int kKeys, int kSlots>
using PortableVariant =
    masked_attention::PortableFwdTraits<DType::kBF16, kD, kE, false, kRowTiles, kKeys, kSlots>;

void portable_variants(const char* filter) {
  for (int i : {0, 1}) {
    time_variants<PortableVariant<128, 128, 2, 64, 2>, PortableVariant<128, 128, 2, 64, 3>,
                  PortableVariant<128, 128, 2, 32, 2>, PortableVariant<128, 128, 2, 32, 3>>(
        filter, kBenches[i], {"64 keys, 2 slots", "64, 3", "32, 2", "32, 3"});
  }
  time_variants<PortableVariant<192, 128, 2, 64, 2>, PortableVariant<192, 128, 2, 32, 2>,
                PortableVariant<192, 128, 2, 32, 3>>(filter, kBenches[2],
                                                     {"64 keys, 2 slots", "32, 2", "32, 3"});
  time_variants<PortableVariant<64, 64, 2, 128, 2>, PortableVariant<64, 64, 2, 64, 2>,
                PortableVariant<64, 64, 2, 64, 3>>(filter, kBenches[4],
                                                   {"128 keys, 2 slots", "64, 2", "64, 3"});
  time_variants<PortableVariant<256, 256, 1, 64, 2>, PortableVariant<256, 256, 1, 32, 2>,
                PortableVariant<256, 256, 1, 32, 3>>(filter, kBenches[5],
                                                     {"64 keys, 2 slots", "32, 2", "32, 3"});
}

int run(const std::string& mode, const char* filter, bool forward_only) {
  if (mode == "test" || mode == "small") return test(mode == "small", filter, forward_only);
  if (mode == "variants") {
    variants(filter);
  } else if (mode == "portable") {
    portable_variants(filter);
  } else if (mode == "profile") {  // one launch of each direction
    for (const Bench& b : kBenches) {
      if (!strstr(b.name, filter)) continue;
      const Arrays x(b);
      CHECK(launch_masked_attention_fwd(x.forward, nullptr));
      CHECK(launch_masked_attention_bwd(x.backward, nullptr));
      CHECK(cudaDeviceSynchronize());
      x.free();
    }
  } else {
    bench(filter, forward_only);
  }
  return 0;
}

}  // namespace
}  // namespace jax_dsa

int main(int argc, char** argv) {
  return jax_dsa::run(argc > 1 ? argv[1] : "test", argc > 2 ? argv[2] : "",
                      argc > 3 && strcmp(argv[3], "forward") == 0);
}
