"""Where a run's arrays lie: one mesh, and what each of its axes shards.

- "data" and "fsdp" shard the batch, "context" the sequence;
- "fsdp" also shards parameters and optimiser states, which are gathered where they are used;
- "tensor" shards the heads of the attention and the width of the feed-forward layers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_dsa.training.data import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jax.sharding import Mesh

AXES = ("data", "fsdp", "context", "tensor")
BATCH = PartitionSpec(("data", "fsdp"), "context")
"""Of arrays [B, T, ...]: tokens and hidden states."""

PARAMETERS: dict[str, tuple[str | None, ...]] = {
    "embed": ("tensor", "fsdp"),
    "head": ("fsdp", "tensor"),
    "wq_a": ("fsdp", None),
    "wq_b": ("fsdp", "tensor"),
    "wkv_a": ("fsdp", None),
    "w_uk": ("tensor", "fsdp", None),
    "w_uv": ("tensor", "fsdp", None),
    "wg": ("fsdp", "tensor"),
    "wo": ("tensor", "fsdp"),
    "gate_up": ("fsdp", "tensor"),
    "down": ("tensor", "fsdp"),
    # The indexer's heads stay together: each device selects for a part of the queries.
    "wq": ("fsdp", None),
    "wk": ("fsdp", None),
    "weights": ("fsdp", None),
}
"""By the name of the module that holds them; norms are in no one's way and stay whole."""


def make_mesh(
    sizes: Mapping[str, int] | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of `AXES` with these sizes. An axis without one has size 1, but "data" has all the
    devices that the others leave.
    """
    sizes = dict(sizes or {})
    devices = jax.devices() if devices is None else devices
    unknown = sizes.keys() - set(AXES)
    if unknown or min(sizes.values(), default=1) < 1:
        raise RunError(f"make_mesh: sizes are {sizes}, want at least 1 for each of {AXES}")
    others = math.prod(n for name, n in sizes.items() if name != "data")
    sizes.setdefault("data", max(1, len(devices) // others))
    shape = tuple(sizes.get(name, 1) for name in AXES)
    if math.prod(shape) > len(devices):
        raise RunError(f"make_mesh: sizes are {sizes}, want at most {len(devices)} devices")
    devices = devices[: math.prod(shape)]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=devices)


def annotate(model: nnx.Module) -> None:
    """Writes `PARAMETERS` into the parameters' NNX metadata. An optimiser's states inherit it."""
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        axes = next((PARAMETERS[str(name)] for name in path if str(name) in PARAMETERS), None)
        if axes is not None and variable.ndim == len(axes):
            variable.set_metadata(out_sharding=axes)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The shardings of all arrays in a tree that has `nnx.Variable`s, by their metadata."""

    def place(x: Any) -> Any:
        if not isinstance(x, nnx.Variable):
            return NamedSharding(mesh, PartitionSpec())
        spec = x.get_metadata("out_sharding", ())
        return x.replace(fitted(mesh, PartitionSpec(*spec), x.shape))

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def fitted(mesh: Mesh, spec: PartitionSpec, shape: Sequence[int]) -> NamedSharding:
    """The sharding by `spec`, where axes of the array that the mesh does not divide stay whole."""

    def fits(entry: Any, size: int) -> bool:
        names = entry if isinstance(entry, tuple) else (entry,)
        return size % math.prod(mesh.shape[name] for name in names if name) == 0

    entries = [entry if fits(entry, size) else None for entry, size in zip(spec, shape)]
    return NamedSharding(mesh, PartitionSpec(*entries))
