"""The kinds of cases. Each function draws a call, runs it, and raises if the results are wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import threading
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from support.compare import assert_matches

from fuzz.draw import Call, Draw, is_float
from fuzz.meshes import on_mesh
from fuzz.misuse import mistakes
from jax_dsa import BlockMask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REFUSALS = (TypeError, ValueError, NotImplementedError)
STEP = 1e-5  # of finite differences, whose error is proportional to its square


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in code that takes longer, if it runs in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def assert_right(call: Call, got: Any, want: Any) -> None:
    """Asserts that every leaf of a result is right up to rounding."""
    leaves = jax.tree.leaves(got)
    assert len(leaves) == len(call.dtypes), f"{len(leaves)} results, expected {len(call.dtypes)}"
    for i, (g, w, dtype) in enumerate(zip(leaves, want, call.dtypes, strict=True)):
        w = np.asarray(w).astype(dtype)
        assert_matches(g, w, call.tolerance(dtype), f"result {i}", least=1.0)


def assert_refused_well(call: Call, error: Exception, names: set[str]) -> None:
    """Asserts that the error's message names the function and one of the arguments."""
    text = f"{type(error).__name__}: {error}"
    assert isinstance(error, REFUSALS), text
    assert str(error).startswith(f"{call.name}: "), f"does not name {call.name}: {text}"
    assert any(f"'{n}" in str(error) or f".{n}'" in str(error) for n in names), (
        f"names none of {sorted(names)}: {text}"
    )


def value(case: Any) -> str:
    """Compares results with the oracle, mostly under jit, with NaN in rows that are not read."""
    call, c, r = case.draw()
    _poison(call, r)
    run = functools.partial(call.fn, **call.options)
    if c.chance(0.8):
        run = case.compiled(run)
    assert_right(call, run(**call.arrays), call.results())
    return "passed"


def edge(case: Any) -> str:
    """Checks that a call with empty axes or extreme options is right or refused, and the shapes of
    its gradients.
    """
    call, _, _ = case.draw()
    try:
        got = case.compiled(functools.partial(call.fn, **call.options))(**call.arrays)
    except REFUSALS as e:
        inside = (vars(x) for x in call.kwargs.values() if dataclasses.is_dataclass(x))
        assert_refused_well(call, e, set(call.kwargs).union(*inside))
        return "refused"
    assert_right(call, got, call.results())
    if call.diff:
        point, rest = _split(call)
        grads = jax.eval_shape(functools.partial(_pull_back, call, rest), point, None)
        for name, x in point.items():
            assert jax.tree.map(np.shape, grads[name]) == jax.tree.map(np.shape, x), name
    return "passed"


