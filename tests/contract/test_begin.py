"""Begin: who may run. Each test is one interleaving of deliveries of one or two messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_guard.decisions import BeginOutcome, ClaimAction, ClaimOutcome, ClaimState
from celery_guard.stores.protocols import GuardStore
from tests.contract.verbs import LEASE, TTL, Verbs

Advance = Callable[[float], None]

# ------------------------------------------------------------------------------------ claim


def test_own_claim_runs_on_a_lease(verbs: Verbs) -> None:
    """until="executed": the claim runs with its run and lives on the lease, so that a dead worker frees it soon."""
    verbs.claim()
    result = verbs.begin(claim="r")
    assert (result.outcome, result.fence, result.claim_lost) == (BeginOutcome.RUN, None, False)
    assert verbs.held().state is ClaimState.RUNNING
    assert verbs.life() == pytest.approx(LEASE, abs=1)


def test_until_executing_frees_the_claim(verbs: Verbs, store: GuardStore) -> None:
    """until="executing": the next dispatch is accepted as soon as this one starts."""
    verbs.claim()
    assert verbs.begin(claim="r", until="executing").outcome is BeginOutcome.RUN
    assert store.get_claim("r") is None
    assert store.list_claims() == []


def test_until_expired_keeps_the_ttl(verbs: Verbs, advance: Advance) -> None:
    """until="expired": starting neither shortens nor lengthens the claim."""
    verbs.claim()
    advance(100)
    verbs.begin(claim="r", until="expired")
    assert verbs.held().state is ClaimState.RUNNING
    assert verbs.life() == pytest.approx(TTL - 100, abs=1)


@pytest.mark.parametrize(("until", "life"), [("executed", LEASE), ("expired", TTL)])
def test_missing_claim_is_taken(verbs: Verbs, until: str, life: float) -> None:
    """An expired claim is not a duplicate: the message runs, takes the claim again and says that it was lost."""
    result = verbs.begin(claim="r", until=until)
    assert (result.outcome, result.claim_lost) == (BeginOutcome.RUN, True)
    assert (verbs.held().owner, verbs.held().state) == ("o1", ClaimState.RUNNING)
    assert verbs.life() == pytest.approx(life, abs=1)


def test_missing_claim_of_until_executing(verbs: Verbs, store: GuardStore) -> None:
    """until="executing" with a claim that expired: it runs, and nothing is claimed."""
    assert verbs.begin(claim="r", until="executing").claim_lost
    assert store.get_claim("r") is None


def test_claim_of_another_does_not_stop_a_message_that_had_one(verbs: Verbs, advance: Advance) -> None:
    """o1's claim expired and o2 took it: o1 runs in any case, since work is never dropped, and leaves o2's claim alone."""
    verbs.claim(ttl=10)
    advance(11)
    verbs.claim("o2")
    result = verbs.begin(claim="r")
    assert (result.outcome, result.claim_lost) == (BeginOutcome.RUN, True)
    assert (verbs.held().owner, verbs.held().state) == ("o2", ClaimState.QUEUED)


def test_claim_of_another_survives_until_executing(verbs: Verbs) -> None:
    """until="executing" frees the own claim only."""
    verbs.claim("o2")
    verbs.begin(claim="r", until="executing")
    assert verbs.held().owner == "o2"


def test_contender_takes_a_free_claim(verbs: Verbs) -> None:
    """A message sent without a claim takes it at its start; there was none to lose."""
    result = verbs.begin(claim="r", contender=True)
    assert (result.outcome, result.claim_lost) == (BeginOutcome.RUN, False)
    assert verbs.held().owner == "o1"


def test_contender_is_refused_beside_another(verbs: Verbs, store: GuardStore) -> None:
    """A message sent without a claim does not run beside the holder; nothing is taken, and it learns who is in the way."""
    verbs.claim("o2")
    result = verbs.begin(claim="r", lock="L", contender=True, max_crashes=1)
    assert (result.outcome, result.holder_task_id, result.holder_state) == (BeginOutcome.DUPLICATE, "task-o2", ClaimState.QUEUED)
    assert result.retry_in == pytest.approx(TTL, abs=1)
    assert store.get_lock("L") is None
    store.release_claim("r", "o2")
    assert verbs.begin(claim="r", contender=True, max_crashes=1).crashes == 0


# ------------------------------------------------------------------------------------- lock


def test_lock_has_one_slot(verbs: Verbs) -> None:
    """The second run is refused, and told whose slot is in the way and for how long at most."""
    assert verbs.begin("o1", "t1", lock="L").outcome is BeginOutcome.RUN
    result = verbs.begin("o2", "t2", lock="L")
    assert (result.outcome, result.holder_task_id, result.fence) == (BeginOutcome.BUSY, "task-o1", None)
    assert result.retry_in == pytest.approx(LEASE, abs=1)
    assert verbs.holders() == ["t1"]


def test_lock_has_as_many_slots_as_its_limit(verbs: Verbs) -> None:
    """limit=3: three run, the fourth is refused, and a freed slot is taken."""
    outcomes = [verbs.begin(f"o{n}", f"t{n}", lock="L", limit=3).outcome for n in range(4)]
    assert outcomes == [BeginOutcome.RUN] * 3 + [BeginOutcome.BUSY]
    verbs.end("o1", "t1", lock="L")
    assert verbs.begin("o3", "t3", lock="L", limit=3).outcome is BeginOutcome.RUN
    assert sorted(verbs.holders()) == ["t0", "t2", "t3"]


def test_a_refusal_names_the_slot_that_ends_first(verbs: Verbs, advance: Advance) -> None:
    """retry_in is the earliest moment at which a slot can lapse."""
    verbs.begin("o1", "t1", lock="L", limit=2, lease=100)
    verbs.begin("o2", "t2", lock="L", limit=2, lease=20)
    result = verbs.begin("o3", "t3", lock="L", limit=2)
    assert result.holder_task_id == "task-o2"
    assert result.retry_in == pytest.approx(20, abs=1)


def test_lapsed_slot_is_free(verbs: Verbs, advance: Advance) -> None:
    """A slot without a heartbeat is free after its lease, also beside slots that live on."""
    verbs.begin("o1", "t1", lock="L", limit=2, lease=10)
    verbs.begin("o2", "t2", lock="L", limit=2, lease=100)
    advance(11)
    assert verbs.begin("o3", "t3", lock="L", limit=2).outcome is BeginOutcome.RUN
    assert sorted(verbs.holders()) == ["t2", "t3"]


def test_a_lowered_limit_holds(verbs: Verbs) -> None:
    """With more holders than the new limit nobody else gets in."""
    for n in range(3):
        verbs.begin(f"o{n}", f"t{n}", lock="L", limit=3)
    verbs.end("o0", "t0", lock="L")
    assert verbs.begin("o4", "t4", lock="L", limit=2).outcome is BeginOutcome.BUSY


def test_fence_grows(verbs: Verbs, advance: Advance) -> None:
    """Each grant has a greater number than all before, over releases, lapses and a forgotten counter."""
    fences = []
    for n in range(6):
        fences.append(verbs.begin(f"o{n}", f"t{n}", lock="L").fence or 0)
        if n % 2:
            verbs.end(f"o{n}", f"t{n}", lock="L")
        else:
            advance(LEASE + 1)
    assert fences == sorted(set(fences))
    assert fences[0] > 1_600_000_000_000_000


def test_holder_is_shown(verbs: Verbs, store: GuardStore) -> None:
    """Operators see token, task, worker, times and fence."""
    fence = verbs.begin(lock="L").fence
    lock = store.get_lock("L")
    assert lock is not None
    (holder,) = lock.holders
    assert (holder.token, holder.task_id, holder.worker, holder.fence, lock.fence) == ("t1", "task-o1", "celery@host:1", fence, fence)
    assert holder.expires_at - holder.since_at == pytest.approx(LEASE, abs=1)


def test_busy_puts_the_claim_back(verbs: Verbs, advance: Advance) -> None:
    """A postponed message keeps its claim, QUEUED, for as long as the postponement needs."""
    verbs.begin("o2", "t2", lock="L")
    verbs.claim(ttl=10)
    result = verbs.begin(claim="r", lock="L", claim_ttl=200)
    assert (result.outcome, result.claim_lost) == (BeginOutcome.BUSY, False)
    assert verbs.held().state is ClaimState.QUEUED
    assert verbs.life() == pytest.approx(200, abs=1)


def test_busy_takes_a_missing_claim(verbs: Verbs) -> None:
    """A postponed message whose claim expired takes it again, so that no duplicate is dispatched while it waits."""
    verbs.begin("o2", "t2", lock="L")
    assert verbs.begin(claim="r", lock="L").claim_lost
    assert (verbs.held().owner, verbs.held().task_id, verbs.held().state) == ("o1", "task-o1", ClaimState.QUEUED)


def test_busy_leaves_the_claim_of_another(verbs: Verbs) -> None:
    """A postponed message does not touch a claim that has passed to another."""
    verbs.begin("o2", "t2", lock="L")
    verbs.claim("o3")
    assert verbs.begin(claim="r", lock="L").claim_lost
    assert verbs.held().owner == "o3"
    assert verbs.life() == pytest.approx(TTL, abs=1)


def test_busy_takes_nothing_else(verbs: Verbs) -> None:
    """A refusal is no start: it counts as no crash, and leaves no record that a copy could meet."""
    verbs.begin("o2", "t2", lock="L")
    verbs.begin(lock="L", max_crashes=1)
    verbs.end("o2", "t2", lock="L")
    result = verbs.begin(token="other", lock="L", max_crashes=1)
    assert (result.outcome, result.crashes) == (BeginOutcome.RUN, 0)


# ----------------------------------------------------------------------- answer that got lost


@pytest.mark.parametrize("until", ["executed", "executing", "expired"])
@pytest.mark.parametrize("claimed", [True, False])
def test_repeated_begin_gets_the_same_grant(verbs: Verbs, until: str, claimed: bool) -> None:
    """The answer got lost and the caller asks again: the same grant, and one start only."""
    if claimed:
        verbs.claim()
    first = verbs.begin(claim="r", until=until, lock="L", max_crashes=2)
    assert first.claim_lost is not claimed
    assert verbs.begin(claim="r", until=until, lock="L", max_crashes=2) == first
    assert verbs.holders() == ["t1"]
    verbs.end(claim="r", until=until, lock="L", crashed=True)
    assert verbs.begin(token="t2", claim="r", until=until, lock="L", max_crashes=2).crashes == 1


def test_repeated_begin_of_a_contender(verbs: Verbs) -> None:
    """Also when until="executing" has freed the claim meanwhile and another owner has it."""
    first = verbs.begin(claim="r", until="executing", contender=True)
    verbs.claim("o2")
    assert verbs.begin(claim="r", until="executing", contender=True) == first
    assert first.outcome is BeginOutcome.RUN


def test_repeated_begin_after_the_slot_was_taken_away(verbs: Verbs, store: GuardStore) -> None:
    """An operator took the slot and another run got it: the repeated begin is refused, not granted twice."""
    verbs.begin(lock="L")
    store.force_release_slot("L", "t1")
    verbs.begin("o2", "t2", lock="L")
    assert verbs.begin(lock="L").outcome is BeginOutcome.BUSY
    assert verbs.holders() == ["t2"]


def test_repeated_begin_after_a_lapse_is_one_start(verbs: Verbs, advance: Advance) -> None:
    """The same execution asks again after its own lease: it is granted anew and does not count as crashed."""
    verbs.begin(max_crashes=1)
    advance(LEASE + 1)
    result = verbs.begin(max_crashes=1)
    assert (result.outcome, result.crashes) == (BeginOutcome.RUN, 0)


def test_same_execution_keeps_its_slot(verbs: Verbs, advance: Advance) -> None:
    """Its record is over but its slot is not: it is granted under the fence that it has, for a new lease, and takes no second slot."""
    fence = verbs.begin(lock="L", limit=2, max_crashes=5).fence
    verbs.end(crashed=True)
    advance(LEASE - 1)
    result = verbs.begin(lock="L", limit=2, max_crashes=5)
    assert (result.outcome, result.fence) == (BeginOutcome.RUN, fence)
    advance(LEASE - 1)
    assert verbs.holders() == ["t1"]


# -------------------------------------------------------------------------- copies of a message


def test_copy_meets_the_running_one(verbs: Verbs) -> None:
    """deliver, begin | redeliver, begin: the copy does not run beside the first; it leaves a mark."""
    verbs.claim()
    verbs.begin(claim="r", lock="L", limit=2)
    result = verbs.begin(token="t2", claim="r", lock="L", limit=2)
    assert result.outcome is BeginOutcome.COPY_RUNNING
    assert result.retry_in == pytest.approx(LEASE, abs=1)
    assert verbs.holders() == ["t1"]
    assert verbs.held().state is ClaimState.RUNNING


def test_marked_run_leaves_a_marker(verbs: Verbs, advance: Advance) -> None:
    """begin | copy marks | end | copy comes back: it is dropped, for as long as the marker lives."""
    verbs.begin()
    verbs.begin(token="t2")
    assert verbs.end(finished_ttl=50).copy_seen
    assert verbs.begin(token="t2").outcome is BeginOutcome.COPY_FINISHED
    advance(51)
    assert verbs.begin(token="t2").outcome is BeginOutcome.RUN


def test_unmarked_run_leaves_nothing(verbs: Verbs) -> None:
    """Without a copy there is no marker, and no cost; a copy that comes after the end is not the store's business."""
    verbs.begin()
    assert not verbs.end().copy_seen
    assert verbs.begin(token="t2").outcome is BeginOutcome.RUN


