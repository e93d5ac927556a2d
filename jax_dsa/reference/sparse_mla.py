"""XLA implementation of sparse MLA: dense attention on the gathered rows of a chunk of queries.

Per query and head, over the valid slots i of its indices, with v_i the first E values of row i:

    s_i = scale * q . kv[idx_i]      lse = log sum_i exp(s_i)      gate = 1 / (1 + exp(sink - lse))
    p_i = exp(s_i - lse)             out = gate * sum_i p_i v_i

    ds_i = p_i * (gate * (dout . v_i - dout . out) + dlse)
    dsink = -(1 - gate) * dout . out

where `out` is the gated output, so that neither the gate nor its inverse has to be kept. An invalid
slot's row is read as zeros and its score as -inf, which keeps whatever is stored in unselected keys
out of every sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_dsa.core import compat
from jax_dsa.core.streaming import chunk_length, scan_chunks

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, UInt8

    from jax_dsa.ops.sparse_mla import Options

# One token of an FP8 cache: 512 e4m3 values, their 4 f32 scales, then 64 bf16 RoPE values.
RECORD_LATENT = 512
RECORD_BLOCK = 128
RECORD_ROPE = 64
RECORD_DIM = RECORD_LATENT + RECORD_ROPE
RECORD_BYTES = RECORD_LATENT + RECORD_LATENT // RECORD_BLOCK * 4 + RECORD_ROPE * 2


def unpack_records(records: UInt8[Array, "... 656"], dtype: jnp.dtype) -> Float[Array, "... 576"]:
    """The rows that FP8 cache records hold; exact in bfloat16, the scales being powers of two."""
    lead = records.shape[:-1]
    blocks = RECORD_LATENT // RECORD_BLOCK
    latent, scale, rope = jnp.split(records, (RECORD_LATENT, RECORD_BYTES - 2 * RECORD_ROPE), -1)
    latent = jax.lax.bitcast_convert_type(latent, jnp.float8_e4m3fn).astype(jnp.float32)
    scale = jax.lax.bitcast_convert_type(scale.reshape(*lead, blocks, 4), jnp.float32)
    rope = jax.lax.bitcast_convert_type(rope.reshape(*lead, RECORD_ROPE, 2), jnp.bfloat16)
    latent = latent.reshape(*lead, blocks, RECORD_BLOCK) * scale[..., None]
    latent = latent.reshape(*lead, RECORD_LATENT)
    return jnp.concatenate([latent.astype(dtype), rope.astype(dtype)], axis=-1)


def valid_slots(
    indices: Int[Array, "B T G K"],
    ends: Int[Array, "B T"] | None,
    topk_length: Int[Array, "B T"] | None,
    keys: int,
) -> Bool[Array, "B T G K"]:
    """Which slots count: the first `topk_length` of a row, where they hold a visible key."""
    valid = (indices >= 0) & (indices < keys)
    if ends is not None:
        valid &= indices < ends[:, :, None, None]
    if topk_length is not None:
        valid &= jnp.arange(indices.shape[3], dtype=jnp.int32) < topk_length[:, :, None, None]
    return valid


def _addresses(
    indices: Int[Array, "B T G K"], valid: Bool[Array, "B T G K"], batch: int, keys: int
) -> tuple[Array, Array, Array]:
    """What to index `kv` with, of which there may be one for all requests. Invalid slots point past
    its end: reads fill, writes drop.
    """
    B, _, G, _ = indices.shape
    b = jnp.arange(B if batch == B else 1, dtype=jnp.int32)[:, None, None, None]
    g = jnp.arange(G, dtype=jnp.int32)[:, None]
    return b, jnp.where(valid, indices, keys), g


def gather_rows(
    kv: Array, indices: Int[Array, "B T G K"], valid: Bool[Array, "B T G K"], dtype: jnp.dtype
) -> Float[Array, "B T G K D"]:
    """The selected rows of `kv`, zeros for invalid slots; FP8 records are unpacked to `dtype`."""
    if kv.shape[1] == 0:
        kv = jnp.zeros((kv.shape[0], 1, *kv.shape[2:]), kv.dtype)
    rows = kv.at[_addresses(indices, valid, *kv.shape[:2])].get(mode="fill", fill_value=0)
    return unpack_records(rows, dtype) if rows.dtype == jnp.uint8 else rows


def scatter_rows(
    total: Float[Array, "B S G D"],
    indices: Int[Array, "B T G K"],
    valid: Bool[Array, "B T G K"],
    rows: Float[Array, "B T G K D"],
    *,
    deterministic: bool,
) -> Float[Array, "B S G D"]:
    """`total` with each slot's row added to the key it selects.

    A scatter-add's order is open on a GPU. The deterministic form sorts the slots by key, sums
    equal keys in a tree whose shape depends on nothing but the indices, and adds each key's sum
    once: a sort and several more passes over the rows.
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


