"""Measures other libraries next to ours: `python -m jax_dsa.bench --peers`.

A library that can be imported is called through its public Python interface, on the same inputs and
in the same process. Its results are compared with ours, and then it is timed. JAX libraries are
timed by the clock of all benchmarks. PyTorch libraries get the same memory through DLPack, and are
timed by CUDA events around replays of a CUDA graph. If a call cannot be captured in a graph, the
time to dispatch it counts wherever it is longer than the device's time.

- `table.py` lists the libraries and the kinds of cases that each of them has.
- `running.py` runs, compares and times their calls.
- `adapters/` contains the calls.
"""

from benchmarks.peers.running import calls_for
from benchmarks.peers.table import available

__all__ = ["available", "calls_for"]
