"""The mesh of a run, and how its axes shard the run's arrays.

- "data" and "fsdp" shard the batch, and "context" shards the sequence.
- "fsdp" also shards parameters and optimizer states. Parameters are gathered where they are used.
- "tensor" shards the heads of the attention and the width of the feed-forward layers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_dsa.training.data import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AXES = ("data", "fsdp", "context", "tensor")
BATCH = PartitionSpec(("data", "fsdp"), "context")
"""The sharding of arrays [B, T, ...], such as tokens and hidden states."""

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
    # Grouped heads.
    "wq": ("fsdp", "tensor"),
    "wk": ("fsdp", "tensor"),
    "wv": ("fsdp", "tensor"),
}
"""The axes that shard a parameter, by the name of its module. Norms are small and replicated."""

INDEXER_MATRIX = ("fsdp", None)
"""The axes of an indexer's matrices. Its heads are not sharded: each device selects keys for some
of the queries."""


def make_mesh(
    sizes: Mapping[str, int] | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Returns a mesh with the axes `AXES`.

    Args:
        sizes: Sizes by axis name. An axis without a size has size 1, except "data", which gets all
            remaining devices.
        devices: The devices to use. Default: all devices.

    Raises:
        RunError: If an axis is unknown, a size is below 1, or there are not enough devices.
    """
    sizes = dict(sizes or {})
    devices = jax.devices() if devices is None else devices
    unknown = sizes.keys() - set(AXES)
    if unknown or min(sizes.values(), default=1) < 1:
        raise RunError(
            f"make_mesh: argument 'sizes' is {sizes}, expected at least 1 for each of {AXES}"
        )
    others = math.prod(n for name, n in sizes.items() if name != "data")
    sizes.setdefault("data", max(1, len(devices) // others))
    shape = tuple(sizes.get(name, 1) for name in AXES)
    if math.prod(shape) > len(devices):
        raise RunError(
            f"make_mesh: argument 'sizes' is {sizes}, expected at most {len(devices)} devices"
        )
    devices = devices[: math.prod(shape)]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=devices)


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Returns `mesh` with Auto axes.

    Parameters are sharded for storage and gathered where they are used. On Explicit axes, every
    product with them would have to say so.
    """
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def axis_sizes(function: str, mesh: Mesh) -> dict[str, int]:
    """Returns the size of each of `AXES` on a mesh; 1 for an axis that it lacks.

    Args:
        function: The function whose argument the mesh is, for the error message.
        mesh: The mesh.

    Raises:
        RunError: If the mesh has an axis that is not in `AXES`.
    """
    if not set(mesh.axis_names) <= set(AXES):
        raise RunError(
            f"{function}: argument 'mesh' has the axes {mesh.axis_names}, expected some of {AXES}, "
            f"as training.mesh.make_mesh makes them"
        )
    return dict.fromkeys(AXES, 1) | dict(mesh.shape)


def annotate(model: nnx.Module) -> None:
    """Writes the axes of `PARAMETERS` into the parameters' NNX metadata.

    Optimizer states inherit the metadata.
    """
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        names = [str(name) for name in path]
        axes = next((PARAMETERS[name] for name in names if name in PARAMETERS), None)
        axes = INDEXER_MATRIX if "indexer" in names else axes
        if axes is not None and variable.ndim == len(axes):
            variable.set_metadata(out_sharding=axes)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Returns the shardings of all arrays in a tree.

    Args:
        tree: A pytree. The metadata of its `nnx.Variable`s says how they are sharded; all other
            arrays are replicated.
        mesh: The mesh. An axis that it lacks, or that does not divide an array, shards nothing.
    """

    def place(x: Any) -> Any:
        if not isinstance(x, nnx.Variable):
            return NamedSharding(mesh, PartitionSpec())
        spec = x.get_metadata("out_sharding", ())
        return x.replace(fitted(mesh, PartitionSpec(*spec), x.shape))

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def fitted(mesh: Mesh, spec: PartitionSpec, shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding by `spec`, without the axes that the mesh lacks or does not divide."""

    def fit(entry: Any, size: int) -> tuple[str, ...]:
        names = entry if isinstance(entry, tuple) else (entry,)
        names = tuple(name for name in names if name in mesh.shape)
        return names if size % math.prod(mesh.shape[name] for name in names) == 0 else ()

    entries = [fit(entry, size) or None for entry, size in zip(spec, shape)]
    return NamedSharding(mesh, PartitionSpec(*entries))
