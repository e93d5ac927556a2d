// Checks of masked attention kernels on the emulator against float64. The Hopper kernels and the
// portable kernels share them.
#pragma once

#include <span>

#include "emulator.h"
#include "problems/masked_attention_problem.h"

namespace jax_dsa {

using ForwardLaunch = cudaError_t (*)(const MaskedAttentionFwdParams&, cudaStream_t);
using ForwardBytes = int64_t (*)(const MaskedAttentionFwdParams&);
using BackwardLaunch = cudaError_t (*)(const MaskedAttentionBwdParams&, cudaStream_t);
using BackwardBytes = int64_t (*)(const MaskedAttentionBwdParams&);

inline int failures = 0;

inline void check_forward(const AttentionCase& c, const std::vector<emulator::Options>& schedules,
                          ForwardLaunch launch, ForwardBytes workspace_bytes) {
  const AttentionProblem x = make_attention(c, schedules[0].seed);
  const ForwardResult expected = solve_forward(x);
  std::vector<uint16_t> first;
  for (size_t i = 0; i < schedules.size(); ++i) {
    const emulator::Options& options = schedules[i];
    std::vector<uint16_t> out(expected.out.size(), 0x7fff);
    std::vector<float> max_logit(expected.log_sum.size(), 777.f), log_sum = max_logit;
    MaskedAttentionFwdParams p = {};
    p.q = x.q.data(), p.k = x.k.data(), p.v = x.v.data();
    p.out = out.data(), p.max_logit = max_logit.data(), p.log_sum = log_sum.data();
    if (c.sinks) p.sinks = x.sinks.data(), p.sinks_stride = c.heads;
    p.mask = x.mask(), p.bias = x.attention_bias(x.bias.data());
    p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
    p.groups = c.groups, p.dim = c.dim, p.value_dim = c.value_dim;
    p.dtype = c.dtype, p.scale = x.scale, p.softcap = c.softcap;
    std::vector<uint8_t> workspace(workspace_bytes(p), 0xff);
    p.workspace = workspace.data();
    emulator::machine.options = options, emulator::machine.num_sms = 2 + i % 2;
    emulator::require(launch(p, nullptr));
    if (i == 0) first = out;
    double worst = 0;
    for (size_t j = 0; j < out.size(); ++j) {
      const double got = from_16(c.dtype, out[j]);
      if (std::isnan(got) && std::isnan(expected.out[j])) continue;
      const double error = std::fabs(got - expected.out[j]);
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

inline void check_backward(const AttentionCase& c, const std::vector<emulator::Options>& schedules,
                           BackwardLaunch launch, BackwardBytes workspace_bytes) {
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
    const int64_t bytes = workspace_bytes(p);
    std::vector<uint8_t> storage(bytes + 128, 0xff);
    auto base = reinterpret_cast<uintptr_t>(storage.data());
    p.workspace = reinterpret_cast<void*>((base + 127) / 128 * 128);
    emulator::machine.options = options, emulator::machine.num_sms = 2 + i / 2 % 3;
    emulator::require(launch(p, nullptr));
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

// Runs check(c, schedules) for every case on each of these GPUs, or for the small cases on the GPUs
// in turn. Without an argument, a case has all its schedules on one GPU and one on the others.
// Returns the exit code.
template <typename Check>
int run_attention_cases(int argc, char** argv, std::initializer_list<const char*> small_cases,
                        std::span<const emulator::Gpu> gpus, Check check) {
  const auto cases = emulator::cases(argc, argv, kAttentionCases, small_cases);
  for (size_t i = 0; i < cases.size(); ++i) {
    const AttentionCase& c = cases[i];
    if (argc > 2 && !strstr(c.name, argv[2])) continue;
    const auto all = emulator::schedules(argc, argv, &c - kAttentionCases);
    for (size_t j = 0; j < gpus.size(); ++j) {
      const bool turn = j == i % gpus.size();
      if (emulator::small(argc, argv) && !turn) continue;
      auto schedules = all;
      if (argc < 2 && !turn) schedules.resize(1);
      emulator::machine.gpu = gpus[j];
      if (gpus.size() > 1) printf("%s:\n", gpus[j].name);
      check(c, schedules);
    }
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}

// Calls a portable launcher with the emulated device.
template <auto kLaunch, typename Params>
cudaError_t launch_on_device(const Params& p, cudaStream_t stream) {
  Device device;
  emulator::require(current_device(&device));
  return kLaunch(p, device, stream);
}

}  // namespace jax_dsa
