"""What a query of hierarchical tree attention sees of each layer, and what it selects there.

The candidates of a query have ordinals 0..n-1 in every layer, and n depends on its position alone;
only which nodes they are depends on the data. So masks and RoPE are by ordinal: the arrays below
have W columns, one per ordinal (the nodes of the top layer; r * K below).
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
    """How many candidates the queries at `positions` have in each layer; none at position -1.

    The last candidate is the node that the query itself lies in.
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
    """Ordinals of the last and the top_k - 1 most important other candidates, ascending."""
    width = importance.shape[-1]  # in place of -1, until sorted
    last = count[:, :, None, None] - 1
    others = jnp.where(
        jnp.arange(width, dtype=jnp.int32).reshape(1, 1, 1, width) < last, importance, -jnp.inf
    )
    _, best = jax.lax.top_k(others, top_k - 1)  # of equals the first
    best = jnp.where(best < last, best, width)
    last = jnp.broadcast_to(jnp.where(last < 0, width, last), (*best.shape[:-1], 1))
    best = jnp.sort(jnp.concatenate([best, last], axis=-1), axis=-1)
    return jnp.where(best < width, best, -1).astype(jnp.int32)


def selected_nodes(
    ordinals: Int[Array, "B T G K"], parents: Int[Array, "B T G K"] | None, compression: int
) -> Int[Array, "B T G K"]:
    """The nodes of these ordinals among the children of `parents` (None: the top); -1 stays -1."""
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
    """For each layer, tokens first, the candidates and the selected ones, as nodes of the layer."""
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
    """Which of `width` columns are among `ordinals`."""
    b, t, g, _ = ordinals.shape
    index = jnp.ix_(
        jnp.arange(b, dtype=jnp.int32),
        jnp.arange(t, dtype=jnp.int32),
        jnp.arange(g, dtype=jnp.int32),
    )
    index = (*(i[..., None] for i in index), jnp.where(ordinals < 0, width, ordinals))
    return jnp.zeros((b, t, g, width), bool).at[index].set(True, mode="drop")


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE, half split: rotates the pairs (x_i, x_{i + D/2}), in the dtype of the tables."""
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    cos, sin = (jnp.expand_dims(y, range(x.ndim - y.ndim)) for y in (cos, sin))
    # Stacked, since XLA fuses that on CPU and not the concatenation: 3 times as fast.
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-2).reshape(x.shape)


def _split_finite(x: Array) -> tuple[Array, Array]:
    """x as a finite and a non-finite part, each zero where the other is not.

    A matrix product over columns that some queries do not see must not meet their NaN:
    0 * NaN = NaN.
    """
    finite = jnp.isfinite(x)
    return jnp.where(finite, x, 0), jax.lax.stop_gradient(jnp.where(finite, 0, x))


@dataclasses.dataclass
class Columns:
    """One layer as a chunk of queries sees it.

    Attributes:
        keys: rotated by their ordinals: [B, T, G, W, D], or [B, W, G, D] at the top, which all
            queries share. (XLA on CPU fails on bfloat16 products with [B, G, W, D].)
        values: as keys.
        axes: the einsum letters of keys and values, but the last one.
        tables: cos and sin of the keys' rotation.
        visible: the columns whose scores count.
        poison: the non-finite part of the scores and that of the weighted sums.
    """

    keys: Array
    values: Array
    axes: str
    tables: tuple[Array, Array]
    visible: Bool[Array, "B T 1 1 W"]
    poison: tuple[Any, Any] = (0, 0)

    def dot(self, equation: str, x: Array, y: Array) -> Array:
        """einsum of operands rounded to the keys' dtype; "*" in the equation stands for `axes`."""
        dtype = self.keys.dtype
        return jnp.einsum(
            equation.replace("*", self.axes),
            x.astype(dtype),
            y.astype(dtype),
            preferred_element_type=compat.accum_dtype(dtype),
        )

    def scores(self, q: Float[Array, "B T G M D"]) -> Float[Array, "B T G M W"]:
        """q . k in all columns, visible or not."""
        return self.dot("btgmd,*d->btgmw", q, self.keys) + self.poison[0]

    def mix(self, p: Float[Array, "B T G M W"]) -> Float[Array, "B T G M E"]:
        """The values weighted by p, which is 0 where a column is not visible."""
        return self.dot("btgmw,*e->btgme", p, self.values) + self.poison[1]

    def key_gradients(self, ds: Float[Array, "B T G M W"], q: Float[Array, "B T G M D"]) -> Array:
        """Gradients of the keys before rotation, from those of the unscaled scores."""
        cos, sin = self.tables
        return rotate(self.dot("btgmw,btgmd->*d", ds, q), cos, -sin)


