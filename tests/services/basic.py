"""A small app without guards: what the harness itself is tested with."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.services.app import create_app

app = create_app(__name__)


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def pids() -> tuple[int, int]:
    """Pid of the process that runs the task and of its parent."""
    return os.getpid(), os.getppid()


@app.task(acks_late=True, reject_on_worker_lost=True)
def hold(log: str, until: str, limit: float = 60.0) -> str:
    """Write a line when it starts and one when it ends; end when the file ``until`` exists."""
    note(log, "start")
    deadline = time.monotonic() + limit
    while not Path(until).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    note(log, "end")
    return "done"


def note(log: str, what: str) -> None:
    """Append ``what`` and our pid in one write, so that lines of many processes do not mix."""
    with Path(log).open("a") as file:
        file.write(f"{what} {os.getpid()}\n")
