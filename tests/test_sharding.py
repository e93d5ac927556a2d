"""Every operator on meshes of eight devices.

The results are right, and the compiled program gathers only what the case's `gathers` allow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.cases.registry import CASES, one_fast
from support.compare import assert_matches
from support.marks import slow
from support.meshes import AUTO, EXPLICIT, MESHES, exchanged
from support.transforms import both_ways, grad, loss, outputs, weighted

import jax_dsa


def mesh_cases() -> list[Any]:
    """Returns cases, routes and kinds of meshes; two of each operator are fast.

    They are the last route of the operator's first case, on an Auto axis and on an Explicit one.
    The last route is that of the keys, whose gradients are exchanged, or else of the heads.
    """
    params = []
    for case in one_fast(CASES):
        (each,) = case.values
        for route, kind in itertools.product(each.specs, MESHES):
            fast = not case.marks and route == list(each.specs)[-1] and kind != "explicit"
            name = f"{each.name}-{route}-{kind}"
            marks = [] if fast else [pytest.mark.slow]
            params.append(pytest.param(each, route, kind, id=name, marks=marks))
    return params


@pytest.mark.parametrize(("case", "route", "kind"), mesh_cases())
def test_mesh(
    case: Any, route: str, kind: str, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    host = case.make_args(rng)
    want = both_ways(case)(*host)
    count = 4 if route == "keys" else 8
    axis_type, context = MESHES[kind]
    mesh = jax.make_mesh((count,), ("x",), axis_types=(axis_type,), devices=cpus[:count])
    args = [
        jax.device_put(np.asarray(x), NamedSharding(mesh, spec))
        for x, spec in zip(host, case.specs[route], strict=True)
    ]
    with context(mesh):
        traced = jax.jit(both_ways(case)).trace(*args)
        lowered = traced.lower()
        # Outside of a manual computation, a kernel's call would gather its operands.
        assert axis_type == AUTO or "sdy.manual_computation" in lowered.as_text()
        compiled = lowered.compile()
        text = compiled.as_text()
        gathered = exchanged(text, "all-gather")
        assert gathered == case.gathers.get(route, set())
        if route == "keys":
            # The gradients of sharded keys are summed into shards, never on every device.
            keys = {x.shape for i, x in enumerate(host) if i in case.diff} & gathered
            blocks = {(b, s // count, *rest) for b, s, *rest in keys}
            assert exchanged(text, "reduce-scatter") == blocks
            assert not exchanged(text, "all-reduce") & keys
        assert_matches(compiled(*args), want)
    if kind == "explicit-of-types":
        with jax.set_mesh(mesh):
            current = jax.jit(both_ways(case)).trace(*args)
        specs = [[x.sharding.spec for x in jax.tree.leaves(t.out_info)] for t in (traced, current)]
        assert specs[0] == specs[1]


TWO_AXES = {
    "manual-auto": (AUTO, AUTO, True, jax.set_mesh),
    "manual-explicit": (EXPLICIT, EXPLICIT, True, jax.set_mesh),
    "explicit-auto": (EXPLICIT, AUTO, False, jax.set_mesh),
    "auto-explicit": (AUTO, EXPLICIT, False, jax.set_mesh),
    "explicit-auto-of-types": (EXPLICIT, AUTO, False, contextlib.nullcontext),
    "auto-explicit-of-types": (AUTO, EXPLICIT, False, contextlib.nullcontext),
}


def crossed(batch: PartitionSpec, other: PartitionSpec) -> PartitionSpec:
    """Returns a spec with the "x" of `batch`, and the "x" of `other` as "y"."""
    pairs = itertools.zip_longest(batch, other)
    return PartitionSpec(*(x or (y and "y") for x, y in pairs))


@pytest.mark.slow
@pytest.mark.parametrize("types", TWO_AXES)
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.diff and "batch" in c.specs and len(c.specs) > 1],
    ids=lambda c: c.name,
)
def test_two_axes(case: Any, types: str, rng: np.random.Generator, cpus: list[jax.Device]) -> None:
    """The batch is on one mesh axis, perhaps in the user's `shard_map`; queries or heads are on an
    axis of another type.
    """
    host = case.make_args(rng)
    *axis_types, manual, context = TWO_AXES[types]
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=tuple(axis_types), devices=cpus)
    batch, other = case.specs["batch"], next(case.specs[r] for r in case.specs if r != "batch")
    fn = lambda *args: outputs(case, *args)  # noqa: E731
    if manual:
        fn = jax.shard_map(fn, in_specs=batch, out_specs=PartitionSpec("x"), axis_names={"x"})
    sharded = dataclasses.replace(case, fn=fn)
    with context(mesh):
        specs = map(crossed, batch, other)
        args = [
            jax.device_put(np.asarray(x), NamedSharding(mesh, spec))
            for x, spec in zip(host, specs, strict=True)
        ]
        compiled = jax.jit(both_ways(sharded)).lower(*args).compile()
        # JAX itself gathers the shards of an Explicit axis when a shard_map over another begins.
        # Without the current mesh, what Auto axes shard may be gathered.
        if types != "manual-explicit" and context is jax.set_mesh:
            assert not exchanged(compiled.as_text(), "all-gather")
        assert_matches(compiled(*args), both_ways(case)(*host))


@pytest.mark.parametrize("manual", [False, True], ids=["explicit", "manual"])
@pytest.mark.parametrize(
    "name", ["sparse_mla", slow("masked_attention"), slow("htree_attention"), "indexer_logits"]
)
def test_two_auto_axes_beside_another(
    name: str, manual: bool, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """Inside a `shard_map` over "z" the compiler numbers devices by the result's sharding, where
    "y" comes before "x".
    """
    case = next(c for c in CASES if c.name == name)
    host = case.make_args(rng)
    types = (AUTO, AUTO, AUTO if manual else EXPLICIT)
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=types, devices=cpus)
    specs = [
        PartitionSpec(*("z" if b else t and "y" for b, t in itertools.zip_longest(batch, query)))
        for batch, query in zip(case.specs["batch"], case.specs["query"], strict=True)
    ]
    fn = lambda *args: outputs(case, *args)  # noqa: E731
    if manual:
        batch = tuple(PartitionSpec(*(x and "z" for x in spec)) for spec in case.specs["batch"])
        fn = jax.shard_map(fn, in_specs=batch, out_specs=PartitionSpec("z"), axis_names={"z"})
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(np.asarray(x), NamedSharding(mesh, spec))
            for x, spec in zip(host, specs, strict=True)
        ]
        compiled = jax.jit(both_ways(dataclasses.replace(case, fn=fn))).lower(*args).compile()
        assert not exchanged(compiled.as_text(), "all-gather")
        assert_matches(compiled(*args), both_ways(case)(*host))


@pytest.mark.parametrize("name", ["sparse_mla", "indexer_logits"])
def test_an_explicit_axis_that_shards_nothing(
    name: str, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """Another Explicit axis shards the batch, and an Auto axis shards the queries."""
    case = next(c for c in CASES if c.name == name)
    host = case.make_args(rng)
    types = (AUTO, EXPLICIT, EXPLICIT)
    mesh = jax.make_mesh((2, 2, 2), ("y", "x", "z"), axis_types=types, devices=cpus)
    with jax.set_mesh(mesh):
        specs = map(crossed, case.specs["batch"], case.specs["query"])
        args = [
            jax.device_put(np.asarray(x), NamedSharding(mesh, spec))
            for x, spec in zip(host, specs, strict=True)
        ]
        compiled = jax.jit(both_ways(case)).lower(*args).compile()
        assert not exchanged(compiled.as_text(), "all-gather")
        assert_matches(compiled(*args), both_ways(case)(*host))


@pytest.mark.parametrize(
    "case",
    [
        c if c.name == "sparse_mla" else slow(c, id=c.name)
        for c in CASES
        if c.name in ("sparse_mla", "topk", "htree_attention")
    ],
    ids=lambda c: c.name,
)
def test_plain_xla_on_an_explicit_mesh(
    case: Any, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    def plain(*args: Any) -> Any:
        with jax_dsa.plain_xla():
            return both_ways(case)(*args)

    host = case.make_args(rng)
    mesh = jax.make_mesh((8,), ("x",), devices=cpus)
    with jax.set_mesh(mesh):
        for route in ("batch", "query"):
            pairs = zip(host, case.specs[route], strict=True)
            args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
            compiled = jax.jit(plain).lower(*args).compile()
            assert not exchanged(compiled.as_text(), "all-gather")
            assert_matches(compiled(*args), both_ways(case)(*host))


@pytest.mark.parametrize("spec", [("x",), (None, "y", "x"), ("x", "y"), (None, None, None, "x")])
@pytest.mark.parametrize("kind", MESHES)
def test_rows_with_many_leading_axes(
    kind: str, spec: tuple, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """The rows are those of a bias [B, N, T, S]; their ranges are replicated."""
    x = rng.normal(size=(2, 4, 8, 6)).astype(np.float32)
    ends = rng.integers(0, 7, x.shape[:-1]).astype(np.int32)

    def run(x: Any) -> Any:
        values = lambda x: jax_dsa.topk(x, 3, ends=ends, return_values=True)  # noqa: E731
        (_, found), pull = jax.vjp(values, x)
        grad = pull((np.zeros(found.shape, jax.dtypes.float0), jnp.ones_like(found)))
        return values(x), grad, jax_dsa.topk_mask(x, 2), jax_dsa.topk_indices(x, 2)

    want = jax.tree.map(np.asarray, run(x))
    axis_type, context = MESHES[kind]
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2, devices=cpus[:4])
    with context(mesh):
        given = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        jax.tree.map(np.testing.assert_array_equal, jax.jit(run)(given), want)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "explicit-of-types"])
@pytest.mark.parametrize("mapped", [None, "x"], ids=["replicated", "sharded"])
@pytest.mark.parametrize("case", [c for c in CASES if c.diff], ids=lambda c: c.name)
def test_vmap_on_an_explicit_mesh(
    case: Any, mapped: str | None, kind: str, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """vmap, vmap(grad) and grad(vmap) over an axis that is sharded or replicated, of a call whose
    batch is sharded.
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
    with MESHES[kind][1](mesh):
        pairs = zip(host, specs, strict=True)
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
        assert_matches(jax.jit(all_three)(*args), want)


