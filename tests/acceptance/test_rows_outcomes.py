"""Every way in which a message ends, under every guard: nothing stays held that should not, and the task ends as Celery says."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from celery_guard import GuardedTask, Unique
from celery_guard.decisions import ClaimState
from tests.services import wait_until
from tests.services.stage import SINCE_5_7, Stage

pytestmark = [pytest.mark.xdist_group("rows_outcomes"), pytest.mark.smoke]

FEATURES = ("executed", "executing", "expired", "locked", "both")


@pytest.fixture(scope="module")
def running() -> Iterator[Stage]:
    with Stage() as stage:
        stage.worker(concurrency=5)
        yield stage


@pytest.fixture
def stage(running: Stage) -> Stage:
    running.clear()
    return running


@dataclass(frozen=True)
class Outcome:
    """How one message ends: ``early`` and ``late`` are runs and state by the time of acknowledgement, None: not tried."""

    name: str
    how: str
    early: tuple[int, str] | None = None
    late: tuple[int, str] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


REJECTED = "FAILURE" if SINCE_5_7 else "STARTED"
OUTCOMES = (
    Outcome("ok", "ok", (1, "SUCCESS"), (1, "SUCCESS")),
    Outcome("exception", "error", (1, "FAILURE"), (1, "FAILURE")),
    Outcome("retry", "retry:2", (3, "SUCCESS"), (3, "SUCCESS")),
    Outcome("retries used up", "exhaust", (2, "FAILURE"), (2, "FAILURE")),
    Outcome("autoretry", "flaky:1", (2, "SUCCESS"), (2, "SUCCESS")),
    Outcome("autoretry used up", "flaky:9", (3, "FAILURE")),
    Outcome("ignore", "ignore", (1, "STARTED"), (1, "STARTED")),
    Outcome("reject", "reject", (1, REJECTED), (1, REJECTED)),
    Outcome("reject and requeue", "requeue", (1, "STARTED"), (2, "SUCCESS")),
    Outcome("replaced by the same task", "replace:same", (2, "SUCCESS"), (2, "SUCCESS")),
    Outcome("replaced by another task", "replace:other", (2, "SUCCESS")),
    Outcome("replaced by a chord", "replace:chord", (4, "SUCCESS")),
    Outcome("before_start fails", "before_start", (0, "FAILURE"), (0, "FAILURE")),
    Outcome("soft time limit", "sleep:20", (1, "FAILURE"), (1, "FAILURE"), {"soft_time_limit": 1}),
    Outcome("hard time limit", "sleep:20", (1, "FAILURE"), (1, "FAILURE"), {"time_limit": 1}),
    Outcome("expired", "ok", (0, "REVOKED"), (0, "REVOKED"), {"countdown": 2, "expires": 1}),
    # Celery before 5.7 cannot store what billiard 4.3 tells it of an exit: the state stays, the message is not acknowledged.
    Outcome("sys.exit", "exit", (1, "FAILURE" if SINCE_5_7 else "STARTED"), (3, "FAILURE") if SINCE_5_7 else None),
    Outcome("child killed", "kill", (1, "FAILURE"), (3, "FAILURE")),
    Outcome("child killed once", "kill_once", None, (2, "SUCCESS")),
)


def _check(stage: Stage, suffix: str, sent: dict[str, tuple[str, Any]], runs: int, state: str) -> None:
    """Wait until all have ended, and compare."""
    for _, result in sent.values():
        stage.state(result, state)
    wanted = dict.fromkeys(sent, runs)

    def seen() -> dict[str, int]:
        return {feature: stage.runs(label) for feature, (label, _) in sent.items()}

    wait_until(lambda: seen() == wanted, 20, lambda: f"runs {wanted}, but {seen()}{stage.logs()}")
    stage.drained()
    kept = [f"{{expired{suffix}:{sent['expired'][0]}}}:claim"]
    wait_until(lambda: stage.left() == kept, 10, lambda: f"left {kept}, but {stage.left()}{stage.logs()}")
    claim = stage.claim(f"expired{suffix}", sent["expired"][0])
    assert claim is not None
    assert claim.state is ClaimState.DONE or state != "SUCCESS"
    assert seen() == wanted
    assert {feature: result.state for feature, (_, result) in sent.items()} == dict.fromkeys(sent, state)


def _send(stage: Stage, suffix: str, how: str, **options: Any) -> dict[str, tuple[str, Any]]:
    sent = {}
    for feature in FEATURES:
        label = stage.label()
        sent[feature] = (label, stage.task(feature + suffix).apply_async((label, how), **options))
    return sent


@pytest.mark.parametrize("outcome", [outcome for outcome in OUTCOMES if outcome.early], ids=str)
def test_nothing_is_left_after(stage, outcome):
    """After each outcome there is no claim, slot or run record (until="expired" keeps its claim), and run count and state are Celery's own."""
    assert outcome.early
    _check(stage, "", _send(stage, "", outcome.how, **outcome.options), *outcome.early)


