"""Sharding of one operator pass: derives specs on Explicit, Manual and Auto meshes from the dims.

Some factors of the dims (see `spec`) are shardable. Axes of other factors are never sharded inside
the pass. Axes that vmap puts in front of the batch axis are shardable too. Every result is the sum
over the shardable factors that occur in the operands but not in that result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jax_dsa.core import compat
from jax_dsa.core.placement import (
    Assignment,
    AxisFragment,
    Layout,
    Local,
    Placement,
    names_of,
)
from jax_dsa.core.spec import Axes, Dims

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax_dsa.core.spec import Axis

_IDLE_AXIS_FACTORS = ("t", "b", "d")
"""The factors, in order of preference, that a mesh axis may shard if it shards no other factor."""


class Declared(NamedTuple):
    """What a pass declares about one call.

    Attributes:
        dims: the axes of the arrays that are present.
        shardable: the factors that may be sharded.
        shard_queries_on_idle_axes: whether mesh axes that shard no operand split the work too.
        prefer_query_sharding: whether mesh axes that shard heads should split the queries instead.
    """

    dims: Dims
    shardable: frozenset[str]
    shard_queries_on_idle_axes: bool
    prefer_query_sharding: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """The factors of every axis of one call, with sizes: the basis of its sharding.

    Attributes:
        operands, results: the axes of the arrays.
        shapes: the shapes of the results.
        sizes: the sizes of the factors.
        shardable, shard_queries_on_idle_axes, prefer_query_sharding: as in `Declared`.
    """

    operands: list[Axes]
    results: list[Axes]
    shapes: list[tuple[int, ...]]
    sizes: dict[str, int]
    shardable: frozenset[str]
    shard_queries_on_idle_axes: bool
    prefer_query_sharding: bool

    @classmethod
    def of(cls, declared: Declared, args: Sequence[Any]) -> Plan:
        """Returns the plan for operands that may have axes of vmap in front of their own."""
        dims, n = declared.dims, len(args)
        shapes = [x.shape for x in args]
        sizes, results = dims.solve(shapes)
        shapes += results
        lead: Axes = tuple((f"v{i}",) for i in range(len(shapes[0]) - len(dims.operands[0])))
        for shape in shapes:
            for (factor,), size in zip(lead, shape, strict=False):
                if sizes.get(factor, 1) == 1:
                    sizes[factor] = size
        arrays = [lead + axes for axes in (*dims.operands, *dims.results)]
        for i, (axes, shape) in enumerate(zip(arrays, shapes, strict=True)):
            actual = []
            for axis, size in zip(axes, shape, strict=True):
                if len(axis) > 1:
                    axis = tuple(f for f in axis if sizes[f] != 1) or axis[-1:]
                elif size != sizes[axis[0]]:  # This axis of 1 is broadcast.
                    axis = ()
                actual.append(axis)
            arrays[i] = tuple(actual)
        can = declared.shardable.union(*lead)
        return cls(arrays[:n], arrays[n:], results, sizes, can, *declared[2:])

    def layout(self, mesh: Mapping[str, int], specs: Sequence[PartitionSpec | None]) -> Layout:
        """Returns how the call runs on a mesh.

        A mesh axis that shards factors which the pass can split stays there. Any other mesh axis
        that shards an operand (keys by position, or more devices than a head axis has blocks)
        splits queries or batch entries instead, so that no two devices do the same work. The
        results are then moved to the specs that a caller expects, given the specs of the operands.
        A gradient whose operand is sharded is summed into blocks of the same sharding.

        Args:
            mesh: the sizes of the mesh axes.
            specs: the specs of the operands, and perhaps of the results after them. None is an
                unknown spec.
        """
        preferred = self.shardable - {"m"} if self.prefer_query_sharding else self.shardable
        assignment, expected, idle = self._assign_axes(mesh, specs, preferred)
        if idle and self.prefer_query_sharding:  # Queries cannot use every axis, so shard heads.
            assignment, expected, _ = self._assign_axes(mesh, specs, self.shardable)
        results = [Placement.of(a, assignment, mesh) for a in self.results]
        used = dict.fromkeys(_mesh_axes(assignment))
        sums, scatters = [], []
        for i, (place, shape) in enumerate(zip(results, self.shapes, strict=True)):
            entries = list(place.spec)
            own = set(itertools.chain(*map(names_of, entries)))
            left = [n for n in used if n not in own]
            blocks: dict[int, tuple[str, ...]] = {}
            for axis, entry in enumerate(expected[i]):
                names = names_of(entry)
                fits = names and set(names) <= set(left) and entries[axis] is None
                fits = fits and 0 not in shape  # XLA rejects the reduce-scatter of nothing.
                if fits and shape[axis] % math.prod(mesh[n] for n in names) == 0:
                    blocks[axis] = entries[axis] = names
                    left = [n for n in left if n not in names]
            results[i] = place._replace(spec=PartitionSpec(*entries))
            sums.append(tuple(left))
            scatters.append(blocks)
        operands = [Placement.of(a, assignment, mesh) for a in self.operands]
        return Layout(operands, results, sums, scatters, expected)

    def _assign_axes(
        self,
        mesh: Mapping[str, int],
        specs: Sequence[PartitionSpec | None],
        shardable: frozenset[str],
    ) -> tuple[Assignment, list[PartitionSpec], set[str]]:
        """Assigns mesh axes to the factors that they shard.

        Returns:
            The assignment, the specs that a caller expects of the results, and the mesh axes that
            shard an operand but no factor of the pass.
        """
        assignment: Assignment = {}
        # The mesh axes that shard an array axis of the operands which the pass cannot split.
        unused: dict[Axis, tuple[str, ...]] = {}
        seen: dict[str, None] = {}  # The mesh axes that shard operands.
        for i, (array, spec) in enumerate(zip(self.operands + self.results, specs, strict=False)):
            for axis, entry in zip(array, tuple(spec or ()), strict=False):
                names = names_of(entry)
                taken = set(_mesh_axes(assignment))
                if not any(f in assignment for f in axis) and not taken & set(names):
                    assignment.update(self._split(axis, names, mesh, shardable))
                if i < len(self.operands):
                    seen.update(dict.fromkeys(names))
                    if names and axis and not any(f in assignment for f in axis):
                        unused.setdefault(axis, names)
        expected = [self._expected(a, assignment, unused, mesh) for a in self.results]
        taken = set(_mesh_axes(assignment))
        for name in mesh if self.shard_queries_on_idle_axes else seen:
            if name not in taken and mesh[name] > 1:
                self._assign_idle_axis(name, assignment, mesh)
        taken = set(_mesh_axes(assignment))
        return assignment, expected, {n for n in seen if mesh[n] > 1} - taken

    def _split(
        self,
        axis: Axis,
        names: tuple[str, ...],
        mesh: Mapping[str, int],
        shardable: frozenset[str],
    ) -> Assignment:
        """Splits the mesh axes of one array axis over its factors, major factor first.

        Returns:
            The assignment for those mesh axes that the sizes of the factors divide evenly.
        """
        out: dict[str, list[AxisFragment]] = {}
        queue = [(name, mesh[name]) for name in names]
        for factor in axis:
            left = self.sizes[factor]
            while factor in shardable and queue:
                name, rest = queue[0]
                size = rest if left % rest == 0 else left
                if left <= 1 < rest or rest % size:
                    break
                left //= size
                out.setdefault(factor, []).append(AxisFragment(name, size, rest // size))
                queue[:1] = [(name, rest // size)] if rest > size else []
            # A later factor may be split only if every earlier one is split completely. Otherwise
            # shards would not be contiguous.
            if left != 1:
                break
        # Drop a mesh axis that could be assigned only partly.
        partial = queue[0][0] if queue and queue[0][1] < mesh[queue[0][0]] else None
        kept = {f: tuple(p for p in found if p.name != partial) for f, found in out.items()}
        return {f: fragments for f, fragments in kept.items() if fragments}

    def _assign_idle_axis(self, name: str, assignment: Assignment, mesh: Mapping[str, int]) -> None:
        """Assigns the mesh axis to queries or batch entries if it divides them evenly."""
        for f in _IDLE_AXIS_FACTORS:
            fragments = assignment.get(f, ())
            size = self.sizes.get(f, 0) // math.prod(p.size for p in fragments)
            if f in self.shardable and size and size % mesh[name] == 0:
                assignment[f] = (*fragments, AxisFragment(name, mesh[name], 1))
                return

    def _expected(
        self,
        array: Axes,
        assignment: Assignment,
        unused: Mapping[Axis, tuple[str, ...]],
        mesh: Mapping[str, int],
    ) -> PartitionSpec:
        """Returns the spec that a caller expects of a result.

        It is the spec of the operands' axes that have the same factors.
        """
        entries = list(Placement.of(array, assignment, mesh).spec)
        own = set(itertools.chain(*map(names_of, entries)))
        for i, axis in enumerate(array):
            names = unused.get(axis, ())
            if names and entries[i] is None and not own & set(names):
                entries[i] = names
                own.update(names)
        return PartitionSpec(*entries)

    def rule(
        self, mesh: Mapping[str, int], others: Sequence[int] = ()
    ) -> tuple[str, dict[str, Any]]:
        """Returns Shardy's sharding rule and the keyword arguments that go with it.

        Args:
            mesh: the sizes of the mesh axes.
            others: the ranks of operands that follow the operands of the pass. No result depends on
                them.
        """
        texts: list[str] = []
        sizes: dict[str, int] = {}  # The sizes of all factors of the rule.
        alone: set[str] = set()  # The factors that are an axis of their own, whose size XLA knows.
        free = set(self.shardable)
        fresh = itertools.count()
        for array in self.operands + self.results:
            tokens = []
            for axis in array:
                factors = self._joined(axis, mesh)
                sizes.update(factors)
                if not self.shardable.isdisjoint(axis[:1]):
                    free.update(list(factors)[:1])
                if len(factors) == 1:
                    alone.update(factors)
                tokens.append(" ".join(factors) if axis else f"u{next(fresh)}")
                if len(factors) > 1:
                    tokens[-1] = f"({tokens[-1]})"
            texts.append(" ".join(tokens))
        n = len(self.operands)
        more = [" ".join(f"w{next(fresh)}" for _ in range(rank)) for rank in others]
        free.update(" ".join(more).split())
        rule = f"{', '.join(texts[:n] + more)} -> {', '.join(texts[n:])}"
        names = dict.fromkeys(re.findall(r"\w+", rule))
        kept = set(re.findall(r"\w+", rule.partition("->")[2]))
        return rule, {
            "need_replication_factors": tuple(x for x in names if x not in free),
            "reduction_factors": tuple(x for x in names if x in free and x not in kept),
            **{f: sizes[f] for f in names if f in sizes and f not in alone},
        }

    def _joined(self, axis: Axis, mesh: Mapping[str, int]) -> dict[str, int]:
        """Returns the factors of an axis for Shardy, with their sizes.

        The first factors are joined to one, as many as it takes for all mesh axes to divide it.
        Otherwise Shardy would split a mesh axis into fragments, and no spec can express that.
        """
        first = min(1, len(axis))
        size = math.prod(self.sizes[f] for f in axis[:first])
        while first < len(axis) and any(size % n for n in mesh.values()):
            size *= self.sizes[axis[first]]
            first += 1
        joined = {"".join(axis[:first]): size} if axis else {}
        return joined | {f: self.sizes[f] for f in axis[first:]}


def _mesh_axes(assignment: Assignment) -> list[str]:
    """Returns the mesh axes that shard a factor."""
    return [p.name for fragments in assignment.values() for p in fragments]


def partitioned(fun: Local, declared: Declared, *, plain: bool = False) -> Local:
    """Returns `fun` with sharding rules for the mesh that is current while tracing.

    If no mesh is current, it is the Explicit mesh that the operands' types name, if any.

    Over Explicit axes `fun` runs in a `shard_map`. For Auto axes, or if the mesh is not known yet,
    the compiler decides, through `custom_partitioning`. Over Manual axes the arrays are already
    local.

    Args:
        fun: the pass on the arrays of one device.
        declared: what the pass declares about the call.
        plain: whether to leave Auto axes to the compiler without a rule of ours.
    """

    def call(*args: jax.Array, explicit: bool = True) -> list[jax.Array]:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty and compat.explicit_mesh(*args) is not None:
            return on_mesh_of_types(*args)
        if explicit and mesh.explicit_axes:
            return _over_explicit(functools.partial(call, explicit=False), declared, mesh, args)
        args = compat.match_vary(args, *args)
        sizes = {name: mesh.shape[name] for name in mesh.auto_axes if mesh.shape[name] > 1}
        # Without jit there is nothing to partition.
        without_jit = jax.config.jax_disable_jit  # type: ignore[attr-defined]
        # Types name a mesh without its devices, which `custom_partitioning` needs.
        unknown = not explicit and not compat.devices_are_known()
        if plain or without_jit or unknown or not (mesh.empty or sizes):
            return fun(*args)
        plan = Plan.of(declared, args)
        probe = compat.device_order_probe(mesh, *args)
        count = len(args)

        def partition(devices: Any, arg_infos: Any, result_infos: Any) -> Any:
            probes = [x.sharding for x in arg_infos[count:]]
            shardings = [x.sharding for x in (*arg_infos[:count], *result_infos)]
            devices, auto, specs = compat.auto_mesh(mesh, devices, shardings, *probes)
            layout = plan.layout(dict(auto.shape), specs)

            def lower(*blocks: jax.Array) -> list[jax.Array]:
                with compat.no_mesh():  # The caller's mesh may have Explicit axes.
                    return layout.run(fun, blocks[:count])

            ins = tuple(NamedSharding(auto, p.spec) for p in layout.operands)
            ins += tuple(NamedSharding(auto, PartitionSpec(*mesh.auto_axes)) for _ in probes)
            outs = [NamedSharding(auto, p.spec) for p in layout.results]
            return devices, lower, outs, ins

        op = custom_partitioning(fun if not probe else lambda *xs: fun(*xs[:count]))
        op.def_partition(
            partition=partition,
            sharding_rule=lambda devices, *_: plan.rule(
                sizes or dict(devices.shape), [x.ndim for x in probe]
            ),
            decode_shardings=False,
        )
        return op(*args, *probe)

    on_mesh_of_types = compat.on_mesh_of_types(call)
    return call


def _over_explicit(fun: Local, declared: Declared, mesh: Any, args: Any) -> list[jax.Array]:
    """Runs `fun` on a mesh with Explicit axes; the other axes are left to `fun`.

    It runs in a `shard_map`, because JAX would gather the operands of anything else.
    """
    plan = Plan.of(declared, args)
    taken = compat.mapped_mesh_axes()
    sizes = {name: mesh.shape[name] for name in mesh.explicit_axes if name not in taken}
    layout = plan.layout(sizes, [jax.typeof(x).sharding.spec for x in args])
    in_specs = tuple(p.spec for p in layout.operands)
    args = tuple(jax.reshard(x, s) for x, s in zip(args, in_specs, strict=True))
    names = set(itertools.chain(*(names_of(e) for spec in in_specs for e in spec)))
    if names:
        # XLA of JAX 0.11 crashes on an operand without elements, so each device makes its own.
        empty = {
            i: NamedSharding(mesh, spec).shard_shape(x.shape)
            for i, (x, spec) in enumerate(zip(args, in_specs, strict=True))
            if 0 in x.shape
        }

        def local(*given: jax.Array) -> list[jax.Array]:
            blocks = list(given)
            for i, shape in empty.items():
                blocks.insert(i, jnp.zeros(shape, args[i].dtype))
            return layout.run(fun, compat.match_vary(blocks, *blocks))

        run = jax.shard_map(
            local,
            in_specs=tuple(spec for i, spec in enumerate(in_specs) if i not in empty),
            out_specs=[p.spec for p in layout.results],
            axis_names=set(sizes),  # By default the other axes would be Manual as well.
        )
        results = run(*(x for i, x in enumerate(args) if i not in empty))
    else:  # For example, an outer vmap maps the only sharded axis.
        results = fun(*args)
    return [jax.reshard(y, spec) for y, spec in zip(results, layout.expected, strict=True)]
