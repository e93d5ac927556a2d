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


def test_no_copy_has_an_address_that_the_assembler_breaks() -> None:
    """ptxas 13.0 makes an illegal instruction of a cp.async whose shared-memory address is a
    register plus a uniform register (`whole_sum` in cuda/common/ptx.cuh keeps it from that).
    """
    built = pytest.importorskip("jax_dsa._cuda", reason="built without the extension").__file__
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump")
    code = subprocess.run([tool, "-sass", built], capture_output=True, text=True, check=True).stdout
    copies = re.findall(r"\bLDGSTS\.\S* \[([^\]]*)\]", code)
    assert len(copies) > 100
    assert not [x for x in copies if "UR" in x]