def test_copy_of_a_dead_run_runs(verbs: Verbs, advance: Advance) -> None:
    """begin | copy marks | worker killed, lease over | copy comes back: it runs, since nothing finished."""
    verbs.claim()
    verbs.begin(claim="r")
    verbs.begin(token="t2", claim="r")
    advance(LEASE + 1)
    assert verbs.begin(token="t2", claim="r").outcome is BeginOutcome.RUN
    assert not verbs.end(token="t2", claim="r").copy_seen


def test_retry_waits_for_its_predecessor(verbs: Verbs) -> None:
    """The retry was delivered before the run that sent it has ended: it waits, and leaves no mark."""
    verbs.begin()
    result = verbs.begin(token="t2", generation=1)
    assert result.outcome is BeginOutcome.PREDECESSOR_RUNNING
    assert result.retry_in == pytest.approx(LEASE, abs=1)
    assert not verbs.end().copy_seen
    assert verbs.begin(token="t2", generation=1).outcome is BeginOutcome.RUN


def test_old_copy_is_stale(verbs: Verbs) -> None:
    """A copy of the first generation arrives while the retry runs: it is history, and leaves no mark."""
    verbs.begin(token="t2", generation=1)
    assert verbs.begin(token="t1", generation=0).outcome is BeginOutcome.STALE
    assert not verbs.end(token="t2", generation=1).copy_seen


