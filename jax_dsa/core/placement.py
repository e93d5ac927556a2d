"""Where the arrays of one call lie on a mesh, and what the devices do with their blocks.

`partition` decides where they lie, by the dims of the pass.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_dsa.core import compat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jax_dsa.core.spec import Axes

Local = Callable[..., list[jax.Array]]
"""A pass on arrays with any number of axes in front."""


class Part(NamedTuple):
    """A mesh axis or a factor of one: device i of the axis has block `i // stride % size`.

    A factor of an axis is what heads over more devices than groups need: with 2 groups of 8 heads
    on 8 devices, the groups take a part of 2 with stride 4, the heads of a group the part of 4.
    """

    name: str
    size: int
    stride: int


Where = dict[str, tuple[Part, ...]]  # the parts that shard a factor


class Placement(NamedTuple):
    """Where one array lies: a block by its spec, of which a device needs the block by `cuts`."""

    spec: PartitionSpec
    cuts: tuple[tuple[Part, ...], ...]  # for each axis

    @classmethod
    def of(cls, array: Axes, where: Where, mesh: Mapping[str, int]) -> Placement:
        """Of an array with these axes, on a mesh with axes of these sizes."""
        entries, cuts = [], []
        for axis in array:
            parts = _joined([p for f in axis for p in where.get(f, ())])
            whole = list(itertools.takewhile(lambda p: p.size == mesh[p.name], parts))
            entries.append(tuple(p.name for p in whole) or None)
            cuts.append(tuple(parts[len(whole) :]))
        return cls(PartitionSpec(*entries), tuple(cuts))

    def cut(self, x: jax.Array) -> jax.Array:
        """This device's block of what the spec gives it."""
        for axis, parts in enumerate(self.cuts):
            if parts:
                size = x.shape[axis] // math.prod(p.size for p in parts)
                x = jax.lax.dynamic_slice_in_dim(x, _block(parts) * size, size, axis)
        return x

    def uncut(self, y: jax.Array) -> jax.Array:
        """The inverse of `cut`, zeros where other devices have values."""
        for axis, parts in enumerate(self.cuts):
            if parts:
                size = y.shape[axis]
                whole = list(y.shape)
                whole[axis] *= math.prod(p.size for p in parts)
                zeros = compat.match_vary(jnp.zeros(whole, y.dtype), y)
                start = _block(parts) * size
                y = jax.lax.dynamic_update_slice_in_dim(zeros, y, start, axis)
        return y


def _block(parts: Sequence[Part]) -> jax.Array | int:
    """Which block of an axis this device has."""
    block: jax.Array | int = 0
    for p in parts:
        block = block * p.size + jax.lax.axis_index(p.name) // p.stride % p.size
    return block


def _joined(parts: Sequence[Part]) -> list[Part]:
    """`parts`, neighbours of one mesh axis made one."""
    out: list[Part] = []
    for p in parts:
        if out and out[-1].name == p.name and out[-1].stride == p.size * p.stride:
            p = Part(p.name, out.pop().size * p.size, p.stride)
        out.append(p)
    return out


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one call runs on one mesh.

    Attributes:
        operands, results: where they lie, to compute them.
        sums: for each result, the mesh axes over which it is summed whole.
        scatters: for each result, the mesh axes over which it is summed and kept in blocks, by the
            axis that is cut.
        wanted: the results' specs that the caller expects.
    """

    operands: list[Placement]
    results: list[Placement]
    sums: list[tuple[str, ...]]
    scatters: list[dict[int, tuple[str, ...]]]
    wanted: list[PartitionSpec]

    def run(self, fun: Local, blocks: Any) -> list[jax.Array]:
        """`fun` on this device's blocks, summed over the devices where need be."""
        local = [p.cut(x) for p, x in zip(self.operands, blocks, strict=True)]
        outs = fun(*local)
        for i, (place, sums) in enumerate(zip(self.results, self.sums, strict=True)):
            y = place.uncut(outs[i])
            for axis, names in self.scatters[i].items():
                y = jax.lax.psum_scatter(y, names, scatter_dimension=axis, tiled=True)
            outs[i] = jax.lax.psum(y, sums) if sums else y
        return outs
