// Checks of the backward pass of hierarchical tree attention on the emulator, against float64.
#pragma once

#include <cstdio>

#include "htree/build.cu"
#include "htree/bwd_lists.cu"
#include "htree/lists.cu"
#include "problems/aligned.h"
#include "problems/htree_gradients.h"
#include "topk/cluster.cu"
#include "topk/dispatch.cu"

namespace {

using namespace jax_dsa;
using namespace htree_problem;

int failures = 0;

// The launchers of the tier that is tested.
struct Launches {
  cudaError_t (*fwd)(const HTreeFwdParams&, cudaStream_t);
  cudaError_t (*bwd)(const HTreeBwdParams&, cudaStream_t);
};

struct Outcome {
  std::vector<bf16> dq, dk, dv;
  std::vector<int16_t> selected;
};

Outcome run(const Problem& x, const Cotangents& y, int64_t chunk, const Launches& launches) {
  const Case& c = x.c;
  const HTreeLayers& layers = x.layers;
  Aligned<bf16> k(x.k), v(x.v), q(x.q), dout(y.dout);
  HTreeBuildParams build = {};
  build.batch = c.batch, build.tokens = c.tokens, build.groups = c.groups, build.dim = c.dim;
  build.compression = c.compression, build.top_k = c.top_k, build.rope_base = x.rope_base;
  Aligned<uint8_t> tree(htree_tree_bytes(build)), rotations(htree_rotation_bytes(build));
  Aligned<uint8_t> raw(htree_build_workspace(build));
  build.k = k.get(), build.v = v.get(), build.tree = tree.get();
  build.rotations = reinterpret_cast<float*>(rotations.get()), build.workspace = raw.get();
  emulator::require(launch_htree_build(build, nullptr));

  const int64_t queries = int64_t{c.batch} * c.queries;
  Outcome z;
  z.selected.assign(queries * c.groups * (layers.count - 1) * c.top_k, -7);
  Aligned<bf16> out(x.q.size());
  std::vector<float> max_logit(queries * c.heads, NAN), log_sum(queries * c.heads, NAN);
  HTreeBwdParams p = {};
  HTreeFwdParams& fwd = p.fwd;
  fwd.q = q.get(), fwd.positions = x.positions.data(), fwd.tree = tree.get();
  fwd.rotations = build.rotations, fwd.out = out.get(), fwd.max_logit = max_logit.data();
  fwd.log_sum = log_sum.data();
  fwd.selected = z.selected.data(), fwd.batch = c.batch, fwd.queries = c.queries;
  fwd.heads = c.heads, fwd.groups = c.groups, fwd.tokens = c.tokens, fwd.dim = c.dim;
  fwd.compression = c.compression, fwd.top_k = c.top_k, fwd.scale = x.scale;
  fwd.workspace_bytes = htree_fwd_workspace(fwd, queries * c.groups);
  Aligned<uint8_t> workspace(fwd.workspace_bytes);
  fwd.workspace = workspace.get();
  emulator::require(launches.fwd(fwd, nullptr));

  Aligned<bf16> dq(x.q.size()), dk(x.k.size()), dv(x.v.size());
  p.dout = dout.get(), p.dlse = y.dlse.data();
  p.dq = dq.get(), p.dk = dk.get(), p.dv = dv.get();
  fwd.workspace_bytes = htree_bwd_workspace(p, chunk ? chunk : queries * c.groups);
  Aligned<uint8_t> bwd_workspace(fwd.workspace_bytes);
  fwd.workspace = bwd_workspace.get();
  emulator::require(launches.bwd(p, nullptr));
  for (auto [to, from] : {std::pair(&z.dq, &dq), {&z.dk, &dk}, {&z.dv, &dv}}) {
    to->assign(from->get(), from->get() + from->size);
  }
  return z;
}

bool equal_bits(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * 2) == 0;
}

void check(const Case& c, const std::vector<emulator::Options>& schedules,
           const Launches& launches) {
  Problem x = make(c, schedules[0].seed);
  const Cotangents y = cotangents(x, schedules[0].seed);
  Outcome first;
  Gradients expected;
  for (size_t i = 0; i < schedules.size(); ++i) {
    const emulator::Options& options = schedules[i];
    emulator::machine.options = options, emulator::machine.num_sms = 2;
    Outcome z = run(x, y, c.chunk, launches);
    if (i == 0) first = z, expected = gradients(x, y, z.selected.data());
    // With huge scores, the sum in the column that makes them is one of huge numbers. It is rotated
    // together with the column that is half of the dims behind.
    for (size_t k = 0; c.huge != 0.f && k < z.dq.size(); ++k) {
      if (k % (c.dim / 2) != size_t(c.dim) / 2 - 1) continue;
      z.dq[k] = first.dq[k] = __float2bfloat16(0.f), expected.dq[k] = 0;
    }
    const GradientError dq = gradient_error(z.dq.data(), expected.dq),
                        dk = gradient_error(z.dk.data(), expected.dk),
                        dv = gradient_error(z.dv.data(), expected.dv);
    const bool same =
        equal_bits(first.dq, z.dq) && equal_bits(first.dk, z.dk) && equal_bits(first.dv, z.dv);
    const bool good = dq.good(c.size) && dk.good(c.size) && dv.good(c.size) && same;
    printf(
        "%-4s %-26s %d layers %s %s seed %llu  dq %.1e (%.1e), dk %.1e (%.1e), dv %.1e (%.1e)%s\n",
        good ? "ok" : "BAD", c.name, x.layers.count,
        options.late_wgmma ? "late wgmma, " : "early wgmma,",
        options.late_copies ? "late copies, " : "early copies,", (unsigned long long)options.seed,
        dq.norm, dq.most, dk.norm, dk.most, dv.norm, dv.most, same ? "" : "  DIFFERS");
    fflush(stdout);
    failures += !good;
  }
}

}  // namespace
