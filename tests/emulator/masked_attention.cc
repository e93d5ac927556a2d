// The masked attention forward kernel on the emulator, against float64.
#include "masked_attention/fwd.cu"
#include "masked_attention_problem.h"

namespace {

using namespace jax_dsa;

struct Results {
  std::vector<double> out, lse;
};

Results expected(const AttentionProblem& x) {
  const AttentionCase& c = x.c;
  Results y;
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads;
  y.out.resize(rows * c.value_dim), y.lse.resize(rows, -INFINITY);
  std::vector<double> scores(c.keys);
  for (int64_t row = 0; row < rows; ++row) {
    const int n = row % c.heads, t = row / c.heads % c.queries, b = row / c.heads / c.queries;
    double top = -INFINITY, total = 0;
    for (int s = 0; s < c.keys; ++s) {
      scores[s] = x.visible(b, n, t, s) ? x.score(b, n, t, s) : -INFINITY;
      top = std::max(top, scores[s]);
    }
    if (top == -INFINITY) continue;
    for (int s = 0; s < c.keys; ++s) {
      if (scores[s] == -INFINITY) continue;
      const double p = std::exp(scores[s] - top);
      total += p;
      const int64_t key = (int64_t{b} * c.keys + s) * c.groups + n / (c.heads / c.groups);
      for (int e = 0; e < c.value_dim; ++e) {
        y.out[row * c.value_dim + e] += p * x.at(x.v, key * c.value_dim + e);
      }
    }
    for (int e = 0; e < c.value_dim; ++e) y.out[row * c.value_dim + e] /= total;
    y.lse[row] = top + std::log(total);
  }
  return y;
}

int failures = 0;

void check(const AttentionCase& c, const std::vector<emulator::Options>& schedules) {
  const AttentionProblem x = make_attention(c, schedules[0].seed);
  const Results want = expected(x);
  std::vector<uint16_t> first;
  for (size_t i = 0; i < schedules.size(); ++i) {
    const emulator::Options& options = schedules[i];
    std::vector<uint16_t> out(want.out.size(), 0x7fff);
    std::vector<float> lse(want.lse.size(), NAN);
    MaskedAttentionFwdParams p = {};
    p.q = x.q.data(), p.k = x.k.data(), p.v = x.v.data();
    p.out = out.data(), p.lse = lse.data();
    p.mask = x.mask();
    p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
    p.groups = c.groups, p.dim = c.dim, p.value_dim = c.value_dim;
    p.dtype = c.dtype, p.scale = x.scale, p.softcap = c.softcap;
    std::vector<uint8_t> workspace(masked_attention_fwd_workspace_bytes(p), 0xff);
    p.workspace = workspace.data();
    emulator::machine.options = options, emulator::machine.processors = 2 + i % 2;
    emulator::require(launch_masked_attention_fwd(p, nullptr));
    if (i == 0) first = out;
    double worst = 0, worst_lse = 0;
    for (size_t j = 0; j < out.size(); ++j) {
      const double error = std::fabs(from_16(c.dtype, out[j]) - want.out[j]);
      worst = std::max(worst, std::isnan(error) ? INFINITY : error);
    }
    for (size_t j = 0; j < lse.size(); ++j) {
      if (lse[j] == want.lse[j]) continue;
      const double error = std::fabs(lse[j] - want.lse[j]);
      worst_lse = std::max(worst_lse, std::isnan(error) ? INFINITY : error);
    }
    const bool same = first == out;
    const bool good = worst < 0.02 && worst_lse < 1e-4 && same;
    printf("%-4s %-32s %s %s seed %llu  out %.1e  lse %.1e%s\n", good ? "ok" : "BAD", c.name,
           options.late_wgmma ? "late wgmma, " : "early wgmma,",
           options.late_copies ? "late copies, " : "early copies,",
           (unsigned long long)options.seed, worst, worst_lse, same ? "" : "  DIFFERS");
    fflush(stdout);
    failures += !good;
  }
}

const AttentionCase kCases[] = {
    {"one query, one key", 1, 1, 1, 1, 1, 64, 64},
    {"dense", 1, 200, 300, 2, 1, 128, 128},
    {"dense, whole tiles", 1, 256, 512, 1, 1, 64, 64},
    {"causal", 1, 300, 300, 2, 2, 128, 128, kCausal},
    {"shared causal, f16, softcap", 2, 200, 200, 2, 1, 96, 96, kShared, false, 0, 1, 128,
     DType::kF16, 2.f},
    {"window, 192 and 128", 1, 300, 300, 1, 1, 192, 128, kWindow},
    {"random ranges, odd dims", 2, 213, 333, 2, 2, 72, 40, kRandom},
    {"256 dims", 1, 150, 200, 1, 1, 256, 256, kCausal},
    {"200 dims, segments", 1, 150, 200, 2, 1, 200, 136, kNoRanges, true},
    {"segments and ranges", 2, 213, 213, 1, 1, 64, 64, kRandom, true},
    {"map of all heads", 2, 300, 600, 2, 2, 64, 64, kNoRanges, false, 1, 1},
    {"map of each head, shifted", 1, 200, 300, 4, 2, 64, 64, kCausal, false, 4, 1, 128,
     DType::kBF16, 0.f, 0.f, 70},
    {"map of groups, blocks of 40", 2, 150, 300, 4, 2, 64, 64, kNoRanges, true, 2, 2, 40,
     DType::kF16},
    {"negative scale", 1, 100, 150, 1, 1, 64, 64, kCausal, false, 0, 1, 128, DType::kBF16, 0.f,
     -0.2f},
    {"no keys", 1, 130, 0, 2, 1, 128, 128},
};

}  // namespace

int main(int argc, char** argv) {
  for (const AttentionCase& c : kCases) check(c, emulator::schedules(argc, argv, &c - kCases));
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
