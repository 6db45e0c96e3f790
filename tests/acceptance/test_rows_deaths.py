"""Processes that are killed: what they held is free in time, what they ran runs again where it should, and only there."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from celery_guard.decisions import ClaimState
from tests.services import wait_until
from tests.services.stage import SINCE_5_7, Stage, alive

pytestmark = pytest.mark.xdist_group("rows_deaths")

#: Seconds within which a lock of a dead worker is free: its lease of 3, and what a busy machine adds.
ONE_LEASE = 3 + 5


@pytest.fixture(scope="module")
def running() -> Iterator[Stage]:
    with Stage() as stage:
        stage.worker(concurrency=4)
        yield stage


@pytest.fixture
def stage(running: Stage) -> Stage:
    running.clear()
    return running


@pytest.fixture
def fresh() -> Iterator[Stage]:
    """A stage of its own, without a worker, for tests that kill workers."""
    with Stage() as stage:
        yield stage


def _kill_child(stage: Stage, label: str, times: int = 1) -> int:
    """SIGKILL the process that runs the last start of ``label``, once the main process knows that it does."""
    line = stage.started(label, times)[-1]
    inspector = stage.app.control.inspect(timeout=0.3)
    wait_until(lambda: any(job["id"] == line["id"] and job["time_start"] for jobs in (inspector.active() or {}).values() for job in jobs), 20, "accepted")
    os.kill(line["pid"], signal.SIGKILL)
    wait_until(lambda: not alive(line["pid"]), 20, "child dead")
    return line["pid"]


def test_killed_child_frees_claim_and_slot(stage):
    """A child that was SIGKILLed in its run gives back claim and slot within the time in which Celery itself notices, at most 5 s (R016, R024)."""
    label = stage.label()
    result = stage.task("both").delay(label, "hold")
    _kill_child(stage, label)
    killed = time.monotonic()
    stage.wait_free(timeout=8)
    assert time.monotonic() - killed < 8
    stage.state(result, "FAILURE")
    stage.let_go(label)
    again = stage.task("both").delay(label)
    assert again.duplicate is False
    assert stage.get(again) == label
    assert stage.runs(label) == 2


def test_killed_child_with_late_acknowledgement_alone(stage):
    """acks_late without reject_on_worker_lost: Celery acknowledges the lost message, the task fails, the key is free (R016)."""
    label = stage.label()
    result = stage.task("only_late").delay(label, "hold")
    _kill_child(stage, label)
    stage.state(result, "FAILURE")
    stage.wait_free()
    stage.drained()
    assert stage.runs(label) == 1


def test_killed_child_reruns_at_once_and_once(stage):
    """acks_late with reject_on_worker_lost: the message comes back to its own claim and lock, runs once more, and never beside itself (R036)."""
    label = stage.label()
    result = stage.task("both_late").delay(label, "kill_once")
    assert stage.get(result) == label
    stage.drained()
    stage.wait_free()
    assert stage.runs(label) == 2
    assert stage.most_at_once(label) == 1


def test_claim_is_held_while_the_lost_message_waits(stage):
    """Between the death of the child and the second run a dispatch of the same key is a duplicate of the lost one (R036, R037).

    With a lease longer than the five seconds that Celery may take to notice.
    """
    label = stage.label()
    first = stage.task("both_long").delay(label, "hold")
    _kill_child(stage, label)
    while stage.runs(label) < 2:
        duplicate = stage.task("both_long").delay(label, "hold")
        assert duplicate.duplicate is True
        assert duplicate.id == first.id
    stage.let_go(label)
    assert stage.get(first) == label
    stage.wait_free()
    assert stage.runs(label) == 2


def test_twice_lost_message_ends_with_the_lock_free(stage):
    """A message whose child died in the first and in the redelivered run runs a third time, and leaves nothing behind (R017)."""
    label = stage.label()
    result = stage.task("both_late").delay(label, "hold")
    _kill_child(stage, label)
    _kill_child(stage, label, 2)
    stage.started(label, 3)
    stage.let_go(label)
    assert stage.get(result) == label
    stage.wait_free()
    assert stage.runs(label) == 3


@pytest.mark.skipif(not SINCE_5_7, reason="retry_on_worker_lost came with Celery 5.7")
def test_retry_on_worker_lost_reruns(stage):
    """The main process retries for a lost child: the retry passes the claim of its own message, which is held over the gap (R027)."""
    label = stage.label()
    result = stage.task("retry_lost").delay(label, "kill_once")
    stage.started(label, 1)
    stage.state(result, "RETRY", "SUCCESS")
    assert stage.get(result) == label
    stage.wait_free()
    assert [line["retries"] for line in stage.notes(label)] == [0, 1]


def test_hard_time_limit_frees(stage):
    """A run that is killed for its hard time limit gives back claim and slot, the next dispatch runs."""
    label = stage.label()
    result = stage.task("both").apply_async((label, "hold"), time_limit=1)
    stage.state(result, "FAILURE")
    stage.wait_free(timeout=5)
    stage.let_go(label)
    assert stage.get(stage.task("both").delay(label)) == label


def test_terminated_run_lets_the_next_one_start(stage):
    """One slot: when the running task is revoked and terminated, the one that waits for the lock starts (R044)."""
    label = stage.label()
    first = stage.task("locked").delay(label, "hold")
    stage.started(label)
    second = stage.task("locked").delay(label)
    stage.state(second, "RETRY")
    stage.app.control.revoke(first.id, terminate=True)
    assert stage.get(second) == label
    stage.state(first, "REVOKED")
    assert [line["retries"] for line in stage.notes(label)] == [0, 0]


def test_one_lock_for_the_whole_task_survives_a_killed_run(stage):
    """A lock on the task's name: after one run was killed the others run one at a time, and waiting costs no attempt (R041, R062)."""
    label = stage.label()
    killed = stage.task("lock_whole").delay(label, "hold")
    stage.started(label)
    others = [stage.task("lock_whole").delay(f"{label}-{number}", "sleep:0.1") for number in range(5)]
    _kill_child(stage, label)
    assert [stage.get(other) for other in others] == [f"{label}-{number}" for number in range(5)]
    stage.state(killed, "FAILURE")
    lines = [line for number in range(5) for line in stage.notes(f"{label}-{number}")]
    assert [line["retries"] for line in lines] == [0] * 5
    spans = sorted((line["at"], stage.notes(line["label"], "end")[0]["at"]) for line in lines)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_slots_of_killed_runs_come_back(stage):
    """Two slots: after both holders were killed there are two again, and never three (R237)."""
    label = stage.label()
    for _ in range(2):
        stage.task("lock_two").delay(label, "hold")
    stage.started(label, 2)
    for line in stage.notes(label):
        os.kill(line["pid"], signal.SIGKILL)
    results = [stage.task("lock_two").delay(label, "sleep:0.3") for _ in range(5)]
    for result in results:
        stage.get(result)
    assert stage.most_at_once(label) == 2
    assert stage.runs(label) == 7
    stage.wait_free()


