"""What messages may look like, and what a caller gets: foreign and future headers, odd ids, clocks, protocols, results, eager calls."""

from __future__ import annotations

import copy
import json
import pickle
import threading
import time
import uuid
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from celery import group, signals
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Ignore, Reject, Retry
from celery.result import GroupResult

from celery_guard import DuplicateTask, Guard, GuardedResult, GuardedTask, LockLost, OverlapRefused, PostponedTooLong, Unique, WithoutOverlapping
from celery_guard.decisions import ClaimRequest, ClaimState
from tests.services import wait_until
from tests.services.seams import Sent, catching, deliver, held, memory_app, request_of, run


@pytest.fixture
def app() -> Any:
    return memory_app()


def _guarded(app: Any, name: str = "t", **options: Any) -> Any:
    body = options.pop("body", lambda self, *args, **kwargs: "ran")
    body.__name__ = "body"  # Celery writes a function of that name to check arguments
    made = app.task(base=GuardedTask, bind=True, name=name, **{"unique": Unique(ttl=60), **options})(body)
    app.finalize()
    return app.tasks[made.name]


def _sent(task: Any, *args: Any, **options: Any) -> Sent:
    with catching() as sent:
        task.apply_async(args, **options)
    (message,) = sent
    return message


# ------------------------------------------------------------------------------- headers


@pytest.mark.parametrize("foreign", ["on", 7, ["a"], {"other": "library"}, None])
def test_header_of_another_library(app, foreign):
    """Somebody else's header of our name is no guard header: the message runs, under the guard that the worker derives."""
    task = _guarded(app, without_overlapping=True, body=lambda self: held(app))
    message = _sent(task, guard=False)
    message.headers["guard"] = foreign
    outcome = deliver(app, message)
    assert outcome.state is None
    assert len(outcome.value) == 2
    assert held(app) == []


def test_message_that_lost_its_header_is_not_its_own_duplicate(app):
    """A bridge that drops headers costs the job nothing: its own claim is taken over, and given back."""
    task = _guarded(app)
    message = _sent(task)
    del message.headers["guard"]
    assert deliver(app, message).value == "ran"
    assert held(app) == []


def test_header_of_a_later_version(app):
    """What this version knows in the header of a later one is used; what it cannot read never makes the job a duplicate of itself."""
    task = _guarded(app)
    message = _sent(task)
    message.headers["guard"] |= {"v": 2, "news": [1], "until": "tomorrow"}
    assert deliver(app, message).value == "ran"
    assert held(app) == []
    message = _sent(task)
    message.headers["guard"] = {"v": 2, "o": "renamed"}
    assert deliver(app, message).value == "ran"
    assert held(app) == []


def test_message_sent_before_the_task_had_a_lock(app):
    """A message of a version of the task that had no lock takes the lock of today's version, also for the main process."""
    task = _guarded(app, without_overlapping=True, body=lambda self: self.guard.key)
    message = _sent(task)
    del message.headers["guard"]["lock"]
    assert request_of(app, message)._guard_header.lock == task.lock_key((), {})
    assert deliver(app, message).value == task.lock_key((), {})
    assert held(app) == []


def test_request_of_a_guarded_message_can_be_shown(app):
    """inspect (Flower) shows the worker's requests: they are JSON, and a requeued message goes back with the header it came with."""
    task = _guarded(app, without_overlapping=True)
    message = _sent(task)
    before = copy.deepcopy(message.headers)
    request = request_of(app, message)
    json.dumps(request.info())
    json.dumps(request.request_dict["guard"])
    assert message.headers == before


# ----------------------------------------------------------------------------------- ids


@pytest.mark.parametrize("task_id", ["order-7", "ünïcödé {braces}", 12, uuid.UUID(int=5), "x" * 300])
def test_task_ids_of_all_kinds(app, task_id):
    """A task id is anything that Celery takes; its message knows its claim again, and gives it back."""
    task = _guarded(app, without_overlapping=True, ignore_result=True)  # not every backend takes every id
    message = _sent(task, task_id=task_id)
    assert message.id == task_id
    assert task.delay().duplicate
    assert request_of(app, message)._guard_header.owner == message.guard["owner"]
    assert deliver(app, message).value == "ran"
    assert held(app) == []


