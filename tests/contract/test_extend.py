"""Extend: a run that lives keeps what it holds, takes again what nobody else took, and learns what it lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_guard.decisions import BeginOutcome, ClaimAction, ClaimState, ExtendOutcome, ExtendRequest, ExtendResult
from celery_guard.stores.protocols import GuardStore
from tests.contract.verbs import LEASE, TTL, Verbs

Advance = Callable[[float], None]
HELD = ExtendResult(ExtendOutcome.HELD)
RETAKEN = ExtendResult(ExtendOutcome.RETAKEN)
LOST = ExtendResult(ExtendOutcome.LOST)


def test_heartbeat_keeps_everything(verbs: Verbs, advance: Advance) -> None:
    """A run of many leases keeps claim, slot and record."""
    verbs.claim()
    fence = verbs.begin(claim="r", lock="L").fence
    for _ in range(5):
        advance(LEASE - 1)
        assert verbs.extend(claim="r", lock="L", fence=fence) == HELD
    assert verbs.held().state is ClaimState.RUNNING
    assert verbs.life() == pytest.approx(LEASE, abs=1)
    assert verbs.begin("o2", "t2", lock="L").outcome is BeginOutcome.BUSY
    assert verbs.begin(token="t2", claim="r", lock="L").outcome is BeginOutcome.COPY_RUNNING


def test_extend_keeps_mark_and_crash_count(verbs: Verbs, advance: Advance) -> None:
    """A heartbeat forgets neither the copy that was seen nor the starts that were counted."""
    verbs.begin(max_crashes=1)
    verbs.begin(token="t2")
    assert verbs.extend(crash_memory=1000) == HELD
    advance(LEASE + 1)
    assert verbs.begin(token="t3", max_crashes=1).outcome is BeginOutcome.POISON
    assert verbs.extend(crash_memory=1000) == RETAKEN
    assert verbs.end().copy_seen


def test_crash_memory_counts_from_the_last_heartbeat(verbs: Verbs, advance: Advance) -> None:
    """A long run that dies at its end is remembered as a crash."""
    verbs.begin(max_crashes=1, crash_memory=100)
    for _ in range(6):
        advance(LEASE - 1)
        verbs.extend(crash_memory=100)
    advance(99)
    assert verbs.begin(token="t2", max_crashes=1).outcome is BeginOutcome.POISON


def test_slot_taken_away_is_lost(verbs: Verbs, store: GuardStore) -> None:
    """An operator took the slot: the run learns it, whether or not another has the slot, and takes nothing back."""
    fence = verbs.begin(lock="L").fence
    assert store.force_release_slot("L", "t1")
    assert verbs.extend(lock="L", fence=fence) == LOST
    assert verbs.holders() == []


def test_claim_taken_away_is_told(verbs: Verbs, store: GuardStore) -> None:
    """An operator freed the claim: the run goes on without it, and does not take it from whoever dispatches next."""
    verbs.claim()
    verbs.begin(claim="r")
    store.force_release_claim("r", "o1")
    assert verbs.extend(claim="r") == ExtendResult(ExtendOutcome.HELD, claim_lost=True)
    assert store.get_claim("r") is None
    verbs.claim("o2")
    assert verbs.extend(claim="r") == ExtendResult(ExtendOutcome.HELD, claim_lost=True)
    assert (verbs.held().owner, verbs.held().state) == ("o2", ClaimState.QUEUED)


def test_claim_renewed_by_a_retry_is_left_alone(verbs: Verbs) -> None:
    """The run dispatched its retry, which waits for TTL: a heartbeat before the end does not cut that to a lease."""
    verbs.claim()
    verbs.begin(claim="r")
    verbs.claim()
    assert verbs.extend(claim="r") == HELD
    assert verbs.held().state is ClaimState.QUEUED
    assert verbs.life() == pytest.approx(TTL, abs=1)


def test_lapsed_run_takes_again(verbs: Verbs, advance: Advance) -> None:
    """The process was stopped longer than its lease and nobody came: slot (same fence), claim and record are taken again."""
    verbs.claim()
    fence = verbs.begin(claim="r", lock="L").fence
    advance(LEASE + 1)
    assert verbs.extend(claim="r", lock="L", fence=fence) == RETAKEN
    assert (verbs.held().owner, verbs.held().state) == ("o1", ClaimState.RUNNING)
    assert verbs.life() == pytest.approx(LEASE, abs=1)
    lock = verbs.store.get_lock("L")
    assert lock is not None
    assert [(holder.token, holder.fence) for holder in lock.holders] == [("t1", fence)]
    assert verbs.extend(claim="r", lock="L", fence=fence) == HELD
    assert verbs.begin("o2", "t2", lock="L").outcome is BeginOutcome.BUSY


def test_lapsed_run_without_lock_takes_again(verbs: Verbs, advance: Advance) -> None:
    """The same for a task that is only unique."""
    verbs.claim()
    verbs.begin(claim="r")
    advance(LEASE + 1)
    assert verbs.extend(claim="r") == RETAKEN
    assert verbs.begin(token="t2", claim="r").outcome is BeginOutcome.COPY_RUNNING


def test_lapsed_run_does_not_take_a_claim_from_another(verbs: Verbs, advance: Advance) -> None:
    """A duplicate was dispatched during the lapse: its claim stays."""
    verbs.claim()
    verbs.begin(claim="r")
    advance(LEASE + 1)
    verbs.claim("o2")
    assert verbs.extend(claim="r") == ExtendResult(ExtendOutcome.RETAKEN, claim_lost=True)
    assert verbs.held().owner == "o2"


def test_lapsed_run_takes_its_requeued_claim(verbs: Verbs, advance: Advance) -> None:
    """A copy was postponed during the lapse and left the claim QUEUED: it is the run's again."""
    verbs.begin("o2", "t9", lock="L", lease=1000)
    verbs.claim()
    verbs.begin(claim="r")
    advance(LEASE + 1)
    assert verbs.begin(token="t2", claim="r", lock="L").outcome is BeginOutcome.BUSY
    assert verbs.extend(claim="r") == RETAKEN
    assert verbs.held().state is ClaimState.RUNNING


