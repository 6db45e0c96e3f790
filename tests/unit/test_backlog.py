"""The backlog: calls that must reach the store later."""

from __future__ import annotations

import threading

from celery_guard.backlog import Backlog
from celery_guard.errors import StoreUnavailable


def away() -> StoreUnavailable:
    return StoreUnavailable("away", operation="end", address="x", uncertain=False)


def test_calls_are_made_in_order_and_flush_waits_for_them() -> None:
    """What is given back first is released first; flush returns when nothing is left."""
    backlog = Backlog()
    done: list[int] = []
    for number in range(20):
        backlog.put(lambda number=number: done.append(number))
    assert backlog.flush(10)
    assert done == list(range(20))
    assert len(backlog) == 0


def test_a_call_is_repeated_until_the_store_is_back() -> None:
    """An outage delays a release, it does not drop it."""
    backlog = Backlog()
    tries: list[int] = []

    def call() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise away()

    backlog.put(call)
    assert backlog.flush(30)
    assert len(tries) == 3


def test_a_call_that_grew_too_old_is_dropped() -> None:
    """By then the lease has ended the matter."""
    backlog = Backlog(patience=0.0)
    tries: list[int] = []

    def call() -> None:
        tries.append(1)
        raise away()

    backlog.put(call)
    assert backlog.flush(10)
    assert len(tries) == 1


def test_a_faulty_call_does_not_end_the_thread() -> None:
    """The next one is made all the same."""
    backlog = Backlog()
    done = threading.Event()

    def fault() -> None:
        raise RuntimeError("bug")

    backlog.put(fault)
    backlog.put(done.set)
    assert done.wait(10)


def test_flush_gives_up() -> None:
    """A worker going down waits for so long and no longer."""
    backlog = Backlog()
    go_on = threading.Event()
    backlog.put(lambda: go_on.wait(10))
    assert not backlog.flush(0.05)
    go_on.set()
    assert backlog.flush(10)
