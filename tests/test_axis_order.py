"""Messages for queries, keys and values as [B, heads, positions, dims]."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest
from support.marks import slow

import jax_dsa
from jax_dsa import FlatCache
from jax_dsa.core.axis_order import Given, exchanged

if TYPE_CHECKING:
    from collections.abc import Callable

B, T, S, N, G, D, J, C, K = 2, 16, 24, 8, 2, 12, 4, 6, 3


def f(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def i(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


Q, KV, LATENT = f(B, T, N, D), f(B, S, G, D), f(B, S, 1, D)
INDEX = {"index_q": f(B, T, J, C), "index_k": f(B, S, C), "index_weights": f(B, T, J)}
MASK = jnp.ones((1, 1, T, S), bool)

# By name: the function, its arguments, and options.
CALLS: dict[str, tuple[Callable, dict[str, Any], dict[str, Any]]] = {
    "dsa_attention": (jax_dsa.dsa_attention, {"q": Q, "kv": LATENT, **INDEX}, {"top_k": 2}),
    "dense": (jax_dsa.dense_indexer_kl_loss, {**INDEX, "q": Q, "kv": LATENT}, {}),
    "indexer_topk": (jax_dsa.indexer_topk, INDEX, {"top_k": 2}),
    "indexer_block_topk": (jax_dsa.indexer_block_topk, INDEX, {"top_k": 2, "block_size": 2}),
    "sparse_mla": (jax_dsa.sparse_mla, {"q": Q, "kv": KV, "indices": i(B, T, G, K)}, {}),
    "sparse_attention": (
        jax_dsa.sparse_attention,
        {"q": Q, "k": KV, "v": KV, "indices": i(B, T, G, K)},
        {"block_size": 4},
    ),
    "decode_blocks": (
        jax_dsa.sparse_attention_decode,
        {
            "q": Q[:, :1],
            "k_cache": FlatCache(KV, i(B)),
            "v_cache": FlatCache(KV, i(B)),
            "indices": i(B, 1, G, K),
        },
        {"block_size": 4},
    ),
    "decode": (
        jax_dsa.sparse_mla_decode,
        {"q": Q[:, :1], "cache": FlatCache(KV, i(B)), "indices": i(B, 1, K)},
        {},
    ),
    "attn_dist": (
        jax_dsa.attn_dist,
        {"q": Q, "kv": LATENT, "indices": i(B, T, K), "lse": f(B, T, N)},
        {},
    ),
    "masked_attention": (jax_dsa.masked_attention, {"q": Q, "k": KV, "v": KV}, {}),
    "masked": (jax_dsa.masked_attention, {"q": Q, "k": KV, "v": KV, "mask": MASK}, {}),
    "packed": (
        jax_dsa.masked_attention,
        {"q": Q, "k": Q, "v": Q, "segment_ids": i(B, T)},
        {},
    ),
    "self_attention": (jax_dsa.masked_attention, {"q": Q, "k": Q, "v": Q}, {}),
    "cross": (jax_dsa.masked_attention, {"q": Q, "k": f(B, S, N, D), "v": f(B, S, N, D)}, {}),
    "block_mask": (
        jax_dsa.masked_attention,
        {"q": Q, "k": Q, "v": Q},
        {"block_mask": jax_dsa.make_block_mask(shape=(1, 1, T, T), is_causal=True)},
    ),
    "varlen": (
        jax_dsa.masked_attention_varlen,
        {"q": Q[0], "k": KV[0], "v": KV[0], "cu_seqlens_q": i(2), "cu_seqlens_k": i(2)},
        {},
    ),
    "htree": (jax_dsa.htree_attention, {"q": Q, "k": KV[:, :T], "v": KV[:, :T]}, {}),
    "mqa_decode": (jax_dsa.mqa_decode, {"q": Q, "k": KV, "v": KV}, {}),
}


NO_BATCH_AXIS = (
    "decode",
    "decode_blocks",
    "masked",
    "block_mask",
    "varlen",
)  # tested in one form only


def swapped(x: Any, axis: int = 1) -> Any:
    return jnp.swapaxes(x, axis, axis + 1)


def message(fun: Callable, arguments: dict[str, Any], options: dict[str, Any]) -> str | None:
    """Returns the message of the error that a call raises, or None if it raises none."""
    try:
        jax.eval_shape(lambda **x: fun(**x, **options), **arguments)
    except (TypeError, ValueError) as e:
        return str(e)
    return None


# A call, the arguments with exchanged axes, and the argument that the message blames. None: the
# sizes fit, so there is no message.
WRONG = [
    ("dsa_attention", "q", "q"),
    ("dsa_attention", "kv", "kv"),
    ("dsa_attention", "q kv", "q"),
    ("dsa_attention", "index_q", "index_q"),
    ("dsa_attention", "index_weights", "index_weights"),
    ("dsa_attention", "q index_q", "q"),
    ("dsa_attention", "q index_q index_weights", "q"),
    ("dense", "q", "q"),
    ("dense", "kv", "kv"),
    ("dense", "index_q", "index_q"),
    ("indexer_topk", "index_q", "index_q"),
    ("indexer_block_topk", "index_q", "index_q"),
    ("sparse_mla", "q", "q"),
    ("sparse_mla", "kv", "kv"),
    ("sparse_mla", "q kv", "q"),
    ("sparse_mla", "indices", "indices"),
    ("sparse_attention", "q", "q"),
    ("sparse_attention", "k v", "k"),
    ("sparse_attention", "q k v", "q"),
    ("sparse_attention", "indices", "indices"),
    ("decode", "q", "q"),
    ("decode_blocks", "q", "q"),
    ("attn_dist", "q", "q"),
    ("attn_dist", "lse", "lse"),
    ("masked_attention", "q", None),
    ("masked_attention", "k", "k"),
    ("masked_attention", "v", "v"),
    ("masked_attention", "k v", "k"),
    ("masked_attention", "q k v", "q"),
    ("self_attention", "q", None),
    ("self_attention", "k v", "k"),
    ("self_attention", "q k v", None),
    ("block_mask", "q k v", "q"),
    ("varlen", "k v", "k"),
    ("cross", "k", "k"),
    ("masked", "q", "q"),
    ("masked", "k v", "k"),
    ("masked", "q k v", "q"),
    ("packed", "q", "q"),
    ("packed", "k v", "k"),
    ("packed", "q k v", "q"),
    ("htree", "q", "q"),
    ("htree", "k v", "k"),
    ("mqa_decode", "k v", "k"),
]


@pytest.mark.parametrize(("name", "which", "blamed"), WRONG)
@pytest.mark.parametrize("batched", [True, False])
def test_exchanged_axes(name: str, which: str, blamed: str | None, batched: bool) -> None:
    fun, arguments, options = CALLS[name]
    axis = int(name != "varlen")
    changed = {n: swapped(x, axis) if n in which.split() else x for n, x in arguments.items()}
    if not batched:
        if name in NO_BATCH_AXIS:
            return
        arguments, changed = (jax.tree.map(lambda x: x[0], x) for x in (arguments, changed))
    assert message(fun, arguments, options) is None
    text = message(fun, changed, options)
    if blamed is None:
        assert text is None
        return
    shape = re.escape(str(changed[blamed].shape))
    assert text is not None
    assert re.search(rf"^\w+: argument '{blamed}' has shape {shape}, want \[.*; did you pass", text)


def resized(x: jax.Array, axis: int, size: int) -> jax.Array:
    return jnp.zeros((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)


# Calls that take long where the size is right after all.
LONG = "dsa_attention", "decode", "decode_blocks", "attn_dist"


@pytest.mark.parametrize("name", [slow(name) if name in LONG else name for name in CALLS])
def test_no_question_after_other_mistakes(name: str) -> None:
    """One axis of one argument has a wrong size, which may be that of another axis."""
    fun, arguments, options = CALLS[name]
    for wrong, x in arguments.items():
        if not isinstance(x, jax.Array):
            continue
        for axis, size in itertools.product(range(x.ndim), (3, N + 1, 2 * T, T // 2, S)):
            text = message(fun, arguments | {wrong: resized(x, axis, size)}, options)
            assert text is None or "did you pass" not in text, (wrong, axis, size, text)


def test_several_answers_or_symbols_are_no_answer() -> None:
    q, k = Given("q", (4, 6, 8), ("T", "N", "D")), Given("k", (3, 4, 8), ("S", "G", "D"))
    assert exchanged([q, k], {}) == []  # Either could be exchanged.
    mask = Given("mask", (6, 9), ("T", "S"))
    assert exchanged([q, mask], {}) == [q]
    symbol = jax.export.symbolic_shape("t")[0]
    assert exchanged([q._replace(shape=(4, symbol, 8)), mask], {}) == []
