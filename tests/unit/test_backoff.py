"""Stages and jitter of ``Backoff``."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_guard.options import Backoff
from celery_guard.policies.backoff import delay_for

fractions = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize(("attempt", "expected"), [(0, 5), (1, 15), (2, 60), (3, 60), (200, 60), (10**30, 60)])
def test_the_last_stage_stays(attempt: int, expected: float) -> None:
    """The attempt picks its stage; all attempts behind the last stage wait the last stage, however many there are."""
    assert delay_for(Backoff([5, 15, 60], jitter=0), attempt, 0.3) == expected


def test_no_hidden_cap() -> None:
    """Hours stay hours: nothing but the stages limits a delay."""
    backoff = Backoff([timedelta(hours=1), timedelta(hours=2), timedelta(hours=6)], jitter=0.1)
    assert [delay_for(backoff, attempt, 0.5) for attempt in range(4)] == [3600, 7200, 21600, 21600]


def test_jitter_spreads_both_ways() -> None:
    """The random number 0 is the low end of the band, 0.5 the stage itself, nearly 1 the high end."""
    backoff = Backoff(100, jitter=0.2)
    assert [delay_for(backoff, 0, u) for u in (0.0, 0.5)] == [80.0, 100.0]
    assert 119.9 < delay_for(backoff, 0, 0.9999) < 120


@given(stages=st.lists(st.floats(0, 1e8), min_size=1, max_size=5), jitter=st.floats(0, 1), attempt=st.integers(0, 10**9), u=fractions)
def test_delay_is_in_its_band(stages: list[float], jitter: float, attempt: int, u: float) -> None:
    """Every delay lies in the jitter band of its stage and is never negative."""
    stage = stages[min(attempt, len(stages) - 1)]
    delay = delay_for(Backoff(stages, jitter=jitter), attempt, u)
    slack = stage * 1e-9
    assert max(0.0, stage * (1 - jitter) - slack) <= delay <= stage * (1 + jitter) + slack


@given(jitter=st.floats(0, 1), first=fractions, second=fractions)
def test_delay_grows_with_u(jitter: float, first: float, second: float) -> None:
    """The random number decides the place in the band, in order, so that even numbers give even delays."""
    low, high = sorted((first, second))
    backoff = Backoff([30], jitter=jitter)
    assert delay_for(backoff, 0, low) <= delay_for(backoff, 0, high)
