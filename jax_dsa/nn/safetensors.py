"""Reading safetensors files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
}


class SafeTensors(Mapping[str, np.ndarray]):
    """The tensors of a safetensors file, or of a directory of such files, by name.

    The files are mapped into memory. A tensor's bytes are read when the tensor is used.

    Args:
        path: A file, or a directory, whose files `*.safetensors` are all opened.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        path = pathlib.Path(path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        # For each tensor: the file, the offset of the file's data in bytes, the header's entry.
        self._entries: dict[str, tuple[pathlib.Path, int, dict[str, Any]]] = {}
        for file in files:
            with file.open("rb") as f:
                size = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(size))
            header.pop("__metadata__", None)
            self._entries |= {name: (file, 8 + size, entry) for name, entry in header.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns the tensor as a view of its file."""
        file, start, entry = self._entries[name]
        first, last = entry["data_offsets"]
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        raw = np.memmap(file, np.uint8, "r", start + first, (last - first,))
        return raw.view(dtype).reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        """Iterates over the tensors' names."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Returns the number of tensors."""
        return len(self._entries)