def _split(call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments that may have gradients, and the others."""
    names = (*call.diff, *call.constant)
    point = {n: x for n, x in call.kwargs.items() if n in names}
    return point, {n: x for n, x in call.kwargs.items() if n not in names}


def _floats(call: Call, results: Any) -> list[Any]:
    """Returns the leaves that have cotangents."""
    leaves = jax.tree.leaves(results)
    return [y for y, dtype in zip(leaves, call.dtypes, strict=True) if is_float(dtype)]


def _pull_back(
    call: Call, rest: Any, point: dict[str, Any], cotangents: Any, axes: Any = None
) -> dict[str, Any]:
    """Returns the gradients, through a vmap over axes of size one if `axes` has their positions."""

    def run(x: dict[str, Any]) -> list[Any]:
        return _floats(call, call.fn(**x, **rest))

    def mapped(x: dict[str, Any]) -> list[Any]:
        return [y[0] for y in jax.vmap(run, (axes,))(jax.tree.map(jnp.expand_dims, x, axes))]

    y, pull = jax.vjp(mapped if axes else run, point)
    if cotangents is None:
        cotangents = jax.tree.map(lambda y: np.ones(y.shape, y.dtype), y)
    return pull(cotangents)[0]


def gradient(case: Any) -> str:
    """Compares gradients, sometimes through vmap, with finite differences of the oracle.

    Each gradient is compared along one direction. Rows that are not read may hold NaN.
    """
    call, c, r = case.draw()
    _poison(call, r)
    base = [np.asarray(y) for y in _floats(call, call.results())]
    draw = r.signs if call.signs else lambda shape: r.rng.normal(size=shape)
    cotangents = [
        np.where(np.isfinite(y), draw(y.shape), 0).astype(dtype)
        for y, dtype in zip(base, [d for d in call.dtypes if is_float(d)], strict=True)
    ]
    point, rest = _split(call)
    axes = {n: c.one(*range(-x.ndim - 1, x.ndim + 1)) for n, x in point.items()}
    axes = axes if c.chance(0.3) else None
    options = {n: x for n, x in rest.items() if n in call.options}
    run = case.compiled(
        lambda point, arrays, cts: _pull_back(call, {**arrays, **options}, point, cts, axes)
    )
    grads = run(point, {n: x for n, x in rest.items() if n not in options}, cotangents)

    def terms(results: list[Any]) -> list[np.ndarray]:
        return [
            np.where(np.isfinite(y0), w.astype(np.float64) * np.nan_to_num(y), 0)
            for w, y0, y in zip(cotangents, base, results, strict=True)
        ]

    def loss(moved: dict[str, Any]) -> float:
        return sum(float(x.sum()) for x in terms(_floats(call, call.results(call.kwargs, **moved))))

    rounding = 8 * np.finfo(np.float64).eps * sum(np.abs(x).sum() for x in terms(base)) / STEP
    for name in call.constant:
        assert not np.any(np.asarray(grads[name], np.float64)), f"{name} has a gradient"
    for name in call.diff:
        x = np.asarray(call.kwargs[name])
        g = np.asarray(grads[name], np.float64)
        assert g.shape == x.shape and grads[name].dtype == x.dtype, name
        finite = np.isfinite(np.asarray(x, np.float64))
        assert np.isfinite(g).all(), f"the gradient of {name} is not finite"
        assert not g[~finite].any(), f"{name}: a gradient where nothing is read"
        u = np.where(finite, r.rng.normal(size=x.shape), 0)
        ahead, behind = (
            loss({name: np.asarray(x, np.float64) + step * u}) for step in (STEP, -STEP)
        )
        want = (ahead - behind) / (2 * STEP)
        got = float((g * u).sum())
        # A sum of products with random signs is about this large.
        size = np.linalg.norm(g) * np.sqrt(np.mean(u * u)) + 1
        allowed = (call.gradient_tolerance() + STEP * 1e-2) * size + rounding
        assert abs(got - want) <= allowed, (
            f"gradient of {name}: {got} along a direction, expected {want} up to {allowed}"
        )
    return "passed"


def _poison(call: Call, r: Draw) -> None:
    """Puts NaN into a row of each argument in `call.poison`, if that row affects no result."""
    clean = {
        n: np.where(np.isnan(x), 0, x).astype(x.dtype)
        for n, x in call.kwargs.items()
        if isinstance(x, np.ndarray) and is_float(x.dtype)
    }
    for name in call.poison:
        x = call.kwargs[name]
        if name not in clean or x.ndim < 2 or not x.size:
            continue
        row = tuple(r.rng.integers(n) for n in x.shape[:-1])
        bad = clean[name].copy()
        bad[row] = np.nan
        before, after = (call.results(**{**clean, name: y}) for y in (clean[name], bad))
        if all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True)):
            call.kwargs[name] = x.copy()
            call.kwargs[name][row] = np.nan


def vmap(case: Any) -> str:
    """Compares each element of a vmap along random axes with the oracle."""
    first, c, _ = case.draw()
    calls = [first, *(case.draw(i)[0] for i in range(1, c.one(1, 2, 3)))]
    axes = {n: _random_axes(x, c) for n, x in first.arrays.items()}
    if not any(a is not None for a in jax.tree.leaves(axes)):
        axes[next(iter(axes))] = jax.tree.map(lambda _: 0, first.arrays[next(iter(axes))])

    def choose(leaf_axes: Any, *xs: Any) -> Any:
        return xs[0] if leaf_axes is None else np.stack(xs, leaf_axes)

    none = {"is_leaf": lambda x: x is None}
    mapped = jax.tree.map(choose, axes, *[call.arrays for call in calls], **none)
    run = case.compiled(
        jax.vmap(lambda arrays: first.fn(**first.options, **arrays), in_axes=(axes,))
    )
    got = run(mapped)
    for i, call in enumerate(calls):
        own = jax.tree.map(
            lambda a, x, y: x if a is None else y, axes, first.arrays, call.arrays, **none
        )
        want = first.results(**own)
        try:
            assert_right(call, [y[i] for y in jax.tree.leaves(got)], want)
        except AssertionError as e:
            raise AssertionError(f"element {i} of {len(calls)}, in_axes {axes}: {e}") from None
    return "passed"


def _random_axes(x: Any, c: Draw) -> Any:
    """Returns an axis or None for every leaf; a block mask has axes for all leaves or for none."""
    absent = isinstance(x, BlockMask) and c.chance()

    def choose(leaf: Any) -> int | None:
        axes = range(-leaf.ndim - 1, leaf.ndim + 1)
        if isinstance(x, BlockMask):
            return None if absent else c.one(*axes)
        return c.one(None, *axes)

    return jax.tree.map(choose, x)


def misuse(case: Any) -> str:
    """Checks that a call with one mistake is refused when it is traced."""
    call, _, r = case.draw()
    kwargs, names, may_pass = mistakes(call, r)
    try:
        jax.eval_shape(lambda: call.fn(**kwargs))
    except Exception as e:
        assert_refused_well(call, e, names)
        return "refused"
    changed = {n: x for n, x in kwargs.items() if x is not call.kwargs.get(n)}
    assert may_pass, f"the call accepts {changed}"
    return "passed"


def mesh(case: Any) -> str:
    """Compares results on an Explicit mesh with the oracle, with and without `jax.set_mesh`."""
    call, c, _ = case.draw()
    devices, arrays = on_mesh(call, c)
    run = functools.partial(call.fn, **call.options)
    if c.chance(0.8):
        run = case.compiled(run)
    with c.one(jax.set_mesh, contextlib.nullcontext)(devices):
        got = run(**arrays)
    # JAX cannot fetch the shards of an empty array.
    got = [y if y.size else np.zeros(y.shape, y.dtype) for y in jax.tree.leaves(got)]
    assert_right(call, got, call.results())
    return "passed"


def mesh_gradient(case: Any) -> str:
    """Compares gradients on an Explicit mesh with those on one device."""
    call, c, r = case.draw()
    devices, arrays = on_mesh(call, c)
    shapes = jax.eval_shape(lambda: _floats(call, call.fn(**call.kwargs)))
    weights = [r.rng.normal(size=y.shape).astype(y.dtype) for y in shapes]
    names = (*call.diff, *call.constant)

    def gradients(arrays: dict[str, Any]) -> dict[str, Any]:
        def loss(x: dict[str, Any]) -> Any:
            results = _floats(call, call.fn(**{**call.options, **arrays, **x}))
            # Infinite sums of exponents have no gradient.
            finite = [jnp.where(jnp.isfinite(y), y, 0) * w for y, w in zip(results, weights)]
            return sum((y.sum() for y in finite), jnp.zeros(()))

        return jax.grad(loss)({n: arrays[n] for n in names})

    want = case.compiled(gradients, "one device")(call.arrays)
    with c.one(jax.set_mesh, contextlib.nullcontext)(devices):
        got = case.compiled(gradients, "mesh")(arrays)
    for name in names:
        assert got[name].sharding.spec == arrays[name].sharding.spec, name
    got, want = (jax.tree.map(np.asarray, x) for x in (got, want))
    # Each device quantises its own blocks of tokens, so FP8 gradients of weights round differently.
    tolerance = 0.1 if call.signs else call.gradient_tolerance(roundings=8)
    assert_matches(got, want, tolerance, "gradients", least=1.0)
    return "passed"


def kernel(case: Any) -> str:
    """Compares the CUDA kernel's results with the XLA implementation's, on a GPU."""
    call, _, _ = case.draw()
    try:
        jax.eval_shape(lambda: call.fn(**call.kwargs, implementation="cuda"))
    except NotImplementedError:
        return "no kernel"
    got, want = (
        case.compiled(functools.partial(call.fn, **call.options, implementation=name), name)(
            **call.arrays
        )
        for name in ("cuda", "xla")
    )
    assert_right(call, got, jax.tree.leaves(want))
    return "passed"


def kernel_gradient(case: Any) -> str:
    """Compares gradients with kernels, where there are any, with the XLA implementation's."""
    call, _, r = case.draw()
    point, rest = _split(call)
    arrays = {n: x for n, x in rest.items() if n in call.arrays}
    options = {n: x for n, x in rest.items() if n not in arrays}
    shapes = jax.eval_shape(lambda: _floats(call, call.fn(**call.kwargs, implementation="xla")))
    cotangents = [r.rng.normal(size=y.shape).astype(y.dtype) for y in shapes]
    got, want = (
        case.compiled(
            lambda point, arrays, cts, name=name: _pull_back(
                call, {**arrays, **options, "implementation": name}, point, cts
            ),
            str(name),
        )(point, arrays, cotangents)
        for name in (None, "xla")
    )
    assert_matches(got, want, call.gradient_tolerance(roundings=8), "gradients", least=1.0)
    return "passed"


def program(case: Any) -> str:
    """Runs a program that makes several calls and compares each with its expected result."""
    case.program()(case, Draw(*case.key), Draw(case.operator, case.kind, case.seed, 0))
    return "passed"


# The number of cases of each kind that share a configuration and a compiled program.
KINDS: dict[Callable[[Any], str], int] = {
    **{value: 12, gradient: 6, vmap: 4, edge: 2, misuse: 5},
    **{mesh: 3, mesh_gradient: 3, program: 50},
    **{kernel: 60, kernel_gradient: 40},
}
