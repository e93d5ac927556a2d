// Checks of the forward pass of hierarchical tree attention on the emulator, against float64: the
// tree, the selection, the outputs.
#pragma once

#include <cstdio>

#include "htree/build.cu"
#include "htree/chunks.cuh"
#include "htree/lists.cu"
#include "problems/aligned.h"
#include "problems/htree_findings.h"
#include "topk/cluster.cu"
#include "topk/dispatch.cu"

namespace {

using namespace jax_dsa;
using namespace htree_problem;

int failures = 0;

// Returns the number of rows of the tree that differ from the problem's by more than a rounding
// error.
int64_t wrong_rows(const Problem& p, const uint8_t* tree) {
  const Case& c = p.c;
  const int r = c.compression;
  int64_t wrong = 0;
  for (int bg = 0; bg < c.batch * c.groups; ++bg) {
    for (int l = 0; l < p.layers.count; ++l) {
      const int64_t end = l + 1 < p.layers.count ? p.layers.first[l + 1] : p.layers.blocks;
      for (int64_t at = 0; at < (end - p.layers.first[l]) * r; ++at) {
        const bool prefix = at / r < p.layers.prefix_blocks[l];
        const int64_t i = prefix ? at : at - p.layers.prefix_blocks[l] * r;
        const bool exists = i < p.layers.size[l];
        const std::vector<float> zeros(c.dim);
        const auto row = [&](const std::vector<std::vector<float>>& x) {
          return exists ? &x[l][i * c.dim] : zeros.data();
        };
        const auto keys =
            rotated(p, row(p.trees[bg].k), static_cast<double>(prefix ? i : i % r), true);
        const int64_t block = bg * p.layers.blocks + p.layers.first[l] + at / r;
        for (int half = 0; half < 2; ++half) {
          for (int d = 0; d < c.dim; ++d) {
            const double expected = half ? row(p.trees[bg].v)[d] : keys[d];
            bf16 x;
            memcpy(&x,
                   tree + ((block * 2 + half) * r + i % r) * c.dim * 2 +
                       ((d / 8) ^ (i % r % 8)) * 16 + d % 8 * 2,
                   2);
            const double got = __bfloat162float(x);
            if (std::isnan(expected)
                    ? !std::isnan(got)
                    : !(error(got, expected) <= std::fabs(expected) / 128 + 1e-5)) {
              ++wrong;
              break;
            }
          }
        }
      }
    }
  }
  return wrong;
}

using Launch = cudaError_t (*)(const HTreeFwdParams&, cudaStream_t);

struct Outcome {
  std::vector<bf16> out;
  std::vector<float> max_logit, log_sum;
  std::vector<int16_t> selected;
  std::vector<float> importance;  // of layer 1, of the last chunk
  int64_t width = 0;
  int64_t wrong = 0;  // wrong rows of the tree
};

// Runs the kernels over the first `tokens` tokens. If these are not all tokens, the batch has
// one entry.
Outcome run(const Problem& x, int tokens, Launch launch) {
  const Case& c = x.c;
  const HTreeLayers layers = htree_layers(tokens, c.compression, c.top_k);
  Aligned<bf16> k(x.k.size()), v(x.k.size()), q(x.q.size());
  std::copy(x.k.begin(), x.k.end(), k.get());
  std::copy(x.v.begin(), x.v.end(), v.get());
  std::copy(x.q.begin(), x.q.end(), q.get());
  HTreeBuildParams build = {};
  build.batch = c.batch, build.tokens = tokens, build.groups = c.groups, build.dim = c.dim;
  build.compression = c.compression, build.top_k = c.top_k, build.rope_base = x.rope_base;
  Aligned<bf16> tree(layers.blocks * c.compression * 2 * c.dim * c.batch * c.groups);
  Aligned<float> rotations(int64_t{c.compression} * c.top_k * c.dim);
  Aligned<uint8_t> raw(htree_build_workspace(build));
  build.k = k.get(), build.v = v.get(), build.tree = tree.get();
  build.rotations = rotations.get(), build.workspace = raw.get();
  emulator::require(launch_htree_build(build, nullptr));

  Outcome y;
  if (tokens == c.tokens) y.wrong = wrong_rows(x, reinterpret_cast<uint8_t*>(tree.get()));
  const int64_t queries = int64_t{c.batch} * c.queries;
  y.out.assign(queries * c.heads * c.dim, __float2bfloat16(NAN));
  y.max_logit.assign(queries * c.heads, NAN), y.log_sum = y.max_logit;
  y.selected.assign(queries * c.groups * (layers.count - 1) * c.top_k, -7);
  HTreeFwdParams p = {};
  p.q = q.get(), p.positions = x.positions.data(), p.tree = tree.get();
  p.rotations = rotations.get(), p.out = y.out.data(), p.max_logit = y.max_logit.data();
  p.log_sum = y.log_sum.data();
  p.selected = y.selected.data(), p.batch = c.batch, p.queries = c.queries, p.heads = c.heads;
  p.groups = c.groups, p.tokens = tokens, p.dim = c.dim, p.compression = c.compression;
  p.top_k = c.top_k, p.scale = x.scale;
  p.workspace_bytes = htree_fwd_workspace(p, c.chunk ? c.chunk : queries * c.groups);
  Aligned<uint8_t> workspace(p.workspace_bytes);
  p.workspace = workspace.get();
  emulator::require(launch(p, nullptr));
  htree::QueryChunk chunk = {};
  chunk.rows = queries * c.groups;
  if (c.chunk == 0) htree::assign_workspace(p, layers.count, chunk);
  if (chunk.importance) {
    y.width = chunk.width;
    y.importance.assign(chunk.importance, chunk.importance + chunk.rows * chunk.width);
  }
  return y;
}

template <typename T>
bool equal_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void check(const Case& c, const std::vector<emulator::Options>& schedules, Launch launch) {
  const Problem x = make(c, schedules[0].seed);
  Outcome first;
  for (size_t i = 0; i < schedules.size(); ++i) {
    const emulator::Options& options = schedules[i];
    emulator::machine.options = options, emulator::machine.num_sms = 2;
    const Outcome y = run(x, c.tokens, launch);
    Findings found;
    int64_t inexact = 0;
    const int64_t rows = int64_t{c.batch} * c.queries * c.groups;
    for (int64_t row = 0; row < rows; ++row) {
      const int b = static_cast<int>(row / c.queries / c.groups),
                t = static_cast<int>(row % c.queries);
      const int g = static_cast<int>(row / c.queries % c.groups);
      const int64_t head = x.token(b, t) * c.heads + g * (c.heads / c.groups);
      const int64_t at = (x.token(b, t) * c.groups + g) * (x.layers.count - 1) * c.top_k;
      const float* importance = y.importance.empty() ? nullptr : &y.importance[row * y.width];
      found += check(x, b, t, g, y.selected.data() + at, &y.out[head * c.dim], &y.max_logit[head],
                     &y.log_sum[head], importance);
      inexact += importance && !selects_exactly(x, b, t, importance, y.selected.data() + at);
    }
    if (i == 0) first = y;
    bool same = equal_bits(first.out, y.out) && equal_bits(first.log_sum, y.log_sum);
    if (c.batch == 1 && c.end > 0) {  // the number of tokens that follow has no influence
      const Outcome shorter = run(x, c.end, launch);
      same &= equal_bits(shorter.out, y.out) && equal_bits(shorter.log_sum, y.log_sum);
    }
    const bool good = y.wrong == 0 && inexact == 0 && found.good(c.size) && same;
    printf(
        "%-4s %-26s %d layers %s %s seed %llu  out %.1e (%.1e), lse %.1e, gap %.1e, importance "
        "%.1e%s%s%s%s%s\n",
        good ? "ok" : "BAD", c.name, x.layers.count,
        options.late_wgmma ? "late wgmma, " : "early wgmma,",
        options.late_copies ? "late copies, " : "early copies,", (unsigned long long)options.seed,
        found.close, found.exact, found.lse, found.gap, found.importance,
        y.wrong ? "  WRONG TREE" : "", inexact ? "  INEXACT SELECTION" : "",
        found.partition ? "" : "  NO PARTITION", found.complete ? "" : "  INCOMPLETE",
        same ? "" : "  DIFFERS");
    fflush(stdout);
    failures += !good;
  }
}

}  // namespace
