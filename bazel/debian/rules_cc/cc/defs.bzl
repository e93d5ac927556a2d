"""What jax_dsa and Bazel 4 itself load from rules_cc: there the rules are built into Bazel."""

cc_binary = native.cc_binary
cc_library = native.cc_library
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
