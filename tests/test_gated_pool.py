"""Pooling: XLA against loops in float64, and the kernels against XLA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax.test_util import check_grads
from support.compare import assert_as_good_as, assert_matches, assert_unmoved
from support.oracles.gated_pool import mean_pooled, pooled

import jax_dsa
from jax_dsa import gated_pool, mean_pool
from jax_dsa.ops.gated_pool import gated_pool_for_norm


def documents(rng: np.random.Generator, batch: int, length: int, density: float) -> np.ndarray:
    """Returns the first row of each token's document.

    A row begins a document with probability `density`.
    """
    begins = np.where(rng.random((batch, length)) < density, np.arange(length), 0)
    return np.maximum.accumulate(begins, axis=1).astype(np.int32)


def inputs(
    rng: np.random.Generator, shape: tuple[int, ...], ratio: int, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array, jax.Array]:
    values, gates = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    return values, gates, jnp.asarray(rng.standard_normal((ratio, *shape[2:])), jnp.float32)


@functools.partial(jax.jit, static_argnames="implementation")
def both_ways(
    values: Any, gates: Any, bias: Any, starts: Any, ct: Any, implementation: str | None = None
) -> Any:
    pool = functools.partial(gated_pool, starts=starts, implementation=implementation)
    keys, pull = jax.vjp(pool, values, gates, bias)
    return keys, *pull(ct.astype(keys.dtype))


@functools.partial(jax.jit, static_argnames="implementation")
def both_ways_for_norm(
    values: Any,
    gates: Any,
    bias: Any,
    scale: Any,
    starts: Any,
    cts: Any,
    implementation: str | None = None,
) -> Any:
    pool = functools.partial(gated_pool_for_norm, starts=starts, implementation=implementation)
    results, pull = jax.vjp(pool, values, gates, bias, scale)
    return *results, *pull((cts[0].astype(values.dtype), cts[1]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_keys_and_gradients(
    ratio: int, halves: int, packed: bool, rng: np.random.Generator
) -> None:
    args = inputs(rng, (3, 23, halves, 5), ratio)
    starts = documents(rng, 3, 23, 0.2 if packed else 0)
    given = jnp.asarray(starts) if packed else None
    want = pooled(*args, starts)
    ct = jnp.asarray(rng.standard_normal(want.shape), jnp.float32)
    keys, *grads = both_ways(*args, given, ct)
    assert_matches(keys, jnp.asarray(want, jnp.float32), tol=1e-6)
    with jax_dsa.plain_xla():  # JAX's own derivative
        _, pull = jax.vjp(functools.partial(gated_pool, starts=given), *args)
        assert_matches(grads, list(pull(ct)), tol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_keys_for_a_norm(packed: bool, rng: np.random.Generator) -> None:
    args = inputs(rng, (3, 23, 2, 5), 4)
    scale = jnp.asarray(rng.standard_normal(5), jnp.float32)
    starts = documents(rng, 3, 23, 0.2 if packed else 0)
    given = jnp.asarray(starts) if packed else None
    want = pooled(*args, starts)
    cts = tuple(
        jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in (want, want[..., 0])
    )
    keys, squares, *grads = both_ways_for_norm(*args, scale, given, cts)
    assert_matches(keys, jnp.asarray(want * np.asarray(scale), jnp.float32), tol=1e-6)
    assert_matches(squares, jnp.asarray((want**2).sum(-1), jnp.float32), tol=1e-6)
    with jax_dsa.plain_xla():  # JAX's own derivative
        _, pull = jax.vjp(functools.partial(gated_pool_for_norm, starts=given), *args, scale)
        assert_matches(grads, list(pull(cts)), tol=1e-5)


def test_documents_do_not_influence_each_other(rng: np.random.Generator) -> None:
    values, gates, bias = inputs(rng, (1, 40, 2, 8), 4)
    starts = jnp.asarray(np.repeat([0, 9, 11, 30], [9, 2, 19, 10]), jnp.int32)[None]
    keys = gated_pool(values, gates, bias, starts)
    for start, end in ((0, 9), (9, 11), (11, 30), (30, 40)):
        alone = gated_pool(values[:, start:end], gates[:, start:end], bias)
        first = start // 4
        np.testing.assert_array_equal(keys[:, first : first + alone.shape[1]], alone)


def test_nan_in_unused_contributions_reaches_no_result(rng: np.random.Generator) -> None:
    values, gates, bias = inputs(rng, (1, 22, 2, 8), 4)
    starts = jnp.asarray(np.repeat([0, 7, 13], [7, 6, 9]), jnp.int32)[None]
    # No key uses the first halves of a document's last block, nor the rows after that block.
    unused = np.zeros((1, 22, 2, 8), bool)
    unused[:, [4, 5, 6, 11, 12, 21]] = True
    unused[:, [0, 1, 2, 3, 7, 8, 9, 10, 17, 18, 19, 20], 0] = True
    ct = jnp.asarray(rng.standard_normal((1, 5, 8)), jnp.float32)
    want = both_ways(values, gates, bias, starts, ct)
    spoilt = (jnp.where(unused, jnp.nan, x) for x in (values, gates))
    got = both_ways(*spoilt, bias, starts, ct)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.any(np.asarray(got[1])[unused]) and np.all(np.asarray(got[1])[~unused])


def test_fewer_tokens_than_a_block(rng: np.random.Generator) -> None:
    values, gates, bias = inputs(rng, (2, 3, 2, 8), 4)
    starts = jnp.asarray(documents(rng, 2, 3, 0.5))
    keys, *grads = both_ways(values, gates, bias, starts, jnp.zeros((2, 0, 8)))
    assert keys.shape == (2, 0, 8)
    assert not any(np.any(np.asarray(g)) for g in grads)


def test_fewer_tokens_than_a_block_on_a_mesh(cpus: list[jax.Device]) -> None:
    mesh = jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=cpus[:2]
    )
    values = jax.device_put(jnp.ones((1, 2, 2, 4)), NamedSharding(mesh, PartitionSpec(None, "x")))
    with jax.set_mesh(mesh):
        grads = jax.jit(jax.grad(lambda v: jnp.sum(gated_pool(v, v, jnp.ones((3, 2, 4))))))(values)
    assert not np.any(np.asarray(grads))


def test_bad_input(rng: np.random.Generator) -> None:
    values, gates, bias = inputs(rng, (1, 8, 2, 4), 4)
    with pytest.raises(ValueError, match=r"gated_pool: argument 'values' .*want H of 1 or 2"):
        gated_pool(*(jnp.ones((1, 8, 3, 4)),) * 2, jnp.ones((4, 3, 4)))
    with pytest.raises(ValueError, match=r"'bias' has shape \(4, 1, 4\), want .*H=2"):
        gated_pool(values, gates, bias[:, :1])
    with pytest.raises(TypeError, match="'gates' has dtype bfloat16, want float32"):
        gated_pool(values, gates.astype(jnp.bfloat16), bias)
    with pytest.raises(ValueError, match=r"'bias' has shape \(0, 2, 4\), want R >= 1"):
        gated_pool(values, gates, bias[:0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("halves", [0, 1, 2])
def test_gradients_against_finite_differences(
    halves: int, packed: bool, rng: np.random.Generator
) -> None:
    """Without halves, it is the mean."""
    with jax.enable_x64(True):
        shape = (2, 14, max(halves, 1), 3)
        args = tuple(jnp.asarray(x, jnp.float64) for x in inputs(rng, shape, 3))
        starts = jnp.asarray(documents(rng, 2, 14, 0.2)) if packed else None

        def pool(values: Any, *others: Any) -> Any:
            if halves:
                return gated_pool(values, *others, starts)
            return mean_pool(values[:, :, 0], 3, starts)

        args = args if halves else args[:1]
        assert pool(*args).dtype == jnp.float64
        check_grads(jax.jit(pool), args, order=1, modes=["rev"], atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_mean(ratio: int, packed: bool, dtype: Any, rng: np.random.Generator) -> None:
    """The mean has exactly the bits of the sum in this order."""
    values = jnp.asarray(rng.standard_normal((3, 23, 5)), dtype)
    starts = documents(rng, 3, 23, 0.2 if packed else 0)
    run = functools.partial(mean_pool, ratio=ratio, starts=jnp.asarray(starts) if packed else None)
    keys, pull = jax.vjp(jax.jit(run), values)
    want = mean_pooled(np.asarray(values, np.float32), ratio, starts, np.float32)
    np.testing.assert_array_equal(keys, want.astype(dtype))
    ct = jnp.asarray(rng.standard_normal(keys.shape), dtype)
    (dvalues,) = pull(ct)
    want = np.zeros(values.shape, np.float32)
    for b in range(3):
        for t in range(23):
            start = starts[b, t]
            number = (t - start) // ratio
            if (number + 1) * ratio <= np.sum(starts[b] == start):
                want[b, t] = np.float32(ct[b, start // ratio + number]) * np.float32(1 / ratio)
    np.testing.assert_array_equal(dvalues, want.astype(dtype))


def test_mean_is_gated_pooling_with_equal_gates(rng: np.random.Generator) -> None:
    values, gates, bias = inputs(rng, (2, 23, 1, 5), 4)
    starts = jnp.asarray(documents(rng, 2, 23, 0.2))
    want = gated_pool(values, 0 * gates, 0 * bias, starts)
    assert_matches(mean_pool(values[:, :, 0], 4, starts), want, 1e-6)


def test_values_in_no_pool_do_not_reach_the_mean(rng: np.random.Generator) -> None:
    values = jnp.asarray(rng.standard_normal((1, 22, 8)), jnp.float32)
    starts = jnp.asarray(np.repeat([0, 7, 13], [7, 6, 9]), jnp.int32)[None]
    spoilt = values.at[:, jnp.array([4, 5, 6, 11, 12, 21])].set(jnp.nan)

    def run(values: Any) -> Any:
        keys, pull = jax.vjp(lambda x: mean_pool(x, 4, starts), values)
        return keys, pull(jnp.cos(keys))

    assert_unmoved(run(values), run(spoilt))


@pytest.mark.parametrize(("length", "slots"), [(0, 0), (3, 0), (4, 1)])
def test_mean_of_few_tokens(length: int, slots: int) -> None:
    values = jnp.ones((2, length, 8), jnp.bfloat16)
    keys, pull = jax.vjp(lambda x: mean_pool(x, 4), values)
    assert keys.shape == (2, slots, 8) and np.all(np.asarray(keys) == 1)
    assert pull(keys)[0].shape == values.shape
    assert_matches(mean_pool(values[0], 4), keys[0], 0)


def test_bad_input_of_the_mean() -> None:
    values = jnp.ones((2, 8, 4))
    with pytest.raises(ValueError, match=r"mean_pool: argument 'values' has shape \(4,\)"):
        mean_pool(values[0, 0], 4)
    with pytest.raises(TypeError, match="mean_pool: argument 'values' has dtype int32"):
        mean_pool(values.astype(jnp.int32), 4)
    with pytest.raises(ValueError, match="mean_pool: argument 'ratio' is 0, want int in 1"):
        mean_pool(values, 0)
    with pytest.raises(TypeError, match=r"mean_pool: argument 'ratio' is 4\.0"):
        mean_pool(values, 4.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mean_pool: argument 'starts' has shape \(8,\)"):
        mean_pool(values, 4, jnp.zeros(8, jnp.int32))


KERNEL_SHAPES = {
    "compressor": ((2, 1003, 2, 512), 4),
    "index keys": ((1, 4096, 2, 128), 4),
    "one half": ((2, 4097, 1, 128), 4),
    "ratio 128": ((2, 1500, 1, 512), 128),
    "ratio 16": ((1, 500, 2, 36), 16),
    "one block": ((1, 4, 2, 8), 4),
    "no block": ((2, 3, 2, 8), 4),
    "many tokens": ((1, 60000, 1, 64), 8),
}


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", KERNEL_SHAPES)
def test_kernels(name: str, dtype: Any, packed: bool, rng: np.random.Generator) -> None:
    """Checks the kernels' accuracy against XLA's, and that a second run returns the same bits."""
    shape, ratio = KERNEL_SHAPES[name]
    args = inputs(rng, shape, ratio, dtype)
    starts = jnp.asarray(documents(rng, *shape[:2], 0.02)) if packed else None
    ct = jnp.asarray(rng.standard_normal((shape[0], shape[1] // ratio, shape[3])), dtype)
    exact = [x.astype(jnp.float32) for x in (*args, ct)]
    want = both_ways(*exact[:3], starts, exact[3], implementation="xla")
    low = both_ways(*args, starts, ct, implementation="xla")
    got = both_ways(*args, starts, ct, implementation="cuda")
    for what, g, o, w in zip(("keys", "values", "gates", "bias"), got, low, want, strict=True):
        assert g.dtype == o.dtype
        if dtype == jnp.float32 or what == "bias":
            assert_matches(g, o, tol=1e-4 if what == "bias" else 5e-6, what=what)
        else:
            assert_as_good_as(g, o, w, what=what)
    again = both_ways(*args, starts, ct, implementation="cuda")
    jax.tree.map(np.testing.assert_array_equal, got, again)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", KERNEL_SHAPES)
def test_kernels_for_a_norm(name: str, dtype: Any, packed: bool, rng: np.random.Generator) -> None:
    """Checks the kernels' accuracy against XLA's, and that a second run returns the same bits."""
    shape, ratio = KERNEL_SHAPES[name]
    args = inputs(rng, shape, ratio, dtype)
    scale = jnp.asarray(rng.standard_normal(shape[3]), jnp.float32)
    starts = jnp.asarray(documents(rng, *shape[:2], 0.02)) if packed else None
    slots = shape[0], shape[1] // ratio
    cts = tuple(
        jnp.asarray(rng.standard_normal(x), dtype).astype(jnp.float32)
        for x in ((*slots, shape[3]), slots)
    )
    exact = [x.astype(jnp.float32) for x in args]
    want = both_ways_for_norm(*exact, scale, starts, cts, implementation="xla")
    low = both_ways_for_norm(*args, scale, starts, cts, implementation="xla")
    got = both_ways_for_norm(*args, scale, starts, cts, implementation="cuda")
    names = "keys", "squares", "values", "gates", "bias", "scale"
    for what, g, o, w in zip(names, got, low, want, strict=True):
        assert g.dtype == o.dtype
        if g.dtype == jnp.float32:
            is_sum = what in ("squares", "bias", "scale")
            assert_matches(g, o, tol=1e-4 if is_sum else 1e-5, what=what)
        else:
            assert_as_good_as(g, o, w, what=what)
    again = both_ways_for_norm(*args, scale, starts, cts, implementation="cuda")
    jax.tree.map(np.testing.assert_array_equal, got, again)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", KERNEL_SHAPES)
def test_kernels_of_the_mean(name: str, dtype: Any, packed: bool, rng: np.random.Generator) -> None:
    """They add the same values in the same order as XLA. NaN in no pool reaches no result."""
    shape, ratio = KERNEL_SHAPES[name]
    values = rng.standard_normal((*shape[:2], shape[3]))
    starts = documents(rng, *shape[:2], 0.02 if packed else 0)
    ct = jnp.asarray(rng.standard_normal((shape[0], shape[1] // ratio, shape[3])), dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def both(implementation: str, values: Any) -> Any:
        given = jnp.asarray(starts) if packed else None
        pool = functools.partial(
            mean_pool, ratio=ratio, starts=given, implementation=implementation
        )
        keys, pull = jax.vjp(pool, values)
        return keys, *pull(ct)

    expected = both("xla", jnp.asarray(values, dtype))
    unused = np.all(np.asarray(expected[1]) == 0, axis=-1, keepdims=True)
    got = both("cuda", jnp.asarray(np.where(unused, np.nan, values), dtype))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.gpu
def test_unsupported_calls_of_the_kernels(rng: np.random.Generator) -> None:
    for shape, ratio, why in (
        ((1, 8, 2, 6), 4, "it takes D in multiples of 4 up to .*, got D=6"),
        ((1, 300, 2, 8), 65, "it takes R H up to 128, got R H=130"),
    ):
        args = inputs(rng, shape, ratio)
        with pytest.raises(NotImplementedError, match=why):
            gated_pool(*args, implementation="cuda")
        starts = np.zeros(shape[:2], np.int32)
        assert_matches(gated_pool(*args), jnp.asarray(pooled(*args, starts), jnp.float32), 1e-5)
    with pytest.raises(NotImplementedError, match="it takes R H up to 128, got R H=200"):
        mean_pool(jnp.ones((1, 400, 8)), 200, implementation="cuda")
