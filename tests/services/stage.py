"""Stage: one Redis server, one app here, workers elsewhere, and what can be seen of them from outside."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import redis
from celery import Celery
from celery.exceptions import TimeoutError as NoResult

from celery_guard import Guard
from celery_guard.compat import CELERY_VERSION
from celery_guard.decisions import ClaimInfo, LockInfo
from example_app.processes import remove_directory, short_directory, wait_until
from example_app.services import CeleryWorker, RedisServer
from tests.services.app import AppEnvironment, load_app

#: The one condition for what only Celery 5.7 does: a rejected message fails, a lost worker's task is retried.
SINCE_5_7 = CELERY_VERSION >= (5, 7)
TASKS = "tests.services.guarded"
TIMEOUT = 60
LIVE_RUN = """
local raw = redis.call('GET', KEYS[1])
if not raw then return 0 end
local state, _, _, expires = cmsgpack.unpack(raw)
local time = redis.call('TIME')
return state == 1 and expires > time[1] * 1000 + time[2] / 1000 and 1 or 0
"""


class Stage:
    """Everything that the tests of one module share.

    Args:
        module: Module with tasks.
        conf: Settings on top of the module's, for the app here and for the workers.
    """

    def __init__(self, module: str = TASKS, **conf: Any) -> None:
        self._stack = ExitStack()
        self.module = module
        self.directory = short_directory("cg-stage-")
        self._stack.callback(remove_directory, self.directory)
        self.server = self._stack.enter_context(RedisServer())
        self.url = self.server.url()
        self.redis = redis.Redis.from_url(self.url)
        self._stack.callback(self.redis.close)
        self.environment = AppEnvironment(self.url, conf={"test_directory": str(self.directory), **conf})
        self.app: Any = load_app(module, self.environment)
        self._stack.callback(self._close_app)
        _keep_subscriptions(self.app)
        self.app.finalize()  # until then the app knows its tasks by their names only
        self.store = Guard(self.app).store
        self.workers: list[CeleryWorker] = []
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.close()
        self._stack.close()

    def _close_app(self) -> None:
        _close_backend(self.app)
        Guard(self.app).close()
        self.app.amqp.producer_pool.force_close_all()
        self.app.pool.force_close_all()
        self.app.close()

    @contextmanager
    def stranger(self, **conf: Any) -> Iterator[Any]:
        """An app on the same broker that knows none of the tasks."""
        app = Celery("stranger", broker=self.url, backend=self.url, set_as_current=False)
        app.conf.update(conf)
        _keep_subscriptions(app)
        yield app
        _close_backend(app)
        app.close()

    def clear(self) -> None:
        """Forget what an earlier test may have left behind: claims, locks, messages."""
        for pattern in ("guard:*", "celery", "celery\x06*", "unacked*", "limbo*"):
            for key in self.redis.scan_iter(pattern, count=1000):
                self.redis.delete(key)

    # ------------------------------------------------------------------------------ workers

    def worker(self, *, wait: bool = True, **options: Any) -> CeleryWorker:
        """Start a worker; takes the options of ``CeleryWorker``. It ends with the stage."""
        options["env"] = {**self.environment.variables(), **options.get("env", {})}
        worker = CeleryWorker(self.module, self.directory / f"worker{len(self.workers)}.log", **{"concurrency": 4, **options})
        self.workers.append(worker)
        worker.start()
        return worker.wait_ready() if wait else worker

    @contextmanager
    def working(self, **options: Any) -> Iterator[CeleryWorker]:
        """A worker for a while."""
        worker = self.worker(**options)
        try:
            yield worker
        finally:
            worker.close()

    def logs(self) -> str:
        """Ends of all workers' logs, for error messages."""
        return "".join(f"\n--- {worker.hostname}\n{worker.tail(4000)}" for worker in self.workers[-2:])

    # ---------------------------------------------------------------------------- what ran

    def label(self, stem: str = "x") -> str:
        """A label that no other test uses."""
        self._number += 1
        return f"{stem}{self._number}"

    def task(self, name: str) -> Any:
        return self.app.tasks[name]

    def notes(self, label: str | None = None, what: str = "start", task: str | None = None) -> list[dict[str, Any]]:
        """Lines that the tasks wrote, in order."""
        try:
            text = (self.directory / "log").read_text()
        except FileNotFoundError:
            return []
        lines = [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if line["what"] == what and label in (None, line["label"]) and task in (None, line["task"])]

    def runs(self, label: str, task: str | None = None) -> int:
        """How many times the body began."""
        return len(self.notes(label, task=task))

    def started(self, label: str, times: int = 1, timeout: float = TIMEOUT) -> list[dict[str, Any]]:
        """Wait until the body began ``times`` times."""
        wait_until(lambda: self.runs(label) >= times, timeout, lambda: f"{times} starts of {label}, seen {self.runs(label)}{self.logs()}")
        return self.notes(label)

    def let_go(self, label: str) -> None:
        """Let bodies end that hold."""
        (self.directory / f"{label}.go").touch()

    def most_at_once(self, label: str) -> int:
        """The greatest number of bodies that ran at the same time; a killed one counts as ended when its process wrote last."""
        events = []
        for line in self.notes(label):
            ends = [end["at"] for end in self.notes(label, "end") if end["pid"] == line["pid"] and end["at"] >= line["at"]]
            events += [(line["at"], 1), (min(ends, default=line["at"]), -1)]
        running = most = 0
        for _, step in sorted(events):
            running += step
            most = max(most, running)
        return most

    def told(self, decision: str, result: Any, timeout: float = 20) -> None:
        """Wait until a worker logged a decision on a task."""
        pattern = re.compile(rf" {decision} .*task_id={result.id}")

        def logged() -> bool:
            return any(pattern.search(worker.log(whole=True)) for worker in self.workers)

        wait_until(logged, timeout, lambda: f"{decision} of {result.id} in a log{self.logs()}")

    # --------------------------------------------------------------------------- results

    def get(self, result: Any, timeout: float = TIMEOUT) -> Any:
        """The value of a result; a missing one fails with the workers' logs."""
        try:
            return result.get(timeout=timeout, disable_sync_subtasks=False)
        except NoResult as error:
            raise AssertionError(f"no result of {result.id} ({result.state}) within {timeout} s{self.logs()}") from error

    def state(self, result: Any, *wanted: str, timeout: float = TIMEOUT) -> str:
        """Wait for one of the states ``wanted`` and return it."""

        def reached() -> bool:
            return result.state in wanted

        wait_until(reached, timeout, lambda: f"{result.id} in {wanted}, is {result.state}{self.logs()}")
        return str(result.state)

    # ------------------------------------------------------------------ what is in the store

    def claim(self, task: str, label: str) -> ClaimInfo | None:
        return self.store.get_claim(self.task(task).claim_key((label,), {}))

    def lock(self, task: str, label: str) -> LockInfo | None:
        return self.store.get_lock(self.task(task).lock_key((label,), {}))

    def left(self, label: str | None = None) -> list[str]:
        """Keys of claims, slots and runs that exist, without the prefix; ``label``: only those of resources that end so."""
        keys = [key.decode() for key in self.redis.scan_iter("guard:1:{*", count=1000)]
        kept = [key.removeprefix("guard:1:") for key in keys if not key.endswith(":fence") and not self._over(key)]
        if label is not None:
            kept = [key for key in kept if f":{label}}}" in key]
        return sorted(kept)

    def _over(self, key: str) -> bool:
        """Whether the key is a record of an ended run, by which copies and crashes are known."""
        return key.endswith(":run") and not self.redis.eval(LIVE_RUN, 1, key)

    def wait_free(self, label: str | None = None, timeout: float = 10) -> None:
        """Wait until nothing is held any more."""
        wait_until(lambda: not self.left(label), timeout, lambda: f"nothing held, but {self.left(label)}{self.logs()}")

    # ----------------------------------------------------------------- what is in the broker

    def queued(self, queue: str = "celery") -> list[dict[str, Any]]:
        """Messages that wait in a queue, of every priority, oldest first."""
        raw: list[bytes] = []
        for suffix in ("", *(f"\x06\x16{step}" for step in (3, 6, 9))):
            raw += reversed(self.redis.lrange(f"{queue}{suffix}", 0, -1))  # type: ignore[arg-type]
        return [json.loads(item) for item in raw]

    def unacknowledged(self) -> list[dict[str, Any]]:
        """Messages that workers have and did not acknowledge."""
        return [json.loads(item)[0] for item in self.redis.hvals("unacked")]  # type: ignore[union-attr]

    def push(self, message: Mapping[str, Any], queue: str = "celery") -> None:
        """Put a raw message into a queue, as if it had been sent there."""
        properties = {**message["properties"], "delivery_info": {"exchange": "", "routing_key": queue}}
        self.redis.lpush(queue, json.dumps({**message, "properties": properties}))

    def drained(self, timeout: float = TIMEOUT) -> None:
        """Wait until no message waits anywhere."""

        def empty() -> bool:
            return not self.queued() and not self.redis.hlen("unacked")

        wait_until(empty, timeout, lambda: f"no messages, but {len(self.queued())} queued, {self.redis.hlen('unacked')} unacknowledged{self.logs()}")


def _keep_subscriptions(app: Any) -> None:
    """Never unsubscribe from results.

    Celery does so when a result is collected. That deadlocks when it happens during another such call
    (5.4), and waits for twenty seconds where the server has gone.
    """
    app.conf.result_backend_thread_safe = True  # one backend for all threads
    app.backend.remove_pending_result = _nothing


def _close_backend(app: Any) -> None:
    with suppress(Exception):
        app.backend.result_consumer.stop()
    with suppress(Exception):
        app.backend.client.connection_pool.disconnect()


def _nothing(result: Any) -> Any:
    return result


def decoded_body(message: Mapping[str, Any]) -> Any:
    """Args, kwargs and embedded signatures of a raw JSON message."""
    return json.loads(base64.b64decode(message["body"]))


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
