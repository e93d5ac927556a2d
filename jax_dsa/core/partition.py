"""Sharding of one operator pass: from its dims to specs on Explicit, Manual and Auto meshes.

Some factors of the dims (see `spec`) are shardable; axes made of others stay whole. Axes that vmap
put in front of the batch axis are shardable too. Every result is the sum over the shardable factors
that occur in the operands but not in that result.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_dsa.core import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jax_dsa.core.spec import Axes, Axis

Where = dict[str, tuple[str, ...]]  # the mesh axes that shard a factor


@dataclasses.dataclass(frozen=True)
class Plan:
    """The factors of every axis of one call, with sizes: what its sharding is worked out on."""

    operands: list[Axes]
    results: list[Axes]
    sizes: dict[str, int]
    shardable: frozenset[str]

    @classmethod
    def of(
        cls,
        operands: Sequence[Axes],
        results: Sequence[Axes],
        shapes: Sequence[tuple[int, ...]],
        shardable: frozenset[str],
    ) -> Plan:
        """Solves the factor sizes; `shapes` are those of the operands, then of the results, with
        as many leading axes in each as vmap put there.
        """
        lead = tuple((f"v{i}",) for i in range(len(shapes[0]) - len(operands[0])))
        arrays = [lead + axes for axes in (*operands, *results)]
        sizes: dict[str, int] = {}
        products = []
        for axes, shape in zip(arrays, shapes, strict=True):
            for axis, size in zip(axes, shape, strict=True):
                if len(axis) > 1:
                    products.append((axis, size))
                elif sizes.get(axis[0], 1) == 1:
                    sizes[axis[0]] = size
        # Twice: the second time solves products whose other factors only a later array gave away.
        for axis, size in products + products:
            unknown = [f for f in axis if f not in sizes]
            if len(unknown) == 1:
                for f in axis:
                    size //= max(1, sizes.get(f, 1))
                sizes[unknown[0]] = size
        for i, (axes, shape) in enumerate(zip(arrays, shapes, strict=True)):
            actual = []
            for axis, size in zip(axes, shape, strict=True):
                if len(axis) > 1:
                    axis = tuple(f for f in axis if sizes[f] != 1) or axis[-1:]
                elif size != sizes[axis[0]]:  # an axis of 1 where others have more: broadcast
                    axis = ()
                actual.append(axis)
            arrays[i] = tuple(actual)
        n = len(operands)
        return cls(arrays[:n], arrays[n:], sizes, shardable.union(*lead))

    def assign(self, mesh: Mapping[str, int], specs: Sequence[PartitionSpec | None]) -> Where:
        """Which mesh axes shard which factor, read off the arrays' specs, operands first."""
        taken: set[str] = set()
        where: Where = {}
        for array, spec in zip(self.operands + self.results, specs, strict=False):
            for axis, names in zip(array, tuple(spec or ()), strict=False):
                names = (names,) if isinstance(names, str) else tuple(names or ())
                if not names or any(f in where for f in axis) or taken & set(names):
                    continue
                for factor, got in self._split(axis, names, mesh).items():
                    where[factor] = got
                    taken.update(got)
        return where

    def _split(self, axis: Axis, names: tuple[str, ...], mesh: Mapping[str, int]) -> Where:
        """Deals the mesh axes of one array axis out to its factors, major first, as far as they
        divide.
        """
        out: Where = {}
        queue = list(names)
        for factor in axis:
            left, got = self.sizes[factor], []
            while factor in self.shardable and queue and left % mesh[queue[0]] == 0:
                left //= mesh[queue[0]]
                got.append(queue.pop(0))
            if got:
                out[factor] = tuple(got)
            # A later factor may be split only if every earlier one is split completely; otherwise
            # shards are not contiguous.
            if left != 1:
                break
        return out

    def spec(self, array: Axes, where: Where) -> PartitionSpec:
        """The spec of an array under the assignment `where`."""
        return PartitionSpec(
            *[tuple(itertools.chain(*(where.get(f, ()) for f in axis))) or None for axis in array]
        )

    def summed(self, array: Axes, where: Where) -> tuple[str, ...]:
        """The mesh axes over which the result `array` has to be summed."""
        own = set(itertools.chain(*array))
        return tuple(itertools.chain(*(where[f] for f in where if f not in own)))

    def rule(self) -> dict[str, Any]:
        """What `custom_partitioning.def_partition` wants to know: Shardy's rule and its factors."""
        texts: list[str] = []
        alone: set[str] = set()
        fresh = itertools.count()
        for array in self.operands + self.results:
            tokens = []
            for axis in array:
                if len(axis) == 1:
                    alone.add(axis[0])
                tokens.append(" ".join(axis) if axis else f"u{next(fresh)}")
                if len(axis) > 1:
                    tokens[-1] = f"({tokens[-1]})"
            texts.append(" ".join(tokens))
        n = len(self.operands)
        rule = f"{', '.join(texts[:n])} -> {', '.join(texts[n:])}"
        names = dict.fromkeys(re.findall(r"\w+", rule))
        kept = set(re.findall(r"\w+", rule.partition("->")[2]))
        return {
            "sharding_rule": rule,
            "need_replication_factors": tuple(x for x in names if x not in self.shardable),
            "reduction_factors": tuple(x for x in names if x in self.shardable and x not in kept),
            **{f: self.sizes[f] for f in names if f in self.sizes and f not in alone},
        }


