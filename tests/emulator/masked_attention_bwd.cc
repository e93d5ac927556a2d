// The masked attention backward kernels on the emulator, against float64.
#include "masked_attention/bwd.cu"
#include "masked_attention_problem.h"

namespace {

using namespace jax_dsa;

struct Gradients {
  std::vector<double> dq, dk, dv;
};

// The forward pass's results, and what comes back for them.
struct Given {
  std::vector<uint16_t> out, dout;
  std::vector<float> lse, dlse;
};

Given make_given(const AttentionProblem& x, uint64_t seed) {
  const AttentionCase& c = x.c;
  std::mt19937_64 random(seed + 1000);
  std::normal_distribution<float> normal;
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads;
  Given y;
  y.out.resize(rows * c.value_dim + 8), y.dout.resize(rows * c.value_dim + 8);
  y.lse.resize(rows, -INFINITY), y.dlse.resize(rows);
  std::vector<double> out(c.value_dim);
  for (int64_t row = 0; row < rows; ++row) {
    const int n = row % c.heads, t = row / c.heads % c.queries, b = row / c.heads / c.queries;
    double total = 0;
    std::fill(out.begin(), out.end(), 0);
    for (int s = 0; s < c.keys; ++s) {
      if (!x.visible(b, n, t, s)) continue;
      const double p = std::exp(x.score(b, n, t, s));
      const int64_t key = (int64_t{b} * c.keys + s) * c.groups + n / (c.heads / c.groups);
      total += p;
      for (int e = 0; e < c.value_dim; ++e) out[e] += p * x.at(x.v, key * c.value_dim + e);
    }
    if (total > 0) y.lse[row] = static_cast<float>(std::log(total));
    y.dlse[row] = normal(random);
    for (int e = 0; e < c.value_dim; ++e) {
      y.out[row * c.value_dim + e] = to_16(c.dtype, total > 0 ? out[e] / total : 0);
      y.dout[row * c.value_dim + e] = to_16(c.dtype, total > 0 ? normal(random) : NAN);
    }
    if (total == 0) y.dlse[row] = NAN;
  }
  return y;
}

Gradients expected(const AttentionProblem& x, const Given& given) {
  const AttentionCase& c = x.c;
  Gradients y;
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads;
  const int64_t keys = int64_t{c.batch} * c.keys * c.groups;
  y.dq.resize(rows * c.dim), y.dk.resize(keys * c.dim), y.dv.resize(keys * c.value_dim);
  for (int64_t row = 0; row < rows; ++row) {
    if (given.lse[row] == -INFINITY) continue;
    const int n = row % c.heads, t = row / c.heads % c.queries, b = row / c.heads / c.queries;
    double delta = -given.dlse[row];
    for (int e = 0; e < c.value_dim; ++e) {
      const int64_t i = row * c.value_dim + e;
      delta += double(x.at(given.out, i)) * x.at(given.dout, i);
    }
    for (int s = 0; s < c.keys; ++s) {
      if (!x.visible(b, n, t, s)) continue;
      const int64_t key = (int64_t{b} * c.keys + s) * c.groups + n / (c.heads / c.groups);
      const double score = x.score(b, n, t, s), p = std::exp(score - given.lse[row]);
      double dp = 0;
      for (int e = 0; e < c.value_dim; ++e) {
        const double g = x.at(given.dout, row * c.value_dim + e);
        dp += g * x.at(x.v, key * c.value_dim + e);
        y.dv[key * c.value_dim + e] += p * g;
      }
      double ds = p * (dp - delta) * x.scale;
      if (c.softcap > 0) ds *= 1 - score / c.softcap * (score / c.softcap);
      for (int d = 0; d < c.dim; ++d) {
        y.dq[row * c.dim + d] += ds * x.at(x.k, key * c.dim + d);
        y.dk[key * c.dim + d] += ds * x.at(x.q, row * c.dim + d);
      }
    }
  }
  return y;
}

int failures = 0;

double difference(DType dtype, const std::vector<uint16_t>& got, const std::vector<double>& want) {
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double error = std::fabs(from_16(dtype, got[i]) - want[i]) / (1 + std::fabs(want[i]));
    worst = std::max(worst, std::isnan(error) ? INFINITY : error);
  }
  return worst;
}

