// The backward pass of the indexer's logits at all keys on the emulator, against float64.
#include "losses/index_products.cu"
#include "losses_index_grads_checks.h"

cudaError_t jax_dsa::launch_index_products(const IndexGradsParams& p, cudaStream_t stream) {
  return hopper::launch_index_products(p, stream);
}

int main(int argc, char** argv) {
  for (const Case& c : emulator::cases(argc, argv, kCases, kSmallCases)) {
    check(c, emulator::schedules(argc, argv, &c - kCases));
  }
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
