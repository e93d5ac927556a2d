"""Two processes, one mesh: what `jax.distributed` training does, on CPU over loopback."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

WORKER = pathlib.Path(__file__).with_name("distributed_worker.py")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes_agree_with_one() -> None:
    address = f"127.0.0.1:{free_port()}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), address, str(i)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    logs = [w.communicate(timeout=300)[0] for w in workers]
    for w, log in zip(workers, logs, strict=True):
        assert w.returncode == 0, log
        assert "agrees" in log, log
