"""Weights and inputs of the layers in tests/references, and the parts of results kept there.

`write_parity_references` runs the layers of `transformers` on them, and
tests/test_parity_references.py runs ours. The numbers come from NumPy's `RandomState`, whose stream
never changes, so the files hold only results.
"""

from __future__ import annotations

import pathlib
import zlib
from typing import Any

import numpy as np

from support.hf_layers import OFFSET_NORMS

FOLDER = pathlib.Path(__file__).parent.parent / "references"
LENGTH = 33
"""Tokens. Layers select fewer keys than that."""

KEPT_COLUMNS = 8
"""Columns of outputs and of gradients of inputs. Each depends on all heads."""

KEPT_NUMBERS = 32
"""Numbers of the gradient of a weight."""


def numbers(name: str, *shape: int) -> np.ndarray:
    """Returns normal numbers, float32, that depend only on the name and the shape."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    return random.standard_normal(shape).astype(np.float32)


def weight(kind: str, layer: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a weight of a model's layer, given its name in `transformers`."""
    x = numbers(f"{layer} {name}", *shape)
    if len(shape) > 1:
        return np.float32(1.5 * shape[-1] ** -0.5) * x
    is_factor = name.endswith("norm.weight") or name.endswith("softmax_scaling.bias")
    is_factor = is_factor and kind not in OFFSET_NORMS
    return np.float32(0.3) * x + np.float32(is_factor)


def inputs(layers: int, batch: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs of all layers, and the cotangents of their outputs."""
    shape = layers, batch, LENGTH, width
    return numbers("inputs", *shape), numbers("cotangents", *shape)


def kept_columns(x: Any) -> np.ndarray:
    """Returns the part of outputs or of gradients of inputs that the files hold."""
    return np.asarray(x, np.float32)[..., :KEPT_COLUMNS]


def kept_numbers(x: Any) -> np.ndarray:
    """Returns the part of the gradient of a weight that the files hold, and its largest value."""
    x = np.asarray(x, np.float32).ravel()
    places = np.linspace(0, x.size - 1, min(KEPT_NUMBERS, x.size)).round().astype(int)
    return np.append(x[places], np.abs(x).max())
