"""Decisions of the execution lock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from celery_guard.options import Backoff, WithoutOverlapping
from celery_guard.policies.overlap import GiveUp, Postpone, Raise, Skip, capped, on_busy

LOCK = WithoutOverlapping(key="k", delay=Backoff([1, 2, 5], jitter=0))


def test_skip_and_raise_do_not_wait() -> None:
    """The policy decides at the first refusal."""
    assert on_busy(WithoutOverlapping(on_conflict="skip"), postponed=0, waited=0, u=0.5, ceiling=None) == Skip()
    assert on_busy(WithoutOverlapping(on_conflict="raise"), postponed=0, waited=0, u=0.5, ceiling=None) == Raise()


def test_stages_follow_the_postponements() -> None:
    """Each postponement takes the next stage, the last one for ever."""
    delays = [on_busy(LOCK, postponed=n, waited=n, u=0.5, ceiling=None) for n in (0, 1, 2, 3, 100)]
    assert delays == [Postpone(1.0), Postpone(2.0), Postpone(5.0), Postpone(5.0), Postpone(5.0)]


def test_gives_up_when_patience_is_over() -> None:
    """``give_up_after`` counts from the first postponement; a first refusal is always postponed."""
    lock = WithoutOverlapping(delay=Backoff([1], jitter=0), give_up_after=10)
    assert on_busy(lock, postponed=3, waited=10.0, u=0, ceiling=None) == GiveUp(10.0)
    assert on_busy(lock, postponed=3, waited=9.5, u=0, ceiling=None) == Postpone(0.5)
    assert isinstance(on_busy(lock, postponed=0, waited=0, u=0, ceiling=None), Postpone)


@given(postponed=st.integers(0, 500), u=st.floats(0, 0.999), ceiling=st.none() | st.floats(0.1, 100))
def test_never_immediate_never_beyond_the_broker(postponed: int, u: float, ceiling: float | None) -> None:
    """No hot loop, and no delayed message that outlives the visibility timeout."""
    refusal = on_busy(WithoutOverlapping(), postponed=postponed, waited=0, u=u, ceiling=ceiling)
    assert isinstance(refusal, Postpone)
    assert refusal.delay >= 0.05
    assert ceiling is None or refusal.delay <= max(ceiling, 0.05)


def test_capped_keeps_what_is_between() -> None:
    """The cap changes nothing else."""
    assert capped(3.0, None) == 3.0
    assert capped(3.0, 10.0) == 3.0
