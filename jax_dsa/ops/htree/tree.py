"""The tree of hierarchical tree attention: the memory layout of its nodes and their pooling.

Layer 0 is the tokens. A node of layer l + 1 is the mean of `compression` nodes of layer l. The top
layer is the first one with at most `compression * top_k` nodes. All layers are stored on one node
axis, one after another, and each is padded with zeros to a multiple of `compression`. So the axis
can be viewed as blocks of siblings, `[B, nodes / r, r, G, D]`, where block `start / r + p` of a
layer contains the children of node p of the next layer.
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
    """The range of a layer on the node axis.

    Attributes:
        size: Number of nodes.
        start: Index of the first node.
    """

    size: int
    start: int


def tree_layers(tokens: int, compression: int, top_k: int) -> tuple[Layer, ...]:
    """Returns the layers of the tree over `tokens` tokens, tokens first."""
    layers = [Layer(tokens, 0)]
    while layers[-1].size > compression * top_k:
        size = -(-layers[-1].size // compression)
        layers.append(Layer(size, node_count(layers, compression)))
    return tuple(layers)


def node_count(layers: tuple[Layer, ...] | list[Layer], compression: int) -> int:
    """Returns the length of the node axis."""
    last = layers[-1]
    return last.start + -(-last.size // compression) * compression


def _children(size: int, compression: int, dtype: Any) -> np.ndarray:
    """Returns the number of children of each parent of a layer with `size` nodes.

    All parents have `compression` children except for the last one, which has the remaining ones.
    """
    first = np.arange(0, size, compression)
    return np.minimum(compression, size - first).reshape(1, -1, 1, 1).astype(dtype)


def blocks(nodes: Array, compression: int) -> Array:
    """Returns the nodes as blocks of siblings, [B, nodes / r, r, G, D]."""
    batch, size, *row = nodes.shape
    return nodes.reshape(batch, size // compression, compression, *row)


def build(x: Float[Array, "B S G D"], compression: int, top_k: int) -> Float[Array, "B nodes G D"]:
    """Returns all nodes of the tree over the tokens x.

    Means are summed in float32 and rounded to the dtype of x once per layer.
    """
    layers = tree_layers(x.shape[1], compression, top_k)
    padded: list[Array] = []
    for layer in layers:
        fill = -layer.size % compression
        padded.append(jnp.pad(x, ((0, 0), (0, fill), (0, 0), (0, 0))))
        total = blocks(padded[-1], compression).sum(2, dtype=compat.accum_dtype(x.dtype))
        x = (total / _children(layer.size, compression, total.dtype)).astype(x.dtype)
    return jnp.concatenate(padded, axis=1)


def spread(
    nodes: Float[Array, "B nodes G D"], tokens: int, compression: int, top_k: int
) -> Float[Array, "B S G D"]:
    """Returns the gradients of the tokens, given those of all nodes: the transpose of `build`."""
    layers = tree_layers(tokens, compression, top_k)

    def nodes_of(layer: Layer) -> Array:
        return jax.lax.slice_in_dim(nodes, layer.start, layer.start + layer.size, axis=1)

    grad = nodes_of(layers[-1])
    for layer in reversed(layers[:-1]):
        weighted = grad / _children(layer.size, compression, grad.dtype)
        weighted = jnp.repeat(weighted.astype(nodes.dtype), compression, axis=1)
        grad = nodes_of(layer) + weighted[:, : layer.size]
    return grad


def append(
    nodes: Float[Array, "B nodes G D"],
    x: Float[Array, "B T G D"],
    start: Int[Array, "B"],
    end: Int[Array, "B"],
    layers: tuple[Layer, ...],
    compression: int,
) -> Float[Array, "B nodes G D"]:
    """Returns `nodes` with tokens `start..end - 1` of each request replaced by the first ones of x.

    Only the nodes above new tokens are pooled again. The contents of `nodes` past the end of the
    tokens have no influence.
    """
    tokens = x.shape[1]
    start, end = start[:, None], end[:, None]

    def put(nodes: Array, layer: Layer, node: Array, valid: Array, value: Array) -> Array:
        return put_rows(nodes, jnp.where(valid, layer.start + node, -1), value.astype(nodes.dtype))

    node = start + jnp.arange(tokens, dtype=jnp.int32)[None]
    nodes = put(nodes, layers[0], node, node < end, x)
    for level, (below, layer) in enumerate(itertools.pairwise(layers), start=1):
        span = compression**level
        touched = -(-(tokens - 1) // span) + 1
        node = start // span + jnp.arange(touched, dtype=jnp.int32)[None]
        size = -(-end // (span // compression))  # of the layer below, with the new tokens
        count = jnp.clip(size - node * compression, 0, compression)
        block = jnp.minimum(below.start // compression + node, nodes.shape[1] // compression - 1)
        children = jax.vmap(lambda x, i: x[i])(blocks(nodes, compression), block)
        alive = jnp.arange(compression, dtype=jnp.int32)[None, None] < count[:, :, None]
        children = jnp.where(alive[..., None, None], children, 0)
        total = children.sum(2, dtype=compat.accum_dtype(nodes.dtype))
        mean = total / jnp.maximum(count, 1).astype(total.dtype)[:, :, None, None]
        nodes = put(nodes, layer, node, count > 0, mean)
    return nodes
