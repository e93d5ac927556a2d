// The portable backward pass of the indexer's logits at all keys on the emulator, with the shared
// memory of every GPU.
#include "launch_on_device.h"
#include "losses/portable_index_grads.cu"
#include "losses_index_grads_checks.h"

cudaError_t jax_dsa::launch_index_products(const IndexGradsParams& p, cudaStream_t stream) {
  return portable::launch_index_products(p, stream);
}

int main(int argc, char** argv) {
  emulator::on_gpus(argc, argv, emulator::cases(argc, argv, kCases, kSmallCases),
                    emulator::kPortableGpus,
                    [&](const Case& c) { check(c, emulator::schedules(argc, argv, &c - kCases)); });
  printf(failures ? "FAILED %d\n" : "all good\n", failures);
  return failures != 0;
}