def _kill_all(stage: Stage, label: str) -> None:
    """SIGKILL a worker with all its children."""
    line = stage.started(label)[-1]
    stage.workers[-1].kill(group=True)
    wait_until(lambda: not alive(line["pid"]), 20, "worker dead")


def test_killed_worker_frees_within_one_lease(fresh):
    """A worker that was SIGKILLed with all its children blocks its keys for one lease, not longer; nobody has to delete anything (R019, R029, R032)."""
    fresh.worker(concurrency=1)
    label = fresh.label()
    fresh.task("both").delay(label, "hold")
    _kill_all(fresh, label)
    assert fresh.task("both").delay(label).duplicate is True
    fresh.wait_free(timeout=ONE_LEASE)
    fresh.let_go(label)
    fresh.worker(concurrency=1)
    again = fresh.task("both").delay(label)
    assert again.duplicate is False
    assert fresh.get(again) == label


def test_killed_worker_leaves_its_message_to_the_next(fresh):
    """acks_late: the broker delivers the message of the dead worker again; it knows its own claim, and runs once (R036, R022)."""
    fresh.worker(concurrency=1)
    labels = [fresh.label() for _ in range(3)]
    first = fresh.task("both_late").delay(labels[0], "hold")
    _kill_all(fresh, labels[0])
    fresh.let_go(labels[0])
    fresh.worker(concurrency=2, wait=False)
    fresh.worker(concurrency=2)
    assert fresh.get(first) == labels[0]
    fresh.drained()
    fresh.wait_free()
    assert fresh.runs(labels[0]) == 2


def test_killed_main_process_frees_within_one_lease(fresh):
    """Only the main process is killed: its children end with it or keep their leases, and a dead one's key is free after one lease (R019)."""
    fresh.worker(concurrency=1)
    label = fresh.label()
    fresh.task("both").delay(label, "hold")
    (line,) = fresh.started(label)
    os.kill(line["ppid"], signal.SIGKILL)
    wait_until(lambda: not alive(line["ppid"]), 20, "main process dead")
    fresh.workers[-1].kill(group=True)
    fresh.wait_free(timeout=ONE_LEASE)


def test_warm_shutdown_holds_until_the_run_ends(fresh):
    """A worker that was told to end finishes its run under claim and slot, and gives them back (R037)."""
    worker = fresh.worker(concurrency=1)
    label = fresh.label()
    result = fresh.task("both").delay(label, "hold")
    fresh.started(label)
    worker.kill(signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in worker.log(), 20, worker.tail)
    duplicate = fresh.task("both").delay(label)
    assert (duplicate.duplicate, duplicate.id, duplicate.conflict.state) == (True, result.id, ClaimState.RUNNING)
    lock = fresh.lock("both", label)
    assert lock is not None
    assert lock.holders[0].task_id == result.id
    fresh.let_go(label)
    worker.wait()
    assert fresh.get(result) == label
    fresh.wait_free()
    assert fresh.runs(label) == 1


@pytest.mark.parametrize("task", ["both_late", "both"])
def test_cold_shutdown(fresh, task):
    """A worker that is ended by force gives back the slot at once; with acks_late the message keeps its claim and runs elsewhere at once (R051)."""
    worker = fresh.worker(concurrency=1)
    label = fresh.label()
    result = fresh.task(task).delay(label, "hold")
    fresh.started(label)
    worker.kill(signal.SIGQUIT)
    worker.wait()
    fresh.let_go(label)
    wait_until(lambda: fresh.lock(task, label) is None, ONE_LEASE, "slot free")
    if task == "both_late":
        claim = fresh.claim(task, label)
        assert claim is not None
        assert claim.task_id == result.id
        with fresh.working(concurrency=1):
            assert fresh.get(result) == label
            fresh.wait_free()
        assert fresh.runs(label) == 2
    else:
        fresh.wait_free(timeout=ONE_LEASE)
        assert fresh.runs(label) == 1


def test_results_of_a_killed_run_are_not_overwritten(stage):
    """A state that a copy or a late end could write is written once: SUCCESS stays SUCCESS after the lease has passed."""
    label = stage.label()
    result: Any = stage.task("both_late").delay(label, "kill_once")
    assert stage.get(result) == label
    done = result.date_done
    stage.drained()
    assert (result.state, result.date_done) == ("SUCCESS", done)