def partitioned(
    fun: Callable[..., list[jax.Array | None]],
    operands: Sequence[Axes],
    results: Sequence[Axes],
    shardable: frozenset[str],
) -> Callable[..., list[jax.Array | None]]:
    """`fun` made aware of meshes.

    Three routes, by the mesh that is current while tracing: an Explicit axis leads through
    `shard_map`, since anything else would gather its operands; a Manual axis means that the arrays
    are already local; and an Auto mesh, or none, leaves the decision to the compiler through
    `custom_partitioning`.

    Args:
        fun: takes arrays, with any number of axes in front; returns a list of arrays and Nones.
        operands: the axes of just the operands that are present.
        results: the axes of all results.
        shardable: factors that may be sharded.
    """

    def summed(plan: Plan, where: Where, args: Any) -> list[jax.Array]:
        outs = [y for y in fun(*args) if y is not None]
        sums = [plan.summed(a, where) for a in plan.results]
        return [jax.lax.psum(y, n) if n else y for y, n in zip(outs, sums, strict=True)]

    def call(*args: jax.Array) -> list[jax.Array | None]:
        mesh = jax.sharding.get_abstract_mesh()
        types = {} if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if AxisType.Manual in types.values():
            return fun(*compat.match_vary(args, *args))

        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
        given = jax.eval_shape(fun, *avals)
        axes = [a for a, y in zip(results, given, strict=True) if y is not None]
        shapes = [x.shape for x in (*avals, *given) if x is not None]
        plan = Plan.of(operands, axes, shapes, shardable)
        explicit = AxisType.Explicit in types.values()
        outs = iter(_explicit(plan, mesh, args) if explicit else _auto(plan, args))
        return [None if y is None else next(outs) for y in given]

    def _explicit(plan: Plan, mesh: Any, args: Any) -> list[jax.Array]:
        where = plan.assign(dict(mesh.shape), [jax.typeof(x).sharding.spec for x in args])
        names = set(itertools.chain(*where.values()))
        if not names:  # as where an outer vmap has the only sharded axis
            args = [jax.reshard(x, PartitionSpec()) for x in args]
            return [y for y in fun(*args) if y is not None]
        in_specs = tuple(plan.spec(a, where) for a in plan.operands)
        args = tuple(jax.reshard(x, s) for x, s in zip(args, in_specs, strict=True))
        return jax.shard_map(
            lambda *blocks: summed(plan, where, compat.match_vary(blocks, *blocks)),
            in_specs=in_specs,
            out_specs=[plan.spec(a, where) for a in plan.results],
            axis_names=names,
        )(*args)

    def _auto(plan: Plan, args: Any) -> list[jax.Array]:
        op = custom_partitioning(lambda *xs: [y for y in fun(*xs) if y is not None])

        def partition(mesh: Any, arg_infos: Any, result_infos: Any) -> Any:
            specs = [getattr(i.sharding, "spec", None) for i in (*arg_infos, *result_infos)]
            where = plan.assign(dict(mesh.shape), specs)
            in_shardings = tuple(NamedSharding(mesh, plan.spec(a, where)) for a in plan.operands)
            out_shardings = [NamedSharding(mesh, plan.spec(a, where)) for a in plan.results]
            return mesh, lambda *blocks: summed(plan, where, blocks), out_shardings, in_shardings

        op.def_partition(partition=partition, **plan.rule())
        return op(*args)

    return call
