// The comparison of sparse attention's forward pass with float64, for programs of the emulator.
#pragma once

#include <functional>

#include "emulator.h"
#include "problems/sparse_attention_problem.h"
#include "sparse_attention/sparse_attention.h"

namespace {

using namespace jax_dsa;

using Launch = std::function<cudaError_t(const SparseAttentionFwdParams&, cudaStream_t)>;

int failures = 0;

void check(const SparseAttentionCase& c, const std::vector<emulator::Options>& schedules,
           const Launch& launch) {
  const SparseAttentionProblem x = make_sparse_attention(c, schedules[0].seed);
  const SparseForward expected = solve_forward(x);
  const std::vector<double> expected_out = with_sinks(x, expected);
  std::vector<uint16_t> first;
  for (size_t i = 0; i < schedules.size(); ++i) {
    const emulator::Options& options = schedules[i];
    std::vector<uint16_t> out(expected_out.size(), 0x7fff);
    std::vector<float> max_logit(expected.log_sum.size(), 777.f), log_sum = max_logit;
    SparseAttentionFwdParams p = {};
    x.set_sizes(p);
    p.q = x.q.data(), p.k = x.k.data(), p.v = x.v.data();
    p.out = out.data(), p.max_logit = max_logit.data(), p.log_sum = log_sum.data();
    if (c.sinks) p.sinks = x.sinks.data(), p.sinks_stride = c.heads;
    p.lists = x.attention_lists();
    std::vector<uint8_t> workspace(sparse_attention_fwd_workspace_bytes(p), 0xff);
    p.workspace = workspace.data();
    emulator::machine.options = options, emulator::machine.num_sms = 2 + i % 2;
    emulator::require(launch(p, nullptr));
    if (i == 0) first = out;
    const double error = difference(c.dtype, out, expected_out);
    const double max_error = row_difference(max_logit, expected.max_logit);
    const double sum_error = row_difference(log_sum, expected.log_sum);
    const bool same = first == out;
    const bool good = error < 0.02 && std::max(max_error, sum_error) < 1e-4 && same;
    printf("%-4s %-38s %s %s seed %llu  out %.1e  max %.1e  sum %.1e%s\n", good ? "ok" : "BAD",
           c.name, options.late_wgmma ? "late wgmma, " : "early wgmma,",
           options.late_copies ? "late copies, " : "early copies,",
           (unsigned long long)options.seed, error, max_error, sum_error, same ? "" : "  DIFFERS");
    fflush(stdout);
    failures += !good;
  }
}

}  // namespace
