"""`HTreeCache`: a tree of keys and values that grows."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core.checks import FLOATS, INT32, Args
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.htree import tree
from jax_dsa.ops.htree.spec import check_tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # equality of arrays is no bool
class HTreeCache:
    """The tree over the tokens of each request. A pytree; `empty` makes it.

    All layers lie on one node axis, tokens first; see `layers`. Memory is about r / (r - 1) times
    that of the tokens.

    Examples:
        >>> import jax, jax_dsa
        >>> k = jax.random.normal(jax.random.key(0), (2, 5, 1, 16))
        >>> cache = jax_dsa.HTreeCache.empty(batch=2, capacity=64, head_dim=16)
        >>> cache.append(k, k).lengths
        Array([5, 5], dtype=int32)

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
        dtype = args.dtype("dtype", dtype, FLOATS)
        options = check_tree(args, compression, top_k)
        capacity = args.integer("capacity", capacity, 1)
        layers = tree.tree_layers(capacity, options.compression, options.top_k)
        nodes = tree.node_count(layers, options.compression)
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
        the cache stores. Tokens for which there is no `room` are dropped, and the length stays at
        the capacity: a traced function cannot raise. Donate the old cache under `jit`, or it is
        copied.

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
        k = tree.append(old_k, k, start, end, self._layers, self.compression)
        v = tree.append(old_v, v, start, end, self._layers, self.compression)
        k, v, end = args.restore((k, v, end))
        return dataclasses.replace(self, k=k, v=v, lengths=end)

    @property
    def free_tokens(self) -> Int[Array, "B"]:
        """How many more tokens each request has room for; 0 where the cache is full."""
        return self.capacity - jnp.clip(self.lengths, 0, self.capacity)

    @property
    def room(self) -> Int[Array, "B"]:
        """Deprecated name of `free_tokens`."""
        warnings.warn("room is deprecated, use free_tokens", DeprecationWarning, stacklevel=2)
        return self.free_tokens

    @property
    def layers(self) -> tuple[tuple[Array, Array], ...]:
        """Keys and values of each layer, as from `htree_build` for `capacity` tokens."""
        lead = self.lengths.ndim

        def of(x: Array, layer: tree.Layer) -> Array:
            return jax.lax.slice_in_dim(x, layer.start, layer.start + layer.size, axis=lead)

        return tuple((of(self.k, layer), of(self.v, layer)) for layer in self._layers)

    @property
    def _layers(self) -> tuple[tree.Layer, ...]:
        return tree.tree_layers(self.capacity, self.compression, self.top_k)

    def checked(self, args: Args) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The arrays, with a batch axis; lengths in 0..capacity."""
        nodes = tree.node_count(self._layers, self.compression)
        k = args.array("cache.k", self.k, f"B {nodes} G D", FLOATS)
        v = args.array("cache.v", self.v, f"B {nodes} G E", (k.dtype,))
        lengths = args.array("cache.lengths", self.lengths, "B", INT32)
        return k, v, jnp.clip(lengths, 0, self.capacity)
