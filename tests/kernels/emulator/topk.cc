// Runs the top-k kernels on the emulator and compares their results bit for bit with a CPU
// reference.
#include "problems/topk_problem.h"
#include "topk/cluster.cu"
#include "topk/dispatch.cu"

namespace {

using namespace jax_dsa;
using namespace topk_problem;

struct Case {
  int64_t rows, size, k;
  bool whole = false;  // The rows are aligned and have no ranges.
};

int failures = 0;

template <typename Run>
void run(const char* kernel, const Case& c, Kind kind, const emulator::Options& options,
         Run launch) {
  const bool ranges = options.seed % 2 == 0 && !c.whole;
  // The rows begin `offset` floats after an aligned address.
  const int offset = c.whole ? 0 : static_cast<int>((c.size + options.seed) % 4);
  std::vector<float4> store((c.rows * c.size + offset) / 4 + 1);
  float* const x = reinterpret_cast<float*>(store.data()) + offset;
  for (int64_t i = 0; i < c.rows * c.size; ++i) {
    x[i] = sample(kind, options.seed, i / c.size, i % c.size, c.size, c.k);
  }
  auto [starts, ends] = random_ranges(c.rows, c.size, options.seed);
  if (!ranges) {
    starts.assign(c.rows, 0);
    ends.assign(c.rows, static_cast<int>(c.size));
  }
  std::vector<int> indices(c.rows * c.k + 1, -7);
  std::vector<float> values(c.rows * c.k + 1, NAN);
  emulator::machine.options = options;
  const TopkParams p = {x,
                        ranges ? starts.data() : nullptr,
                        ranges ? ends.data() : nullptr,
                        indices.data(),
                        values.data(),
                        c.rows,
                        c.size,
                        c.k};
  emulator::require(launch(p));
  bool correct = indices.back() == -7 && std::isnan(values.back());
  for (int64_t r = 0; r < c.rows; ++r) {
    const std::vector<float> row(x + r * c.size, x + (r + 1) * c.size);
    correct &=
        matches(row, reference(row, c.k, starts[r], ends[r]), &indices[r * c.k], &values[r * c.k]);
  }
  printf("%-4s %-12s %-10s %lld rows of %lld, k %lld, seed %llu\n", correct ? "ok" : "BAD", kernel,
         kNames[static_cast<int>(kind)], (long long)c.rows, (long long)c.size, (long long)c.k,
         (unsigned long long)options.seed);
  fflush(stdout);
  failures += !correct;
}

// Returns a launcher of variant T with the list size that the dispatcher chooses.
template <typename T>
auto launcher(int ranks) {
  return [ranks](const TopkParams& p) {
    return topk::launch<T>(p, capacity_for<T>(std::min(p.k, p.size)), ranks, nullptr);
  };
}

// Returns a launcher of the kernels without clusters, with `ranks` CTAs per row.
auto splits(int ranks) {
  return [ranks](TopkParams p) {
    const int64_t wanted = std::min(p.k, p.size);
    std::vector<float2> workspace(topk::split_bytes(p.rows, wanted, ranks) / sizeof(float2));
    p.workspace = workspace.data();
    return topk::launch_splits<topk::Wide>(p, capacity_for<topk::Wide>(wanted), ranks, nullptr);
  };
}

// The public launcher, with its workspace.
cudaError_t launch_with_workspace(TopkParams p) {
  p.workspace_bytes = topk_workspace_bytes(p.rows, p.size, p.k);
  std::vector<float2> workspace(p.workspace_bytes / sizeof(float2));
  p.workspace = workspace.data();
  return launch_topk(p, nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seeds = emulator::small(argc, argv) ? 1
                         : argc < 2                  ? 2
                                                     : strtoull(argv[1], nullptr, 10);
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    const emulator::Options options = {false, false, seed};
    for (int i = 0; i < static_cast<int>(Kind::kCount); ++i) {
      const Kind kind = static_cast<Kind>(i);
      run("resident", {3, 3001, 200}, kind, options,
          [](const auto& p) { return topk::launch_resident<topk::Resident>(p, nullptr); });
      run("throughput", {2, 9003, 300}, kind, options, launcher<topk::Throughput>(1));
      run("wide", {2, 20001, 700}, kind, options, launcher<topk::Wide>(1));
      run("cluster of 2", {2, 40002, 100}, kind, options, launcher<topk::Latency>(2));
      run("cluster of 4", {1, 40001, 2048}, kind, options, launcher<topk::Latency>(4));
      run("cluster of 8", {1, 60003, 4096}, kind, options, launcher<topk::Latency>(8));
      run("2 splits", {2, 40002, 100}, kind, options, splits(2));
      run("16 splits", {1, 60003, 4096}, kind, options, splits(16));
    }
    // The sample holds all high values, so the first threshold is too high and the row is read
    // again.
    run("throughput", {1, 1 << 15, 1000, true}, Kind::kComb, options,
        launcher<topk::Throughput>(1));
    run("cluster of 2", {1, 1 << 16, 2048, true}, Kind::kComb, options, launcher<topk::Latency>(2));
    run("2 splits", {1, 1 << 16, 2048, true}, Kind::kComb, options, splits(2));
    // The same with an odd number of tiles. Both attempts then begin with the same sum buffer.
    run("throughput", {1, (1 << 15) + 4, 1000, true}, Kind::kComb, options,
        launcher<topk::Throughput>(1));
    run("wide", {1, (1 << 15) + 4, 1000, true}, Kind::kComb, options, launcher<topk::Wide>(1));
    emulator::machine.num_sms = seed % 2 ? 2 : 16;
    // The dispatcher chooses the kernel: for few long rows a cluster, or splits on other GPUs.
    for (const Case& c : {Case{2, 3, 5},
                          {5, 8192, 62},
                          {7, 8193, 4096},
                          {1, 1 << 16, 2048},
                          {1, 131075, 512},
                          {1, 1 << 18, 700},
                          {2, 70000, 4096},
                          {0, 10, 3},
                          {3, 0, 2},
                          {3, 9, 0}}) {
      run("launcher", c, Kind::kSpecial, options,
          [](const auto& p) { return launch_topk(p, nullptr); });
    }
    for (const emulator::Gpu& gpu : emulator::kPortableGpus) {
      emulator::machine.gpu = gpu;
      for (const Case& c : {Case{5, 8192, 62}, {3, 9000, 3}, {1, 1 << 18, 700}, {2, 70000, 4096}}) {
        run(gpu.name, c, Kind::kSpecial, options, launch_with_workspace);
      }
    }
    emulator::machine.gpu = emulator::kHopperGpu;
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
