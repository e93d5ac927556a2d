"""Rotations of queries and keys: rotary position embedding and the Hadamard transform."""

from __future__ import annotations

from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np

from jax_dsa.core.typing import Array, Float, Int

RopeLayout = Literal["half", "interleaved"]
ROPE_LAYOUTS = get_args(RopeLayout)


def rope(
    x: Float[Array, "B T *H R"],
    positions: Int[Array, "B T"],
    *,
    base: float = 10000.0,
    layout: RopeLayout = "half",
) -> Float[Array, "B T *H R"]:
    """Rotates pair i of the last axis by `positions * base^(-2i/R)` radians; R is even.

    Layout "half" pairs element i with i + R/2, "interleaved" pairs 2i with 2i + 1. Weights trained
    with one layout do not work with the other: a model that is loaded with the wrong one still
    runs, and no longer finds its keys.

    Source: RoFormer (Su et al., 2021). Computed in float32, returned in the dtype of `x`.
    """
    if layout not in ROPE_LAYOUTS:
        raise ValueError(f"rope: argument 'layout' is {layout!r}, want one of {ROPE_LAYOUTS}")
    width = x.shape[-1]
    if width % 2:
        raise ValueError(f"rope: argument 'x' has shape {x.shape}, want an even last axis")
    if width == 0:
        return x
    frequency = base ** (-np.arange(0, width, 2, dtype=np.float32) / width)
    angle = positions[..., None].astype(jnp.float32) * frequency
    angle = angle.reshape(*positions.shape, *(1,) * (x.ndim - positions.ndim - 1), width // 2)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    wide = x.astype(jnp.float32)
    if layout == "half":
        a, b = jnp.split(wide, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    else:
        a, b = wide[..., 0::2], wide[..., 1::2]
        rotated = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    return rotated.astype(x.dtype)


def hadamard(x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
    """Multiplies the last axis by the Hadamard matrix scaled by C^-1/2, which is orthogonal; C is a
    power of two.

    Applied to queries and keys alike it changes no dot product, and it spreads outliers over all C
    elements before they are quantised.
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(f"hadamard: argument 'x' has shape {x.shape}, want a power of two last")
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (x.astype(jnp.float32) @ (matrix * width**-0.5)).astype(x.dtype)