def test_very_long_task_names(app):
    """Tasks whose long names differ in the last letter have different keys, and run."""
    long = "n" * 2000
    task, other = _guarded(app, long), _guarded(app, long + "m")
    assert run(app, task).value == "ran"
    assert task.claim_key((), {}) != other.claim_key((), {})


# -------------------------------------------------------------------------------- times


NEW_YORK = timezone(timedelta(hours=-5))
ETAS = {
    "naive": lambda now: now.replace(tzinfo=None),
    "aware": lambda now: now.astimezone(NEW_YORK),
    "iso": lambda now: now.isoformat(),
    "naive iso": lambda now: now.replace(tzinfo=None).isoformat(),
}


@pytest.mark.parametrize("conf", [{}, {"timezone": "America/New_York"}, {"timezone": "America/New_York", "enable_utc": False}], ids=["utc", "zone", "local"])
@pytest.mark.parametrize("shape", ETAS)
@pytest.mark.parametrize("option", ["eta", "expires"])
def test_claim_lives_as_long_as_its_message(conf, shape, option):
    """Whatever the shape of an ETA or expiry and the zone of the app: the claim counts it as the worker does (R246)."""
    app = memory_app(**conf)
    task = _guarded(app, unique=Unique(ttl=60 if option == "eta" else 9000))
    due = datetime.now(UTC) + timedelta(seconds=1000)
    value = ETAS[shape](due)
    try:
        with catching() as sent:
            task.apply_async((), **{option: value})
    except AttributeError:
        pytest.skip("this Celery does not take text here")
    seen = getattr(request_of(app, sent[0]), option).timestamp() - time.time()
    (claim,) = Guard(app).store.list_claims()
    assert claim.expires_at - claim.since_at == pytest.approx(seen + (60 if option == "eta" else 5), abs=3)


@pytest.mark.parametrize(
    ("options", "life"), [({"countdown": 0}, 60), ({"countdown": -50}, 60), ({"countdown": 10, "eta": datetime(2001, 1, 1, tzinfo=UTC)}, 70)]
)
def test_odd_countdowns(app, options, life):
    """A countdown of 0 or less is none; beside an ETA the countdown counts, as in Celery."""
    _sent(_guarded(app), **options)
    (claim,) = Guard(app).store.list_claims()
    assert claim.expires_at - claim.since_at == pytest.approx(life, abs=1)


@pytest.mark.parametrize("skew", [-3600.0, 3600.0])
def test_patience_with_clocks_that_differ(app, skew, monkeypatch):
    """give_up_after is measured by the store's clock: workers whose clocks are an hour apart give up neither at once nor never."""
    task = _guarded(app, unique=None, without_overlapping=WithoutOverlapping(give_up_after=100, delay=[10]))
    store: Any = Guard(app).store
    clock, real = [1000.0], time.time
    monkeypatch.setattr(store, "_clock", lambda: clock[0])
    first = _sent(task)
    blocker = _sent(task)
    outcomes = []

    def body(*_: Any) -> str:
        message = first
        for step in range(12):
            monkeypatch.setattr(time, "time", lambda ahead=skew * (step % 2): real() + ahead)
            with catching() as sent:
                outcomes.append(deliver(app, message))
            if not sent:
                break
            (message,) = sent
            clock[0] += 20
            monkeypatch.setattr(store, "_clock", lambda: clock[0])
            store._locks[task.lock_key((), {})].holders = {
                token: type(holder)(**{**{name: getattr(holder, name) for name in holder.__slots__}, "expires_at": clock[0] + 50})
                for token, holder in store._locks[task.lock_key((), {})].holders.items()
            }
        return "done"

    monkeypatch.setattr(task, "run", body)
    deliver(app, blocker)
    assert [outcome.state for outcome in outcomes] == ["RETRY"] * 5 + ["FAILURE"]
    assert isinstance(outcomes[-1].value, PostponedTooLong)
    assert outcomes[-1].value.waited == pytest.approx(100)


