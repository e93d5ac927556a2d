// Checks of sparse MLA decode kernels on the emulator against float64. The Hopper kernels and the
// portable kernels share them.
#pragma once

#include <deque>

#include "emulator.h"
#include "far_rows.h"
#include "problems/sparse_mla_cache.h"

namespace jax_dsa {

using namespace sparse_mla_problem;

using DecodeLaunch = cudaError_t (*)(const SparseMlaDecodeParams&, cudaStream_t);

inline int failures = 0;

// A source in the emulator's memory. If `is_far`, its keys follow others that no slot selects, in
// each request or page pool, at offsets beyond 32 bits.
struct Held {
  Source x;
  int64_t far;
  emulator::FarRows kv;

  Held(const Source& source, bool is_far)
      : x(source),
        far(is_far ? emulator::far_rows(x.row_bytes(), std::max(x.layout.page_size, 1)) : 0),
        kv(x.cache.rows.data(), blocks(), x.cache.rows.size() / blocks(), far * x.row_bytes()) {
    if (x.paged()) {
      x.cache.page_table = emulator::far_positions(x.cache.page_table, far / x.layout.page_size);
      x.cache.pages += far / x.layout.page_size;
    } else {
      x.cache.indices = emulator::far_positions(x.cache.indices, far);
      x.ends = emulator::far_positions(x.ends, far, 1);
    }
  }
  int64_t blocks() const { return x.paged() && !x.layout.pools ? 1 : x.c.batch; }

