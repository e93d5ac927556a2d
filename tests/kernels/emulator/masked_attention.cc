// Tests the masked attention forward kernel on the emulator against float64.
#include "masked_attention/fwd.cu"
#include "problems/masked_attention_problem.h"

namespace {

using namespace jax_dsa;

int failures = 0;

void check(const AttentionCase& c, const std::vector<emulator::Options>& schedules) {
  const AttentionProblem x = make_attention(c, schedules[0].seed);
  const ForwardResult expected = solve_forward(x);
  std::vector<uint16_t> first;
  for (size_t i = 0; i < schedules.size(); ++i) {
    const emulator::Options& options = schedules[i];
    std::vector<uint16_t> out(expected.out.size(), 0x7fff);
    std::vector<float> max_logit(expected.log_sum.size(), NAN), log_sum = max_logit;
    MaskedAttentionFwdParams p = {};
    p.q = x.q.data(), p.k = x.k.data(), p.v = x.v.data();
    p.out = out.data(), p.max_logit = max_logit.data(), p.log_sum = log_sum.data();
    if (c.sinks) p.sinks = x.sinks.data(), p.sinks_stride = c.heads;
    p.mask = x.mask(), p.bias = x.attention_bias(x.bias.data());
    p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
    p.groups = c.groups, p.dim = c.dim, p.value_dim = c.value_dim;
    p.dtype = c.dtype, p.scale = x.scale, p.softcap = c.softcap;
    std::vector<uint8_t> workspace(masked_attention_fwd_workspace_bytes(p), 0xff);
    p.workspace = workspace.data();
    emulator::machine.options = options, emulator::machine.num_sms = 2 + i % 2;
    emulator::require(launch_masked_attention_fwd(p, nullptr));
    if (i == 0) first = out;
    double worst = 0;
    for (size_t j = 0; j < out.size(); ++j) {
      const double error = std::fabs(from_16(c.dtype, out[j]) - expected.out[j]);
      worst = std::max(worst, std::isnan(error) ? INFINITY : error);
    }
    const double worst_max = row_difference(max_logit, expected.max_logit);
    const double worst_sum = row_difference(log_sum, expected.log_sum);
    const bool same = first == out;
    const bool good = worst < 0.02 && std::max(worst_max, worst_sum) < 1e-4 && same;
    printf("%-4s %-32s %s %s seed %llu  out %.1e  max %.1e  sum %.1e%s\n", good ? "ok" : "BAD",
           c.name, options.late_wgmma ? "late wgmma, " : "early wgmma,",
           options.late_copies ? "late copies, " : "early copies,",
           (unsigned long long)options.seed, worst, worst_max, worst_sum, same ? "" : "  DIFFERS");
    fflush(stdout);
    failures += !good;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto cases =
      emulator::cases(argc, argv, kAttentionCases,
                      {"dense", "causal", "200 dims, segments, softcap", "segments and ranges",
                       "bias", "bias, 256 dims", "keys of -1e9", "sinks"});
  for (const AttentionCase& c : cases) {
    if (argc > 2 && !strstr(c.name, argv[2])) continue;
    check(c, emulator::schedules(argc, argv, &c - kAttentionCases));
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
