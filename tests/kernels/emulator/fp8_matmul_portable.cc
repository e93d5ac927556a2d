// Runs the portable FP8 matmul on the emulator as it is on GPUs that convert e4m3 to f16.
#include "fp8/portable_matmul.cu"
#include "fp8_matmul_portable_checks.h"

int main(int argc, char** argv) { return run_portable(argc, argv); }