@pytest.mark.parametrize("skew", [-3600.0, 0.0, 3600.0])
@pytest.mark.parametrize("overdue", [True, False])
def test_late_copies_are_expected_by_the_workers_own_clock(skew, overdue, monkeypatch):
    """A message held unacknowledged for longer than the visibility timeout has a copy; the sender's clock has no say in that."""
    app = memory_app()
    task = _guarded(app)
    monkeypatch.setattr(Guard(app), "_visibility_timeout", 300.0)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + skew)
    message = _sent(task)
    monkeypatch.setattr(time, "time", real)
    monotonic = time.monotonic

    def body(*_: Any) -> str:
        if overdue:
            monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 301)
        return "first"

    monkeypatch.setattr(task, "run", body)
    assert deliver(app, message).value == "first"
    monkeypatch.setattr(time, "monotonic", monotonic)
    monkeypatch.setattr(task, "run", lambda *_: "again")
    assert deliver(app, message).state == ("IGNORED" if overdue else None)


# ------------------------------------------------------------------------- bodies' ends


def _retry_without_throw(self: Any) -> str:
    if not self.request.retries:
        self.retry(countdown=0, throw=False)
    return "went on"


def _retry_and_fail(self: Any) -> str:
    if not self.request.retries:
        self.retry(countdown=0, throw=False)
        raise ValueError
    return "went on"


@pytest.mark.parametrize("body", [_retry_without_throw, _retry_and_fail])
def test_retry_that_does_not_throw(app, body):
    """self.retry(throw=False): the claim waits with the retry, whatever the rest of the body does; the slot is free."""
    task = _guarded(app, without_overlapping=True, body=body)
    with catching() as sent:
        task.delay()
        deliver(app, sent[0])
    (claim,) = Guard(app).store.list_claims()
    assert claim.state is ClaimState.QUEUED
    assert Guard(app).store.list_locks() == []
    assert deliver(app, sent[1]).value == "went on"
    assert held(app) == []


def _raises(error: Any) -> Any:
    def body(self: Any) -> None:
        raise error

    return body


@pytest.mark.parametrize(
    "error", [Retry("by hand"), Ignore(), Reject("no"), Reject("again", requeue=True), LockLost("own"), OverlapRefused("own"), GeneratorExit()]
)
def test_exceptions_with_a_meaning(app, error):
    """Retry raised by hand sends no message, Reject after an early acknowledgement brings none back: nothing may stay held."""
    task = _guarded(app, without_overlapping=True, body=_raises(error))
    message = _sent(task)
    try:
        deliver(app, message)
    except GeneratorExit:
        # The process ends: the main process settles the claim, else its lease.
        assert Guard(app).store.list_locks() == []
        return
    assert held(app) == []


@pytest.mark.parametrize("error", [LockLost("lost"), OverlapRefused("refused")])
def test_autoretry_for_errors_of_the_guard(app, error):
    """autoretry_for may name the guard's errors, where the body raises them: an ordinary retry that keeps the claim."""
    state = {"failed": False}

    def body(self: Any) -> str:
        if not state["failed"]:
            state["failed"] = True
            raise error
        return "ran"

    task = _guarded(app, without_overlapping=True, body=body, autoretry_for=(LockLost, OverlapRefused), default_retry_delay=0)
    with catching() as sent:
        task.delay()
        assert deliver(app, sent[0]).state == "RETRY"
        assert task.delay().duplicate
        assert deliver(app, sent[1]).value == "ran"
    assert held(app) == []


def test_replacement_of_the_same_claim_with_another_lock(app):
    """Task.replace with a call of the same claim takes the claim over, and locks what its own arguments name."""

    def body(self: Any, product: int, tenant: int) -> Any:
        if tenant == 1:
            raise self.replace(self.s(product, 2))
        return self.guard.key

    task = _guarded(
        app,
        unique=Unique(key="{product}"),
        without_overlapping=WithoutOverlapping(key="{tenant}"),
        body=body,
    )
    with catching() as sent:
        task.delay(7, 1)
        deliver(app, sent[0])
        assert task.delay(7, 3).duplicate
        assert deliver(app, sent[1]).value == "t:2"
    assert len(sent) == 2
    assert held(app) == []


