"""Rotary position embedding and the Hadamard transform of queries and keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.typing import Array, Float, Int

if TYPE_CHECKING:
    from collections.abc import Sequence

RopeLayout = Literal["half", "interleaved"]
"""Which elements form a pair that `rope` rotates."""
ROPE_LAYOUTS = get_args(RopeLayout)


def rope(
    x: Float[Array, "B T *H R"],
    positions: Int[Array, "B T"],
    *,
    base: float = 10000.0,
    layout: RopeLayout = "half",
    frequencies: Sequence[float] | None = None,
    factor: float = 1.0,
) -> Float[Array, "B T *H R"]:
    """Rotates pair i of the last axis by `positions * base^(-2i/R)` radians.

    Weights that were trained with one layout do not work with the other. A model that is loaded
    with the wrong layout still runs, but its queries no longer find their keys.

    Args:
        x: Floating-point array; R is even. It is rotated in float32.
        positions: Positions of the tokens, int32.
        base: Base of the frequencies.
        layout: "half" pairs element i with i + R/2, "interleaved" pairs 2i with 2i + 1.
        frequencies: R/2 frequencies in radians per position, which replace those of `base`.
        factor: Multiplies the rotated elements.

    Returns:
        The rotated array, in the shape and dtype of `x`.

    Raises:
        ValueError: If R is odd, `layout` is unknown, or the number of `frequencies` is not R/2.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_dsa import nn
        >>> nn.rope(jnp.ones((1, 2, 2)), jnp.array([[0, 1]])).round(2).tolist()
        [[[1.0, 1.0], [-0.30000001192092896, 1.3799999952316284]]]

    Source: RoFormer (Su et al., 2021).
    """
    if layout not in ROPE_LAYOUTS:
        raise ValueError(f"rope: argument 'layout' is {layout!r}, expected one of {ROPE_LAYOUTS}")
    width = x.shape[-1]
    if width % 2:
        raise ValueError(f"rope: argument 'x' has shape {x.shape}, expected an even last axis")
    if width == 0:
        return x
    if frequencies is None:
        frequency = base ** (-np.arange(0, width, 2, dtype=np.float32) / width)
    elif len(frequencies) == width // 2:
        frequency = np.asarray(frequencies, np.float32)
    else:
        raise ValueError(
            f"rope: argument 'frequencies' has {len(frequencies)} numbers, expected {width // 2} "
            f"because the last axis of x has {width} elements"
        )
    angle = positions[..., None].astype(jnp.float32) * frequency
    angle = angle.reshape(*positions.shape, *(1,) * (x.ndim - positions.ndim - 1), width // 2)
    cos, sin = factor * jnp.cos(angle), factor * jnp.sin(angle)
    exact = x.astype(jnp.float32)
    if layout == "half":
        a, b = jnp.split(exact, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    else:
        a, b = exact[..., 0::2], exact[..., 1::2]
        rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    return rotated.astype(x.dtype)


def yarn_frequencies(
    width: int,
    *,
    base: float,
    factor: float,
    original_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> tuple[float, ...]:
    """Returns frequencies for `rope` in a context that is stretched by `factor`.

    A pair that makes more than `beta_fast` turns within the original length keeps its frequency.
    The frequency of a pair that makes fewer than `beta_slow` turns is divided by `factor`. Between
    these pairs the frequencies are interpolated, linearly in the number of the pair.

    Args:
        width: R, number of rotary elements.
        base: Base of the original frequencies.
        factor: Growth of the context.
        original_length: Tokens of the context that the model was trained with.
        beta_fast: Turns above which a frequency is kept.
        beta_slow: Turns below which a frequency is divided.
        truncate: Whether to widen the interpolated range to whole pairs.

    Returns:
        R/2 frequencies, in radians per position.

    Source: YaRN (Peng et al., 2023), section 3.2.
    """
    pairs = np.arange(width // 2)
    plain = float(base) ** (-2.0 * pairs / width)

    def pair_with_turns(turns: float) -> float:
        """Returns the fractional number of the pair that makes so many turns."""
        return width * math.log(original_length / (2 * math.pi * turns)) / (2 * math.log(base))

    first, last = pair_with_turns(beta_fast), pair_with_turns(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    stretched = np.clip((pairs - first) / max(last - first, 1e-3), 0, 1)
    return tuple(map(float, plain * (1 - stretched) + plain / factor * stretched))


def hadamard(x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    """Multiplies the last axis by the orthogonal Hadamard matrix, which is scaled by C^-1/2.

    If queries and keys are both transformed, their dot products stay the same. The transform
    spreads outliers over all C elements, which reduces the error of a following quantisation.

    Args:
        x: Floating-point array; C is a power of two.

    Returns:
        The transformed array, in the shape and dtype of `x`, computed in float32.

    Raises:
        ValueError: If C is not a power of two.
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(
            f"hadamard: argument 'x' has shape {x.shape}, expected a power of two as the last axis"
        )
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (x.astype(jnp.float32) @ (matrix * width**-0.5)).astype(x.dtype)