@dataclasses.dataclass
class Nodes:
    """Keys and values of all nodes, prepared for any number of chunks of queries.

    Attributes:
        layers: where the layers lie.
        compression: children per node.
        k, v: all nodes.
        row: the rows of the batch, of k and v, that the queries belong to.
        cos, sin: RoPE by ordinal, in the dtype that sums run in.
        top_keys, top_values: the top layer's, rotated, without non-finite parts.
        key_poison: of each top key the non-finite part, summed over D.
        value_poison: that of top values, summed over prefixes, since a query sees a prefix of the
            layer. (What it selects there does not count; but its descendants do, no more finite.)
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
        """The nodes of a tree, given as its tokens or (with `options.capacity`) as its nodes."""
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
        """The same for queries of just these rows of the batch, or for all of them in order."""
        if row.size == self.row.size:
            return self
        names = "top_keys", "top_values", "key_poison", "value_poison"
        return dataclasses.replace(self, row=row, **{n: getattr(self, n)[row] for n in names})

    def tables(self, ordinals: Int[Array, "B T"]) -> tuple[Array, Array]:
        """cos and sin for queries [B, T, G, M, D] at these ordinals."""
        return self.cos[ordinals][:, :, None, None], self.sin[ordinals][:, :, None, None]

    def columns(
        self, level: int, parents: Int[Array, "B T G K"] | None, count: Int[Array, "B T"]
    ) -> Columns:
        """Layer `level` for queries with `count` candidates there, the children of `parents`.

        `parents` is None for the top layer, and else one layer up.
        """
        # Above the tokens the last candidate may hold future ones.
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
        there = visible[:, :, None, :, None]
        keys, values = jnp.where(there, keys, 0), jnp.where(there, values, 0)
        keys = rotate(keys, self.cos, self.sin).astype(keys.dtype)
        return Columns(keys, values, "btgw", (self.cos, self.sin), visible[:, :, None, None])

    def add(self, grad: Array, level: int, parents: Array | None, update: Array) -> Array:
        """The gradient of all keys or values, and `update`, that of one layer's `Columns`."""
        size, start = self.layers[level]
        if parents is None:
            return grad.at[self.row, start : start + size].add(update)
        update = update.reshape(*parents.shape, self.compression, grad.shape[-1])
        blocks = tree.blocks(grad, self.compression)
        blocks = blocks.at[self._place(level, parents)].add(update, mode="drop")
        return blocks.reshape(grad.shape)

    def _gather(self, nodes: Array, level: int, parents: Array) -> Array:
        blocks = tree.blocks(nodes, self.compression)
        children = blocks.at[self._place(level, parents)].get(mode="clip")
        width = parents.shape[3] * self.compression
        return children.reshape(*parents.shape[:3], width, nodes.shape[-1])

    def _place(self, level: int, parents: Array) -> tuple[Any, ...]:
        """Where the children of `parents` lie in the blocks of siblings; past the end for -1."""
        b, _, g = jnp.ix_(self.row, *(jnp.arange(n, dtype=jnp.int32) for n in parents.shape[1:3]))
        block = self.layers[level].start // self.compression + parents
        block = jnp.where(parents < 0, self.k.shape[1], block)
        return b[..., None], block, slice(None), g[..., None]
