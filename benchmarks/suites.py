"""What is measured. Each suite yields rows; none leaves data behind."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import redis
from celery import Celery

from benchmarks.measure import calls, interleaved
from benchmarks.row import Row
from benchmarks.tasks import STORE_DB, make_app
from celery_guard import Guard
from celery_guard.decisions import BeginRequest, ClaimRequest, EndRequest, ExtendRequest
from celery_guard.stores.redis import RedisStore
from example_app.processes import wait_until
from example_app.services import CeleryWorker, RedisServer

__all__ = ["SUITES"]


def round_trips(server: RedisServer, quick: bool) -> Iterator[Row]:
    """Count the scripts of each verb: exact."""
    del quick
    client = redis.Redis(port=server.port)
    app = make_app(_base(server))
    task = app.tasks["unique"]
    task.delay(0)
    yield Row("round trips: dispatch", calls(client, lambda: task.delay(1)), "calls", at_most=1)
    yield Row("round trips: duplicate", calls(client, lambda: task.delay(1)), "calls", at_most=1)
    store = Guard(app).store
    begin = BeginRequest("o", "t", 0, "id", "w", 30.0, claim="bench", lock="bench", max_crashes=3)
    store.begin(begin)
    store.end(EndRequest("o", "t", claim="bench", lock="bench"))
    yield Row("round trips: begin", calls(client, lambda: store.begin(begin)), "calls", at_most=1)
    yield Row("round trips: end", calls(client, lambda: store.end(EndRequest("o", "t", claim="bench", lock="bench"))), "calls", at_most=1)
    held = [_hold(store, number) for number in range(1000)]
    store.extend(held[:1])  # the server learns the script
    yield Row("round trips: heartbeat of 1,000 locks", calls(client, lambda: store.extend(held)), "calls", at_most=1)
    _clean(server)


def _hold(store: object, number: int) -> ExtendRequest:
    assert isinstance(store, RedisStore)
    lock, owner = f"held:{number}", f"owner{number}"
    result = store.begin(BeginRequest(owner, "t", 0, "id", "w", 30.0, lock=lock))
    return ExtendRequest(owner, "t", 0, "id", "w", 30.0, lock=lock, fence=result.fence)


def dispatch(server: RedisServer, quick: bool) -> Iterator[Row]:
    """CPU of a guarded dispatch beside that of a plain one, both in this process, in turns."""
    for broker, name, floor in ((None, "Redis broker", 0.80), ("memory://", "memory broker", 0.55)):
        app = make_app(_base(server), broker)
        plain = app.tasks["plain"]
        for task_name, at_least in (("unique", floor), ("unique_all", None)):
            guarded = app.tasks[task_name]
            pair = interleaved(plain.delay, guarded.delay, calls_each=50, rounds=40 if quick else 200)
            note = f"plain {pair.plain * 1e6:.0f} µs, guarded {pair.guarded * 1e6:.0f} µs of CPU"
            yield Row(f"dispatch, plain ÷ {task_name}, {name}", pair.ratio, "", at_least=at_least, note=note)
            _clean(server)
        again = _Duplicate(app)
        pair = interleaved(plain.delay, again, calls_each=50, rounds=40 if quick else 200)
        yield Row(f"plain dispatch ÷ duplicate, {name}", pair.ratio, "", at_least=2.5 if broker is None else None, note=f"{pair.guarded * 1e6:.0f} µs of CPU")
        app.close()
        _clean(server)


class _Duplicate:
    """Dispatches what is claimed already."""

    def __init__(self, app: Celery) -> None:
        self.task = app.tasks["unique"]
        self.task.delay(-1)

    def __call__(self, _: int) -> None:
        self.task.delay(-1)


def drain(server: RedisServer, quick: bool) -> Iterator[Row]:
    """Time in which a worker with 2 children empties a queue of empty tasks, plain and locked in turns."""
    count, rounds = (400, 3) if quick else (2000, 7)
    app = make_app(_base(server))
    client = redis.Redis(port=server.port)
    times: dict[str, list[float]] = {"plain": [], "locked": [], "both": []}
    with tempfile.TemporaryDirectory() as folder:
        worker = CeleryWorker("benchmarks.tasks", Path(folder) / "log", queues=["idle"], loglevel="WARNING", env={"BENCH_REDIS": _base(server)})
        with worker:
            wait_until(lambda: app.control.ping(timeout=1.0), 60, "the worker answers")
            for turn in range(rounds + 1):
                for name in times if turn % 2 else reversed(times):
                    taken = _drain_once(app, client, name, count)
                    if turn:  # the first round warms up
                        times[name].append(taken)
    plain = statistics.median(times["plain"])
    for name, at_least in (("locked", 0.80), ("both", None)):
        ratio = statistics.median(p / g for p, g in zip(times["plain"], times[name], strict=True))
        note = f"{count / plain:.0f} plain, {count / statistics.median(times[name]):.0f} {name} tasks/s"
        yield Row(f"drain of {count:,}, plain ÷ {name}", ratio, "", at_least=at_least, note=note)
    _clean(server)


def _drain_once(app: Celery, client: redis.Redis, name: str, count: int) -> float:
    queue = f"drain-{name}"
    task = app.tasks[name]
    with app.producer_pool.acquire(block=True) as producer:
        for number in range(count):
            task.apply_async((number,), queue=queue, producer=producer)
    start = time.perf_counter()
    app.control.add_consumer(queue, reply=True, timeout=5, limit=1)
    wait_until(lambda: not client.llen(queue) and not client.hlen("unacked"), 300, f"{queue} is empty", interval=0.002)
    taken = time.perf_counter() - start
    app.control.cancel_consumer(queue, reply=True, timeout=5, limit=1)
    return taken


def memory(server: RedisServer, quick: bool) -> Iterator[Row]:
    """Redis memory of a claim with its index entry, and the server's time for a claim, few and many."""
    count = 100_000 if quick else 1_000_000
    client = redis.Redis(port=server.port, db=STORE_DB)
    _clean(server)
    before = int(client.info("memory")["used_memory"])
    _claim_many(server, 0, 1000)
    few = _server_time(client, lambda: _claim_many(server, 10_000_000, 2000))
    context = get_context("spawn")
    processes = [context.Process(target=_claim_many_at, args=(_base(server), part * count // 2, count // 2)) for part in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    many = _server_time(client, lambda: _claim_many(server, 20_000_000, 2000))
    keys = client.dbsize()
    used = int(client.info("memory")["used_memory"]) - before
    yield Row(f"Redis memory of a claim, of {keys:,}", used / keys, "bytes", at_most=400)
    yield Row(f"server time of a claim, at {count:,} ÷ at 1,000", many / few, "", at_most=1.5, note=f"{few:.1f} and {many:.1f} µs")
    _clean(server)


def _server_time(client: redis.Redis, action: Callable[[], object]) -> float:
    client.config_resetstat()
    action()
    return float(client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])


def _claim_many(server: RedisServer, first: int, count: int) -> None:
    _claim_many_at(_base(server), first, count)


def _claim_many_at(base: str, first: int, count: int) -> None:
    """Claim as a dispatch does: a task id of 36 and an owner of 22 characters."""
    store = RedisStore.from_url(f"{base}/{STORE_DB}")
    for number in range(first, first + count):
        store.claim(ClaimRequest(f"shop.rebuild_summary:p:{number}", f"{number:022d}", f"{number:036d}", 3600.0))
    store.close()


def worker(server: RedisServer, quick: bool) -> Iterator[Row]:
    """Memory of a worker over many guarded tasks: it must not grow."""
    count = 10_000 if quick else 100_000
    app = make_app(_base(server))
    client = redis.Redis(port=server.port)
    with tempfile.TemporaryDirectory() as folder:
        process = CeleryWorker("benchmarks.tasks", Path(folder) / "log", pool="solo", loglevel="ERROR", env={"BENCH_REDIS": _base(server)})
        with process:
            wait_until(lambda: app.control.ping(timeout=1.0), 60, "the worker answers")
            sizes = []
            for _ in range(10):
                for number in range(count // 10):
                    app.tasks["both"].delay(number)
                wait_until(lambda: not client.llen("celery") and not client.hlen("unacked"), 300, "the queue is empty", interval=0.05)
                sizes.append(_resident(process.pid))
    # The first tenth loads what is loaded once.
    grown = (sizes[-1] - sizes[0]) / 2**20
    yield Row(f"worker memory over {count:,} guarded tasks", grown, "MiB", at_most=5, note=f"from {sizes[0] / 2**20:.1f} MiB")
    _clean(server)


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _base(server: RedisServer) -> str:
    return server.url(0).rsplit("/", 1)[0]


def _clean(server: RedisServer) -> None:
    redis.Redis(port=server.port).flushall()  # our own server


SUITES: dict[str, Callable[[RedisServer, bool], Iterator[Row]]] = {
    "round-trips": round_trips,
    "dispatch": dispatch,
    "drain": drain,
    "memory": memory,
    "worker": worker,
}
