"""`mqa_decode_plan`, which divides the work of calls of `mqa_decode` ahead of them."""

from __future__ import annotations

from jax_dsa.core.checks import INT32, Args
from jax_dsa.core.ffi import Kernel
from jax_dsa.core.layout import PAGE_RECORD_DIM, RECORD_DIM
from jax_dsa.core.op import Pass
from jax_dsa.core.typing import Array, Implementation, Int
from jax_dsa.ops.mqa_decode import cuda, xla
from jax_dsa.ops.mqa_decode.api import visible_keys
from jax_dsa.ops.mqa_decode.spec import MqaDecodePlan, PlanOperands, PlanOptions

PLAN = Pass(
    "mqa_decode_plan",
    xla.mqa_decode_plan,
    kernel=Kernel(cuda.mqa_decode_plan, cuda.supports_plan, limits="the D of mqa_decode_fwd"),
    shardable="b",
)


def mqa_decode_plan(
    key_value_seq_lengths: Int[Array, "B"],
    *,
    num_heads: int,
    queries: int = 1,
    groups: int = 1,
    dim: int = 576,
    fp8: bool = False,
    starts: Int[Array, "B"] | Int[Array, "B T"] | None = None,
    local_window_size: int | tuple[int, int] | Int[Array, "B"] | None = None,
    implementation: Implementation | None = None,
) -> MqaDecodePlan:
    """Divides the keys of all requests among the SMs, once for many calls of `mqa_decode`.

    The layers of a decode step attend to equally many keys of each request, so the plan of one step
    serves all of its layers. Without a plan, each call makes its own. A plan never changes results
    except for rounding: one that was made for other lengths is correct and takes longer, so a plan
    may also serve several steps.

    Args:
        key_value_seq_lengths: Number of tokens of each request, including the T new ones, int32
            [B]; that of a cache is `cache.lengths`.
        num_heads: N, number of query heads.
        queries: T, number of queries per request.
        groups: G, number of KV heads.
        dim: D, dimension of queries and keys.
        fp8: Whether the keys are FP8 records, with D = 576 or 512.
        starts, local_window_size: As in `mqa_decode`.
        implementation: "cuda" or "xla". Default: the CUDA kernel where it supports the call.

    Returns:
        The argument `plan` of `mqa_decode` for calls of these sizes. Only the CUDA kernels for
        Hopper read it. Under `jax.vmap` and in calls that are sharded they make plans themselves.

    Raises:
        ValueError: If a shape or a value is out of range.
        TypeError: If a dtype or the type of an argument is wrong.
        NotImplementedError: If `implementation="cuda"` does not support the call.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> q, k = jnp.ones((2, 1, 8, 96)), jnp.ones((2, 32, 1, 96))
        >>> lengths = jnp.array([32, 7])
        >>> plan = jax_dsa.mqa_decode_plan(lengths, num_heads=8, dim=96)
        >>> jax_dsa.mqa_decode(q, k, key_value_seq_lengths=lengths, plan=plan).shape
        (2, 1, 8, 96)
    """
    args = Args("mqa_decode_plan", "key_value_seq_lengths", key_value_seq_lengths, "B")
    call = args.call(implementation)
    lengths = args.array("key_value_seq_lengths", key_value_seq_lengths, "B", INT32)
    heads = args.integer("num_heads", num_heads, 1)
    groups = args.integer("groups", groups, 1)
    args.option("num_heads", heads, heads % groups == 0, f"a multiple of groups={groups}")
    args.bind("T", args.integer("queries", queries, 0), "'queries'")
    dim, fp8 = args.integer("dim", dim, 1), args.flag("fp8", fp8)
    records = (RECORD_DIM, PAGE_RECORD_DIM)
    args.option("dim", dim, not fp8 or dim in records, f"one of {records}, with fp8=True")
    visible = visible_keys(args, lengths, starts, local_window_size)
    operands = PlanOperands(*(x[None] for x in visible))
    ranges = PLAN(call, PlanOptions(heads, groups, dim, fp8), operands).ranges[0]
    return MqaDecodePlan(ranges, args.batch, args.sizes["T"], heads, groups, dim, fp8)