void check(const AttentionCase& c, const std::vector<emulator::Options>& schedules) {
  const AttentionProblem x = make_attention(c, schedules[0].seed);
  const Given given = make_given(x, schedules[0].seed);
  const Gradients want = expected(x, given);
  for (size_t i = 0; i < schedules.size(); ++i) {
    const emulator::Options& options = schedules[i];
    std::vector<uint16_t> dq(want.dq.size(), 0x7fff), dk(want.dk.size(), 0x7fff);
    std::vector<uint16_t> dv(want.dv.size(), 0x7fff);
    MaskedAttentionBwdParams p = {};
    p.q = x.q.data(), p.k = x.k.data(), p.v = x.v.data();
    p.out = given.out.data(), p.lse = given.lse.data();
    p.dout = given.dout.data(), p.dlse = given.dlse.data();
    p.dq = dq.data(), p.dk = dk.data(), p.dv = dv.data();
    p.mask = x.mask();
    p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
    p.groups = c.groups, p.dim = c.dim, p.value_dim = c.value_dim;
    p.dtype = c.dtype, p.scale = x.scale, p.softcap = c.softcap;
    const int64_t bytes = masked_attention_bwd_workspace_bytes(p);
    std::vector<uint8_t> room(bytes + 128, 0xff);
    auto base = reinterpret_cast<uintptr_t>(room.data());
    p.workspace = reinterpret_cast<void*>((base + 127) / 128 * 128);
    emulator::machine.options = options, emulator::machine.processors = 2 + i % 2;
    emulator::require(launch_masked_attention_bwd(p, nullptr));
    const double q_error = difference(c.dtype, dq, want.dq);
    const double k_error = difference(c.dtype, dk, want.dk);
    const double v_error = difference(c.dtype, dv, want.dv);
    const bool good = std::max({q_error, k_error, v_error}) < 0.03;
    printf("%-4s %-32s %s %s seed %llu  dq %.1e  dk %.1e  dv %.1e\n", good ? "ok" : "BAD", c.name,
           options.late_wgmma ? "late wgmma, " : "early wgmma,",
           options.late_copies ? "late copies, " : "early copies,",
           (unsigned long long)options.seed, q_error, k_error, v_error);
    fflush(stdout);
    failures += !good;
  }
}

const AttentionCase kCases[] = {
    {"one query, one key", 1, 1, 1, 1, 1, 64, 64},
    {"dense", 1, 200, 300, 2, 1, 128, 128},
    {"dense, whole tiles", 1, 256, 256, 1, 1, 64, 64},
    {"causal", 1, 300, 300, 2, 2, 128, 128, kCausal},
    {"shared causal, f16, softcap", 2, 200, 200, 2, 1, 96, 96, kShared, false, 0, 1, 128,
     DType::kF16, 2.f},
    {"window, 192 and 128", 1, 200, 200, 2, 1, 192, 128, kWindow},
    {"256 dims", 1, 150, 200, 2, 1, 256, 256, kCausal},
    {"200 dims, segments, softcap", 1, 150, 100, 1, 1, 200, 136, kRandom, true, 0, 1, 128,
     DType::kF16, 3.f},
    {"random ranges, odd dims", 2, 213, 333, 2, 2, 72, 40, kRandom},
    {"segments and ranges", 2, 213, 213, 1, 1, 64, 64, kRandom, true},
    {"map of all heads", 2, 300, 400, 2, 2, 64, 64, kNoRanges, false, 1, 1},
    {"map of each head, shifted", 1, 200, 300, 4, 2, 64, 64, kCausal, false, 4, 1, 128,
     DType::kBF16, 0.f, 0.f, 70},
    {"map of groups, blocks of 40", 2, 150, 300, 4, 2, 64, 64, kNoRanges, true, 2, 2, 40,
     DType::kF16},
    {"negative scale", 1, 100, 150, 1, 1, 64, 64, kCausal, false, 0, 1, 128, DType::kBF16, 0.f,
     -0.2f},
    {"no keys", 1, 130, 0, 2, 1, 128, 128},
    {"no queries", 1, 0, 130, 2, 1, 128, 128},
};

}  // namespace

int main(int argc, char** argv) {
  for (const AttentionCase& c : kCases) check(c, emulator::schedules(argc, argv, &c - kCases));
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
