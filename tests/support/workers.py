"""Starts Python processes that may wait for each other, and collects their output."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent  # where programs find the package `support`


def free_port() -> int:
    """Returns a TCP port that no process listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Worker:
    """A Python program that runs in a process of its own on host devices.

    Its output goes to a file. A pipe that nobody reads would fill up, and the program would wait.
    """

    def __init__(self, log: Path, program: Path, *arguments: str, devices: int = 1) -> None:
        count = f"--xla_force_host_platform_device_count={devices}"
        path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", str(program), *arguments],
                env={
                    **os.environ,
                    "JAX_PLATFORMS": "cpu",
                    "XLA_FLAGS": count,
                    "PYTHONPATH": os.pathsep.join(path),
                },
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.log = log

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def finish(*workers: Worker, limit: float = 900) -> list[str]:
    """Waits until all workers are done, and returns what they printed.

    If a worker fails, the others are stopped, because they may be waiting for it. A worker that is
    stopped, then or after `limit` seconds, prints where it was.

    Raises:
        AssertionError: If a worker failed or was stopped.
    """
    processes = [worker.process for worker in workers]
    try:
        deadline = time.monotonic() + limit
        while None in [p.poll() for p in processes] and not any(p.returncode for p in processes):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        for p in processes:
            if p.poll() is None:
                p.send_signal(signal.SIGABRT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    p.wait(10)
    finally:
        for worker in workers:
            worker.kill()
    logs = [worker.log.read_text(errors="replace") for worker in workers]
    said = "\n".join(f"--- {p.returncode}\n{log}" for p, log in zip(processes, logs, strict=True))
    assert not any(p.returncode for p in processes), said
    return logs
