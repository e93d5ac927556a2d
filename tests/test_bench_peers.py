"""`python -m jax_dsa.bench --peers`, with libraries that are made up for the test."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import repository  # noqa: F401

import jax_dsa
from benchmarks.peers import running, table
from benchmarks.peers.running import Peer
from jax_dsa.bench.__main__ import main
from jax_dsa.bench.case import shrunk
from jax_dsa.bench.external import TOLERANCE
from jax_dsa.bench.registry import OPERATORS

TINY = ["--scale", "512", "--seconds", "0.001", "--commit", "abc", "--peers"]


def sorted_top_k(case: Any, x: jax.Array) -> jax.Array:
    """Returns the selection in another order than ours, which must not matter."""
    return jax.lax.top_k(x, case.dims["K"])[1]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces all libraries by "Peer", and returns the dictionary of its calls."""
    calls: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "a_peer", types.ModuleType("a_peer"))
    absent = Peer("Absent", "no_such_module", {"topk fwd f32": sorted_top_k})
    monkeypatch.setattr(table, "PEERS", (Peer("Peer", "a_peer", calls), absent))
    return calls


def test_libraries_are_compared_and_timed(
    library: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    library["topk fwd f32"] = sorted_top_k
    assert main(["topk", *TINY, "--only", "R8-S64-K8 .* Peer"]) == 0
    out = capsys.readouterr().out
    assert "Absent is left out: No module named 'no_such_module'" in out
    assert re.search(r"^topk +fwd .* Peer +\d", out, re.M)
    assert "Peer agrees with ours to 0" in out


@pytest.mark.slow
def test_gradients_are_compared(
    library: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def attention(case: Any, q: Any, kv: Any, indices: Any) -> Any:
        call = functools.partial(jax_dsa.sparse_mla, value_dim=512, implementation="xla")
        return call(q, kv, indices) * 1.01

    library["sparse_mla bwd bf16"] = attention
    assert main(["sparse_mla", *TINY, "--only", "bwd T8-S8-N64.* Peer"]) == 0
    (gap,) = re.findall(r"Peer agrees with ours to (\S+)", capsys.readouterr().out)
    assert 0.005 < float(gap) < 0.02


def test_different_results_fail(
    library: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    library["topk fwd f32"] = lambda case, x: sorted_top_k(case, -x)
    assert main(["topk", *TINY, "--only", "R8-S64-K8 .* Peer"]) == 1
    captured = capsys.readouterr()
    assert "Peer FAILED: differs from ours by 1" in captured.err
    assert "agrees" not in captured.out


def test_a_case_that_a_library_rejects_is_reported(
    library: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(case: Any, x: jax.Array) -> jax.Array:
        raise ValueError("64 heads, please")

    library["topk fwd f32"] = refuse
    assert main(["topk", *TINY, "--only", "R8-S64-K8 .* Peer"]) == 0
    assert "Peer has no topk fwd R8-S64-K8 f32: 64 heads, please" in capsys.readouterr().err


def test_only_cases_of_other_libraries_are_measured(
    library: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    library["attn_dist fwd bf16"] = sorted_top_k
    assert main(["attn_dist", "indexer", *TINY, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["cuda", "Peer"]


def fake_torch(milliseconds: float, capturable: bool = True) -> types.ModuleType:
    """Returns a module like PyTorch whose tensors are NumPy arrays.

    Its clock advances by `milliseconds` whenever a call says so (`advance`).
    """
    torch = types.ModuleType("torch")

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class CUDAGraph:
        def replay(self) -> None:
            clock[0] += self.length

    @contextlib.contextmanager
    def captured(graph: CUDAGraph) -> Iterator[None]:
        if not capturable:
            raise RuntimeError("not here")
        start = clock[0]
        yield
        graph.length = clock[0] - start

    class Tensor(np.ndarray):
        def contiguous(self) -> jax.Array:
            return jnp.asarray(np.asarray(self))

    clock = [0.0]
    torch.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        Event=Event, CUDAGraph=CUDAGraph, graph=captured, synchronize=lambda: None
    )
    torch.from_dlpack = lambda x: np.array(x).view(Tensor)  # type: ignore[attr-defined]
    torch.advance = lambda: clock.__setitem__(0, clock[0] + milliseconds)  # type: ignore[attr-defined]
    return torch


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Replaces PyTorch by a fake, in which a call takes 3 ms."""
    torch = fake_torch(milliseconds=3.0)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(jnp, "from_dlpack", lambda x: x)
    return torch


def test_torch_libraries_are_timed_by_events(
    library: dict[str, Any],
    torch: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def top_k(case: Any, x: Any) -> Any:
        torch.advance()
        return np.argsort(-x)[..., : case.dims["K"]]

    calls = {"topk fwd f32": top_k}
    monkeypatch.setattr(table, "PEERS", (Peer("Torch", "a_peer", calls, torch=True),))
    assert main(["topk", *TINY, "--only", "R8-S64-K8 .* Torch"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^topk +fwd +R8-S64-K8 +f32 +Torch +3 ", out, re.M)


@pytest.mark.slow
def test_preparation_is_not_timed(
    library: dict[str, Any],
    torch: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    torch.cuda.synchronize = lambda: order.append("waited")

    def negated(case: Any, q: Any, records: Any, lengths: Any, indices: Any) -> tuple:
        torch.advance()
        order.append("prepared")
        return q, -records.astype(int), lengths, indices

    def decode(case: Any, q: Any, records: Any, lengths: Any, indices: Any) -> Any:
        # Preparation has to finish before JAX reuses the memory of the arguments.
        assert order[-1] == "waited"
        torch.advance()
        cache = jax_dsa.FlatCache(jnp.asarray(-records, jnp.uint8), jnp.asarray(lengths))
        return jax_dsa.sparse_mla_decode(jnp.asarray(q), cache, jnp.asarray(indices))

    kind = "sparse_mla fwd fp8 decode"
    peer = Peer("Torch", "a_peer", {kind: decode}, torch=True, prepare={kind: negated})
    monkeypatch.setattr(table, "PEERS", (peer,))
    assert main(["sparse_mla", *TINY, "--only", "B8.*fp8 Torch"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"decode +fp8 +Torch +3 ", out, re.M)
    assert "Torch agrees with ours to 0" in out


@pytest.mark.parametrize("capturable", [True, False])
def test_torch_measurements_wait_before_each_repetition(
    capturable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = fake_torch(milliseconds=2.0, capturable=capturable)
    monkeypatch.setitem(sys.modules, "torch", torch)
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    seconds = running.torch_seconds(lambda x: torch.advance(), [(1,), (2,)], 0.1, 0.25)
    assert seconds == pytest.approx(2e-3)
    assert rests == [0.25] * 7  # Loading the graph, one trial, five measurements.


@pytest.mark.parametrize("peer", table.PEERS, ids=lambda x: x.name)
def test_every_kind_of_a_peer_exists(peer: Peer) -> None:
    cases = [case for cases in OPERATORS.values() for case in cases(functools.partial(shrunk, 1))]
    kinds = {running.kind(case) for case in cases}
    assert peer.calls and peer.calls.keys() <= kinds
    assert peer.prepare.keys() <= peer.calls.keys() and (peer.torch or not peer.prepare)


def test_an_infinity_in_only_one_result_is_a_difference() -> None:
    (case,) = [c for c in OPERATORS["topk"](functools.partial(shrunk, 512)) if c.dims["S"] == 64][
        :1
    ]
    x = jnp.array([1.0, 2.0, -jnp.inf])
    assert running.difference(case, x, x) == 0
    assert running.difference(case, x, x.at[0].add(0.5)) == 0.25
    for other in (x.at[2].set(0), x.at[0].set(-jnp.inf), x.at[0].set(jnp.nan)):
        assert not running.difference(case, x, other) <= TOLERANCE


@pytest.mark.parametrize("missing", ["benchmarks", "benchmarks.peers"])
def test_without_the_repository_peers_are_refused(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(SystemExit) as stopped:
        main(["--peers", "--list"])
    assert stopped.value.code == 2
    assert "--peers needs the repository" in capsys.readouterr().err
