// The sparse MLA kernels on the emulator, against float64.
#include <climits>
#include <string>

#include "sparse_mla/fwd.cuh"

namespace {

using bf16 = __nv_bfloat16;
using namespace jax_dsa;

struct Case {
  const char* name;
  int batch, queries, keys, heads, groups, dim, slots;
  bool adversarial = false, ends = false, lengths = false;
  int sinks = 0;  // 1: [N], 2: [B, N]
  float q_size = 1.f;
};

struct Problem {
  Case c;
  std::vector<bf16> q, kv;
  std::vector<int32_t> indices, ends, lengths;
  std::vector<float> sinks;
  float scale;

  bool counts(int64_t token, int group, int slot) const {
    const int key = index(token, group, slot);
    return key >= 0 && key < c.keys && (!c.ends || key < ends[token]) &&
           (!c.lengths || slot < lengths[token]);
  }
  int index(int64_t token, int group, int slot) const {
    return indices[(token * c.groups + group) * c.slots + slot];
  }
  const bf16* key(int64_t token, int group, int slot) const {
    return &kv[((token / c.queries * c.keys + index(token, group, slot)) * c.groups + group) *
               c.dim];
  }
};

Problem make(const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Problem p = {c};
  const int64_t tokens = int64_t{c.batch} * c.queries;
  p.scale = 1 / std::sqrt(float(c.dim));
  p.q.resize(tokens * c.heads * c.dim);
  p.kv.resize(int64_t{c.batch} * c.keys * c.groups * c.dim + 8);
  for (auto& x : p.q) x = __float2bfloat16(normal(random) * c.q_size);
  for (auto& x : p.kv) x = __float2bfloat16(normal(random));
  p.indices.resize(tokens * c.groups * c.slots);
  const int odd[] = {INT_MIN, -1, c.keys, INT_MAX, 0, c.keys - 1};
  for (auto& x : p.indices) {
    x = c.keys ? static_cast<int>(random() % c.keys) : 0;
    if (c.adversarial && random() % 2) x = odd[random() % 6];
  }
  for (int64_t t = 0; t < tokens; ++t) {
    p.ends.push_back(static_cast<int>(random() % (c.keys + 20)) - 5);
    p.lengths.push_back(static_cast<int>(random() % (c.slots + 9)) - 4);
    if (c.adversarial && t % 5 == 3) {
      for (int i = 0; i < c.groups * c.slots; ++i) {
        p.indices[t * c.groups * c.slots + i] = odd[random() % 4];
      }
    }
  }
  p.sinks.resize(c.sinks == 2 ? c.batch * c.heads : c.heads);
  for (size_t i = 0; i < p.sinks.size(); ++i) {
    p.sinks[i] = i % 7 == 2 ? INFINITY : i % 7 == 4 ? -INFINITY : normal(random) * 2;
  }
  // NaN in every key that no slot selects.
  std::vector<bool> used(int64_t{c.batch} * c.keys * c.groups);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int g = 0; g < c.groups; ++g) {
      for (int k = 0; k < c.slots; ++k) {
        if (p.counts(t, g, k)) used[(p.key(t, g, k) - p.kv.data()) / c.dim] = true;
      }
    }
  }
  for (size_t r = 0; r < used.size(); ++r) {
    for (int i = 0; i < c.dim && !used[r]; ++i) p.kv[r * c.dim + i] = __float2bfloat16(NAN);
  }
  return p;
}

// Of one (token, head).
struct Row {
  std::vector<double> score, out;
  double lse, gate;
};

