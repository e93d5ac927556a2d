"""`mqa_decode_plan`, and calls of `mqa_decode` with a plan or with static splits."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.compare import assert_as_good_as, assert_matches

from jax_dsa import FlatCache, MqaDecodePlan, PagedCache, mqa_decode, mqa_decode_plan
from jax_dsa.ops.mqa_decode import cuda
from jax_dsa.ops.mqa_decode.spec import Operands, Options, PlanOperands, PlanOptions, Results

gpu = pytest.mark.gpu
SIZES: dict[str, Any] = {"num_heads": 8, "dim": 32}
LENGTHS = jnp.array([9, 4, 0], jnp.int32)


def queries_and_keys(rng: np.random.Generator, layers: int = 2) -> tuple[Any, Any]:
    q = rng.standard_normal((3, 1, 8, 32), np.float32)
    return jnp.asarray(q), jnp.asarray(rng.standard_normal((layers, 3, 9, 1, 32), np.float32))


def decode(q: Any, k: Any, plan: Any = None, lengths: Any = LENGTHS, **options: Any) -> Any:
    return mqa_decode(q, k, key_value_seq_lengths=lengths, plan=plan, **options)


def test_one_plan_for_all_layers(rng: np.random.Generator) -> None:
    """A plan is made once, also if the layers are a scan, and changes no result."""
    q, keys = queries_and_keys(rng)

    @functools.partial(jax.jit, static_argnums=3)
    def step(q: Any, keys: Any, lengths: Any, planned: bool) -> Any:
        plan = mqa_decode_plan(lengths, **SIZES) if planned else None
        return jax.lax.scan(lambda q, k: (decode(q, k, plan, lengths), None), q, keys)[0]

    got, want = (step(q, keys, LENGTHS, planned) for planned in (True, False))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_a_plan_is_an_argument_of_programs(rng: np.random.Generator) -> None:
    q, (k, _) = queries_and_keys(rng)
    plan = mqa_decode_plan(LENGTHS, **SIZES)
    want = decode(q, k)
    np.testing.assert_array_equal(np.asarray(jax.jit(decode)(q, k, plan)), np.asarray(want))
    grads = jax.grad(lambda q, plan: decode(q, k, plan).sum())
    np.testing.assert_array_equal(np.asarray(grads(q, plan)), np.asarray(grads(q, None)))


def test_under_vmap(rng: np.random.Generator) -> None:
    q, keys = queries_and_keys(rng, 4)
    lengths = jnp.stack([LENGTHS, LENGTHS[::-1], LENGTHS, LENGTHS])
    plans = jax.vmap(functools.partial(mqa_decode_plan, **SIZES))(lengths)
    assert plans.ranges.shape == (4, 264, 8) and plans.batch == 3
    want = jnp.stack([decode(q, k, None, n) for k, n in zip(keys, lengths, strict=True)])
    got = jax.vmap(decode, in_axes=(None, 0, 0, 0))(q, keys, plans, lengths)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-6)
    shared = jax.tree.map(lambda x: x[0], plans)
    got = jax.vmap(decode, in_axes=(None, 0, None, 0))(q, keys, shared, lengths)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-6)


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["requests", "heads"])
def test_on_a_mesh(spec: Any, rng: np.random.Generator) -> None:
    """A plan for all requests and heads serves a sharded call."""
    mesh = jax.make_mesh((2,), ("x",))
    q = jnp.asarray(rng.standard_normal((4, 1, 8, 32), np.float32))
    k = jnp.asarray(rng.standard_normal((4, 9, 1, 32), np.float32))
    lengths = jnp.array([9, 4, 0, 2], jnp.int32)
    plan = mqa_decode_plan(lengths, **SIZES)
    with jax.set_mesh(mesh):
        got = jax.jit(decode)(jax.device_put(q, spec), k, plan, lengths)
    np.testing.assert_allclose(
        np.asarray(got), np.asarray(decode(q, k, None, lengths)), rtol=1e-6, atol=1e-6
    )


def test_one_request_without_a_batch_axis(rng: np.random.Generator) -> None:
    q, (k, _) = queries_and_keys(rng)
    plan = mqa_decode_plan(LENGTHS[0], **SIZES)
    assert plan.batch == 1 and plan.ranges.shape == (264, 8)
    assert mqa_decode(q[0], k[0], plan=plan).shape == (1, 8, 32)


MISUSE = {
    "lengths": (lambda: mqa_decode_plan(jnp.zeros((2, 2, 1), int), **SIZES), ValueError, "shape"),
    "lengths dtype": (lambda: mqa_decode_plan(jnp.ones(2), **SIZES), TypeError, "float32"),
    "heads": (lambda: mqa_decode_plan(LENGTHS, num_heads=0), ValueError, "'num_heads' is 0"),
    "groups": (
        lambda: mqa_decode_plan(LENGTHS, num_heads=8, groups=3),
        ValueError,
        "'num_heads' is 8, want a multiple of groups=3",
    ),
    "queries": (
        lambda: mqa_decode_plan(LENGTHS, num_heads=8, queries=2.0),  # type: ignore[arg-type]
        TypeError,
        "'queries' is 2.0",
    ),
    "dim": (lambda: mqa_decode_plan(LENGTHS, num_heads=8, dim=0), ValueError, "'dim' is 0"),
    "fp8": (
        lambda: mqa_decode_plan(LENGTHS, num_heads=8, fp8=1),  # type: ignore[arg-type]
        TypeError,
        "'fp8' is 1",
    ),
    "records": (
        lambda: mqa_decode_plan(LENGTHS, num_heads=8, dim=96, fp8=True),
        ValueError,
        r"'dim' is 96, want one of \(576, 512\), with fp8=True",
    ),
    "symbol": (
        lambda: mqa_decode_plan(LENGTHS, num_heads=8, queries=jax.export.symbolic_shape("t")[0]),
        TypeError,
        "'queries' is t .*, want an int, no symbol: export once for each size",
    ),
    "starts": (
        lambda: mqa_decode_plan(LENGTHS, **SIZES, starts=jnp.zeros(2, int)),
        ValueError,
        "'starts'",
    ),
    "window": (
        lambda: mqa_decode_plan(LENGTHS, **SIZES, local_window_size=-1),
        ValueError,
        "'local_window_size' is -1",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), MISUSE.values(), ids=MISUSE.keys())
def test_misuse(call: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=f"mqa_decode_plan: .*{message}"):
        call()


def test_a_plan_for_symbolic_sizes_cannot_be_stored() -> None:
    batch = jax.export.symbolic_shape("b")
    plan = jax.jit(lambda lengths: mqa_decode_plan(lengths, num_heads=8))
    exported = jax.export.export(plan)(jax.ShapeDtypeStruct(batch, jnp.int32))
    with pytest.raises(ValueError, match=r"MqaDecodePlan with the sizes .* no symbols"):
        exported.serialize()


def test_misuse_of_a_plan(rng: np.random.Generator) -> None:
    q, (k, _) = queries_and_keys(rng)
    plan = mqa_decode_plan(LENGTHS, **SIZES)
    for sizes in ({"num_heads": 16}, {"queries": 2}, {"dim": 64}, {"dim": 576, "fp8": True}):
        with pytest.raises(ValueError, match=r"'plan' was made for .*want one for B=3, T=1, N=8"):
            decode(q, k, mqa_decode_plan(LENGTHS, **SIZES | sizes))
    with pytest.raises(ValueError, match="'plan' was made for B=2"):
        decode(q, k, mqa_decode_plan(LENGTHS[:2], **SIZES))
    with pytest.raises(TypeError, match=r"'plan' is .*, want the result of mqa_decode_plan"):
        decode(q, k, plan.ranges)
    for ranges, error in ((plan.ranges[1:], ValueError), (plan.ranges * 1.0, TypeError)):
        with pytest.raises(error, match=r"mqa_decode: argument 'plan\.ranges'"):
            decode(q, k, MqaDecodePlan(ranges, *plan.sizes))


def test_ffi_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes the plan for all of its requests. Under vmap there is none."""
    calls: list[Any] = []

    def call(target: str, operands: Any, avals: Any, **attrs: Any) -> Any:
        calls.append((target, operands, attrs))
        return [jnp.zeros(a.shape, a.dtype) for a in avals]

    extension = SimpleNamespace(mqa_decode_workspace=lambda **_: (1000, 264))
    monkeypatch.setattr(cuda, "ffi", SimpleNamespace(call=call, extension=lambda: extension))
    q, k = jnp.zeros((5, 2, 64, 576), jnp.bfloat16), jnp.zeros((5, 90, 1, 576), jnp.bfloat16)
    each = jnp.zeros((5, 2), jnp.int32)
    row = jax.ShapeDtypeStruct((5, 2, 64), jnp.float32)
    avals: Any = Results(jax.ShapeDtypeStruct((5, 2, 64, 512), q.dtype), row, row)  # type: ignore[arg-type]
    for plans in (1, 5):
        plan = jnp.zeros((plans, 264, 8), jnp.int32)
        x = Operands(q, k, None, each, each, None, None, plan)
        cuda.mqa_decode_fwd(Options(0.1, 512, None, normalize=True), avals, x)
    assert calls[0][1][-1].shape == (1, 264, 8) and calls[1][1][-1] is None
    options = PlanOptions(64, 1, 576, records=False)
    ranges = jax.ShapeDtypeStruct((1, 264, 8), jnp.int32)
    cuda.mqa_decode_plan(options, (ranges,), PlanOperands(each[None], each[None]))  # type: ignore[arg-type]
    assert calls[2][0] == "jax_dsa.mqa_decode_plan.v1"
    assert calls[2][2] == {"heads": 64, "groups": 1, "dim": 576, "records": False}
    assert "got 96" in (
        cuda.supports_plan(PlanOptions(64, 1, 96, False), PlanOperands(*[each] * 2)) or ""
    )


