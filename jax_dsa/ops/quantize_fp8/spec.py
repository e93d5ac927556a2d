"""What quantisation to FP8 and its inverse take and give, and how an array is cut into blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.checks import as_array
from jax_dsa.core.spec import Dtype
from jax_dsa.core.typing import Array, Float

BLOCK = 128  # of activations (1x128), of weights (128x128), and of the matmul's accumulation
MIN_AMAX = 1e-4  # below which magnitudes do not make a block's scale smaller
E4M3 = (jnp.float8_e4m3fn,)
INPUTS = (jnp.bfloat16, jnp.float16, jnp.float32)
SCALES = (jnp.float32,)
SHARDED_ROWS = "b l0 l1 l2 l3 l4 l5 l6 l7"


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of quantisation and its inverse. The dims leave out the batch axis."""

    block: tuple[int, int]
    dims: str
    scale_dims: str
    power_of_two_scale: bool = False
    dtype: Any = None  # of what dequantisation returns
    min_amax: float = MIN_AMAX

    @classmethod
    def of(cls, shape: tuple[int, ...], block: tuple[int, int], **others: Any) -> Options:
        """The options for an array of `shape`."""
        axes = [column_axis(shape[-1], block[1])]
        if block[0] != 1:
            axes.insert(0, row_axis(shape[-2], block[0]))
        rows = leading_axes(len(shape) - len(axes))
        dims, scale_dims = (" ".join([rows, *tokens]) for tokens in zip(*axes, strict=True))
        return cls(block, dims, scale_dims, **others)

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of the blocks and how many there are along each axis."""
        rows, columns = self.block
        sizes: dict[str, int] = {}
        if "i p" in known:
            sizes |= {"i": known["i p"] // rows, "p": rows}
        if "r" in known:
            sizes["y"] = -(-known["r"] // rows)
        if "j q" in known:
            sizes |= {"j": known["j q"] // columns, "q": columns}
        if "c" in known:
            sizes["z"] = -(-known["c"] // columns)
        return sizes


# Dims of an axis and of its axis of blocks. An axis of whole blocks is sharded by blocks; one whose
# last block is shorter cannot be split where its blocks are, so its letters are not shardable ones.
def row_axis(size: int, block: int) -> tuple[str, str]:
    """Of an axis that the array's rows are counted along."""
    return ("(i p)", "i") if size % block == 0 else ("r", "y")


def column_axis(size: int, block: int) -> tuple[str, str]:
    """Of the last axis."""
    return ("(j q)", "j") if size % block == 0 else ("c", "z")


def leading_axes(count: int) -> str:
    """Dims of axes that no block spans."""
    return " ".join(f"l{i}" for i in range(count))


class Operands(NamedTuple):
    """What quantisation reads."""

    x: Float[Array, "b {o.dims}"]


class Codes(NamedTuple):
    """e4m3 codes, and the scales of the blocks."""

    codes: Float[Array, "b {o.dims}", jnp.float8_e4m3fn]
    scale: Float[Array, "b {o.scale_dims}", jnp.float32]


class Values(NamedTuple):
    """What codes stand for."""

    x: Float[Array, "b {o.dims}", Dtype(lambda options, _: options.dtype)]


class OnlyCodes(NamedTuple):
    """What the gradient of the scales needs of the operands."""

    codes: Float[Array, "b {o.dims}"]


class ScaleGradients(NamedTuple):
    """Of dequantisation. The scales are in none of its operands, so their dims stand here."""

    scale: Float[Array, "b {o.scale_dims}", jnp.float32]


class Gradients(NamedTuple):
    """Of quantisation, straight through."""

    x: Array


def leading_dims(x: Any, last: str) -> str:
    """Dims of `x` for messages: any leading axes, then `last`."""
    extra = max(0, getattr(as_array(x), "ndim", 0) - len(last.split()))
    return " ".join([*(["B", "T", *(f"T{i}" for i in range(2, extra))][:extra]), last])
