"""`indexer_kl_loss` and `dense_indexer_kl_loss` against loops in float64."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from support.compare import Variable, assert_as_good_as, assert_matches, assert_unmoved
from support.losses import dense_inputs
from support.oracles import indexer as indexer_oracle
from support.oracles import losses as oracle

import jax_dsa
from jax_dsa import dense_indexer_kl_loss, indexer_kl_loss
from jax_dsa.core import streaming
from jax_dsa.ops.losses import xla
from jax_dsa.ops.losses.api import mean_over_rows
from jax_dsa.ops.losses.spec import DenseOperands, DenseOptions

INF, NAN = np.inf, np.nan


def slots(rng, shape=(2, 5, 7)):
    """Returns logits whose rows end in -inf, some entirely, and a teacher with some zeros."""
    filled = np.arange(shape[-1]) < rng.integers(0, shape[-1] + 1, size=(*shape[:-1], 1))
    logits = np.where(filled, 3 * rng.normal(size=shape), -INF).astype(np.float32)
    teacher = (rng.exponential(size=shape) * (rng.random(shape) < 0.8)).astype(np.float32)
    return logits, teacher


value_and_grad = jax.jit(jax.value_and_grad(indexer_kl_loss))


def test_sparse_loss_and_gradient(rng):
    logits, teacher = slots(rng)
    loss, grad = value_and_grad(logits, teacher)
    want, want_grad = oracle.kl_rows(logits, teacher, logits > -INF)
    assert loss.shape == () and loss.dtype == jnp.float32
    assert_matches(loss, np.float32(want), 1e-5)
    assert_matches(grad, want_grad.astype(np.float32), 1e-5)


def test_valid_restricts_both_sides(rng):
    logits, teacher = slots(rng)
    logits = np.maximum(logits, -5)
    valid = rng.random(logits.shape) < 0.6
    valid[0, 0] = False
    dirty = [
        np.where(valid, x, bad).astype(np.float32) for x in (logits, teacher) for bad in (NAN, INF)
    ]
    want, want_grad = oracle.kl_rows(logits, teacher, valid)
    for x, p in ((logits, teacher), (dirty[0], dirty[2]), (dirty[1], dirty[3])):
        loss, grad = value_and_grad(x, p, valid)
        assert_matches((loss, grad), (np.float32(want), want_grad.astype(np.float32)), 1e-5)


def test_only_rows_with_slots_and_teacher_mass_count():
    logits = np.array([[0.0, 1.0], [-INF, -INF], [0.0, 1.0], [2.0, -INF]], np.float32)
    teacher = np.array([[1.0, 3.0], [1.0, 1.0], [0.0, 0.0], [5.0, 5.0]], np.float32)
    loss, grad = value_and_grad(logits, teacher)  # rows 0 and 3 count; the KL of row 3 is 0
    q = np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert_matches(loss, np.float32((0.25 * np.log(0.25 / q[0]) + 0.75 * np.log(0.75 / q[1])) / 2))
    np.testing.assert_allclose(grad[0], (q - [0.25, 0.75]) / 2, rtol=1e-5)
    np.testing.assert_array_equal(grad[1:], np.zeros((3, 2)))


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0), (2, 0, 4), (0, 3, 4)])
def test_no_row_counts(shape):
    loss, grad = value_and_grad(np.full(shape, -INF, np.float32), np.ones(shape, np.float32))
    assert loss == 0
    np.testing.assert_array_equal(grad, np.zeros(shape))


@pytest.mark.parametrize("rows", [1, 3, 49, 1000, 8192, 99991])
def test_the_weight_of_a_row_is_exact(rows):
    """Checks the last bit. If it were wrong, the kernel would scale all gradients by about 1."""
    weight = jax.jit(jax.grad(lambda kl: mean_over_rows(kl, jnp.ones(rows, bool), rows)))
    np.testing.assert_array_equal(weight(jnp.ones(rows)), np.full(rows, np.float32(1 / rows)))


def test_a_valid_slot_with_a_logit_of_minus_inf():
    logits, valid = np.array([[0.0, -INF, 1.0]], np.float32), np.ones((1, 3), bool)
    loss, grad = value_and_grad(logits, np.array([[1.0, 0.0, 1.0]], np.float32), valid)
    assert np.isfinite(loss) and np.isfinite(grad).all()
    loss, grad = value_and_grad(logits, np.array([[1.0, 1.0, 1.0]], np.float32), valid)
    assert loss == INF
    np.testing.assert_allclose(grad[0, 1], -1 / 3, rtol=1e-6)
    loss, grad = value_and_grad(
        np.full((1, 3), -INF, np.float32), np.ones((1, 3), np.float32), valid
    )
    assert loss == INF
    np.testing.assert_allclose(grad, np.full((1, 3), -1 / 3), rtol=1e-6)


def test_small_gradients_survive():
    """Uses probabilities of 1e-20, for which log(pred + eps) would round the gradient to 0."""
    logits = np.array([[0.0, -46.0, -46.0]], np.float32)
    teacher = np.array([[1.0, 3e-20, 0.0]], np.float32)
    _, grad = value_and_grad(logits, teacher)
    _, want = oracle.kl_rows(logits, teacher, np.ones((1, 3), bool))
    np.testing.assert_allclose(grad[0, 1:], want[0, 1:], rtol=1e-5)


def test_far_apart_logits_and_tiny_teachers_stay_finite():
    logits = np.array([[3e38, -3e38], [1e4, -1e4]], np.float32)
    loss, grad = value_and_grad(logits, np.array([[1e-38, 0.0], [1e30, 0.0]], np.float32))
    assert loss == 0
    np.testing.assert_array_equal(grad, np.zeros((2, 2)))


def test_the_teacher_gets_no_gradient(rng):
    logits, teacher = slots(rng)
    assert (np.asarray(jax.grad(indexer_kl_loss, argnums=1)(logits, teacher)) == 0).all()
    inputs = dense_inputs(rng)
    for grad in jax.grad(dense_indexer_kl_loss, argnums=(3, 4))(*inputs):
        assert (np.asarray(grad) == 0).all()


def test_the_teacher_gets_no_gradient_in_plain_xla(rng):
    logits, teacher = slots(rng)
    inputs = dense_inputs(rng)
    with jax_dsa.plain_xla():
        grads = (
            jax.grad(indexer_kl_loss, argnums=1)(logits, teacher),
            *jax.grad(dense_indexer_kl_loss, argnums=(3, 4))(*inputs),
        )
    for grad in grads:
        assert (np.asarray(grad) == 0).all()


def test_nan_in_the_teacher_reaches_the_loss_and_its_own_row(rng):
    logits, teacher = rng.normal(size=(2, 3, 4)), rng.exponential(size=(2, 3, 4))
    logits, teacher = logits.astype(np.float32), teacher.astype(np.float32)
    teacher[1, 2, 0] = NAN
    loss, grad = value_and_grad(logits, teacher)
    assert np.isnan(loss)
    np.testing.assert_array_equal(np.isnan(grad).any(-1), [[0, 0, 0], [0, 0, 1]])
    index_q, index_k, weights, q, k = dense_inputs(rng)
    q[1, 2, 0] = NAN
    # All scores are positive: if the ReLU zeroed a whole row, its gradient would be 0, not NaN.
    index_q, index_k = np.abs(index_q), np.abs(index_k)
    loss, grads = jax.value_and_grad(dense_indexer_kl_loss, argnums=(0, 2))(
        index_q, index_k, weights, q, k
    )
    assert np.isnan(loss)
    for grad in grads:
        seen = np.isnan(grad).reshape(2, 5, -1).any(-1)
        np.testing.assert_array_equal(seen, np.arange(10).reshape(2, 5) == 7)


def test_variables_and_wide_integers(rng):
    logits, teacher = slots(rng)
    valid = logits > -INF
    got = indexer_kl_loss(Variable(logits), Variable(teacher), Variable(valid))
    assert got == indexer_kl_loss(logits, teacher, valid)
    inputs, starts = dense_inputs(rng), np.array([[0, 1, 2, 3, 4], [9, 0, -3, 2, 0]])
    options = {"starts": starts, "ends": starts + 4, "query_start": np.array([2, 2**31 - 1])}
    got = dense_indexer_kl_loss(
        *map(Variable, inputs), **{n: Variable(x) for n, x in options.items()}
    )
    narrow = {n: x.astype(np.int32) for n, x in options.items()}
    assert got == dense_indexer_kl_loss(*inputs, **narrow)
    options["query_start"] = np.array([2, 9])  # past all keys, as 2**31 - 1 is
    assert got == dense_indexer_kl_loss(*inputs, **options)


def test_low_precision_logits(rng):
    logits, teacher = slots(rng)
    low = jnp.asarray(logits, jnp.bfloat16)
    loss, grad = value_and_grad(low, teacher)
    want, want_grad = value_and_grad(low.astype(jnp.float32), teacher)
    assert loss == want
    np.testing.assert_array_equal(grad, want_grad.astype(jnp.bfloat16))


def test_gradients_against_finite_differences(rng):
    with jax.enable_x64(True):
        logits, teacher = (x.astype(np.float64) for x in slots(rng, (3, 4)))
        logits = np.maximum(logits, -4)
        check_grads(lambda x: indexer_kl_loss(x, teacher) ** 2, (logits,), 1, ["rev"], rtol=1e-6)
        inputs = [x.astype(np.float64) for x in dense_inputs(rng, B=1, T=3, S=4)]
        scale = np.exp(rng.normal(size=(1, 4)))

        def dense(index_q, index_k, weights, k_scale):
            args = (index_q, index_k, weights, *inputs[3:])
            return dense_indexer_kl_loss(*args, index_k_scale=k_scale, query_start=1) ** 2

        check_grads(jax.jit(dense), (*inputs[:3], scale), 1, ["rev"], eps=1e-7, rtol=1e-5)


OPTIONS = {
    "default": {},
    "not causal": {"is_causal": False, "scale": 0.3},
    "later queries": {"query_start": 3, "relu": False},
    "query_start per request": {"query_start": np.array([-2, 5], np.int32)},
    "ranges": {
        "starts": np.array([[0, 1, 2, 3, 4], [9, 0, -3, 2, 0]], np.int32),
        "ends": np.array([[8, 8, 2, 4, 99], [9, 1, 3, 3, 0]], np.int32),
        "query_start": 2,
    },
}


def dense_oracle(inputs, k_scale, options):
    """Returns the loss and the four gradients."""
    (B, T), S, D = inputs[0].shape[:2], inputs[4].shape[1], inputs[3].shape[-1]
    starts, ends = options.get("starts", np.zeros((B, T))), options.get("ends", np.full((B, T), S))
    if options.get("is_causal", True):
        first = np.broadcast_to(options.get("query_start", 0), (B,))
        ends = np.minimum(ends, first[:, None] + np.arange(T) + 1)
    relu = options.get("relu", True)
    loss, g = oracle.dense_kl(
        *inputs,
        scale=options.get("scale", D**-0.5),
        starts=starts,
        ends=ends,
        index_k_scale=k_scale,
        relu=relu,
        block_size=options.get("block_size", 1),
    )
    return loss, indexer_oracle.indexer_gradients(*inputs[:3], g, index_k_scale=k_scale, relu=relu)


BLOCK_OPTIONS = {
    "pairs": {"block_size": 2},
    "triples of later queries": {"block_size": 3, "query_start": 3, "relu": False},
    "not causal": {"block_size": 3, "is_causal": False, "scale": 0.3},
    "one block": {"block_size": 8, "query_start": 5},
    "documents": {
        "block_size": 2,
        "starts": np.array([[0, 1, 1, 3, 3], [5, 5, 0, 1, 6]], np.int32),
        "ends": np.array([[8, 8, 8, 8, 99], [8, 8, 3, 2, 9]], np.int32),
        "query_start": np.array([0, 2**31 - 1], np.int32),
    },
}
ALL_OPTIONS = OPTIONS | {f"blocks: {name}": options for name, options in BLOCK_OPTIONS.items()}


def pooled(inputs, block_size):
    """Returns the inputs with one key of the indexer per block."""
    index_q, index_k, *others = inputs
    return index_q, index_k[:, : index_k.shape[1] // block_size], *others


@pytest.mark.parametrize("name", ALL_OPTIONS)
def test_dense_loss_and_gradients(name, rng):
    options = ALL_OPTIONS[name]
    inputs = pooled(dense_inputs(rng), options.get("block_size", 1))
    k_scale = np.exp(rng.normal(size=inputs[1].shape[:2])).astype(np.float32)

    @jax.jit
    @jax.value_and_grad
    def run(trained):
        *index, scale = trained
        return dense_indexer_kl_loss(*index, *inputs[3:], index_k_scale=scale, **options)

    loss, grads = run((*inputs[:3], k_scale))
    want, want_grads = dense_oracle(inputs, k_scale, options)
    assert loss.shape == () and loss.dtype == jnp.float32
    assert_matches(loss, np.float32(want), 1e-5)
    assert_matches(grads, tuple(g.astype(np.float32) for g in want_grads), 1e-5)


def test_a_block_of_one_token_is_a_key(rng):
    inputs = dense_inputs(rng)
    assert dense_indexer_kl_loss(*inputs) == dense_indexer_kl_loss(*inputs, block_size=1)


def test_packed_documents_have_their_own_blocks(rng):
    """The loss over packed documents is the mean over the rows of the documents alone."""
    S, cuts, block = 23, [0, 7, 9, 18, 23], 3
    index_q, _, weights, q, kv = dense_inputs(rng, B=1, T=S, S=S)
    raw = rng.normal(size=(1, S, 3)).astype(np.float32)
    ids = np.repeat([4, 1, 4, 4 + 1], np.diff(cuts)).astype(np.int32)[None]
    starts = np.repeat(cuts[:-1], np.diff(cuts)).astype(np.int32)[None]

    def pools(raw, starts=None):
        return jax_dsa.mean_pool(raw, block, starts)

    def packed(index_q, raw, weights):
        index_k = pools(raw, starts)
        return dense_indexer_kl_loss(
            index_q, index_k, weights, q, kv, block_size=block, segment_ids=ids
        )

    def apart(index_q, raw, weights):
        total, rows = 0.0, 0
        for a, b in itertools.pairwise(cuts):
            own = (x[:, a:b] for x in (index_q, weights, q, kv))
            own_q, own_w, own_queries, own_keys = own
            args = own_q, pools(raw[:, a:b]), own_w, own_queries, own_keys
            counted = max(0, b - a - (block - 1))  # the first rows see no whole block
            total += counted * dense_indexer_kl_loss(*args, block_size=block)
            rows += counted
        return total / rows

    run = lambda fn: jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2)))(index_q, raw, weights)  # noqa: E731
    assert_matches(run(packed), run(apart), 1e-5)


def test_gradients_of_blocks_against_finite_differences(rng):
    with jax.enable_x64(True):
        inputs = [x.astype(np.float64) for x in dense_inputs(rng, B=1, T=5, S=7)]
        starts = jnp.array([[0, 0, 1, 1, 1]])

        def dense(index_q, index_k, weights):
            args = (index_q, index_k, weights, *inputs[3:])
            return dense_indexer_kl_loss(*args, block_size=2, starts=starts, query_start=2) ** 2

        args = (inputs[0], inputs[1][:, :3], inputs[2])
        check_grads(jax.jit(dense), args, 1, ["rev"], eps=1e-7, rtol=1e-5)


def test_tokens_in_no_block_change_only_the_normalisation(rng):
    """Queries attend to the tail, but its probability is dropped."""
    index_q, index_k, weights, q, kv = pooled(dense_inputs(rng, B=1, T=1, S=5, G=1), 2)
    args = index_q, index_k, weights, q
    want = dense_indexer_kl_loss(*args, kv[:, :4], query_start=3, block_size=2)
    one_head = q[:, :, :1]
    args = index_q, index_k, weights, one_head
    same = dense_indexer_kl_loss(*args, kv[:, :4], query_start=3, block_size=2)
    got = dense_indexer_kl_loss(*args, kv, query_start=4, block_size=2)
    assert_matches(got, same, 1e-5)  # one head: the tail only scales its probabilities
    assert got != want


def test_queries_without_a_whole_block_do_not_count(rng):
    inputs = pooled(dense_inputs(rng), 4)
    run = jax.jit(
        jax.value_and_grad(dense_indexer_kl_loss, argnums=(0, 1, 2)),
        static_argnames=("query_start", "block_size"),
    )
    loss, grads = run(*inputs, block_size=4)
    want, _ = dense_oracle(inputs, None, {"block_size": 4})
    assert_matches(loss, np.float32(want), 1e-5)
    assert (np.asarray(grads[0])[:, :3] == 0).all()
    loss, grads = run(*inputs, block_size=4, query_start=-9)
    assert loss == 0 and all((np.asarray(g) == 0).all() for g in grads)
    empty = inputs[0], inputs[1][:, :0], *inputs[2:]
    assert run(*empty, block_size=9)[0] == 0
    assert dense_indexer_kl_loss(*empty[:4], inputs[4][:, :0], block_size=9) == 0


@pytest.mark.parametrize("poison", [NAN, INF])
def test_blocks_that_no_query_sees_have_no_effect(poison, rng):
    """Five causal queries see two blocks of two tokens, and attend to the token after them."""
    inputs = pooled(dense_inputs(rng), 2)
    poisoned = [x.copy() for x in inputs]
    poisoned[1][:, 2:] = poisoned[4][:, 5:] = poison
    run = jax.jit(
        jax.value_and_grad(
            functools.partial(dense_indexer_kl_loss, block_size=2), argnums=(0, 1, 2)
        )
    )
    assert_unmoved(run(*inputs), run(*poisoned))


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("budget", [1, 5_000])
def test_chunks(budget, block, rng, monkeypatch):
    inputs = pooled(dense_inputs(rng, B=3, T=7), block)
    index_q, index_k, weights, q, kv = inputs
    starts, ends = np.zeros((3, 7), np.int32), np.tile(np.arange(1, 8, dtype=np.int32), (3, 1))
    options = DenseOptions(relu=True, scale=3**-0.5, block_size=block)
    monkeypatch.setattr(streaming, "BUDGET", budget)
    x = DenseOperands(index_q, index_k, weights, None, starts, ends, q, kv)
    kl, rows, *grads = jax.jit(xla.dense_indexer_kl_loss_fwd, static_argnums=0)(options, x)
    want, want_grads = dense_oracle(inputs, None, {"block_size": block})
    counted = 3 * (8 - block)
    np.testing.assert_array_equal(rows, [counted // 3] * 3)
    assert_matches(kl.sum() / counted, np.float32(want), 1e-5)
    assert grads[3] is None
    got = tuple(np.asarray(x) / np.float32(counted) for x in grads[:3])
    assert_matches(got, tuple(x.astype(np.float32) for x in want_grads[:3]), 1e-5)


@pytest.mark.full_optimization
@pytest.mark.parametrize("block", [1, 4])
def test_workspace_is_bounded(block):
    """Checks that forward and backward pass need less than one array [B, T, S]."""
    B, T, S = 2, 4096, 8192
    shapes = [(B, T, 2, 8), (B, S // block, 8), (B, T, 2), (B, T, 4, 8), (B, S, 1, 8)]
    loss = functools.partial(dense_indexer_kl_loss, block_size=block)
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    compiled = run.lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < min(2 * streaming.BUDGET, B * T * S * 4)


@pytest.mark.parametrize("poison", [NAN, INF])
def test_keys_that_no_query_sees_have_no_effect(poison, rng):
    """Compares bit for bit. The loss is causal, so no query sees the keys from T on."""
    inputs = dense_inputs(rng)
    poisoned = [x.copy() for x in inputs]
    poisoned[1][:, 5:] = poisoned[4][:, 5:] = poison
    run = jax.jit(jax.value_and_grad(dense_indexer_kl_loss, argnums=(0, 1, 2)))
    assert_unmoved(run(*inputs), run(*poisoned))


def test_queries_that_see_no_key_do_not_count(rng):
    inputs = dense_inputs(rng)
    run = jax.jit(
        jax.value_and_grad(dense_indexer_kl_loss, argnums=(0, 1, 2)), static_argnames="query_start"
    )
    loss, grads = run(*inputs, query_start=-2)
    want, _ = dense_oracle(inputs, None, {"query_start": -2})
    assert_matches(loss, np.float32(want), 1e-5)
    assert (np.asarray(grads[0])[:, :2] == 0).all() and (np.asarray(grads[2])[:, :2] == 0).all()
    loss, grads = run(*inputs, query_start=-9)
    assert loss == 0
    assert all((np.asarray(g) == 0).all() for g in grads)


def test_bfloat16(rng):
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in dense_inputs(rng, J=4, C=16, D=16)]
    inputs[2] = inputs[2].astype(jnp.float32)
    exact = [x.astype(jnp.float32) for x in inputs]

    def plain(index_q, index_k, weights, q, kv):
        """Computes the loss in the obvious way, in the dtype of the inputs."""
        mask = np.tril(np.ones((5, 8), bool))
        kv = jnp.repeat(kv, 2, axis=2)
        s = jnp.einsum("btnd,bsnd->btns", q, kv) * 0.25
        p = jax.nn.softmax(jnp.where(mask[:, None], s, -INF), axis=-1).mean(2)
        x = jax.nn.relu(jnp.einsum("btjc,bsc->btjs", index_q, index_k))
        logits = jnp.einsum("btjs,btj->bts", x, weights.astype(x.dtype))
        log_q = jax.nn.log_softmax(jnp.where(mask, logits, -INF), axis=-1)
        return jnp.where(mask, p * (jnp.log(jnp.where(mask, p, 1)) - log_q), 0).sum(-1).mean()

    run = lambda fn, x: jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2)))(*x)  # noqa: E731
    got, low, want = run(dense_indexer_kl_loss, inputs), run(plain, inputs), run(plain, exact)
    assert abs(got[0] - want[0]) <= 3 * abs(float(low[0]) - want[0]) + 1e-4
    for name, a, b, c in zip(("dq", "dk", "dw"), got[1], low[1], want[1], strict=True):
        assert a.dtype == b.dtype
        assert_as_good_as(a, b, c, 4.0, name)


def test_inside_shard_map(rng, cpus):
    """Each device computes the loss of its rows. All rows count, so the mean is the whole loss."""
    inputs = dense_inputs(rng)
    mesh = jax.make_mesh((2,), ("x",), devices=cpus[:2], axis_types=(AxisType.Auto,))

    @jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P())
    def mean_of_two(*local):
        teacher, logits = jnp.exp(local[2]), local[0][..., 0]
        both = indexer_kl_loss(logits, teacher) + dense_indexer_kl_loss(*local)
        return jax.lax.pmean(both, "x")

    def whole(*args):
        return indexer_kl_loss(args[0][..., 0], jnp.exp(args[2])) + dense_indexer_kl_loss(*args)

    run = lambda fn: jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(*inputs)  # noqa: E731
    assert_matches(run(mean_of_two), run(whole), 1e-5)


def test_no_batch_axis_and_empty_batch(rng):
    inputs = dense_inputs(rng, B=1)
    got = dense_indexer_kl_loss(*(x[0] for x in inputs))
    np.testing.assert_array_equal(got, dense_indexer_kl_loss(*inputs))
    assert dense_indexer_kl_loss(*(x[:0] for x in inputs)) == 0
    logits, teacher = slots(rng)
    flat = [x.reshape(10, 7) for x in (logits, teacher)]
    assert_matches(indexer_kl_loss(*flat), indexer_kl_loss(logits, teacher), 1e-6)


def test_the_package_exports_both_losses():
    assert jax_dsa.indexer_kl_loss is indexer_kl_loss
    assert jax_dsa.dense_indexer_kl_loss is dense_indexer_kl_loss
