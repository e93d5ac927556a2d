"""What the compiler made of the kernels, read off the built extension: needs no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest


def disassembler() -> str | None:
    """cuobjdump, of a CUDA toolkit or of PyPI's nvidia-cuda-cuobjdump."""
    try:
        import nvidia
    except ImportError:
        return shutil.which("cuobjdump")
    wheels = (x for root in nvidia.__path__ for x in Path(root).rglob("bin/cuobjdump"))
    return shutil.which("cuobjdump") or next(map(str, wheels), None)


def read(option: str) -> str:
    """What cuobjdump says about the built extension."""
    built = pytest.importorskip("jax_dsa._cuda", reason="built without the extension").__file__
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump")
    return subprocess.run([tool, option, built], capture_output=True, text=True, check=True).stdout


def test_no_copy_has_an_address_that_the_assembler_breaks() -> None:
    """ptxas 13.0 makes an illegal instruction of a cp.async whose shared-memory address is a
    register plus a uniform register (`whole_sum` in cuda/common/ptx.cuh keeps it from that).
    """
    copies = re.findall(r"\bLDGSTS\.\S* \[([^\]]*)\]", read("-sass"))
    assert len(copies) > 100
    assert not [x for x in copies if "UR" in x]


# Bytes of a thread's stack, as CUDA 13.0 compiles the kernels; those not named here have none.
STACKS = {
    "indexer10fwd_kernel": 88,
    "sparse_mla10bwd_kernel": 224,
    "sparse_mla13decode_kernel": 24,
    "topk11topk_kernel": 16,
    "topk15resident_kernel": 64,
}


def test_no_kernel_spills_more_registers_than_it_did() -> None:
    stacks = dict(re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+)", read("-res-usage")))
    assert all(any(name in kernel for kernel in stacks) for name in STACKS)
    for kernel, stack in stacks.items():
        budget = max((most for name, most in STACKS.items() if name in kernel), default=0)
        assert int(stack) <= budget, kernel