def test_lost_when_another_holds_the_slot(verbs: Verbs, advance: Advance, store: GuardStore) -> None:
    """begin t1 | stopped | o2 begins | heartbeat of t1: lost; nothing is taken, not even the claim that is free."""
    fence = verbs.begin(claim="r", lock="L").fence
    advance(LEASE + 1)
    verbs.begin("o2", "t2", lock="L")
    assert verbs.extend(claim="r", lock="L", fence=fence) == LOST
    assert verbs.holders() == ["t2"]
    assert store.get_claim("r") is None
    assert verbs.begin(token="t3").outcome is BeginOutcome.RUN


def test_lost_when_another_came_and_went(verbs: Verbs, advance: Advance) -> None:
    """begin t1 | stopped | o2 begins, ends | heartbeat of t1: lost, since its work and o2's have mixed."""
    fence = verbs.begin(lock="L").fence
    advance(LEASE + 1)
    verbs.begin("o2", "t2", lock="L")
    verbs.end("o2", "t2", lock="L")
    assert verbs.extend(lock="L", fence=fence) == LOST
    assert verbs.holders() == []


def test_of_several_slots_any_free_one_will_do(verbs: Verbs, advance: Advance) -> None:
    """limit=2: a lapsed run goes on while a slot is free, and is lost when none is."""
    fence = verbs.begin("o1", "t1", lock="L", limit=2).fence
    advance(LEASE + 1)
    verbs.begin("o2", "t2", lock="L", limit=2)
    assert verbs.extend("o1", "t1", lock="L", limit=2, fence=fence) == RETAKEN
    advance(LEASE + 1)
    verbs.begin("o3", "t3", lock="L", limit=2)
    verbs.begin("o4", "t4", lock="L", limit=2)
    assert verbs.extend("o1", "t1", lock="L", limit=2, fence=fence) == LOST
    assert sorted(verbs.holders()) == ["t3", "t4"]


