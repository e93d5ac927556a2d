"""What the backward pass may recompute, by the names that the operators give their residuals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from jax_dsa.nn.query_chunks import CHUNKED, SELECTION

if TYPE_CHECKING:
    from collections.abc import Callable

RESIDUALS = (*SELECTION, "dsa_teacher", "dsa_out", "dsa_lse")
WARMUP = ("dsa_kl_grads",)

_save = jax.checkpoint_policies.save_only_these_names
_POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "selection": _save(*SELECTION, CHUNKED),
    "attention": _save(*RESIDUALS, *WARMUP, CHUNKED),
}


def remat_policy(name: str) -> Callable[..., Any] | None:
    """A policy for `jax.checkpoint` around a decoder block, or None for no rematerialisation.

    - "none": save everything; nothing is recomputed.
    - "full": save nothing inside the block.
    - "selection": save the selected keys and their logits, 8 K bytes a token, so that the indexer
      does not score and select twice; and the attention's output if `AttentionConfig.query_chunk`
      is set, which computes queries again already.
    - "attention": save also the teacher, 4 K bytes a token, and the attention's output and lse: the
      attention does not run twice either. In the warm-up save its loss's gradients, 4 bytes for
      each number of the indexer's queries and keys: dense attention's probabilities are not
      computed twice.

    A selection that is recomputed is the same one: the operators are deterministic.
    """
    if name not in _POLICIES:
        raise ValueError(
            f"remat_policy: argument 'name' is {name!r}, want one of {list(_POLICIES)}"
        )
    return _POLICIES[name]
