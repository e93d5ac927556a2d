// Tests the sparse attention backward kernels of dK and dV on the emulator against float64.
#include "problems/sparse_attention_problem.h"
#include "sparse_attention/bwd.cu"

namespace {

using namespace jax_dsa;
using namespace jax_dsa::sparse_attention;

int failures = 0;

// The unions of the lists of tiles of queries, made on the host.
struct HostUnions {
  std::vector<int32_t> counts, rows;
  std::vector<uint32_t> queries;
  TileLists lists = {};

  explicit HostUnions(const SparseAttentionProblem& x) {
    const SparseAttentionCase& c = x.c;
    lists.tile_queries = std::max(128 / x.heads_per_group(), 1);
    lists.tiles = (c.queries + lists.tile_queries - 1) / lists.tile_queries;
    lists.words = (lists.tile_queries + 31) / 32;
    struct Entry {
      int64_t row;
      int time;  // how often the query has named the block before
      bool operator<(const Entry& y) const { return row != y.row ? row < y.row : time < y.time; }
    };
    std::vector<std::map<Entry, std::vector<uint32_t>>> all;
    for (int64_t pair = 0; pair < int64_t{c.batch} * c.groups; ++pair) {
      for (int64_t tile = 0; tile < lists.tiles; ++tile) {
        auto& entries = all.emplace_back();
        for (int i = 0; i < lists.tile_queries; ++i) {
          const int64_t t = tile * lists.tile_queries + i, at = pair / c.groups * c.queries + t;
          if (t >= c.queries) break;
          std::map<int64_t, int> times;
          for (const int64_t block : x.blocks(at, pair % c.groups)) {
            const int64_t position = block * c.block_size;
            const int64_t row = position + (c.packed ? x.starts[at] : 0);
            if (block < 0 || row >= c.keys || (c.causal && position > x.positions[at])) continue;
            if (!x.lengths.empty() && position >= x.lengths[at]) continue;
            auto& words = entries[{row, times[row]++}];
            words.resize(lists.words);
            words[i / 32] |= 1u << i % 32;
          }
        }
        lists.capacity = std::max<int>(lists.capacity, entries.size());
      }
    }
    for (const auto& entries : all) {
      counts.push_back(entries.size());
      for (const auto& [entry, words] : entries) {
        rows.push_back(entry.row);
        queries.insert(queries.end(), words.begin(), words.end());
      }
      rows.resize(counts.size() * lists.capacity, INT_MAX);
      queries.resize(rows.size() * lists.words, ~0u);
    }
    lists.counts = counts.data(), lists.rows = rows.data(), lists.queries = queries.data();
  }
};

void check(const SparseAttentionCase& c, const std::vector<emulator::Options>& schedules) {
  const SparseAttentionProblem x = make_sparse_attention(c, schedules[0].seed);
  const SparseBackwardInputs inputs = make_backward_inputs(x, schedules[0].seed);
  const SparseGradients expected = solve_backward(x, inputs);
  HostUnions unions(x);
  std::vector<float> first_dk, first_dv;
  for (size_t i = 0; i < schedules.size(); ++i) {
    const emulator::Options& options = schedules[i];
    std::vector<float> dk(expected.dk.size(), NAN), dv(expected.dv.size(), NAN);
    SparseAttentionBwdParams p = {};
    x.set_sizes(p);
    p.q = x.q.data(), p.k = x.k.data(), p.v = x.v.data();
    p.out = inputs.out.data(), p.dout = inputs.dout.data();
    p.max_logit = inputs.max_logit.data(), p.log_sum = inputs.log_sum.data();
    p.dlse = inputs.dlse.data();
    p.dk = dk.data(), p.dv = dv.data();
    p.lists = x.attention_lists();
    std::vector<uint8_t> workspace(InverseLists(p, nullptr).bytes, 0xff);
    std::vector<float> delta(x.num_rows(), NAN);
    emulator::machine.options = options, emulator::machine.num_sms = 2 + i % 2;
    const int64_t blocks = ceil_div(x.num_rows(), int64_t{kDeltaRows});
    emulator::require(c.dtype == DType::kBF16
                          ? launch_blocks(delta_kernel<DType::kBF16>, blocks, kDeltaThreads, 0,
                                          nullptr, p, delta.data())
                          : launch_blocks(delta_kernel<DType::kF16>, blocks, kDeltaThreads, 0,
                                          nullptr, p, delta.data()));
    emulator::require(launch_dkv(p, unions.lists, delta.data(), workspace.data(), nullptr));
    if (i == 0) first_dk = dk, first_dv = dv;
    const double k_error = difference(dk, expected.dk), v_error = difference(dv, expected.dv);
    const bool same = dk == first_dk && dv == first_dv;
    const bool good = std::max(k_error, v_error) < gradient_tolerance(c) && same;
    printf("%-4s %-38s %s %s seed %llu  dk %.1e  dv %.1e%s\n", good ? "ok" : "BAD", c.name,
           options.late_wgmma ? "late wgmma, " : "early wgmma,",
           options.late_copies ? "late copies, " : "early copies,",
           (unsigned long long)options.seed, k_error, v_error, same ? "" : "  DIFFERS");
    fflush(stdout);
    failures += !good;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto cases = emulator::cases(
      argc, argv, kSparseAttentionCases,
      {"16 heads, blocks of 64", "1 head, blocks of 16, causal",
       "12 heads, blocks of 4, tail, 256 dims", "32 heads, blocks of 1", "forced blocks and tail",
       "packed", "duplicates", "invalid indices", "topk_length, forced blocks", "sinks, f16"});
  for (const SparseAttentionCase& c : cases) {
    if (argc > 2 && !strstr(c.name, argv[2])) continue;
    check(c, emulator::schedules(argc, argv, &c - kSparseAttentionCases));
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
