"""Every operator on meshes of eight devices: right, and without gathering what is sharded."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from cases.registry import CASES
from compare import assert_matches
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from quick import compile_quickly  # noqa: F401
from test_transforms import grad, loss, outputs

ROUTES = [(case, route) for case in CASES for route in case.specs]
EACH_ROUTE = pytest.mark.parametrize(
    ("case", "route"), ROUTES, ids=[f"{case.name}-{route}" for case, route in ROUTES]
)


def both_ways(case: Any) -> Any:
    if not case.diff:
        return lambda *args: (outputs(case, *args), ())
    return lambda *args: (outputs(case, *args), grad(case)(*args))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@EACH_ROUTE
def test_mesh(
    case: Any, route: str, axis_type: Any, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    host = case.make_args(rng)
    want = both_ways(case)(*host)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,), devices=cpus)
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(np.asarray(x), NamedSharding(mesh, spec))
            for x, spec in zip(host, case.specs[route], strict=True)
        ]
        compiled = jax.jit(both_ways(case)).lower(*args).compile()
        assert "all-gather" not in compiled.as_text()
        assert_matches(compiled(*args), want)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if "batch" in c.specs], ids=lambda c: c.name)
def test_inside_shard_map(case: Any, rng: np.random.Generator, cpus: list[jax.Device]) -> None:
    """The operator on arrays that are local already, differentiated from outside, on one of two
    mesh axes.
    """
    host = case.make_args(rng)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=cpus)
    specs = case.specs["batch"]
    out_specs = PartitionSpec("x")
    local = jax.shard_map(
        lambda *args: outputs(case, *args),
        mesh=mesh,
        in_specs=specs,
        out_specs=out_specs,
        axis_names={"x"},
    )
    args = [
        jax.device_put(np.asarray(x), NamedSharding(mesh, spec))
        for x, spec in zip(host, specs, strict=True)
    ]
    sharded = type(case)(case.name, local, case.make_args, case.diff, {})
    assert_matches(jax.jit(both_ways(sharded))(*args), both_ways(case)(*host))
    assert np.isfinite(loss(case, *host))


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [None, "x"], ids=["replicated", "sharded"])
@pytest.mark.parametrize("case", [c for c in CASES if c.diff], ids=lambda c: c.name)
def test_vmap_on_an_explicit_mesh(
    case: Any, mapped: str | None, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """vmap, vmap(grad) and grad(vmap) over an axis that the mesh shards, and over one that it does
    not, beside a batch that it shards.
    """
    host = tuple(np.stack(x) for x in zip(*(case.make_args(rng) for _ in range(2)), strict=True))
    mesh = jax.make_mesh((2, 4), ("x", "y"), devices=cpus)
    whole = [PartitionSpec()] * len(host)
    batch = case.specs.get("batch", whole)
    specs = [PartitionSpec(mapped, "y" if "x" in spec else None) for spec in batch]
    inner = grad(case)
    total = lambda *a: jax.vmap(lambda *s: loss(case, *s))(*a).sum()  # noqa: E731

    def all_three(*args: Any) -> Any:
        return (
            jax.vmap(lambda *a: outputs(case, *a))(*args),
            jax.vmap(inner)(*args),
            jax.grad(total, argnums=case.diff)(*args),
        )

    want = jax.jit(all_three)(*host)
    with jax.set_mesh(mesh):
        pairs = zip(host, specs, strict=True)
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
        assert_matches(jax.jit(all_three)(*args), want)
