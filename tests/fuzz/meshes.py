"""Puts the arguments of a call on a random Explicit mesh of CPU devices."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fuzz.annotations import dims_of
from jax_dsa import BlockMask, FlatCache, HTreeCache, PagedCache

if TYPE_CHECKING:
    from fuzz.draw import Call, Draw

DEVICES = 8


def on_mesh(call: Call, c: Draw) -> tuple[Mesh, dict[str, Any]]:
    """Returns a mesh, and the call's arrays on it by name.

    One or two axes of the arrays are sharded, each over one axis of the mesh. Some arrays that have
    such an axis are replicated all the same.
    """
    letters = {name: _letters(call, name, x) for name, x in call.arrays.items()}
    sizes: dict[str, int] = {}
    for name, tree in letters.items():
        for x, axes in zip(jax.tree.leaves(call.arrays[name]), tree, strict=True):
            sizes |= {a: n for a, n in zip(axes, x.shape, strict=True) if a and n > 1}
    shards: dict[str, tuple[str, int]] = {}
    left = DEVICES
    for letter in c.rng.permutation(sorted(sizes)).tolist()[: c.one(1, 1, 2)]:
        fits = [n for n in range(2, left + 1) if sizes[letter] % n == 0]
        if fits:
            shards[letter] = f"mesh_{letter.strip('.')}", c.one(*fits)
            left //= shards[letter][1]
    axes = [*shards.values(), *([("idle", 2)] if left > 1 and c.chance(0.3) else [])]
    axes = axes or [("idle", 2)]
    names, shape = zip(*axes, strict=True)
    devices = jax.devices("cpu")[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(axes), devices=devices)

    def place(name: str) -> Any:
        shared = c.chance(0.85)
        leaves, tree = jax.tree.flatten(call.arrays[name])
        placed = []
        for x, own in zip(leaves, letters[name], strict=True):
            spec = [
                shards[a][0] if shared and a in shards and n == sizes[a] else None
                for a, n in zip(own, x.shape, strict=True)
            ]
            placed.append(jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec))))
        return jax.tree.unflatten(tree, placed)

    return mesh, {name: place(name) for name in call.arrays}


def _letters(call: Call, name: str, value: Any) -> list[tuple[str, ...]]:
    """Returns the names of the axes of each leaf of an argument, "" for those that stay whole."""
    leaves = jax.tree.leaves(value)
    if isinstance(value, BlockMask):
        return [("",) * x.ndim for x in leaves]
    if isinstance(value, FlatCache | PagedCache | HTreeCache | tuple):
        batched = value.lengths.ndim if hasattr(value, "lengths") else leaves[0].ndim > 1
        first = "B" if batched else ""
        own = [(first, *("",) * (x.ndim - 1)) if x.ndim else () for x in leaves]
        return [("",) * leaves[0].ndim, *own[1:]] if isinstance(value, PagedCache) else own
    hints = typing.get_type_hints(call.fn, include_extras=True)
    for dims in dims_of(hints[name]):
        if dims[0] == "...":
            dims = [*(f"...{i}" for i in range(value.ndim - len(dims) + 1)), *dims[1:]]
        if len(dims) == value.ndim + 1:
            dims = dims[1:]
        if len(dims) == value.ndim:
            return [tuple(_letter(d, n) for d, n in zip(dims, value.shape, strict=True))]
    return [("",) * value.ndim]


def _letter(dim: str, size: int) -> str:
    """Returns the letter of an axis that may be broadcast; "" if it is, or has several letters."""
    letters = [d for d in dim.replace("*", "").split("|") if d != "1"]
    return letters[0] if len(letters) == 1 and size > 1 and "+" not in dim else ""
