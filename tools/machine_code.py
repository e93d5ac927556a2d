"""Compares the machine code of two builds of the extension, kernel by kernel.

    python tools/machine_code.py one/_cuda.so another/_cuda.so

It wants cuobjdump, of a CUDA toolkit or of PyPI's nvidia-cuda-cuobjdump with nvidia-cuda-nvdisasm.
Exit status 1: they differ.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path


def disassembler() -> str | None:
    """cuobjdump, of a CUDA toolkit or of PyPI's nvidia-cuda-cuobjdump."""
    try:
        import nvidia
    except ImportError:
        return shutil.which("cuobjdump")
    wheels = (x for root in nvidia.__path__ for x in Path(root).rglob("bin/cuobjdump"))
    return shutil.which("cuobjdump") or next(map(str, wheels), None)


def kernels(extension: Path) -> dict[str, str]:
    """Every kernel's name with a digest of its encoded instructions.

    A name from an unnamed namespace has hashes of its file in it, which are left out.
    """
    tool = disassembler()
    if tool is None:
        sys.exit("no cuobjdump")
    found: dict[str, str] = {}
    name, digest = "", hashlib.sha256()
    with subprocess.Popen([tool, "-sass", extension], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        for line in run.stdout:
            if header := re.match(r"\s*Function : (\S+)", line):
                name, digest = (
                    re.sub(r"(_GLOBAL__N__)[0-9a-f]{8}(\w+?_cu_)[0-9a-f]{8}", r"\1\2", header[1]),
                    hashlib.sha256(),
                )
            for word in re.findall(r"/\* (0x[0-9a-f]{16}) \*/", line):
                digest.update(word.encode())
                found[name] = digest.hexdigest()
    if run.returncode or not found:
        sys.exit(f"{tool} finds no kernels in {extension}")
    return found


def main() -> None:
    """Prints what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extension", type=Path, nargs=2)
    one, other = map(kernels, parser.parse_args().extension)
    lines = [f"only in the first: {x}" for x in sorted(one.keys() - other.keys())]
    lines += [f"only in the second: {x}" for x in sorted(other.keys() - one.keys())]
    lines += [f"differs: {x}" for x in sorted(one.keys() & other.keys()) if one[x] != other[x]]
    same = sum(other.get(x) == digest for x, digest in one.items())
    print(*lines, f"{same} kernels have the same machine code in both", sep="\n")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
