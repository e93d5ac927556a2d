"""The kernels' machine code. The tests need nvcc or the built extension, but no GPU."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from machine_code import disassembler  # noqa: E402

PROGRAMS = sorted([*ROOT.glob("tests/kernels/*/*.cu"), *ROOT.glob("benchmarks/micro/*.cu")])


def read(*options: str) -> str:
    """Returns what cuobjdump prints about the built extension."""
    built = pytest.importorskip("jax_dsa._cuda", reason="built without the extension").__file__
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump")
    command = [tool, *options, built]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# What portable kernels are compiled to; see CMakeLists.txt.
PORTABLE = {f"sm_{x}" for x in (80, 86, 89, 90, 100, 120)}
# Instructions that GPUs before sm_90 lack, as they appear in PTX.
HOPPER_INSTRUCTIONS = (
    "wgmma|setmaxnreg|griddepcontrol|barrier\\.cluster|mapa|cluster_ctarank|cp\\.(reduce\\.)?async\\.bulk"
    "|mbarrier\\.try_wait|stmatrix|tensormap|elect\\.sync|red\\.\\S*\\.v[24]\\.f32|st\\.async"
)


def kernels_by_gpu(listed: str) -> dict[str, set[str]]:
    """Returns the names of the kernels for each architecture in the output of cuobjdump."""
    found: dict[str, set[str]] = {}
    gpu = ""
    for line in listed.splitlines():
        if match := re.match(r"arch = (sm_\w+)", line):
            gpu = match[1]
        elif match := re.match(r"\s*(?:Function (\S+):|\.(?:visible \.)?entry (\w+)\()", line):
            # The name of a kernel in an unnamed namespace contains hashes of its file.
            name = match[1] or match[2]
            name = re.sub(r"(_GLOBAL__N__)\w{8}(\w+?_cu_)\w{8}", r"\1\2", name)
            if "kernel" in name:  # not a device function
                found.setdefault(gpu, set()).add(name)
    return found


@pytest.mark.slow
def test_the_extension_has_code_for_every_gpu() -> None:
    """Every portable kernel is there for every architecture, and as PTX for sm_80."""
    extension = pytest.importorskip("jax_dsa._cuda", reason="built without the extension")
    if set(extension.tiers()) != {"hopper", "portable"}:
        pytest.skip("built with one tier")
    code = kernels_by_gpu(read("-res-usage"))
    assert code.keys() == PORTABLE | {"sm_90a"}
    assert all(code[gpu] == code["sm_80"] for gpu in PORTABLE)
    assert kernels_by_gpu(read("-ptx")) == {"sm_80": code["sm_80"]}
    assert len(code["sm_90a"]) > 20 and len(code["sm_80"]) > 20


@pytest.mark.slow
def test_no_portable_kernel_has_an_instruction_of_hopper() -> None:
    """The PTX is what a GPU without machine code of its own runs."""
    ptx = read("-ptx")
    if not ptx.count(".version"):
        pytest.skip("built without PTX")
    assert set(re.findall(r"^\.target (.*)$", ptx, re.M)) == {"sm_80"}
    assert not re.findall(HOPPER_INSTRUCTIONS, ptx)


def one_ptx_files() -> list[str]:
    """Returns the files whose PTX for sm_80 also serves the newer GPUs."""
    text = (ROOT / "CMakeLists.txt").read_text()
    found = re.search(r"^set\(one_ptx\n(.*?)^\)", text, re.M | re.S)
    assert found
    return found[1].split()


@pytest.mark.slow
@pytest.mark.parametrize("file", one_ptx_files())
def test_code_for_new_gpus_is_code_for_old_ones(file: str, tmp_path: Path) -> None:
    nvcc = shutil.which(os.environ.get("CUDACXX") or "nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    options = ["-std=c++20", "-Icuda", "-DJAX_DSA_HOPPER_TIER=1", "-DJAX_DSA_PORTABLE_TIER=1"]
    options += ["-Xcicc", "-O0", "-ptx", file]  # not optimized, which is much faster
    ptx = []
    for gpu in ("80", "90"):
        out = tmp_path / f"{gpu}.ptx"
        command = [nvcc, *options, f"-arch=compute_{gpu}", "-o", str(out)]
        subprocess.run(command, cwd=ROOT, check=True)
        ptx.append(out.read_text().replace(f".target sm_{gpu}", ".target").splitlines())
    assert ".target" in ptx[0] and len(ptx[0]) == len(ptx[1])
    assert not [(a, b) for a, b in zip(*ptx, strict=True) if a != b][:3]


@pytest.mark.slow
def test_no_copy_has_an_address_that_the_assembler_breaks() -> None:
    """ptxas 13.0 emits an illegal instruction for a cp.async whose shared-memory address is a
    register plus a uniform register; `whole_sum` in cuda/common/address.cuh prevents that.
    """
    code = read("-arch", "sm_90a", "-sass") + read("-arch", "sm_90", "-sass")
    copies = re.findall(r"\bLDGSTS\.\S* \[([^\]]*)\]", code)
    assert len(copies) > 100
    assert not [x for x in copies if "UR" in x]


# Stack bytes per thread of the kernels as CUDA 13.0 compiles them. Kernels not listed have none.
STACKS = {
    "fp813matmul_kernel": 8,
    "htree13attend_kernel": 48,
    "htree13decode_kernel": 104,
    "htree13scores_kernel": 40,
    "htree14queries_kernel": 24,
    "indexer10fwd_kernel": 88,
    "indexer16block_max_kernel": 8,  # outside of the loop over keys
    "masked_attention10bwd_kernel": 32,
    # The same with a warpgroup for dQ. The producer, which has 32 registers, uses this stack.
    "Li128ELi128ELb0ELb0EEEEEvNS_24MaskedAttentionBwdParams": 144,
    "Lb1ELb1EEEEEvNS_24MaskedAttentionBwdParams": 48,  # the same with biases
    "masked_attention10fwd_kernel": 40,
    # The same with three MMA warpgroups, which also leave 32 registers to the producer.
    "Li3ELi0ELb1EEEEEvNS_24MaskedAttentionFwdParams": 104,
    "masked_attention19portable_bwd_kernel": 16,
    "masked_attention19portable_fwd_kernel": 16,
    "mqa_decode10few_kernel": 8,
    "mqa_decode11wide_kernel": 48,
    "sparse_attention10fwd_kernel": 8,
    "sparse_attention19portable_fwd_kernel": 8,
    "12union_kernel": 8,
    "14inverse_kernel": 16,
    "sparse_mla10bwd_kernel": 224,
    "sparse_mla13decode_kernel": 40,  # from records of 656 bytes
    "sparse_mla13decode_kernelILi512ELb1E": 48,  # from page records
    "sparse_mla14fwd_few_kernel": 8,  # at the end of a work tile
    "topk11topk_kernel": 16,
    "topk12split_kernel": 32,
    "topk14combine_kernel": 16,
    "topk15resident_kernel": 64,
}


# The same for the machine code for GPUs other than Hopper, where it differs.
PORTABLE_STACKS = {
    "14inverse_kernel": 32,
    "block_mask12tiles_kernel": 8,
    "dequantize_kernel": 8,
    "quantize_tiles_cu": 16,
    # float32, and numbers of contributions that are not compiled in.
    "gated_pool10bwd_kernelILNS_5DTypeE2ENS0_5ShapeILi32ELi1ELi0ELi0": 8,
    "htree12build_kernel": 8,
    "htree13decode_kernel": 112,
    "htree13scores_kernel": 48,
    "masked_attention19portable_bwd_kernel": 24,
    "masked_attention19portable_fwd_kernel": 48,
    "sparse_mla19portable_bwd_kernel": 24,
    "topk11topk_kernel": 32,
    "topk14combine_kernel": 24,
}


@pytest.mark.slow
def test_portable_kernels_need_no_more_stack() -> None:
    found = re.findall(r"Function (\S*kernel\S*):\s+REG:\d+ STACK:(\d+)", read("-res-usage"))
    assert len(found) > 20
    budgets = STACKS | PORTABLE_STACKS
    for kernel, stack in found:
        budget = max((limit for name, limit in budgets.items() if name in kernel), default=0)
        assert int(stack) <= budget, kernel


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("sanitize")


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_programs_compile_without_more_spills_or_a_serialised_wgmma(
    program: Path, tmp_path: Path, sanitize: ModuleType
) -> None:
    """The command in a program's first lines builds it. The programs contain all kernels."""
    command = sanitize.build_command(program, tmp_path / "program", "-Xptxas", "-v")
    if shutil.which(command[0]) is None:
        pytest.skip("no nvcc")
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    printed = built.stdout + built.stderr
    assert "wgmma.mma_async instructions are serialized" not in printed
    stacks = re.findall(r"properties for (_ZN7jax_dsa\w+)\n +(\d+) bytes stack frame", printed)
    for kernel, stack in stacks:
        budget = max((limit for name, limit in STACKS.items() if name in kernel), default=0)
        assert int(stack) <= budget, kernel


