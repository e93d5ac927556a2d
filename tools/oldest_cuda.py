"""Compiles every kernel with the oldest CUDA that the project supports, without its nvcc.

    pip install --no-deps --target build/cuda $(python tools/oldest_cuda.py)
    python tools/oldest_cuda.py build/cuda

PyPI has no nvcc of CUDA 12. It has NVRTC, which contains the same device compiler and assembler,
and the headers. A host compiler only parses the host code with these headers, in the form in which
the emulator runs it.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# One or more instances of each kernel template, by the header that defines it. A key may have
# several headers, separated by spaces.
KERNELS = {
    "attn_dist/fwd.cuh": ["attn_dist::fwd_kernel<576>"],
    "fp8/matmul.cuh": ["fp8::matmul_kernel<jax_dsa::fp8::Traits<2, 2, 2>>"],
    "fp8/matmul_few.cuh": [
        "fp8::few_kernel<jax_dsa::fp8::Traits<1, 2, 1>>",
        "fp8::few_kernel<jax_dsa::fp8::ThinTraits<16, 3>>",
    ],
    "gated_pool/mean.cuh": [
        "gated_pool::mean_fwd_kernel<jax_dsa::DType::kBF16, 4, true>",
        "gated_pool::mean_bwd_kernel<jax_dsa::DType::kF16, true>",
    ],
    "gated_pool/pool.cuh": [
        f"gated_pool::{kernel}"
        for kernel in (
            "fwd_kernel<jax_dsa::DType::kF16, jax_dsa::gated_pool::Many, 5>",
            "bwd_kernel<jax_dsa::DType::kBF16, jax_dsa::gated_pool::Few4>",
        )
    ],
    "htree/attend.cuh": ["htree::attend_kernel<jax_dsa::htree::AttendShape, 128, 16>"],
    "htree/bwd_lists.cuh": [
        "htree::visit_kernel<16, true>",
        "htree::count_kernel<256>",
        "htree::schedule_kernel<1024>",
    ],
    "htree/bwd_nodes.cuh": ["htree::nodes_kernel<true, 128, 16>"],
    "htree/bwd_pack.cuh": ["htree::pack_kernel<128>"],
    "htree/bwd_queries.cuh": ["htree::queries_kernel<jax_dsa::htree::BwdShape, 128, 16>"],
    "htree/bwd_spread.cuh": ["htree::spread_kernel<128, 16>"],
    "htree/list.cuh": ["htree::list_kernel<16, false>"],
    "htree/scores.cuh": ["htree::scores_kernel<jax_dsa::htree::ScoresShape, 128, 16>"],
    "indexer/block_max.cuh": [
        f"indexer::block_max_kernel<jax_dsa::indexer::BlockTraits<jax_dsa::IndexerDType::{of}>>"
        for of in ("kBF16, 128, 1", "kE4M3, 64, 2")
    ],
    "indexer/block_select.cuh": [
        "indexer::block_scores_kernel<256>",
        "indexer::block_select_kernel<1, 32, 8>",
        "indexer::block_select_kernel<16, 32, 1>",
    ],
    "indexer/bwd_keys.cuh": ["indexer_bwd::keys_kernel<128, 4096>"],
    "indexer/bwd_queries.cuh": ["indexer_bwd::queries_kernel<128>"],
    "indexer/bwd_scale.cuh": ["indexer_bwd::scale_kernel"],
    "indexer/candidate_lists.cuh": ["indexer::list_kernel", "indexer::key_kernel"],
    "indexer/candidates.cuh": [
        "indexer::candidate_kernel<"
        "jax_dsa::indexer::DecodeTraits<jax_dsa::IndexerDType::kBF16, 128, 64, 1>>"
    ],
    "indexer/fwd.cuh": [
        "indexer::fwd_kernel<jax_dsa::indexer::Traits<jax_dsa::IndexerDType::kE4M3, 128, 64, true>>"
    ],
    "masked_attention/bwd.cuh": [
        f"masked_attention::bwd_kernel<jax_dsa::masked_attention::BwdTraits<{dims}>>"
        for dims in (
            "jax_dsa::DType::kBF16, 192, 128, false",
            "jax_dsa::DType::kF16, 256, 256, false",
            "jax_dsa::DType::kBF16, 128, 128, true, true",
        )
    ],
    "masked_attention/fwd.cuh": [
        "masked_attention::fwd_kernel<jax_dsa::masked_attention::FwdTraits<"
        f"jax_dsa::DType::kBF16, 128, 128, true, {bias}>>"
        for bias in ("false", "true")
    ],
    "masked_attention/portable_bwd.cuh": [
        "masked_attention::portable_bwd_kernel<jax_dsa::masked_attention::PortableBwdTraits<"
        "jax_dsa::DType::kBF16, 128, 128, true, true, 128, 64, 2, 2>>"
    ],
    "masked_attention/portable_fwd.cuh": [
        "masked_attention::portable_fwd_kernel<jax_dsa::masked_attention::PortableFwdTraits<"
        "jax_dsa::DType::kF16, 128, 128, true, 2, 64, 2>>"
    ],
    "mqa_decode/few.cuh": [
        "mqa_decode::few_kernel<jax_dsa::mla::FewTraits<576, 16>, true>",
        "mqa_decode::few_kernel<jax_dsa::mla::FewTraits<128, 32, 128, true>, false>",
    ],
    "mqa_decode/combine.cuh": ["mqa_decode::combine_kernel<true, 2>"],
    "mqa_decode/wide.cuh": ["mqa_decode::wide_kernel<576, true>"],
    "losses/index_grads.cuh": [
        "index_grads::index_grads_kernel<128, jax_dsa::index_grads::Gradient::kKeys>"
    ],
    "losses/index_sums.cuh": [
        "index_grads::clear_queries_kernel",
        "index_grads::sum_segments_kernel",
    ],
    "losses/kl_rows.cuh": [
        "losses::kl_rows_kernel<jax_dsa::losses::Mask::kLogits, 128, 16, 4, true>",
        "losses::scale_rows_kernel<128, 4>",
        "losses::sum_kl_kernel<256>",
    ],
    "losses/teacher.cuh": ["teacher::teacher_kernel<576>"],
    "losses/teacher_heads.cuh": [
        "teacher_heads::teacher_heads_kernel<192, jax_dsa::teacher_heads::Pass::kSums>"
    ],
    "sparse_attention/bwd_dkv.cuh": [
        "sparse_attention::dkv_kernel<"
        f"jax_dsa::sparse_attention::DkvTraits<jax_dsa::DType::kBF16, {dims}>>"
        for dims in ("192, 128, 64", "128, 128, 128")
    ],
    "sparse_attention/bwd_dq.cuh": [
        "sparse_attention::dq_kernel<"
        "jax_dsa::sparse_attention::DqTraits<jax_dsa::DType::kF16, 256, 256>>"
    ],
    "sparse_attention/decode.cuh": [
        "sparse_attention::decode_kernel<"
        f"jax_dsa::sparse_attention::DecodeTraits<{dims}, {fp8}>, {fp8}>"
        for dims, fp8 in (("128, 16", "true"), ("256, 32", "true"), ("256, 32", "false"))
    ],
    "sparse_attention/fwd.cuh": [
        "sparse_attention::fwd_kernel<"
        "jax_dsa::sparse_attention::FwdTraits<jax_dsa::DType::kBF16, 128, 128>>",
    ],
    "sparse_mla/bwd.cuh": ["sparse_mla::bwd_kernel<576, false, true>"],
    "sparse_mla/bwd_order.cuh": ["sparse_mla::order_kernel"],
    "sparse_mla/bwd_pack.cuh": ["sparse_mla::pack_kernel"],
    "sparse_mla/combine.cuh": ["sparse_mla::combine_kernel"],
    "sparse_mla/decode.cuh": ["sparse_mla::decode_kernel<576, true, jax_dsa::sparse_mla::Decode>"],
    "sparse_mla/fwd.cuh": ["sparse_mla::fwd_kernel<576>"],
    "sparse_mla/fwd_few.cuh": ["sparse_mla::fwd_few_kernel<576, 16>"],
    "sparse_mla/sum_rows.cuh": ["sparse_mla::sum_rows_kernel<576>"],
    "topk/resident.cuh": [
        "topk::topk_kernel<jax_dsa::topk::Latency>",
        "topk::resident_kernel<jax_dsa::topk::Resident>",
    ],
}

# Portable kernels, which are also compiled for the oldest GPU.
PORTABLE = {
    "attn_dist/portable_fwd.cuh": [
        f"attn_dist::portable_fwd_kernel<jax_dsa::attn_dist::PortableTraits<{traits}>>"
        for traits in ("576, 2, 2, 1", "128, 1, 3, 2, 4")
    ],
    "mqa_decode/combine.cuh": KERNELS["mqa_decode/combine.cuh"],
    "fp8/portable_matmul.cuh": ["fp8::portable_matmul_kernel<jax_dsa::fp8::PortableMany>"],
    "gated_pool/pool.cuh": KERNELS["gated_pool/pool.cuh"],
    "masked_attention/portable_bwd.cuh": KERNELS["masked_attention/portable_bwd.cuh"],
    "masked_attention/portable_fwd.cuh": KERNELS["masked_attention/portable_fwd.cuh"],
    **{
        f"htree/{header}.cuh": KERNELS[f"htree/{header}.cuh"]
        for header in ("bwd_lists", "bwd_pack", "bwd_spread", "list")
    },
    "htree/bwd_nodes.cuh": ["htree::nodes_kernel<false, 128, 16>"],
    "htree/attend.cuh htree/portable_walk.cuh": [
        "htree::attend_kernel<jax_dsa::htree::PortableAttendShape, 128, 16>"
    ],
    "htree/bwd_queries.cuh htree/portable_walk.cuh": [
        "htree::queries_kernel<jax_dsa::htree::PortableBwdShape, 128, 32>"
    ],
    "htree/scores.cuh htree/portable_walk.cuh": [
        "htree::scores_kernel<jax_dsa::htree::PortableScoresShape, 128, 16>"
    ],
    "indexer/bwd_scale.cuh": KERNELS["indexer/bwd_scale.cuh"],
    "indexer/block_select.cuh": KERNELS["indexer/block_select.cuh"],
    "indexer/candidate_lists.cuh": KERNELS["indexer/candidate_lists.cuh"],
    "indexer/portable_blocks.cuh": [
        "indexer::portable_block_kernel<jax_dsa::indexer::PortableBlockTraits<"
        "jax_dsa::indexer::ProductTraits<jax_dsa::IndexerDType::kBF16, 128>>>"
    ],
    "indexer/portable_candidates.cuh": [
        "indexer::portable_candidate_kernel<"
        "jax_dsa::indexer::ProductTraits<jax_dsa::IndexerDType::kE4M3, 64>>"
    ],
    "indexer/portable_fwd.cuh": [
        "indexer::portable_fwd_kernel<"
        f"jax_dsa::indexer::ProductTraits<jax_dsa::IndexerDType::{of}, 128>>"
        for of in ("kBF16", "kE4M3")
    ],
    "indexer/portable_bwd.cuh": ["indexer_bwd::portable_bwd_kernel<128>"],
    "losses/index_sums.cuh": KERNELS["losses/index_sums.cuh"],
    "losses/kl_rows.cuh": KERNELS["losses/kl_rows.cuh"],
    "losses/portable_index_grads.cuh": [
        f"index_grads::portable_index_grads_kernel<128, jax_dsa::index_grads::Gradient::{of}>"
        for of in ("kQueries", "kKeys")
    ],
    "losses/portable_teacher.cuh": [
        "teacher::portable_teacher_kernel<jax_dsa::teacher::PortableTraits<576, 2>>"
    ],
    "losses/portable_teacher_heads.cuh": [
        f"teacher_heads::portable_teacher_heads_kernel<jax_dsa::teacher_heads::Pass::{of}>"
        for of in ("kLogSumExp", "kSums")
    ],
    "mqa_decode/portable_fwd.cuh": [
        "mqa_decode::portable_fwd_kernel<"
        "jax_dsa::mla::PortableTraits<576, 32, 1, 16, 16, 2, 2>, true>",
        "mqa_decode::portable_fwd_kernel<"
        "jax_dsa::mla::PortableTraits<128, 16, 1, 64, 16, 2, 2, 128, true>, false>",
    ],
    "sparse_attention/portable_decode.cuh": [
        "sparse_attention::portable_decode_kernel<"
        "jax_dsa::mla::PortableTraits<128, 16, 1, 32, 16, 3, 2, 128, true>, true>"
    ],
    "sparse_attention/portable_dkv.cuh": [
        "sparse_attention::portable_dkv_kernel<jax_dsa::sparse_attention::PortableDkvTraits<"
        "jax_dsa::DType::kBF16, 128, 128, 64, 64, 1>>"
    ],
    "sparse_attention/portable_dq.cuh": [
        "sparse_attention::portable_dq_kernel<"
        "jax_dsa::sparse_attention::PortableDqTraits<jax_dsa::DType::kF16, 192, 128>>"
    ],
    "sparse_attention/portable_fwd.cuh": [
        "sparse_attention::portable_fwd_kernel<"
        "jax_dsa::sparse_attention::PortableTraits<jax_dsa::DType::kBF16, 128, 128, 2, 64>>"
    ],
    "sparse_mla/combine.cuh": KERNELS["sparse_mla/combine.cuh"],
    "sparse_mla/portable_bwd.cuh": [
        "sparse_mla::portable_bwd_kernel<jax_dsa::sparse_mla::PortableBwdTraits<576, 32, 1, true>>"
    ],
    "sparse_mla/portable_fwd.cuh": [
        "sparse_mla::portable_fwd_kernel<"
        f"jax_dsa::mla::PortableTraits<576, 32, 1, 16, 16, 2, 2>, {records}>"
        for records in ("false", "true")
    ],
    "sparse_mla/sum_rows.cuh": KERNELS["sparse_mla/sum_rows.cuh"],
    "topk/split.cuh": [
        f"topk::{kernel}_kernel<jax_dsa::topk::{variant}>"
        for kernel in ("topk", "split", "combine")
        for variant in ("Wide", "Throughput")
    ],
}

# Portable kernels that are different on GPUs that multiply e4m3.
E4M3 = {
    header: PORTABLE[header] for header in ("fp8/portable_matmul.cuh", "indexer/portable_fwd.cuh")
}


def oldest() -> str:
    """Returns the oldest supported version of CUDA, which CMakeLists.txt states."""
    cmake = (ROOT / "CMakeLists.txt").read_text()
    found = re.search(r"CMAKE_CUDA_COMPILER_VERSION VERSION_LESS ([\d.]+)", cmake)
    assert found
    return found[1]


def compile_kernels(
    nvrtc: ctypes.CDLL, gpu: str, headers: str, names: list[str], include: list[Path]
) -> str:
    """Compiles some kernels of headers; exits if that fails.

    Args:
        nvrtc: The library.
        gpu: The architecture, as "sm_80".
        headers: The headers, relative to cuda/, separated by spaces.
        names: The kernels in the namespace jax_dsa, with their template arguments.
        include: The folders to search for headers.

    Returns:
        The compiler's messages.
    """
    program = ctypes.c_void_p()
    source = "".join(f'#include "{header}"\n' for header in headers.split()).encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None)
    for name in names:
        nvrtc.nvrtcAddNameExpression(program, f"jax_dsa::{name}".encode())
    options = [f"-arch={gpu}", "-std=c++20", "-default-device", *(f"-I{p}" for p in include)]
    array = (ctypes.c_char_p * len(options))(*(x.encode() for x in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.value.decode()
    if status != 0:
        sys.exit(f"{headers}: {said}")
    return said


def parse_host_code(include: list[Path]) -> None:
    """Parses the launchers, and the headers for which the emulator has replacements."""
    flags = ["-std=c++20", "-fsyntax-only", "-w", *(f"-I{p}" for p in include)]
    replaced = '#include "common/device.h"\n#include "common/tensor_map.h"\n'
    command = ["c++", "-x", "c++", *flags, f"-I{ROOT / 'cuda'}", "-"]
    subprocess.run(command, input=replaced, text=True, check=True)
    kernels = ROOT / "tests" / "kernels"
    programs = sorted((kernels / "emulator").glob("*.cc"))
    if not programs:
        sys.exit(f"no programs in {kernels / 'emulator'}")
    for program in programs:
        folders = (kernels / "emulator", ROOT / "cuda", kernels)
        subprocess.run(["c++", *flags, *(f"-I{p}" for p in folders), program], check=True)


def main() -> None:
    """Compiles everything. Without an argument, prints the packages that pip has to install."""
    if len(sys.argv) < 2:
        packages = ("nvrtc", "runtime", "nvcc", "cccl")
        print(*(f"nvidia-cuda-{package}-cu12=={oldest()}.*" for package in packages))
        return
    wheels = Path(sys.argv[1]).resolve() / "nvidia"
    nvrtc = ctypes.CDLL(str(next(wheels.glob("cuda_nvrtc/lib/libnvrtc.so.*"))))
    headers = [wheels / f"cuda_{package}" / "include" for package in ("runtime", "nvcc", "cccl")]
    device = [ROOT / "tools" / "nvrtc", ROOT / "cuda", *headers]
    for gpu, kernels in (("sm_90a", KERNELS), ("sm_80", PORTABLE), ("sm_89", E4M3)):
        for headers_of, names in kernels.items():
            start = time.monotonic()
            said = compile_kernels(nvrtc, gpu, headers_of, names, device)
            serialised = ", wgmma serialised" if "are serialized" in said else ""
            print(f"{gpu} {headers_of}: {time.monotonic() - start:.0f} s{serialised}", flush=True)
    parse_host_code(headers)
    print(f"CUDA {oldest()} compiles the kernels")


if __name__ == "__main__":
    main()