def test_old_copy_runs_when_the_later_generation_died(verbs: Verbs, advance: Advance) -> None:
    """A lapsed record stops nobody, whatever its generation: work is never dropped for it."""
    verbs.begin(token="t2", generation=1)
    advance(LEASE + 1)
    assert verbs.begin(token="t1", generation=0).outcome is BeginOutcome.RUN


def test_marker_stops_old_generations_only(verbs: Verbs) -> None:
    """A finished marker of generation 1 stops copies of 0 and 1; a later message of the owner runs."""
    verbs.begin(generation=1)
    verbs.end(generation=1, copies_expected=True)
    assert verbs.begin(token="t2", generation=0).outcome is BeginOutcome.COPY_FINISHED
    assert verbs.begin(token="t2", generation=1).outcome is BeginOutcome.COPY_FINISHED
    assert verbs.begin(token="t2", generation=2).outcome is BeginOutcome.RUN


# ------------------------------------------------------------------------------------ crashes


def test_poison_after_too_many_crashes(verbs: Verbs, advance: Advance) -> None:
    """Each run that began and never ended counts; the message is refused instead of killing the next worker."""
    for n in range(3):
        result = verbs.begin(token=f"t{n}", claim="r", lock="L", max_crashes=3)
        assert (result.outcome, result.crashes) == (BeginOutcome.RUN, n)
        advance(LEASE + 1)
    for token in ("t3", "t4"):
        refused = verbs.begin(token=token, claim="r", lock="L", max_crashes=3)
        assert (refused.outcome, refused.crashes) == (BeginOutcome.POISON, 3)
    assert verbs.holders() == []


