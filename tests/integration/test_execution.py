"""Runs under the lock: what a refused delivery becomes, and what its message keeps on its way round."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_guard.decisions import ClaimState
from tests.services import wait_until
from tests.services.stage import Stage

pytestmark = pytest.mark.xdist_group("execution")

SECRET = "do-not-show-this"


@pytest.fixture(scope="module")
def running() -> Iterator[Stage]:
    with Stage(worker_send_task_events=False) as stage:
        stage.worker(concurrency=4, queues=["celery", "other"])
        yield stage


@pytest.fixture
def stage(running: Stage) -> Stage:
    running.clear()
    return running


def _held(stage: Stage, task: str) -> tuple[str, Any]:
    """A label whose lock is held by a run of ``task``."""
    label = stage.label()
    holder = stage.task(task).delay(label, "hold")
    stage.started(label)
    return label, holder


def test_waiting_runs_follow_one_another(stage):
    """on_conflict="requeue": all run, never two at once, and waiting spends no retry (R121, R062)."""
    label = stage.label()
    results = [stage.task("locked").delay(label, "sleep:0.1") for _ in range(4)]
    for result in results:
        assert stage.get(result) == label
    stage.wait_free()
    lines = stage.notes(label)
    assert [line["retries"] for line in lines] == [0] * 4
    assert stage.most_at_once(label) == 1
    fences = [line["fence"] for line in lines]
    assert fences == sorted(set(fences))


def test_two_slots(stage):
    """limit=2: two at once, never three."""
    label = stage.label()
    for result in [stage.task("lock_two").delay(label, "sleep:0.3") for _ in range(6)]:
        stage.get(result)
    stage.wait_free()
    assert stage.most_at_once(label) == 2


def test_postponed_task_shows_as_retry_and_keeps_its_claim(stage):
    """While a message waits for the lock its state is RETRY, and its claim is QUEUED and its own."""
    label = stage.label()
    holder = stage.task("mixed").delay(label, "hold", "a")
    stage.started(label)
    waiting = stage.task("mixed").delay(label, "ok", "b")
    stage.state(waiting, "RETRY")
    duplicate = stage.task("mixed").delay(label, "ok", "b")
    assert (duplicate.duplicate, duplicate.id, duplicate.conflict.state) == (True, waiting.id, ClaimState.QUEUED)
    stage.let_go(label)
    assert stage.get(waiting) == label
    assert stage.get(holder) == label
    stage.wait_free()


def test_give_up_after(stage):
    """A message that was postponed for longer than give_up_after fails with PostponedTooLong; its claim is free, its lock the holder's."""
    label = stage.label()
    holder = stage.task("lock_patient").delay(label, "hold")
    stage.started(label)
    waiting = stage.task("lock_patient").apply_async((label,), guard=False)
    began = time.time()
    stage.state(waiting, "FAILURE")
    assert type(waiting.result).__name__ == "PostponedTooLong"
    assert "stayed busy" in str(waiting.result)
    assert time.time() - began >= 0.9
    assert stage.lock("lock_patient", label).holders[0].task_id == holder.id
    stage.let_go(label)
    stage.get(holder)
    stage.wait_free()
    assert stage.runs(label) == 1


def test_skip_at_execution(stage):
    """on_conflict="skip": the delivery ends as REVOKED, get() raises instead of waiting for ever, and no failure is told (R261)."""
    label, holder = _held(stage, "lock_skip")
    skipped = stage.task("lock_skip").apply_async((label,), guard=False, link_error=stage.task("plain").si(f"{label}-errback"))
    with pytest.raises(TaskRevokedError, match="is held by task"):
        stage.get(skipped)
    assert skipped.state == "REVOKED"
    stage.let_go(label)
    stage.get(holder)
    stage.wait_free()
    stage.drained()
    assert stage.runs(label) == 1
    assert stage.runs(f"{label}-errback") == 0


