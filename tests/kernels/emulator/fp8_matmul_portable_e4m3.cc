// Runs the portable FP8 matmul on the emulator as it is on GPUs that multiply e4m3.
#define EMULATOR_E4M3_MMA
#include "fp8/portable_matmul.cu"
#include "fp8_matmul_portable_checks.h"

int main(int argc, char** argv) { return run_portable(argc, argv); }