def test_crashes_are_forgotten(verbs: Verbs, advance: Advance) -> None:
    """The count lives for crash_memory after the last start."""
    verbs.begin(max_crashes=1, crash_memory=100)
    advance(99)
    assert verbs.begin(token="t2", max_crashes=1, crash_memory=100).outcome is BeginOutcome.POISON
    advance(2)
    assert verbs.begin(token="t2", max_crashes=1, crash_memory=100).outcome is BeginOutcome.RUN


def test_end_resets_the_count(verbs: Verbs, advance: Advance) -> None:
    """A run that ended, or was postponed in the body, is no crash."""
    for action in (ClaimAction.RELEASE, ClaimAction.REQUEUE):
        verbs.begin(max_crashes=1)
        verbs.end(claim_action=action)
    assert verbs.begin(max_crashes=1).crashes == 0


def test_uncounted_runs_are_no_crashes(verbs: Verbs, advance: Advance) -> None:
    """max_crashes=None neither refuses nor counts."""
    for n in range(5):
        assert verbs.begin(token=f"t{n}").outcome is BeginOutcome.RUN
        advance(LEASE + 1)
    assert verbs.begin(token="t9", max_crashes=1).crashes == 0


def test_claim_stays_with_a_crashed_message(verbs: Verbs, advance: Advance) -> None:
    """The redelivered copy of a killed run recognises its own claim and runs on it."""
    verbs.claim()
    verbs.begin(claim="r")
    verbs.end(claim="r", claim_action=ClaimAction.REQUEUE, crashed=True)
    assert verbs.claim("o2").outcome is ClaimOutcome.HELD
    result = verbs.begin(token="t2", claim="r")
    assert (result.outcome, result.claim_lost) == (BeginOutcome.RUN, False)
