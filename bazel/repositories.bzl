"""Repositories for software that is installed on the machine. Nothing is downloaded.

These environment variables override what is found:
  CUDACXX: nvcc.
  PYTHON_BIN_PATH: A Python interpreter with jax; nanobind to compile, and pytest for the tests.
  JAX_DSA_FFI_INCLUDE: The directory of XLA's FFI headers; by default those of the interpreter's
    jaxlib. They determine which versions of jaxlib can load the extension.
"""

def _python(ctx):
    """Returns the path of the interpreter."""
    path = ctx.os.environ.get("PYTHON_BIN_PATH") or ctx.which("python3")
    if not path:
        fail("no python3 on PATH; PYTHON_BIN_PATH may name an interpreter")
    return path

def _ask(ctx, code):
    """Returns what a line of Python prints."""
    answer = ctx.execute([_python(ctx), "-c", code])
    if answer.return_code:
        fail("{}: {}".format(_python(ctx), answer.stderr))
    return answer.stdout.strip()

def _headers(ctx, directory, pattern):
    """Links a directory of headers and returns the definition of a library of them."""
    ctx.symlink(directory, "include")
    return """
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob({}),
    includes = ["include"],
)
""".format(pattern)

def _first(ctx, root, directories, file):
    """Returns the path of a file in the first of some directories that contains it."""
    for directory in directories:
        path = ctx.path("{}/{}/{}".format(root, directory, file))
        if path.exists:
            return path
    fail("no {} below {}".format(file, root))

def _cuda_toolkit(ctx):
    nvcc = ctx.os.environ.get("CUDACXX") or ctx.which("nvcc")
    if not nvcc:
        fail("no nvcc on PATH; CUDACXX may name one")

    # The commands that nvcc would run show where its toolkit is, for any layout.
    said = ctx.execute([nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"]).stderr
    tops = [x[len("#$ TOP="):].strip() for x in said.split("\n") if x.startswith("#$ TOP=")]
    if not tops:
        fail("{} --dryrun does not name its toolkit: {}".format(nvcc, said))
    runtime = _first(ctx, tops[0], ["targets/x86_64-linux/lib", "lib64", "lib"], "libcudart_static.a")
    include = _first(ctx, tops[0], ["targets/x86_64-linux/include", "include"], "cuda_runtime_api.h")
    ctx.symlink(runtime, "libcudart_static.a")
    ctx.file("nvcc", "#!/bin/sh\nexec '{}' \"$@\"\n".format(nvcc))
    ctx.file("BUILD.bazel", _headers(ctx, include.dirname, '["include/**"]') + """
cc_library(
    name = "cudart_static",
    srcs = ["libcudart_static.a"],
    linkopts = ["-ldl", "-lpthread", "-lrt"],
    deps = [":headers"],
)

exports_files(["nvcc"])
""")

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit,
    doc = "@cuda//:nvcc, :headers and :cudart_static, from the toolkit of nvcc.",
    environ = ["CUDACXX", "PATH"],
    configure = True,
    local = True,
)

def _jaxlib_headers(ctx):
    directory = ctx.os.environ.get("JAX_DSA_FFI_INCLUDE") or _ask(
        ctx,
        "import importlib.util as u, os; print(os.path.join(os.path.dirname(u.find_spec('jaxlib').origin), 'include'))",
    )
    _first(ctx, directory, ["xla/ffi/api"], "ffi.h")
    ctx.file("BUILD.bazel", _headers(ctx, directory, '["include/xla/ffi/api/*.h"]'))

jaxlib_headers = repository_rule(
    implementation = _jaxlib_headers,
    doc = "@jaxlib//:headers: the headers of XLA's FFI.",
    environ = ["JAX_DSA_FFI_INCLUDE", "PATH", "PYTHON_BIN_PATH"],
    configure = True,
    local = True,
)

def _python_interpreter(ctx):
    ctx.file("defs.bzl", "PYTHON = \"{}\"\nSTABLE_ABI = {}\n".format(
        _ask(ctx, "import sys; print(sys.executable)"),
        _ask(ctx, "import sys; print(sys.version_info >= (3, 12))"),
    ))
    directory = _ask(ctx, "import sysconfig; print(sysconfig.get_path('include'))")
    ctx.file("BUILD.bazel", _headers(ctx, directory, '["include/**/*.h"]'))

python_interpreter = repository_rule(
    implementation = _python_interpreter,
    doc = "@python//:headers, and @python//:defs.bzl with the interpreter's path and ABI.",
    environ = ["PATH", "PYTHON_BIN_PATH"],
    configure = True,
    local = True,
)

def _nanobind_sources(ctx):
    root = ctx.path(_ask(ctx, "import nanobind; print(nanobind.include_dir())")).dirname
    for part in ["ext", "include", "src"]:
        ctx.symlink(root.get_child(part), part)
    ctx.file("BUILD.bazel", """
load("@python//:defs.bzl", "STABLE_ABI")
load("@rules_cc//cc:defs.bzl", "cc_library")

cc_library(
    name = "nanobind",
    srcs = ["src/nb_combined.cpp"] + glob(["ext/**/*.h", "src/*.h"]),
    hdrs = glob(["include/**/*.h"]),
    copts = ["-O3", "-fno-strict-aliasing", "-fvisibility=hidden", "-std=c++20", "-w"],
    defines = ["Py_LIMITED_API=0x030C0000"] if STABLE_ABI else [],
    includes = ["ext/robin_map/include", "include"],
    linkstatic = True,
    local_defines = ["NB_BUILD", "NB_COMPACT_ASSERTIONS", "NDEBUG"],
    textual_hdrs = glob(["src/*.cpp"]),
    visibility = ["//visibility:public"],
    deps = ["@python//:headers"],
)
""")

nanobind_sources = repository_rule(
    implementation = _nanobind_sources,
    doc = "@nanobind: the library, for the stable ABI if the interpreter is Python 3.12 or newer.",
    environ = ["PATH", "PYTHON_BIN_PATH"],
    configure = True,
    local = True,
)
