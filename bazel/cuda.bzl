"""CUDA objects and libraries for Hopper."""

load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

# CMake's for a release (CMakeLists.txt): tools/machine_code.py finds the same kernels in both.
_FLAGS = [
    "-O3",
    "-DNDEBUG",
    "-std=c++20",
    "--generate-code=arch=compute_90a,code=[sm_90a]",
    "-Xcompiler=-fPIC",
    "-Xcompiler=-fvisibility=hidden",
    "-I",
    "cuda",
]

def _cuda_object(ctx):
    out = ctx.actions.declare_file(ctx.label.name + ".pic.o")
    args = ctx.actions.args()
    args.add_all(_FLAGS)
    args.add("-c", ctx.file.src)
    args.add("-o", out)
    ctx.actions.run(
        executable = ctx.executable._nvcc,
        arguments = [args],
        inputs = depset([ctx.file.src], transitive = [x[CcInfo].compilation_context.headers for x in ctx.attr.deps]),
        outputs = [out],
        mnemonic = "CudaCompile",
        progress_message = "Compiling %s" % ctx.file.src.short_path,
        use_default_shell_env = True,  # nvcc looks for the host's compiler on PATH
    )
    return [DefaultInfo(files = depset([out]))]

cuda_object = rule(
    implementation = _cuda_object,
    doc = "One translation unit for sm_90a: one action, so that instantiations compile side by side.",
    attrs = {
        "deps": attr.label_list(doc = "Libraries of headers.", providers = [CcInfo]),
        "src": attr.label(allow_single_file = [".cu"], mandatory = True),
        "_nvcc": attr.label(allow_single_file = True, cfg = "exec", default = "@cuda//:nvcc", executable = True),
    },
)

def cuda_library(name, srcs, hdrs, deps = []):
    """A cc_library of CUDA sources and what declares them.

    Args:
        name: of the library; its headers alone are the library `name + "_headers"`.
        srcs: .cu files, each an object of its own.
        hdrs: .h and .cuh files.
        deps: other CUDA libraries, of which the headers are used.
    """
    headers = [x + "_headers" for x in deps]
    cc_library(
        name = name + "_headers",
        hdrs = hdrs,
        includes = ["."],
        deps = headers + ["@cuda//:headers"],
    )
    objects = []
    for src in srcs:
        cuda_object(
            name = src.replace("/", "_").replace(".cu", ""),
            src = src,
            deps = [":%s_headers" % name],
        )
        objects.append(":" + src.replace("/", "_").replace(".cu", ""))
    cc_library(
        name = name,
        srcs = objects,
        linkstatic = True,  # their names are hidden
        deps = [":%s_headers" % name, "@cuda//:cudart_static"] + deps,
    )
