"""Weights that checkpoints store in FP8, with one scale per block of a weight matrix."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

BlockSize = tuple[int, int]
"""Rows and columns of a weight that share a scale."""

SCALE_NAMES = ("weight_scale_inv", "scale", "qscale_weight")
"""What the last part of a weight's name, "weight", is replaced by in the name of its scales. The
scales are multiplied in, despite the first of these names."""

DEFAULT_BLOCK: BlockSize = (128, 128)
"""The blocks of a checkpoint that does not name their size."""

_CODES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_SCALES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, jnp.float8_e8m0fnu)


def is_fp8(x: np.ndarray) -> bool:
    """Returns whether the numbers of a weight are FP8 codes, or the bytes of such codes."""
    return x.dtype in (*_CODES, np.uint8)


def dequantized(
    codes: np.ndarray, scale: np.ndarray, block: BlockSize | None, label: str
) -> np.ndarray:
    """Returns FP8 weights times the scales of their blocks, in float32.

    PyTorch's arrays of FP8 become bytes in NumPy. Bytes of weights are therefore taken for
    float8_e4m3fn, and bytes of scales for float8_e8m0fnu.

    Args:
        codes: The weight matrix, FP8 or uint8.
        scale: One scale per block, or a single one for the whole weight. The last block of a row or
            a column may be smaller than the others.
        block: Size of the blocks, or None if the checkpoint does not name it.
        label: The scales' name in messages.

    Raises:
        ValueError: If the shape of the scales does not belong to such blocks, if their dtype is
            unknown, or if a scale is NaN or infinite.
    """
    if codes.dtype == np.uint8:
        codes = codes.view(jnp.float8_e4m3fn)
    if scale.dtype == np.uint8:
        scale = scale.view(jnp.float8_e8m0fnu)
    if scale.dtype not in _SCALES:
        names = ", ".join(np.dtype(x).name for x in (*_SCALES, np.uint8))
        raise ValueError(f"load_hf: {label} has dtype {scale.dtype}, expected one of {names}")
    rows, columns = block or DEFAULT_BLOCK
    if scale.shape in ((), (1,)):
        scale, (rows, columns) = scale.reshape(1, 1), codes.shape
    expected = tuple(-(-n // size) for n, size in zip(codes.shape, (rows, columns), strict=True))
    if scale.shape != expected:
        hint = "" if block else "; if the blocks have another size, pass weight_block_size"
        raise ValueError(
            f"load_hf: {label} has shape {scale.shape}, expected {expected} for the {rows} x "
            f"{columns} blocks of a weight of shape {codes.shape}{hint}"
        )
    scale = scale.astype(np.float32)
    if not np.isfinite(scale).all():
        where = tuple(map(int, np.argwhere(~np.isfinite(scale))[0]))
        raise ValueError(f"load_hf: {label} has {scale[where]} at {where}, expected finite scales")
    weight = codes.astype(np.float32)
    height, width = weight.shape
    scale = scale.repeat(min(rows, height), 0)[:height].repeat(min(columns, width), 1)[:, :width]
    with np.errstate(over="ignore"):  # The caller rejects infinities.
        weight *= scale
    return weight


def checked_block_size(value: Any, name: str) -> BlockSize | None:
    """Returns a `weight_block_size`, the numbers of rows and columns, as a tuple of two ints.

    Args:
        value: A sequence of two ints, or None.
        name: What to call the value in a message.

    Raises:
        ValueError: If the value is neither.
    """
    if value is None:
        return None
    pair = value if isinstance(value, list | tuple) else ()
    try:
        rows, columns = (operator.index(x) for x in pair if not isinstance(x, bool))
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        raise ValueError(f"load_hf: {name} is {value!r}, expected two ints of at least 1")
    return rows, columns


def configured_block_size(config: Mapping[str, Any], name: str) -> BlockSize | None:
    """Returns the `quantization_config.weight_block_size` of a configuration, if there is one.

    Args:
        config: The configuration.
        name: What to call the configuration in a message.

    Raises:
        ValueError: If the size is no pair of ints.
    """
    quantization = config.get("quantization_config")
    size = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    return checked_block_size(size, f"weight_block_size in {name}")
