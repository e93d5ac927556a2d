"""All code that depends on the version of JAX, and small helpers for dtypes and avals."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import get_axis_env
from jax._src.mesh import get_concrete_mesh
from jax._src.sharding_impls import parse_flatten_op_sharding as specs_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tree = TypeVar("Tree")
Fun = TypeVar("Fun", bound="Callable[..., Any]")

VERSION = jax.__version__


def runtime_ffi_api() -> tuple[int, int]:
    """Returns the FFI API version (major, minor) of jaxlib's XLA, from the header that it ships."""
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    found = {
        name: re.search(rf"#define XLA_FFI_API_{name} (\d+)", text) for name in ("MAJOR", "MINOR")
    }
    major, minor = (int(m.group(1)) if m else 0 for m in found.values())
    return major, minor


def accum_dtype(dtype: Any) -> Any:
    """Returns the dtype in which sums over inputs of `dtype` are accumulated.

    It is float64 for float64 and float32 for everything else.
    """
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def saturated(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns `x` in `dtype`. Values too large for FP8 saturate instead of becoming NaN."""
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


_AVAL = jax.core.ShapedArray((), np.dtype(np.float32))
_MANUAL_AXIS_TYPE = "manual_axis_type" if hasattr(_AVAL, "manual_axis_type") else "mat"


def varying_axes(*xs: Any) -> frozenset[str]:
    """Returns the Manual mesh axes (inside `shard_map`) over which any of `xs` varies.

    Args:
        *xs: arrays or their avals, or None.
    """
    axes: frozenset[str] = frozenset()
    for x in xs:
        if x is not None:
            aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
            axes |= getattr(aval, _MANUAL_AXIS_TYPE).varying
    return axes


def _vary_over(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def match_vary(tree: Tree, *like: Any) -> Tree:
    """Returns `tree` with every leaf varying over the Manual mesh axes of all of `like`.

    A scan whose carry starts from constants needs this inside `shard_map`, because the constants do
    not vary, whereas the carry that the body returns does.
    """
    axes = varying_axes(*like)
    return jax.tree.map(lambda x: _vary_over(x, axes), tree) if axes else tree


def device_order_probe(context: Any, *like: Any) -> list[jax.Array]:
    """Returns an extra operand that tells `auto_mesh` in which order the compiler numbers devices.

    It is needed inside a `shard_map` that leaves several axes to the compiler. The compiler then
    orders devices by the axes of the first result.

    Args:
        context: the abstract mesh that is current while tracing.
        *like: arrays over whose Manual axes the operand must vary.

    Returns:
        A list with the operand; an empty list if the order is known.
    """
    auto = context.auto_axes
    if not context.manual_axes or sum(context.shape[name] > 1 for name in auto) < 2:
        return []
    x = match_vary(jnp.zeros([context.shape[name] for name in auto], jnp.int8), *like)
    return [jax.lax.with_sharding_constraint(x, PartitionSpec(*auto))]


def auto_mesh(
    context: Any, mesh: Mesh, shardings: Sequence[Any], probe: Any = None
) -> tuple[Mesh, Mesh, list[PartitionSpec | None]]:
    """Returns what `custom_partitioning` does not tell its partition callback.

    Args:
        context: the abstract mesh that was current while tracing.
        mesh: the callback's argument for the mesh. It is empty inside a `shard_map`.
        shardings: the callback's arguments for the shardings of the arrays.
        probe: the callback's argument for the sharding of the `device_order_probe`, if any.

    Returns:
        The whole mesh; the mesh of its Auto axes only, to which the callback's shardings refer; and
        the specs of the arrays on that mesh. A spec is None if the compiler splits a mesh axis into
        fragments, which no spec can express.
    """
    auto = mesh
    if context.manual_axes:
        devices = np.array(shardings[0]._device_assignment).reshape(context.axis_sizes)
        first = tuple(slice(None) if n in context.auto_axes else 0 for n in context.axis_names)
        order = list(range(len(context.auto_axes)))
        if probe is not None:  # Sort axes by the distance between neighbouring devices.
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


def explicit_mesh(*arrays: Any) -> Any:
    """Returns the abstract mesh that the arrays' types name if it has Explicit axes; else None."""
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def devices_are_known() -> bool:
    """Returns whether `jax.set_mesh` has set the devices of the current mesh."""
    return not get_concrete_mesh().empty


def on_mesh_of_types(fun: Fun) -> Fun:
    """Returns `fun` with the Explicit mesh that its arguments' types name as the current mesh.

    A mesh that is current already stays. `fun` is compiled if it is called outside of `jax.jit`,
    because operations on an abstract mesh cannot run one by one.
    """

    @functools.partial(jax.jit, keep_unused=True)  # Every argument tells where to run.
    @functools.wraps(fun)
    def on_mesh(*args: jax.Array) -> Any:
        with jax.sharding.use_abstract_mesh(explicit_mesh(*args)):
            return fun(*args)

    @functools.wraps(fun)
    def run(*args: jax.Array) -> Any:
        current = not jax.sharding.get_abstract_mesh().empty
        return fun(*args) if current or explicit_mesh(*args) is None else on_mesh(*args)

    return run  # type: ignore[return-value]


def left_to_compiler(fun: Fun, like: Any, spec: PartitionSpec | None = None) -> Fun:
    """Returns `fun` with Explicit mesh axes turned into Auto axes inside.

    `fun` must be a function that does not work on Explicit axes. Its result is on the mesh of
    `like`, with the sharding `spec`, by default that of `like`.
    """
    mesh = explicit_mesh(like)
    if mesh is None:
        return fun
    spec = jax.typeof(like).sharding.spec if spec is None else spec
    # Inside a shard_map, other axes may be Manual, and must stay so.
    auto = jax.sharding.auto_axes(fun, axes=mesh.explicit_axes, out_sharding=spec)
    return on_mesh_of_types(auto)


def mapped_mesh_axes() -> frozenset[str]:
    """Returns the Explicit mesh axes that shard an axis which a surrounding `vmap` maps."""
    return frozenset(get_axis_env().explicit_mesh_axis_names)


def no_mesh() -> Any:
    """Returns a context manager inside which there is no mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def shard_first(x: jax.Array, mesh: Any, names: Any) -> jax.Array:
    """Returns `x` with its first axis sharded over the Explicit axes `names`; unchanged if None."""
    if names is None:
        return x
    taken = {names} if isinstance(names, str) else set(names)
    rest = [
        None if s is None or taken & ({s} if isinstance(s, str) else set(s)) else s
        for s in jax.typeof(x).sharding.spec[1:]
    ]
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec(names, *rest)))


def shard_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns `x` with its axes sharded over Explicit axes like the first axes of `like`."""
    if explicit_mesh(like) is None:
        return x
    spec = PartitionSpec(*jax.typeof(like).sharding.spec[: x.ndim])
    return on_mesh_of_types(lambda x, like: jax.reshard(x, spec))(x, like)


def whole_axis(x: jax.Array, axis: int) -> jax.Array:
    """Returns `x` with an axis on every device of the Explicit axes that shard it."""
    if explicit_mesh(x) is None or not x.ndim:
        return x
    places = list(jax.typeof(x).sharding.spec)
    if places[axis] is None:
        return x
    places[axis] = None
    return on_mesh_of_types(lambda x: jax.reshard(x, PartitionSpec(*places)))(x)


def mapped_aval(aval: Any, size: int, names: Any) -> Any:
    """Returns `aval` with a new first axis that is sharded over the Explicit axes `names`."""
    spec = PartitionSpec(names, *aval.sharding.spec)
    return aval.update(shape=(size, *aval.shape), sharding=aval.sharding.update(spec=spec))


def out_aval(shape: Sequence[int], dtype: Any, *like: Any) -> jax.ShapeDtypeStruct:
    """Returns the aval of a custom call's result.

    It varies over the Manual mesh axes over which the operands `like` vary.
    """
    axes = varying_axes(*like)
    if not axes:
        return jax.ShapeDtypeStruct(tuple(shape), dtype)
    widest = match_vary(next(x for x in like if x is not None), *like)
    aval = jax.typeof(widest)
    return jax.ShapeDtypeStruct(
        tuple(shape),
        dtype,
        sharding=NamedSharding(aval.sharding.mesh, PartitionSpec()),
        manual_axis_type=getattr(aval, _MANUAL_AXIS_TYPE),
    )
