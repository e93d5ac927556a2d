"""Reverse mode of an operator: `differentiable` joins its two passes.

The work that `jax.custom_vjp` would do, done by a custom JVP whose tangents come from one linear
primitive that only its transpose can evaluate. It differs in what a user sees: forward mode and
gradients of gradients raise an error that names the operator and what to use instead, where a
custom_vjp can only say that it is one.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_dsa.core import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Outputs = tuple[Any, ...]

_plain = contextvars.ContextVar("jax_dsa_plain_xla", default=False)


@contextlib.contextmanager
def plain_xla() -> Iterator[None]:
    """Operators traced inside are plain JAX: the XLA implementation, without rules of ours for
    autodiff, vmap and meshes.

    For what those rules refuse, forward mode and gradients of gradients, and for checking them.
    JAX's own rules keep every chunk's intermediates for the backward pass, so this is for moderate
    sizes. It takes effect while tracing: a function that `jax.jit` has traced before stays as it
    is. Works as a decorator too.
    """
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def in_plain_xla() -> bool:
    """Whether `plain_xla` is in effect."""
    return _plain.get()


def _refuse(name: str, what: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: {what} not supported by the operator's own rules; the XLA implementation "
        f"supports it as plain JAX, inside `with jax_dsa.plain_xla():`"
    )


# operands: what the backward pass reads, then one tangent for every float operand of the operator.
# params: name; transpose(saved, cotangents) -> cotangents of the tangents; saved, how many of the
# operands that is; avals, of the outputs' tangents.
_tangent_p = Primitive("jax_dsa_tangent")
_tangent_p.multiple_results = True


def _forward_mode(*_: Any, name: str, **__: Any) -> NoReturn:
    _refuse(name, "forward-mode differentiation is")


def no_second_derivative(name: str) -> Callable[..., NoReturn]:
    """A JVP rule that refuses: for what the backward pass is made of."""
    return lambda *_: _refuse(name, "a gradient of a gradient is")


def _transpose(
    cts: Sequence[Any], *args: Any, name: str, transpose: Any, saved: int, avals: Any
) -> list[Any]:
    del name, avals
    grads = transpose(list(args[:saved]), [ad.instantiate_zeros(ct) for ct in cts])
    tangents = args[saved:]
    return [None] * saved + [
        g if ad.is_undefined_primal(t) else None for g, t in zip(grads, tangents, strict=True)
    ]


def _batched(
    args: Sequence[Any], dims: Sequence[Any], *, name: str, transpose: Any, saved: int, avals: Any
) -> tuple[list[Any], list[int]]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)

    # Every tangent is mapped, so that every cotangent is: what is not mapped would have to be
    # summed.
    def mapped(x: Any, d: Any) -> jax.Array:
        return jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)

    tangents = [mapped(x, d) for x, d in zip(args[saved:], dims[saved:], strict=True)]
    outs = _tangent_p.bind(
        *args[:saved],
        *tangents,
        name=name,
        transpose=jax.vmap(transpose, in_axes=(list(dims[:saved]), 0)),
        saved=saved,
        avals=tuple(a.update(shape=(size, *a.shape)) for a in avals),
    )
    return outs, [0] * len(outs)


_tangent_p.def_impl(_forward_mode)
_tangent_p.def_abstract_eval(lambda *_, avals, **__: avals)
mlir.register_lowering(_tangent_p, _forward_mode)
ad.primitive_jvps[_tangent_p] = lambda *_, name, **__: no_second_derivative(name)()
ad.primitive_transposes[_tangent_p] = _transpose
batching.primitive_batchers[_tangent_p] = _batched


def _is_float(x: Any) -> bool:
    return x is not None and jnp.issubdtype(x.dtype, jnp.floating)


def _fit_cotangent(ct: jax.Array | None, primal: Any) -> jax.Array:
    """`ct` with the type of the aval `primal`: dtype, broadcast batch axis, and the mesh axes that
    it varies over or is sharded over.
    """
    if ct is None:
        return compat.match_vary(jnp.zeros(primal.shape, primal.dtype), primal)
    axes = tuple(sorted(compat.varying_axes(ct) - compat.varying_axes(primal)))
    ct = jax.lax.psum(ct, axes) if axes else ct
    if ct.shape != primal.shape:  # the pass broadcast a batch axis of 1
        ct = ct.sum(0, keepdims=True)
    ct = compat.match_vary(ct.astype(primal.dtype), primal)
    same = jax.typeof(ct).sharding == primal.sharding
    return ct if same else jax.reshard(ct, primal.sharding)


def _guarded(name: str, saved: Any, operands: Any) -> Any:
    """`saved`, raising where `operands` are differentiated: it is read as a constant."""
    guard = jax.custom_jvp(lambda saved, operands: saved)
    guard.defjvp(no_second_derivative(name))
    return guard(saved, operands)


def differentiable(
    name: str,
    fwd: Callable[..., tuple[Outputs, Any]],
    bwd: Callable[..., Outputs],
) -> Callable[..., Outputs]:
    """Joins two passes to one differentiable operator `(options, implementation, *operands) ->
    outputs`.

    Args:
        name: the public function's name.
        fwd: `(options, implementation, *operands) -> (outputs, residuals)`; operands and outputs
            may be None.
        bwd: `(options, implementation, residuals, cotangents) -> cotangents of the operands`, None
            for those that have none. An output that is an integer, or None, has None for a
            cotangent.
    """

    # The forward pass runs on constants; `attached` then gives its float outputs their tangents.
    # Integer outputs stay outside: a JVP rule cannot name their tangents' type inside shard_map.
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def attached(static: Any, operands: Any, residuals: Any, outputs: Any) -> Any:
        return outputs

    @attached.defjvp
    def _(static: Any, primals: Any, tangents: Any) -> Any:
        (options, implementation, moving, count), (operands, residuals, outputs) = static, primals
        inputs = [i for i, x in enumerate(operands) if _is_float(x)]
        avals = [jax.typeof(operands[i]) for i in inputs]
        saved, tree = jax.tree.flatten(residuals)

        def transpose(saved: Any, cts: Any) -> list[jax.Array]:
            given = dict(zip(moving, cts, strict=True))
            full = tuple(given.get(i) for i in range(count))
            grads = bwd(options, implementation, jax.tree.unflatten(tree, saved), full)
            return [_fit_cotangent(grads[i], a) for i, a in zip(inputs, avals, strict=True)]

        saved, outputs = _guarded(name, (saved, outputs), operands)
        moved = _tangent_p.bind(
            *saved,
            *(tangents[0][i] for i in inputs),
            name=name,
            transpose=transpose,
            saved=len(saved),
            avals=tuple(jax.typeof(y) for y in outputs),
        )
        return outputs, moved

    def core(options: Any, implementation: Any, operands: tuple[Any, ...]) -> Outputs:
        outputs, residuals = fwd(options, implementation, *jax.lax.stop_gradient(operands))
        moving = tuple(i for i, y in enumerate(outputs) if _is_float(y))
        static = (options, implementation, moving, len(outputs))
        floats = attached(static, operands, residuals, [outputs[i] for i in moving])
        given = dict(zip(moving, floats, strict=True))
        return tuple(given.get(i, y) for i, y in enumerate(outputs))

    # Called outside jit, an operator would be traced anew every time.
    jitted = jax.jit(core, static_argnums=(0, 1))

    def call(options: Any, implementation: Any, *operands: Any) -> Outputs:
        if in_plain_xla():
            return fwd(options, "xla", *operands)[0]
        return jitted(options, implementation, operands)

    return call
