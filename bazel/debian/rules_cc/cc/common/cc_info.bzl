"""As in rules_cc."""

load("//cc/private:native.bzl", "NativeCcInfo")

CcInfo = NativeCcInfo
