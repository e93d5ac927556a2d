"""`HTreeCache`, a cache that keeps the tree over the tokens of each request."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import compat
from jax_dsa.core.checks import FLOATS, INT32, Args
from jax_dsa.core.export import exportable
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.cache.lengths import checked_copy, extended, in_dtype_of
from jax_dsa.ops.htree import tree
from jax_dsa.ops.htree.spec import check_tree


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # == of arrays is not a bool
class HTreeCache:
    """Keys and values of the tokens of each request, and the tree of means over them.

    The cache is a pytree; `empty` creates one. All layers are stored on one node axis, tokens
    first; `layers` returns them one by one. The cache takes about r / (r - 1) times the memory of
    the tokens alone.

    Examples:
        >>> import jax, jax_dsa
        >>> k = jax.random.normal(jax.random.key(0), (2, 5, 1, 16))
        >>> cache = jax_dsa.HTreeCache.empty(batch=2, capacity=64, head_dim=16)
        >>> cache.append(k, k).lengths
        Array([5, 5], dtype=int32)

    Attributes:
        k, v: Keys (without RoPE) and values of all nodes.
        lengths: Number of tokens that each request has, int32; above `capacity` where an append
            lost tokens; see `with_lengths`.
        capacity: Maximum number of tokens per request.
        compression, top_k: As for `htree_attention`.
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
        """Returns a cache without tokens.

        Args:
            batch: Number of requests, B.
            capacity: Maximum number of tokens per request.
            head_dim: Dimension of the keys, D.
            value_dim: Dimension of the values, E. Default: D.
            groups: Number of KV heads, G.
            dtype: Dtype of keys and values; bfloat16, float16 or float32.
            compression, top_k: As for `htree_attention`.

        Returns:
            An `HTreeCache` whose `lengths` are 0.

        Raises:
            ValueError, TypeError: If an argument has the wrong type or is out of range.
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

    def with_lengths(self, lengths: Int[Array, "B"]) -> HTreeCache:
        """Returns the cache with other lengths.

        A smaller length drops the last tokens of a request, for example rejected draft tokens, and
        a length of 0 begins a new request. Nodes past the end are never read.

        Args:
            lengths: Number of tokens to keep of each request, int32. The array is copied.

        Raises:
            TypeError, ValueError: If `lengths` has the wrong type or shape.
        """
        op = "HTreeCache.with_lengths"
        lengths = checked_copy(op, "lengths", lengths, "B", self.lengths)
        return dataclasses.replace(self, lengths=lengths)

    def append(
        self,
        k: Float[Array, "B T G D"],
        v: Float[Array, "B T G E"],
        counts: Int[Array, "B"] | None = None,
    ) -> HTreeCache:
        """Returns the cache with T more tokens of each request, or the first `counts` of them.

        Only about T / r^l nodes of layer l are computed again. Keys and values are rounded to the
        dtype of the cache. Tokens beyond the capacity are dropped, because a traced function cannot
        raise. They still count: `htree_decode` needs the true length to know the positions of the
        queries. So `lengths > capacity` says that tokens were lost; compare `free_tokens` before.
        Under `jit`, donate the old cache; otherwise it is copied.

        Args:
            k: Keys without RoPE.
            v: Values.
            counts: Number of tokens to append to each request, int32 in 0..T. Default: T.

        Returns:
            The new cache.

        Raises:
            ValueError, TypeError: If an argument has the wrong shape or dtype.
        """
        args = Args("HTreeCache.append", "cache.lengths", self.lengths, "B")
        old_k, old_v, start = self.checked(args)
        k = args.array("k", k, "B T G D", FLOATS)
        v = args.array("v", v, "B T G E", FLOATS)
        new: Any = k.shape[1]
        if counts is not None:
            new = jnp.clip(args.array("counts", counts, "B", INT32), 0, new)
        lengths = extended(start, new)
        start, end = jnp.minimum(start, self.capacity), jnp.minimum(lengths, self.capacity)

        def appended(nodes: Array, new: Array, start: Array, end: Array) -> Array:
            return tree.append(nodes, new, start, end, self._layers, self.compression)

        k = compat.left_to_compiler(appended, old_k)(old_k, k, start, end)
        v = compat.left_to_compiler(appended, old_v)(old_v, v, start, end)
        k, v, lengths = args.restore((k, v, lengths))
        return dataclasses.replace(self, k=k, v=v, lengths=in_dtype_of(self.lengths, lengths))

    @property
    def free_tokens(self) -> Int[Array, "B"]:
        """The number of tokens that can still be appended to each request, int32 [B]."""
        args = Args("HTreeCache.free_tokens", "lengths", self.lengths, "B")
        lengths = args.array("lengths", self.lengths, "B", INT32)
        return args.restore(self.capacity - jnp.clip(lengths, 0, self.capacity))

    @property
    def room(self) -> Int[Array, "B"]:
        """Deprecated name of `free_tokens`."""
        warnings.warn(
            "HTreeCache.room is deprecated: use HTreeCache.free_tokens",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.free_tokens

    @property
    def layers(self) -> tuple[tuple[Array, Array], ...]:
        """Keys and values of each layer, as `htree_build` returns them for `capacity` tokens."""
        axis = self.lengths.ndim  # 1, or 0 without a batch axis

        def nodes_of(x: Array, layer: tree.Layer) -> Array:
            return jax.lax.slice_in_dim(x, layer.start, layer.start + layer.size, axis=axis)

        return tuple((nodes_of(self.k, layer), nodes_of(self.v, layer)) for layer in self._layers)

    @property
    def _layers(self) -> tuple[tree.Layer, ...]:
        return tree.tree_layers(self.capacity, self.compression, self.top_k)

    def checked(self, args: Args) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the checked arrays, with a batch axis; lengths are at least 0."""
        nodes = tree.node_count(self._layers, self.compression)
        args.bind("nodes", nodes, f"capacity={self.capacity} and compression={self.compression}")
        k = args.array("cache.k", self.k, "B nodes G D", FLOATS)
        v = args.array("cache.v", self.v, "B nodes G E", (k.dtype,))
        lengths = args.array("cache.lengths", self.lengths, "B", INT32)
        return k, v, jnp.maximum(lengths, 0)