def test_raise_at_execution(stage):
    """on_conflict="raise": an ordinary failure with OverlapRefused, which calls the errback."""
    label, holder = _held(stage, "lock_raise")
    refused = stage.task("lock_raise").apply_async((label,), guard=False, link_error=stage.task("plain").si(f"{label}-errback"))
    stage.state(refused, "FAILURE")
    assert type(refused.result).__name__ == "OverlapRefused"
    assert holder.id in str(refused.result)
    stage.started(f"{label}-errback")
    stage.let_go(label)
    stage.get(holder)
    stage.wait_free()
    assert stage.runs(label) == 1


def test_max_hold_ends_the_lease(stage):
    """A run that is longer than max_hold loses its slot after one more lease: another may begin, and the run learns of it (R087)."""
    label = stage.label()
    first = stage.task("lock_brief").delay(label, "hold")
    stage.started(label)
    second = stage.task("lock_brief").delay(label)
    assert stage.get(second) == label
    stage.let_go(label)
    assert stage.get(first) == label
    stage.wait_free()
    assert {line["id"]: line["lost"] for line in stage.notes(label, "end")} == {first.id: True, second.id: False}


# ------------------------------------------------------------------------ what a message keeps


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "queue and priority": {"queue": "other", "priority": 6},
    "headers": {"headers": {"tenant": "a", "trace": {"x": 1}}},
    "hidden arguments": {"argsrepr": "(...)", "kwargsrepr": "{...}"},
    "compression": {"compression": "gzip"},
    "serializer": {"serializer": "pickle"},
    "stamps": {"stamped_headers": ["stamp", "list"], "stamp": "s", "list": [1, 2]},
    "limits and shadow": {"time_limit": 50, "soft_time_limit": 40, "shadow": "other-name"},
    "ignored result": {"ignore_result": True},
    "kept result": {"ignore_result": False},
    "expiry": {"expires": 1000},
}


@pytest.mark.parametrize("form", FORMS)
def test_postponement_keeps_the_message_as_it_was(stage, form):
    """A message that was postponed twice looks to its task as one that was not: queue, priority, headers, stamps, form, hidden arguments."""
    direct, waiting = stage.label(), stage.label()
    stage.task("locked").apply_async((direct,), **FORMS[form])
    holder = stage.task("locked").delay(waiting, "hold")
    stage.started(waiting)
    result = stage.task("locked").apply_async((waiting,), **FORMS[form])
    wait_until(
        lambda: sum(line.count(f"task_id={result.id}") for line in stage.workers[0].log().splitlines() if "postponed_overlap" in line) >= 2, 20, stage.logs
    )
    stage.let_go(waiting)
    stage.get(holder)
    stage.started(waiting, 2)
    stage.started(direct)
    assert stage.notes(waiting)[1]["face"] == {**stage.notes(direct)[0]["face"], **_repr_of(stage, form, waiting)}
    stage.drained()
    stage.wait_free()


def _repr_of(stage: Stage, form: str, label: str) -> dict[str, Any]:
    return {} if "argsrepr" in FORMS[form] else {"argsrepr": f"('{label}',)"}


@pytest.mark.parametrize("form", FORMS)
def test_retry_keeps_the_message_as_it_was(stage, form):
    """The same for a retry, but for its number: what the sender hid, or how it wrote the message, does not change on the way."""
    label = stage.label()
    stage.task("both").apply_async((label, "retry:2"), **FORMS[form])
    first, second, third = (line["face"] for line in stage.started(label, 3))
    assert second == {**first, "retries": 1}
    assert third == {**first, "retries": 2}
    stage.drained()
    stage.wait_free()


@pytest.mark.parametrize("how", ["retry:1", "postponed"])
def test_secrets_stay_hidden(stage, how):
    """Arguments that the sender hid do not appear in the broker's headers nor in the worker's log when the message goes round."""
    label = stage.label()
    task = stage.task("locked")
    if how == "postponed":
        task.delay(label, "hold")
        stage.started(label)
        result = task.apply_async((label, "ok", SECRET), argsrepr="(...)", kwargsrepr="{}")
        stage.told("postponed_overlap", result)
    else:
        result = task.apply_async((label, how), {"extra": SECRET}, argsrepr="(...)", kwargsrepr="{}")
        stage.started(label)
        wait_until(lambda: stage.queued() or stage.unacknowledged(), 20, "a message on its way")
    for message in stage.queued() + stage.unacknowledged():
        if message["headers"]["id"] == result.id:
            assert message["headers"]["argsrepr"] == "(...)"
            assert SECRET not in json.dumps({**message, "body": None})
    stage.let_go(label)
    assert stage.get(result) == label
    stage.drained()
    assert SECRET not in stage.workers[0].log()