def sink_gate(
    sinks: Float[Array, "B N"] | None, lse: Float[Array, "B T G m"]
) -> Float[Array, "B T G m"] | None:
    """1 / (1 + exp(sink - lse)), what the sink leaves to the keys; 1 where there is no key."""
    if sinks is None:
        return None
    B, _, G, m = lse.shape
    empty = lse == -jnp.inf
    sinks = sinks.reshape(B, 1, G, m).astype(lse.dtype)
    return jnp.where(empty, 1, jax.nn.sigmoid(jnp.where(empty, 0, lse) - sinks))


def grouped(x: Array, groups: int) -> Array:
    """[B, T, N, ...] as [B, T, G, N/G, ...]."""
    B, T, N = x.shape[:3]
    return x.reshape(B, T, groups, N // groups, *x.shape[3:])


def row_products(dout: Float[Array, "*b E"], out: Float[Array, "*b E"]) -> Float[Array, "*b"]:
    """sum(dout * out, -1), of the values that these arrays hold.

    Where `dout` has just been rounded, XLA may leave that out here (`xla_allow_excess_precision`)
    but not where a kernel reads it. The two sums that are then subtracted from each other, one of
    them this, would be of different numbers; an explicit rounding stays.
    """
    acc = compat.accum_dtype(out.dtype)

    def exact(x: Array) -> Array:
        info = jnp.finfo(x.dtype)
        return jax.lax.reduce_precision(x.astype(acc), info.nexp, info.nmant)

    return jnp.sum(exact(dout) * exact(out), axis=-1)


def scores(
    scale: float,
    q: Float[Array, "B T G m D"],
    rows: Float[Array, "B T G K D"],
    valid: Bool[Array, "B T G K"],
) -> Float[Array, "B T G m K"]:
    """Scaled scores, -inf for invalid slots."""
    s = jnp.einsum(
        "btgmd,btgkd->btgmk", q, rows, preferred_element_type=compat.accum_dtype(q.dtype)
    )
    return jnp.where(valid[:, :, :, None], s * scale, -jnp.inf)


def probabilities(
    s: Float[Array, "B T G m K"], lse: Float[Array, "B T G m"]
) -> Float[Array, "B T G m K"]:
    """exp(s - lse), 0 where either is -inf (whatever the other is)."""
    lse = lse[..., None]
    empty = lse == -jnp.inf
    return jnp.where(empty | (s == -jnp.inf), 0, jnp.exp(s - jnp.where(empty, 0, lse)))


def query_bytes(
    q: Float[Array, "B T N D"], indices: Int[Array, "B T G K"], row_bytes: int, score_bytes: int
) -> int:
    """Bytes of intermediates for one query position of all batch rows."""
    B, _, G, K = indices.shape
    return B * K * (G * q.shape[3] * row_bytes + q.shape[2] * score_bytes)


def sparse_mla_fwd(
    options: Options,
    q: Float[Array, "B T N D"],
    kv: Array,
    indices: Int[Array, "B T G K"],
    ends: Int[Array, "B T"] | None,
    topk_length: Int[Array, "B T"] | None,
    sinks: Float[Array, "B N"] | None,
) -> tuple[Float[Array, "B T N E"], Float[Array, "B T N"]]:
    """Output in q's dtype, and log-sum-exp without the sink.

    `kv` is [B, S, G, D] in q's dtype, or uint8 FP8 records; or has a batch axis of one.
    """
    G, S = indices.shape[2], kv.shape[1]

    def chunk(carry: tuple[()], q: Array, indices: Array, ends: Array, topk_length: Array):  # type: ignore[no-untyped-def]
        valid = valid_slots(indices, ends, topk_length, S)
        rows = gather_rows(kv, indices, valid, q.dtype)
        s = scores(options.scale, grouped(q, G), rows, valid)
        top = jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf))
        top = jnp.where(top == -jnp.inf, 0, top)
        p = jnp.exp(s - top)
        total = p.sum(-1)
        empty = total == 0
        total = jnp.where(empty, 1, total)
        lse = jnp.where(empty, -jnp.inf, top[..., 0] + jnp.log(total))
        out = jnp.einsum(
            "btgmk,btgke->btgme",
            p.astype(rows.dtype),
            rows[..., : options.value_dim],
            preferred_element_type=p.dtype,
        )
        out = out / total[..., None]
        gate = sink_gate(sinks, lse)
        out = out if gate is None else out * gate[..., None]
        heads = q.shape[:3]
        out = out.reshape(*heads, options.value_dim).astype(q.dtype)
        return carry, (out, lse.reshape(heads))

    per_query = query_bytes(q, indices, 2 * q.dtype.itemsize, 12)
    size = chunk_length(q.shape[1], per_query)
    _, (out, lse) = scan_chunks(chunk, (), (q, indices, ends, topk_length), chunk=size)
    return out, lse


