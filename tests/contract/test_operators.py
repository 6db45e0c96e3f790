"""What people see and do: lists without scanning, releases that name what was shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_guard.decisions import BeginOutcome, ClaimOutcome
from celery_guard.stores.protocols import GuardStore
from tests.contract.verbs import LEASE, Verbs

Advance = Callable[[float], None]


def test_lists_are_empty_at_first(store: GuardStore) -> None:
    """Nothing held, nothing shown."""
    assert (store.list_claims(), store.list_locks(), store.get_claim("r"), store.get_lock("L"), store.sweep()) == ([], [], None, None, 0)


def test_claims_are_listed_by_expiry(verbs: Verbs, store: GuardStore, advance: Advance) -> None:
    """Soonest first, without what has expired."""
    for ttl in (300, 100, 200, 50):
        verbs.claim(f"o{ttl}", resource=f"r{ttl}", ttl=ttl)
    advance(60)
    assert [claim.resource for claim in store.list_claims()] == ["r100", "r200", "r300"]


def test_claims_are_listed_in_pages(verbs: Verbs, store: GuardStore) -> None:
    """Pages follow each other without gaps or repetitions."""
    names = [f"r{n:02}" for n in range(25)]
    for n, name in enumerate(names):
        verbs.claim(resource=name, ttl=100 + n)
    seen: list[str] = []
    while page := store.list_claims(limit=10, after=seen[-1] if seen else None):
        assert len(page) <= 10
        seen += [claim.resource for claim in page]
    assert seen == names
    assert store.list_claims(limit=0) == []


def test_a_page_after_what_is_gone_starts_anew(verbs: Verbs, store: GuardStore) -> None:
    """The resource that ended the page before was released: nothing is left out."""
    for name in ("a", "b"):
        verbs.claim(resource=name)
    assert len(store.list_claims(after="gone")) == 2


def test_locks_are_listed_in_pages(verbs: Verbs, store: GuardStore, advance: Advance) -> None:
    """Locks with a live holder, by the end of their longest lease."""
    for n in (3, 1, 2, 0):
        verbs.begin(f"o{n}", f"t{n}", lock=f"L{n}", lease=20 + 10 * n)
    verbs.begin("o9", "t9", lock="L2", limit=2, lease=200)
    advance(25)
    assert [lock.resource for lock in store.list_locks()] == ["L1", "L3", "L2"]
    assert [lock.resource for lock in store.list_locks(limit=1, after="L1")] == ["L3"]
    advance(20)
    assert [[holder.token for holder in lock.holders] for lock in store.list_locks()] == [["t3"], ["t9"]]


def test_many_are_listed(verbs: Verbs, store: GuardStore) -> None:
    """More than one chunk of the index is read."""
    for n in range(2500):
        verbs.claim(resource=f"r{n}", ttl=1000 + n)
    assert len(store.list_claims(limit=2400)) == 2400


def test_forced_release_of_a_claim_names_its_owner(verbs: Verbs, store: GuardStore) -> None:
    """The claim changed hands since it was shown: it is not freed; else it is, whatever its state."""
    verbs.claim()
    verbs.begin(claim="r")
    assert not store.force_release_claim("r", "o2")
    assert store.force_release_claim("r", "o1")
    assert not store.force_release_claim("r", "o1")
    assert store.list_claims() == []
    assert verbs.claim("o2").outcome is ClaimOutcome.CLAIMED


def test_forced_release_of_a_slot_names_its_token(verbs: Verbs, store: GuardStore) -> None:
    """Only the slot that was shown is taken away; the next run gets it."""
    verbs.begin("o1", "t1", lock="L", limit=2)
    verbs.begin("o2", "t2", lock="L", limit=2)
    assert not store.force_release_slot("L", "t9")
    assert not store.force_release_slot("other", "t1")
    assert store.force_release_slot("L", "t1")
    assert not store.force_release_slot("L", "t1")
    assert verbs.holders() == ["t2"]
    assert verbs.begin("o3", "t3", lock="L", limit=2).outcome is BeginOutcome.RUN
    for token in ("t2", "t3"):
        store.force_release_slot("L", token)
    assert (store.list_locks(), store.get_lock("L")) == ([], None)


def test_forced_release_of_a_lapsed_slot(verbs: Verbs, store: GuardStore, advance: Advance) -> None:
    """It had ended already."""
    verbs.begin(lock="L")
    advance(LEASE + 1)
    assert not store.force_release_slot("L", "t1")


def test_sweep_drops_what_expired(verbs: Verbs, store: GuardStore, advance: Advance) -> None:
    """Entries of what expired are dropped, those of what lives stay, and the number is told."""
    for n in range(2100):
        verbs.claim(resource=f"r{n}", ttl=10)
    verbs.claim(resource="stays")
    verbs.begin("o1", "t1", lock="L1", lease=10)
    verbs.begin("o2", "t2", lock="L2", lease=1000)
    advance(11)
    assert store.sweep() == 2101
    assert store.sweep() == 0
    assert [claim.resource for claim in store.list_claims()] == ["stays"]
    assert [lock.resource for lock in store.list_locks()] == ["L2"]


def test_renewals_keep_the_index_in_step(verbs: Verbs, store: GuardStore, advance: Advance) -> None:
    """What is extended past its first expiry is neither swept nor missing in the lists."""
    verbs.claim(ttl=10)
    fence = verbs.begin(claim="r", lock="L").fence
    for _ in range(3):
        advance(LEASE - 1)
        verbs.extend(claim="r", lock="L", fence=fence)
    assert store.sweep() == 0
    assert [claim.resource for claim in store.list_claims()] == ["r"]
    assert [lock.resource for lock in store.list_locks()] == ["L"]


def test_store_tells_of_itself(store: GuardStore) -> None:
    """It answers, names itself without a password, and can be used after close."""
    store.ping()
    assert "://" in store.address
    assert store.facts().kind in ("memory", "redis", "valkey")
    store.close()
    store.ping()


@pytest.mark.parametrize("resource", ["r", "r:claim", "index:claims"])
def test_names_do_not_collide(verbs: Verbs, store: GuardStore, resource: str) -> None:
    """A resource may be called like a kind of key, and claim, lock and owner may have one name."""
    assert verbs.claim(owner=resource, resource=resource).outcome is ClaimOutcome.CLAIMED
    assert verbs.begin(owner=resource, token=resource, claim=resource, lock=resource).outcome is BeginOutcome.RUN
    assert [claim.resource for claim in store.list_claims()] == [resource]
    assert verbs.end(owner=resource, token=resource, claim=resource, lock=resource).slot_released
