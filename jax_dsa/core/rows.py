"""Rows of keys that queries select by index: blocks, valid slots, gathering, and scatter-adding.

The row of an invalid slot reads as zeros, and its score is -inf. Therefore keys that no slot
selects reach no sum, whatever they contain.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa.core import compat
from jax_dsa.core.checks import INT32, Args, as_array
from jax_dsa.core.layout import PAGE_RECORD_BYTES, gather_page_records, unpack_records
from jax_dsa.core.typing import Array, Bool, Float, Int


def block_tokens(indices: Int[Array, "... K"], block_size: int) -> Int[Array, "... K*b"]:
    """Returns the positions of the tokens of blocks.

    Block j consists of the positions `j * block_size` to `(j + 1) * block_size - 1`. A list of
    blocks, as an indexer selects them, becomes a list of keys for operators such as `sparse_mla`,
    `attn_dist` and `indexer_selected_logits`, which ignore positions from S on.

    Args:
        indices: Numbers of blocks, int32, in any order. A negative number is an empty slot, and so
            is a number whose positions exceed int32.
        block_size: Number b of tokens in a block, at least 1.

    Returns:
        The positions [..., K * b], int32, in the order of the slots. Empty slots are -1.

    Raises:
        TypeError, ValueError: If an argument has the wrong type or range.

    Examples:
        >>> import jax.numpy as jnp, jax_dsa
        >>> jax_dsa.block_tokens(jnp.array([[0, 3, -1]]), 2)
        Array([[ 0,  1,  6,  7, -1, -1]], dtype=int32)
    """
    dims = " ".join("K" * max(1, np.ndim(as_array(indices))))  # type: ignore[arg-type]
    args = Args("block_tokens", "indices", indices, dims)
    blocks = args.typed("indices", indices, INT32)
    args.shape("indices", blocks, blocks.ndim > 0, "[..., K]")
    size = args.integer("block_size", block_size, 1)

    def expanded(blocks: Array) -> Array:
        used = (blocks >= 0) & (blocks <= 2**31 // size - 1)
        first = jnp.where(used, blocks, 0) * size
        within = jnp.arange(size, dtype=jnp.int32).reshape(*[1] * blocks.ndim, size)
        positions = jnp.where(used[..., None], first[..., None] + within, -1)
        return positions.reshape(*blocks.shape[:-1], blocks.shape[-1] * size)

    return expanded(compat.whole_axis(blocks, -1))


def valid_slots(
    indices: Int[Array, "B T G K"],
    ends: Int[Array, "B T"] | None,
    topk_length: Int[Array, "B T"] | None,
    keys: int,
) -> Bool[Array, "B T G K"]:
    """Returns which slots are valid: among the first `topk_length`, those with a visible key."""
    valid = (indices >= 0) & (indices < keys)
    if ends is not None:
        valid &= indices < ends[:, :, None, None]
    if topk_length is not None:
        slot = jnp.arange(indices.shape[3], dtype=jnp.int32).reshape(1, 1, 1, -1)
        valid &= slot < topk_length[:, :, None, None]
    return valid


def _addresses(
    indices: Int[Array, "B T G K"], valid: Bool[Array, "B T G K"], batch: int, keys: int
) -> tuple[Array, Array, Array]:
    """Returns the indices into `kv` [1|B, S, G, D], which all requests may share.

    Invalid slots point past its end, so that reads fill in zeros and writes are dropped.
    """
    B, _, G, _ = indices.shape
    b = jnp.arange(B if batch == B else 1, dtype=jnp.int32)[:, None, None, None]
    g = jnp.arange(G, dtype=jnp.int32)[:, None]
    return b, jnp.where(valid, indices, keys), g


def some_row(x: Array) -> Array:
    """Returns `x`, with one row of zeros if it has no rows, because a gather needs a row."""
    return x if x.shape[1] else jnp.zeros((x.shape[0], 1, *x.shape[2:]), x.dtype)


def gather_rows(
    kv: Array,
    indices: Int[Array, "B T G K"],
    valid: Bool[Array, "B T G K"],
    dtype: jnp.dtype,
    page_size: int | None = None,
) -> Float[Array, "B T G K D"]:
    """Returns the selected rows of `kv`; zeros for invalid slots.

    FP8 records are unpacked to `dtype`. `page_size` is needed for records in pages.
    """
    if kv.dtype == jnp.uint8 and kv.shape[3] == PAGE_RECORD_BYTES:
        assert page_size is not None
        return gather_page_records(kv, page_size, indices, valid, dtype)
    rows = some_row(kv).at[_addresses(indices, valid, *kv.shape[:2])].get(mode="fill", fill_value=0)
    return unpack_records(rows, dtype) if rows.dtype == jnp.uint8 else rows


def scatter_rows(
    total: Float[Array, "B S G D"],
    indices: Int[Array, "B T G K"],
    valid: Bool[Array, "B T G K"],
    rows: Float[Array, "B T G K D"],
    *,
    deterministic: bool,
) -> Float[Array, "B S G D"]:
    """Returns `total` with each slot's row added to the key that it selects.

    The order of a scatter-add is undefined on a GPU. The deterministic form sorts the slots by key,
    sums equal keys in a tree whose shape depends on the indices only, and adds each key's sum once.
    This needs a sort and reads the rows several times more.
    """
    if not deterministic:
        return total.at[_addresses(indices, valid, *total.shape[:2])].add(rows, mode="drop")
    B, T, G, K, D = rows.shape
    if T * K == 0:
        return total
    _, keys, _ = _addresses(indices, valid, *total.shape[:2])
    keys = keys.transpose(0, 2, 1, 3).reshape(B, G, T * K)
    rows = rows.transpose(0, 2, 1, 3, 4).reshape(B, G, T * K, D)
    order = jnp.argsort(keys, axis=-1, stable=True)
    keys = jnp.take_along_axis(keys, order, axis=-1)
    rows = jnp.take_along_axis(rows, order[..., None], axis=-2)

    def add(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        (starts_l, sum_l), (starts_r, sum_r) = left, right
        return starts_l | starts_r, jnp.where(starts_r[..., None], sum_r, sum_l + sum_r)

    edge = jnp.ones((B, G, 1), bool)
    change = keys[..., 1:] != keys[..., :-1]
    starts, ends = jnp.concatenate([edge, change], -1), jnp.concatenate([change, edge], -1)
    _, sums = jax.lax.associative_scan(add, (starts, rows), axis=2)
    address = _addresses(keys[:, None], ends[:, None], *total.shape[:2])
    return total.at[address].add(sums[:, None], mode="drop")


def scores(
    scale: float,
    q: Float[Array, "B T G m D"],
    rows: Float[Array, "B T G K D"],
    valid: Bool[Array, "B T G K"],
) -> Float[Array, "B T G m K"]:
    """Returns the scaled scores; -inf for invalid slots."""
    s = jnp.einsum(
        "btgmd,btgkd->btgmk", q, rows, preferred_element_type=compat.accum_dtype(q.dtype)
    )
    return jnp.where(valid[:, :, :, None], s * scale, -jnp.inf)


def query_bytes(
    q: Float[Array, "B T N D"], indices: Int[Array, "B T G K"], row_bytes: int, score_bytes: int
) -> int:
    """Returns the bytes of intermediates for one query position of all batch entries."""
    B, _, G, K = indices.shape
    return B * K * (G * q.shape[3] * row_bytes + q.shape[2] * score_bytes)