WHOLE = {
    # 24 heads in 3 groups: eight devices divide neither the groups nor the 8 heads of a group.
    "heads": (
        lambda q, kv, i: jax_dsa.sparse_mla(q, kv, i, value_dim=4, return_lse=True),
        [(2, 4, 24, 6), (2, 5, 3, 6)],
        [PartitionSpec(None, None, "x"), PartitionSpec(), PartitionSpec()],
    ),
    "heads that select together": (
        lambda q, k, i: jax_dsa.htree_attention(q, k, k, compression=2, top_k=2, return_lse=True),
        [(2, 9, 16, 4), (2, 9, 2, 4)],
        [PartitionSpec(None, None, "x"), PartitionSpec(), PartitionSpec()],
    ),
    "keys that are selected": (
        lambda q, kv, i: jax_dsa.sparse_mla(q, kv, i, value_dim=4, return_lse=True),
        [(2, 4, 3, 6), (2, 8, 3, 6)],
        [PartitionSpec(), PartitionSpec(None, "x"), PartitionSpec()],
    ),
    "keys by position": (
        lambda q, k, i: (jnp.exp(jax_dsa.indexer_logits(q, k, q[..., 0], is_causal=True)),),
        [(2, 5, 3, 6), (2, 8, 6)],
        [PartitionSpec(), PartitionSpec(None, "x"), PartitionSpec()],
    ),
    "columns of a block": (
        lambda x, y, i: (jax_dsa.fake_quantize_fp8(x) ** 2, jnp.sin(y)),
        [(3, 256), (2, 2)],
        [PartitionSpec(None, "x"), PartitionSpec(), PartitionSpec()],
    ),
    "a row's values": (
        lambda x, y, i: (jax_dsa.topk(x, 3, return_values=True)[1], jnp.sin(y)),
        [(3, 16), (2, 2)],
        [PartitionSpec(None, "x"), PartitionSpec(), PartitionSpec()],
    ),
    # The rows of both operands are sharded by one axis, but the product can keep only one.
    "rows of both": (
        lambda a, b, i: (jax_dsa.fp8_matmul(a, None, b, None),),
        [(8, 256), (1024, 256)],
        [PartitionSpec("x"), PartitionSpec("x"), PartitionSpec()],
    ),
}


