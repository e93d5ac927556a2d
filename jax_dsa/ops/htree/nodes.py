"""The candidates of a query of hierarchical tree attention in each layer, and their selection.

The candidates of a query have the ordinals 0..n-1 in every layer. Their number n depends on the
position of the query alone; only which nodes they are depends on the data. Therefore masks and RoPE
go by ordinal. The arrays below have W columns, one per ordinal: the number of nodes in the top
layer, and r * K below it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import compat
from jax_dsa.core.typing import Array, Bool, Float, Int
from jax_dsa.ops.htree import tree
from jax_dsa.ops.htree.spec import Options


def candidate_counts(
    positions: Int[Array, "B T"], layers: tuple[tree.Layer, ...], compression: int, top_k: int
) -> list[Int[Array, "B T"]]:
    """Returns how many candidates the queries at `positions` have in each layer, tokens first.

    The last candidate is the node that contains the query itself. Queries at position -1 have no
    candidates.
    """
    counts = [positions // compression ** (len(layers) - 1) + 1]
    for level in reversed(range(len(layers) - 1)):
        parents = jnp.minimum(counts[0], top_k)
        last = positions // compression**level % compression
        counts.insert(0, compression * (parents - 1) + last + 1)
    return counts


def select(
    importance: Float[Array, "B T G W"], count: Int[Array, "B T"], top_k: int
) -> Int[Array, "B T G K"]:
    """Returns the ordinals of the selected candidates, ascending, then -1.

    These are the last candidate and the top_k - 1 most important others.
    """
    width = importance.shape[-1]  # stands for -1 until the ordinals are sorted
    last = count[:, :, None, None] - 1
    others = jnp.where(
        jnp.arange(width, dtype=jnp.int32).reshape(1, 1, 1, width) < last, importance, -jnp.inf
    )
    _, best = jax.lax.top_k(others, top_k - 1)  # among equals the first ones
    best = jnp.where(best < last, best, width)
    last = jnp.broadcast_to(jnp.where(last < 0, width, last), (*best.shape[:-1], 1))
    best = jnp.sort(jnp.concatenate([best, last], axis=-1), axis=-1)
    return jnp.where(best < width, best, -1).astype(jnp.int32)


def selected_nodes(
    ordinals: Int[Array, "B T G K"], parents: Int[Array, "B T G K"] | None, compression: int
) -> Int[Array, "B T G K"]:
    """Returns the nodes with these ordinals; -1 stays -1.

    The candidates are the children of `parents`, or all nodes of the top layer if that is None.
    """
    if parents is None:
        return ordinals
    parent = jnp.take_along_axis(parents, jnp.maximum(ordinals, 0) // compression, axis=-1)
    return jnp.where(ordinals < 0, -1, parent * compression + ordinals % compression)


def inspect(
    selected: Int[Array, "B T G L K"],
    positions: Int[Array, "B T"],
    layers: tuple[tree.Layer, ...],
    compression: int,
) -> list[tuple[Int[Array, "B T G W"], Int[Array, "B T G K"]]]:
    """Returns the candidates and the selected nodes of each layer, tokens first."""
    top_k = selected.shape[-1]
    counts = candidate_counts(positions, layers, compression, top_k)
    parents: Array | None = None
    views: list[tuple[Array, Array]] = []
    for level in reversed(range(len(layers))):
        if parents is None:
            nodes = jnp.arange(layers[level].size, dtype=jnp.int32)
            nodes = jnp.broadcast_to(nodes, (*selected.shape[:3], nodes.size))
        else:
            sibling = jnp.arange(compression, dtype=jnp.int32)
            nodes = parents[..., None] * compression + sibling.reshape(1, 1, 1, 1, -1)
            nodes = nodes.reshape(*selected.shape[:3], top_k * compression)
        column = jnp.arange(nodes.shape[-1], dtype=jnp.int32).reshape(1, 1, 1, -1)
        candidate = column < counts[level][:, :, None, None]
        nodes = jnp.where(candidate, nodes, -1)
        if level:
            parents = selected_nodes(selected[..., level - 1, :], parents, compression)
        else:
            parents = jnp.zeros((*selected.shape[:3], 0), jnp.int32)
        views.insert(0, (nodes, parents))
    return views


def mark(ordinals: Int[Array, "B T G K"], width: int) -> Bool[Array, "B T G W"]:
    """Returns a mask of `width` columns that is true for the columns in `ordinals`."""
    b, t, g, _ = ordinals.shape
    index = jnp.ix_(
        jnp.arange(b, dtype=jnp.int32),
        jnp.arange(t, dtype=jnp.int32),
        jnp.arange(g, dtype=jnp.int32),
    )
    index = (*(i[..., None] for i in index), jnp.where(ordinals < 0, width, ordinals))
    return jnp.zeros((b, t, g, width), bool).at[index].set(True, mode="drop")


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the pairs (x_i, x_{i + D/2}) (RoPE, half split), in the dtype of the tables."""
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    cos, sin = (jnp.expand_dims(y, range(x.ndim - y.ndim)) for y in (cos, sin))
    # On CPU, XLA fuses a stack but not a concatenation; this is 3 times as fast.
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-2).reshape(x.shape)


