// Launcher of the mqa_decode kernels.

#include "mqa_decode/few.cuh"
#include "mqa_decode/launch.cuh"
#include "mqa_decode/wide.cuh"

namespace jax_dsa::mqa_decode {
namespace {

template <int kD, bool kRecords>
cudaError_t launch_wide(const TunedParams& p, cudaStream_t stream) {
  return launch_kernel<WideShared<kD>, 1, true>(wide_kernel<kD, kRecords>, p, kWideRows,
                                                kWideThreads, stream);
}

template <typename Tr, bool kRecords>
cudaError_t launch_few(const TunedParams& p, cudaStream_t stream) {
  return launch_kernel<FewShared<Tr>, kFewCtasPerSm, false>(few_kernel<Tr, kRecords>, p, Tr::kN,
                                                            kFewThreads, stream);
}

template <int kD, int kE, bool kSeparateValues, bool kRecords = false>
cudaError_t launch_rows(const TunedParams& p, cudaStream_t stream) {
  const int rows = mqa_decode_rows(p.queries, p.heads, p.groups, p.dim, p.records);
  if (rows == 16) {
    return launch_few<mla::FewTraits<kD, 16, kE, kSeparateValues>, kRecords>(p, stream);
  }
  if constexpr (!kRecords) {
    if (rows == 32) {
      return launch_few<mla::FewTraits<kD, 32, kE, kSeparateValues>, kRecords>(p, stream);
    }
  }
  if constexpr (kSeparateValues) {
    return cudaErrorInvalidValue;
  } else {
    return launch_wide<kD, kRecords>(p, stream);
  }
}

bool valid(const MqaDecodeParams& p) {
  if (p.groups <= 0 || p.heads % p.groups != 0 || !(p.scale > 0.f)) return false;
  if (p.queries * p.batch * p.heads > INT32_MAX || p.keys > INT32_MAX - kTile) return false;
  if (p.v ? p.value_dim != p.dim : p.value_dim != kMlaValueDim) return false;
  if (p.records && (p.v || p.dim != 576)) return false;
  if (p.page_table == nullptr) return true;
  return p.page_size > 0 && p.pages >= 0 && p.page_slots >= 0 &&
         int64_t{p.pages} * p.page_size <= INT32_MAX &&
         p.keys == int64_t{p.page_slots} * p.page_size &&
         (p.batch_rows == 0 || p.batch_rows == int64_t{p.pages} * p.page_size);
}

}  // namespace

cudaError_t launch(const MqaDecodeParams& params, const Tuning& tuning, cudaStream_t stream) {
  const TunedParams p = {params, tuning};
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return cudaSuccess;
  if (!valid(p)) return cudaErrorInvalidValue;
  if (p.records) return launch_rows<576, 512, false, true>(p, stream);
  if (p.v == nullptr) {
    if (p.dim == 576) return launch_rows<576, 512, false>(p, stream);
    return p.dim == 512 ? launch_rows<512, 512, false>(p, stream) : cudaErrorInvalidValue;
  }
  switch (p.dim) {
    case 64:
      return launch_rows<64, 64, true>(p, stream);
    case 128:
      return launch_rows<128, 128, true>(p, stream);
    case 256:
      return launch_rows<256, 256, true>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_dsa::mqa_decode

cudaError_t jax_dsa::launch_mqa_decode(const MqaDecodeParams& params, cudaStream_t stream) {
  return mqa_decode::launch(params, {}, stream);
}
