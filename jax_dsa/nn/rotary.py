"""Rotary position embedding and the Hadamard transform of queries and keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import FLOATS, INT32, Args
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
    sections: Sequence[int] | None = None,
) -> Float[Array, "B T *H R"]:
    """Rotates pair i of the last axis by `positions * base^(-2i/R)` radians.

    Weights that were trained with one layout do not work with the other. A model that is loaded
    with the wrong layout still runs, but its queries no longer find their keys.

    Args:
        x: Floating-point array; R is even. It is rotated in float32.
        positions: Positions of the tokens, int32. Angles are exact to about 1e-6 radians at any
            position.
        base: Base of the frequencies.
        layout: "half" pairs element i with i + R/2, "interleaved" pairs 2i with 2i + 1.
        frequencies: R/2 frequencies in radians per position, which replace those of `base`.
        factor: Multiplies the rotated elements.
        sections: Numbers of the pairs that rotate by the first, second and third position of a
            token, in time, height and width, as in Qwen3.8. `positions` are then [3, B, T]. Pairs
            1, 4, 7, ... rotate by the second position and pairs 2, 5, 8, ... by the third, as many
            as `sections` says, and all others by the first.

    Returns:
        The rotated array, in the shape and dtype of `x`.

    Raises:
        TypeError: If `x` holds no floats, or `positions` no integers.
        ValueError: If the axes of `positions` are not the first ones of `x`, R is odd, `layout` is
            unknown, `base` is not positive, the number of `frequencies` is not R/2, or `sections`
            are not those of R/2 pairs.

    Examples:
        >>> import math, jax.numpy as jnp
        >>> from jax_dsa import nn
        >>> quarter_turn = [math.pi / 2]
        >>> x = nn.rope(jnp.ones((1, 2, 2)), jnp.array([[0, 1]]), frequencies=quarter_turn)
        >>> x.round().tolist()
        [[[1.0, 1.0], [-1.0, 1.0]]]

    Source: RoFormer (Su et al., 2021).
    """
    args = Args("rope", "x", np.empty(0), "R")
    x = args.typed("x", x, FLOATS)
    positions = args.typed("positions", positions, INT32)
    axes = positions.shape if sections is None else positions.shape[1:]
    fits = len(axes) < x.ndim and axes == x.shape[: len(axes)]
    want = f"the first axes of x {x.shape}"
    if sections is not None:
        fits, want = fits and positions.shape[:1] == (3,), f"3 and then {want} with 'sections'"
    args.shape("positions", positions, fits, want)
    if layout not in ROPE_LAYOUTS:
        raise ValueError(f"rope: argument 'layout' is {layout!r}, expected one of {ROPE_LAYOUTS}")
    width = x.shape[-1]
    if width % 2:
        raise ValueError(f"rope: argument 'x' has shape {x.shape}, expected an even last axis")
    if width == 0:
        return x
    if frequencies is None:
        base = args.real("base", base)
        args.option("base", base, base > 0, "a positive float")
        frequency = base ** (-np.arange(0, width, 2) / width)
    elif len(frequencies) == width // 2:
        frequency = np.array([args.real("frequencies", f) for f in frequencies])
    else:
        raise ValueError(
            f"rope: argument 'frequencies' has {len(frequencies)} numbers, expected {width // 2} "
            f"because the last axis of x has {width} elements"
        )
    if sections is None:
        positions = positions[..., None]
    else:
        pairs = width // 2
        args.option("sections", sections, are_sections(sections, pairs), f"those of {pairs} pairs")
        positions = _by_pair(positions, sections, pairs)
    angle = _angles(positions, frequency)
    angle = angle.reshape(*axes, *(1,) * (x.ndim - len(axes) - 1), width // 2)
    cos, sin = factor * jnp.cos(angle), factor * jnp.sin(angle)
    exact = x.astype(jnp.float32)
    if layout == "half":
        a, b = jnp.split(exact, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    else:
        a, b = exact[..., 0::2], exact[..., 1::2]
        rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    return rotated.astype(x.dtype)


def are_sections(sections: Sequence[int], pairs: int) -> bool:
    """Returns whether `rope` can divide so many pairs into three sections of these sizes."""
    sizes = tuple(sections)
    known = len(sizes) == 3 and all(isinstance(n, int) and n >= 0 for n in sizes)
    return known and sum(sizes) == pairs and sizes[1] <= (pairs + 1) // 3 and sizes[2] <= pairs // 3


def _by_pair(
    positions: Int[Array, "3 B T"], sections: Sequence[int], pairs: int
) -> Int[Array, "B T R/2"]:
    """Returns the position that each pair rotates by."""
    number = np.arange(pairs)
    axis = np.where(number // 3 < np.asarray(sections)[number % 3], number % 3, 0)
    first, second, third = positions[..., None]
    return jnp.where(axis == 1, second, jnp.where(axis == 2, third, first))


def _angles(positions: Int[Array, "B T 1|R/2"], frequencies: np.ndarray) -> Float[Array, "B T R/2"]:
    """Returns positions * frequencies modulo 2 pi, in -pi..pi.

    The positions of a token are one for all pairs, or one for each.

    A float32 product would be off by 0.03 radians at position 2^20. A frequency in turns per
    position therefore is the sum of an integer number of 2^-32 turns and a remainder. The product
    of the first part and the position is an int32 product that wraps around with each turn. It is
    exact. The product of the second part is below half a turn at any position.
    """
    turns = frequencies / (2 * np.pi) % 1 * 2.0**32
    whole = np.rint(turns)
    rest = ((turns - whole) * 2.0**-32).astype(np.float32)
    steps = (whole % 2.0**32).astype(np.uint32).view(np.int32)
    product = (positions * steps).astype(jnp.float32) * np.float32(2.0**-32)
    return (product + positions.astype(jnp.float32) * rest) * np.float32(2 * np.pi)


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
        TypeError: If `x` holds no floats.
        ValueError: If C is not a power of two.
    """
    x = Args("hadamard", "x", np.empty(0), "C").typed("x", x, FLOATS)
    width = x.shape[-1] if x.ndim else 0
    if width < 1 or width & (width - 1):
        raise ValueError(
            f"hadamard: argument 'x' has shape {x.shape}, expected a power of two as the last axis"
        )
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (x.astype(jnp.float32) @ (matrix * width**-0.5)).astype(x.dtype)
