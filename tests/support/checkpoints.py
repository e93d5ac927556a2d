"""Safetensors files of arrays, and weights quantised by block."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np

NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_safetensors(path, tensors):
    """Writes a safetensors file: the length of the header, the header, the data."""
    header, start, blobs = {}, 0, []
    for name, x in tensors.items():
        blobs.append(np.ascontiguousarray(x).tobytes())
        end = start + len(blobs[-1])
        entry = {"dtype": NAMES[x.dtype.name], "shape": x.shape, "data_offsets": [start, end]}
        header[name], start = entry, end
    write_raw(path, {"__metadata__": {"format": "pt"}, **header}, b"".join(blobs))


def write_raw(path, header, data=b""):
    """Writes a safetensors file with any header."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def expanded(scale, block, shape):
    """Returns the scale of each element of a weight, in float64."""
    rows, columns = (np.arange(n) // size for n, size in zip(shape, block, strict=True))
    return np.asarray(scale, np.float64)[rows[:, None], columns]


def quantized(rng, x, block, dtype=ml_dtypes.float8_e4m3fn):
    """Returns FP8 codes of `x`, power-of-two scales, and the values that they stand for."""
    grid = tuple(-(-n // size) for n, size in zip(x.shape, block, strict=True))
    scale = np.exp2(rng.integers(-12, -6, grid)).astype(np.float32)
    wide = expanded(scale, block, x.shape)
    codes = np.clip(np.asarray(x, np.float64) / wide, -448, 448).astype(dtype)
    return codes, scale, (codes.astype(np.float64) * wide).astype(np.float32)
