"""What hierarchical tree attention takes and gives: the attention, and the building of its tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.checks import Args
from jax_dsa.core.spec import Dtype, Remat, accumulated, like
from jax_dsa.core.typing import Array, Float, Int
from jax_dsa.ops.htree.tree import node_count, tree_layers


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of the passes.

    Attributes:
        compression: r, children per node.
        top_k: K, nodes selected in a layer.
        capacity: None where keys and values are the tokens; where they are all nodes of a tree, how
            many tokens it is over.
        scale: of the scores.
        rope_base: RoPE rotates pair i of D/2 by `ordinal * rope_base ** (-2i / D)`.
    """

    compression: int
    top_k: int
    capacity: int | None = None
    scale: float = 1.0
    rope_base: float = 10000.0

    @property
    def ordinal_dtype(self) -> Any:
        """Of a selection that is kept: a candidate's ordinal is below r * K."""
        return jnp.int16 if self.compression * self.top_k <= 2**15 else jnp.int32

    def result_sizes(self, known: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of tokens, of layers that are selected from, and of nodes."""
        tokens = self.capacity or known["s"]
        layers = tree_layers(tokens, self.compression, self.top_k)
        nodes = node_count(layers, self.compression)
        sizes = {"l": len(layers) - 1, "k": self.top_k, "u": nodes}
        return sizes if "s" in known else {**sizes, "s": tokens}


def check_tree(args: Args, compression: Any, top_k: Any, **others: Any) -> Options:
    """Checked options of a tree."""
    return Options(
        args.integer("compression", compression, 2),
        args.integer("top_k", top_k, 1),
        **others,
    )


class Operands(NamedTuple):
    """What both passes of the attention read; s is the tokens, or the nodes of a tree.

    Attributes:
        q, k, v: not yet rotated.
        positions: the token each query stands at; negative for none.
    """

    q: Float[Array, "b t (g m) d"]
    k: Float[Array, "b s g d"]
    v: Float[Array, "b s g e"]
    positions: Int[Array, "b t"]


_ORDINALS = Dtype(lambda options, _: options.ordinal_dtype)


class Results(NamedTuple):
    """Output in q's dtype, lse, and selection.

    Attributes:
        selected: in [..., l - 1, :] the ordinals of the candidates selected in layer l, ascending,
            then -1.
    """

    out: Float[Array, "b t (g m) e", like("q"), Remat("dsa_out")]
    lse: Float[Array, "b t (g m)", accumulated("q"), Remat("dsa_lse")]
    selected: Int[
        Array,
        "b t g l k",
        Dtype(lambda options, _: options.ordinal_dtype),
        Remat("dsa_topk_indices"),
    ]


class Gradients(NamedTuple):
    """Of the attention's arrays, in their dtypes."""

    q: Array
    k: Array
    v: Array


class Tokens(NamedTuple):
    """Keys and values that a tree is built over."""

    k: Float[Array, "b s g d"]
    v: Float[Array, "b s g e"]


class Nodes(NamedTuple):
    """Keys and values of all nodes of a tree, on one axis u."""

    k: Float[Array, "b u g d", like("k")]
    v: Float[Array, "b u g e", like("v")]


class TokenGradients(NamedTuple):
    """Of the tokens. Their axis is in none of the operands, so its dims stand here."""

    k: Float[Array, "b s g d", like("k")]
    v: Float[Array, "b s g e", like("v")]
