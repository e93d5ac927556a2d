"""Everything that depends on the version of JAX, and small facts about dtypes and avals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import get_axis_env
from jax._src.sharding_impls import parse_flatten_op_sharding as specs_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tree = TypeVar("Tree")
Fun = TypeVar("Fun", bound="Callable[..., Any]")

VERSION = jax.__version__


def runtime_ffi_api() -> tuple[int, int]:
    """The FFI API version (major, minor) of the XLA that JAX runs on, from the header it ships."""
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    found = {
        part: re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")
    }
    major, minor = (int(m.group(1)) if m else 0 for m in found.values())
    return major, minor


def accum_dtype(dtype: Any) -> Any:
    """The dtype that sums over inputs of `dtype` run in: float64 stays float64, everything else is
    float32.
    """
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def saturated(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in `dtype`; FP8 gets its largest value where it would make NaN of what it cannot hold."""
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def _manual_axis_type(x: Any) -> Any:
    aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    return aval.manual_axis_type if hasattr(aval, "manual_axis_type") else aval.mat


def varying_axes(*xs: Any) -> frozenset[str]:
    """The manual mesh axes (inside `shard_map`) over which any of `xs`, arrays or their avals,
    differs from device to device.
    """
    axes: frozenset[str] = frozenset()
    for x in xs:
        if x is not None:
            axes |= _manual_axis_type(x).varying
    return axes


def _vary_over(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def match_vary(tree: Tree, *like: Any) -> Tree:
    """`tree` with every leaf varying over all the manual mesh axes that any of `like` varies over.

    A scan whose carry starts from constants needs this inside `shard_map`: the constants do not
    vary, the carry that the body returns does.
    """
    axes = varying_axes(*like)
    return jax.tree.map(lambda x: _vary_over(x, axes), tree) if axes else tree


def device_order_probe(context: Any, *like: Any) -> list[jax.Array]:
    """An operand that tells `auto_mesh` in which order the compiler numbers devices: inside a
    `shard_map` that leaves several axes to the compiler, that of its first result's axes.
    """
    auto = context.auto_axes
    if not context.manual_axes or sum(context.shape[name] > 1 for name in auto) < 2:
        return []
    x = match_vary(jnp.zeros([context.shape[name] for name in auto], jnp.int8), *like)
    return [jax.lax.with_sharding_constraint(x, PartitionSpec(*auto))]


def auto_mesh(
    context: Any, mesh: Mesh, shardings: Sequence[Any], probe: Any = None
) -> tuple[Mesh, Mesh, list[PartitionSpec | None]]:
    """What a partition callback of `custom_partitioning` is not told.

    Args:
        context: the abstract mesh that was current while tracing.
        mesh: what the callback is given as its mesh: nothing inside a `shard_map`.
        shardings: what it is given of the arrays, as the compiler says it.
        probe: what it is given of the `device_order_probe`, if there is one.

    Returns:
        The whole mesh; the mesh of its Auto axes alone, which the callback's shardings are of; and
        the arrays' specs on that, None where no spec says what the compiler does: it may deal a
        mesh axis out in parts.
    """
    auto = mesh
    if context.manual_axes:
        devices = np.array(shardings[0]._device_assignment).reshape(context.axis_sizes)
        first = tuple(slice(None) if n in context.auto_axes else 0 for n in context.axis_names)
        order = list(range(len(context.auto_axes)))
        if probe is not None:  # axes by how far apart their neighbours are
            tiles = probe._to_xla_hlo_sharding(len(order))
            places = np.array(tiles.tile_assignment_devices()).reshape(devices[first].shape)
            order.sort(key=lambda i: -int(np.ptp(places.take([0, -1], i), axis=i).flat[0]))
        mesh = Mesh(devices, context.axis_names)
        auto = Mesh(devices[first].transpose(order), [context.auto_axes[i] for i in order])
    specs: list[PartitionSpec | None] = []
    for sharding in shardings:
        try:
            specs.append(specs_of(sharding._to_xla_hlo_sharding(0), auto)[0])
        except ValueError:
            specs.append(None)
    return mesh, auto, specs


def left_to_compiler(fun: Fun, like: Any) -> Fun:
    """`fun`, which Explicit mesh axes stop, with those axes Auto inside; its result lies as `like`
    does.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return fun
    return jax.sharding.auto_axes(fun, out_sharding=jax.typeof(like).sharding)


def mapped_mesh_axes() -> frozenset[str]:
    """The Explicit mesh axes that shard an axis which a `vmap` around this maps."""
    return frozenset(get_axis_env().explicit_mesh_axis_names)


def no_mesh() -> Any:
    """A context without a mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def shard_first(x: jax.Array, names: Any) -> jax.Array:
    """`x` with its first axis sharded over the Explicit mesh axes `names`; as it is for None."""
    if names is None:
        return x
    taken = {names} if isinstance(names, str) else set(names)
    rest = [
        None if s is None or taken & ({s} if isinstance(s, str) else set(s)) else s
        for s in jax.typeof(x).sharding.spec[1:]
    ]
    return jax.reshard(x, PartitionSpec(names, *rest))


def shard_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` with its axes sharded over Explicit mesh axes as the first ones of `like` are."""
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return x
    return jax.reshard(x, PartitionSpec(*jax.typeof(like).sharding.spec[: x.ndim]))


def mapped_aval(aval: Any, size: int, names: Any) -> Any:
    """`aval` with an axis in front, sharded over the Explicit mesh axes `names`."""
    spec = PartitionSpec(names, *aval.sharding.spec)
    return aval.update(shape=(size, *aval.shape), sharding=aval.sharding.update(spec=spec))


def out_aval(shape: Sequence[int], dtype: Any, *like: Any) -> jax.ShapeDtypeStruct:
    """The aval of a custom call's result that varies over the manual mesh axes of its operands
    `like`.
    """
    axes = varying_axes(*like)
    if not axes:
        return jax.ShapeDtypeStruct(tuple(shape), dtype)
    widest = match_vary(next(x for x in like if x is not None), *like)
    sharding = NamedSharding(jax.typeof(widest).sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(
        tuple(shape), dtype, sharding=sharding, manual_axis_type=_manual_axis_type(widest)
    )