def test_group_and_chain_replacement(app):
    """Task.replace with a group or a chain of the same key: everything runs, nothing stays held."""

    def body(self: Any, kind: str = "") -> str:
        if kind == "chain":
            raise self.replace(self.si() | self.si())
        if kind == "group":
            raise self.replace(group(self.si(), self.si()))
        return "ran"

    app.conf.result_backend = "cache+memory://"
    task = _guarded(app, unique=Unique(key=lambda kind="": "same"), body=lambda self, kind="": body(self, kind))
    for kind in ("chain", "group"):
        with catching() as sent:
            task.delay(kind)
            for message in sent:
                if message.task == "t":
                    deliver(app, message)
        assert sum(message.task == "t" for message in sent) == 3
        assert held(app) == []


# -------------------------------------------------------------------------------- eager


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("how", ["apply", "always_eager", "direct"])
def test_eager_calls(guarded, how):
    """apply(), task_always_eager and direct calls: values, errors and retries are Celery's own; guard_eager adds the lock."""
    app = memory_app(guard_eager=guarded, task_always_eager=how == "always_eager", task_eager_propagates=False)

    def body(self: Any, what: str = "") -> Any:
        if what == "fail":
            raise ValueError(what)
        if what == "retry" and self.request.retries < 2:
            raise self.retry(countdown=0)
        return self.guard.key

    task = _guarded(app, without_overlapping=True, max_retries=3, body=lambda self, what="": body(self, what))
    call = {"apply": lambda what: task.apply((what,)), "always_eager": task.delay, "direct": task}[how]
    if how == "direct":
        assert call("") is None
        with pytest.raises(ValueError, match="fail"):
            call("fail")
        return
    expected = f"{task.lock_key(('x',), {})}" if guarded else None
    assert call("x").get() == expected
    assert (call("fail").state, call("retry").state) == ("FAILURE", "SUCCESS")
    store = Guard(app).eager_store
    assert (store.list_claims(), store.list_locks()) == ([], [])
    assert held(app) == []


def test_nested_eager_run_of_one_key():
    """guard_eager: an eager run inside the run of its key is refused; nothing is sent to a broker, nothing stays held."""
    app = memory_app(guard_eager=True, task_always_eager=True)
    seen: list[Any] = []

    def body(self: Any, depth: int = 0) -> str:
        if depth == 0:
            seen.append(self.apply_async((1,)).result)
        return "ran"

    task = _guarded(app, unique=None, without_overlapping=WithoutOverlapping(key=lambda depth=0: "one"), body=lambda self, depth=0: body(self, depth))
    with catching() as sent:
        assert task.delay().get() == "ran"
    assert [type(error) for error in seen] == [OverlapRefused]
    assert sent == []
    assert Guard(app).eager_store.list_locks() == []


# ------------------------------------------------------------------------------- results


def test_results_are_celerys_results(app):
    """A duplicate's result can be pickled, put into a group result and turned into a tuple like any other."""
    task = _guarded(app)
    first, second = task.delay(), task.delay()
    assert isinstance(second, GuardedResult)
    assert second.as_tuple() == first.as_tuple()
    assert second == first
    for result, duplicate in ((first, False), (second, True)):
        again = pickle.loads(pickle.dumps(result))
        assert (again.id, again.duplicate, again.conflict) == (result.id, duplicate, result.conflict)
        assert copy.copy(result).id == result.id
    saved = GroupResult("g", [first, second], app=app)
    saved.save(backend=app.backend)
    assert [child.id for child in GroupResult.restore("g", backend=app.backend, app=app)] == [first.id, first.id]


