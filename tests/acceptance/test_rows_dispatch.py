"""The claim from dispatch to the end of the run: one message for one key, kept through retries, and never taken from its owner."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from celery_guard.decisions import ClaimState
from tests.services import free_port, wait_until
from tests.services.stage import Stage, decoded_body

pytestmark = pytest.mark.xdist_group("rows_dispatch")

DISPATCHER = """
import json, sys, threading
from tests.services.guarded import app
label, count, queue = sys.argv[1], int(sys.argv[2]), sys.argv[3]
task = app.tasks["executed"]
barrier = threading.Barrier(count)
results = [None] * count

def dispatch(number):
    barrier.wait()
    results[number] = task.apply_async((label, "hold"), queue=queue)

threads = [threading.Thread(target=dispatch, args=(number,)) for number in range(count)]
print("ready", flush=True)
sys.stdin.readline()
for thread in threads: thread.start()
for thread in threads: thread.join()
print("dispatched", flush=True)
values = [result.get(timeout=60) for result in results]
print(json.dumps([[r.duplicate, r.id, r.conflict and r.conflict.task_id, v] for r, v in zip(results, values)]), flush=True)
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Stage]:
    with Stage() as stage:
        stage.worker(concurrency=4, queues=["celery", "other"])
        yield stage


@pytest.fixture
def stage(running: Stage) -> Stage:
    running.clear()
    return running