Row attend(const Problem& p, int64_t token, int head) {
  const Case& c = p.c;
  const int group = head / (c.heads / c.groups);
  Row row = {std::vector<double>(c.slots, -INFINITY), std::vector<double>(512), -INFINITY, 1};
  const bf16* q = &p.q[(token * c.heads + head) * c.dim];
  double top = -INFINITY, total = 0;
  for (int k = 0; k < c.slots; ++k) {
    if (!p.counts(token, group, k)) continue;
    double sum = 0;
    for (int d = 0; d < c.dim; ++d) {
      sum += double(__bfloat162float(q[d])) * __bfloat162float(p.key(token, group, k)[d]);
    }
    row.score[k] = sum * p.scale;
    top = std::max(top, row.score[k]);
  }
  if (top == -INFINITY) return row;
  for (double s : row.score) total += std::exp(s - top);
  row.lse = top + std::log(total);
  if (c.sinks) {
    const double sink = p.sinks[(c.sinks == 2 ? token / c.queries * c.heads : 0) + head];
    row.gate = 1 / (1 + std::exp(sink - row.lse));
  }
  for (int k = 0; k < c.slots; ++k) {
    if (row.score[k] == -INFINITY) continue;
    const double weight = row.gate * std::exp(row.score[k] - row.lse);
    for (int d = 0; d < 512; ++d) {
      row.out[d] += weight * __bfloat162float(p.key(token, group, k)[d]);
    }
  }
  return row;
}

struct Error {
  double worst = 0, top = 0;
  void add(double got, double want) {
    const double e = got == want ? 0 : std::fabs(got - want);
    worst = std::max(worst, std::isnan(e) ? INFINITY : e);
    if (std::isfinite(want)) top = std::max(top, std::fabs(want));
  }
  bool good(double relative) const { return worst <= relative * top + 1e-6; }
};

int failures = 0;

void report(const char* what, const Case& c, const emulator::Options& options, bool good,
            std::initializer_list<Error> errors) {
  printf("%-4s %-4s %-20s %s %s seed %llu ", good ? "ok" : "BAD", what, c.name,
         options.late_wgmma ? "late wgmma, " : "early wgmma,",
         options.late_copies ? "late copies, " : "early copies,", (unsigned long long)options.seed);
  for (const Error& e : errors) printf(" %.1e of %.1e", e.worst, e.top);
  printf("\n");
  fflush(stdout);
  failures += !good;
}

void forward(const Case& c, const emulator::Options& options) {
  const Problem x = make(c, options.seed);
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads;
  std::vector<bf16> out(rows * 512, __float2bfloat16(NAN));
  std::vector<float> lse(rows, NAN);
  SparseMlaFwdParams p = {};
  p.q = x.q.data(), p.kv = x.kv.data(), p.indices = x.indices.data();
  p.ends = c.ends ? x.ends.data() : nullptr;
  p.topk_length = c.lengths ? x.lengths.data() : nullptr;
  p.sinks = c.sinks ? x.sinks.data() : nullptr;
  p.sinks_stride = c.sinks == 2 ? c.heads : 0;
  p.out = out.data(), p.lse = lse.data();
  p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
  p.groups = c.groups, p.slots = c.slots, p.dim = c.dim, p.scale = x.scale;
  emulator::launch(2, sparse_mla::kThreads, options, [&] {
    c.dim == 576 ? sparse_mla::fwd_kernel<576>(p) : sparse_mla::fwd_kernel<512>(p);
  });
  Error lse_error, out_error;
  for (int64_t r = 0; r < rows; ++r) {
    const Row want = attend(x, r / c.heads, r % c.heads);
    lse_error.add(lse[r], want.lse);
    for (int d = 0; d < 512; ++d) out_error.add(__bfloat162float(out[r * 512 + d]), want.out[d]);
  }
  report("fwd", c, options, lse_error.good(1e-4) && out_error.good(6e-3), {lse_error, out_error});
}

const Case kCases[] = {
    {"one tile", 1, 1, 64, 64, 1, 576, 64},
    {"four tiles", 1, 2, 300, 64, 1, 576, 256},
    {"D 512, odd tiles", 1, 3, 300, 128, 1, 512, 150},
    {"adversarial", 2, 3, 90, 40, 1, 576, 131, true, true, true, 2},
    {"sharp", 1, 3, 200, 64, 1, 576, 320, false, true, false, 1, 12.f},
    {"groups", 1, 3, 70, 6, 3, 512, 77, true, false, true, 1},
    {"no slots", 1, 3, 10, 16, 1, 576, 0},
};

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seeds = argc > 1 ? strtoull(argv[1], nullptr, 10) : 1;
  for (const Case& c : kCases) {
    for (uint64_t seed = 1; seed <= seeds; ++seed) {
      for (int late = 0; late < 4; ++late) forward(c, {late % 2 == 1, late / 2 == 1, seed});
    }
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