@pytest.mark.parametrize("kind", [slow("auto"), "explicit", slow("explicit-of-types")])
@pytest.mark.parametrize("case", WHOLE)
def test_what_a_mesh_does_not_divide(
    case: str, kind: str, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """What cannot be divided is replicated, and the results are right."""
    fn, shapes, specs = WHOLE[case]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    arrays.append(rng.integers(0, 5, size=(2, 4, 3, 3)).astype(np.int32))
    total = lambda *a: sum(map(weighted, fn(*a)))  # noqa: E731
    run = jax.jit(lambda *a: (fn(*a), jax.grad(total, (0, 1))(*a)))
    want = run(*arrays)
    axis_type, context = MESHES[kind]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,), devices=cpus)
    with context(mesh):
        pairs = zip(arrays, specs, strict=True)
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
        assert_matches(run(*args), want)


def test_calls_outside_of_jit_find_the_mesh_in_the_types(
    rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """Operators with one pass, with several, and with constants that are not on the mesh."""
    mesh = jax.make_mesh((4,), ("x",), devices=cpus[:4])
    q, keys = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 6, 2, 8), (4, 9, 1, 8)))
    indices = rng.integers(0, 9, (4, 6, 1, 5)).astype(np.int32)
    host = q, keys, indices

    def run(q: Any, keys: Any, indices: Any) -> Any:
        return (
            jax_dsa.topk(q, 3),
            jax_dsa.sparse_mla(q, keys, indices, value_dim=4),
            jax_dsa.mqa_decode(q, keys, value_dim=4),
            jax_dsa.masked_attention(q, keys, keys, is_causal=True),
            jax.vmap(lambda q, k: jax_dsa.masked_attention(q, k, k))(q, keys),
        )

    sharded = NamedSharding(mesh, PartitionSpec("x"))
    got = run(*(jax.device_put(x, sharded) for x in host))
    assert_matches(got, run(*map(jnp.asarray, host)))
    assert all(x.sharding.is_equivalent_to(sharded, x.ndim) for x in got)