# ---- on a GPU ------------------------------------------------------------------------------------


def inputs(
    rng: np.random.Generator, *, b: int, t: int, s: int, n: int, g: int = 1, d: int = 576
) -> tuple[Any, ...]:
    """Returns bfloat16 q, k and (for D < 512) v, and lengths. Keys that no query sees are NaN."""
    lengths = rng.integers(0, s + 1, b).astype(np.int32)
    lengths[0] = s
    rows = [rng.standard_normal((b, s, g, d), np.float32) for _ in range(1 if d >= 512 else 2)]
    for x in rows:
        x[np.arange(s) >= lengths[:, None]] = np.nan
    q = rng.standard_normal((b, t, n, d), np.float32)
    return *(jnp.asarray(x, jnp.bfloat16) for x in (q, *rows)), jnp.asarray(lengths)


def sizes_of(q: Any, k: Any, **changes: Any) -> dict[str, Any]:
    own = {"num_heads": q.shape[2], "queries": q.shape[1], "groups": k.shape[2], "dim": q.shape[3]}
    return own | changes


# Calls that are divided by static splits, and calls that take a plan.
SHAPES = {
    "static, one request": {"b": 1, "t": 1, "s": 640, "n": 128},
    "static, one long request": {"b": 1, "t": 1, "s": 9000, "n": 128},
    "static, 8 requests": {"b": 8, "t": 1, "s": 2048, "n": 128},
    "static, whole": {"b": 64, "t": 1, "s": 200, "n": 128},
    "static, few heads": {"b": 3, "t": 2, "s": 1500, "n": 8},
    "static, D 128": {"b": 2, "t": 1, "s": 900, "n": 32, "g": 8, "d": 128},
    "8 requests": {"b": 8, "t": 1, "s": 8192, "n": 128},
    "70 requests": {"b": 70, "t": 1, "s": 1500, "n": 128},
    "300 requests": {"b": 300, "t": 1, "s": 500, "n": 128},
    "queries": {"b": 9, "t": 5, "s": 3000, "n": 50},
    "few heads": {"b": 70, "t": 1, "s": 3000, "n": 16},
    "D 128": {"b": 40, "t": 1, "s": 2000, "n": 32, "g": 8, "d": 128},
}


