// The comparison of sparse attention's gradients with float64, for programs of the emulator.
#pragma once

#include <functional>

#include "emulator.h"
#include "problems/sparse_attention_problem.h"
#include "sparse_attention/sparse_attention.h"

namespace {

using namespace jax_dsa;

using Launch = std::function<cudaError_t(const SparseAttentionBwdParams&, cudaStream_t)>;

int failures = 0;

void check(const SparseAttentionCase& c, const std::vector<emulator::Options>& schedules,
           const Launch& launch) {
  const SparseAttentionProblem x = make_sparse_attention(c, schedules[0].seed);
  const SparseBackwardInputs inputs = make_backward_inputs(x, schedules[0].seed);
  const SparseGradients expected = solve_backward(x, inputs);
  std::vector<float> first_dk, first_dv;
  std::vector<uint16_t> first_dq;
  for (size_t i = 0; i < schedules.size(); ++i) {
    const emulator::Options& options = schedules[i];
    std::vector<float> dk(expected.dk.size(), NAN), dv(expected.dv.size(), NAN);
    std::vector<uint16_t> dq(expected.dq.size(), 0x7fff);
    SparseAttentionBwdParams p = {};
    x.set_sizes(p);
    p.q = x.q.data(), p.k = x.k.data(), p.v = x.v.data();
    p.out = inputs.out.data(), p.dout = inputs.dout.data();
    p.max_logit = inputs.max_logit.data(), p.log_sum = inputs.log_sum.data();
    p.dlse = inputs.dlse.data();
    p.dq = dq.data(), p.dk = dk.data(), p.dv = dv.data();
    p.lists = x.attention_lists();
    std::vector<uint8_t> workspace(sparse_attention_bwd_workspace_bytes(p), 0xff);
    p.workspace = workspace.data();
    emulator::machine.options = options, emulator::machine.num_sms = 2 + i % 2;
    emulator::require(launch(p, nullptr));
    if (i == 0) first_dq = dq, first_dk = dk, first_dv = dv;
    const double k_error = difference(dk, expected.dk), v_error = difference(dv, expected.dv);
    const double q_error = query_difference(x, dq, expected.dq);
    const bool same = dq == first_dq && dk == first_dk && dv == first_dv;
    const bool good = std::max({q_error, k_error, v_error}) < gradient_tolerance(c) && same;
    printf("%-4s %-38s %s %s seed %llu  dq %.1e  dk %.1e  dv %.1e%s\n", good ? "ok" : "BAD", c.name,
           options.late_wgmma ? "late wgmma, " : "early wgmma,",
           options.late_copies ? "late copies, " : "early copies,",
           (unsigned long long)options.seed, q_error, k_error, v_error, same ? "" : "  DIFFERS");
    fflush(stdout);
    failures += !good;
  }
}

}  // namespace
