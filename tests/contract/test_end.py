"""End: a run gives back what is its own, once, and nothing that is another's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_guard.decisions import BeginOutcome, ClaimAction, ClaimOutcome, ClaimState, EndResult
from celery_guard.stores.protocols import GuardStore
from tests.contract.verbs import LEASE, TTL, Verbs

Advance = Callable[[float], None]
NOTHING = EndResult()


def test_end_gives_everything_back(verbs: Verbs, store: GuardStore) -> None:
    """Slot, claim and run record are free at once, and gone from the lists."""
    verbs.claim()
    verbs.begin(claim="r", lock="L")
    assert verbs.end(claim="r", lock="L") == EndResult(slot_released=True, claim_released=True)
    assert (store.list_claims(), store.list_locks()) == ([], [])
    assert verbs.begin("o2", "t2", lock="L").outcome is BeginOutcome.RUN
    assert verbs.claim("o2").outcome is ClaimOutcome.CLAIMED


@pytest.mark.parametrize("crashed", [True, False])
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("copies_expected", [True, False])
def test_second_end_changes_nothing(verbs: Verbs, crashed: bool, marked: bool, copies_expected: bool) -> None:
    """Parent and child may both end a run: the second does nothing and says so."""
    verbs.claim()
    verbs.begin(claim="r", lock="L", max_crashes=3)
    if marked:
        verbs.begin(token="t2", claim="r", lock="L", max_crashes=3)
    options = {"claim": "r", "lock": "L", "crashed": crashed, "copies_expected": copies_expected}
    assert verbs.end(**options).copy_seen is marked
    assert verbs.end(**options) == NOTHING


def test_second_end_spares_the_next_run(verbs: Verbs) -> None:
    """end | another message claims, begins | end again: the other keeps slot, claim and record."""
    verbs.claim()
    verbs.begin(claim="r", lock="L")
    verbs.end(claim="r", lock="L")
    verbs.claim("o2")
    verbs.begin("o2", "t2", claim="r", lock="L")
    assert verbs.end(claim="r", lock="L") == NOTHING
    assert verbs.holders() == ["t2"]
    assert verbs.held().owner == "o2"


def test_late_end_spares_who_took_the_slot(verbs: Verbs, advance: Advance) -> None:
    """begin | lease over | another begins | late end: the other's slot is not the late one's to give back."""
    verbs.begin(lock="L")
    advance(LEASE + 1)
    verbs.begin("o2", "t2", lock="L")
    assert not verbs.end(lock="L").slot_released
    assert verbs.holders() == ["t2"]


def test_lapsed_slot_is_not_released(verbs: Verbs, advance: Advance) -> None:
    """What the lease ended was not given back, also while other slots of the lock live."""
    verbs.begin("o1", "t1", lock="L", limit=2)
    verbs.begin("o2", "t2", lock="L", limit=2, lease=1000)
    advance(LEASE + 1)
    assert not verbs.end(lock="L").slot_released
    assert verbs.holders() == ["t2"]


def test_late_end_spares_the_copy_that_took_over(verbs: Verbs, advance: Advance) -> None:
    """begin t1 | lease over | copy begins t2 | late end of t1: claim, slot and record are t2's, though the owner is the same."""
    verbs.claim()
    verbs.begin(claim="r", lock="L")
    advance(LEASE + 1)
    assert verbs.begin(token="t2", claim="r", lock="L").outcome is BeginOutcome.RUN
    for action in ClaimAction:
        assert verbs.end(claim="r", lock="L", claim_action=action) == NOTHING
    assert verbs.held().state is ClaimState.RUNNING
    assert verbs.holders() == ["t2"]
    assert verbs.begin(token="t3", claim="r", lock="L").outcome is BeginOutcome.COPY_RUNNING


def test_end_spares_the_claim_of_another_owner(verbs: Verbs, advance: Advance) -> None:
    """The claim lapsed during the run and another owner took it: it stays the other's, whatever the action."""
    verbs.begin(claim="r")
    advance(LEASE + 1)
    verbs.claim("o2")
    for action in ClaimAction:
        assert not verbs.end(claim="r", claim_action=action).claim_released
        assert verbs.held().owner == "o2"


def test_keep_leaves_the_claim_to_the_successor(verbs: Verbs) -> None:
    """A retry renewed the claim during the run: the run's end does not touch it."""
    verbs.claim()
    verbs.begin(claim="r", lock="L")
    verbs.claim(ttl=77)
    assert verbs.end(claim="r", lock="L", claim_action=ClaimAction.KEEP) == EndResult(slot_released=True)
    assert verbs.held().state is ClaimState.QUEUED
    assert verbs.life() == pytest.approx(77, abs=1)


def test_requeue_puts_the_claim_back(verbs: Verbs) -> None:
    """A message that goes back to the broker keeps its claim, QUEUED, for claim_ttl."""
    verbs.claim()
    verbs.begin(claim="r", lock="L")
    result = verbs.end(claim="r", lock="L", claim_action=ClaimAction.REQUEUE, claim_ttl=99)
    assert result == EndResult(slot_released=True)
    assert (verbs.held().owner, verbs.held().state) == ("o1", ClaimState.QUEUED)
    assert verbs.life() == pytest.approx(99, abs=1)


