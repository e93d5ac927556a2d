"""Rotary fields of layers' configurations, from those of `transformers`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_dsa.nn.hf_fields import Fields
from jax_dsa.nn.rotary import yarn_frequencies

if TYPE_CHECKING:
    from collections.abc import Sequence


def rope_parameters(c: Fields) -> Fields:
    """Returns `rope_parameters`, which older configurations call `rope_scaling`.

    These have the base outside of it, as `rope_theta`, and the type as `type`.
    """
    field = "rope_parameters" if c.get("rope_parameters") is not None else "rope_scaling"
    rope = c.inner(field) if c.get(field) is not None else Fields({}, c.name)
    defaults = {"rope_type": rope.get("type", "default"), "rope_theta": c.get("rope_theta")}
    return Fields({**defaults, **rope}, rope.name)


def _magnitude(factor: float, weight: float) -> float:
    """Returns YaRN's factor for attention scores in a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def scale_factor(rope: Fields) -> float:
    """Returns `AttentionConfig.scale_factor` for a model's `rope_parameters`."""
    if rope["rope_type"] == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return _magnitude(rope.number("factor"), rope.number("mscale_all_dim")) ** 2


def rotation(rope: Fields, width: int, alpha: Sequence[float] | None = None) -> dict[str, Any]:
    """Returns the rotary fields of a layer's configuration for a model's `rope_parameters`."""
    kind, base = rope["rope_type"], float(rope.number("rope_theta", above=1))
    factor = 1.0
    if kind == "default":
        frequencies = base ** (-np.arange(0, width, 2) / width)
    elif kind == "yarn":
        stretch = rope.number("factor")
        options: dict[str, Any] = {
            name: rope.number(name)
            for name in ("beta_fast", "beta_slow")
            if rope.get(name) is not None
        }
        frequencies = np.asarray(
            yarn_frequencies(
                width,
                base=base,
                factor=stretch,
                original_length=rope.integer("original_max_position_embeddings"),
                truncate=bool(rope.optional("truncate", True)),
                **options,
            )
        )
        own, all_dims = (rope.number(n) if rope.get(n) else 0 for n in ("mscale", "mscale_all_dim"))
        if rope.get("attention_factor") is not None:
            factor = float(rope.number("attention_factor"))
        elif own and all_dims:
            factor = _magnitude(stretch, own) / _magnitude(stretch, all_dims)
        else:
            factor = _magnitude(stretch, 1.0)
    else:
        raise ValueError(
            f"from_hf: rope_type in {rope.name} is {kind!r}, expected 'default' or 'yarn'"
        )
    if alpha is not None:
        if np.shape(alpha) != frequencies.shape:
            raise ValueError(
                f"from_hf: argument 'rope_alpha' has shape {np.shape(alpha)}, expected "
                f"{frequencies.shape}, one number per rotary pair"
            )
        frequencies = frequencies * np.exp(np.asarray(alpha, np.float64))
    return {
        "rope_base": base,
        "rope_frequencies": tuple(map(float, frequencies)),
        "rope_factor": factor,
    }
