"""Decisions of unique dispatch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_guard.policies.unique import Conflict, carries_continuation, claim_ttl, resolve_conflict


@pytest.mark.parametrize(
    "options",
    [
        {"link": [{}]},
        {"link_error": [{}]},
        {"chord": {"task": "x"}},
        {"group_id": "g"},
        {"group_index": 0},
        {"chain": [{}]},
        {"chain": []},  # the last step of a chain
        {"reply_to": "oid"},  # a frozen signature: a chord's body
    ],
)
def test_somebody_waits(options: dict[str, object]) -> None:
    """A message whose id a workflow waits for is never dropped in silence."""
    assert carries_continuation(options)
    assert resolve_conflict("skip", carries_continuation(options)) is Conflict.RUN


@pytest.mark.parametrize("options", [{}, {"link": None, "link_error": [], "chord": None, "group_id": None, "chain": None}, {"countdown": 5, "task_id": "x"}])
def test_nobody_waits(options: dict[str, object]) -> None:
    """A plain dispatch, with an own id or not, is skipped."""
    assert not carries_continuation(options)
    assert resolve_conflict("skip", carries_continuation(options)) is Conflict.SKIP


@pytest.mark.parametrize("continuation", [True, False])
def test_raise_raises(continuation: bool) -> None:
    """``raise`` raises before anything is sent, also for members of a workflow."""
    assert resolve_conflict("raise", continuation) is Conflict.RAISE


@given(ttl=st.floats(0.01, 1e6), delay=st.floats(-1e6, 1e6))
def test_claim_outlives_the_delay(ttl: float, delay: float) -> None:
    """A claim never ends before its message's ETA; a past ETA does not shorten it."""
    assert claim_ttl(ttl, delay, None) >= max(delay, 0)
    assert claim_ttl(ttl, delay, None) >= ttl * 0.999


@given(expires=st.floats(-10, 1e5))
def test_expiry_shortens(expires: float) -> None:
    """The claim of a message that expires does not outlive it by more than the grace."""
    assert 0 < claim_ttl(3600, 86400, expires) <= max(expires, 0) + 5
