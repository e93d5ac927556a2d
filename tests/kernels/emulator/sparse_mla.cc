// Runs the sparse MLA kernels on the emulator and compares them with float64 results.
#include "sparse_mla/bwd.cu"
#include "sparse_mla/fwd.cu"
#include "sparse_mla_checks.h"

namespace {

using namespace jax_dsa;

void backward(const Case& c, const emulator::Options& options) {
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
    std::vector<uint32_t> counters(hopper::sparse_mla_bwd_counter_bytes(p) / 4, ~0u);
    std::vector<uint4> p_ds(hopper::sparse_mla_bwd_p_ds_bytes(p) / 16, {~0u, ~0u, ~0u, ~0u});
    std::vector<int32_t> order(hopper::sparse_mla_bwd_order_bytes(p) / 4, -1);
    p.counters = counters.data(), p.p_ds = p_ds.data(), p.order = order.data();
    emulator::machine.options = options;
    emulator::require(hopper::launch_sparse_mla_bwd(p, nullptr));
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
    int shared_tiles = 0;
    const SparseMlaBwdParams one = hopper::packed(p);
    const sparse_mla::BwdWork work(one);
    for (int i = 0; work.shares_sums(one) && i < work.steps; ++i) {
      shared_tiles += common_tiles(one, work)[i];
    }
    const bool enough = p.by_rows || shared_tiles >= c.shared_tiles;
    report(what, c, options, dq_error.good(2e-2) && dkv_error.good(2e-2) && enough,
           {dq_error, dkv_error});
  };
  check("bwd", sparse_mla_dkv_place);

  // The same by rows, two queries at a time; the rows are summed afterwards.
  p.by_rows = true;
  p.queries_at_once = std::min<int64_t>(tokens, 2);
  const RowOrder of_rows = order_rows(x, p.queries_at_once);
  rows.assign(p.queries_at_once * hopper::sparse_mla_bwd_query_rows(p) * c.dim, __float2bfloat16(NAN));
  p.rows = rows.data(), p.row_order = of_rows.order.data(), p.row_key = of_rows.key.data();
  check("rows", [](int column) { return column; });
}

}  // namespace

int main(int argc, char** argv) {
  const auto cases =
      emulator::cases(argc, argv, kCases,
                      {"one tile", "four tiles", "adversarial", "groups", "8 heads, repeated keys",
                       "32 heads, sharp", "huge scores", "16 heads, huge scores"});
  for (const Case& c : cases) {
    for (const auto& options : emulator::schedules(argc, argv, &c - kCases)) {
      forward(c, options, hopper::launch_sparse_mla_fwd);
      backward(c, options);
    }
  }
  for (const char* name : {"adversarial", "groups", "32 heads, sharp"}) {
    const Case& c = emulator::named(kCases, name);
    forward(c, {}, hopper::launch_sparse_mla_fwd, emulator::far_rows(int64_t{c.groups} * c.dim * 2));
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