def test_messages_form_is_kept_in_the_broker(stage):
    """Content type, encoding and compression of a postponed message are those it came with."""
    label, holder = _held(stage, "locked")
    result = stage.task("locked").apply_async((label,), serializer="pickle", compression="gzip")
    stage.told("postponed_overlap", result)

    def on_the_way() -> list[dict[str, Any]]:
        return [message for message in stage.queued() + stage.unacknowledged() if message["headers"]["id"] == result.id]

    (message, *_) = wait_until(on_the_way, 20, "the message on its way")
    assert message["content-type"] == "application/x-python-serialize"
    assert message["headers"]["compression"] == "application/x-gzip"
    stage.let_go(label)
    assert stage.get(result) == label
    stage.get(holder)


# ------------------------------------------------------------------- messages without a header


@pytest.fixture
def stranger(stage: Stage) -> Iterator[Any]:
    """An app that knows none of the tasks."""
    with stage.stranger() as app:
        yield app


def test_send_task_from_a_stranger(stage, stranger):
    """5 messages by name of one key, from a process without the task: one runs, the others are skipped at their start and say so (R117)."""
    label = stage.label()
    first = stranger.send_task("executed", (label, "hold"))
    stage.started(label)
    others = [stranger.send_task("executed", (label, "hold")) for _ in range(4)]
    for other in others:
        result = stage.app.AsyncResult(other.id)
        with pytest.raises(TaskRevokedError, match=first.id):
            stage.get(result)
    assert stage.task("executed").delay(label).id == first.id
    stage.let_go(label)
    assert stage.get(stage.app.AsyncResult(first.id)) == label
    stage.wait_free()
    assert stage.runs(label) == 1


def test_message_of_a_stranger_meets_a_waiting_one(stage, stranger):
    """A message without a header is the duplicate of one that has dispatched its claim, even if it is taken first."""
    label = stage.label()
    waiting = stage.task("executed").apply_async((label,), queue="limbo")
    other = stage.app.AsyncResult(stranger.send_task("executed", (label,)).id)
    with pytest.raises(TaskRevokedError, match=waiting.id):
        stage.get(other)
    (message,) = stage.queued("limbo")
    stage.push(message)
    assert stage.get(waiting) == label
    stage.wait_free()


def test_retry_of_a_strangers_message_keeps_its_claim(stage, stranger):
    """A message without a header has one from its first run on: its retries are its own, and the claim is held in the gap."""
    label = stage.label()
    result = stage.app.AsyncResult(stranger.send_task("executed", (label, "retry:2", 0.5)).id)
    for times in (1, 2):
        stage.started(label, times)
        assert stage.task("executed").delay(label).id == result.id
    assert stage.get(result) == label
    stage.wait_free()
    assert stage.runs(label) == 3


def test_waiting_of_a_strangers_message(stage, stranger):
    """A message without a header waits for the lock like any other, and keeps what it has."""
    label, holder = _held(stage, "locked")
    result = stage.app.AsyncResult(stranger.send_task("locked", (label,), headers={"tenant": "a"}, priority=3).id)
    stage.told("postponed_overlap", result)
    stage.let_go(label)
    assert stage.get(result) == label
    stage.get(holder)
    line = stage.notes(label)[1]
    assert (line["retries"], line["face"]["headers"], line["face"]["priority"]) == (0, {"tenant": "a"}, 3)
    stage.wait_free()


def test_fault_in_a_strangers_arguments(stage, stranger):
    """A message without a header whose arguments have no key, or do not fit, fails as a task, and the worker goes on."""
    broken = stage.app.AsyncResult(stranger.send_task("executed", (), {"nobody": 1}).id)
    stage.state(broken, "FAILURE")
    label = stage.label()
    assert stage.get(stage.task("executed").delay(label)) == label
    stage.wait_free()