def _split_finite(x: Array) -> tuple[Array, Array]:
    """Splits x into its finite and its non-finite values; each result is 0 elsewhere.

    A matrix product runs over columns that some queries do not see. Their NaN must not be in its
    operands, because 0 * NaN = NaN.
    """
    finite = jnp.isfinite(x)
    return jnp.where(finite, x, 0), jax.lax.stop_gradient(jnp.where(finite, 0, x))


@dataclasses.dataclass
class Columns:
    """The candidates of a chunk of queries in one layer.

    Attributes:
        keys: Keys, rotated by their ordinals: [B, T, G, W, D], or [B, W, G, D] in the top layer,
            which all queries share. (XLA on CPU fails on bfloat16 products with [B, G, W, D].)
        values: Values, with the same axes.
        axes: The einsum letters of the axes of keys and values, except for the last axis.
        tables: cos and sin of the keys' rotations.
        visible: Mask of the columns whose scores count.
        poison: The non-finite values to add to the scores and to the weighted sums.
    """

    keys: Array
    values: Array
    axes: str
    tables: tuple[Array, Array]
    visible: Bool[Array, "B T 1 1 W"]
    poison: tuple[Any, Any] = (0, 0)

    def dot(self, equation: str, x: Array, y: Array) -> Array:
        """Returns an einsum of x and y, rounded to the keys' dtype.

        In the equation, "*" stands for `axes`.
        """
        dtype = self.keys.dtype
        return jnp.einsum(
            equation.replace("*", self.axes),
            x.astype(dtype),
            y.astype(dtype),
            preferred_element_type=compat.accum_dtype(dtype),
        )

    def scores(self, q: Float[Array, "B T G M D"]) -> Float[Array, "B T G M W"]:
        """Returns q . k of all columns, visible or not."""
        return self.dot("btgmd,*d->btgmw", q, self.keys) + self.poison[0]

    def mix(self, p: Float[Array, "B T G M W"]) -> Float[Array, "B T G M E"]:
        """Returns the sums of the values weighted by p, which is 0 where a column is masked."""
        return self.dot("btgmw,*e->btgme", p, self.values) + self.poison[1]

    def key_gradients(self, ds: Float[Array, "B T G M W"], q: Float[Array, "B T G M D"]) -> Array:
        """Returns the gradients of the keys before rotation, given those of the unscaled scores."""
        cos, sin = self.tables
        return rotate(self.dot("btgmw,btgmd->*d", ds, q), cos, -sin)


