"""What hierarchical tree attention takes and gives: the attention, and the building of its tree."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_dsa.core.checks import Args
from jax_dsa.core.spec import Remat
from jax_dsa.core.typing import Array, Float, Int


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


class Results(NamedTuple):
    """Output in q's dtype, lse, and selection.

    Attributes:
        selected: in [..., l - 1, :] the ordinals of the candidates selected in layer l, ascending,
            then -1.
    """

    out: Float[Array, "b t (g m) e", Remat("dsa_out")]
    lse: Float[Array, "b t (g m)", Remat("dsa_lse")]
    selected: Int[Array, "b t g l k", Remat("dsa_topk_indices")]


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

    k: Float[Array, "b u g d"]
    v: Float[Array, "b u g e"]


class TokenGradients(NamedTuple):
    """Of the tokens. Their axis is in none of the operands, so its dims stand here."""

    k: Float[Array, "b s g d"]
    v: Float[Array, "b s g e"]