def test_slot_that_did_not_lapse_with_its_record(verbs: Verbs, advance: Advance) -> None:
    """The record of a crashed run is over though its slot is not: the living run keeps the slot under its fence."""
    fence = verbs.begin(lock="L", max_crashes=5).fence
    verbs.end(crashed=True)
    assert verbs.extend(lock="L", fence=fence) == RETAKEN
    assert verbs.holders() == ["t1"]


def test_lost_to_a_copy_that_runs(verbs: Verbs, advance: Advance) -> None:
    """begin t1 | stopped | copy begins t2 | heartbeat of t1: the message is t2's now, with a lock or without."""
    verbs.claim()
    verbs.begin(claim="r")
    advance(LEASE + 1)
    verbs.begin(token="t2", claim="r")
    assert verbs.extend(claim="r") == LOST
    assert verbs.extend(token="t2", claim="r") == HELD


def test_lost_to_a_copy_that_finished(verbs: Verbs, advance: Advance) -> None:
    """The copy has ended and left its marker: the old run takes nothing again, and the marker stays."""
    verbs.begin(lock="L", limit=2)
    advance(LEASE + 1)
    verbs.begin(token="t2", lock="L", limit=2)
    verbs.end(token="t2", lock="L", copies_expected=True)
    assert verbs.extend(lock="L", limit=2) == LOST
    assert verbs.holders() == []
    assert verbs.begin(token="t3").outcome is BeginOutcome.COPY_FINISHED


def test_extend_after_the_end_of_a_marked_run(verbs: Verbs) -> None:
    """A heartbeat that was on its way when the run ended does not undo the finished marker."""
    verbs.begin(lock="L")
    verbs.end(lock="L", copies_expected=True)
    assert verbs.extend(lock="L") == LOST
    assert verbs.holders() == []


def test_crashes_count_when_the_record_was_lost(verbs: Verbs, advance: Advance) -> None:
    """The server forgot the run: its heartbeat writes it down again, as a start without an end."""
    assert verbs.extend(crash_memory=1000) == RETAKEN
    advance(LEASE + 1)
    assert verbs.begin(token="t2", max_crashes=1).outcome is BeginOutcome.POISON


def test_uncounted_run_stays_uncounted(verbs: Verbs, advance: Advance) -> None:
    """crash_memory=0: the record ends with the lease."""
    assert verbs.extend() == RETAKEN
    advance(LEASE + 1)
    assert verbs.begin(token="t2", max_crashes=1).outcome is BeginOutcome.RUN


def test_many_at_once_in_order(verbs: Verbs, store: GuardStore) -> None:
    """The answers come in the order of the requests, each for its own run; none for none."""
    assert store.extend([]) == []
    requests = []
    for n in range(60):
        claim, lock = (f"c{n}" if n % 2 else None), (f"l{n}" if n % 3 else None)
        fence = verbs.begin(f"o{n}", f"t{n}", claim=claim, lock=lock).fence
        requests.append(ExtendRequest(f"o{n}", f"t{n}", 0, f"task-{n}", "w", LEASE, claim=claim, lock=lock, fence=fence))
    store.force_release_slot("l4", "t4")
    store.force_release_claim("c9", "o9")
    verbs.end("o7", "t7", claim="c7", lock="l7", copies_expected=True)
    results = store.extend(requests)
    assert {n: result for n, result in enumerate(results) if result != HELD} == {4: LOST, 7: LOST, 9: ExtendResult(ExtendOutcome.HELD, claim_lost=True)}


def test_extend_does_not_revive_a_requeued_claim(verbs: Verbs) -> None:
    """An end with REQUEUE has deleted the record; a heartbeat behind it must not be sent, but its claim still ends by itself."""
    verbs.claim()
    verbs.begin(claim="r")
    verbs.end(claim="r", claim_action=ClaimAction.REQUEUE)
    assert verbs.extend(claim="r") == RETAKEN
    assert verbs.life() == pytest.approx(LEASE, abs=1)
