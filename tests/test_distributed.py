"""One mesh over two processes, as in training with `jax.distributed`, on CPUs."""

from __future__ import annotations

import pathlib

import pytest
from support.workers import Worker, finish, free_port

PROGRAM = pathlib.Path(__file__).parent / "support" / "distributed_worker.py"


def test_two_processes_agree_with_one(tmp_path: pathlib.Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    workers = [Worker(tmp_path / f"{i}.log", PROGRAM, address, str(i)) for i in range(2)]
    assert all("agrees" in log for log in finish(*workers))


def test_a_failed_process_ends_the_others(tmp_path: pathlib.Path) -> None:
    """The one that was stopped says where it waited, although it printed more than a pipe holds."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        "print('x' * 200_000, flush=True)\n"
        "if sys.argv[1] == 'fails':\n"
        "    raise ValueError('this one')\n"
        "def waiting(): time.sleep(600)\n"
        "waiting()\n"
    )
    workers = [Worker(tmp_path / name, program, name) for name in ("waits", "fails")]
    with pytest.raises(AssertionError, match=r"(?s)in waiting.*ValueError: this one"):
        finish(*workers)
