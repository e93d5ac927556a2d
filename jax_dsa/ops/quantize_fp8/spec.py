"""Options, operands and results of FP8 quantisation, and the blocks of an array."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.checks import Args, as_array
from jax_dsa.core.spec import Dtype
from jax_dsa.core.typing import Array, Float

BLOCK = 128  # block size of activations (1x128) and weights (128x128), and K block of the matmul
MIN_AMAX = 1e-4  # lower bound of the largest magnitude from which a block's scale is computed
E4M3 = (jnp.float8_e4m3fn,)
INPUTS = (jnp.bfloat16, jnp.float16, jnp.float32)
SCALES = (jnp.float32,)
SHARDED_ROWS = "b l0 l1 l2 l3 l4 l5 l6 l7"


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of quantisation and dequantisation.

    Attributes:
        block: Rows and columns of a block.
        dims: Dims of the array, without the batch axis.
        scale_dims: Dims of the scales, without the batch axis.
        power_of_two_scale: Whether scales are rounded up to powers of two.
        dtype: Dtype of dequantised values; unused in quantisation.
        min_amax: Lower bound of the magnitude from which a scale is computed.
    """

    block: tuple[int, int]
    dims: str
    scale_dims: str
    power_of_two_scale: bool = False
    dtype: Any = None
    min_amax: float = MIN_AMAX

    @classmethod
    def of(cls, shape: tuple[int, ...], block: tuple[int, int], **others: Any) -> Options:
        """Returns the options for an array of `shape`, which has no batch axis."""
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


# row_axis and column_axis return the dims of an axis and of the scales' corresponding axis. An axis
# that consists of whole blocks can be sharded by blocks. An axis whose last block is shorter
# cannot, so its dims have letters that are not in any pass's `shardable`.
def row_axis(size: int, block: int) -> tuple[str, str]:
    """Returns the dims of the second-to-last axis and of its blocks."""
    return ("(i p)", "i") if size % block == 0 else ("r", "y")


def column_axis(size: int, block: int) -> tuple[str, str]:
    """Returns the dims of the last axis and of its blocks."""
    return ("(j q)", "j") if size % block == 0 else ("c", "z")


def leading_axes(count: int) -> str:
    """Returns the dims of `count` leading axes, along which blocks have size 1."""
    return " ".join(f"l{i}" for i in range(count))


class Operands(NamedTuple):
    """The operand of quantisation."""

    x: Float[Array, "b {o.dims}"]


class Codes(NamedTuple):
    """e4m3 codes and the scales of their blocks."""

    codes: Float[Array, "b {o.dims}", jnp.float8_e4m3fn]
    scale: Float[Array, "b {o.scale_dims}", jnp.float32]


class Values(NamedTuple):
    """Dequantised values."""

    x: Float[Array, "b {o.dims}", Dtype(lambda options, _: options.dtype)]


class OnlyCodes(NamedTuple):
    """The codes, which are all that the gradient of the scales needs."""

    codes: Float[Array, "b {o.dims}"]


class ScaleGradients(NamedTuple):
    """The gradient of dequantisation.

    The dims of the scales are given here because the backward pass has no operand with them.
    """

    scale: Float[Array, "b {o.scale_dims}", jnp.float32]


class Gradients(NamedTuple):
    """The straight-through gradient of fake quantisation."""

    x: Array


def weights(args: Args, name: str, w: Any, dims: str, dtypes: Sequence[Any]) -> Array:
    """Returns the checked weights of a product over F, whose axes may be exchanged by mistake.

    Args:
        args: The checks of the call, which know the size of F.
        name: The argument's name.
        w: The argument.
        dims: "F O" or "O F".
        dtypes: The allowed dtypes.
    """
    try:
        return args.array(name, w, dims, dtypes)
    except ValueError as error:
        order, shape = dims.split(), getattr(as_array(w), "shape", ())
        if len(shape) == 2 and shape[1 - order.index("F")] == args.sizes["F"]:
            raise ValueError(f"{error}; did you pass [{order[1]}, {order[0]}]?") from None
        raise


def leading_dims(x: Any, last: str) -> str:
    """Returns the dims of `x` for messages: names of its leading axes, then `last`."""
    extra = max(0, getattr(as_array(x), "ndim", 0) - len(last.split()))
    return " ".join([*(["B", "T", *(f"T{i}" for i in range(2, extra))][:extra]), last])
