"""`htree_decode`: hierarchical tree attention over `HTreeCache`, a tree that grows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import FLOATS, INT32, Args
from jax_dsa.ops.htree import attend, check_attention, check_tree
from jax_dsa.reference import htree_tree

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from jax_dsa.core.checks import Implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HTreeCache:
    """The tree over the tokens of each request. A pytree; `empty` makes it.

    All layers lie on one node axis, tokens first; see `layers`. Memory is about r / (r - 1) times
    that of the tokens.

    Attributes:
        k, v: keys (without RoPE) and values of all nodes.
        lengths: int32, tokens held for each request. Setting it to 0 empties the cache, or to less
            cuts it off: nodes past the end are never read.
        capacity: room for tokens.
        compression, top_k: as for `htree_attention`.
    """

    k: Float[Array, "B nodes G D"]
    v: Float[Array, "B nodes G E"]
    lengths: Int[Array, "B"]
    capacity: int = dataclasses.field(metadata={"static": True})
    compression: int = dataclasses.field(metadata={"static": True})
    top_k: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        groups: int = 1,
        dtype: Any = jnp.bfloat16,
        compression: int = 16,
        top_k: int = 512,
    ) -> HTreeCache:
        """A cache without tokens.

        Args:
            batch: B.
            capacity: room for tokens.
            head_dim: D.
            value_dim: E, default D.
            groups: G, heads of keys and values.
            dtype: of keys and values.
            compression, top_k: as for `htree_attention`.
        """
        args = Args("HTreeCache.empty", "dtype", np.empty(0), "K")
        args.typed("dtype", np.empty(0, dtype), FLOATS)
        options = check_tree(args, compression, top_k)
        capacity = args.integer("capacity", capacity, 1)
        layers = htree_tree.tree_layers(capacity, options.compression, options.top_k)
        nodes = htree_tree.node_count(layers, options.compression)
        shape = (args.integer("batch", batch, 0), nodes, args.integer("groups", groups, 1))
        head_dim = args.integer("head_dim", head_dim, 1)
        value_dim = head_dim if value_dim is None else args.integer("value_dim", value_dim, 1)
        return cls(
            jnp.zeros((*shape, head_dim), dtype),
            jnp.zeros((*shape, value_dim), dtype),
            jnp.zeros(shape[0], jnp.int32),
            capacity,
            options.compression,
            options.top_k,
        )

    def append(
        self,
        k: Float[Array, "B T G D"],
        v: Float[Array, "B T G E"],
        counts: Int[Array, "B"] | None = None,
    ) -> HTreeCache:
        """The cache with T more tokens of each request, or the first `counts` of them.

        Of layer l only about T / r^l nodes are computed anew. Keys and values are rounded to what
        the cache stores. Tokens for which there is no room are dropped. Donate the old cache under
        `jit`, or it is copied.

        Args:
            k: keys without RoPE.
            v: values.
            counts: int32, in 0..T; default T.

        Raises:
            ValueError, TypeError: wrong shapes or dtypes.
        """
        args = Args("HTreeCache.append", "k", k, "B T G D")
        old_k, old_v, start = self.checked(args)
        k = args.array("k", k, "B T G D", FLOATS)
        v = args.array("v", v, "B T G E", FLOATS)
        new: Any = k.shape[1]
        if counts is not None:
            new = jnp.clip(args.array("counts", counts, "B", INT32), 0, new)
        end = jnp.minimum(start + new, self.capacity)
        k = htree_tree.append(old_k, k, start, end, self._layers, self.compression)
        v = htree_tree.append(old_v, v, start, end, self._layers, self.compression)
        k, v, end = args.restore(k, v, end)
        return dataclasses.replace(self, k=k, v=v, lengths=end)

    @property
    def layers(self) -> tuple[tuple[Array, Array], ...]:
        """Keys and values of each layer, as from `htree_build` for `capacity` tokens."""
        lead = self.lengths.ndim

        def of(x: Array, layer: htree_tree.Layer) -> Array:
            return jax.lax.slice_in_dim(x, layer.start, layer.start + layer.size, axis=lead)

        return tuple((of(self.k, layer), of(self.v, layer)) for layer in self._layers)

    @property
    def _layers(self) -> tuple[htree_tree.Layer, ...]:
        return htree_tree.tree_layers(self.capacity, self.compression, self.top_k)

    def checked(self, args: Args) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The arrays, with a batch axis."""
        nodes = htree_tree.node_count(self._layers, self.compression)
        k = args.array("cache.k", self.k, f"B {nodes} G D", FLOATS)
        v = args.array("cache.v", self.v, f"B {nodes} G E", (k.dtype,))
        return k, v, args.array("cache.lengths", self.lengths, "B", INT32)


def htree_decode(
    q: Float[Array, "B T N D"],
    cache: HTreeCache,
    *,
    scale: float | None = None,
    rope_base: float = 10000.0,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Any:
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
    """
    args = Args("htree_decode", "q", q, "B T N D")
    implementation = args.implementation(implementation)
    q = args.array("q", q, "B T N D", FLOATS)
    if not isinstance(cache, HTreeCache):
        raise TypeError(
            f"{args.op}: argument 'cache' is {type(cache).__name__}, want an HTreeCache"
        )
    k, v, lengths = cache.checked(args)
    args.typed("cache.k", k, (q.dtype,))
    rotary = check_attention(args, q, k.shape[2], scale, rope_base)
    options = check_tree(args, cache.compression, cache.top_k, capacity=cache.capacity, **rotary)
    return_lse = args.flag("return_lse", return_lse)
    queries = jnp.arange(-q.shape[1], 0, dtype=jnp.int32)
    positions = jnp.maximum(lengths[:, None] + queries, -1)
    out, lse = attend(options, implementation, q, k, v, positions)
    return args.restore(out, lse) if return_lse else args.restore(out)
