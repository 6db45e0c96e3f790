"""Dispatch without a worker: which messages are in the broker, and which claims in the store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, group
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import schedule
from pydantic import BaseModel

from celery_guard import DuplicateTask, Guard, GuardedResult, GuardedTask, KeyDerivationError, StoreUnavailable, Unique, WithoutOverlapping
from celery_guard.decisions import ClaimOutcome, ClaimRequest, ClaimState
from tests.services import free_port
from tests.services.stage import Stage

pytestmark = pytest.mark.xdist_group("dispatch")

TTL = 60


class Order(BaseModel):
    number: int
    notes: list[str] = []


@pytest.fixture(scope="module")
def module_stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture
def stage(module_stage: Stage) -> Stage:
    module_stage.clear()
    return module_stage


def _header(message: dict[str, Any]) -> dict[str, Any]:
    header: dict[str, Any] = message["headers"]["guard"]
    return header


# ------------------------------------------------------------------------- results and conflicts


@pytest.mark.parametrize("task", ["executed", "executing", "expired"])
def test_second_dispatch_is_a_duplicate(stage, task):
    """One message; the duplicate's result is the holder's, and says who is in the way and since when (R137, R142)."""
    first = stage.task(task).delay("x")
    assert isinstance(first, GuardedResult)
    assert (first.duplicate, first.conflict) == (False, None)
    second = stage.task(task).apply_async(args=["x"])
    assert isinstance(second, GuardedResult)
    assert (second.duplicate, second.id) == (True, first.id)
    assert second.conflict.key == f"{task}:x"
    assert (second.conflict.task_id, second.conflict.state) == (first.id, ClaimState.QUEUED)
    assert 0 <= second.conflict.age < 30
    assert [message["headers"]["id"] for message in stage.queued()] == [first.id]


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # Celery's own call of redis-py
def test_get_of_a_duplicate_is_the_holders(stage):
    """get() of a duplicate waits for the holder (R141)."""
    first = stage.task("executed").delay("x")
    second = stage.task("executed").delay("x")
    stage.app.backend.store_result(first.id, "value", "SUCCESS")
    assert second.get(timeout=10) == "value"


def test_duplicate_with_ignored_results(stage):
    """ignore_result: a duplicate is told as one, and get() returns None at once instead of waiting for ever (R141)."""
    assert stage.task("silent").delay("x").duplicate is False
    duplicate = stage.task("silent").delay("x")
    assert duplicate.duplicate is True
    ignored = stage.task("executed").apply_async(("x",), ignore_result=True)
    again = stage.task("executed").apply_async(("x",), ignore_result=True)
    assert again.id == ignored.id
    assert again.get(timeout=5) is None


def test_raise(stage):
    """on_conflict="raise" raises DuplicateTask with the holder's data, and sends nothing."""
    first = stage.task("raising").delay("x")
    with pytest.raises(DuplicateTask, match="claimed by task") as raised:
        stage.task("raising").delay("x")
    error = raised.value
    assert (error.task, error.key, error.task_id, error.state) == ("raising", "raising:x", first.id, "queued")
    assert error.age >= 0
    assert len(stage.queued()) == 1


