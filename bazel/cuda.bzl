"""CUDA objects and libraries for Hopper and for every GPU."""

load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

# The flags of CMake's release build (CMakeLists.txt). tools/machine_code.py finds the same machine code in both builds.
_FLAGS = [
    "-O3",
    "-DNDEBUG",
    "-std=c++20",
    "-Xcompiler=-fPIC",
    "-Xcompiler=-fvisibility=hidden",
    "-I",
    "cuda",
]
_HOPPER = ["--generate-code=arch=compute_90a,code=[sm_90a]"]

# What CMakeLists.txt compiles with nvcc 13. Kernels with FP8 operands have "fp8" in their paths. CMakeLists.txt says what
# ONE_PTX lists.
ONE_PTX = [
    "cuda/attn_dist/portable_fwd.cu",
    "cuda/block_mask/dispatch.cu",
    "cuda/gated_pool/dispatch.cu",
    "cuda/gated_pool/mean.cu",
    "cuda/htree/bwd_lists.cu",
    "cuda/htree/lists.cu",
    "cuda/indexer/block_topk.cu",
    "cuda/indexer/candidates.cu",
    "cuda/indexer/portable_fwd.cu",
    "cuda/indexer/topk.cu",
    "cuda/losses/dense_loss.cu",
    "cuda/losses/index_grads.cu",
    "cuda/losses/kl_rows.cu",
    "cuda/losses/portable_teacher.cu",
    "cuda/masked_attention/portable_bwd.cu",
    "cuda/masked_attention/portable_fwd.cu",
    "cuda/sparse_attention/bwd_lists.cu",
    "cuda/sparse_attention/lists.cu",
    "cuda/sparse_attention/portable_bwd.cu",
    "cuda/sparse_attention/portable_fwd.cu",
    "cuda/sparse_mla/sum_rows.cu",
]
_PORTABLE_ONE_PTX = ["--generate-code=arch=compute_80,code=[compute_80,sm_80,sm_86,sm_89,sm_90,sm_100,sm_120]"]
_PORTABLE = [
    "--generate-code=arch=compute_80,code=[compute_80,sm_80,sm_86,sm_89]",
    "--generate-code=arch=compute_90,code=[sm_90,sm_100,sm_120]",
]
_PORTABLE_FP8 = [
    "--generate-code=arch=compute_80,code=[compute_80,sm_80,sm_86]",
    "--generate-code=arch=compute_89,code=[sm_89]",
    "--generate-code=arch=compute_90,code=[sm_90,sm_100]",
    "--generate-code=arch=compute_120,code=[sm_120]",
]

def _code(ctx):
    """Returns what a translation unit is compiled for."""
    path = ctx.file.src.path
    if not ctx.attr.portable:
        return _HOPPER
    if "fp8" in path:
        return _PORTABLE_FP8
    return _PORTABLE_ONE_PTX if path in ONE_PTX else _PORTABLE

def _cuda_object(ctx):
    out = ctx.actions.declare_file(ctx.label.name + ".pic.o")
    args = ctx.actions.args()
    args.add_all(_FLAGS)
    args.add_all(["--compress-mode=size"] if ctx.attr.portable else [])
    args.add_all(_code(ctx))
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
    doc = "Compiles one translation unit for sm_90a, or for every GPU, in one action, so that units compile in parallel.",
    attrs = {
        "deps": attr.label_list(doc = "Header libraries.", providers = [CcInfo]),
        "portable": attr.bool(doc = "Whether the unit is compiled for every GPU."),
        "src": attr.label(allow_single_file = [".cu"], mandatory = True),
        "_nvcc": attr.label(allow_single_file = True, cfg = "exec", default = "@cuda//:nvcc", executable = True),
    },
)

def cuda_library(name, srcs, hdrs, host_srcs = [], portable_srcs = [], deps = []):
    """Defines a cc_library of CUDA sources and their headers.

    Args:
        name: The library's name. Its headers alone form the library `name + "_headers"`.
        srcs: The .cu files for Hopper. Each becomes one object file.
        hdrs: The .h and .cuh files.
        host_srcs: The .cc files.
        portable_srcs: The .cu files for every GPU.
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
    for src in srcs + portable_srcs:
        cuda_object(
            name = src.replace("/", "_").replace(".cu", ""),
            src = src,
            portable = src in portable_srcs,
            deps = [":%s_headers" % name],
        )
        objects.append(":" + src.replace("/", "_").replace(".cu", ""))
    cc_library(
        name = name,
        srcs = objects + host_srcs,
        copts = ["-O3", "-DNDEBUG", "-fvisibility=hidden", "-std=c++20"],
        linkstatic = True,  # the objects' symbols have hidden visibility
        deps = [":%s_headers" % name, "@cuda//:cudart_static"] + deps,
    )
