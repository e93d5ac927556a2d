"""Compares the machine code of two builds of the extension, kernel by kernel.

    python tools/machine_code.py one/_cuda.so another/_cuda.so

It needs cuobjdump, from a CUDA toolkit or from the PyPI package nvidia-cuda-cuobjdump. The exit
status is 1 if the builds differ.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path


def disassembler() -> str | None:
    """Returns the path of cuobjdump, from a CUDA toolkit or a PyPI package, or None."""
    try:
        import nvidia
    except ImportError:
        return shutil.which("cuobjdump")
    wheels = (x for root in nvidia.__path__ for x in Path(root).rglob("bin/cuobjdump"))
    return shutil.which("cuobjdump") or next(map(str, wheels), None)


def sections(elf: bytes) -> dict[str, bytes]:
    """Returns the sections of a 64-bit ELF file by name."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    # For each section: its name's offset in the name table, and its own offset and size.
    found = [struct.unpack_from("<I20xQQ", elf, table + size * i) for i in range(count)]
    _, start, length = found[names]
    text = elf[start : start + length]
    return {text[n : text.index(b"\0", n)].decode(): elf[x : x + y] for n, x, y in found}


def kernels(extension: Path) -> dict[str, str]:
    """Returns a digest of each kernel's machine code, by its architecture and name.

    The name of a kernel in an unnamed namespace contains hashes of its file, which are left out.
    """
    tool = disassembler()
    if tool is None:
        sys.exit("no cuobjdump")
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as here:
        command = [tool, "-xelf", "all", str(extension.resolve())]
        subprocess.run(command, cwd=here, stdout=subprocess.DEVNULL, check=True)
        for cubin in Path(here).iterdir():
            for section, code in sections(cubin.read_bytes()).items():
                if section.startswith(".text."):
                    name = re.sub(r"(_GLOBAL__N__)\w{8}(\w+?_cu_)\w{8}", r"\1\2", section[6:])
                    gpu = cubin.suffixes[-2].strip(".")  # as in "_cuda.1.sm_80.cubin"
                    found[f"{gpu} {name}"] = hashlib.sha256(code).hexdigest()
    if not found:
        sys.exit(f"{tool} finds no kernels in {extension}")
    return found


def main() -> None:
    """Prints the differences."""
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