def test_same_callers_of_many_threads_get_one_id(stage):
    """200 callers at once: one message, one id (R054, R072, R086)."""
    count = 200
    barrier, results = threading.Barrier(20), []

    def dispatch() -> None:
        barrier.wait()
        results.extend(stage.task("executed").delay("x") for _ in range(count // 20))

    threads = [threading.Thread(target=dispatch) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result.id for result in results}) == 1
    assert sum(not result.duplicate for result in results) == 1
    assert len(stage.queued()) == 1


def test_arguments_in_every_shape_are_one_key(stage):
    """Positional, by name, or with a default spelled out: one key; another type is another key (R101)."""
    task = stage.task("all_arguments")
    assert task.delay("1").duplicate is False
    for args, kwargs in (((), {"label": "1"}), (("1", "ok"), {}), (("1",), {"extra": None, "how": "ok"})):
        assert task.apply_async(args, kwargs).duplicate is True
    assert task.delay(1).duplicate is False
    assert len(stage.queued()) == 2


def test_key_that_cannot_be_made_sends_nothing(stage):
    """An argument without a canonical form is an error of the dispatch that names the argument."""
    with pytest.raises(KeyDerivationError, match="extra"):
        stage.task("all_arguments").delay("x", "ok", object())
    assert stage.queued() == []
    assert stage.left() == []


def test_shared_keys(stage):
    """shared=True: two tasks have one key, unscoped; without it a key belongs to its task."""
    first = stage.task("shared_a").delay("x")
    second = stage.task("shared_b").delay("x")
    assert (second.duplicate, second.id) == (True, first.id)
    assert stage.task("executed").delay("x").duplicate is False
    assert stage.task("executing").delay("x").duplicate is False


def test_model_arguments(stage):
    """Pydantic arguments have a key, and are sent as Celery sends them."""

    @stage.app.task(base=GuardedTask, name="order", unique=Unique(ttl=TTL), shared=False)
    def order(order):
        return order.number

    first = order.apply_async((Order(number=1),), serializer="pickle")
    assert order.apply_async((Order(number=1, notes=[]),), serializer="pickle").id == first.id
    assert order.apply_async((Order(number=2),), serializer="pickle").duplicate is False
    dumped = order.delay(Order(number=3).model_dump())
    assert order.delay(Order(number=3).model_dump(mode="json")).id == dumped.id
    assert len(stage.queued()) == 3


# ----------------------------------------------------------------------------- life of the claim


@pytest.mark.parametrize(
    ("options", "life"),
    [
        ({}, TTL),
        ({"countdown": 1000}, TTL + 1000),
        ({"eta": timedelta(seconds=1000)}, TTL + 1000),
        ({"eta": timedelta(seconds=-1000)}, TTL),
        ({"expires": 10}, 10 + 5),
        ({"expires": timedelta(seconds=10)}, 10 + 5),
        ({"expires": 1000}, TTL),
        ({"countdown": 1000, "expires": 1030}, 1030 + 5),
        ({"expires": -10}, 5),
    ],
    ids=str,
)
def test_life_of_a_queued_claim(stage, options, life):
    """The claim lives for its ttl from the ETA on, and not much longer than the message if that expires."""
    given = {name: stage.app.now() + value if isinstance(value, timedelta) else value for name, value in options.items()}
    stage.task("executed").apply_async(("x",), **given)
    claim = stage.claim("executed", "x")
    assert claim is not None
    assert claim.expires_at - claim.since_at == pytest.approx(life, abs=1)


def test_naive_eta_counts_in_the_apps_zone(stage):
    """A naive ETA is local to the app, as for Celery."""
    stage.task("executed").apply_async(("x",), eta=datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=500))
    claim = stage.claim("executed", "x")
    assert claim is not None
    assert claim.expires_at - claim.since_at == pytest.approx(TTL + 500, abs=2)


def test_claim_that_expired_is_free(stage):
    """An expired claim is no duplicate: the next dispatch sends a message."""
    first = stage.task("short").delay("x")
    stage.wait_free()
    second = stage.task("short").delay("x")
    assert (second.duplicate, second.id != first.id) == (False, True)
    assert len(stage.queued()) == 2


# ------------------------------------------------------------------------------- ways to dispatch


def test_custom_task_id_and_producer(stage):
    """task_id= and producer= pass through."""
    with stage.app.producer_pool.acquire(block=True) as producer:
        first = stage.task("executed").apply_async(("x",), task_id="mine", producer=producer)
        second = stage.task("executed").apply_async(("x",), task_id="other", producer=producer)
    assert (first.id, second.id) == ("mine", "mine")
    (message,) = stage.queued()
    assert message["headers"]["id"] == _header(message)["id"] == "mine"


def test_same_task_id_again_is_another_message(stage):
    """A task id is not an identity: a second dispatch with the same id is a duplicate like any other."""
    stage.task("executed").apply_async(("x",), task_id="mine")
    assert stage.task("executed").apply_async(("x",), task_id="mine").duplicate is True
    assert len(stage.queued()) == 1


def test_without_guard(stage):
    """guard=False sends a message without a claim, also beside a claim, and leaves that alone (R069)."""
    first = stage.task("executed").delay("x")
    forced = stage.task("executed").apply_async(("x",), guard=False)
    assert isinstance(forced, GuardedResult)
    assert forced.id != first.id
    assert ["claim" in _header(message) for message in stage.queued()] == [True, False]
    claim = stage.claim("executed", "x")
    assert claim is not None
    assert claim.task_id == first.id


