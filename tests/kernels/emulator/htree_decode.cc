// Decode of hierarchical tree attention on the emulator, against float64.
#include <cstdio>

#include "htree/decode.cu"
#include "problems/aligned.h"
#include "problems/htree_findings.h"

namespace {

using namespace jax_dsa;
using namespace htree_problem;

int failures = 0;

struct Outcome {
  std::vector<bf16> out;
  std::vector<float> max_logit, log_sum;
  std::vector<int16_t> selected;
};

void check(const Case& c, const std::vector<emulator::Options>& schedules) {
  Problem x = make(c, schedules[0].seed);
  x.decodes = true;
  const int64_t queries = int64_t{c.batch} * c.queries, rows = queries * c.groups;
  const int64_t layers = x.layers.count - 1;
  Aligned<bf16> q(x.q), k(cache(x, true)), v(cache(x, false));
  Outcome first;
  for (const auto& options : schedules) {
    emulator::machine.options = options;
    // 3 CTAs per row. Results are the same bits only for the same number.
    emulator::machine.num_sms = static_cast<int>(3 * rows);
    Outcome y;
    y.out.assign(queries * c.heads * c.dim, __float2bfloat16(NAN));
    y.max_logit.assign(queries * c.heads, NAN), y.log_sum = y.max_logit;
    y.selected.assign(rows * layers * c.top_k, -7);
    HTreeDecodeParams params = {};
    HTreeFwdParams& p = params.fwd;
    p.q = q.get(), p.positions = x.positions.data(), p.out = y.out.data(),
    p.max_logit = y.max_logit.data();
    p.log_sum = y.log_sum.data();
    p.selected = y.selected.data(), p.batch = c.batch, p.queries = c.queries, p.heads = c.heads;
    p.groups = c.groups, p.tokens = c.tokens, p.dim = c.dim, p.compression = c.compression;
    p.top_k = c.top_k, p.scale = x.scale;
    params.k = k.get(), params.v = v.get(), params.rope_base = x.rope_base;
    p.workspace_bytes = htree_decode_workspace(params);
    Aligned<uint8_t> workspace(p.workspace_bytes);
    p.workspace = workspace.get();
    const cudaError_t status = launch_htree_decode(params, nullptr);
    const int least = htree_decode_shared_bytes(c.heads / c.groups, c.dim, c.compression, c.top_k);
    if (least > emulator::machine.gpu.shared_bytes) {
      failures += status != cudaErrorNotSupported;
      return;
    }
    emulator::require(status);
    htree::DecodePlan plan = {};
    htree::assign_workspace(p, x.layers.count, 3 * rows, plan);

    Findings found;
    int64_t inexact = 0;
    const int width = c.compression * c.top_k;
    for (int64_t row = 0; row < rows; ++row) {
      const int b = static_cast<int>(row / c.queries / c.groups),
                t = static_cast<int>(row % c.queries);
      const int g = static_cast<int>(row / c.queries % c.groups);
      const int64_t head = x.token(b, t) * c.heads + g * (c.heads / c.groups);
      const int16_t* chosen = y.selected.data() + (x.token(b, t) * c.groups + g) * layers * c.top_k;
      const float* importance = layers ? plan.importance + (rows + row) * width : nullptr;
      found += htree_problem::check(x, b, t, g, chosen, &y.out[head * c.dim], &y.max_logit[head],
                                    &y.log_sum[head], importance);
      inexact += importance && !selects_exactly(x, b, t, importance, chosen);
    }
    if (first.out.empty()) first = y;
    const bool same = memcmp(first.out.data(), y.out.data(), y.out.size() * 2) == 0 &&
                      memcmp(first.log_sum.data(), y.log_sum.data(), y.log_sum.size() * 4) == 0;
    const bool good = inexact == 0 && found.good(c.size) && same;
    printf(
        "%-4s %-26s %d layers %s seed %llu  out %.1e (%.1e), lse %.1e, gap %.1e, importance "
        "%.1e%s%s%s%s\n",
        good ? "ok" : "BAD", c.name, x.layers.count,
        options.late_copies ? "late copies, " : "early copies,", (unsigned long long)options.seed,
        found.close, found.exact, found.lse, found.gap, found.importance,
        inexact ? "  INEXACT SELECTION" : "", found.partition ? "" : "  NO PARTITION",
        found.complete ? "" : "  INCOMPLETE", same ? "" : "  DIFFERS");
    fflush(stdout);
    failures += !good;
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (const Case& c : kDecodeCases) check(c, emulator::schedules(argc, argv, &c - kDecodeCases));
  for (const emulator::Gpu& gpu : emulator::kPortableGpus) {
    emulator::machine.gpu = gpu;
    printf("%s of shared memory\n", gpu.name);
    for (const Case& c : kDecodeCases) check(c, {{true, true, 3}});
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
