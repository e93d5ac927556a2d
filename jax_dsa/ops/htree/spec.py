"""Options, operands and results of hierarchical tree attention and of building its tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.checks import Args
from jax_dsa.core.spec import CONSTANT, Dtype, Remat, accumulated, like
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.htree.tree import node_count, tree_layers


@dataclasses.dataclass(frozen=True)
class Options:
    """The static options of both passes.

    Attributes:
        compression: Children per node, r.
        top_k: Nodes selected per layer, K.
        capacity: None if keys and values are those of the tokens. If they are those of all nodes
            of a tree, the number of tokens that the tree is built for.
        scale: Factor of the scores.
        rope_base: RoPE rotates pair i of D/2 by `ordinal * rope_base ** (-2i / D)`.
    """

    compression: int
    top_k: int
    capacity: int | None = None
    scale: float = 1.0
    rope_base: float = 10000.0

    @property
    def ordinal_dtype(self) -> Any:
        """The dtype of a stored selection, whose ordinals are below r * K."""
        return jnp.int16 if self.compression * self.top_k <= 2**15 else jnp.int32

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of tokens, of layers that are selected from, and of nodes."""
        tokens = known["s"] if self.capacity is None else self.capacity
        layers = tree_layers(tokens, self.compression, self.top_k)
        nodes = node_count(layers, self.compression)
        sizes = {"l": len(layers) - 1, "k": self.top_k, "u": nodes}
        return sizes if "s" in known else {**sizes, "s": tokens}


def check_tree(args: Args, compression: Any, top_k: Any, **others: Any) -> Options:
    """Returns the checked options of a tree."""
    return Options(
        args.integer("compression", compression, 2),
        args.integer("top_k", top_k, 1),
        **others,
    )


class Operands(NamedTuple):
    """The operands of both passes. The axis s is the tokens, or the nodes of a tree.

    Attributes:
        q, k, v: Queries, keys and values, without RoPE.
        positions: The token of each query; negative for a query without a token.
    """

    q: Float[Array, "b t (g m) d"]
    k: Float[Array, "b s g d"]
    v: Float[Array, "b s g e"]
    positions: Int[Array, "b t"]


class Results(NamedTuple):
    """The results of the forward pass.

    Attributes:
        out: The output, in the dtype of q.
        max_logit: The largest score of a row, or one close to it; -inf without a token. It counts
            as a constant.
        log_sum: log(sum(exp(score - max_logit))); 0 without a token. The log-sum-exp is
            `max_logit + log_sum`, and its cotangent is that of `log_sum`.
        selected: The ordinals of the candidates selected in layer l are in [..., l - 1, :],
            ascending, then -1.
    """

    out: Float[Array, "b t (g m) e", like("q"), Remat("dsa_out")]
    max_logit: Float[Array, "b t (g m)", accumulated("q"), CONSTANT, Remat("dsa_lse")]
    log_sum: Float[Array, "b t (g m)", accumulated("q"), Remat("dsa_lse")]
    selected: Int[
        Array,
        "b t g l k",
        Dtype(lambda options, _: options.ordinal_dtype),
        Remat("dsa_topk_indices"),
    ]


class Gradients(NamedTuple):
    """The gradients of q, k and v, in their dtypes."""

    q: Array
    k: Array
    v: Array


class Tokens(NamedTuple):
    """Keys and values of the tokens that a tree is built over."""

    k: Float[Array, "b s g d"]
    v: Float[Array, "b s g e"]


class Nodes(NamedTuple):
    """Keys and values of all nodes of a tree, on one axis u."""

    k: Float[Array, "b u g d", like("k")]
    v: Float[Array, "b u g e", like("v")]


class TokenGradients(NamedTuple):
    """The gradients of the tokens. No operand has their axis, so the annotations name it."""

    k: Float[Array, "b s g d", like("k")]
    v: Float[Array, "b s g e", like("v")]