def sparse_mla_bwd(
    options: Options,
    q: Float[Array, "B T N D"],
    kv: Array,
    indices: Int[Array, "B T G K"],
    ends: Int[Array, "B T"] | None,
    topk_length: Int[Array, "B T"] | None,
    sinks: Float[Array, "B N"] | None,
    out: Float[Array, "B T N E"],
    lse: Float[Array, "B T N"],
    dout: Float[Array, "B T N E"],
    dlse: Float[Array, "B T N"],
) -> tuple[Float[Array, "B T N D"], Float[Array, "B S G D"] | None, Float[Array, "B N"] | None]:
    """Gradients of q in its dtype; of kv (no records) and the sinks in f32.

    The f32 ones are sums that shards contribute to; they are rounded after those have been added.
    """
    B, _, N, D = q.shape
    S, G = kv.shape[1], indices.shape[2]
    acc = compat.accum_dtype(q.dtype)
    has_dkv = kv.dtype != jnp.uint8
    carry = (
        jnp.zeros((kv.shape[0], S, G, D), acc) if has_dkv else None,
        None if sinks is None else jnp.zeros((B, N), acc),
    )

    def chunk(carry, q, indices, ends, topk_length, out, lse, dout, dlse):  # type: ignore[no-untyped-def]
        dkv, dsinks = carry
        q, dout, lse, dlse = (grouped(x, G) for x in (q, dout, lse, dlse))
        valid = valid_slots(indices, ends, topk_length, S)
        rows = gather_rows(kv, indices, valid, q.dtype)
        p = probabilities(scores(options.scale, q, rows, valid), lse)
        dp = jnp.einsum(
            "btgme,btgke->btgmk", dout, rows[..., : options.value_dim], preferred_element_type=acc
        )
        inner = row_products(dout, grouped(out, G))
        gate = sink_gate(sinks, lse)
        dp -= inner[..., None]
        weighted = p if gate is None else p * gate[..., None]
        ds = ((weighted * dp + p * dlse[..., None]) * options.scale).astype(q.dtype)
        dq = jnp.einsum("btgmk,btgkd->btgmd", ds, rows, preferred_element_type=acc)
        if dkv is not None:
            # ds^T q + p^T dout in one product: the heads' axis holds both pairs.
            left = jnp.concatenate([ds, weighted.astype(q.dtype)], axis=3)
            right = jnp.concatenate([q, _widened(dout, D)], axis=3)
            drows = jnp.einsum("btgmk,btgmd->btgkd", left, right, preferred_element_type=acc)
            dkv = scatter_rows(dkv, indices, valid, drows, deterministic=options.deterministic)
        if gate is not None:
            dsinks -= jnp.sum((1 - gate) * inner, axis=1).reshape(B, N)
        return (dkv, dsinks), (dq.reshape(*dq.shape[:2], N, D).astype(q.dtype),)

    moved = 6 if options.deterministic else 2
    per_query = query_bytes(q, indices, 2 * q.dtype.itemsize + 4 * moved, 24)
    xs = (q, indices, ends, topk_length, out, lse, dout, dlse)
    carry = compat.match_vary(carry, kv, sinks, *xs)
    size = chunk_length(q.shape[1], per_query)
    (dkv, dsinks), (dq,) = scan_chunks(chunk, carry, xs, chunk=size)
    return dq, dkv, dsinks