@pytest.mark.parametrize("headers", [None, {}, {"tenant": "a"}], ids=str)
def test_headers_of_the_caller(stage, headers):
    """Headers may be None, empty or shared: they are sent, and the caller's dict is not changed (R067)."""
    before = None if headers is None else dict(headers)
    stage.task("both").apply_async(("x",), headers=headers)
    assert headers == before
    (message,) = stage.queued()
    assert _header(message)["claim"] == "both:x"
    assert message["headers"].get("tenant") == (headers or {}).get("tenant")


def test_base_that_adds_headers(stage):
    """A base class that puts headers in on its own works with ours (R067)."""

    class Tracing(GuardedTask):
        abstract = True

        def apply_async(self, args=None, kwargs=None, **options):  # type: ignore[override]
            options["headers"] = {**(options.get("headers") or {}), "trace": "t"}
            return super().apply_async(args, kwargs, **options)

    @stage.app.task(base=Tracing, name="traced", unique=Unique(ttl=TTL), shared=False)
    def traced():
        """Nothing."""

    traced.delay()
    assert traced.delay().duplicate is True
    (message,) = stage.queued()
    assert message["headers"]["trace"] == "t"
    assert _header(message)["claim"]


def test_unknown_options_pass(stage):
    """Options that canvas and later versions of Celery hand over pass through (R114)."""
    stage.task("executed").apply_async(
        ("x",), root_id="r", parent_id="p", group_id="g", group_index=0, replaced_task_nesting=1, stamped_headers=["s"], s="v", shadow="name", priority=3
    )
    (message,) = stage.queued()
    assert message["properties"]["priority"] == 3
    headers = message["headers"]
    assert (headers["root_id"], headers["parent_id"], headers["group"], headers["shadow"]) == ("r", "p", "g", "name")
    assert headers["stamps"] == {"s": "v"}


def test_send_task_by_name_with_the_task_known(stage):
    """app.send_task by name in a process that has the task is guarded too."""
    first = stage.app.send_task("executed", ("x",))
    second = stage.app.send_task("executed", ("x",))
    third = stage.task("executed").delay("x")
    assert first.id == second.id == third.id
    assert second.duplicate is True
    assert len(stage.queued()) == 1


def test_signatures(stage):
    """.s, .si, signature(), apply_async of a signature and a call of it are dispatches like any other; making one takes no claim."""
    task = stage.task("executed")
    made = [task.s("x"), task.si("x"), task.signature(("x",)), stage.app.signature("executed", ("x",)), task.s(label="x"), task.s("x").clone()]
    assert stage.left() == []
    results = [signature.apply_async() for signature in made] + [task.s("x").delay()]
    assert len({result.id for result in results}) == 1
    assert len(stage.queued()) == 1


def test_group_members_are_all_sent(stage):
    """A group's members have ids that somebody waits for: an equal one is sent without a claim, not dropped."""
    task = stage.task("executed")
    result = group(task.s("x"), task.s("x"), task.s("y")).apply_async()
    messages = stage.queued()
    assert sorted(message["headers"]["id"] for message in messages) == sorted(child.id for child in result.children)
    assert sorted(_header(message).get("claim", "") for message in messages) == ["", "executed:x", "executed:y"]


def test_link_makes_a_duplicate_go(stage):
    """A duplicate with a callback or an errback is sent, or that would never be called."""
    task = stage.task("executed")
    task.delay("x")
    linked = task.apply_async(("x",), link=stage.task("plain").si("l"))
    erring = task.apply_async(("x",), link_error=stage.task("plain").si("e"))
    assert (linked.duplicate, erring.duplicate) == (False, False)
    assert len({message["headers"]["id"] for message in stage.queued()}) == 3
    claim = stage.claim("executed", "x")
    assert claim is not None
    assert claim.task_id not in {linked.id, erring.id}