@gpu
@pytest.mark.parametrize("name", SHAPES)
def test_values(name: str, rng: np.random.Generator) -> None:
    """Each shape with its plan, with a plan for other lengths, and without one."""
    q, k, *v, lengths = inputs(rng, **SHAPES[name])
    own = mqa_decode_plan(lengths, **sizes_of(q, k))
    other = mqa_decode_plan(lengths[::-1] // 2, **sizes_of(q, k))

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation: str, plan: Any, *arrays: Any) -> Any:
        held = {"key_value_seq_lengths": lengths, "return_lse": True, "plan": plan}
        return mqa_decode(*arrays, **held, implementation=implementation)

    low, _ = run("xla", None, q, k, *v)
    exact, exact_lse = run("xla", None, *(x.astype(jnp.float32) for x in (q, k, *v)))
    for plan in (None, own, other):
        out, lse = run("cuda", plan, q, k, *v)
        assert_as_good_as(out, low, exact, what="out")
        assert_matches(lse, exact_lse, tol=2e-5, what="lse")
        again, _ = run("cuda", plan, q, k, *v)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(out))


@gpu
def test_a_plan_has_every_key_once(rng: np.random.Generator) -> None:
    """Each range begins where the one before it ends."""
    for b, s, heads in ((1, 9000, 128), (70, 1500, 128), (40, 8192, 16), (300, 500, 64)):
        lengths = jnp.asarray(rng.integers(0, s + 1, b), jnp.int32)
        plan = np.asarray(mqa_decode_plan(lengths, num_heads=heads, implementation="cuda").ranges)
        plan = plan[plan[:, 7] != 0]
        assert (plan[:, 6] == len(plan)).all()
        at = (0, 0)  # the next work tile and key tile
        for first, last, start, end, *_ in plan.tolist():
            if last < first:
                continue
            assert (first, start) == at
            at = (last + 1, 0) if end == 2**31 - 1 else (last, end)
        assert at == (b, 0)


