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
from jax.custom_derivatives import SymbolicZero
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
    """`ct` with the type of `primal`: dtype, broadcast batch axis, and the mesh axes it varies or
    is sharded over.
    """
    if ct is None:
        return compat.match_vary(jnp.zeros(primal.shape, primal.dtype), primal)
    axes = tuple(sorted(compat.varying_axes(ct) - compat.varying_axes(primal)))
    ct = jax.lax.psum(ct, axes) if axes else ct
    if ct.shape != primal.shape:  # the pass broadcast a batch axis of 1
        ct = ct.sum(0, keepdims=True)
    ct = compat.match_vary(ct.astype(primal.dtype), primal)
    sharding = jax.typeof(primal).sharding
    return ct if jax.typeof(ct).sharding == sharding else jax.reshard(ct, sharding)


def _guarded(name: str, x: Any) -> Any:
    """`x`, whose derivative raises: what the backward pass reads is not differentiated a second
    time.
    """
    guard = jax.custom_jvp(lambda x: x)
    guard.defjvp(no_second_derivative(name))
    return guard(x) if _is_float(x) else x


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

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
    def core(options: Any, implementation: Any, operands: tuple[Any, ...]) -> Outputs:
        return fwd(options, implementation, *operands)[0]

    @core.defjvp
    def _(options: Any, implementation: Any, primals: Any, tangents: Any) -> Any:
        (operands,), (operand_tangents,) = primals, tangents
        outputs, residuals = fwd(options, implementation, *operands)
        inputs = [i for i, x in enumerate(operands) if _is_float(x)]
        moving = [i for i, y in enumerate(outputs) if _is_float(y)]
        saved, tree = jax.tree.flatten((operands, residuals))

        def transpose(saved: Any, cts: Any) -> list[jax.Array]:
            operands, residuals = jax.tree.unflatten(tree, saved)
            given = dict(zip(moving, cts, strict=True))
            full = tuple(given.get(i) for i in range(len(outputs)))
            grads = bwd(options, implementation, residuals, full)
            return [_fit_cotangent(grads[i], operands[i]) for i in inputs]

        moved = dict(
            zip(
                moving,
                _tangent_p.bind(
                    *(_guarded(name, x) for x in saved),
                    *(operand_tangents[i] for i in inputs),
                    name=name,
                    transpose=transpose,
                    saved=len(saved),
                    avals=tuple(jax.typeof(outputs[i]) for i in moving),
                ),
                strict=True,
            )
        )

        def rest(y: Any) -> Any:
            return None if y is None else SymbolicZero(jax.typeof(y).to_tangent_aval())

        return outputs, tuple(moved[i] if i in moved else rest(y) for i, y in enumerate(outputs))

    # Called outside jit, an operator would be traced anew every time.
    jitted = jax.jit(core, static_argnums=(0, 1))

    def call(options: Any, implementation: Any, *operands: Any) -> Outputs:
        if in_plain_xla():
            return fwd(options, "xla", *operands)[0]
        return jitted(options, implementation, operands)

    return call