def test_beat(stage):
    """A beat entry whose task is claimed is skipped without an error, moves on, and is sent again when the claim is free (R119, R134, R136)."""
    scheduler = Scheduler(stage.app, lazy=True)
    entry = ScheduleEntry(name="e", task="executed", schedule=schedule(1, app=stage.app), args=("x",), app=stage.app)
    first = scheduler.apply_async(entry)
    second = scheduler.apply_async(entry)
    assert (first.id, second.duplicate) == (second.id, True)
    scheduler.apply_entry(entry)
    assert len(stage.queued()) == 1
    claim = stage.claim("executed", "x")
    assert claim is not None
    stage.store.release_claim(claim.resource, claim.owner)
    scheduler.apply_entry(entry)
    assert len(stage.queued()) == 2
    assert entry.next().total_run_count == 1


def test_map_and_chunks_take_no_claim(stage):
    """map, starmap and chunks send one message of Celery's own task."""
    task = stage.task("executed")
    task.map(["x", "y"]).apply_async()
    task.starmap([("x",)]).apply_async()
    task.chunks([("x",), ("y",)], 1).apply_async()
    assert stage.left() == []


# ------------------------------------------------------------------------------------------ eager


@pytest.fixture
def eager_app(stage: Stage) -> Iterator[Celery]:
    with stage.stranger(guard_store_backend=f"redis://127.0.0.1:{free_port()}", task_always_eager=True) as app:
        yield app


def test_eager_is_unguarded(eager_app):
    """task_always_eager, apply() and a direct call neither claim nor lock nor open a connection (R042, R124)."""
    calls: list[int] = []

    @eager_app.task(base=GuardedTask, bind=True, unique=Unique(key="{x}"), without_overlapping=True, shared=False)
    def nested(self, x, depth=0):
        calls.append(x)
        assert self.guard.fence is None
        self.guard.check()
        if depth:
            nested.delay(x, depth - 1)
        return x

    assert nested.delay(1, 1).get() == 1
    assert nested.apply((2,)).get() == 2
    assert nested(3) == 3
    assert calls == [1, 1, 2, 3]


def test_guarded_eager(eager_app):
    """guard_eager=True guards them with a store in memory: the nested run of a locked key is refused (R124)."""
    eager_app.conf.guard_eager = True
    fences: list[Any] = []

    @eager_app.task(base=GuardedTask, bind=True, without_overlapping=WithoutOverlapping(key="{x}", on_conflict="raise"), shared=False)
    def nested(self, x, depth=0):
        fences.append(self.guard.fence)
        return nested.apply((x, depth - 1)).state if depth else "done"

    assert nested.apply((1,)).get() == "done"
    assert nested.apply((1, 1)).get() == "FAILURE"
    assert nested.apply((1,)).get() == "done"
    assert fences == sorted(fences)
    assert len(set(fences)) == 3


# ----------------------------------------------------------------------------------- store trouble


def test_store_down_at_dispatch(stage):
    """guard_on_store_error: "raise" sends nothing and raises at once; "dispatch" sends without a claim (R126, R154)."""
    away = f"redis://127.0.0.1:{free_port()}/0"
    for setting in ("raise", "dispatch"):
        with stage.stranger(guard_store_backend=away, guard_on_store_error=setting, guard_store_connect_timeout=0.5) as app:

            @app.task(base=GuardedTask, name=f"away-{setting}", unique=True, shared=False)
            def away_task():
                """Nothing."""

            began = time.monotonic()
            if setting == "raise":
                with pytest.raises(StoreUnavailable):
                    away_task.delay()
                assert stage.queued() == []
            else:
                away_task.delay()
                assert len(stage.queued()) == 1
            assert time.monotonic() - began < 20


def test_fork_does_not_share_a_connection(stage):
    """A child that was forked from a process with a store gets one of its own, and neither disturbs the other."""
    task = stage.task("executed")
    task.delay("before")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store = Guard(stage.app).store
            for number in range(100):
                store.claim(ClaimRequest(f"child:{number}", "owner", "id", TTL))
            code = 0 if store is not stage.store else 2
        finally:
            os._exit(code)
    for number in range(100):
        assert stage.store.claim(ClaimRequest(f"parent:{number}", "owner", "id", TTL)).outcome is ClaimOutcome.CLAIMED
    assert os.waitpid(child, 0)[1] == 0
    assert len(stage.store.list_claims()) == 201
