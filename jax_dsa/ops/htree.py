"""`htree_attention`, hierarchical tree attention, and its stages for inspection."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_dsa.core.checks import FLOATS, Args
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.reference import htree as reference
from jax_dsa.reference import htree_nodes, htree_tree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from jax_dsa.core.checks import Implementation


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of the passes.

    Attributes:
        compression: r, children per node.
        top_k: K, nodes selected in a layer.
        capacity: None where keys and values are the tokens; where they are all nodes of a tree, how
            many tokens it is over.
        scale: of the scores.
        rope_base: RoPE rotates pair i of D/2 by `ordinal * rope_base ** (-2i / D)`.
    """

    compression: int
    top_k: int
    capacity: int | None = None
    scale: float = 1.0
    rope_base: float = 10000.0


# "s" is the tokens, or the nodes of a tree. "m" stays whole: the heads of a group select together.
_FWD = Pass(
    "htree_fwd",
    "b t (g m) d, b s g d, b s g e, b t -> b t (g m) e, b t (g m), b t g l k",
    reference.htree_fwd,
    shardable="b t g",
)
_BWD = Pass(
    "htree_bwd",
    "b t (g m) d, b s g d, b s g e, b t, b t g l k, "
    "b t (g m) e, b t (g m), b t (g m) e, b t (g m) "
    "-> b t (g m) d, b s g d, b s g e",
    reference.htree_bwd,
    shardable="b t g",
)
_BUILD_FWD = Pass(
    "htree_build_fwd",
    "b s g d, b s g e -> b u g d, b u g e",
    reference.htree_build_fwd,
    shardable="b g",
)
_BUILD_BWD = Pass(
    "htree_build_bwd",
    "b u g d, b u g e -> b s g d, b s g e",
    reference.htree_build_bwd,
    shardable="b g",
)


def _fwd(options: Options, implementation: Any, *operands: Any) -> tuple[Any, Any]:
    out, lse, selected = _FWD(options, *operands, implementation=implementation)
    out, lse = checkpoint_name(out, "dsa_out"), checkpoint_name(lse, "dsa_lse")
    selected = checkpoint_name(selected, "dsa_topk_indices")
    return (out, lse), (*operands, selected, out, lse)