def _in_pool(
    options: Options, kv: Array, indices: Array, ends: Array | None, page_table: Array | None
) -> tuple[Array, Array | None]:
    """Indices and ends within `kv`, from those within each request."""
    if page_table is None:
        return indices, ends
    visible = indices if ends is None else jnp.where(indices < ends[:, :, None, None], indices, -1)
    size = options.page_size
    return physical_rows(kv.shape[1] // size, size, page_table, visible), None


def sparse_mla_decode_fwd(
    options: Options,
    q: Float[Array, "B T N D"],
    kv: Array,
    indices: Int[Array, "B T G K"],
    ends: Int[Array, "B T"] | None,
    topk_length: Int[Array, "B T"] | None,
    sinks: Float[Array, "B N"] | None,
    page_table: Int[Array, "B M"] | None,
) -> tuple[Float[Array, "B T N E"], Float[Array, "B T N"]]:
    """`sparse_mla_fwd` over a cache; with a page table, over its pool [1, P * page_size, G, D]."""
    indices, ends = _in_pool(options, kv, indices, ends, page_table)
    return sparse_mla_fwd(options, q, kv, indices, ends, topk_length, sinks)


def sparse_mla_decode_bwd(
    options: Options,
    q: Float[Array, "B T N D"],
    kv: Array,
    indices: Int[Array, "B T G K"],
    ends: Int[Array, "B T"] | None,
    topk_length: Int[Array, "B T"] | None,
    sinks: Float[Array, "B N"] | None,
    page_table: Int[Array, "B M"] | None,
    *results_and_cotangents: Array,
) -> tuple[Array, Array | None, Array | None]:
    """`sparse_mla_bwd` over a cache."""
    indices, ends = _in_pool(options, kv, indices, ends, page_table)
    return sparse_mla_bwd(
        options, q, kv, indices, ends, topk_length, sinks, *results_and_cotangents
    )


def physical_rows(
    num_pages: int, size: int, page_table: Int[Array, "B R"], positions: Int[Array, "B *n"]
) -> Int[Array, "B *n"]:
    """Where tokens lie in a pool of pages, in rows; -1 where no page is mapped."""

    def look_up(table: jax.Array, positions: jax.Array) -> jax.Array:
        page = table.at[positions // size].get(mode="fill", fill_value=-1)
        mapped = (positions >= 0) & (page >= 0) & (page < num_pages)
        return jnp.where(mapped, page * size + positions % size, -1)

    return jax.vmap(look_up)(page_table, positions)


def _widened(x: Float[Array, "B T G m E"], dim: int) -> Float[Array, "B T G m D"]:
    return jnp.pad(x, [(0, 0)] * 4 + [(0, dim - x.shape[-1])])
