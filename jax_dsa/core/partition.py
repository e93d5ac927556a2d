"""Sharding of one operator pass: from a line of dims to specs on Explicit, Manual and Auto meshes.

A pass is declared as `"b t (g m) d, b s g d -> b t (g m) d, b s g d"`: one token an axis, letters
are factors, and an axis in parentheses is the product of its factors, major first. Some letters are
shardable; axes made of others stay whole. Every result is the sum over the shardable letters that
occur in the operands but not in that result.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_dsa.core import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Axis = tuple[str, ...]  # the factors of one array axis; () is an axis that nothing else shares


def parse(dims: str) -> tuple[list[list[Axis]], list[list[Axis]]]:
    """The axes of the operands and of the results in `dims`."""

    def side(text: str) -> list[list[Axis]]:
        return [
            [tuple(token.strip("()").split()) for token in re.findall(r"\([^)]*\)|\S+", array)]
            for array in text.split(",")
        ]

    operands, results = dims.split("->")
    return side(operands), side(results)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The factors of every axis of one call, with sizes: what its sharding is worked out on."""

    operands: list[list[Axis]]
    results: list[list[Axis]]
    sizes: dict[str, int]
    shardable: frozenset[str]

    @classmethod
    def of(
        cls,
        operands: list[list[Axis]],
        results: list[list[Axis]],
        shapes: Sequence[tuple[int, ...]],
        shardable: frozenset[str],
    ) -> Plan:
        """Solves the factor sizes; `shapes` are those of the operands, then of the results."""
        axes = [
            (axis, size)
            for array, shape in zip(operands + results, shapes, strict=True)
            for axis, size in zip(array, shape, strict=True)
        ]
        sizes: dict[str, int] = {}
        for axis, size in axes:
            if len(axis) == 1 and sizes.get(axis[0], 1) == 1:
                sizes[axis[0]] = size
        # Two sweeps: the second solves products whose other factors only a later array gave away.
        for axis, size in axes + axes:
            unknown = [f for f in axis if f not in sizes]
            if len(unknown) == 1:
                sizes[unknown[0]] = size // max(1, math.prod(sizes[f] for f in axis if f in sizes))

        def actual(axis: Axis, size: int) -> Axis:
            if len(axis) == 1:  # an axis of one where others have more is a broadcast one
                return axis if size == sizes[axis[0]] else ()
            return tuple(f for f in axis if sizes[f] != 1) or axis[-1:]

        arrays = [
            [actual(axis, size) for axis, size in zip(array, shape, strict=True)]
            for array, shape in zip(operands + results, shapes, strict=True)
        ]
        n = len(operands)
        return cls(arrays[:n], arrays[n:], sizes, shardable)

    def assign(
        self, mesh: Mapping[str, int], specs: Sequence[PartitionSpec | None]
    ) -> dict[str, tuple[str, ...]]:
        """Which mesh axes shard which factor, read off the arrays' specs, operands first."""
        taken: set[str] = set()
        where: dict[str, tuple[str, ...]] = {}
        for array, spec in zip(self.operands + self.results, specs, strict=False):
            for axis, names in zip(array, tuple(spec or ()), strict=False):
                names = (names,) if isinstance(names, str) else tuple(names or ())
                if not names or any(f in where for f in axis) or taken & set(names):
                    continue
                for factor, got in self._split(axis, names, mesh).items():
                    where[factor] = got
                    taken.update(got)
        return where

    def _split(
        self, axis: Axis, names: tuple[str, ...], mesh: Mapping[str, int]
    ) -> dict[str, tuple[str, ...]]:
        """Deals the mesh axes of one array axis out to its factors, major first, as far as they
        divide.
        """
        out: dict[str, tuple[str, ...]] = {}
        queue = list(names)
        for factor in axis:
            left, got = self.sizes[factor], []
            while factor in self.shardable and queue and left % mesh[queue[0]] == 0:
                left //= mesh[queue[0]]
                got.append(queue.pop(0))
            if got:
                out[factor] = tuple(got)
            # A minor factor of a major one that is still whole is not a block of the axis.
            if left != 1:
                break
        return out

    def spec(self, array: list[Axis], where: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
        """The spec of an array under the assignment `where`."""
        return PartitionSpec(
            *[tuple(itertools.chain(*(where.get(f, ()) for f in axis))) or None for axis in array]
        )

    def summed(self, array: list[Axis], where: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """The mesh axes over which the result `array` has to be summed."""
        own = set(itertools.chain(*array))
        return tuple(itertools.chain(*(where[f] for f in where if f not in own)))

    def rule(self) -> dict[str, Any]:
        """What `custom_partitioning.def_partition` wants to know: Shardy's rule and its factors."""
        fresh = (f"u{i}" for i in itertools.count())

        def text(arrays: list[list[Axis]]) -> str:
            def one(axis: Axis) -> str:
                return (
                    f"({' '.join(axis)})" if len(axis) > 1 else (axis[0] if axis else next(fresh))
                )

            return ", ".join(" ".join(one(axis) for axis in array) for array in arrays)

        rule = f"{text(self.operands)} -> {text(self.results)}"
        names = list(dict.fromkeys(re.findall(r"\w+", rule)))
        axes = list(itertools.chain(*self.operands, *self.results))
        alone = {axis[0] for axis in axes if len(axis) == 1}
        kept = set(itertools.chain(*itertools.chain(*self.results)))
        return {
            "sharding_rule": rule,
            "need_replication_factors": tuple(n for n in names if n not in self.shardable),
            "reduction_factors": tuple(n for n in names if n in self.shardable and n not in kept),
            **{n: self.sizes[n] for axis in axes for n in axis if n not in alone},
        }


def partitioned(
    fun: Callable[..., tuple[Any, ...]],
    dims: tuple[list[list[Axis]], list[list[Axis]]],
    shardable: frozenset[str],
) -> Callable[..., tuple[Any, ...]]:
    """`fun` made aware of meshes.

    Three routes, by the mesh that is current while tracing: an Explicit axis leads through
    `shard_map`, since anything else would gather its operands; a Manual axis means that the arrays
    are already local; and an Auto mesh, or none, leaves the decision to the compiler through
    `custom_partitioning`.

    Args:
        fun: takes arrays, returns a tuple of arrays and Nones.
        dims: parsed dims of just the operands that are present, and of all results.
        shardable: factors that may be sharded.
    """
    operand_axes, result_axes = dims

    def plan_for(args: tuple[jax.Array, ...]) -> tuple[Plan, list[bool]]:
        outs = jax.eval_shape(fun, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args))
        present = [o is not None for o in outs]
        axes = [a for a, p in zip(result_axes, present, strict=True) if p]
        shapes = [x.shape for x in (*args, *(o for o in outs if o is not None))]
        return Plan.of(operand_axes, axes, shapes, shardable), present

    def summed_locally(plan: Plan, where: dict[str, tuple[str, ...]], args: Any) -> list[jax.Array]:
        outs = [y for y in fun(*args) if y is not None]
        sums = [plan.summed(a, where) for a in plan.results]
        return [jax.lax.psum(y, n) if n else y for y, n in zip(outs, sums, strict=True)]

    def explicit(args: tuple[jax.Array, ...], mesh: Any, names: set[str]) -> list[jax.Array]:
        plan, _ = plan_for(args)
        where = plan.assign(dict(mesh.shape), [jax.typeof(x).sharding.spec for x in args])
        in_specs = tuple(plan.spec(a, where) for a in plan.operands)
        out_specs = [plan.spec(a, where) for a in plan.results]
        args = tuple(jax.reshard(x, s) for x, s in zip(args, in_specs, strict=True))
        return jax.shard_map(
            lambda *blocks: summed_locally(plan, where, compat.match_vary(blocks, *blocks)),
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=names,
        )(*args)

    def auto(args: tuple[jax.Array, ...]) -> list[jax.Array]:
        plan, _ = plan_for(args)
        op = custom_partitioning(lambda *xs: [y for y in fun(*xs) if y is not None])

        def partition(mesh: Any, arg_infos: Any, result_infos: Any) -> Any:
            specs = [getattr(i.sharding, "spec", None) for i in (*arg_infos, *result_infos)]
            where = plan.assign(dict(mesh.shape), specs)
            in_shardings = tuple(NamedSharding(mesh, plan.spec(a, where)) for a in plan.operands)
            out_shardings = [NamedSharding(mesh, plan.spec(a, where)) for a in plan.results]
            lowered = lambda *blocks: summed_locally(plan, where, blocks)  # noqa: E731
            return mesh, lowered, out_shardings, in_shardings

        op.def_partition(partition=partition, **plan.rule())
        return op(*args)

    def call(*args: jax.Array) -> tuple[Any, ...]:
        mesh = jax.sharding.get_abstract_mesh()
        types = {} if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if AxisType.Manual in types.values():
            return fun(*compat.match_vary(args, *args))
        names = {n for n, t in types.items() if t == AxisType.Explicit}
        outs = iter(explicit(args, mesh, names) if names else auto(args))
        _, present = plan_for(args)
        return tuple(next(outs) if p else None for p in present)

    return call
