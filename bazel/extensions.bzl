"""Makes the repositories of bazel/repositories.bzl available to MODULE.bazel."""

load(":repositories.bzl", "cuda_toolkit", "jaxlib_headers", "nanobind_sources", "python_interpreter")

def _installed(_):
    cuda_toolkit(name = "cuda")
    jaxlib_headers(name = "jaxlib")
    nanobind_sources(name = "nanobind")
    python_interpreter(name = "python")

installed = module_extension(implementation = _installed)
