"""Claims: one owner at a time, freed by that owner alone, never held for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_guard.decisions import ClaimOutcome, ClaimState
from celery_guard.stores.protocols import GuardStore
from tests.contract.verbs import LEASE, TTL, Verbs


def test_satisfies_the_protocol(store: GuardStore) -> None:
    """Every store offers every verb."""
    assert isinstance(store, GuardStore)


def test_free_claim_is_taken(verbs: Verbs) -> None:
    """A free resource is claimed, and waits as QUEUED for its whole ttl."""
    assert verbs.claim().outcome is ClaimOutcome.CLAIMED
    held = verbs.held()
    assert (held.owner, held.task_id, held.state) == ("o1", "task-o1", ClaimState.QUEUED)
    assert held.expires_at - held.since_at == pytest.approx(TTL, abs=1)


def test_second_owner_learns_who_holds_it(verbs: Verbs, advance: Callable[[float], None]) -> None:
    """A duplicate is told task id, state and age of the holder, so that the caller can wait for its result."""
    verbs.claim()
    advance(40)
    result = verbs.claim("o2")
    assert (result.outcome, result.holder_task_id, result.holder_state) == (ClaimOutcome.HELD, "task-o1", ClaimState.QUEUED)
    assert result.holder_age == pytest.approx(40, abs=1)
    assert verbs.held().owner == "o1"


def test_a_duplicate_does_not_prolong_the_claim(verbs: Verbs, advance: Callable[[float], None]) -> None:
    """Dispatching duplicates without end never keeps a dead claim alive."""
    verbs.claim()
    advance(TTL - 100)
    verbs.claim("o2")
    assert verbs.life() == pytest.approx(100, abs=1)


def test_own_claim_is_renewed(verbs: Verbs, advance: Callable[[float], None]) -> None:
    """A retry meets its own claim, renews its life and keeps the time since which it is held."""
    verbs.claim()
    advance(TTL - 1)
    assert verbs.claim().outcome is ClaimOutcome.OWN
    assert verbs.life() == pytest.approx(TTL, abs=1)
    assert verbs.claim("o2").holder_age == pytest.approx(TTL - 1, abs=1)


def test_own_running_claim_goes_back_to_queued(verbs: Verbs) -> None:
    """A retry that is dispatched during the run turns the claim into one that waits."""
    verbs.claim()
    verbs.begin(claim="r")
    assert verbs.claim().outcome is ClaimOutcome.OWN
    assert verbs.held().state is ClaimState.QUEUED


def test_expired_claim_is_free(verbs: Verbs, advance: Callable[[float], None]) -> None:
    """A claim whose message was lost is free after its ttl."""
    verbs.claim(ttl=50)
    advance(49)
    assert verbs.claim("o2").outcome is ClaimOutcome.HELD
    advance(2)
    assert verbs.claim("o2").outcome is ClaimOutcome.CLAIMED


def test_running_and_done_claims_are_held(verbs: Verbs) -> None:
    """A duplicate is refused while the holder runs and, with until="expired", after it ended."""
    verbs.claim()
    verbs.begin(claim="r", until="expired")
    assert verbs.claim("o2").holder_state is ClaimState.RUNNING
    verbs.end(claim="r", until="expired")
    assert verbs.claim("o2").holder_state is ClaimState.DONE


@pytest.mark.parametrize("text", ["ümlaut 漢字", "a b\nc\r\n$5", "x" * 300, "pct%s{}'"])
def test_text_comes_back_as_it_was(verbs: Verbs, text: str) -> None:
    """Resources, owners and task ids may be any text: users choose task ids and keys."""
    verbs.claim(owner=text, resource=text, task_id=text)
    held = verbs.held(text)
    assert (held.resource, held.owner, held.task_id) == (text, text, text)
    assert verbs.claim("o2", resource=text).holder_task_id == text


def test_release_is_for_the_owner(verbs: Verbs, store: GuardStore) -> None:
    """Only the owner frees a claim, and only once."""
    verbs.claim()
    assert not store.release_claim("r", "o2")
    assert verbs.held().owner == "o1"
    assert store.release_claim("r", "o1")
    assert not store.release_claim("r", "o1")
    assert store.get_claim("r") is None
    assert store.list_claims() == []


def test_release_with_ttl_shortens(verbs: Verbs, store: GuardStore, advance: Callable[[float], None]) -> None:
    """A dispatch of unknown fate leaves a claim with a short life; another owner cannot shorten it."""
    verbs.claim()
    assert not store.release_claim("r", "o2", ttl=5)
    assert verbs.life() == pytest.approx(TTL, abs=1)
    assert store.release_claim("r", "o1", ttl=20)
    assert verbs.life() == pytest.approx(20, abs=1)
    advance(21)
    assert verbs.claim("o2").outcome is ClaimOutcome.CLAIMED


def test_release_with_ttl_never_lengthens(verbs: Verbs, store: GuardStore) -> None:
    """A short claim stays short."""
    verbs.claim(ttl=20)
    assert store.release_claim("r", "o1", ttl=500)
    assert verbs.life() == pytest.approx(20, abs=1)


def test_release_with_ttl_leaves_a_running_claim(verbs: Verbs, store: GuardStore) -> None:
    """The message whose fate was unknown has arrived and runs: its heartbeat keeps the claim."""
    verbs.claim()
    verbs.begin(claim="r")
    assert store.release_claim("r", "o1", ttl=5)
    assert verbs.life() == pytest.approx(LEASE, abs=1)


def test_claims_of_resources_are_independent(verbs: Verbs) -> None:
    """Claiming one resource says nothing about another."""
    verbs.claim(resource="a")
    assert verbs.claim("o2", resource="b").outcome is ClaimOutcome.CLAIMED