@pytest.mark.parametrize("kind", MESHES)
def test_rows_without_a_selected_value(
    kind: str, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """The empty results are constants in XLA, and not in the kernel."""
    axis_type, context = MESHES[kind]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,), devices=cpus[:2])
    x = rng.normal(size=(2, 4, 6)).astype(np.float32)
    with context(mesh):
        given = jax.device_put(x, NamedSharding(mesh, PartitionSpec("x")))
        indices, values = jax.jit(lambda x: jax_dsa.topk(x, 0, return_values=True))(given)
    assert indices.shape == values.shape == (2, 4, 0)


def test_empty_results_without_a_batch_axis(cpus: list[jax.Device]) -> None:
    """On Explicit axes, outside of `jax.jit`, JAX cannot index an empty array."""
    mesh = jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=cpus[:2]
    )
    x = jax.device_put(np.zeros((4, 6), np.float32), NamedSharding(mesh, PartitionSpec("x")))
    assert jax_dsa.block_topk(x, 0, block_size=2).shape == (4, 0)


@pytest.mark.parametrize("kind", MESHES)
def test_gradients_of_a_tree_of_one_layer(
    kind: str, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """It selects nothing: XLA of JAX 0.11 crashes on an empty operand of a `shard_map`."""
    axis_type, context = MESHES[kind]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,), devices=cpus[:2])
    q = rng.normal(size=(1, 8, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, 8, 2, 8)).astype(np.float32)

    @jax.jit
    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return (jax_dsa.htree_attention(q, k, v, compression=8, top_k=2) ** 2).sum()

        return jax.grad(run, (0, 1, 2))(q, k, v)

    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    with context(mesh):
        got = gradients(*(jax.device_put(x, sharding) for x in (q, k, v)))
    assert_matches(got, gradients(q, k, v))


@pytest.mark.parametrize(("tokens", "keys"), [(0, 0), (0, 4), (4, 0)])
def test_gradients_without_queries_or_keys(
    tokens: int, keys: int, rng: np.random.Generator, cpus: list[jax.Device]
) -> None:
    """XLA rejects the reduce-scatter of the gradient of no keys."""
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2,), ("x",), axis_types=(explicit,), devices=cpus[:2])
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    q = jax.device_put(rng.normal(size=(2, tokens, 4, 8)).astype(np.float32), sharding)
    k = jax.device_put(rng.normal(size=(2, keys, 2, 8)).astype(np.float32), sharding)
    run = jax.jit(jax.grad(lambda q, k: jax_dsa.masked_attention(q, k, k).sum(), (0, 1)))
    dq, dk = run(q, k)
    assert (dq.shape, dk.shape) == (q.shape, k.shape)
    assert (jax.typeof(dq).sharding.spec, jax.typeof(dk).sharding.spec) == (
        jax.typeof(q).sharding.spec,
        jax.typeof(k).sharding.spec,
    )
    if dq.size:
        np.testing.assert_array_equal(dq, 0)
