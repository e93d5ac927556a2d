// Tests the masked attention backward kernels on the emulator against float64.
#include "masked_attention/bwd.cu"
#include "problems/masked_attention_problem.h"

namespace {

using namespace jax_dsa;

int failures = 0;

void check(const AttentionCase& c, const std::vector<emulator::Options>& schedules) {
  const AttentionProblem x = make_attention(c, schedules[0].seed);
  const BackwardInputs inputs = make_backward_inputs(x, schedules[0].seed);
  const Gradients expected = solve_backward(x, inputs);
  std::vector<uint16_t> kept[3];  // deterministic gradients of the first schedule, for comparison
  for (size_t i = 0; i < 2 * schedules.size(); ++i) {
    const bool deterministic = i % 2 == 1;
    const emulator::Options& options = schedules[i / 2];
    std::vector<uint16_t> dq(expected.dq.size(), 0x7fff), dk(expected.dk.size(), 0x7fff);
    std::vector<uint16_t> dv(expected.dv.size(), 0x7fff);
    std::vector<uint16_t> dbias(expected.dbias.size() + 8, 0x7fff);
    MaskedAttentionBwdParams p = {};
    p.q = x.q.data(), p.k = x.k.data(), p.v = x.v.data();
    p.out = inputs.out.data();
    p.max_logit = inputs.max_logit.data(), p.log_sum = inputs.log_sum.data();
    p.dout = inputs.dout.data(), p.dlse = inputs.dlse.data();
    p.dq = dq.data(), p.dk = dk.data(), p.dv = dv.data();
    p.mask = x.mask(), p.bias = x.attention_bias(x.bias.data()), p.dbias = dbias.data();
    p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
    p.groups = c.groups, p.dim = c.dim, p.value_dim = c.value_dim;
    p.dtype = c.dtype, p.scale = x.scale, p.softcap = c.softcap, p.deterministic = deterministic;
    if (deterministic && x.shares_bias()) continue;
    const int64_t bytes = masked_attention_bwd_workspace_bytes(p);
    std::vector<uint8_t> storage(bytes + 128, 0xff);
    auto base = reinterpret_cast<uintptr_t>(storage.data());
    p.workspace = reinterpret_cast<void*>((base + 127) / 128 * 128);
    emulator::machine.options = options, emulator::machine.num_sms = 2 + i / 2 % 3;
    emulator::require(launch_masked_attention_bwd(p, nullptr));
    const double q_error = query_difference(x, dq, expected.dq);
    const double k_error = difference(c.dtype, dk, expected.dk);
    const double v_error = difference(c.dtype, dv, expected.dv);
    const double bias_error = bias_difference(x, dbias, expected.dbias);
    bool good = std::max({q_error, k_error, v_error, bias_error}) < gradient_tolerance(c);
    if (i == 1) kept[0] = dq, kept[1] = dk, kept[2] = dv;
    good = good && (!deterministic || (dq == kept[0] && dk == kept[1] && dv == kept[2]));
    printf("%-4s %-32s %s %s %s seed %llu  dq %.1e  dk %.1e  dv %.1e  dbias %.1e\n",
           good ? "ok" : "BAD", c.name, deterministic ? "in order, " : "any order,",
           options.late_wgmma ? "late wgmma, " : "early wgmma,",
           options.late_copies ? "late copies, " : "early copies,",
           (unsigned long long)options.seed, q_error, k_error, v_error, bias_error);
    fflush(stdout);
    failures += !good;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto cases =
      emulator::cases(argc, argv, kAttentionCases,
                      {"dense", "causal", "200 dims, segments, softcap", "segments and ranges",
                       "bias", "bias, 256 dims", "keys of -1e9", "saturated softcap, 192 and 128"});
  for (const AttentionCase& c : cases) {
    if (argc > 2 && !strstr(c.name, argv[2])) continue;
    check(c, emulator::schedules(argc, argv, &c - kAttentionCases));
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
