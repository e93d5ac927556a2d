"""The losses of an indexer that selects blocks for each KV head, as in MiniMax-M3.

They are compositions of public functions. docs/ops/losses.md shows them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.compare import assert_matches
from support.oracles import losses as oracle

import jax_dsa
from jax_dsa.ops.indexer import indexer_selected_logits

B, T, S, N, G, D, C, BLOCK, K = 2, 6, 14, 6, 2, 5, 7, 4, 2
START = S - T - 1  # the last query does not see the last key


def inputs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Returns index_q, with one head for each KV head, index_k, q and k."""
    shapes = (B, T, G, C), (B, S, C), (B, T, N, D), (B, S, G, D)
    return tuple(rng.normal(size=s).astype(np.float32) for s in shapes)


def selection(rng: np.random.Generator) -> np.ndarray:
    """Returns K different blocks [B, T, G, K] with the query's own, some slots empty."""
    own = ((START + np.arange(T)) // BLOCK)[:, None, None]
    other = rng.integers(-1, own, size=(B, T, G, K - 1))
    return np.sort(np.concatenate([other, np.broadcast_to(own, (B, T, G, 1))], -1)).astype(np.int32)


def selected_loss(index_q: Any, index_k: Any, q: Any, k: Any, blocks: Any) -> jax.Array:
    """Returns the mean over queries and index heads of the KL over the keys of the blocks."""
    causal = {"is_causal": True, "query_start": START}
    _, lse = jax_dsa.sparse_attention(q, k, k, blocks, block_size=BLOCK, return_lse=True, **causal)
    keys = jax_dsa.block_tokens(blocks, BLOCK)
    position = START + jnp.arange(T, dtype=jnp.int32)[:, None, None]
    keys = jnp.where(keys <= position, keys, -1)
    teacher = jax_dsa.attn_dist(q, k, keys, lse, head_group=N // G)  # [B, G, T, K * BLOCK]
    weights = jnp.full((B, T, 1), C**-0.5)

    def logits_of_head(index_q: jax.Array, keys: jax.Array) -> jax.Array:
        return indexer_selected_logits(index_q[:, :, None], index_k, weights, keys, relu=False)

    logits = jax.vmap(logits_of_head, in_axes=2, out_axes=1)(index_q, keys)
    rows = B * G, T, keys.shape[3]
    return jax_dsa.indexer_kl_loss(logits.reshape(rows), teacher.reshape(rows))


def expected(index_q: Any, index_k: Any, q: Any, k: Any, blocks: Any) -> tuple[Any, ...]:
    """Computes the loss and the gradients of index_q and index_k in float64, one row at a time."""
    index_q, index_k, q, k = (np.asarray(x, np.float64) for x in (index_q, index_k, q, k))
    loss, dq, dk = 0.0, np.zeros(index_q.shape), np.zeros(index_k.shape)
    rows = B * T
    for b, t, j in np.ndindex(B, T, G):
        seen = [
            s
            for block in blocks[b, t, j]
            for s in range(BLOCK * block, BLOCK * (block + 1))
            if 0 <= s < S and s <= START + t
        ]
        heads = range(j * N // G, (j + 1) * N // G)
        p = np.mean([softmax(D**-0.5 * k[b, seen, j] @ q[b, t, n]) for n in heads], axis=0)
        student = softmax(C**-0.5 * index_k[b, seen] @ index_q[b, t, j])
        loss += np.sum(p * np.log(p / student)) / (G * rows)
        dz = (student - p) * C**-0.5 / (G * rows)
        dq[b, t, j] += dz @ index_k[b, seen]
        dk[b, seen] += dz[:, None] * index_q[b, t, j]
    return loss, dq, dk


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_loss_over_the_keys_of_selected_blocks(rng: np.random.Generator) -> None:
    arrays, blocks = inputs(rng), selection(rng)
    run = jax.jit(jax.value_and_grad(selected_loss, argnums=(0, 1, 2, 3)))
    loss, (*grads, dq, dk) = run(*arrays, blocks)
    want = expected(*arrays, blocks)
    assert_matches([loss, *grads], [np.asarray(x, np.float32) for x in want], 1e-5)
    assert not np.any(dq) and not np.any(dk)


def test_warm_up_for_each_kv_head(rng: np.random.Generator) -> None:
    """It is the existing loss over all keys for each KV head, without the ReLU."""
    index_q, index_k, q, k = inputs(rng)
    weights = jnp.full((B, T, 1), C**-0.5)

    @jax.jit
    @jax.value_and_grad
    def run(index: tuple[jax.Array, jax.Array]) -> jax.Array:
        index_q, index_k = index
        heads = [
            jax_dsa.dense_indexer_kl_loss(
                index_q[:, :, j : j + 1],
                index_k,
                weights,
                q[:, :, j * N // G : (j + 1) * N // G],
                k[:, :, j : j + 1],
                query_start=START,
                relu=False,
            )
            for j in range(G)
        ]
        return jnp.stack(heads).mean()

    everything = np.broadcast_to(np.arange(-(-S // BLOCK), dtype=np.int32), (B, T, G, 4))
    want = [np.asarray(x, np.float32) for x in expected(index_q, index_k, q, k, everything)]
    loss, grads = run((index_q, index_k))
    assert_matches([loss, *grads], want, 1e-5)


def test_loss_over_selected_pools(rng: np.random.Generator) -> None:
    """If all whole blocks are selected, it is the warm-up loss over blocks."""
    blocks, size = S // BLOCK, (B, T)
    index_q, raw, q, k = inputs(rng)
    weights = jnp.asarray(rng.normal(size=(B, T, G)), jnp.float32)

    def selected(index_q: jax.Array, raw: jax.Array, weights: jax.Array) -> jax.Array:
        index = index_q, jax_dsa.mean_pool(raw, BLOCK), weights
        ends = jnp.broadcast_to((START + jnp.arange(T, dtype=jnp.int32) + 1) // BLOCK, size)
        indices, logits = jax_dsa.indexer_topk(*index, blocks, ends=ends)
        slots = jnp.broadcast_to(jnp.arange(blocks + 1, dtype=jnp.int32), (*size, blocks + 1))
        causal = {"is_causal": True, "query_start": START, "block_size": BLOCK}
        _, lse = jax_dsa.sparse_attention(q, k, k, slots, return_lse=True, **causal)
        dist = jax_dsa.attn_dist(q, k, indices, lse, head_group=N // G, **causal)
        return jax_dsa.indexer_kl_loss(logits, dist.sum(1))

    def warm_up(index_q: jax.Array, raw: jax.Array, weights: jax.Array) -> jax.Array:
        index = index_q, jax_dsa.mean_pool(raw, BLOCK), weights
        return jax_dsa.dense_indexer_kl_loss(*index, q, k, block_size=BLOCK, query_start=START)

    args = index_q, raw, weights
    got, want = (
        jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2)))(*args) for fn in (selected, warm_up)
    )
    assert_matches(got, want, 1e-5)
    mass = oracle.attention_mass(
        q, k, D**-0.5, np.zeros(size), np.broadcast_to(START + np.arange(T) + 1, size)
    )
    assert not np.allclose(mass[..., : BLOCK * blocks].sum(-1), N)  # a tail has mass
