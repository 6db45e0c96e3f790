"""What docker-py's client offers, with local processes as containers.

pytest-celery reaches Docker through one object, the fixture ``docker_client`` of pytest-docker-tools. With this
in its place, all of pytest-celery's own fixtures and node classes run unchanged on a machine without Docker.
Only what those two packages call is here. What a process cannot do: limits, other images, other Celery versions.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from example_app.processes import Proc, remove_directory, short_directory, wait_until
from example_app.services import ROOT, RedisServer
from tests.services.ending import end_worker

WORKDIR = "/app"  # where pytest-celery's image keeps its files


class Volume:
    """A directory."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = short_directory("cg-volume-")
        self.attrs: dict[str, Any] = {"Labels": {}}

    def remove(self, force: bool = False) -> None:
        remove_directory(self.path)


class Network:
    """Nothing: every process is on 127.0.0.1."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.attrs: dict[str, Any] = {"Labels": {}}

    def remove(self) -> None:
        """Nothing was made."""


class Image:
    """A name."""

    def __init__(self, name: str) -> None:
        self.id = name
        self.tags = [name]


class ProcessContainer:
    """One process group. Subclasses start it in ``boot`` and return when it is ready.

    Args:
        client: The client that it belongs to.
        image: Name of the image.
        command: Command line, as the image would get it.
        environment: Variables.
        volumes: Volume name to ``{"bind": path, "mode": ...}``.
        labels: Kept for show.
        name: None makes one of the id.
    """

    port: str | None = None  # "6379/tcp", or None if nothing listens

    def __init__(
        self,
        client: ProcessClient,
        image: str,
        command: Sequence[str] | None,
        environment: Mapping[str, str] | None,
        volumes: Mapping[str, Mapping[str, str]] | None,
        labels: Mapping[str, str] | None,
        name: str | None,
    ) -> None:
        self.client = client
        self.image = image
        self.command = list(command or [])
        self.environment = dict(environment or {})
        self.volumes = dict(volumes or {})
        self.labels = dict(labels or {})
        self.id = uuid.uuid4().hex * 2
        self.name = name or f"cg-{self.id[:12]}"
        self.attrs: dict[str, Any] = {}

    def boot(self) -> None:
        """Start it, or start it again."""
        raise NotImplementedError

    @property
    def process(self) -> Proc | None:
        """None before the first start."""
        raise NotImplementedError

    @property
    def local_port(self) -> int | None:
        """The port on this machine that stands for ``port``."""
        return None

    def _running(self) -> Proc:
        process = self.process
        if process is None:
            raise RuntimeError(f"{self.name} was not started")
        return process

    @property
    def status(self) -> str:
        return "running" if self.process is not None and self.process.running else "exited"

    def reload(self) -> None:
        """Bring ``attrs`` up to date."""
        # pytest-celery builds addresses of the host name alone and trusts that the standard port is behind it.
        hostname = f"127.0.0.1:{self.local_port}" if self.local_port else self.id[:12]
        ports = {self.port: [{"HostIp": "127.0.0.1", "HostPort": str(self.local_port)}]} if self.local_port else {}
        self.attrs = {
            "Config": {"Hostname": hostname, "Labels": self.labels, "Env": [f"{key}={value}" for key, value in self.environment.items()]},
            "HostConfig": {"PortBindings": {}},
            "Mounts": [],
            "NetworkSettings": {"Networks": {"local": {"IPAddress": "127.0.0.1"}}, "Ports": ports},
            "State": {"Status": self.status, "Pid": self.process.pid if self.process else 0},
        }

    def kill(self, signal: str | int | None = None) -> None:
        """Send a signal; the end of a container's first process ends all of it."""
        number = _signal_number(signal)
        if number == SIGKILL:
            self._running().close()
        else:
            self._running().kill(number)

    def stop(self, timeout: float = 10) -> None:
        process = self._running()
        try:
            process.stop(timeout=timeout)
        except TimeoutError:
            process.close()  # as Docker does it

    def restart(self, timeout: float = 10) -> None:
        self.stop(timeout)
        self.boot()
        self.reload()

    def wait(self, timeout: float | None = None) -> dict[str, int]:
        return {"StatusCode": self._running().wait(timeout or 60)}

    def remove(self, force: bool = False, **_: Any) -> None:
        if self.process is not None:
            self.process.close()

    def logs(self) -> bytes:
        """Output of all lives, as Docker keeps it."""
        return self._running().log(whole=True).encode()

    def exec_run(self, cmd: str | Sequence[str], **_: Any) -> tuple[int, bytes]:
        """Run a command beside the process; the question for listening ports is answered from the real one."""
        if cmd == "cat /proc/net/tcp /proc/net/tcp6":
            return 0, self._listening()
        argv = shlex.split(cmd) if isinstance(cmd, str) else list(cmd)
        if argv[0] == "python":
            argv[0] = sys.executable
        process = self._running()
        done = subprocess.run(argv, cwd=process.cwd, env=process.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False)
        return done.returncode, done.stdout

    def _listening(self) -> bytes:
        if self.port is None or self.local_port is None:
            return b""
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self.local_port)) != 0:
                return b""
        return f"0: 00000000:{int(self.port.split('/')[0]):04X} 00000000:0000 0A".encode()

    def put_archive(self, path: str, data: IO[bytes]) -> bool:
        """Unpack a tar archive into the volume that is mounted at ``path``."""
        with tarfile.open(fileobj=data) as archive:
            archive.extractall(self.mounted(path), filter="data")
        return True

    def mounted(self, path: str) -> Path:
        """The local directory of the volume at ``path``."""
        for name, mount in self.volumes.items():
            if mount["bind"] == path:
                return self.client.volumes.by_name[name].path
        raise RuntimeError(f"{self.name} has no volume at {path}")