def test_four_processes_dispatch_one_key_a_hundred_times(stage):
    """4 processes, 25 dispatches each, of one key at once: 1 message; 99 duplicates with the holder's id; every get() has the one value (R054, R072)."""
    label = stage.label()
    environment = {**stage.workers[0].env, **stage.environment.variables()}
    processes = [
        subprocess.Popen([sys.executable, "-c", DISPATCHER, label, "25", "limbo"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(4)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout.readline() == "dispatched\n"
        (message,) = stage.queued("limbo")
        stage.let_go(label)
        stage.push(message)
        rows = [row for process in processes for row in json.loads(process.stdout.readline())]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    holder = message["headers"]["id"]
    assert sorted(row[0] for row in rows) == [False] + [True] * 99
    assert {row[1] for row in rows} == {holder}
    assert [row[2] for row in rows if row[0]] == [holder] * 99
    assert {row[3] for row in rows} == {label}
    assert stage.runs(label) == 1
    stage.wait_free()


@pytest.mark.parametrize("task", ["executed", "executing", "both_late"])
def test_retry_twice_keeps_the_claim(stage, task):
    """self.retry twice: 3 runs; a dispatch in the gap is a duplicate of the retried task, also where the claim was free during the run (R057)."""
    label = stage.label()
    result = stage.task(task).delay(label, "retry:2", 1)
    for times in (1, 2):
        stage.started(label, times)
        wait_until(lambda times=times: len(stage.notes(label, "end")) == times, 20, "end of the attempt")
        duplicate = stage.task(task).delay(label)
        assert (duplicate.duplicate, duplicate.id, duplicate.conflict.state) == (True, result.id, ClaimState.QUEUED)
    assert stage.get(result) == label
    stage.wait_free()
    assert [line["retries"] for line in stage.notes(label)] == [0, 1, 2]
    assert {line["id"] for line in stage.notes(label)} == {result.id}


def test_autoretry_to_the_end(stage):
    """autoretry_for with max_retries=2 that always fails: 3 runs, duplicates between them are skipped, then the claim is free (R056, R256)."""
    label = stage.label()
    result = stage.task("both").delay(label, "flaky:9")
    stage.started(label, 2)
    assert stage.task("both").delay(label).duplicate is True
    stage.state(result, "FAILURE")
    stage.wait_free()
    assert stage.runs(label) == 3
    assert stage.task("both").delay(label).duplicate is False


@pytest.mark.parametrize("task", ["executed", "executing", "expired", "locked", "both", "executed_late", "executing_late", "locked_late", "both_late"])
def test_message_delivered_twice_runs_once(stage, task):
    """The same message taken by two children at once: one runs, the other stores no state, fails nothing, and is gone afterwards (R007)."""
    label = stage.label()
    result = stage.task(task).apply_async((label, "hold"), queue="limbo", link_error=stage.task("plain").si(f"{label}-errback"))
    (message,) = stage.queued("limbo")
    stage.push(message)
    stage.push(message)
    stage.told("copy_postponed", result)
    assert result.state == "STARTED"
    stage.let_go(label)
    assert stage.get(result) == label
    stage.told("copy_dropped", result)
    stage.drained()
    assert result.state == "SUCCESS"
    assert stage.runs(label) == 1
    assert stage.runs(f"{label}-errback") == 0
    assert stage.left(label) == ([f"{{expired:{label}}}:claim"] if task == "expired" else [])


def test_unguarded_message_delivered_twice_runs_once(stage):
    """The same for a message from a process that does not know the task: its copies know each other by the id."""
    label = stage.label()
    with stage.stranger() as stranger:
        result = stranger.send_task("both", (label, "hold"), queue="limbo")
    (message,) = stage.queued("limbo")
    assert "guard" not in message["headers"]
    stage.push(message)
    stage.push(message)
    stage.told("copy_postponed", result)
    stage.let_go(label)
    assert stage.get(stage.app.AsyncResult(result.id)) == label
    stage.drained()
    stage.wait_free()
    assert stage.runs(label) == 1


def test_ttl_ends_in_the_queue_and_another_takes_over(stage):
    """A claim that ended while its message waited: another takes it; the first runs all the same, and its end leaves the other's claim alone (R039, R074)."""
    label = stage.label()
    first = stage.task("short").apply_async((label, "ok"), queue="limbo")
    stage.wait_free()
    second = stage.task("short").delay(label, "hold")
    assert second.duplicate is False
    stage.started(label)
    (message,) = stage.queued("limbo")
    stage.push(message)
    assert stage.get(first) == label
    claim = stage.claim("short", label)
    assert claim is not None
    assert (claim.task_id, claim.state) == (second.id, ClaimState.RUNNING)
    stage.let_go(label)
    assert stage.get(second) == label
    stage.wait_free()
    assert stage.runs(label) == 2
    stage.told("claim_expired_before_start", first)


@pytest.mark.parametrize("task", ["short", "both"])
def test_lease_does_not_end_while_it_runs(stage, task):
    """A run that is longer than ttl and lease keeps claim and slot until its end (R074)."""
    label = stage.label()
    result = stage.task(task).delay(label, "hold")
    (line,) = stage.started(label)
    while time.time() < line["at"] + 4.5:
        claim = stage.claim(task, label)
        assert claim is not None
        assert claim.state is ClaimState.RUNNING
        assert stage.task(task).delay(label).duplicate is True
        if task == "both":
            assert stage.lock(task, label) is not None
        threading.Event().wait(0.1)
    stage.let_go(label)
    assert stage.get(result) == label
    stage.wait_free()
    assert stage.notes(label, "end")[0]["lost"] is False


def test_taken_claim_and_slot_stay_with_their_new_owner(stage):
    """An operator frees a running key: another takes it; the first run learns of it, ends as SUCCESS, and takes nothing from the other (R077, R091)."""
    label = stage.label()
    task = stage.task("both")
    first = task.delay(label, "hold")
    stage.started(label)
    claim = stage.claim("both", label)
    (holder,) = stage.lock("both", label).holders
    assert stage.store.force_release_claim(claim.resource, claim.owner)
    assert stage.store.force_release_slot(claim.resource, holder.token)
    second = task.delay(label, "hold", "second")
    assert second.duplicate is False
    stage.started(label, 2)
    stage.told("lock_lost", first)
    assert stage.claim("both", label).task_id == second.id
    stage.let_go(label)
    assert stage.get(first) == label
    assert stage.get(second) == label
    stage.wait_free()
    assert {line["id"]: line["lost"] for line in stage.notes(label, "end")} == {first.id: True, second.id: False}


def test_forced_copy_leaves_the_claim_of_the_first(stage):
    """guard=False sends past the claim: a forced copy that ends first does not free the claim of copy 1 (R069, R071)."""
    label = stage.label()
    task = stage.task("executed")
    first = task.delay(label, "hold")
    stage.started(label)
    forced = task.apply_async((label,), guard=False)
    assert (forced.duplicate, forced.id != first.id) == (False, True)
    assert stage.get(forced) == label
    claim = stage.claim("executed", label)
    assert (claim.task_id, claim.state) == (first.id, ClaimState.RUNNING)
    assert task.delay(label).id == first.id
    stage.let_go(label)
    assert stage.get(first) == label
    stage.wait_free()
    assert stage.runs(label) == 2


def test_countdown_longer_than_the_ttl_is_one_message(stage):
    """The ttl of a claim counts from the ETA: a dispatch after the ttl and before the ETA is a duplicate."""
    label = stage.label()
    first = stage.task("short").apply_async((label,), countdown=3)
    sent = time.monotonic()
    while time.monotonic() < sent + 2:
        assert stage.task("short").apply_async((label,), countdown=3).id == first.id
        threading.Event().wait(0.2)
    assert stage.get(first) == label
    stage.wait_free()
    stage.drained()
    assert stage.runs(label) == 1


ARGUMENTS: list[Any] = [
    1,
    "1",
    uuid.UUID(int=5),
    datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC),
    datetime(2026, 3, 1, 14, 0, tzinfo=timezone(timedelta(hours=2))),
    datetime(2026, 3, 1, 12, 0, 0),  # noqa: DTZ001 - naive on purpose
    datetime(2026, 3, 1).date(),  # noqa: DTZ001
    Decimal("1.10"),
    (1, 2),
    {1: "a", "b": [1, (2, 3)]},
    "é\n{x}",
    None,
    b"bytes",
    1.5,
    [],
]


def test_arguments_of_every_type_leak_no_claim(stage):
    """f(1) and f("1") are two keys; whatever the serializer turns the arguments into, the key of the dispatch is freed (R091, R092, R101)."""
    task = stage.task("all_arguments")
    results = []
    for argument in ARGUMENTS:
        label = stage.label()
        results.append(task.apply_async((label, "ok", argument), queue="limbo"))
        assert task.apply_async((label,), {"how": "ok", "extra": argument}, queue="limbo").duplicate is True
    assert not any(result.duplicate for result in results)
    assert task.apply_async(("same", "ok", 1), queue="limbo").duplicate is False
    assert task.apply_async(("same", "ok", "1"), queue="limbo").duplicate is False
    messages = stage.queued("limbo")
    assert len(messages) == len(ARGUMENTS) + 2
    for message in messages:
        stage.push(message)
    for result in results:
        stage.get(result)
    stage.drained()
    stage.wait_free()


def test_pickled_arguments_leak_no_claim(stage):
    """The same with pickle, for values that JSON does not know: sets and enums."""
    from tests.services.stage import TASKS

    colour = sys.modules[TASKS].Colour.RED
    task = stage.task("all_arguments")
    values = (colour, {1, 2}, frozenset({"a"}))
    results = [task.apply_async((stage.label(), "ok", value), serializer="pickle") for value in values]
    for result in results:
        stage.get(result)
    stage.wait_free()


def test_broker_down_frees_the_claim_and_raises():
    """A dispatch whose message cannot be published raises what Celery raises, and the next one is no duplicate."""
    with Stage(broker_url=f"redis://127.0.0.1:{free_port()}/0", broker_connection_timeout=1) as stage:
        for _ in range(2):
            with pytest.raises(OperationalError):
                stage.task("executed").apply_async(("x",), retry=False)
            assert stage.left() == []


def test_other_plugin_that_forbids_the_message_frees_the_claim(stage):
    """What raises while a message is made, here an argument that cannot be encoded, leaves no claim behind (R249)."""
    with pytest.raises(Exception, match=r"serializable|encode|pickle"):
        stage.task("executed").apply_async((stage.label(), "ok", lambda: None))
    assert stage.left() == []


def test_broker_without_an_answer_shortens_the_claim():
    """A broker that does not answer may have taken the message: the claim stays, for guard_uncertain_ttl at most, and the error is raised."""
    with Stage() as broker:
        options = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5}
        conf = {"broker_url": broker.url, "broker_transport_options": options, "guard_uncertain_ttl": 2, "broker_connection_timeout": 1}
        with Stage(**conf) as stage:
            stage.task("executed").apply_async(("first",), retry=False)
            broker.server.pause()
            try:
                with pytest.raises(OperationalError):
                    stage.task("executed").apply_async(("x",), retry=False)
            finally:
                broker.server.resume()
            claim = stage.claim("executed", "x")
            assert claim is not None
            assert claim.expires_at < time.time() + 2.1
            stage.wait_free("x")
            assert decoded_body(broker.queued()[0])[0] == ["first"]