def test_requeue_takes_a_missing_claim(verbs: Verbs, advance: Advance) -> None:
    """The claim lapsed during the run: the message that goes back takes it again, with its task id for people."""
    verbs.begin(claim="r")
    advance(LEASE + 1)
    verbs.end(claim="r", claim_action=ClaimAction.REQUEUE, claim_ttl=99, task_id="task-o1")
    assert (verbs.held().owner, verbs.held().task_id, verbs.held().state) == ("o1", "task-o1", ClaimState.QUEUED)
    assert verbs.life() == pytest.approx(99, abs=1)


def test_late_requeue_takes_no_claim_of_a_finished_message(verbs: Verbs, advance: Advance) -> None:
    """begin t1 | its process dies | copy runs as t2, and ends | the parent learns of the death: the message is done, its free claim stays free."""
    verbs.claim()
    verbs.begin(claim="r")
    advance(LEASE + 1)
    verbs.begin(token="t2", claim="r")
    assert verbs.end(token="t2", claim="r", copies_expected=True).claim_released
    verbs.end(claim="r", claim_action=ClaimAction.REQUEUE, crashed=True)
    assert verbs.store.get_claim("r") is None


def test_late_requeue_takes_no_claim_beside_a_running_copy(verbs: Verbs, advance: Advance) -> None:
    """The same while the copy still runs and its claim is free, as with until="executing"."""
    verbs.claim()
    verbs.begin(claim="r", until="executing")
    advance(LEASE + 1)
    verbs.begin(token="t2", claim="r", until="executing")
    verbs.end(claim="r", until="executing", claim_action=ClaimAction.REQUEUE, crashed=True)
    assert verbs.store.get_claim("r") is None


def test_requeue_leaves_no_marker(verbs: Verbs) -> None:
    """The message itself comes back as the same generation: a marker would drop it."""
    verbs.begin()
    verbs.begin(token="t2")
    assert verbs.end(claim_action=ClaimAction.REQUEUE, copies_expected=True).copy_seen
    assert verbs.begin(token="t2").outcome is BeginOutcome.RUN


def test_release_of_until_expired_marks_it_done(verbs: Verbs, advance: Advance) -> None:
    """until="expired": the end neither frees the claim nor changes its ttl."""
    verbs.claim()
    verbs.begin(claim="r", until="expired")
    advance(100)
    assert not verbs.end(claim="r", until="expired").claim_released
    assert verbs.held().state is ClaimState.DONE
    assert verbs.life() == pytest.approx(TTL - 100, abs=1)
    advance(TTL - 99)
    assert verbs.claim("o2").outcome is ClaimOutcome.CLAIMED


def test_expected_copies_leave_a_marker(verbs: Verbs, advance: Advance) -> None:
    """A run that outlived the broker's patience is followed by copies: they are dropped although none was seen."""
    verbs.begin()
    verbs.end(copies_expected=True, finished_ttl=50)
    assert verbs.begin(token="t2").outcome is BeginOutcome.COPY_FINISHED
    advance(51)
    assert verbs.begin(token="t2").outcome is BeginOutcome.RUN


def test_crash_leaves_the_record_but_no_marker(verbs: Verbs) -> None:
    """The parent ends the run of a dead child: slot and claim are free at once, the crash counts, a copy runs."""
    verbs.begin(lock="L", max_crashes=2)
    verbs.begin(token="t2", lock="L", max_crashes=2)
    result = verbs.end(lock="L", crashed=True, copies_expected=True)
    assert result == EndResult(slot_released=True, copy_seen=True)
    again = verbs.begin(token="t2", lock="L", max_crashes=2)
    assert (again.outcome, again.crashes) == (BeginOutcome.RUN, 1)


def test_end_of_a_message_that_never_began(verbs: Verbs) -> None:
    """Revoked or expired in the queue: its waiting claim is free."""
    verbs.claim()
    assert verbs.end(token=None, claim="r") == EndResult(claim_released=True)
    assert verbs.end(token=None, claim="r") == NOTHING


def test_end_without_token_spares_the_run(verbs: Verbs) -> None:
    """A copy of a running message expires in the queue: claim, slot and record stay with the run."""
    verbs.claim()
    verbs.begin(claim="r", lock="L")
    assert verbs.end(token=None, claim="r", lock="L") == NOTHING
    assert verbs.held().state is ClaimState.RUNNING
    assert verbs.holders() == ["t1"]
    assert verbs.begin(token="t2").outcome is BeginOutcome.COPY_RUNNING


def test_end_is_only_for_its_own_lock(verbs: Verbs) -> None:
    """A run that began without a lock gives back no slot of another run."""
    verbs.begin("o2", "t2", lock="L")
    verbs.begin()
    assert verbs.end(lock="L") == NOTHING
    assert verbs.holders() == ["t2"]
