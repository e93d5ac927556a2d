"""The layout of one call on a mesh: where its arrays are, and what each device computes.

`partition` derives it from the dims of the pass.
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
"""A pass on arrays that may have any number of axes in front of their own."""


class AxisFragment(NamedTuple):
    """A mesh axis or a factor of one. Device i of the axis has block `i // stride % size`.

    A mesh axis is split into fragments if it has more devices than the array axis has groups. With
    2 groups of 8 heads on 8 devices, the groups are sharded over the fragment of size 2 and stride
    4, and the heads of a group over the fragment of size 4 and stride 1.
    """

    name: str
    size: int
    stride: int


Assignment = dict[str, tuple[AxisFragment, ...]]
"""For each sharded factor, the axis fragments over which it is sharded."""


class Placement(NamedTuple):
    """The placement of one array.

    Attributes:
        spec: the spec of the array outside the pass. It can name whole mesh axes only.
        fragments: for each array axis, the fragments of mesh axes over which it is sharded further.
            Each device slices its own block along them.
    """

    spec: PartitionSpec
    fragments: tuple[tuple[AxisFragment, ...], ...]

    @classmethod
    def of(cls, array: Axes, assignment: Assignment, mesh: Mapping[str, int]) -> Placement:
        """Returns the placement of an array with these axes on a mesh with axes of these sizes."""
        entries, fragments = [], []
        for axis in array:
            all_of_axis = _joined([p for f in axis for p in assignment.get(f, ())])
            whole = list(itertools.takewhile(lambda p: p.size == mesh[p.name], all_of_axis))
            entries.append(tuple(p.name for p in whole) or None)
            fragments.append(tuple(all_of_axis[len(whole) :]))
        return cls(PartitionSpec(*entries), tuple(fragments))

    def sliced(self, x: jax.Array) -> jax.Array:
        """Returns this device's block of the array that the spec gives it."""
        for axis, fragments in enumerate(self.fragments):
            if fragments:
                size = x.shape[axis] // math.prod(p.size for p in fragments)
                x = jax.lax.dynamic_slice_in_dim(x, _block(fragments) * size, size, axis)
        return x

    def unsliced(self, y: jax.Array) -> jax.Array:
        """Inverts `sliced`. The result is zero where other devices have values."""
        for axis, fragments in enumerate(self.fragments):
            if fragments:
                size = y.shape[axis]
                whole = list(y.shape)
                whole[axis] *= math.prod(p.size for p in fragments)
                zeros = compat.match_vary(jnp.zeros(whole, y.dtype), y)
                start = _block(fragments) * size
                y = jax.lax.dynamic_update_slice_in_dim(zeros, y, start, axis)
        return y


def _block(fragments: Sequence[AxisFragment]) -> jax.Array | int:
    """Returns the index of this device's block along an array axis."""
    block: jax.Array | int = 0
    for p in fragments:
        block = block * p.size + jax.lax.axis_index(p.name) // p.stride % p.size
    return block


def _joined(fragments: Sequence[AxisFragment]) -> list[AxisFragment]:
    """Returns the fragments, with adjacent fragments of one mesh axis joined."""
    out: list[AxisFragment] = []
    for p in fragments:
        if out and out[-1].name == p.name and out[-1].stride == p.size * p.stride:
            p = AxisFragment(p.name, out.pop().size * p.size, p.stride)
        out.append(p)
    return out


def names_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes that one entry of a spec names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one call runs on one mesh.

    Attributes:
        operands, results: the placements during the pass.
        sums: for each result, the mesh axes over which it is summed completely.
        scatters: for each result, the mesh axes over which it is summed and left in blocks, by the
            array axis that the blocks divide.
        expected: the specs of the results that the caller expects.
    """

    operands: list[Placement]
    results: list[Placement]
    sums: list[tuple[str, ...]]
    scatters: list[dict[int, tuple[str, ...]]]
    expected: list[PartitionSpec]

    def run(self, fun: Local, blocks: Any) -> list[jax.Array]:
        """Returns `fun` of this device's blocks, summed over devices where that is needed."""
        local = [p.sliced(x) for p, x in zip(self.operands, blocks, strict=True)]
        outs = fun(*local)
        for i, (place, sums) in enumerate(zip(self.results, self.sums, strict=True)):
            y = place.unsliced(outs[i])
            for axis, names in self.scatters[i].items():
                y = jax.lax.psum_scatter(y, names, scatter_dimension=axis, tiled=True)
            outs[i] = jax.lax.psum(y, sums) if sums else y
        return outs
