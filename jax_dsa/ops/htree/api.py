"""The public functions of hierarchical tree attention.

`htree_attention` and `htree_decode` attend; `htree_build` and `htree_select` return the tree and
the selection for inspection.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from jax_dsa.core.arguments import NO_SYMBOL, check_heads, scale_or_default
from jax_dsa.core.call import Call
from jax_dsa.core.checks import FLOATS, Args, type_of
from jax_dsa.core.export import exportable
from jax_dsa.core.ffi import Kernel, either
from jax_dsa.core.op import Pass, differentiable
from jax_dsa.core.softmax import requested
from jax_dsa.core.typing import Array, Float, Implementation, Int
from jax_dsa.ops.htree import cuda, nodes, tree, xla
from jax_dsa.ops.htree.cache import HTreeCache
from jax_dsa.ops.htree.spec import Operands, Options, Tokens, check_tree

_LIMITS = (
    f"bfloat16; D = E {either(cuda.DIMS)}; compression {either(cuda.COMPRESSIONS)}; "
    f"top_k to {cuda.MAX_TOP_K}"
)

# The heads of a KV head group select together, so a mesh must not split them.
FWD = Pass(
    "htree_fwd",
    xla.htree_fwd,
    shardable="b t g",
    kernel=Kernel(
        cuda.htree_fwd,
        cuda.supports,
        limits=f"{_LIMITS}; over a cache up to {cuda.MAX_DECODE_QUERIES} queries",
        portable=cuda.portable_supports,
    ),
)
BWD = Pass(
    "htree_bwd",
    xla.htree_bwd,
    shardable="b t g",
    kernel=Kernel(
        cuda.htree_bwd,
        cuda.bwd_supports,
        limits=f"{_LIMITS}; no cache",
        portable=cuda.bwd_supports,
    ),
)
BUILD_FWD = Pass("htree_build_fwd", xla.htree_build_fwd, shardable="b g")
BUILD_BWD = Pass("htree_build_bwd", xla.htree_build_bwd, shardable="b g")

# The operators, without the checks of their arguments.
htree_op = differentiable("htree", FWD, BWD)
htree_build_op = differentiable("htree_build", BUILD_FWD, BUILD_BWD, residuals=lambda x, y: ())


@exportable
class HTreeSelection(NamedTuple):
    """The candidates and the selected nodes of one layer, by query and KV head group.

    Rows contain indices of nodes of the layer, int32, in ascending order, followed by -1.

    Attributes:
        candidates: The candidates. The last one is the node that contains the query itself.
        selected: The selected ones, whose children are the candidates in the layer below;
            [B, T, G, 0] in layer 0. The softmax runs over the candidates that are not selected.
    """

    candidates: Int[Array, "B T G W"]
    selected: Int[Array, "B T G K"]


def check_attention(args: Args, keys: str, scale: Any, rope_base: Any) -> dict[str, float]:
    """Checks the queries against the keys, and returns `scale` and `rope_base` for `Options`."""
    check_heads(args, "q", keys)
    dim = args.sizes["D"]
    args.option("q", dim, dim > 0 and dim % 2 == 0, "D even, for RoPE")
    rope_base = args.real("rope_base", rope_base)
    args.option("rope_base", rope_base, rope_base > 0, "a positive float")
    return {"scale": scale_or_default(args, scale), "rope_base": rope_base}


def _check_tokens(args: Args, name: str, letter: str) -> None:
    """Raises if the number of tokens is symbolic: the layers of the tree depend on it."""
    size = args.sizes[letter]
    args.option(name, f"{letter}={size} tokens", isinstance(size, int), NO_SYMBOL)


class _Keywords(TypedDict, total=False):
    """Keyword arguments that the overloads share."""

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
    """Returns causal attention to important tokens one by one, and to the others as means.

    Tree: layer 0 is the tokens. A node of layer l + 1 is the mean of r = `compression` nodes of
    layer l; the last node is the mean of the remaining ones. The first layer with at most r * K
    nodes, K = `top_k`, is the top layer.

    Selection: in the top layer all nodes are candidates of a query, and in each layer below the
    children of the nodes that it selected, in ascending order, in both cases up to the node that
    contains the query itself. In each layer above layer 0, the query selects that last candidate
    and the K - 1 others with the largest logsumexp of scores over the heads of the KV head group.
    Ties go to the lower index.

    Attention: one softmax runs over all candidates, in all layers, that are not selected. Together
    they cover the tokens up to the query, each exactly once. So for T <= r * K this is dense causal
    attention with RoPE. The result of a query does not depend on T.

    In each layer, RoPE (half split) rotates the n candidates by 0..n-1 and the query by n - 1. The
    last candidate is not scored above layer 0, because it may contain later tokens: tokens after
    the query have no influence on it, not even if they are NaN. A query computes at most r * K
    scores per layer.

    Args:
        q: Queries without RoPE; bfloat16, float16 or float32. N is a multiple of G, D is even.
        k: Keys without RoPE, in the dtype of `q`. Query head n attends to KV head n // (N / G).
        v: Values, in the dtype of `q`.
        compression: Children per node, r >= 2.
        top_k: Nodes selected per layer, K >= 1.
        scale: Factor of the scores. Default: D^-1/2.
        rope_base: Base of RoPE. Pair i rotates by `rope_base ** (-2i / D)` radians per position.
        return_lse: Whether to return `lse`, too.
        implementation: "cuda" or "xla"; None chooses automatically.

    Returns:
        `out` [B, T, N, E] in the dtype of `q`; with `return_lse` also `lse` [B, T, N], float32,
        natural logarithm. Both have gradients for q, k and v, through the nodes of all layers. The
        selection is treated as constant. If the arguments have no batch axis, neither have the
        results.

    Raises:
        ValueError, TypeError: If an argument has the wrong shape or dtype, or is out of range.
        NotImplementedError: For forward-mode differentiation, for gradients of gradients, and if
            `implementation="cuda"` does not cover the call.

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
    y = args.restore(htree_op(call, options, Operands(q, k, v, _positions(q))))
    return requested(y, return_lse)


