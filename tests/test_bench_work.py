"""The work that benchmark cases count: operations and bytes, compared with counts by hand."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsa.bench import report
from jax_dsa.bench.case import Case, causal_selection, selected_pairs, shrunk, visible_pairs
from jax_dsa.bench.cases.masked_attention import document_bounds
from jax_dsa.bench.cases.sparse_attention import block_lists as block_lists_of
from jax_dsa.bench.cases.sparse_attention import listed_pairs
from jax_dsa.bench.registry import OPERATORS

BF16, FP8, COPY = "bf16-matmul", "fp8-matmul", "copy"
E = 512  # dims of values that are part of latent keys
RECORD = 656  # bytes of one key in FP8


class Sizes:
    """The sizes of a case as attributes, and its numbers of (query, key) pairs."""

    def __init__(self, dims: dict[str, int]) -> None:
        self.dims = dims

    def __getattr__(self, letter: str) -> int:
        return self.dims[letter]

    def visible(self) -> np.ndarray:
        """Keys that each query sees; the last query sees all S."""
        keys = self.dims.get("S", self.T)
        return keys - self.T + 1 + np.arange(self.T)

    @property
    def causal(self) -> int:
        return int(self.visible().sum())

    @property
    def selected(self) -> int:
        return int(np.minimum(self.visible(), self.K).sum())

    @property
    def pooled(self) -> int:
        return self.B * self.S * self.H * self.D

    @property
    def blocks(self) -> int:
        """Blocks of 128 keys that are selected."""
        return int(np.minimum(np.ceil(self.visible() / 128), self.K).sum())

    def listed(self, tail: bool) -> int:
        """Pairs of K causal blocks of b keys. The last one has b keys only at times."""
        complete, rest = np.divmod(self.visible(), self.b)
        others = self.K if tail else self.K - 1
        return int((np.minimum(complete - (not tail) * (rest == 0), others) * self.b).sum()) + int(
            np.where(rest == 0, 0 if tail else self.b, rest).sum()
        )


class AllSlots(Sizes):
    """Returns the same for K keys per query, even where a query sees fewer."""

    @property
    def selected(self) -> int:
        return self.T * self.K

    blocks = selected

    def listed(self, tail: bool) -> int:
        return self.T * self.K * self.b


def product(m: int, n: int, k: int) -> int:
    """Operations of a matrix product: a multiplication and an addition per element of [m, n, k]."""
    return 2 * m * n * k


def attention(heads: int, pairs: int, d: int, e: int) -> int:
    """S = Q K^T and O = P V."""
    return product(heads, pairs, d) + product(heads, e, pairs)


def attention_backward(heads: int, pairs: int, d: int, e: int) -> int:
    """S again, dP = dO V^T, dQ = dS K, dK = dS^T Q, dV = P^T dO."""
    scores = product(heads, pairs, d) + product(heads, pairs, e)
    return scores + product(heads, d, pairs) + product(pairs, d, heads) + product(pairs, e, heads)


def decode_bytes(x: Sizes, keys: int, per_key: int) -> int:
    """Bytes of the keys, of the queries and of the outputs of all requests."""
    return x.B * (keys * per_key + 2 * x.N * x.D + 2 * x.N * E)


def dense_decode(x: Sizes) -> dict[str, int]:
    return {
        BF16: x.B * attention(x.N, x.S, x.D, min(E, x.D)),
        COPY: decode_bytes(x, x.S, 2 * x.D),
    }


def quantized_bytes(x: Sizes) -> int:
    """Bytes of a bfloat16 matrix, of its codes, and of a scale for each 128 elements of a row."""
    return 2 * x.M * x.C + x.M * x.C + 4 * x.M * -(-x.C // 128)


def sparse_backward(x: Sizes) -> dict[str, int]:
    return {BF16: attention_backward(x.N, x.selected, x.D, min(E, x.D))}


def sparse_decode(x: Sizes, per_key: int) -> dict[str, int]:
    return {
        BF16: x.B * attention(x.N, x.K, x.D, E),
        COPY: decode_bytes(x, x.K, per_key),
    }


def two_caches(x: Sizes, per_key: int) -> dict[str, int]:
    keys = x.W + x.K
    return {BF16: x.B * attention(x.N, keys, x.D, E), COPY: decode_bytes(x, keys, per_key)}


def indexer_decode(x: Sizes) -> dict[str, int]:
    """Each key is 128 codes and a float32 scale."""
    return {FP8: x.B * product(x.J, x.S, x.C), COPY: x.B * x.S * (x.C + 4)}


def fp8_product(x: Sizes) -> dict[str, int]:
    """Few rows are bound by the bytes of the codes and of the bfloat16 result."""
    if x.M <= 128:
        return {COPY: x.M * x.K + x.N * x.K + 2 * x.M * x.N}
    return {FP8: product(x.M, x.N, x.K)}


def block_lists(x: Sizes) -> dict[str, int]:
    return {BF16: attention(x.N, x.listed(tail=False), x.D, x.D)}


def block_lists_and_tail(x: Sizes) -> dict[str, int]:
    return {BF16: attention(x.N, x.listed(tail=True), x.D, x.D)}


def block_lists_backward(x: Sizes) -> dict[str, int]:
    return {BF16: attention_backward(x.N, x.listed(tail=False), x.D, x.D)}


# By everything of a case except its sizes.
BY_HAND = {
    "sparse_mla fwd bf16": lambda x: {BF16: attention(x.N, x.selected, x.D, min(E, x.D))},
    "sparse_mla bwd bf16": sparse_backward,
    "sparse_mla bwd-deterministic bf16": sparse_backward,
    "sparse_mla fwd bf16 decode": lambda x: sparse_decode(x, 2 * x.D),
    "sparse_mla fwd fp8 decode": lambda x: sparse_decode(x, RECORD),
    "sparse_mla fwd bf16 two-caches": lambda x: two_caches(x, 2 * 512),
    "sparse_mla fwd fp8 two-caches": lambda x: two_caches(x, 448 + 2 * 64 + 8),
    "sparse_attention fwd bf16 similar": block_lists,
    "sparse_attention fwd bf16 random": block_lists,
    "sparse_attention bwd bf16 similar": block_lists_backward,
    "sparse_attention bwd bf16 random": block_lists_backward,
    "sparse_attention fwd bf16 similar-tail": block_lists_and_tail,
    "sparse_attention fwd bf16 random-tail": block_lists_and_tail,
    "sparse_attention_decode fwd bf16": lambda x: {
        BF16: x.B * attention(x.N, x.K * x.b, x.D, x.D),
        COPY: x.B * 2 * (2 * x.G * x.K * x.b * x.D + 2 * x.N * x.D),
    },
    # Each row has a factor in float32.
    "sparse_attention_decode fwd fp8": lambda x: {
        BF16: x.B * attention(x.N, x.K * x.b, x.D, x.D),
        COPY: x.B * 2 * (x.G * x.K * x.b * (x.D + 4) + 2 * x.N * x.D),
    },
    "attn_dist fwd bf16": lambda x: {BF16: product(x.N, x.selected, x.D)},
    "attn_dist fwd bf16 blocks": lambda x: {BF16: product(x.N, x.listed(tail=False), x.D)},
    "indexer fwd fp8": lambda x: {FP8: product(x.J, x.causal, x.C)},
    "indexer fwd bf16": lambda x: {BF16: product(x.J, x.causal, x.C)},
    "indexer fwd fp8 topk": lambda x: {FP8: product(x.J, x.causal, x.C)},
    "indexer fwd bf16 topk": lambda x: {BF16: product(x.J, x.causal, x.C)},
    **{
        f"indexer fwd {dtype} candidates{shared}": (
            lambda x, ceiling=ceiling: {ceiling: product(x.J, x.T * x.M * x.b, x.C)}
        )
        for dtype, ceiling in (("fp8", FP8), ("bf16", BF16))
        for shared in ("", "-shared")
    },
    "indexer fwd fp8 selected": lambda x: {FP8: product(x.J, x.selected, x.C)},
    "indexer fwd bf16 selected": lambda x: {BF16: product(x.J, x.selected, x.C)},
    "indexer fwd bf16 blocks": lambda x: {BF16: product(x.J, x.causal, x.C)},
    "indexer fwd bf16 blocks-shared": lambda x: {BF16: product(x.J, x.causal, x.C)},
    "indexer fwd fp8 decode": indexer_decode,
    "indexer fwd fp8 paged": indexer_decode,
    # The scores again, and the gradients of the queries and of the keys.
    "indexer bwd bf16": lambda x: {BF16: 3 * product(x.J, x.selected, x.C)},
    "indexer bwd bf16 blocks": lambda x: {BF16: 3 * product(x.J, x.blocks, x.C)},
    # The logits and the teacher are read, and the gradient is written, in float32.
    "losses fwd f32 gradient": lambda x: {COPY: 3 * 4 * x.T * x.K},
    # Attention's scores for the lse and again for the teacher; the indexer's scores, and the
    # gradients of its queries and of its keys.
    "losses fwd bf16 gradients": lambda x: {
        BF16: 2 * product(x.N, x.causal, x.D) + 3 * product(x.J, x.causal, x.C)
    },
    # Scores are read and indices are written, 4 bytes each.
    "topk fwd f32": lambda x: {COPY: 4 * x.R * x.S + 4 * x.R * x.K},
    "block_mask fwd bool": lambda x: {COPY: x.T * x.S},
    # Values and gates are read, and keys are written; then the same with their gradients.
    "gated_pool fwd bf16": lambda x: {COPY: 2 * 2 * x.pooled + 2 * x.pooled // (x.R * x.H)},
    "gated_pool bwd bf16": lambda x: {COPY: 2 * 4 * x.pooled + 2 * x.pooled // (x.R * x.H)},
    "gated_pool fwd bf16 mean": lambda x: {COPY: 2 * x.B * x.S * x.D * 5 // 4},
    "gated_pool bwd bf16 mean": lambda x: {COPY: 2 * x.B * x.S * x.D * 5 // 4},
    "mqa_decode fwd bf16": dense_decode,
    "mqa_decode fwd bf16 plan": dense_decode,
    "fp8 fwd bf16": lambda x: {COPY: quantized_bytes(x)},
    "fp8 fwd bf16 pow2": lambda x: {COPY: quantized_bytes(x)},
    "fp8 fwd bf16 dequantise": lambda x: {COPY: quantized_bytes(x)},
    # One scale for 128 x 128 elements is left out.
    "fp8 fwd bf16 tiles": lambda x: {COPY: 2 * x.M * x.C + x.M * x.C},
    "fp8 fwd fp8": fp8_product,
    # The product, and the gradients of both operands.
    "fp8 fwd bf16 linear-and-gradients": lambda x: {FP8: 3 * product(x.M, x.N, x.K)},
    "htree fwd bf16": lambda x: {},
    "htree bwd bf16": lambda x: {},
    "htree fwd bf16 decode": lambda x: {},
}


def all_cases(operator: str, scale: int = 1) -> list[Case]:
    return list(OPERATORS[operator](functools.partial(shrunk, scale)))


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name != "masked_attention"])
def test_work_is_what_a_count_by_hand_gives(operator: str) -> None:
    for case in all_cases(operator):
        kind = " ".join(filter(None, (case.operator, case.step, case.dtype, case.note)))
        work = BY_HAND[kind](Sizes(case.dims))
        assert case.work == work, case.label
        if "T" in case.dims and "K" in case.dims:
            every = BY_HAND[kind](AllSlots(case.dims))
            if every != work or case.all_slots is not None:
                assert case.all_slots == every[FP8 if FP8 in every else BF16], case.label


def test_backward_work_of_masked_attention_is_what_a_count_by_hand_gives() -> None:
    """Forward work is compared with the visible pairs of each mask below."""
    cases = all_cases("masked_attention")
    forward = {case.name: case.work[BF16] for case in cases if case.step == "fwd"}
    backward = [case for case in cases if case.step != "fwd"]
    assert {case.step for case in backward} == {"bwd", "bwd-deterministic"}
    for case in backward:
        n, d = case.dims["N"], case.dims["D"]
        e = case.dims.get("E", d)
        if case.name not in forward:
            assert case.step == "bwd-deterministic" and case.note == "causal"
            pairs = Sizes(case.dims).causal
        else:
            pairs = forward[case.name] // attention(n, 1, d, e)
        assert case.work[BF16] == attention_backward(n, pairs, d, e), case.label


def test_other_work_of_masked_attention_is_what_a_count_by_hand_gives() -> None:
    """A bfloat16 bias [N, T, S] is read, and its gradient is written in the backward pass."""
    for case in all_cases("masked_attention"):
        x = Sizes(case.dims)
        bias = 2 * x.N * x.T * x.S * (1 if case.step == "fwd" else 2)
        assert case.work.get(COPY) == (bias if case.note == "bias" else None), case.label
        every = attention if case.step == "fwd" else attention_backward
        scores = every(x.N, x.T * x.S, x.D, x.dims.get("E", x.D))
        assert case.all_slots == (scores if case.note == "random" else None), case.label


def case(label: str) -> Case:
    operator = label.split()[0]
    (found,) = [c for c in OPERATORS[operator](functools.partial(shrunk, 1)) if c.label == label]
    return found


@pytest.mark.slow
def test_empty_slots_do_not_count() -> None:
    """With T = S = 4096 and 2048 selected keys, a quarter of the slots is empty."""
    rates = {"bf16-matmul": 800e12}
    for name in ("sparse_mla bwd", "attn_dist fwd"):
        full = case(f"{name} T4096-S4096-N128-D576-K2048 bf16")
        got = report.row(full, "cuda", 1e-3, rates, "")
        assert got.tflops and got.tflops_all_slots and got.ratio
        keys = np.asarray(causal_selection(jax.random.key(0), 4096, 4096, 2048)) >= 0
        np.testing.assert_allclose(got.tflops / got.tflops_all_slots, keys.mean(), rtol=1e-12)
        np.testing.assert_allclose(got.ratio, got.tflops / 800)
    whole = report.row(
        case("sparse_mla fwd T4096-S8192-N128-D576-K2048 bf16"), "cuda", 1e-3, rates, ""
    )
    assert whole.tflops == whole.tflops_all_slots


NOTES = {"dense": 512, "causal": 512, "window": 512, "varlen": 512, "random": 64, "bias": 512}
NOTES |= {"empty0": 32, "empty75": 32, "kept100": 64, "kept25": 64}


@pytest.mark.parametrize(("note", "scale"), NOTES.items())
def test_only_visible_keys_count(note: str, scale: int) -> None:
    cases = OPERATORS["masked_attention"](functools.partial(shrunk, scale))
    one = next(c for c in cases if c.note == note)

    def visible_pairs_of_case(key: jax.Array) -> jax.Array:
        """Counts visible keys. If all logits are 0, lse is the logarithm of their number."""
        arrays = jax.tree.map(
            lambda x: jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            one.make(key),
        )
        _, lse = one.call(*arrays, return_lse=True, implementation="xla")
        return jnp.round(jnp.exp(lse)).sum()

    want = 4 * one.dims["D"] * int(jax.jit(visible_pairs_of_case)(jax.random.key(0)))
    np.testing.assert_allclose(one.work["bf16-matmul"], want, rtol=0.05 * (note == "random"))


def test_dims_of_keys_and_values_count_separately() -> None:
    """Forward has one product over D and one over E. Backward has three and two."""
    pairs = visible_pairs(8192, 8192) * 128
    for step, dims in (("fwd", 192 + 128), ("bwd", 3 * 192 + 2 * 128)):
        wide = case(f"masked_attention {step} T8192-S8192-N128-D192-E128-causal bf16")
        assert wide.work["bf16-matmul"] == 2 * dims * pairs


def test_documents_have_uneven_lengths() -> None:
    lengths = np.diff(document_bounds(262144, 64))
    assert lengths.sum() == 262144 and lengths.size == 64
    assert 120 < lengths.min() < 136 and 16000 < lengths.max() < 16500


def test_the_slowest_ceiling_bounds_a_case() -> None:
    """128 heads are bound by the matrix product, or by the copy if memory is slow."""
    decode = case("sparse_mla fwd B128-T1-S8192-N128-D576-K2048-decode bf16")
    operations, moved = 2 * 128 * 2048 * 128 * 1088, 128 * (2048 * 1152 + 256 * 1088)
    fast = report.row(decode, "cuda", 1e-4, {"bf16-matmul": 800e12, "copy": 4e12}, "")
    slow = report.row(decode, "cuda", 1e-4, {"bf16-matmul": 800e12, "copy": 1e12}, "")
    assert (fast.ceiling, slow.ceiling) == ("bf16-matmul 800 TFLOPS", "copy 1000 GB/s")
    np.testing.assert_allclose(fast.ratio, operations / 800e12 / 1e-4)
    np.testing.assert_allclose(slow.ratio, moved / 1e12 / 1e-4)
    for row in (fast, slow):
        np.testing.assert_allclose(row.tflops, operations / 1e8)
        np.testing.assert_allclose(row.gbytes_per_s, moved / 1e5)
    assert report.row(decode, "cuda", 1e-4, {}, "").ratio is None


def test_selections_are_causal_and_distinct() -> None:
    picks = np.asarray(causal_selection(jax.random.key(1), queries=6, keys=10, top_k=7))
    for t, row in enumerate(picks):
        visible = 10 - 6 + 1 + t
        valid = row[row >= 0]
        assert len(valid) == min(7, visible) == len(set(valid.tolist()))
        assert valid.max() < visible and (np.diff(valid) > 0).all()
    assert selected_pairs(6, 10, 7) == (picks >= 0).sum()
    assert visible_pairs(6, 10) == sum(10 - 6 + 1 + t for t in range(6))


@pytest.mark.parametrize("note", ["similar", "random", "similar-tail", "random-tail"])
def test_lists_of_blocks_are_causal_and_as_similar_as_they_say(note: str) -> None:
    kind, tail = note.partition("-")[::2]
    dims = {"T": 600, "K": 16, "b": 4}
    lists = block_lists_of(jax.random.key(0), dims, bool(tail), 2, similar=kind == "similar")
    rows = np.asarray(lists[0]).swapaxes(0, 1)
    pairs = 0
    for t, row in enumerate(rows[0]):
        valid = row[row >= 0]
        assert len(valid) == len(set(valid.tolist()))
        assert valid.max(initial=0) <= t // 4 and (tail or t // 4 in valid)
        keys = valid[:, None] * 4 + np.arange(4)
        pairs += (keys <= t).sum() + ((t + 1) % 4 if tail else 0)
        assert not tail or (keys <= t).all()
    assert pairs == listed_pairs(dims, bool(tail))
    kept = np.mean([len({*a} & {*b}) for a, b in itertools.pairwise(rows[1, 300:].tolist())])
    assert 14.5 < kept < 15.3 if kind == "similar" else kept < 3