class RedisContainer(ProcessContainer):
    """A Redis-compatible server."""

    port = "6379/tcp"
    server: RedisServer | None = None

    @property
    def process(self) -> Proc | None:
        return self.server.process if self.server else None

    @property
    def local_port(self) -> int | None:
        return self.server.port if self.server else None

    def boot(self) -> None:
        if self.server is None:
            program, *arguments = self.command or ["redis-server"]
            assert program.endswith("redis-server"), program
            self.server = RedisServer(*arguments)
        else:
            self.server.start_again()

    def remove(self, force: bool = False, **_: Any) -> None:
        if self.server is not None:
            self.server.stop()


class WorkerContainer(ProcessContainer):
    """A Celery worker of this interpreter, started with the command of pytest-celery's image."""

    _process: Proc | None = None

    @property
    def process(self) -> Proc | None:
        return self._process

    def boot(self) -> None:
        if self._process is None:
            directory = self.mounted(WORKDIR)
            argv = [word.replace("%h", self.id[:12]) for word in self.command]
            argv = [sys.executable, "-m", *argv] if argv[0] == "celery" else argv
            environment = {**os.environ, **{key: value.replace(WORKDIR, str(directory)) for key, value in self.environment.items()}}
            environment["PYTHONPATH"] = os.pathsep.join([str(directory), str(ROOT)])
            environment.pop("PYTEST_CURRENT_TEST", None)
            self._process = Proc(argv, directory / "worker.log", environment, directory)
        process = self._process
        process.close()
        process.start()

        def ready() -> bool:
            if not process.running:
                raise RuntimeError(f"the worker ended with {process.returncode}\n{process.tail()}")
            return " ready." in process.log()

        # To return before it is ready would cost a whole second of pytest-docker-tools' polling.
        wait_until(ready, 60, process.tail)

    def remove(self, force: bool = False, **_: Any) -> None:
        if self._process is not None:
            end_worker(self._process)


SIGKILL = int(signal.SIGKILL)


def _signal_number(name: str | int | None) -> int:
    if name is None:
        return SIGKILL
    if isinstance(name, int):
        return int(name)
    return int(getattr(signal, name if name.startswith("SIG") else f"SIG{name}"))


class _Volumes:
    def __init__(self) -> None:
        self.by_name: dict[str, Volume] = {}

    def create(self, name: str, **_: Any) -> Volume:
        self.by_name[name] = Volume(name)
        return self.by_name[name]


class _Networks:
    def create(self, name: str, **_: Any) -> Network:
        return Network(name)


class _Images:
    def build(self, path: str | None = None, tag: str | None = None, **_: Any) -> tuple[Image, Iterable[str]]:
        return Image(tag or "scratch"), iter(())

    def pull(self, repository: str, tag: str | None = None, **_: Any) -> Image:
        return Image(f"{repository}:{tag or 'latest'}")


class _Containers:
    def __init__(self, client: ProcessClient) -> None:
        self.client = client

    def create(
        self,
        image: Any,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        volumes: Mapping[str, Mapping[str, str]] | None = None,
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
        **_: Any,
    ) -> ProcessContainer:
        kind = RedisContainer if str(image).rsplit("/", 1)[-1].startswith("redis") else WorkerContainer
        return kind(self.client, str(image), command, environment, volumes, labels, name)

    def run(self, image: Any, **options: Any) -> ProcessContainer:
        container = self.create(image, **options)
        try:
            container.boot()
        except BaseException:
            container.remove()
            raise
        container.reload()
        return container

    def list(self, **_: Any) -> list[ProcessContainer]:
        return []


class ProcessClient:
    """Stands for ``docker.DockerClient``."""

    def __init__(self) -> None:
        self.volumes = _Volumes()
        self.networks = _Networks()
        self.images = _Images()
        self.containers = _Containers(self)

    def ping(self) -> bool:
        return True
