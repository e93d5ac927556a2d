"""Reading safetensors files."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_LONGEST_NAME = 1000
"""Characters of a path that a message shows. A longer string is no path."""

_LFS_POINTER = b"version https://git-lfs"
"""The first bytes of the small file that Git has in place of a large one."""


class _File(NamedTuple):
    """A file that is mapped into memory.

    Attributes:
        path: Its path.
        data: Its bytes. They stay those of this file if another file takes over its path.
        status: Its status before its header was read.
    """

    path: pathlib.Path
    data: mmap.mmap
    status: os.stat_result

    def check_unchanged(self) -> None:
        """Raises ValueError if something wrote to the file after its header was read."""
        size, changed = self.data.size(), False
        with contextlib.suppress(FileNotFoundError):
            now = self.path.stat()
            same = os.path.samestat(now, self.status)
            changed = same and now.st_mtime_ns != self.status.st_mtime_ns
        if changed or size != self.status.st_size:
            raise ValueError(
                f"SafeTensors: {self.path} was written to after it was opened (it had "
                f"{self.status.st_size} bytes and has {size}), expected the same file; open it "
                f"again"
            )


class _Entry(NamedTuple):
    """Where one tensor is stored.

    Attributes:
        file: The file.
        offset: Offset of the tensor's first byte in the file.
        size: Number of bytes.
        dtype: The tensor's dtype, by its name in the format.
        shape: The tensor's shape.
    """

    file: _File
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]


class SafeTensors(Mapping[str, np.ndarray]):
    """The tensors of a safetensors file, or of a directory of such files, by name.

    Each file is opened once and mapped into memory. A tensor's bytes are read when the tensor is
    used. They are those of the file that was opened, even if another file has replaced it since. A
    program that writes to a file must replace it too (write another file and rename it): tensors
    that were returned before it is overwritten are views of the bytes that it has then.

    Args:
        path: A file, or a directory, whose files `*.safetensors` are all opened.

    Attributes:
        path: The file or the directory.

    Raises:
        OSError: If there is no such file or directory, or a directory has no safetensors file.
        ValueError: If a file is a Git LFS pointer, is cut off or is no safetensors file, or if two
            files have a tensor of the same name.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = pathlib.Path(path)
        try:
            files = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else [self.path]
            headers = {file: _read_header(file) for file in files}
        except OSError as error:
            expected = "a safetensors file, or a directory of such files"
            raise unreadable("SafeTensors", self.path, error, expected) from None
        if not files:
            raise FileNotFoundError(f"SafeTensors: directory {path} has no file '*.safetensors'")
        self._entries: dict[str, _Entry] = {}
        for file, header in headers.items():
            for name, entry in header.items():
                if name in self._entries:
                    raise ValueError(
                        f"SafeTensors: {self.file(name)} and {file} both have a tensor "
                        f"{name!r}, expected one; pass the path of one file"
                    )
                self._entries[name] = entry

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns the tensor as a view of its file.

        Raises:
            KeyError: If there is no such tensor.
            ValueError: If the tensor's dtype is unknown, its size does not fit its shape, or
                something wrote to the file after it was opened.
        """
        if name not in self._entries:
            file = self.absent().get(name)
            reason = "" if file is None else f": its file {file} does not exist"
            raise KeyError(f"SafeTensors: {self.path} lacks tensor {name!r}{reason}")
        entry = self._entries[name]
        path = entry.file.path
        if entry.dtype not in _DTYPES:
            raise ValueError(
                f"SafeTensors: tensor {name!r} in {path} has dtype {entry.dtype!r}, expected "
                f"one of {tuple(_DTYPES)}"
            )
        dtype = np.dtype(_DTYPES[entry.dtype])
        if entry.size != (expected := math.prod(entry.shape) * dtype.itemsize):
            raise ValueError(
                f"SafeTensors: tensor {name!r} in {path} has {entry.size} bytes, expected "
                f"{expected} for shape {entry.shape} and dtype {entry.dtype}"
            )
        if not entry.size:
            return np.empty(entry.shape, dtype)
        entry.file.check_unchanged()
        raw = np.frombuffer(entry.file.data, np.uint8, entry.size, entry.offset)
        return raw.view(dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        """Iterates over the tensors' names."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Returns the number of tensors."""
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        """Returns whether there is such a tensor."""
        return name in self._entries

    def absent(self) -> dict[str, pathlib.Path]:
        """Returns the files that do not exist, by the names of the tensors that they should have.

        The names come from the directory's index `*.safetensors.index.json`.

        Raises:
            ValueError: If the index is not JSON.
        """
        files = {}
        for index in sorted(self.path.glob("*.safetensors.index.json")):
            shards = read_json("SafeTensors", index).get("weight_map")
            for name, shard in shards.items() if isinstance(shards, dict) else ():
                if not (file := self.path / str(shard)).exists():
                    files[name] = file
        return files

    def file(self, name: str) -> pathlib.Path:
        """Returns the file that has the tensor.

        Raises:
            KeyError: If there is no such tensor.
        """
        return self._entries[name].file.path