  // Sets the fields of SparseMlaDecodeParams or SparseMlaExtraKeys for the requests from `first`.
  template <typename Keys>
  void set(Keys& p, int first = 0) const {
    const int64_t queries = int64_t{first} * x.c.queries;
    x.set_shapes(p);
    if (!x.paged()) p.keys += far, p.batch_rows += far;
    p.kv = kv.data() + first * p.batch_rows * x.row_bytes();
    p.indices = x.cache.indices.data() + queries * x.c.groups * x.c.slots;
    p.ends = x.c.ends ? x.ends.data() + queries : nullptr;
    p.topk_length = x.c.lengths ? x.lengths.data() + queries : nullptr;
    p.page_table = x.paged() ? x.cache.page_table.data() + first * x.cache.page_slots : nullptr;
  }
};

// Returns whether a call with FP8 records has the bits of a call with keys of the same values, if
// both are batch-invariant. `p` are the parameters of a call with the keys of `x`.
inline bool has_bits_of_keys(SparseMlaDecodeParams p, const Problem& x, DecodeLaunch launch) {
  const int64_t rows = p.batch * p.queries * p.heads;
  std::vector<bf16> out[2];
  std::vector<float> max_logit(rows), log_sum[2];
  p.batch_invariant = true;
  for (int i = 0; i < 2; ++i) {
    out[i].assign(rows * 512, __float2bfloat16(NAN)), log_sum[i].assign(rows, NAN);
    p.out = out[i].data(), p.max_logit = max_logit.data(), p.log_sum = log_sum[i].data();
    emulator::require(launch(p, nullptr));
    p.records = false, p.kv = x.kv.data(), p.page_table = nullptr;
    p.keys = p.batch_rows = x.c.keys, p.indices = x.indices.data();
    p.ends = x.c.ends ? x.ends.data() : nullptr;
  }
  return !std::memcmp(out[0].data(), out[1].data(), out[0].size() * sizeof(bf16)) &&
         log_sum[0] == log_sum[1];
}

inline void run(const DecodeCase& tried, const emulator::Options& options, DecodeLaunch launch,
                bool is_far = false) {
  const Case& c = tried.c;
  const Step step = make_step(tried, options.seed);
  const Problem& x = step.problem;
  std::deque<Held> held;
  for (const Source& source : step.sources) held.emplace_back(source, is_far);
  const int64_t rows = int64_t{c.batch} * c.queries * c.heads;
  std::vector<bf16> out(rows * 512, __float2bfloat16(NAN));
  std::vector<float> max_logit(rows, NAN), log_sum(rows, NAN);
  const int64_t work_tiles = sparse_mla_decode_work_tiles(c.batch, c.queries, c.heads, c.groups);
  std::vector<float4> partial(sparse_mla_decode_partial_count(work_tiles, tried.splits) / 4,
                              make_float4(NAN, NAN, NAN, NAN));
  std::vector<float2> partial_rows(sparse_mla_decode_row_count(work_tiles, tried.splits),
                                   make_float2(NAN, NAN));
  SparseMlaDecodeParams p = decode_shapes(step, tried.splits);
  held[0].set(p);
  if (held.size() > 1) held[1].set(p.extra);
  p.q = x.q.data();
  p.sinks = c.sinks ? x.sinks.data() : nullptr;
  p.out = out.data(), p.max_logit = max_logit.data(), p.log_sum = log_sum.data();
  p.partial = reinterpret_cast<float*>(partial.data()), p.partial_rows = partial_rows.data();
  emulator::machine.options = options, emulator::machine.num_sms = 3;
  emulator::require(launch(p, nullptr));
  Error lse_error, out_error;
  bool maxima = true;
  for (int64_t r = 0; r < rows; ++r) {
    const Row want = attend(x, r / c.heads, r % c.heads);
    maxima &= agree_on_nan(want, max_logit[r]);
    lse_error.add(log_sum[r], log_sum_for(want, max_logit[r]));
    for (int d = 0; d < 512; ++d) out_error.add(__bfloat162float(out[r * 512 + d]), want.out[d]);
  }
  // Each request alone must give the same bits: results depend on the number of splits, not on the
  // batch.
  bool alone = true;
  std::vector<bf16> own_out(rows / c.batch * 512);
  std::vector<float> own_max(rows / c.batch), own_log_sum(rows / c.batch);
  for (int b = 0; b < c.batch; ++b) {
    SparseMlaDecodeParams own = p;
    own.batch = 1;
    own.q = x.q.data() + int64_t{b} * c.queries * c.heads * c.dim;
    held[0].set(own, b);
    if (held.size() > 1) held[1].set(own.extra, b);
    if (own.sinks) own.sinks += b * p.sinks_stride;
    own.out = own_out.data(), own.max_logit = own_max.data();
    own.log_sum = own_log_sum.data();
    emulator::require(launch(own, nullptr));
    const bf16* const out_of_batch = out.data() + b * own_out.size();
    const float* const sum_of_batch = log_sum.data() + b * own_log_sum.size();
    alone &= !std::memcmp(own_out.data(), out_of_batch, own_out.size() * sizeof(bf16)) &&
             !std::memcmp(own_log_sum.data(), sum_of_batch, own_log_sum.size() * sizeof(float));
  }
  // NaN values have other bits.
  const bool compares = p.records && held.size() == 1 && tried.layout.scales != kWithNans;
  const bool same = !compares || has_bits_of_keys(p, x, launch);
  const bool good = maxima && lse_error.good(1e-4) && out_error.good(6e-3) && alone && same;
  printf("%-4s %-24s%s %2d splits, %s %s seed %llu  lse %.1e of %.1e  out %.1e of %.1e%s%s\n",
         good ? "ok" : "BAD", c.name, is_far ? " far" : "", tried.splits,
         options.late_wgmma ? "late wgmma, " : "early wgmma,",
         options.late_copies ? "late copies, " : "early copies,", (unsigned long long)options.seed,
         lse_error.worst, lse_error.top, out_error.worst, out_error.top,
         alone ? "" : "  differs alone", same ? "" : "  differs from keys");
  fflush(stdout);
  failures += !good;
}

// name, B, T, S, N, G, D, K, adversarial, ends, lengths, sinks, size of q; records, page size,
// holes; splits; S and K of the second cache and its layout
inline const DecodeCase kCases[] = {
    {{"whole", 1, 2, 100, 64, 1, 576, 200}, {}, 1},
    {{"one tile per split", 1, 1, 300, 64, 1, 576, 192}, {}, 3},
    {{"adversarial", 2, 2, 90, 20, 1, 576, 331, true, true, true, 2}, {}, 3},
    {{"D 512, groups, sharp", 1, 2, 70, 6, 3, 512, 200, false, true, false, 1, 12.f}, {}, 2},
    {{"more splits than tiles", 1, 1, 70, 70, 1, 512, 70, false, false, false, 1}, {}, 5},
    {{"no slots", 1, 2, 10, 16, 1, 576, 0}, {}, 2},
    {{"huge scores", 2, 1, 90, 40, 1, 576, 200, true, false, false, 1, 1.f, false, 0, 0, -1e9f},
     {},
     3},
    {{"40 splits", 1, 1, 400, 16, 1, 512, 2600, false, false, false, 1}, {}, 40},
    {{"pages", 2, 1, 91, 16, 1, 576, 400, true, true, true, 1}, {false, 7, true}, 2},
    {{"pools", 3, 1, 96, 16, 2, 512, 130}, {.page_size = 16, .holes = true, .pools = true}, 2},
    {{"pools of records", 2, 1, 90, 16, 1, 576, 200},
     {.records = true, .page_size = 15, .pools = true},
     1},
    {{"pages, whole", 2, 1, 90, 16, 2, 512, 130, true, true}, {false, 15, true}, 1},
    {{"records", 2, 2, 90, 40, 1, 576, 331, true, true, true, 2}, {true}, 1},
    {{"records in pages", 1, 2, 96, 32, 2, 576, 333, true, false, true, 0}, {true, 16, true}, 2},
    {{"records, any scales", 1, 2, 90, 16, 1, 576, 200}, {true, 0, false, kLeast}, 1},
    {{"records, wide scales", 1, 1, 90, 16, 1, 576, 270}, {true, 0, false, kWide}, 2},
    {{"records with NaN", 3, 3, 90, 16, 1, 576, 40}, {true, 0, false, kWithNans}, 1},
    {{"page records", 2, 2, 96, 40, 1, 512, 331, true, true, true, 2}, {true, 16, true}, 1},
    {{"page records, wide scales", 1, 1, 90, 16, 2, 512, 270}, {true, 15, false, kWide}, 2},
    {{"page records with NaN", 3, 3, 90, 16, 1, 512, 40}, {true, 6, false, kWithNans}, 1},
    {{"pools of page records", 2, 1, 90, 16, 1, 512, 200},
     {.records = true, .page_size = 30, .pools = true},
     1},
    {{"an infinity", 1, 2, 90, 40, 1, 576, 130, false, false, false, 1, 1.f, false, 0, 0, 0, true},
     {},
     1},
    {{"an infinity, 3 splits", 1, 2, 90, 16, 1, 512, 200, false, false, false, 1, 1.f, false, 0, 0,
      0, true},
     {},
     3},
    {{"infinite key alone", 1, 1, 9, 16, 1, 576, 1, false, false, false, 1, 1.f, false, 0, 0, 0,
      true},
     {},
     1},
    {{"infinite key alone in a split", 1, 1, 9, 16, 1, 512, 1, false, false, false, 1, 1.f, false,
      0, 0, 0, true},
     {},
     2,
     90,
     64},
    {{"a NaN query", 1, 1, 90, 16, 1, 512, 200, false, false, false, 1, 1.f, false, 0, 0, 0, false,
      true},
     {},
     3},
    {{"two caches", 2, 2, 91, 20, 1, 576, 100, true, true, true, 2},
     {false, 7, true},
     3,
     48,
     210,
     {false, 12, true}},
    {{"two caches, groups", 3, 1, 64, 6, 3, 512, 64}, {}, 2, 30, 65, {false, 10, false}},
    {{"two caches, no first slot", 2, 1, 10, 16, 1, 512, 0}, {}, 2, 70, 140},
    {{"two caches of records", 2, 1, 90, 16, 1, 576, 70, true}, {true}, 1, 80, 130, {true, 16}},
    {{"two caches of page records", 2, 2, 128, 40, 1, 512, 100, true, true, true, 1},
     {true, 64},
     2,
     160,
     333,
     {true, 10, true}},
};

}  // namespace jax_dsa