@pytest.mark.parametrize("backend", [None, "rpc://"])
def test_waiting_for_a_duplicate_where_no_result_can_come(backend):
    """No result backend, or one whose results reach only the sender: get() of a duplicate says so at once, it does not hang (R141)."""
    app = memory_app(result_backend=backend)
    app.backend_cls = backend or "disabled"
    task = _guarded(app)
    with catching():
        task.delay()
        duplicate = task.delay()
    assert duplicate.duplicate
    with pytest.raises(NotImplementedError, match="backend"):
        duplicate.get()


def test_skipped_at_its_start_without_a_result_backend():
    """A run that is skipped stores REVOKED where results are stored, and just ends where they are not."""
    app = memory_app()
    app.backend_cls = "disabled"
    task = _guarded(app, without_overlapping=WithoutOverlapping(on_conflict="skip"))
    message = _sent(task)
    other = _sent(_guarded(app, "blocker", unique=None, without_overlapping=WithoutOverlapping(key=lambda: "x")))
    assert other.task == "blocker"
    seen: list[Any] = []

    def body(*_: Any) -> str:
        # A second message of the same key, as one without a claim.
        seen.append(deliver(app, _sent(task, guard=False)).state)
        return "ran"

    task.run = body
    assert deliver(app, message).value == "ran"
    assert seen == ["IGNORED"]
    assert held(app) == []


def test_duplicate_raises_once_per_dispatch(app):
    """on_conflict="raise" raises out of every way of dispatching, with the holder's data, and can be pickled."""
    task = _guarded(app, unique=Unique(on_conflict="raise"))
    first = task.delay()
    for call in (task.delay, task.s().delay, lambda: app.send_task("t"), group(task.s())):
        with pytest.raises(DuplicateTask) as caught:
            call()
        assert pickle.loads(pickle.dumps(caught.value)).task_id == first.id


# ------------------------------------------------------------------------------ protocol


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of redis-py, in Celery's result backend
def test_message_protocol_one(redis_url):
    """task_protocol=1: the header goes along, the worker finds its claim by it, and duplicates are duplicates."""
    app = memory_app(broker_url=redis_url, result_backend=redis_url, guard_store_backend=redis_url, task_protocol=1)
    seen: list[Any] = []
    go = threading.Event()

    def body(self: Any) -> str:
        seen.append((self.guard.key, self.request.id))
        go.wait(20)
        return "ran"

    task = _guarded(app, without_overlapping=True, body=body)
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=30):
        result = task.delay()
        wait_until(lambda: seen, 20)
        assert task.delay().id == result.id
        go.set()
        assert result.get(timeout=20) == "ran"
        wait_until(lambda: held(app) == [], 10)
    assert seen == [(task.lock_key((), {}), result.id)]
    Guard(app).close()
    app.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_worker_of_celerys_test_kit(app):
    """celery.contrib.testing's worker, in a thread of this process, guards like a real one and ends."""
    task = _guarded(app, without_overlapping=True, body=lambda self: len(held(app)))
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=30):
        assert task.delay().get(timeout=20) == 2
        wait_until(lambda: held(app) == [], 10)


def test_handler_of_another_plugin_that_ends_the_dispatch(app):
    """A before_task_publish handler that raises what Celery lets through ends the dispatch: the claim is free again (R249)."""
    task = _guarded(app)

    def forbid(**_: Any) -> None:
        raise SystemExit

    signals.before_task_publish.connect(forbid)
    try:
        with pytest.raises(SystemExit):
            task.delay()
    finally:
        signals.before_task_publish.disconnect(forbid)
    (claim,) = Guard(app).store.list_claims()
    assert claim.expires_at <= time.time() + 60.5  # an exit may come at any point: the message may be on its way


def test_claim_request_of_another_owner_is_never_touched(app):
    """A message whose claim went to another in the meantime runs, and leaves the other's claim alone."""
    task = _guarded(app)
    message = _sent(task)
    store = Guard(app).store
    store.release_claim(message.guard["claim"], message.guard["owner"])
    store.claim(ClaimRequest(message.guard["claim"], "another", "another-id", 60))
    assert deliver(app, message).value == "ran"
    claim = store.get_claim(message.guard["claim"])
    assert claim is not None
    assert claim.owner == "another"