@pytest.mark.parametrize("outcome", [outcome for outcome in OUTCOMES if outcome.late], ids=str)
def test_nothing_is_left_after_a_late_acknowledgement(stage, outcome):
    """The same where messages are acknowledged after the run and a lost child sends them back; one that always kills its child ends as poison."""
    assert outcome.late
    _check(stage, "_late", _send(stage, "_late", outcome.how, **outcome.options), *outcome.late)


@pytest.mark.parametrize("suffix", ["", "_late"])
def test_nothing_is_left_after_a_revocation_before_the_start(stage, suffix):
    """A message that was revoked before its run gives its claim back (R031)."""
    sent = _send(stage, suffix, "ok", countdown=1.5)
    stage.app.control.revoke([result.id for _, result in sent.values()])
    _check(stage, suffix, sent, 0, "REVOKED")


@pytest.mark.parametrize("suffix", ["", "_late"])
@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
def test_nothing_is_left_after_a_termination(stage, number, suffix):
    """A run that was revoked and terminated gives back claim and slot, and is not run again."""
    sent = _send(stage, suffix, "hold")
    for label, _ in sent.values():
        stage.started(label)
    stage.app.control.revoke([result.id for _, result in sent.values()], terminate=True, signal=number)
    _check(stage, suffix, sent, 1, "REVOKED")


def test_poison_says_so(stage):
    """A message whose runs took their children down guard_max_crashes times fails with PoisonTask, and its key is free for the next."""
    label = stage.label()
    result = stage.task("both_late").delay(label, "kill")
    with pytest.raises(Exception, match="took its worker down 3 times") as failure:
        stage.get(result)
    assert type(failure.value).__name__ == "PoisonTask"
    assert stage.runs(label) == 3
    assert stage.get(stage.task("both_late").delay(label)) == label


def test_unknown_task_gives_its_claim_back(stage):
    """A message for a task that the worker does not know is discarded by Celery, and its claim is freed (R104)."""

    @stage.app.task(base=GuardedTask, name="stranger", unique=Unique(key="{label}", ttl=60), shared=False)
    def stranger(label):
        return label

    label = stage.label()
    result = stranger.delay(label)
    stage.state(result, "FAILURE")
    stage.wait_free()
    assert stranger.delay(label).duplicate is False
    stage.wait_free()


def test_changed_signature_gives_its_claim_back(stage):
    """Arguments that the body no longer takes fail the task; the claim is freed by the key in the header (R106)."""
    label = stage.label()
    stage.task("both").apply_async((label,), queue="limbo")
    (message,) = stage.queued("limbo")
    message["body"] = base64.b64encode(json.dumps([[label, 1, 2, 3, 4], {}, {}]).encode()).decode()
    stage.push(message)
    stage.state(stage.app.AsyncResult(message["headers"]["id"]), "FAILURE")
    stage.wait_free()
    assert stage.runs(label) == 0


@pytest.mark.parametrize("fault", ["content type", "eta", "body"])
def test_malformed_message_gives_its_claim_back(stage, fault):
    """A message that cannot be read is discarded by Celery, its claim is freed, and the worker goes on."""
    label = stage.label()
    stage.task("executed").apply_async((label,), queue="limbo")
    (message,) = stage.queued("limbo")
    if fault == "content type":
        message["content-type"] = "application/x-foo"
    elif fault == "eta":
        message["headers"]["eta"] = "tomorrow"
    else:
        message["body"] = base64.b64encode(b'[["').decode()
    assert stage.left(label)
    stage.push(message)
    stage.wait_free()
    assert stage.get(stage.task("executed").delay(label)) == label
    assert stage.runs(label) == 1


def test_operator_frees_the_claim_of_a_purged_queue(stage):
    """Messages that were purged leave a claim behind; it can be seen, ends with its ttl at the latest, and is freed by one call (R049)."""
    label = stage.label()
    task = stage.task("executed")
    lost = task.apply_async((label,), queue="limbo")
    stage.redis.delete("limbo")
    assert task.delay(label).duplicate is True
    (claim,) = stage.store.list_claims()
    assert (claim.task_id, claim.state) == (lost.id, ClaimState.QUEUED)
    assert time.time() < claim.expires_at <= time.time() + 61
    assert not stage.store.force_release_claim(claim.resource, "somebody else")
    assert stage.store.force_release_claim(claim.resource, claim.owner)
    assert stage.get(task.delay(label)) == label
