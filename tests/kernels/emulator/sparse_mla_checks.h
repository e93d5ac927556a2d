// Checks of sparse MLA kernels on the emulator against float64. The Hopper kernels and the portable
// kernels share them.
#pragma once

#include "emulator.h"
#include "far_rows.h"
#include "problems/sparse_mla_problem.h"
#include "sparse_mla/sparse_mla.h"

namespace jax_dsa {

using namespace sparse_mla_problem;

using ForwardLaunch = cudaError_t (*)(const SparseMlaFwdParams&, cudaStream_t);

inline int failures = 0;

inline void report(const char* what, const Case& c, const emulator::Options& options, bool good,
                   std::initializer_list<Error> errors) {
  printf("%-4s %-4s %-20s %s %s seed %llu ", good ? "ok" : "BAD", what, c.name,
         options.late_wgmma ? "late wgmma, " : "early wgmma,",
         options.late_copies ? "late copies, " : "early copies,", (unsigned long long)options.seed);
  for (const Error& e : errors) printf(" %.1e of %.1e", e.worst, e.top);
  printf("\n");
  fflush(stdout);
  failures += !good;
}

// The kernel's keys follow `far` others that no slot selects.
inline void forward(const Case& c, const emulator::Options& options, ForwardLaunch launch,
                    int64_t far = 0) {
  const Problem x = make(c, options.seed);
  const int64_t row_bytes = int64_t{c.groups} * c.dim * 2;
  const emulator::FarRows kv(x.kv.data(), c.batch, c.keys * row_bytes, far * row_bytes);
  const std::vector<int32_t> indices = emulator::far_positions(x.indices, far);
  const std::vector<int32_t> ends = emulator::far_positions(x.ends, far, 1);
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads;
  std::vector<bf16> out(rows * 512, __float2bfloat16(NAN));
  std::vector<float> max_logit(rows, NAN), log_sum(rows, NAN);
  SparseMlaFwdParams p = {};
  p.q = x.q.data(), p.kv = kv.data(), p.indices = indices.data();
  p.ends = c.ends ? ends.data() : nullptr;
  p.topk_length = c.lengths ? x.lengths.data() : nullptr;
  p.sinks = c.sinks ? x.sinks.data() : nullptr;
  p.sinks_stride = c.sinks == 2 ? c.heads : 0;
  p.out = out.data(), p.max_logit = max_logit.data(), p.log_sum = log_sum.data();
  p.batch = c.batch, p.queries = c.queries, p.keys = c.keys + far, p.heads = c.heads;
  p.groups = c.groups, p.slots = c.slots, p.dim = c.dim, p.scale = x.scale;
  emulator::machine.options = options;
  emulator::require(launch(p, nullptr));
  Error lse_error, out_error;
  bool maxima = true;
  for (int64_t r = 0; r < rows; ++r) {
    const Row want = attend(x, r / c.heads, r % c.heads);
    maxima &= agree_on_nan(want, max_logit[r]);
    lse_error.add(log_sum[r], log_sum_for(want, max_logit[r]));
    for (int d = 0; d < 512; ++d) out_error.add(__bfloat162float(out[r * 512 + d]), want.out[d]);
  }
  report(far ? "far" : "fwd", c, options, maxima && lse_error.good(1e-4) && out_error.good(6e-3),
         {lse_error, out_error});
}

// What a backward launcher needs. common_tiles returns how many key tiles the two rows of steps
// have in common.
struct Backward {
  cudaError_t (*launch)(const SparseMlaBwdParams&, cudaStream_t);
  int64_t (*counter_bytes)(const SparseMlaBwdParams&);
  int64_t (*p_ds_bytes)(const SparseMlaBwdParams&);
  int64_t (*order_bytes)(const SparseMlaBwdParams&);
  int (*common_tiles)(const SparseMlaBwdParams&);
};

inline void backward(const Case& c, const emulator::Options& options, const Backward& tested) {
  const Problem x = make(c, options.seed);
  const int64_t tokens = int64_t{c.batch} * c.queries;
  const Gradients want = differentiate(x, options.seed);
  std::vector<bf16> dq(tokens * c.heads * c.dim), rows;
  std::vector<float> dkv(want.dkv.size());
  SparseMlaBwdParams p = {};
  p.q = x.q.data(), p.kv = x.kv.data(), p.indices = x.indices.data();
  p.ends = c.ends ? x.ends.data() : nullptr;
  p.topk_length = c.lengths ? x.lengths.data() : nullptr;
  p.dout = want.dout.data(), p.max_logit = want.max_logit.data(), p.log_sum = want.log_sum.data(),
  p.out = want.out.data();
  p.dlse = want.dlse.data();
  p.dq = dq.data(), p.dkv = dkv.data();
  p.batch = c.batch, p.queries = c.queries, p.keys = c.keys, p.heads = c.heads;
  p.queries_at_once = tokens;
  p.groups = c.groups, p.slots = c.slots, p.dim = c.dim, p.scale = x.scale;
  const auto check = [&](const char* what, auto place) {
    std::fill(dq.begin(), dq.end(), __float2bfloat16(NAN));
    std::fill(dkv.begin(), dkv.end(), NAN);
    std::vector<uint32_t> counters(tested.counter_bytes(p) / 4, ~0u);
    std::vector<uint4> p_ds(tested.p_ds_bytes(p) / 16, {~0u, ~0u, ~0u, ~0u});
    std::vector<int32_t> order(tested.order_bytes(p) / 4, -1);
    p.counters = counters.data(), p.p_ds = p_ds.data(), p.order = order.data();
    emulator::machine.options = options;
    emulator::require(tested.launch(p, nullptr));
    Error dq_error, dkv_error;
    for (size_t i = 0; i < dq.size(); ++i) {
      // With huge scores, the sum in this column is one of huge numbers.
      if (c.huge != 0 && i % c.dim == size_t(c.dim) - 1) continue;
      dq_error.add(__bfloat162float(dq[i]), want.dq[i]);
    }
    for (size_t i = 0; i < dkv.size(); ++i) {
      const int column = i % c.dim;
      dkv_error.add(dkv[i - column + place(column)], want.dkv[i]);
    }
    const bool enough = p.by_rows || tested.common_tiles(p) >= c.shared_tiles;
    report(what, c, options, dq_error.good(2e-2) && dkv_error.good(2e-2) && enough,
           {dq_error, dkv_error});
  };
  check("bwd", sparse_mla_dkv_place);

  // The same by rows, two queries at a time; the rows are summed afterwards.
  p.by_rows = true;
  p.queries_at_once = std::min<int64_t>(tokens, 2);
  const RowOrder of_rows = order_rows(x, p.queries_at_once);
  rows.assign(p.queries_at_once * sparse_mla_bwd_query_rows(p) * c.dim, __float2bfloat16(NAN));
  p.rows = rows.data(), p.row_order = of_rows.order.data(), p.row_key = of_rows.key.data();
  check("rows", [](int column) { return column; });
}

inline const Case kCases[] = {
    {"one tile", 1, 1, 64, 64, 1, 576, 64},
    {"four tiles", 1, 2, 300, 64, 1, 576, 256},
    {"D 512, odd tiles", 1, 3, 300, 128, 1, 512, 150},
    {"nine queries", 1, 9, 90, 64, 1, 512, 64},
    {"selected by top-k", 2, 3, 250, 64, 1, 512, 200, false, false, false, 0, 1.f, true, 2},
    {"repeated keys", 1, 5, 30, 24, 1, 576, 130, false, false, false, 0, 1.f, false, 1},
    {"adversarial", 2, 3, 90, 40, 1, 576, 131, true, true, true, 2},
    {"sharp", 1, 3, 200, 64, 1, 576, 320, false, true, false, 1, 12.f},
    {"groups", 1, 3, 70, 6, 3, 512, 77, true, false, true, 1},
    {"three head tiles", 1, 3, 60, 160, 1, 512, 80},
    {"KV partitions", 2, 3, 900, 64, 1, 512, 520, false, false, false, 0, 1.f, true, 3},
    {"KV partitions of two head tiles", 1, 1, 40, 72, 1, 512, 1030},
    {"steps without slots", 1, 240, 5, 64, 1, 512, 4, false, true, true},
    {"no slots", 1, 3, 10, 16, 1, 576, 0},
    {"16 heads", 1, 16, 700, 16, 1, 576, 330, false, false, false, 0, 1.f, true, 8},
    {"16 heads, common keys", 1, 8, 700, 16, 1, 576, 330, false, false, false, 0, 1.f, true, 0,
     .97f},
    {"16 heads, empty queries", 2, 12, 300, 16, 1, 512, 150, true, true, true, 2},
    {"8 heads, repeated keys", 1, 16, 30, 8, 1, 576, 70, false, true},
    {"13 heads, sharp", 1, 9, 200, 13, 1, 576, 320, false, true, true, 1, 12.f},
    {"24 heads", 1, 6, 90, 24, 1, 512, 100, true, false, true, 1},
    {"32 heads, sharp", 1, 6, 200, 32, 1, 576, 210, true, false, true, 2, 12.f},
    {"huge scores", 2, 2, 90, 72, 1, 576, 130, true, false, false, 1, 1.f, false, 0, 0, -1e9f},
    {"16 heads, huge scores", 2, 8, 90, 16, 1, 576, 130, true, true, false, 1, 1.f, false, 0, 0,
     -3e38f},
    {"great scores", 2, 2, 90, 64, 1, 576, 130, true, false, true, 1, 1.f, false, 0, 0, 1e5f},
};

// For the forward pass only.
inline const Case kForwardCases[] = {
    {"16 heads, an infinity", 1, 3, 90, 16, 1, 576, 130, false, false, false, 1, 1.f, false, 0, 0,
     0, true},
    {"40 heads, an infinity", 1, 3, 90, 40, 1, 512, 130, false, false, false, 1, 1.f, false, 0, 0,
     0, true},
    {"16 heads, infinite key alone", 1, 2, 9, 16, 1, 576, 1, false, false, false, 1, 1.f, false, 0,
     0, 0, true},
    {"40 heads, infinite key alone", 1, 2, 9, 40, 1, 576, 1, false, false, false, 1, 1.f, false, 0,
     0, 0, true},
    {"16 heads, a NaN query", 1, 2, 90, 16, 1, 576, 130, false, false, false, 1, 1.f, false, 0, 0,
     0, false, true},
    {"40 heads, a NaN query", 1, 2, 90, 40, 1, 512, 130, false, false, false, 1, 1.f, false, 0, 0,
     0, false, true},
};

}  // namespace jax_dsa