def test_programs_have_every_kernel(sanitize: ModuleType) -> None:
    words = (word for p in PROGRAMS for word in sanitize.build_command(p, p))
    built = {(ROOT / word).resolve() for word in words}  # Bazel's tests see links to the sources
    assert not [p for p in ROOT.glob("cuda/*/*.cu") if p.resolve() not in built]


def line_of(path: Path, text: str) -> int:
    """Returns the number of the line in which `text` first occurs."""
    return path.read_text().split(text)[0].count("\n") + 1


def test_a_report_of_racecheck_is_about_two_functions(sanitize: ModuleType) -> None:
    copy = ROOT / "cuda" / "common" / "copy.cuh"
    write, read = line_of(copy, '"cp.async.cg.'), line_of(copy, '"ldmatrix.')
    one = f"""
========= Error: Race reported between Write access at void f<(int)576>(T1)+0x10 in {copy}:{write}
=========     and Read access at void g<(int)576>(T1)+0x20 in {copy}:{read} [38 hazards]
=========     and Read access at void g<(int)576>(T1)+0x40 in {copy}:{read} [2 hazards]
========= \n"""
    pair = frozenset(["common/copy.cuh:cp_async_16", "common/copy.cuh:load_matrix_x4"])
    assert sanitize.races(one + one) == {pair: 2}
    assert sanitize.pattern_of(pair) == "load_matrix"