@dataclasses.dataclass
class Nodes:
    """Keys and values of all nodes, prepared for any number of chunks of queries.

    Attributes:
        layers: The ranges of the layers.
        compression: Children per node.
        k, v: Keys and values of all nodes.
        row: The batch entries of k and v that the queries belong to.
        cos, sin: RoPE tables by ordinal, in the dtype of accumulation.
        top_keys, top_values: The finite keys, rotated, and values of the top layer.
        key_poison: The non-finite values of each top key, summed over D.
        value_poison: The non-finite values of the top layer, summed over prefixes, since a query
            sees a prefix of the layer. (The nodes that it selects there do not count, but their
            descendants do, and those are not finite either.)
    """

    layers: tuple[tree.Layer, ...]
    compression: int
    k: Float[Array, "B nodes G D"]
    v: Float[Array, "B nodes G E"]
    row: Int[Array, "R"]
    cos: Float[Array, "W D/2"]
    sin: Float[Array, "W D/2"]
    top_keys: Float[Array, "R W G D"]
    top_values: Float[Array, "R W G E"]
    key_poison: Float[Array, "R 1 G 1 W"]
    value_poison: Float[Array, "R W+1 G E"]

    @classmethod
    def of(cls, options: Options, k: Array, v: Array) -> Nodes:
        """Returns the nodes of a tree.

        k and v are those of the tokens or, with `options.capacity`, those of all nodes.
        """
        r, top_k = options.compression, options.top_k
        tokens = k.shape[1] if options.capacity is None else options.capacity
        layers = tree.tree_layers(tokens, r, top_k)
        if options.capacity is None:
            k, v = tree.build(k, r, top_k), tree.build(v, r, top_k)

        dtype = compat.accum_dtype(k.dtype)
        width = max(1, layers[0].size if len(layers) == 1 else r * top_k)
        half = k.shape[-1] // 2
        frequency = options.rope_base ** -(np.arange(half) / half)
        angle = jnp.arange(width, dtype=dtype)[:, None] * frequency.astype(dtype)[None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)

        size, start = layers[-1]
        top = (jax.lax.slice_in_dim(x, start, start + size, axis=1) for x in (k, v))
        (keys, key_poison), (values, value_poison) = (_split_finite(x) for x in top)
        keys = rotate(keys, cos[:size, None], sin[:size, None]).astype(k.dtype)
        key_poison = jnp.swapaxes(key_poison.astype(dtype).sum(-1), 1, 2)[:, None, :, None]
        value_poison = jnp.cumsum(value_poison.astype(dtype), axis=1)
        value_poison = jnp.pad(value_poison, ((0, 0), (1, 0), (0, 0), (0, 0)))
        row = jnp.arange(k.shape[0], dtype=jnp.int32)
        return cls(layers, r, k, v, row, cos, sin, keys, values, key_poison, value_poison)

    def rows(self, row: Int[Array, "R"]) -> Nodes:
        """Returns the nodes for queries of these batch entries, or of all of them in order."""
        if row.size == self.row.size:
            return self
        names = "top_keys", "top_values", "key_poison", "value_poison"
        return dataclasses.replace(self, row=row, **{n: getattr(self, n)[row] for n in names})

    def tables(self, ordinals: Int[Array, "B T"]) -> tuple[Array, Array]:
        """Returns cos and sin for queries [B, T, G, M, D] at these ordinals."""
        return self.cos[ordinals][:, :, None, None], self.sin[ordinals][:, :, None, None]

    def columns(
        self, level: int, parents: Int[Array, "B T G K"] | None, count: Int[Array, "B T"]
    ) -> Columns:
        """Returns the candidates of queries with `count` candidates in layer `level`.

        The candidates are the children of `parents`, nodes of the layer above, or all nodes of the
        top layer if that is None.
        """
        # Above the tokens, the last candidate may contain future tokens.
        seen = (count if level == 0 else count - 1)[:, :, None]
        if parents is None:
            size = self.layers[level].size
            visible = jnp.arange(size, dtype=jnp.int32)[None, None] < seen
            index = jnp.maximum(seen, 0)[..., None]
            poison = jnp.take_along_axis(self.value_poison, index, axis=1)[:, :, :, None]
            return Columns(
                self.top_keys,
                self.top_values,
                "bwg",
                (self.cos[:size, None], self.sin[:size, None]),
                visible[:, :, None, None],
                (self.key_poison, poison),
            )
        keys, values = self._gather(self.k, level, parents), self._gather(self.v, level, parents)
        visible = jnp.arange(keys.shape[3], dtype=jnp.int32)[None, None] < seen
        mask = visible[:, :, None, :, None]
        keys, values = jnp.where(mask, keys, 0), jnp.where(mask, values, 0)
        keys = rotate(keys, self.cos, self.sin).astype(keys.dtype)
        return Columns(keys, values, "btgw", (self.cos, self.sin), visible[:, :, None, None])

    def add(self, grad: Array, level: int, parents: Array | None, update: Array) -> Array:
        """Adds `update`, the gradient of one layer's `Columns`, to that of all keys or values."""
        size, start = self.layers[level]
        if parents is None:
            return grad.at[self.row, start : start + size].add(update)
        update = update.reshape(*parents.shape, self.compression, grad.shape[-1])
        blocks = tree.blocks(grad, self.compression)
        blocks = blocks.at[self._block_index(level, parents)].add(update, mode="drop")
        return blocks.reshape(grad.shape)

    def _gather(self, nodes: Array, level: int, parents: Array) -> Array:
        blocks = tree.blocks(nodes, self.compression)
        children = blocks.at[self._block_index(level, parents)].get(mode="clip")
        width = parents.shape[3] * self.compression
        return children.reshape(*parents.shape[:3], width, nodes.shape[-1])

    def _block_index(self, level: int, parents: Array) -> tuple[Any, ...]:
        """Returns the index of the children of `parents` in the blocks; past the end for -1."""
        b, _, g = jnp.ix_(self.row, *(jnp.arange(n, dtype=jnp.int32) for n in parents.shape[1:3]))
        block = self.layers[level].start // self.compression + parents
        block = jnp.where(parents < 0, self.k.shape[1], block)
        return b[..., None], block, slice(None), g[..., None]