def htree_build(
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G E"],
    *,
    compression: int = 16,
    top_k: int = 512,
    implementation: Implementation | None = None,
) -> tuple[tuple[Float[Array, "B nodes G D"], Float[Array, "B nodes G E"]], ...]:
    """Returns the tree that `htree_attention` builds: keys and values of every layer.

    Args:
        k: Keys of the tokens; bfloat16, float16 or float32.
        v: Values of the tokens, in the dtype of `k`.
        compression: Children per node, r >= 2.
        top_k: Nodes selected per layer, K >= 1. The first layer with at most r * K nodes is the
            last one.
        implementation: "cuda" or "xla"; None chooses automatically.

    Returns:
        For each layer, tokens first, (keys [B, nodes, G, D], values [B, nodes, G, E]), in the dtype
        of `k`. Nodes are means of r nodes of the layer below (the last one of the remaining nodes),
        summed in float32 and rounded once per layer. The result is differentiable.

    Raises:
        ValueError, TypeError: If an argument has the wrong shape or dtype, or is out of range.
        NotImplementedError: As for `htree_attention`.

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
    """Returns the candidates and the selection of every query in `htree_attention`.

    This is meant for inspection on small shapes: the result has up to r * K indices for each query,
    KV head group and layer, and computing it costs as much as the attention.

    Args:
        q, k, compression, top_k, scale, rope_base, implementation: As for `htree_attention`.

    Returns:
        For each layer, tokens first, an `HTreeSelection` of int32 arrays, without gradients.

    Raises:
        ValueError, TypeError: If an argument has the wrong shape or dtype, or is out of range.
        NotImplementedError: If `implementation="cuda"` does not cover the call.

    Examples:
        >>> import jax, jax_dsa
        >>> q, k = jax.random.normal(jax.random.key(0), (2, 1, 32, 1, 16))
        >>> top = jax_dsa.htree_select(q, k, compression=4, top_k=2)[-1]
        >>> top.candidates[0, 31, 0]  # candidates of the last query in the top layer
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
    """Returns `htree_attention` of the last T tokens of each request, over a cache of all tokens.

    The result equals that of `htree_attention` for the same queries and does not depend on the
    capacity of the cache. A query computes at most r * K scores per layer, and reads only the
    nodes that it scores, besides the top layer.

    Args:
        q: Queries without RoPE, in the dtype of the cache, of the tokens `lengths - T ..
            lengths - 1`, which must have been appended. A query before the first token has
            out = 0 and lse = -inf. A query beyond the capacity sees all tokens of the cache.
        cache: Keys and values; it also sets `compression` and `top_k`.
        scale: Factor of the scores. Default: D^-1/2.
        rope_base: As for `htree_attention`.
        return_lse: Whether to return `lse`, too.
        implementation: "cuda" or "xla"; None chooses automatically.

    Returns:
        The same as `htree_attention`. Gradients of the cache are those of its nodes, for each layer
        separately.

    Raises:
        ValueError, TypeError: If an argument has the wrong shape or dtype, or is out of range.
        NotImplementedError: As for `htree_attention`.

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
        raise TypeError(f"{args.op}: argument 'cache' is {type_of(cache)}, expected an HTreeCache")
    k, v, lengths = cache.checked(args)
    args.typed("cache.k", k, (q.dtype,))
    rotary = check_attention(args, "cache.k", scale, rope_base)
    options = check_tree(args, cache.compression, cache.top_k, capacity=cache.capacity, **rotary)
    queries = jnp.arange(-q.shape[1], 0, dtype=jnp.int32)
    # A query whose token did not fit sees all tokens that the cache holds.
    positions = jnp.clip(lengths[:, None] + queries[None], -1, cache.capacity - 1)
    y = args.restore(htree_op(call, options, Operands(q, k, v, positions)))
    return requested(y, return_lse)
