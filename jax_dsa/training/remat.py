"""Rematerialisation policies, by the names that the operators give their residuals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from jax_dsa.nn.query_chunks import CHUNKED, SELECTION

if TYPE_CHECKING:
    from collections.abc import Callable

RESIDUALS = (*SELECTION, "dsa_teacher", "dsa_out", "dsa_lse")
WARMUP = ("dsa_kl_grads",)

_save = jax.checkpoint_policies.save_only_these_names
_POLICIES: dict[str, Callable[..., Any]] = {
    "none": jax.checkpoint_policies.everything_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "selection": _save(*SELECTION, CHUNKED),
    "attention": _save(*RESIDUALS, *WARMUP, CHUNKED),
}
POLICY_NAMES = tuple(_POLICIES)


def remat_policy(name: str) -> Callable[..., Any]:
    """Returns a policy for `jax.checkpoint` around a decoder block.

    The operators are deterministic, so recomputing a selection gives the same selection. Below, K
    is the number of selected keys.

    Args:
        name: One of

            - "none": Save everything and recompute nothing.
            - "full": Save nothing inside the block.
            - "selection": Save the selected keys and their logits, 8 K bytes per token, so that the
              indexer runs once. If `AttentionConfig.query_chunk` is set, also save the attention's
              output, because chunked attention already recomputes its queries.
            - "attention": Save also the teacher, 4 K bytes per token, and the attention's output
              and lse, so that attention runs once too. In the warm-up, save the gradients of the
              loss, 4 bytes for each element of the indexer's queries and keys, so that the
              probabilities of dense attention are computed once. Projections, SwiGLU and the loss
              over the selected keys are recomputed.

    Returns:
        The policy.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in POLICY_NAMES:
        raise ValueError(
            f"remat_policy: argument 'name' is {name!r}, expected one of {POLICY_NAMES}"
        )
    return _POLICIES[name]
