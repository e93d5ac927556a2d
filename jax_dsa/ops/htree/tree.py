"""The tree under hierarchical tree attention: how its nodes lie in memory, and how they are pooled.

Layer 0 is the tokens, a node of layer l + 1 is the mean of `compression` nodes of layer l, and the
top layer is the first one of at most `compression * top_k` nodes. All layers lie on one node axis,
one behind the other, each filled up with zeros to a multiple of `compression`: so the axis also
reads as blocks of siblings, `[B, nodes / r, r, G, D]`, and block `start / r + p` of a layer holds
the children of node p of the next layer.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import compat
from jax_dsa.core.layout import put_rows
from jax_dsa.core.typing import Array, Float, Int


class Layer(NamedTuple):
    """One layer's place on the node axis.

    Attributes:
        size: how many nodes it has.
        start: the first one's row.
    """

    size: int
    start: int


def tree_layers(tokens: int, compression: int, top_k: int) -> tuple[Layer, ...]:
    """The layers of the tree over `tokens` tokens, tokens first."""
    layers = [Layer(tokens, 0)]
    while layers[-1].size > compression * top_k:
        size = -(-layers[-1].size // compression)
        layers.append(Layer(size, node_count(layers, compression)))
    return tuple(layers)


def node_count(layers: tuple[Layer, ...] | list[Layer], compression: int) -> int:
    """The length of the node axis."""
    last = layers[-1]
    return last.start + -(-last.size // compression) * compression


def _children(size: int, compression: int, dtype: Any) -> np.ndarray:
    """How many of a layer's `size` nodes belong to each parent: the last one gets what is left."""
    first = np.arange(0, size, compression)
    return np.minimum(compression, size - first).reshape(1, -1, 1, 1).astype(dtype)


def blocks(nodes: Array, compression: int) -> Array:
    """The node axis as blocks of siblings."""
    batch, size, *row = nodes.shape
    return nodes.reshape(batch, size // compression, compression, *row)


def build(x: Float[Array, "B S G D"], compression: int, top_k: int) -> Float[Array, "B nodes G D"]:
    """All nodes of the tree over the tokens x: float32 means, rounded to x's dtype once a layer."""
    layers = tree_layers(x.shape[1], compression, top_k)
    parts: list[Array] = []
    for layer in layers:
        fill = -layer.size % compression
        parts.append(jnp.pad(x, ((0, 0), (0, fill), (0, 0), (0, 0))))
        total = blocks(parts[-1], compression).sum(2, dtype=compat.accum_dtype(x.dtype))
        x = (total / _children(layer.size, compression, total.dtype)).astype(x.dtype)
    return jnp.concatenate(parts, axis=1)


def spread(
    nodes: Float[Array, "B nodes G D"], tokens: int, compression: int, top_k: int
) -> Float[Array, "B S G D"]:
    """The transpose of `build`: the tokens' gradients from those of all nodes, in their dtype."""
    layers = tree_layers(tokens, compression, top_k)

    def of(layer: Layer) -> Array:
        return jax.lax.slice_in_dim(nodes, layer.start, layer.start + layer.size, axis=1)

    grad = of(layers[-1])
    for layer in reversed(layers[:-1]):
        share = grad / _children(layer.size, compression, grad.dtype)
        share = jnp.repeat(share.astype(nodes.dtype), compression, axis=1)
        grad = of(layer) + share[:, : layer.size]
    return grad


def append(
    nodes: Float[Array, "B nodes G D"],
    x: Float[Array, "B T G D"],
    start: Int[Array, "B"],
    end: Int[Array, "B"],
    layers: tuple[Layer, ...],
    compression: int,
) -> Float[Array, "B nodes G D"]:
    """`nodes` after the first of the tokens x took the places `start..end - 1`.

    Only nodes above new tokens are pooled again. What lies past the end in `nodes` may be anything.
    """
    tokens = x.shape[1]
    start, end = start[:, None], end[:, None]

    def put(nodes: Array, layer: Layer, node: Array, there: Array, value: Array) -> Array:
        return put_rows(nodes, jnp.where(there, layer.start + node, -1), value.astype(nodes.dtype))

    node = start + jnp.arange(tokens, dtype=jnp.int32)[None]
    nodes = put(nodes, layers[0], node, node < end, x)
    for level, (below, layer) in enumerate(itertools.pairwise(layers), start=1):
        span = compression**level
        touched = -(-(tokens - 1) // span) + 1
        node = start // span + jnp.arange(touched, dtype=jnp.int32)[None]
        size = -(-end // (span // compression))  # of the layer below, by now
        count = jnp.clip(size - node * compression, 0, compression)
        block = jnp.minimum(below.start // compression + node, nodes.shape[1] // compression - 1)
        children = jax.vmap(lambda x, i: x[i])(blocks(nodes, compression), block)
        alive = jnp.arange(compression, dtype=jnp.int32)[None, None] < count[:, :, None]
        children = jnp.where(alive[..., None, None], children, 0)
        total = children.sum(2, dtype=compat.accum_dtype(nodes.dtype))
        mean = total / jnp.maximum(count, 1).astype(total.dtype)[:, :, None, None]
        nodes = put(nodes, layer, node, count > 0, mean)
    return nodes
