"""Wrong arguments of `indexer_kl_loss` and `dense_indexer_kl_loss`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.losses import dense_inputs

from jax_dsa import dense_indexer_kl_loss, indexer_kl_loss

X = np.zeros((2, 3, 4), np.float32)
NAMES = ("index_q", "index_k", "index_weights", "q", "kv")
DENSE = dict(zip(NAMES, dense_inputs(np.random.default_rng(0)), strict=True))


@pytest.mark.parametrize(
    ("error", "name", "args"),
    [
        (TypeError, "logits", ([1.0], X)),
        (ValueError, "logits", (X[0, 0], X[0, 0])),
        (TypeError, "logits", (X.astype(np.int32), X)),
        (ValueError, "teacher", (X, X[..., :2])),
        (TypeError, "teacher", (X, X > 0)),
        (ValueError, "valid", (X, X, X[0] > 0)),
        (TypeError, "valid", (X, X, X)),
    ],
)
def test_misuse_of_the_sparse_loss(error, name, args):
    with pytest.raises(error, match=rf"^indexer_kl_loss: argument '{name}' .*want"):
        indexer_kl_loss(*args)


@pytest.mark.parametrize(
    ("error", "name", "change"),
    [
        (TypeError, "index_q", {"index_q": 1.0}),
        (ValueError, "index_q", {"index_q": DENSE["index_weights"][0]}),
        (ValueError, "index_k", {"index_k": DENSE["index_k"][..., :2]}),
        (TypeError, "index_weights", {"index_weights": DENSE["index_weights"].astype(np.int32)}),
        (ValueError, "index_weights", {"index_weights": DENSE["index_weights"][..., :1]}),
        (ValueError, "q", {"q": DENSE["q"][:, :2]}),
        (TypeError, "q", {"q": DENSE["q"].astype(np.int32)}),
        (TypeError, "kv", {"kv": DENSE["kv"].astype(np.float16)}),
        (ValueError, "kv", {"kv": DENSE["kv"][:, :7]}),
        (ValueError, "q", {"kv": DENSE["kv"][:, :, [0, 0, 0]]}),
        (ValueError, "block_size", {"block_size": 0}),
        (TypeError, "block_size", {"block_size": 2.0}),
        (ValueError, "index_k", {"block_size": 2}),
        (ValueError, "index_k", {"block_size": 3, "index_k": DENSE["index_k"][:, :3]}),
        (
            ValueError,
            "index_k_scale",
            {"block_size": 2, "index_k": DENSE["index_k"][:, :4], "index_k_scale": X[0, :2, :3]},
        ),
        (TypeError, "scale", {"scale": "1"}),
        (ValueError, "scale", {"scale": np.nan}),
        (TypeError, "is_causal", {"is_causal": None}),
        (TypeError, "query_start", {"query_start": 0.5}),
        (ValueError, "query_start", {"query_start": np.zeros(3, np.int32)}),
        (ValueError, "index_k_scale", {"index_k_scale": X[..., 0]}),
        (TypeError, "starts", {"starts": 0}),
        (ValueError, "ends", {"ends": np.zeros((2, 4), np.int32)}),
        (TypeError, "relu", {"relu": "yes"}),
        (ValueError, "implementation", {"implementation": "pallas"}),
    ],
)
def test_misuse_of_the_dense_loss(error, name, change):
    arrays = {**DENSE, **{n: x for n, x in change.items() if n in NAMES}}
    options = {n: x for n, x in change.items() if n not in NAMES}
    with pytest.raises(error, match=rf"^dense_indexer_kl_loss: argument '{name}' .*want"):
        dense_indexer_kl_loss(*arrays.values(), **options)


def test_requesting_cuda_without_kernels_raises(without_kernels):
    with pytest.raises(NotImplementedError, match=r"^indexer_kl_loss.*implementation='xla'"):
        indexer_kl_loss(X, X, implementation="cuda")
    with pytest.raises(NotImplementedError, match=r"^dense_indexer_kl_loss.*'xla'"):
        dense_indexer_kl_loss(*DENSE.values(), implementation="cuda")


def test_the_message_about_the_number_of_blocks():
    with pytest.raises(ValueError, match=r"want \[B, W, C\] with W = S // block_size = 8 // 3$"):
        dense_indexer_kl_loss(*DENSE.values(), block_size=3)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=4))
def test_any_two_shapes_work_or_raise(a, b):
    call = lambda: indexer_kl_loss(jnp.zeros(a), jnp.ones(b))  # noqa: E731
    if a == b and len(a) in (2, 3):
        assert np.isfinite(call())
    else:
        with pytest.raises(ValueError, match=r"^indexer_kl_loss: argument '(logits|teacher)' has"):
            call()