def _bwd(options: Options, implementation: Any, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    grads = _BWD(options, *residuals, *cotangents, implementation=implementation)
    return (*grads, None)


def _build_fwd(options: Options, implementation: Any, *operands: Any) -> tuple[Any, Any]:
    return _BUILD_FWD(options, *operands, implementation=implementation), ()


def _build_bwd(options: Options, implementation: Any, _: Any, cotangents: Any) -> tuple[Any, ...]:
    return _BUILD_BWD(options, *cotangents, implementation=implementation)


attend = differentiable("htree", _fwd, _bwd)
_build = differentiable("htree", _build_fwd, _build_bwd)


class HTreeSelection(NamedTuple):
    """What queries see of one layer: indices of nodes in it, in rows that ascend and end in -1.

    Attributes:
        candidates: the nodes that are looked at. The last one is the node the query itself lies in.
        selected: those of them whose children are looked at in the layer below; [B, T, G, 0] in
            layer 0. The softmax runs over the candidates that are not selected.
    """

    candidates: Int[Array, "B T G W"]
    selected: Int[Array, "B T G K"]


def check_tree(args: Args, compression: Any, top_k: Any, **others: Any) -> Options:
    """Checked options of a tree."""
    return Options(
        args.integer("compression", compression, 2), args.integer("top_k", top_k, 1), **others
    )


def check_attention(args: Args, q: jax.Array, groups: int, scale: Any, rope_base: Any) -> dict:
    """`scale` and `rope_base` for `Options`, and a check of the queries against G key heads."""
    heads, dim = q.shape[2:]
    args.option("q", q.shape, groups > 0 and heads % groups == 0, f"N a multiple of G={groups}")
    args.option("q", q.shape, dim > 0 and dim % 2 == 0, "D even, for RoPE")
    rope_base = args.real("rope_base", rope_base)
    args.option("rope_base", rope_base, rope_base > 0, "a positive float")
    scale = dim**-0.5 if scale is None else args.real("scale", scale)
    return {"scale": scale, "rope_base": rope_base}


def htree_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T G D"],
    v: Float[Array, "B T G E"],
    *,
    compression: int = 16,
    top_k: int = 512,
    scale: float | None = None,
    rope_base: float = 10000.0,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Causal attention to important spans of tokens in detail, and to the others as means.

    Layer 0 is the tokens, a node of layer l + 1 is the mean of r = `compression` nodes of layer l
    (the last one of what is left), up to the first layer of at most r * K nodes, K = `top_k`. From
    the top down, a query has as candidates all nodes of the top layer, then the children of the
    nodes it selected, in ascending order, and none past the one it lies in itself. Of n candidates
    it selects, above layer 0, that last one and the K - 1 others with the largest logsumexp of
    scores over the heads of the group, of equals the first. One softmax runs over all tokens and
    nodes that were candidates and not selected: together they are the tokens up to the query, each
    once. So for T <= r * K this is dense causal attention with RoPE. A query's result does not
    depend on T.

    In each layer RoPE (half split) rotates keys by their place among the candidates, 0..n-1, and
    the query by n - 1. A node above layer 0 that the query lies in is never scored, since it may
    hold later tokens: nothing after a query's token has any influence on it, not even NaN. The work
    for a query is at most r * K scores a layer.

    Args:
        q: queries without RoPE, bfloat16, float16 or float32. N is a multiple of G, D is even.
        k: keys without RoPE, dtype of `q`; head n of the queries attends within group n // (N/G).
        v: values, dtype of `q`.
        compression: r >= 2, children per node.
        top_k: K >= 1, nodes selected in a layer.
        scale: of the scores, default D^-1/2.
        rope_base: RoPE's base; pair i turns by `rope_base ** (-2i / D)` per place.
        return_lse: also return `lse`.
        implementation: None chooses, "cuda" and "xla" insist.

    Returns:
        `out` [B, T, N, E] in the dtype of `q`; with `return_lse` also `lse` [B, T, N], float32,
        natural logarithm. Both have gradients for q, k and v, through the nodes of all layers; the
        selection counts as constant. Without a batch axis in the arguments there is none in the
        results.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or ranges.
        NotImplementedError: forward mode, gradients of gradients, or `implementation="cuda"` for
            what it does not cover.

    Related: Native Sparse Attention (Yuan et al., 2025), which selects among the means of one
    layer of blocks.
    """
    args = Args("htree_attention", "q", q, "B T N D")
    implementation = args.implementation(implementation)
    q = args.array("q", q, "B T N D", FLOATS)
    k = args.array("k", k, "B T G D", (q.dtype,))
    v = args.array("v", v, "B T G E", (q.dtype,))
    rotary = check_attention(args, q, k.shape[2], scale, rope_base)
    options = check_tree(args, compression, top_k, **rotary)
    return_lse = args.flag("return_lse", return_lse)
    out, lse = attend(options, implementation, q, k, v, _positions(q))
    return args.restore(out, lse) if return_lse else args.restore(out)


def htree_build(
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    *,
    compression: int = 16,
    top_k: int = 512,
    implementation: Implementation | None = None,
) -> tuple[tuple[Float[Array, "B nodes G D"], Float[Array, "B nodes G E"]], ...]:
    """The tree that `htree_attention` builds: keys and values of every layer.

    Args:
        k: keys of the tokens, bfloat16, float16 or float32.
        v: values of the tokens, dtype of `k`.
        compression: r >= 2, children per node.
        top_k: K >= 1; layers are added up to the first one of at most r * K nodes.
        implementation: None chooses, "cuda" and "xla" insist.

    Returns:
        For each layer, tokens first, (keys [B, nodes, G, D], values [B, nodes, G, E]), in the dtype
        of `k`: means over the r nodes below (the last one over what is left), summed in float32 and
        rounded once a layer. Differentiable.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or ranges.
        NotImplementedError: as for `htree_attention`.
    """
    args = Args("htree_build", "k", k, "B S G D")
    implementation = args.implementation(implementation)
    k = args.array("k", k, "B S G D", FLOATS)
    v = args.array("v", v, "B S G E", (k.dtype,))
    options = check_tree(args, compression, top_k, capacity=k.shape[1])
    nodes = _build(options, implementation, k, v)
    return tuple(
        args.restore(*(x[:, start : start + size] for x in nodes))
        for size, start in htree_tree.tree_layers(k.shape[1], compression, top_k)
    )


def htree_select(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T G D"],
    *,
    compression: int = 16,
    top_k: int = 512,
    scale: float | None = None,
    rope_base: float = 10000.0,
    implementation: Implementation | None = None,
) -> tuple[HTreeSelection, ...]:
    """What every query looks at and selects in `htree_attention`, for inspection on small shapes.

    The result holds up to r * K indices for each query, group and layer, and the work is that of
    the attention.

    Args:
        q, k, compression, top_k, scale, rope_base, implementation: as for `htree_attention`.

    Returns:
        For each layer, tokens first, an `HTreeSelection` of int32 arrays. No gradients.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or ranges.
        NotImplementedError: `implementation="cuda"` for what it does not cover.
    """
    args = Args("htree_select", "q", q, "B T N D")
    implementation = args.implementation(implementation)
    q = args.array("q", q, "B T N D", FLOATS)
    k = args.array("k", k, "B T G D", (q.dtype,))
    rotary = check_attention(args, q, k.shape[2], scale, rope_base)
    options = check_tree(args, compression, top_k, **rotary)
    views = _inspect(options, implementation, q, k)
    return tuple(HTreeSelection(*args.restore(*view)) for view in views)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _inspect(
    options: Options, implementation: Any, q: jax.Array, k: jax.Array
) -> list[tuple[jax.Array, jax.Array]]:
    positions = _positions(q)
    _, _, selected = _FWD(options, q, k, k, positions, implementation=implementation)
    layers = htree_tree.tree_layers(k.shape[1], options.compression, options.top_k)
    return htree_nodes.inspect(selected, positions, layers, options.compression)


def _positions(q: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])
