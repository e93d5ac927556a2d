"""`topk` against a stable sort: the same set, element for element."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import Variable
from support.oracles import topk as oracle

import jax_dsa
from jax_dsa import topk
from jax_dsa.core import streaming
from jax_dsa.ops.topk import cuda, xla
from jax_dsa.ops.topk.spec import Operands, Options

INF, NAN = np.inf, np.nan
TINY = float(np.finfo(np.float32).smallest_subnormal)


def check(x, k, starts=None, ends=None):
    """Compares indices and values with the oracle and returns the indices."""
    indices, values = topk(jnp.asarray(x), k, starts=starts, ends=ends, return_values=True)
    expected = oracle.topk(x, k, starts, ends)
    assert indices.dtype == jnp.int32
    np.testing.assert_array_equal(indices, expected)
    assert values.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(values, np.float64), oracle.values(x, expected))
    return np.asarray(indices)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("size", "k"), [(1, 1), (213, 62), (1000, 999)])
def test_random_rows(size, k, dtype, rng):
    check(rng.normal(size=(3, 2, size)).astype(dtype), k)


SPECIAL = [INF, -INF, NAN, -NAN, 0.0, -0.0, TINY, -TINY, 5 * TINY, -5 * TINY, 1.0, -1.0, 3e38]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_special_values_with_many_ties(dtype, rng):
    with np.errstate(over="ignore"):
        x = rng.choice(SPECIAL, size=(40, 67)).astype(dtype)
    x[x == 0] *= rng.choice([-1, 1], size=(x == 0).sum()).astype(dtype)
    check(x, 20)


def test_denormals_are_ordered(rng):
    ladder = np.arange(-50, 50).astype(np.float32) * np.float32(TINY)
    check(rng.permuted(np.tile(ladder, (4, 1)), axis=1), 30)


def test_all_equal():
    for value in (0.0, -0.0, 1.5, INF, -3e38):
        got = check(np.full((2, 517), value, np.float32), 100)
        np.testing.assert_array_equal(got, np.tile(np.arange(100), (2, 1)))


def test_nothing_selectable():
    for value in (-INF, NAN):
        got = check(np.full((2, 40), value, np.float32), 3)
        assert (got == -1).all()


def test_signed_zeros_tie_by_index():
    x = np.array([[-0.0, 0.0, -0.0, 0.0, -1.0]], np.float32)
    np.testing.assert_array_equal(check(x, 2), [[0, 1]])


def test_more_candidates_in_one_coarse_bin_than_a_buffer_holds(rng):
    """16385 values in [1, 1.25) share the sign, the exponent and two bits of the mantissa."""
    x = np.concatenate([rng.uniform(1, 1.25, size=16385), rng.uniform(-1, 1, size=4000)])
    check(rng.permutation(x.astype(np.float32))[None], 2048)


@pytest.mark.parametrize("above", [0, 99, 100, 101])
def test_plateau_of_zeros_across_the_boundary(above, rng):
    """The last of 100 selected values is in or at the edge of a plateau of 0.0, as of a ReLU."""
    x = np.zeros(1501, np.float32)
    x[:above] = rng.uniform(0.1, 1, size=above)
    x[1000:] = -1
    check(rng.permuted(np.tile(x, (3, 1)), axis=1), 100)


def test_ranges(rng):
    x = np.round(rng.normal(size=(6, 5, 77)), 1).astype(np.float32)
    starts = rng.choice([-(2**31), -1, 0, 3, 40, 76, 77, 2**31 - 1], size=(6, 5)).astype(np.int32)
    ends = rng.choice([-(2**31), -1, 0, 4, 41, 76, 77, 2**31 - 1], size=(6, 5)).astype(np.int32)
    for k in (20, 90):
        check(x, k, starts, ends)


def test_values_outside_a_range_do_not_matter(rng):
    x = rng.normal(size=(2, 50)).astype(np.float32)
    x[:, :10], x[:, 40:] = NAN, INF
    starts, ends = np.full(2, 10, np.int32), np.full(2, 40, np.int32)
    assert check(x, 5, starts, ends).min() >= 10


@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 40), (2, 3, 4, 40)])
def test_any_leading_axes(shape, rng):
    x = np.round(rng.normal(size=shape), 1).astype(np.float32)
    ends = rng.integers(0, 41, size=shape[:-1]).astype(np.int32)
    check(x, 7)
    check(x, 7, None, ends)


def test_variables_and_wide_integers(rng):
    x = np.round(rng.normal(size=(2, 3, 40)), 1).astype(np.float32)
    ends = rng.integers(0, 41, size=(2, 3))
    ends[0, 0], ends[1, 1] = 2**40, -(2**40)
    expected = oracle.topk(x, 7, None, ends)
    np.testing.assert_array_equal(topk(x, np.int16(7), ends=ends), expected)
    got = topk(
        Variable(x), 7, starts=Variable(np.zeros_like(ends)), ends=Variable(ends.clip(0, 40))
    )
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [(0, 9), (2, 0, 9), (2, 3, 0), (0,)])
def test_empty_axes(shape):
    got = topk(jnp.zeros(shape), 4)
    assert got.shape == (*shape[:-1], 4)
    assert (np.asarray(got) == -1).all()


def test_k_beyond_the_row_and_k_of_zero():
    x = np.array([[3.0, -INF, 1.0]], np.float32)
    np.testing.assert_array_equal(check(x, 6), [[0, 2, -1, -1, -1, -1]])
    assert topk(jnp.asarray(x), 0).shape == (1, 0)


def test_float64(rng):
    with jax.enable_x64(True):
        x = 1 + np.round(rng.normal(size=(3, 100)), 1) * 1e-14  # All values are equal in float32.
        check(x, 17)


def test_chunks_of_rows_change_nothing(rng, monkeypatch):
    x = np.round(rng.normal(size=(4, 9, 60)), 1).astype(np.float32)
    rows = Operands(x, np.zeros((4, 9), np.int32), np.full((4, 9), 60, np.int32))
    options = Options(top_k=11, size=60, return_values=True)
    for rows_of_budget in (1, 5, 36):  # There are 36 rows: no remainder, a remainder, one chunk.
        monkeypatch.setattr(streaming, "BUDGET", rows_of_budget * 60 * 16)
        indices, values = jax.jit(lambda x: xla.topk_fwd(options, x))(rows)
        expected = oracle.topk(x, 11)
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_array_equal(values, oracle.values(x, expected))


@pytest.mark.gpu
def test_runs_are_identical(rng):
    """Checks the XLA implementation, because additions on a GPU could change their order."""
    x = jnp.asarray(np.round(rng.normal(size=(8, 300)), 1), jnp.float32)
    runs = {np.asarray(topk(x, 50, implementation="xla")).tobytes() for _ in range(20)}
    assert len(runs) == 1


def test_gradient_of_the_values_goes_to_the_selected_positions(rng):
    x = np.round(rng.normal(size=(3, 30)), 1).astype(np.float32)
    ends = np.array([30, 2, 0], np.int32)  # The last two rows have fewer than k candidates.
    weights = rng.normal(size=(3, 5)).astype(np.float32)
    weights[1, 2:], weights[2] = NAN, NAN  # Gradients of empty slots are not used.

    def loss(x):
        return jnp.sum(topk(x, 5, ends=ends, return_values=True)[1] * weights)

    expected = np.zeros((3, 30), np.float32)
    for r, row in enumerate(oracle.topk(x, 5, None, ends)):
        for slot, s in enumerate(row):
            if s >= 0:
                expected[r, s] = weights[r, slot]
    np.testing.assert_array_equal(jax.grad(loss)(jnp.asarray(x)), expected)


X = np.zeros((2, 3, 8), np.float32)
ROWS = np.zeros((2, 3), np.int32)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "topk: argument 'x' is list", lambda: topk([1.0], 1)),
        (TypeError, "topk: argument 'x' has dtype int32", lambda: topk(ROWS, 1)),
        (ValueError, r"topk: argument 'x' has shape \(\)", lambda: topk(np.float32(1), 1)),
        (TypeError, r"topk: argument 'top_k' is 1.0 \(float\)", lambda: topk(X, 1.0)),
        (TypeError, "topk: argument 'top_k' is True", lambda: topk(X, True)),
        (ValueError, "topk: argument 'top_k' is -1, want int in 0..21474", lambda: topk(X, -1)),
        (TypeError, "topk: argument 'starts' is int", lambda: topk(X, 1, starts=0)),
        (TypeError, "argument 'starts' has dtype float32", lambda: topk(X, 1, starts=X[..., 0])),
        (ValueError, "argument 'starts' has shape", lambda: topk(X, 1, starts=ROWS[:1])),
        (ValueError, "argument 'starts' has shape", lambda: topk(X[0, 0], 1, starts=ROWS[0])),
        (ValueError, "argument 'ends' has shape", lambda: topk(X, 1, ends=ROWS[..., None])),
        (TypeError, "argument 'return_values' is 1", lambda: topk(X, 1, return_values=1)),
        (ValueError, "'implementation' is 'gpu'", lambda: topk(X, 1, implementation="gpu")),
        (
            NotImplementedError,
            "implementation='xla'",
            lambda: topk(X.astype(np.float16), 1, implementation="cuda"),
        ),
    ],
)
def test_misuse(error, message, call):
    with pytest.raises(error, match=message):
        call()


@settings(max_examples=15, deadline=None)
@given(
    x=st.lists(st.integers(0, 5), max_size=3),
    rows=st.lists(st.integers(0, 5), max_size=3),
    k=st.one_of(st.integers(-2, 9), st.none(), st.text(max_size=2)),
)
def test_any_call_selects_or_says_why_not(x, rows, k):
    """Random shapes and k give a result of the right shape or an error that names the argument."""
    good = len(x) >= 1 and rows == x[:-1] and isinstance(k, int) and k >= 0
    call = lambda: topk(jnp.zeros(x), k, ends=jnp.zeros(rows, jnp.int32))  # noqa: E731
    if good:
        assert call().shape == (*x[:-1], k)
    else:
        with pytest.raises((TypeError, ValueError), match=r"^topk: argument '\w+'"):
            call()


def test_calls_that_the_kernel_supports():
    def unsupported_reason(k, *shape, dtype=jnp.float32):
        each = jax.ShapeDtypeStruct(shape[:2], jnp.int32)
        x = Operands(jax.ShapeDtypeStruct(shape, dtype), each, each)
        return cuda.supports(Options(k, shape[2], return_values=False), x)

    assert unsupported_reason(4096, 2, 2**27 - 1, 9000) is None
    assert "float32, got bfloat16" in unsupported_reason(8, 1, 1, 16, dtype=jnp.bfloat16)
    assert "at most 4096 values of a row, got 4097" in unsupported_reason(5000, 1, 1, 4097)
    assert "at most 268435455 rows, got 268435456" in unsupported_reason(1, 2, 2**27, 8)
    assert "rows of at most" in unsupported_reason(1, 1, 1, 2**31 - 2**16)


def test_exported_name():
    assert jax_dsa.topk is topk
