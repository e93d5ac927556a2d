// The cases of sparse attention over caches and their comparison with float64, for programs of the
// emulator.
#pragma once

#include <functional>

#include "emulator.h"
#include "far_rows.h"
#include "problems/sparse_decode_problem.h"
#include "sparse_attention/decode.h"

namespace {

using namespace jax_dsa;
using namespace sparse_decode_problem;

using Launch = std::function<cudaError_t(const SparseAttentionDecodeParams&, cudaStream_t)>;

int failures = 0;

struct Output {
  std::vector<uint16_t> out;
  std::vector<float> max_logit, log_sum;

  bool operator==(const Output& other) const {
    return out == other.out && !memcmp(max_logit.data(), other.max_logit.data(), rows_bytes()) &&
           !memcmp(log_sum.data(), other.log_sum.data(), rows_bytes());
  }
  size_t rows_bytes() const { return log_sum.size() * sizeof(float); }
};

// Runs the requests `first` to `last` - 1. The kernel's rows follow `far` others that no query
// sees, in each request or page pool.
Output attend(const Problem& x, int first, int last, int num_sms, const Launch& launch,
              int64_t far = 0) {
  const Case& c = x.c;
  SparseAttentionDecodeParams p = shapes(x);
  const int64_t rows = int64_t{last - first} * c.queries * c.heads;
  const int64_t token = int64_t{first} * c.queries;
  Output y = {std::vector<uint16_t>(rows * c.dim, 0x7fff), std::vector<float>(rows, NAN),
              std::vector<float>(rows, NAN)};
  const int64_t pools = c.with.page_size > 0 && !c.with.pools ? 1 : c.batch;
  const int64_t pool_rows = c.with.page_size > 0 ? int64_t{x.pages} * c.with.page_size : c.keys;
  const auto far_rows = [&](const auto& from, int64_t row_bytes) {
    return std::make_unique<emulator::FarRows>(from.data(), pools, pool_rows * row_bytes,
                                               far * row_bytes);
  };
  const auto k = far_rows(x.k, c.groups * c.dim * x.bytes());
  const auto v = far_rows(x.v, c.groups * c.dim * x.bytes());
  const auto k_scale = c.with.factors ? far_rows(x.k_scale, c.groups * 4) : nullptr;
  const auto v_scale = c.with.factors ? far_rows(x.v_scale, c.groups * 4) : nullptr;
  std::vector<int32_t> page_table = x.page_table;
  if (far) page_table = emulator::far_positions(page_table, far / c.with.page_size);
  p.batch = last - first;
  p.pages += far ? far / c.with.page_size : 0;
  if (p.batch_rows > 0) p.batch_rows += far;
  const auto offset = [&](const auto& rows_, int64_t row_bytes) {
    return rows_ ? rows_->data() + first * p.batch_rows * row_bytes : nullptr;
  };
  p.q = x.q.data() + token * c.heads * c.dim;
  p.k = offset(k, c.groups * c.dim * x.bytes()), p.v = offset(v, c.groups * c.dim * x.bytes());
  p.k_scale = reinterpret_cast<const float*>(offset(k_scale, c.groups * 4));
  p.v_scale = reinterpret_cast<const float*>(offset(v_scale, c.groups * 4));
  p.blocks = x.blocks.data() + token * c.groups * c.slots;
  p.ends = x.ends.data() + token;
  p.sinks = c.with.sinks ? x.sinks.data() + int64_t{first} * p.sinks_stride : nullptr;
  p.page_table = c.with.page_size > 0 ? page_table.data() + first * p.page_slots : nullptr;
  p.out = y.out.data(), p.max_logit = y.max_logit.data(), p.log_sum = y.log_sum.data();
  emulator::machine.num_sms = num_sms;
  emulator::require(launch(p, nullptr));
  return y;
}

void run(const Case& c, const emulator::Options& options, const Launch& launch, int64_t far = 0) {
  const Problem x = make(c, options.seed);
  emulator::machine.options = options;
  // The number of SMs decides how many CTAs divide a list.
  const int num_sms = options.seed % 2 ? 16 : 3;
  const Output y = attend(x, 0, c.batch, num_sms, launch, far);
  const Errors errors(solve(x), y.out, y.max_logit, y.log_sum);
  bool same = true;
  for (int b = 0; b < c.batch && c.with.batch_invariant; ++b) {
    const Output alone = attend(x, b, b + 1, 40, launch);
    const int64_t row = int64_t{b} * c.queries * c.heads, rows = c.queries * c.heads;
    const auto part = [&](const auto& all, int64_t width) {
      return std::vector(all.begin() + row * width, all.begin() + (row + rows) * width);
    };
    same &= alone == Output{part(y.out, c.dim), part(y.max_logit, 1), part(y.log_sum, 1)};
  }
  const bool good = errors.good() && same;
  printf("%-4s %-28s%s %s %s seed %llu  out %.1e  max %.1e  sum %.1e%s\n", good ? "ok" : "BAD",
         c.name, far ? " far" : "", options.late_wgmma ? "late wgmma, " : "early wgmma,",
         options.late_copies ? "late copies, " : "early copies,", (unsigned long long)options.seed,
         errors.out, errors.max_logit, errors.log_sum, same ? "" : "  DEPENDS ON OTHERS");
  fflush(stdout);
  failures += !good;
}

}  // namespace
