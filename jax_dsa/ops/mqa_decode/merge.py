"""`merge_attention`, which combines the attention to disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp

from jax_dsa.core.checks import FLOATS, WIDE_FLOATS, Args, as_array
from jax_dsa.core.typing import Array, Float, Implementation
from jax_dsa.ops.mqa_decode import xla
from jax_dsa.ops.mqa_decode.api import OutLSE, Unnormalized


@overload
def merge_attention(
    outs: Float[Array, "sets B T N E"] | Sequence[Float[Array, "B T N E"]],
    lses: Float[Array, "sets B T N"] | Sequence[Float[Array, "B T N"]],
    *,
    implementation: Implementation | None = None,
) -> OutLSE: ...
@overload
def merge_attention(
    outs: Float[Array, "sets B T N E"] | Sequence[Float[Array, "B T N E"]],
    *,
    max_logits: Float[Array, "sets B T N"] | Sequence[Float[Array, "B T N"]],
    sums: Float[Array, "sets B T N"] | Sequence[Float[Array, "B T N"]],
    implementation: Implementation | None = None,
) -> Unnormalized: ...
def merge_attention(
    outs: Float[Array, "sets B T N E"] | Sequence[Float[Array, "B T N E"]],
    lses: Float[Array, "sets B T N"] | Sequence[Float[Array, "B T N"]] | None = None,
    *,
    max_logits: Float[Array, "sets B T N"] | Sequence[Float[Array, "B T N"]] | None = None,
    sums: Float[Array, "sets B T N"] | Sequence[Float[Array, "B T N"]] | None = None,
    implementation: Implementation | None = None,
) -> OutLSE | Unnormalized:
    """Combines the attention to disjoint sets of keys into the attention to all of them.

        lse = log sum_i exp(lses[i])        out = sum_i exp(lses[i] - lse) outs[i]

    A set with lse = -inf contributes nothing, whatever its output is. If all sets have lse = -inf,
    then out = 0 and lse = -inf.

    With `max_logits` and `sums` in place of `lses`, the sets are the results `(o, m, l)` of
    `mqa_decode(..., normalize=False)`, and so is the result. This form is exact for scores of any
    size. If all scores of a set are about -1e9, its float32 lse does not contain the number of its
    keys any more, whereas l does.

    Args:
        outs: Outputs of each set, computed without sinks, stacked along the first axis or as a
            sequence. Any number of axes; the last one is E. They are normalized if `lses` is given.
        lses: Log-sum-exp of each set, float32, the natural logarithm. It has the axes of `outs`
            without E.
        max_logits: The largest score m of each set, float32; -inf for a set without a key. It has
            the axes of `lses`.
        sums: The sum `l = sum_j exp(s_j - m)` of each set, float32. It has the axes of `lses`.
        implementation: "xla". "cuda" is not available.

    Returns:
        `out` in the dtype of `outs`, and `lse`; or `(o, m, l)` in float32, where `o / l` is the
        output. They are differentiable with respect to all arguments, to any order, except m.

    Raises:
        ValueError: If the shapes do not match, there are no sets, or both `lses` and `max_logits`
            are given or absent, or `max_logits` without `sums`.
        TypeError: If a dtype or the type of an argument is wrong.
        NotImplementedError: If `implementation="cuda"`.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> outs = jnp.array([[[[1.0]]], [[[3.0]]]])  # two sets, T = N = E = 1
        >>> out, lse = jax_dsa.merge_attention(outs, jnp.log(jnp.array([[[3.0]], [[1.0]]])))
        >>> out.round(5)
        Array([[[1.5]]], dtype=float32)
    """
    outs = _stacked("outs", outs)
    axes = ["sets", *(f"A{i}" for i in range(1, outs.ndim - 1)), "E"]
    args = Args("merge_attention", "outs", outs, " ".join(axes))
    outs = args.array("outs", outs, " ".join(axes), FLOATS)
    rows = " ".join(axes[:-1])
    if max_logits is not None and lses is not None:
        raise ValueError(
            "merge_attention: argument 'lses' is an array, want None beside 'max_logits'"
        )
    if lses is None:
        for name, x in {"max_logits": max_logits, "sums": sums}.items():
            if x is None:
                raise ValueError(
                    f"merge_attention: argument '{name}' is None, want an array, or 'lses' in "
                    "place of 'max_logits' and 'sums'"
                )
        max_logits = args.array("max_logits", _stacked("max_logits", max_logits), rows, WIDE_FLOATS)
        sums = args.array("sums", _stacked("sums", sums), rows, WIDE_FLOATS)
    else:
        if sums is not None:
            raise ValueError("merge_attention: argument 'sums' is an array, want None with 'lses'")
        lses = args.array("lses", _stacked("lses", lses), rows, WIDE_FLOATS)
    if args.call(implementation).implementation == "cuda":
        raise NotImplementedError(
            "merge_attention: implementation='cuda' is not available: it has no CUDA kernel; "
            "implementation='xla' covers this call"
        )
    if lses is None:
        return xla.merge_sums(outs, max_logits, sums)  # type: ignore[arg-type]
    return xla.merge(outs, lses)


def _stacked(name: str, given: Any) -> jax.Array:
    """Returns a sequence of arrays stacked along a new first axis, or a stacked array as it is."""
    op = "merge_attention"
    if isinstance(given, list | tuple):
        arrays: list[Any] = [as_array(x) for x in given]
        if any(x is None for x in arrays):
            raise TypeError(f"{op}: argument '{name}' is a sequence, want arrays as its elements")
        kinds = {(x.shape, x.dtype.name) for x in arrays}
        if len(kinds) != 1:
            got = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in sorted(kinds)) or "nothing"
            raise ValueError(
                f"{op}: argument '{name}' holds {got}, want arrays of one shape and dtype"
            )
        return _as_jax(name, jnp.stack, arrays, kinds.pop()[1])
    array = as_array(given)
    if array is None:
        raise TypeError(
            f"{op}: argument '{name}' is {type(given).__name__}, want an array or a list of arrays"
        )
    if array.shape[:1] in ((), (0,)):
        raise ValueError(
            f"{op}: argument '{name}' has shape {array.shape}, want at least one set of keys along "
            "the first axis"
        )
    return _as_jax(name, jnp.asarray, array, array.dtype)


def _as_jax(name: str, make: Any, given: Any, dtype: Any) -> jax.Array:
    """Returns `make(given)`. Raises a TypeError with the argument's name if JAX lacks its dtype."""
    try:
        return make(given)
    except TypeError:
        raise TypeError(
            f"merge_attention: argument '{name}' has dtype {dtype}, want floats"
        ) from None
