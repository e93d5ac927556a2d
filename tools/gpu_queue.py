"""Runs commands on all GPUs of this machine, with a time limit, and names the tiers to test."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

# The environment of each configuration. A Hopper GPU runs the kernels of all of them. 163 KiB and
# 99 KiB are the shared memory of the GPUs of compute capability 8.0 and 8.6 (docs/which.md).
CONFIGURATIONS = {
    "hopper": {"JAX_DSA_TIER": "", "JAX_DSA_SHARED_KIB": ""},
    "portable": {"JAX_DSA_TIER": "portable", "JAX_DSA_SHARED_KIB": "227"},
    "portable-163": {"JAX_DSA_TIER": "portable", "JAX_DSA_SHARED_KIB": "163"},
    "portable-99": {"JAX_DSA_TIER": "portable", "JAX_DSA_SHARED_KIB": "99"},
}
GRACE = 10.0  # seconds between the interrupt and the end of a command


@dataclasses.dataclass(frozen=True)
class Task:
    """A command, whose output goes to the file `log` while it runs."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str]  # in addition to this process's
    timeout: float = math.inf  # seconds after which the command is killed


@dataclasses.dataclass(frozen=True)
class End:
    """How a task ended."""

    gpus: str  # as in CUDA_VISIBLE_DEVICES
    seconds: float
    status: str  # empty if the command exited, else: timed out, stopped, not started
    exit_status: int | None  # None if the command did not exit by itself


@dataclasses.dataclass(frozen=True)
class _Running:
    task: Task
    gpus: str
    process: subprocess.Popen[bytes]
    start: float

    def end(self, status: str = "") -> End:
        """Kills what is left of the process group."""
        exit_status = None if status else self.process.returncode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return End(self.gpus, time.monotonic() - self.start, status, exit_status)


def visible_gpus() -> list[str]:
    """Returns the GPUs' names for CUDA_VISIBLE_DEVICES. Exits if there is none."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None and (tool := shutil.which("nvidia-smi")):
        command = [tool, "--query-gpu=index", "--format=csv,noheader"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        listed = ",".join(done.stdout.split()) if done.returncode == 0 else ""
    return [x.strip() for x in (listed or "").split(",") if x.strip()] or sys.exit("no NVIDIA GPU")


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _start(task: Task, gpus: str) -> _Running:
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with task.log.open("wb") as log:
        process = subprocess.Popen(
            task.command,
            env={**os.environ, **task.environment, "CUDA_VISIBLE_DEVICES": gpus},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _Running(task, gpus, process, time.monotonic())


def _stop(running: list[_Running], ended: Callable[[Task, End], None]) -> None:
    """Interrupts the commands as Ctrl-C does, and kills those that do not end soon."""
    try:
        for r in running:
            if r.process.poll() is None:
                os.killpg(r.process.pid, signal.SIGINT)
        late = time.monotonic() + GRACE
        while time.monotonic() < late and any(r.process.poll() is None for r in running):
            time.sleep(0.02)
    finally:
        ends = [(r.task, r.end("stopped")) for r in running]
    for task, end in ends:
        ended(task, end)


def interrupt_on_signals() -> None:
    """Makes SIGTERM act like Ctrl-C, which a shell disables in background jobs."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def run_tasks(
    tasks: Iterable[Task], slots: list[str], until: float, ended: Callable[[Task, End], None]
) -> bool:
    """Runs tasks in their order, one at a time in each slot.

    Every task ends with a call of `ended`. Ctrl-C stops the tasks as the time limit does.

    Args:
        tasks: The tasks.
        slots: The value of CUDA_VISIBLE_DEVICES in each slot. A GPU may have several slots.
        until: Stops all tasks at this value of `time.monotonic()`.
        ended: Is called with a task and how it ended.

    Returns:
        Whether no task was stopped.
    """
    waiting, free, running = deque(tasks), deque(slots), list[_Running]()
    try:
        while (waiting or running) and time.monotonic() < until:
            while waiting and free:
                running.append(_start(waiting.popleft(), free.popleft()))
            for r in list(running):
                late = time.monotonic() - r.start > r.task.timeout
                if r.process.poll() is not None or late:
                    running.remove(r)
                    free.append(r.gpus)
                    ended(r.task, r.end("timed out" if r.process.returncode is None else ""))
            time.sleep(0.02)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        complete = not running and not waiting
        _stop(running, ended)
    for task in waiting:
        ended(task, End("-", 0.0, "not started", None))
    return complete