def test_a_report_may_name_a_function_without_its_line(sanitize: ModuleType) -> None:
    walk = ROOT / "cuda" / "htree" / "walk.cuh"
    line = line_of(walk, "ring.takes[at.index][lane] = takes")
    report = f"""
========= Error: Race reported between Write access at void f<(int)8>(T1 &)+0x10 in {walk}:{line}
=========     and Read access at void jax_dsa::htree::queries_kernel<(int)8>(T1)+0x30 [9 hazards]
========= \n"""
    pair = frozenset(["htree/walk.cuh:produce", "htree::queries_kernel"])
    assert sanitize.races(report) == {pair: 1}
    assert sanitize.pattern_of(pair) == "elected_arrival"
    assert sanitize.pattern_of(pair | {"htree/walk.cuh:elsewhere"}) is None


def test_explanations_name_programs_and_functions_there_are(sanitize: ModuleType) -> None:
    assert {p.stem for p in sanitize.PATTERNS} >= set(sanitize.EXPLANATIONS.values())
    sources = "".join(file.read_text() for file in (ROOT / "cuda").glob("*/*.cuh"))
    for place in frozenset[str]().union(*sanitize.EXPLANATIONS):
        if "::" in place:
            assert re.search(rf"\b{place.split('::')[-1]}\(", sources)
            continue
        file = ROOT / "cuda" / place.split(":")[0]
        lines = len(file.read_text().splitlines())
        assert place in {sanitize.function_at(str(file), i) for i in range(1, lines + 1)}
