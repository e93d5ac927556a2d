// Makes plans: the work ranges of all CTA groups, for several calls with the same lengths.
#include "common/launch.cuh"
#include "mqa_decode/plan.cuh"

namespace jax_dsa {
namespace mqa_decode {
namespace {

constexpr int kPlanThreads = 256;

struct PlanShared {
  WorkRangeFinder<kPlanThreads>::Scratch scratch;
  WorkRange range;
};

// CTA i finds the range of CTA group i. Ranges without a CTA group become zeros.
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const __grid_constant__ Decode p, MqaDecodeRange* plan) {
  auto& shared = dynamic_shared<PlanShared>();
  const int cta_group = blockIdx.x;
  if (cta_group >= p.cta_groups) {
    if (threadIdx.x == 0) plan[cta_group] = {};
    return;
  }
  WorkRangeFinder<kPlanThreads>(p, cta_group, shared.scratch).write(shared.range);
  __syncthreads();
  if (threadIdx.x == 0) {
    const WorkRange& x = shared.range;
    plan[cta_group] = {x.first,          x.last,       x.from,       x.to,
                       x.splits_of_last, p.work_tiles, p.cta_groups, kPlanMark};
  }
}

}  // namespace
}  // namespace mqa_decode

cudaError_t hopper::launch_mqa_decode_plan(const MqaDecodeParams& params,
                                           const mqa_decode::Tuning& tuning, MqaDecodeRange* plan,
                                           cudaStream_t stream) {
  using namespace mqa_decode;
  Device device;
  DSA_RETURN_IF_CUDA_ERROR(current_device(&device));
  TunedParams tuned = {params, tuning};
  tuned.tuning.max_static_tiles = -1;
  const int rows =
      mqa_decode_rows(params.queries, params.heads, params.groups, params.dim, params.records);
  Decode p(tuned, rows, mqa_decode_ctas_per_sm(rows) * std::min(device.num_sms, kMaxSms));
  // Longer requests are planned as if they had fewer keys, so that the sum of all costs is an int.
  const int64_t most = INT32_MAX / (int64_t{p.work_tiles} + kMaxCtaGroups) - kWorkTileOverhead - 1;
  p.keys = std::min(p.keys, std::max<int64_t>(most, 0) * kTile);
  return launch_blocks(plan_kernel, kMqaDecodePlanRanges, kPlanThreads, sizeof(PlanShared), stream,
                       p, plan);
}

}  // namespace jax_dsa
