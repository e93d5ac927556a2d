"""`segment_ids`, the numbers of packed documents, in every operator that takes them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import dsa_attention as dsa
from support.compare import assert_matches
from support.marks import slow
from support.meshes import MESHES, mesh_of
from support.transforms import weighted

from jax_dsa import (
    FlatCache,
    attention_probs,
    dense_indexer_kl_loss,
    dsa_attention,
    indexer_logits,
    indexer_topk,
    make_block_mask,
    masked_attention,
)
from jax_dsa.core.documents import document_ends, document_starts

B, T, K, E = dsa.B, 8, dsa.K, dsa.E
# The number 0 occurs in two documents of the first sequence, 7 in two of the second.
IDS = np.array([[0, 0, 4, 0, 0, 0, 2, 2], [7, 7, 7, 7, -1, 7, 7, 7]], np.int32)
STARTS = np.array([[0, 0, 2, 3, 3, 3, 6, 6], [0, 0, 0, 0, 4, 5, 5, 5]], np.int32)
ENDS = np.array([[2, 2, 3, 6, 6, 6, 8, 8], [4, 4, 4, 4, 5, 8, 8, 8]], np.int32)
SAME = STARTS[:, :, None] == STARTS[:, None]  # [B, T, S], whether a query sees a key


def arguments(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return dsa.inputs(rng, T=T, S=T)


def test_bounds_of_documents() -> None:
    np.testing.assert_array_equal(document_starts(IDS), STARTS)
    np.testing.assert_array_equal(document_ends(IDS), ENDS)
    for shape in ((2, 0), (0, 3), (1, 1)):
        ids = np.zeros(shape, np.int32)
        np.testing.assert_array_equal(document_starts(ids), ids)
        np.testing.assert_array_equal(document_ends(ids), ids + shape[1])


def test_masked_attention_sees_its_own_document(rng: np.random.Generator) -> None:
    """One array means documents. A pair means equal numbers."""
    q, k, v = rng.normal(size=(3, B, T, 2, 4)).astype(np.float32)
    equal = IDS[:, :, None] == IDS[:, None]
    for ids, seen in ((IDS, SAME), ((IDS, IDS), equal)):
        probs = attention_probs(q, k, segment_ids=ids)
        np.testing.assert_array_equal(probs > 0, np.broadcast_to(seen[:, None], probs.shape))
        blocks = make_block_mask(shape=(B, 2, T, T), segment_ids=ids, block_q=8, block_k=8)
        assert_matches(attention_probs(q, k, block_mask=blocks), probs)

    def loss(q: Any, k: Any, v: Any, **masks: Any) -> Any:
        return weighted(masked_attention(q, k, v, is_causal=True, **masks))

    gradients = jax.grad(loss, argnums=(0, 1, 2))
    want = gradients(q, k, v, mask=SAME[:, None])
    assert_matches(gradients(q, k, v, segment_ids=IDS), want)


@pytest.mark.parametrize("is_causal", [True, False])
def test_dsa_attention_equals_the_oracle(rng: np.random.Generator, is_causal: bool) -> None:
    """Further ranges narrow what a query sees."""
    args = arguments(rng)
    starts, ends = STARTS, np.minimum(ENDS, np.arange(T) + 1) if is_causal else ENDS
    options = {"top_k": K, "value_dim": E, "is_causal": is_causal, "segment_ids": IDS}
    dsa.assert_same(dsa_attention(*args, **options), dsa.oracle(*args, starts, ends))
    own_starts = rng.integers(-1, 6, (B, T)).astype(np.int32)
    own_ends = rng.integers(2, T + 3, (B, T)).astype(np.int32)
    got = dsa_attention(*args, **options, starts=own_starts, ends=own_ends)
    narrow = np.maximum(starts, own_starts), np.minimum(ends, own_ends)
    dsa.assert_same(got, dsa.oracle(*args, *narrow))


@pytest.mark.parametrize("is_causal", [True, slow(False)])
def test_dsa_attention_equals_separate_documents(rng: np.random.Generator, is_causal: bool) -> None:
    """Values and gradients agree, and those of the warm-up loss too."""
    options: dict[str, Any] = {"is_causal": is_causal}

    def run(*args: Any, **ids: Any) -> Any:
        q, kv, *index = args
        out, aux = dsa_attention(*args, top_k=3, value_dim=E, **options, **ids)
        dense = dense_indexer_kl_loss(*index, q, kv, **options, **ids)
        # The losses are means over all queries, so their sums are those of the documents.
        return out, aux.lse, aux.indices, jnp.stack([aux.kl, dense]) * q.shape[1]

    @jax.jit
    def both(weights: Any, args: tuple, **ids: Any) -> Any:
        def loss(*args: Any) -> Any:
            out, lse, indices, kl = run(*args, **ids)
            total = (out * weights).sum() + (lse * weights[..., 0]).sum() + kl.sum()
            return total, (out, lse, indices, kl)

        grads, results = jax.grad(loss, argnums=tuple(range(5)), has_aux=True)(*args)
        return *results, *grads

    args = tuple(x[:1] for x in arguments(rng))
    weights = rng.normal(size=(1, T, dsa.N, E)).astype(np.float32)
    got = both(weights, args, segment_ids=np.array([[3, 3, 3, 3, 5, 5, 5, 5]], np.int32))
    parts = []
    for half in (slice(0, 4), slice(4, 8)):
        out, lse, indices, *rest = both(weights[:, half], tuple(x[:, half] for x in args))
        parts.append((out, lse, jnp.where(indices < 0, -1, indices + half.start), *rest))
    want = [jnp.concatenate(x, axis=1) if x[0].ndim > 1 else sum(x) for x in zip(*parts)]
    assert_matches(got, tuple(want))


def test_the_indexer(rng: np.random.Generator) -> None:
    index = arguments(rng)[2:]
    got = indexer_logits(*index, segment_ids=IDS)
    np.testing.assert_array_equal(got > -np.inf, SAME)
    want = indexer_topk(*index, K, is_causal=True, starts=STARTS)
    assert_matches(indexer_topk(*index, K, is_causal=True, segment_ids=IDS), want)


def test_vmap_and_no_batch_axis(rng: np.random.Generator) -> None:
    args, options = arguments(rng), {"top_k": K, "value_dim": E, "is_causal": False}

    def run(ids: Any, *args: Any) -> Any:
        out, aux = dsa_attention(*args, **options, segment_ids=ids)
        return out, aux.indices

    want = run(IDS, *args)
    assert_matches(jax.jit(jax.vmap(run))(IDS, *args), want)
    for i in range(B):
        assert_matches(run(IDS[i], *(x[i] for x in args)), jax.tree.map(lambda x, i=i: x[i], want))


def call_all(ids: Any, *args: Any) -> Any:
    q, kv, *index = args

    def loss(*args: Any) -> Any:
        out, aux = dsa_attention(*args, top_k=K, value_dim=E, is_causal=False, segment_ids=ids)
        return weighted(out) + aux.kl

    k = jnp.broadcast_to(kv, q.shape)
    dense = dense_indexer_kl_loss(*index, q, kv, segment_ids=ids)
    out = masked_attention(q, k, k, segment_ids=ids)
    return jax.grad(loss, argnums=(0, 1, 2))(*args), dense, out


@pytest.mark.parametrize(
    ("kind", "axis"),
    [
        slow("auto", 0),
        slow("auto", 1),
        slow("explicit", 0),
        slow("explicit", 1),
        slow("explicit-of-types", 0),
        ("explicit-of-types", 1),
    ],
)
def test_meshes(kind: str, axis: int, rng: np.random.Generator, cpus: list[jax.Device]) -> None:
    """The batch or the tokens are sharded."""
    args = IDS, *arguments(rng)
    assert set(MESHES) == {"auto", "explicit", "explicit-of-types"}
    want = jax.jit(call_all)(*args)
    mesh, context = mesh_of(kind, (2,), ("x",), cpus[:2])
    spec = jax.sharding.PartitionSpec(*([None] * axis), "x")
    with context(mesh):
        sharded = jax.device_put(args, jax.sharding.NamedSharding(mesh, spec))
        assert_matches(jax.jit(call_all)(*sharded), want)


def indexer_of(rng: np.random.Generator) -> dict[str, Any]:
    return dict(zip(("index_q", "index_k", "index_weights"), arguments(rng)[2:], strict=True))


LONGER = np.zeros((B, T + 1, dsa.C), np.float32)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"segment_ids": IDS[:, 1:]}, ValueError, r"'segment_ids' has shape \(2, 7\), want .*T=8"),
    ({"segment_ids": IDS[0]}, ValueError, r"'segment_ids' has shape \(8,\), want"),
    ({"segment_ids": IDS.astype(np.float32)}, TypeError, "'segment_ids' has dtype float32, want"),
    ({"segment_ids": (IDS, IDS)}, TypeError, "'segment_ids' is tuple, want an array"),
    ({"index_k": LONGER}, ValueError, r"'segment_ids' has shape \(2, 8\), want .*T == S.*S=9"),
    ({"query_start": 1}, ValueError, "'query_start' is 1, want 0 beside 'segment_ids'"),
    (
        {"query_start": np.zeros(2, np.int32)},
        TypeError,
        "'query_start' is an array .*, want 0 beside",
    ),
    (
        {"index_k": FlatCache.empty(B, T, dsa.C, dtype=jnp.float32)},
        ValueError,
        r"'segment_ids' is an array int32\[2, 8\], want None with a cache",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_misuse(
    rng: np.random.Generator, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^indexer_topk: argument {message}"):
        indexer_topk(**(indexer_of(rng) | {"segment_ids": IDS, "top_k": 2} | change))


def test_a_single_array_needs_as_many_keys_as_queries() -> None:
    q, k = np.zeros((1, 4, 2, 3), np.float32), np.zeros((1, 6, 2, 3), np.float32)
    ids = np.zeros((1, 4), np.int32)
    message = r"'segment_ids' has shape \(1, 4\), want .*T=4 .* and S=6 .*; .*pair of arrays"
    with pytest.raises(ValueError, match=message):
        masked_attention(q, k, k, segment_ids=ids)
