"""`htree_attention`, hierarchical tree attention, its stages for inspection, and `htree_decode`."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from jax_dsa.core.arguments import NO_SYMBOL, check_heads, scale_or_default
from jax_dsa.core.call import Call
from jax_dsa.core.checks import FLOATS, Args
from jax_dsa.core.ffi import Kernel, either
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.htree import cuda, nodes, tree, xla
from jax_dsa.ops.htree.cache import HTreeCache
from jax_dsa.ops.htree.spec import Operands, Options, Tokens, check_tree

_LIMITS = (
    f"bfloat16; D = E {either(cuda.DIMS)}; compression {either(cuda.COMPRESSIONS)}; "
    f"top_k to {cuda.MAX_TOP_K}"
)

# The heads of a group select together: they are not split.
FWD = Pass(
    "htree_fwd",
    xla.htree_fwd,
    shardable="b t g",
    kernel=Kernel(
        cuda.htree_fwd,
        cuda.supports,
        limits=f"{_LIMITS}; over a cache up to {cuda.MAX_DECODE_QUERIES} queries",
    ),
)
BWD = Pass(
    "htree_bwd",
    xla.htree_bwd,
    shardable="b t g",
    kernel=Kernel(cuda.htree_bwd, cuda.bwd_supports, limits=f"{_LIMITS}; no cache"),
)
BUILD_FWD = Pass("htree_build_fwd", xla.htree_build_fwd, shardable="b g")
BUILD_BWD = Pass("htree_build_bwd", xla.htree_build_bwd, shardable="b g")

# The operators without their checks.
htree_op = differentiable("htree", FWD, BWD)
htree_build_op = differentiable("htree_build", BUILD_FWD, BUILD_BWD, residuals=lambda x, y: ())


class HTreeSelection(NamedTuple):
    """What queries see of one layer: indices of nodes in it, in rows that ascend and end in -1.

    Attributes:
        candidates: the nodes that are looked at. The last one is the node the query itself lies in.
        selected: those of them whose children are looked at in the layer below; [B, T, G, 0] in
            layer 0. The softmax runs over the candidates that are not selected.
    """

    candidates: Int[Array, "B T G W"]
    selected: Int[Array, "B T G K"]


def check_attention(args: Args, keys: str, scale: Any, rope_base: Any) -> dict[str, float]:
    """`scale` and `rope_base` for `Options`, and a check of the queries against the `keys`."""
    check_heads(args, "q", keys)
    dim = args.sizes["D"]
    args.option("q", dim, dim > 0 and dim % 2 == 0, "D even, for RoPE")
    rope_base = args.real("rope_base", rope_base)
    args.option("rope_base", rope_base, rope_base > 0, "a positive float")
    return {"scale": scale_or_default(args, scale), "rope_base": rope_base}


def _check_tokens(args: Args, name: str, letter: str) -> None:
    """Raises for a symbolic number of tokens, on which the layers of the tree depend."""
    size = args.sizes[letter]
    args.option(name, f"{letter}={size} tokens", isinstance(size, int), NO_SYMBOL)


class _Keywords(TypedDict, total=False):
    """For the overloads."""

    scale: float | None
    rope_base: float
    implementation: Implementation | None


class _TreeKeywords(_Keywords, total=False):
    compression: int
    top_k: int


OutLSE = tuple[Float[Array, "B T N E"], Float[Array, "B T N"]]


@overload
def htree_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T G D"],
    v: Float[Array, "B T G E"],
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[_TreeKeywords],
) -> Float[Array, "B T N E"]: ...
@overload
def htree_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T G D"],
    v: Float[Array, "B T G E"],
    *,
    return_lse: Literal[True],
    **keywords: Unpack[_TreeKeywords],
) -> OutLSE: ...
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
) -> Float[Array, "B T N E"] | OutLSE:
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

    Examples:
        >>> import jax, jax_dsa
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 200, 2, 16))
        >>> jax_dsa.htree_attention(q, k[:, :, :1], v[:, :, :1], compression=4, top_k=8).shape
        (1, 200, 2, 16)

    Related: Native Sparse Attention (Yuan et al., 2025), which selects among the means of one
    layer of blocks.
    """
    args = Args("htree_attention", "q", q, "B T N D")
    call = args.call(implementation)
    return_lse = args.flag("return_lse", return_lse)
    q = args.array("q", q, "B T N D", FLOATS)
    k = args.array("k", k, "B T G D", (q.dtype,))
    _check_tokens(args, "k", "T")
    v = args.array("v", v, "B T G E", (q.dtype,))
    options = check_tree(args, compression, top_k, **check_attention(args, "k", scale, rope_base))
    out, lse, _ = htree_op(call, options, Operands(q, k, v, _positions(q)))
    out, lse = args.restore((out, lse))
    return (out, lse) if return_lse else out


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

    Examples:
        >>> import jax, jax_dsa
        >>> k = jax.random.normal(jax.random.key(0), (1, 100, 1, 16))
        >>> [keys.shape[1] for keys, _ in jax_dsa.htree_build(k, k, compression=4, top_k=2)]
        [100, 25, 7]
    """
    args = Args("htree_build", "k", k, "B S G D")
    call = args.call(implementation)
    k = args.array("k", k, "B S G D", FLOATS)
    _check_tokens(args, "k", "S")
    v = args.array("v", v, "B S G E", (k.dtype,))
    options = check_tree(args, compression, top_k, capacity=k.shape[1])
    built = htree_build_op(call, options, Tokens(k, v))
    return tuple(
        args.restore((built.k[:, start : start + size], built.v[:, start : start + size]))
        for size, start in tree.tree_layers(k.shape[1], options.compression, options.top_k)
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

    Examples:
        >>> import jax, jax_dsa
        >>> q, k = jax.random.normal(jax.random.key(0), (2, 1, 32, 1, 16))
        >>> top = jax_dsa.htree_select(q, k, compression=4, top_k=2)[-1]
        >>> top.candidates[0, 31, 0]  # the nodes of the top layer that the last query looks at
        Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    args = Args("htree_select", "q", q, "B T N D")
    call = args.call(implementation)
    q = args.array("q", q, "B T N D", FLOATS)
    k = args.array("k", k, "B T G D", (q.dtype,))
    _check_tokens(args, "k", "T")
    options = check_tree(args, compression, top_k, **check_attention(args, "k", scale, rope_base))
    return tuple(HTreeSelection(*args.restore(view)) for view in _inspect(call, options, q, k))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _inspect(
    call: Call, options: Options, q: jax.Array, k: jax.Array
) -> list[tuple[jax.Array, jax.Array]]:
    positions = _positions(q)
    selected = FWD(call, options, Operands(q, k, k, positions)).selected.astype(jnp.int32)
    layers = tree.tree_layers(k.shape[1], options.compression, options.top_k)
    return nodes.inspect(selected, positions, layers, options.compression)


def _positions(q: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])


@overload
def htree_decode(
    q: Float[Array, "B T N D"],
    cache: HTreeCache,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Float[Array, "B T N E"]: ...
@overload
def htree_decode(
    q: Float[Array, "B T N D"],
    cache: HTreeCache,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[_Keywords],
) -> OutLSE: ...
def htree_decode(
    q: Float[Array, "B T N D"],
    cache: HTreeCache,
    *,
    scale: float | None = None,
    rope_base: float = 10000.0,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N E"] | OutLSE:
    """`htree_attention` of the last T tokens of each request, over a cache that holds them all.

    The result does not depend on the cache's capacity and is what `htree_attention` gives for the
    same queries. The work for a query is at most r * K scores a layer, and only what is scored is
    read, besides the top layer.

    Args:
        q: queries without RoPE, in the cache's dtype, of the tokens `lengths - T .. lengths - 1`,
            which have been appended. A query before the first token gives out = 0, lse = -inf.
        cache: keys and values, with `compression` and `top_k`.
        scale: of the scores, default D^-1/2.
        rope_base: as for `htree_attention`.
        return_lse: also return `lse`.
        implementation: None chooses, "cuda" and "xla" insist.

    Returns:
        As `htree_attention`. The gradients of the cache are those of its nodes, each layer's on its
        own.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes or ranges.
        NotImplementedError: as for `htree_attention`.

    Examples:
        >>> import jax, jax.numpy as jnp, jax_dsa
        >>> k = jax.random.normal(jax.random.key(0), (2, 5, 1, 16))
        >>> cache = jax_dsa.HTreeCache.empty(2, 64, 16, dtype=jnp.float32).append(k, k)
        >>> jax_dsa.htree_decode(k[:, -1:], cache).shape  # of the fifth token
        (2, 1, 1, 16)
    """
    args = Args("htree_decode", "q", q, "B T N D")
    call = args.call(implementation)
    return_lse = args.flag("return_lse", return_lse)
    q = args.array("q", q, "B T N D", FLOATS)
    if not isinstance(cache, HTreeCache):
        raise TypeError(
            f"{args.op}: argument 'cache' is {type(cache).__name__}, want an HTreeCache"
        )
    k, v, lengths = cache.checked(args)
    args.typed("cache.k", k, (q.dtype,))
    rotary = check_attention(args, "cache.k", scale, rope_base)
    options = check_tree(args, cache.compression, cache.top_k, capacity=cache.capacity, **rotary)
    queries = jnp.arange(-q.shape[1], 0, dtype=jnp.int32)
    positions = jnp.maximum(lengths[:, None] + queries[None], -1)
    out, lse, _ = htree_op(call, options, Operands(q, k, v, positions))
    out, lse = args.restore((out, lse))
    return (out, lse) if return_lse else out
