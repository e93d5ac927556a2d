"""Weights that checkpoints store in FP8, with one scale per block of a weight matrix."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        block: Size of the blocks. None infers it from the shapes.
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
    if scale.shape in ((), (1,)):
        scale, block = scale.reshape(1, 1), codes.shape
    block = _block_size(codes.shape, scale.shape, block, label)
    rows, columns = (min(size) for size in zip(block, codes.shape, strict=True))
    scale = scale.astype(np.float32)
    if not np.isfinite(scale).all():
        where = tuple(map(int, np.argwhere(~np.isfinite(scale))[0]))
        raise ValueError(f"load_hf: {label} has {scale[where]} at {where}, expected finite scales")
    weight = codes.astype(np.float32)
    scale = scale.repeat(rows, 0)[: weight.shape[0]].repeat(columns, 1)[:, : weight.shape[1]]
    with np.errstate(over="ignore"):  # The caller rejects infinities.
        weight *= scale
    return weight


def _block_size(
    shape: tuple[int, ...], grid: tuple[int, ...], block: BlockSize | None, label: str
) -> BlockSize:
    """Returns the size of the blocks of a weight of this shape with such a grid of scales.

    Raises:
        ValueError: If no known block size, or not the given one, results in this grid.
    """
    for candidate in [block] if block is not None else _candidates(shape):
        if grid == _grid(shape, candidate):
            return candidate
    rows, columns = block or DEFAULT_BLOCK
    expected = _grid(shape, (rows, columns))
    hint = "" if block else "; if the blocks have another size, pass weight_block_size"
    raise ValueError(
        f"load_hf: {label} has shape {grid}, expected {expected} for the {rows} x {columns} blocks "
        f"of a weight of shape {shape}{hint}"
    )


def _grid(shape: tuple[int, ...], block: BlockSize) -> tuple[int, ...]:
    """Returns the number of blocks along each axis of a weight."""
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def _candidates(shape: tuple[int, ...]) -> Iterator[BlockSize]:
    """Iterates over the block sizes that a checkpoint may have without naming them.

    These are 128 x 128, other squares of a power of two, and the 1 x 32 blocks of MX formats. Only
    squares of 128 may leave a remainder. No two of them have the same grid, unless they divide the
    weight into the same blocks. The transposed grid of a square's blocks, unless it is square
    itself, is not the grid of other squares either.
    """
    yield DEFAULT_BLOCK
    sides = [2**i for i in range((max(*shape, 1) - 1).bit_length() + 1)]
    for candidate in [*((side, side) for side in sides), (1, 32)]:
        if all(n <= m or n % m == 0 for n, m in zip(shape, candidate, strict=True)):
            yield candidate


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
