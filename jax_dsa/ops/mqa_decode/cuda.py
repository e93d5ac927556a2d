"""Calls of the CUDA kernels of `mqa_decode`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import ffi
from jax_dsa.core.layout import RECORD_BYTES
from jax_dsa.core.streaming import entry_by_entry
from jax_dsa.ops.mqa_decode.spec import (
    PLAN_FIELDS,  # noqa: F401, compared with the extension's like the limits below
    PLAN_RANGES,  # noqa: F401
    Operands,
    Options,
    PlanOperands,
    PlanOptions,
    PlanResults,
    Results,
)

# The kernels' limits; tests/test_ffi.py compares them with those of the extension.
LATENT_DIMS = (576, 512)  # D without v
VALUE_DIM = 512
DIMS = (64, 128, 256)  # D and E with v
MAX_ROWS = 2**31 - 1 - 64


def supports(options: Options, x: Operands) -> str | None:
    """Returns why the kernels cannot run this call, or None if they can."""
    records = x.k.dtype == jnp.uint8
    dtypes = {a.dtype for a in (x.q, None if records else x.k, x.v) if a is not None}
    if dtypes != {jnp.dtype(jnp.bfloat16)}:
        return f"it takes bfloat16, got {', '.join(sorted(d.name for d in dtypes))}"
    B, T, N, D = x.q.shape
    if N == 0:
        return "it takes at least one head"
    if records and x.k.shape[3] != RECORD_BYTES:
        return f"it takes FP8 records of {RECORD_BYTES} bytes, got {x.k.shape[3]}"
    if x.v is None and (D not in LATENT_DIMS or options.value_dim != VALUE_DIM):
        return (
            f"without v it has D in {LATENT_DIMS} and value_dim={VALUE_DIM}, got D={D} and "
            f"value_dim={options.value_dim}"
        )
    if x.v is not None and (D not in DIMS or x.v.shape[3] != D):
        return f"with v it has D=E in {DIMS}, got D={D} and E={x.v.shape[3]}"
    if options.scale <= 0:
        return f"it takes scale > 0, got {options.scale}"
    room = 0 if x.page_table is None else x.page_table.shape[1] * (options.page_size or 1)
    rows = max(B * T * N, x.k.shape[1], room)
    if rows > MAX_ROWS:
        return f"it takes up to {MAX_ROWS} keys, and queries times heads, got {rows}"
    return None


def supports_plan(options: PlanOptions, x: PlanOperands) -> str | None:
    """Returns why there is no plan for these calls, or None if there is one."""
    if options.dim not in (*LATENT_DIMS, *DIMS):
        return f"it takes D in {(*LATENT_DIMS, *DIMS)}, got {options.dim}"
    _, B, T = x.starts.shape
    if B * T * options.heads > MAX_ROWS:
        return f"it takes up to {MAX_ROWS} queries times heads, got {B * T * options.heads}"
    return None


def mqa_decode_fwd(options: Options, avals: Results, x: Operands) -> Results:
    """Returns what `xla.mqa_decode_fwd` returns.

    How the kernels split keys depends on the lengths of all requests. With batch_invariant each
    request is therefore a call of its own.
    """
    if options.batch_invariant:
        per_entry = dataclasses.replace(options, batch_invariant=False)

        def of_entry(x: Operands) -> Results:
            outs = [jax.ShapeDtypeStruct((x.q.shape[0], *a.shape[1:]), a.dtype) for a in avals]
            return mqa_decode_fwd(per_entry, Results(*outs), x)  # type: ignore[arg-type]

        return entry_by_entry(of_entry, x._replace(plan=None))
    _, T, N, D = x.q.shape
    records = x.k.dtype == jnp.uint8
    rows, split_tiles = ffi.extension().mqa_decode_workspace(
        queries=T, heads=N, groups=x.k.shape[2], dim=D, records=records
    )
    workspace = (
        jax.ShapeDtypeStruct((rows, avals.out.shape[3]), jnp.float32),
        jax.ShapeDtypeStruct((rows, 2), jnp.float32),
        jax.ShapeDtypeStruct((split_tiles, 2), jnp.int32),
    )
    # Under vmap, there is a copy of the plan or another plan for each request.
    plan = x.plan if x.plan is not None and x.plan.shape[0] == 1 else None
    operands = x.q, x.k, x.v, x.starts, x.ends, x.sinks, x.page_table, plan
    out, max_logit, log_sum, *_ = ffi.call(
        "jax_dsa.mqa_decode.v4",
        operands,
        [*avals, *workspace],
        scale=np.float32(options.scale),
        page_size=np.int32(options.page_size or 1),
        exact_max=np.bool_(options.exact_max),
    )
    return Results(out, max_logit, log_sum)


def mqa_decode_plan(options: PlanOptions, avals: PlanResults, x: PlanOperands) -> PlanResults:
    """Returns the plans by which the kernels divide their work."""
    (ranges,) = ffi.call(
        "jax_dsa.mqa_decode_plan.v1",
        x,
        avals,
        heads=np.int32(options.heads),
        groups=np.int32(options.groups),
        dim=np.int32(options.dim),
        records=np.bool_(options.records),
    )
    return PlanResults(ranges)