@gpu
@pytest.mark.parametrize("content", ["noise", "forged"])
def test_a_wrong_plan_does_no_harm(content: str, rng: np.random.Generator) -> None:
    """Noise is no plan. A forged one may give any result, but it ends."""
    q, k, lengths = inputs(rng, b=20, t=1, s=3000, n=128)
    plan = mqa_decode_plan(lengths, **sizes_of(q, k))
    ranges = rng.integers(-(2**31), 2**31, plan.ranges.shape).astype(np.int32)
    if content == "forged":
        ranges[:, :5] %= 40
        ranges[:, 5:] = np.asarray(plan.ranges)[:, 5:]
    call = functools.partial(mqa_decode, q, k, key_value_seq_lengths=lengths, implementation="cuda")
    got = np.asarray(call(plan=MqaDecodePlan(jnp.asarray(ranges), *plan.sizes)))
    if content == "noise":
        np.testing.assert_array_equal(got, np.asarray(call()))


@gpu
@pytest.mark.parametrize("b", [2, 30])
def test_layers_in_a_replayed_program(b: int, rng: np.random.Generator) -> None:
    """XLA replays programs as CUDA graphs: new lengths give a new plan and new static splits."""
    s = 600 if b == 2 else 3000

    @jax.jit
    def step(q: Any, keys: Any, lengths: Any) -> Any:
        plan = mqa_decode_plan(lengths, num_heads=64)

        def layer(q: Any, k: Any) -> Any:
            out = mqa_decode(q, k, key_value_seq_lengths=lengths, plan=plan)
            return jnp.pad(out, ((0, 0), (0, 0), (0, 0), (0, 64))), None

        return jax.lax.scan(layer, q, keys)[0]

    for _ in range(5):
        q, k, lengths = inputs(rng, b=b, t=1, s=s, n=64)
        want = q
        plan = mqa_decode_plan(lengths, num_heads=64)
        for _ in range(3):
            out = mqa_decode(want, k, key_value_seq_lengths=lengths, plan=plan)
            want = jnp.pad(out, ((0, 0), (0, 0), (0, 0), (0, 64)))
        got = step(q, jnp.stack([k] * 3), lengths)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@gpu
@pytest.mark.parametrize("paged", [False, True], ids=["flat", "paged"])
def test_records(paged: bool, rng: np.random.Generator) -> None:
    q, k, lengths = inputs(rng, b=7, t=1, s=768, n=128)
    cache: Any = FlatCache.empty(7, 768, fp8=True)
    if paged:
        cache = PagedCache.empty(7 * 12, 64, 7, 12, fp8=True)
        cache = cache.with_page_table(jnp.arange(7 * 12, dtype=jnp.int32).reshape(7, 12))
    cache = cache.append(jnp.nan_to_num(k)).with_lengths(lengths)
    plan = mqa_decode_plan(lengths, num_heads=128, fp8=True)
    got, want = (mqa_decode(q, cache, plan=p, implementation="cuda") for p in (plan, None))
    assert_matches(got.astype(jnp.float32), want.astype(jnp.float32), tol=1e-2)
