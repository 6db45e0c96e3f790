"""Copies that the broker makes by itself: visibility timeouts made to happen. A copy never runs beside its original, nor in its place."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.services import wait_until
from tests.services.stage import Stage

pytestmark = pytest.mark.xdist_group("rows_copies")

VISIBILITY = 3


@pytest.fixture(scope="module")
def running() -> Iterator[Stage]:
    """Two workers that get every message again that is not acknowledged within 3 seconds."""
    transport = {"visibility_timeout": VISIBILITY, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
    with Stage(broker_transport_options=transport) as stage:
        stage.worker(concurrency=2, wait=False)
        stage.worker(concurrency=2).wait_ready()
        stage.workers[0].wait_ready()
        yield stage


@pytest.fixture
def stage(running: Stage) -> Stage:
    running.clear()
    return running


def _settled(stage: Stage, label: str, runs: int = 1) -> None:
    stage.drained()
    stage.wait_free()
    assert stage.runs(label) == runs
    assert stage.most_at_once(label) == 1


@pytest.mark.parametrize("task", ["executed_late", "executing_late", "locked_late", "both_late"])
def test_run_longer_than_the_visibility_timeout(stage, task):
    """The body outlives the broker's patience: it runs once and ends as SUCCESS; no copy fails, stores a state or calls the errback (R007, R009)."""
    label = stage.label()
    errback = stage.task("plain").si(f"{label}-errback")
    result = stage.task(task).apply_async((label, "hold"), link_error=errback)
    stage.told("copy_postponed", result)
    sent = stage.notes(label)[0]["at"]
    while time.time() < sent + 2.2 * VISIBILITY:
        assert result.state == "STARTED"
        threading.Event().wait(0.1)
    stage.let_go(label)
    assert stage.get(result) == label
    stage.told("copy_dropped", result)
    _settled(stage, label)
    assert result.state == "SUCCESS"
    assert stage.runs(f"{label}-errback") == 0


def test_eta_beyond_the_visibility_timeout(stage):
    """A message whose ETA is further off than the visibility timeout is in several workers' hands: it runs once (R001, R002)."""
    labels = [stage.label() for _ in range(4)]
    tasks = ["executed", "executed_late", "locked", "both_late"]
    results = [stage.task(task).apply_async((label, "ok"), countdown=2.3 * VISIBILITY) for task, label in zip(tasks, labels, strict=True)]
    for result, label in zip(results, labels, strict=True):
        assert stage.get(result) == label
    stage.drained()
    stage.wait_free()
    assert [stage.runs(label) for label in labels] == [1] * 4


def test_eta_and_run_together_exceed_the_visibility_timeout(stage):
    """acks_late: ETA and run are each shorter than the timeout, but not together; the copy does not run beside the run (R006)."""
    label = stage.label()
    result = stage.task("both_late").apply_async((label, "sleep:2.5"), eta=stage.app.now() + timedelta(seconds=2))
    assert stage.get(result) == label
    _settled(stage, label)


def test_copy_runs_when_the_first_run_died(stage):
    """A copy that was put off is not lost: when the process of the first run is killed, the job runs again and ends (R006, R036)."""
    label = stage.label()
    result = stage.task("both_late").delay(label, "hold")
    stage.told("copy_postponed", result)
    (line,) = stage.notes(label)
    os.kill(line["pid"], signal.SIGKILL)
    stage.started(label, 2)
    stage.let_go(label)
    assert stage.get(result) == label
    _settled(stage, label, 2)


def test_duplicate_of_a_running_message_with_copies_is_skipped(stage):
    """While a message is run, and copied, a new dispatch of its key is a duplicate of it all the time."""
    label = stage.label()
    first = stage.task("both_late").delay(label, "hold")
    (line,) = stage.started(label)
    while time.time() < line["at"] + 2 * VISIBILITY:
        assert stage.task("both_late").delay(label).id == first.id
        threading.Event().wait(0.1)
    stage.let_go(label)
    assert stage.get(first) == label
    _settled(stage, label)


def test_postponed_messages_outlive_the_visibility_timeout(stage):
    """Messages that wait for a lock longer than the visibility timeout all run, one at a time, each once, without spending a retry (R062, R121)."""
    label = stage.label()
    task = stage.task("locked_late")
    first = task.delay(label, "hold")
    (line,) = stage.started(label)
    others = [task.delay(label) for _ in range(3)]
    wait_until(lambda: time.time() > line["at"] + 2 * VISIBILITY, 30)
    stage.let_go(label)
    for result in (first, *others):
        assert stage.get(result) == label
    stage.drained()
    stage.wait_free()
    lines: list[dict[str, Any]] = stage.notes(label)
    assert sorted(entry["id"] for entry in lines) == sorted(result.id for result in (first, *others))
    assert {entry["retries"] for entry in lines} == {0}
    assert stage.most_at_once(label) == 1


def test_copies_after_a_worker_was_killed_run_one_at_a_time(stage):
    """A worker with runs of one lock is killed and others start at once: never two at a time, and nothing is lost (R022)."""
    label = stage.label()
    task = stage.task("lock_slow_late")
    doomed = stage.worker(concurrency=2, queues=["doomed"])
    results = [task.apply_async((label, "sleep:1.5"), queue="doomed") for _ in range(3)]
    stage.started(label)
    # A message that is on its way to a worker when that dies is lost by kombu: wait until the worker has all three, postponed once.
    for result in results:
        stage.state(result, "STARTED", "RETRY")
    wait_until(lambda: len([m for m in stage.unacknowledged() if m["headers"]["eta"]]) == 2 and not stage.queued("doomed"), 20, stage.logs)
    doomed.kill(group=True)
    workers = [stage.worker(concurrency=1, queues=["doomed"], wait=False) for _ in range(2)]
    for result in results:
        assert stage.get(result) == label
    wait_until(lambda: not stage.queued("doomed") and not stage.unacknowledged(), 30, "all acknowledged")
    for worker in workers:
        worker.close()
    assert stage.most_at_once(label) == 1
    assert {line["id"] for line in stage.notes(label)} == {result.id for result in results}
