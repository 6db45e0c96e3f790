"""Exceptions from outside (soft time limit, Ctrl-C, abort) at every call of the store: nothing stays held, nothing is freed for another."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_guard import Guard, GuardedTask, LockLost, Unique, WithoutOverlapping
from celery_guard.decisions import ClaimRequest, ClaimState, EndRequest
from celery_guard.policies.header import GuardHeader
from celery_guard.run import Run
from tests.services.seams import catching, deliver, held, memory_app, run

LEASE = 3.0
STRIKES = [SoftTimeLimitExceeded, LockLost, KeyboardInterrupt, MemoryError]


@pytest.fixture
def app() -> Iterator[Any]:
    app = memory_app()

    @app.task(base=GuardedTask, bind=True, name="both", unique=Unique(ttl=600), without_overlapping=WithoutOverlapping(lease=LEASE))
    def both(self: Any, how: Any = None) -> str:
        if how == "retry" and not self.request.retries:
            raise self.retry(countdown=0)
        if how == "fork":
            child = os.fork()
            if child == 0:
                raise SystemExit
            os.waitpid(child, 0)
            return str(len(held(app)))
        return "done"

    app.finalize()
    return app


def _strike(target: Any, verb: str, when: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next call of ``verb`` raise, before it is carried out or before its answer arrives."""
    original = getattr(target, verb)

    def struck(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(target, verb, original)
        if when == "after":
            original(*args, **kwargs)
        raise error

    monkeypatch.setattr(target, verb, struck)


def _only_for_a_lease(app: Any) -> None:
    """Nobody extends anything any more, no slot is held, and what is claimed ends within a lease."""
    guard = Guard(app)
    assert guard.backlog.flush(5)
    assert len(guard.heartbeat) == 0
    assert guard.store.list_locks() == []
    assert all(claim.expires_at <= time.time() + LEASE + 0.5 for claim in guard.store.list_claims()), guard.store.list_claims()


def _delivered(app: Any, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (KeyboardInterrupt, MemoryError) as error:
        return error


@pytest.mark.parametrize("error", STRIKES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_dispatch_struck_while_it_claims(app, when, error, monkeypatch):
    """A dispatch that is interrupted while it waits for the claim sends nothing and leaves no claim, whatever the server made of it."""
    _strike(Guard(app).store, "claim", when, error, monkeypatch)
    with catching() as sent, pytest.raises(error):
        app.tasks["both"].delay()
    assert sent == []
    assert Guard(app).backlog.flush(5)
    assert held(app) == []


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded, LockLost, KeyboardInterrupt])
def test_dispatch_struck_while_it_publishes(app, error, monkeypatch):
    """Interrupted while publishing, the message may be on its way: the claim lives for guard_uncertain_ttl, not for its whole ttl."""
    with monkeypatch.context() as patch:
        patch.setattr(type(app), "send_task", _raising(error))
        with pytest.raises(error):
            app.tasks["both"].delay()
    (claim,) = Guard(app).store.list_claims()
    assert claim.expires_at <= time.time() + 60.5


def _raising(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", STRIKES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("verb", ["begin", "end"])
def test_run_struck_at_the_store(app, verb, when, error, monkeypatch):
    """A run that is interrupted at begin or end gives everything back, or has it end with one lease."""
    with catching() as sent:
        app.tasks["both"].delay()
    _strike(Guard(app).store, verb, when, error, monkeypatch)
    outcome = _delivered(app, lambda: deliver(app, sent[0]))
    assert isinstance(outcome, error) or outcome.state == "FAILURE"
    if verb == "begin" and when == "before":  # that run never began: the claim is settled by whoever saw it fail
        Guard(app).store.end(EndRequest(sent[0].guard["owner"], None, claim=sent[0].guard["claim"]))
    _only_for_a_lease(app)


@pytest.mark.parametrize("error", STRIKES)
@pytest.mark.parametrize("verb", ["add", "remove"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_run_struck_at_the_heartbeat(app, verb, when, error, monkeypatch):
    """Interrupted between begin and body, or between body and end: the heartbeat does not keep the lock of a run that is over."""
    with catching() as sent:
        app.tasks["both"].delay()
    _strike(Guard(app).heartbeat, verb, when, error, monkeypatch)
    outcome = _delivered(app, lambda: deliver(app, sent[0]))
    assert isinstance(outcome, error) or outcome.state == "FAILURE"
    _only_for_a_lease(app)


def test_thread_that_cannot_start_fails_the_run_and_frees_the_lock(app, monkeypatch):
    """No more threads in the process: the run fails, its lock does not stay."""
    monkeypatch.setattr(Guard(app).heartbeat, "add", _raising(RuntimeError))
    outcome = run(app, app.tasks["both"])
    assert (outcome.state, type(outcome.value)) == ("FAILURE", RuntimeError)
    assert Guard(app).backlog.flush(5)
    assert held(app) == []


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded, KeyboardInterrupt])
def test_retry_struck_while_it_publishes(app, error, monkeypatch):
    """A retry whose message may be on its way keeps the claim for guard_uncertain_ttl; the slot is free."""
    with catching() as sent:
        app.tasks["both"].delay("retry")
    with monkeypatch.context() as patch:
        patch.setattr(type(app), "send_task", _raising(error))
        _delivered(app, lambda: deliver(app, sent[0]))
    guard = Guard(app)
    assert guard.backlog.flush(5)
    assert guard.store.list_locks() == []
    (claim,) = guard.store.list_claims()
    assert claim.state is ClaimState.QUEUED
    assert claim.expires_at <= time.time() + 60.5


def test_strike_at_the_end_does_not_free_what_another_holds(app, monkeypatch):
    """What the backlog gives back later carries the tokens of its own run: another owner's claim and slot stay."""
    guard = Guard(app)
    with catching() as sent:
        app.tasks["both"].delay()
    key = sent[0].guard["claim"]
    original = guard.store.end

    def struck(request: Any) -> Any:
        monkeypatch.setattr(guard.store, "end", original)
        original(request)
        guard.store.claim(ClaimRequest(key, "another", "another-id", 60))
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(guard.store, "end", struck)
    deliver(app, sent[0])
    assert guard.backlog.flush(5)
    claim = guard.store.get_claim(key)
    assert claim is not None
    assert claim.owner == "another"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_body_that_forks_keeps_its_lock(app, monkeypatch):
    """A child that the body forked and that unwinds through our frames ends nothing: the run is the parent's."""
    guard = Guard(app)
    ends: list[int] = []
    end = guard.store.end

    def noting(request: Any) -> Any:
        ends.append(os.getpid())
        return end(request)

    monkeypatch.setattr(guard.store, "end", noting)
    read, write = os.pipe()
    with catching() as sent:
        app.tasks["both"].delay("fork")
    pid, outcome = os.getpid(), None
    try:
        outcome = deliver(app, sent[0])
    except BaseException:
        if os.getpid() == pid:
            raise
    if os.getpid() != pid:  # the child, which must not go on with the tests
        os.write(write, str(len(ends)).encode())
        os._exit(0)
    os.close(write)
    assert os.read(read, 10) == b"0"
    os.close(read)
    assert ends == [pid]
    assert outcome is not None
    assert outcome.value == "2"
    assert held(app) == []


def test_copy_that_fails_before_its_body_leaves_the_running_claim(app, monkeypatch):
    """before_start fails for a copy of a running message: the claim that the first delivery runs under stays."""
    guard = Guard(app)
    with catching() as sent:
        app.tasks["both"].delay()
    seen: list[Any] = []

    def body(*_: Any) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(type(app.tasks["both"]), "before_start", lambda *_: 1 / 0)
            seen.append(deliver(app, sent[0]).state)
        assert guard.backlog.flush(5)
        seen.append(held(app))
        return "done"

    monkeypatch.setattr(app.tasks["both"], "run", body)
    assert deliver(app, sent[0]).value == "done"
    assert seen == ["FAILURE", [sent[0].guard["claim"], sent[0].guard["lock"]]]
    assert held(app) == []


def test_abort_strikes_only_the_body(app):
    """on_lost="abort" raises in the thread of its body, and never after the body, in code of Celery's."""

    @app.task(base=GuardedTask, name="aborting", without_overlapping=WithoutOverlapping(on_lost="abort"))
    def aborting() -> None:
        """Nothing."""

    strays = 0
    for _ in range(200):
        run_ = Run(aborting, Guard(app), GuardHeader("o", "i", lock="l"), token="t", attempt=1, worker="w", started=0.0)
        ready, over = threading.Event(), threading.Event()

        def lose(run: Run = run_, ready: threading.Event = ready, over: threading.Event = over) -> None:
            ready.wait(5)
            run.on_lost("taken")
            over.set()

        thread = threading.Thread(target=lose)
        thread.start()
        try:
            try:
                run_.enter_body()
                ready.set()
                sum(range(1000))
            finally:
                run_.leave_body()
        except LockLost:
            run_.leave_body()
        try:
            assert over.wait(5)
            sum(1 for _ in range(1000))
        except LockLost:
            strays += 1
        thread.join()
    assert strays == 0
