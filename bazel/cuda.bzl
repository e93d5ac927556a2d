"""CUDA objects and libraries for Hopper."""

load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

# The flags of CMake's release build (CMakeLists.txt). tools/machine_code.py finds the same machine code in both builds.
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
        use_default_shell_env = True,  # nvcc looks for the host compiler on PATH
    )
    return [DefaultInfo(files = depset([out]))]

cuda_object = rule(
    implementation = _cuda_object,
    doc = "Compiles one translation unit for sm_90a in one action, so that units compile in parallel.",
    attrs = {
        "deps": attr.label_list(doc = "Header libraries.", providers = [CcInfo]),
        "src": attr.label(allow_single_file = [".cu"], mandatory = True),
        "_nvcc": attr.label(allow_single_file = True, cfg = "exec", default = "@cuda//:nvcc", executable = True),
    },
)

def cuda_library(name, srcs, hdrs, deps = []):
    """Defines a cc_library of CUDA sources and their headers.

    Args:
        name: The library's name. Its headers alone form the library `name + "_headers"`.
        srcs: The .cu files. Each becomes one object file.
        hdrs: The .h and .cuh files.
        deps: The CUDA libraries whose headers are used.
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
        linkstatic = True,  # the objects' symbols have hidden visibility
        deps = [":%s_headers" % name, "@cuda//:cudart_static"] + deps,
    )
