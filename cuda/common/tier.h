// The two tiers of kernels, and the choice between them.
//
//   Hopper    compiled for sm_90a: wgmma, TMA, clusters, setmaxnreg
//   portable  compiled for compute_80 and newer: mma.sync, ldmatrix, cp.async
//
// A kernel that needs nothing of Hopper belongs to both. The choice is made at each launch, because
// a program may have been compiled on a machine without a GPU, and a process may use several GPUs.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>

// Whether this build contains the tiers; see JAX_DSA_TIERS in CMakeLists.txt.
#ifndef JAX_DSA_HOPPER_TIER
#define JAX_DSA_HOPPER_TIER 1
#endif
#ifndef JAX_DSA_PORTABLE_TIER
#define JAX_DSA_PORTABLE_TIER 1
#endif

namespace jax_dsa {

enum class Tier { kHopper, kPortable };

inline constexpr bool kHasHopperTier = JAX_DSA_HOPPER_TIER;
inline constexpr bool kHasPortableTier = JAX_DSA_PORTABLE_TIER;
inline constexpr int kHopper = 90;         // compute capability, as 10 * major + minor
inline constexpr int kLeastPortable = 80;  // the oldest compute capability with portable kernels

// Whether Hopper GPUs run the portable tier too. At first JAX_DSA_TIER=portable decides.
inline std::atomic<bool>& portable_tier_forced() {
  static std::atomic<bool> forced = [] {
    const char* const tier = std::getenv("JAX_DSA_TIER");
    return tier != nullptr && std::strcmp(tier, "portable") == 0;
  }();
  return forced;
}

// Returns the tier of a compute capability.
inline Tier tier_of(int compute_capability) {
  return kHasHopperTier && compute_capability == kHopper && !portable_tier_forced()
             ? Tier::kHopper
             : Tier::kPortable;
}

}  // namespace jax_dsa
