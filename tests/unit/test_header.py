"""The guard header: what a message carries."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_guard.policies.header import HEADER, VERSION, GuardHeader

texts = st.text(min_size=1, max_size=20)
headers = st.builds(
    GuardHeader,
    owner=texts,
    task_id=texts,
    generation=st.integers(0, 50),
    published_at=st.integers(0, 2**33).map(float),
    claim=st.none() | texts,
    until=st.sampled_from(("executed", "executing", "expired")),
    ttl=st.integers(1, 10**6).map(float),
    lock=st.none() | texts,
    contender=st.booleans(),
    postponed=st.integers(1, 9),
    postponed_at=st.integers(1, 2**33).map(float),
)


@given(headers)
def test_survives_json(header: GuardHeader) -> None:
    """What one process writes, another reads; what belongs to the claim is only there with a claim."""
    read = GuardHeader.from_dict(json.loads(json.dumps(header.to_dict())))
    assert read is not None
    if header.claim is not None:
        assert read == header
    else:
        assert (read.owner, read.task_id, read.lock, read.claim) == (header.owner, header.task_id, header.lock, None)


@pytest.mark.parametrize(
    "junk",
    [None, "text", 7, [], {}, {"owner": "o"}, {"id": "i"}, {"owner": "", "id": "i"}, {"owner": 5, "id": "i"}, {"owner": "o", "id": None}],
)
def test_junk_is_no_header(junk: object) -> None:
    """Another program's header of the same name is ignored, not a crash."""
    assert GuardHeader.from_headers({HEADER: junk}) is None
    assert GuardHeader.from_headers(junk) is None


def test_wrong_fields_fall_back() -> None:
    """A field of the wrong type counts as absent; the rest is used."""
    read = GuardHeader.from_dict({"owner": "o", "id": "i", "gen": "x", "ttl": None, "until": "later", "claim": 5, "postponed": -1, "at": True, "v": 99})
    assert read == GuardHeader(owner="o", task_id="i")


def test_local_data_is_never_sent() -> None:
    """Execution token and content type stay inside the worker."""
    header = GuardHeader(owner="o", task_id="i", token="secret", content_type="application/json")
    assert "token" not in header.to_dict()
    assert header.to_dict()["v"] == VERSION
    assert GuardHeader.from_dict(header.to_dict(local=True)) == header


def test_successor_is_the_next_generation_with_a_clean_slate() -> None:
    """A retry has its own delivery token and its own postponements."""
    header = GuardHeader(owner="o", task_id="i", generation=3, postponed=2, postponed_at=5.0, contender=True, token="t")
    after = header.successor(9.0)
    assert (after.generation, after.postponed, after.postponed_at, after.contender, after.token, after.published_at) == (4, 0, None, False, None, 9.0)


def test_postponements_count_from_the_first() -> None:
    """The patience of give_up_after starts when the lock was found busy first, in the time of the store: no two workers' clocks are compared."""
    before = GuardHeader(owner="o", task_id="i").postponement(7.0)
    first = before.postponement(3600.0, busy_at=10.0)
    second = first.postponement(-3600.0, busy_at=20.0)
    assert (before.postponed, before.postponed_at) == (1, None)
    assert (first.postponed, first.postponed_at, second.postponed, second.postponed_at) == (2, 10.0, 3, 10.0)
    assert second.generation == 3
    assert GuardHeader.from_dict(second.to_dict()) == second


def test_a_postponed_copy_stays_the_same_generation() -> None:
    """Otherwise a copy of a finished message would not be recognised when it comes back."""
    header = GuardHeader(owner="o", task_id="i", generation=3, token="t")
    assert header.copy(8.0).generation == 3
    assert header.copy(8.0).token is None
