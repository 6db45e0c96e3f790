"""Child processes that never outlive us, and waiting for them.

Standard library only: the demo uses it before anything is installed beyond the package itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from example_app import reaper

__all__ = ["REAPER", "Proc", "ServiceUnavailable", "remove_directory", "short_directory", "wait_until"]

T = TypeVar("T")


class ServiceUnavailable(Exception):
    """This machine has no way to give us the service; the text says why and what would help."""


def wait_until(predicate: Callable[[], T], timeout: float = 30.0, message: str | Callable[[], str] = "", interval: float = 0.02) -> T:
    """Call ``predicate`` until it returns something true.

    Args:
        predicate: Called at least twice; what it raises is raised.
        timeout: Seconds after which it fails. A ceiling, not an estimate: be generous.
        message: What was waited for, or a callable that tells it at the end (a log, a state).
        interval: Seconds between two calls.

    Returns:
        The true value.

    Raises:
        TimeoutError: If it stayed false.
    """
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() >= deadline:
            if value := predicate():  # a machine that stalled us past the deadline gets its last chance
                return value
            text = message() if callable(message) else message
            raise TimeoutError(f"{text or getattr(predicate, '__name__', 'the condition')}: not so within {timeout:g} s")
        time.sleep(interval)
    return value


class _Reaper:
    """Our end of the pipe to the reaper process, which starts at the first use in each process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def _order(self, line: str) -> None:
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-E", "-s", reaper.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )
                self._owner = os.getpid()
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def add_group(self, pid: int) -> None:
        self._order(f"+P {pid} {reaper.start_time(pid) or 0}")

    def drop_group(self, pid: int) -> None:
        self._order(f"-P {pid}")

    def add_directory(self, path: Path) -> None:
        self._order(f"+D {path}")

    def drop_directory(self, path: Path) -> None:
        self._order(f"-D {path}")

    def close(self) -> None:
        """End the reaper process, which first ends what was not dropped; a later order starts another."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None and self._owner == os.getpid():
                with contextlib.suppress(OSError):
                    process.communicate(timeout=10)


REAPER = _Reaper()


def short_directory(prefix: str) -> Path:
    """Make a directory that goes away with us, with a path short enough for a unix socket (104 bytes on macOS)."""
    parent = "/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else None
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    REAPER.add_directory(path)
    return path


def remove_directory(path: Path) -> None:
    """Remove what ``short_directory`` made."""
    shutil.rmtree(path, ignore_errors=True)
    REAPER.drop_directory(path)


class Proc:
    """One child process in a session of its own, with its output in a file; may be started again.

    Args:
        argv: Program and arguments.
        log: File that its output is appended to, over all its lives.
        env: The whole environment; None passes ours on.
        cwd: Working directory; None is ours.
    """

    def __init__(self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        self.argv = list(argv)
        self.log_file = log
        self.env = None if env is None else dict(env)
        self.cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def __enter__(self) -> Self:
        if self._process is None:
            self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> Self:
        """Start it; the log of this life begins here."""
        with self.log_file.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=self.env, cwd=self.cwd, start_new_session=True
            )
        REAPER.add_group(self._process.pid)
        return self

    @property
    def pid(self) -> int:
        """Process id of the current or last life."""
        if self._process is None:
            raise RuntimeError(f"{self.argv[0]} was not started")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs or before it was started; negative for the signal that ended it."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def log(self, whole: bool = False) -> str:
        """Output of the current life, or of all lives."""
        try:
            data = self.log_file.read_bytes()
        except FileNotFoundError:
            return ""
        return data[0 if whole else self._log_start :].decode(errors="replace")

    def tail(self, characters: int = 3000) -> str:
        """End of the log, for error messages."""
        return self.log()[-characters:]

    def child_pids(self) -> list[int]:
        """Pids of the living direct children, in order."""
        return [pid for pid in _children(self.pid) if reaper.start_time(pid) is not None]

    def kill(self, number: int = signal.SIGKILL, group: bool = False) -> None:
        """Send a signal to the process, or to it and all that it started; a dead one is no error."""
        with contextlib.suppress(ProcessLookupError):
            if group:
                os.killpg(self.pid, number)
            elif self.running:
                os.kill(self.pid, number)

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for its end; returns the exit code.

        Raises:
            TimeoutError: If it runs on; the text has the end of the log.
        """
        if self._process is None:
            raise RuntimeError(f"{self.argv[0]} was not started")
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.argv[0]} (pid {self.pid}) still runs after {timeout:g} s\n{self.tail()}") from None

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60.0) -> int:
        """Send a signal, wait for the end, then kill what is left of its group; returns the exit code.

        Raises:
            TimeoutError: If the signal did not end it; it is killed all the same.
        """
        try:
            self.kill(number)
            return self.wait(timeout)
        finally:
            self.close()

    def close(self) -> None:
        """Kill the whole group now. Idempotent."""
        if self._process is None:
            return
        self.kill(group=True)
        self._process.wait()
        REAPER.drop_group(self._process.pid)


def _children(parent: int) -> list[int]:
    found = []
    if Path("/proc/self/stat").exists():
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    text = (entry / "stat").read_text(errors="replace")
                    if int(text[text.rindex(")") + 2 :].split()[1]) == parent:
                        found.append(int(entry.name))
    else:
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        found = [int(line.split()[0]) for line in listing.splitlines() if int(line.split()[1]) == parent]
    return sorted(found)