def unreadable(op: str, path: pathlib.Path, error: OSError, expected: str) -> OSError:
    """Returns the error for a path that the operating system cannot read.

    Args:
        op: Name of the public function, for messages.
        path: The path.
        error: The system's error.
        expected: What the path should be.
    """
    name = error.filename or str(path)
    shown = name if len(name) <= _LONGEST_NAME else f"{name[:60]}..."
    return OSError(
        error.errno, f"{op}: cannot read {shown!r} ({error.strerror}), expected {expected}"
    )


def read_json(op: str, file: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object that a file contains.

    Args:
        op: Name of the public function, for messages.
        file: Path of the file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file contains no JSON object.
    """
    return _parse_json(op, file, file.read_bytes())


def _parse_json(op: str, file: pathlib.Path, text: bytes, part: str = "the file") -> dict[str, Any]:
    """Returns the JSON object in `text`, which is a `part` of `file`."""
    _reject_pointer(op, file, text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{op}: {part} of {len(text)} bytes in {file} is not JSON: {error}"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(
            f"{op}: {part} in {file} is a JSON {type(value).__name__}, expected an object"
        )
    return value


def _reject_pointer(op: str, file: pathlib.Path, text: bytes) -> None:
    if text.startswith(_LFS_POINTER):
        raise ValueError(
            f"{op}: {file} is a Git LFS pointer, expected the file itself; run 'git lfs pull'"
        )


def _read_header(file: pathlib.Path) -> dict[str, _Entry]:
    """Returns the entries of a safetensors file.

    The file begins with the length of the header in 8 bytes. The header and the data follow.
    """
    op = "SafeTensors"
    with file.open("rb") as f:
        status = os.fstat(f.fileno())
        total = status.st_size
        start = f.read(len(_LFS_POINTER))
        _reject_pointer(op, file, start)
        length = int.from_bytes(start[:8], "little")
        if total < 8 or total < 8 + length:
            raise ValueError(
                f"{op}: {file} has {total} bytes, expected at least "
                f"{8 + length if total >= 8 else 8}; it is cut off or no safetensors file"
            )
        f.seek(8)
        header = _parse_json(op, file, f.read(length), "the header")
        opened = _File(file, mmap.mmap(f.fileno(), total, access=mmap.ACCESS_READ), status)
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        try:
            first, last = (int(x) for x in entry["data_offsets"])
            shape = tuple(int(x) for x in entry["shape"])
            dtype = str(entry["dtype"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"{op}: the header in {file} describes tensor {name!r} as {entry!r}, expected "
                f"'dtype', 'shape' and 'data_offsets'"
            ) from None
        if not (0 <= first <= last and min(shape, default=0) >= 0):
            raise ValueError(
                f"{op}: the header in {file} gives tensor {name!r} shape {shape} and offsets "
                f"{first} to {last}, expected no negative size"
            )
        if (end := 8 + length + last) > total:
            raise ValueError(
                f"{op}: {file} has {total} bytes, expected at least {end} for tensor {name!r}; the "
                f"file is cut off"
            )
        entries[name] = _Entry(opened, 8 + length + first, last - first, dtype, shape)
    return entries
