"""One random story told to both stores: they answer alike, step by step.

Durations are multiples of ten seconds, so that the milliseconds that a real server takes decide nothing.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from celery_guard.decisions import BeginOutcome, BeginRequest, ClaimAction, ClaimRequest, EndRequest, ExtendRequest
from celery_guard.stores.memory import MemoryStore
from celery_guard.stores.redis import RedisStore
from tests.contract.clocks import AgedData, FakeClock

CLOSE = 5.0

owners = st.sampled_from(["o1", "o2", "o3"])
tokens = st.sampled_from(["t1", "t2", "t3", "t4"])
resources = st.sampled_from(["r1", "r2"])
maybe_claim = st.one_of(st.none(), resources)
maybe_lock = st.sampled_from([None, "L1", "L1", "L2"])
untils = st.sampled_from(["executed", "executing", "expired"])
ttls = st.sampled_from([20.0, 40.0, 200.0])
leases = st.sampled_from([20.0, 30.0])
limits = st.sampled_from([1, 1, 2])
generations = st.sampled_from([0, 0, 1, 2])
TIMES = {"holder_age", "retry_in"}


def near(one: float | None, other: float | None) -> bool:
    """Whether two durations are the same but for the time that a server takes."""
    return one is other or (one is not None and other is not None and abs(one - other) < CLOSE)


def same(memory: Any, real: Any) -> None:
    """Compare two results field by field; durations roughly, fences and holders of a busy lock by whether there is one."""
    assert type(memory) is type(real)
    for name in type(memory).__dataclass_fields__:
        one, other = getattr(memory, name), getattr(real, name)
        if name in TIMES:
            assert near(one, other), (name, memory, real)
        elif name in ("fence", "now_at") or (name == "holder_task_id" and memory.outcome is BeginOutcome.BUSY):
            # Of slots that end together either may be named: only the real clock tells them apart.
            assert (one is None) == (other is None), (name, memory, real)
        else:
            assert one == other, (name, memory, real)


class SideBySide(RuleBasedStateMachine):
    """Drives both stores with the same requests."""

    url: str
    client: redis.Redis
    redis_store: RedisStore

    def __init__(self) -> None:
        super().__init__()
        prefix = f"s{uuid.uuid4().hex[:12]}"
        self.real = RedisStore(self.redis_store._link, prefix)
        self.aged = AgedData(self.client, prefix)
        self.clock = FakeClock()
        self.memory = MemoryStore(clock=self.clock)
        self.fences: dict[str, tuple[int, int]] = {}
        self.granted: dict[str | None, set[tuple[int, int]]] = {}
        self.requests: list[BeginRequest] = []

    def teardown(self) -> None:
        if keys := self.aged.list_keys():
            self.client.delete(*keys)

    @rule(resource=resources, owner=owners, ttl=ttls)
    def claim(self, resource: str, owner: str, ttl: float) -> None:
        request = ClaimRequest(resource, owner, f"task-{owner}", ttl)
        same(self.memory.claim(request), self.real.claim(request))

    @rule(resource=resources, owner=owners, ttl=st.one_of(st.none(), ttls))
    def release_claim(self, resource: str, owner: str, ttl: float | None) -> None:
        assert self.memory.release_claim(resource, owner, ttl) == self.real.release_claim(resource, owner, ttl)

    @rule(
        owner=owners,
        token=tokens,
        generation=generations,
        claim=maybe_claim,
        lock=maybe_lock,
        until=untils,
        lease=leases,
        claim_ttl=ttls,
        limit=limits,
        contender=st.booleans(),
        max_crashes=st.sampled_from([None, 1, 2]),
    )
    def begin(self, owner: str, token: str, generation: int, **options: Any) -> None:
        # A token belongs to one delivery of one message, so it carries the owner.
        request = BeginRequest(owner, f"{owner}{token}", generation, f"task-{owner}", "w", crash_memory=100.0, **options)
        self._begin(request)
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def begin_again(self, data: st.DataObject) -> None:
        """The answer was lost."""
        self._begin(data.draw(st.sampled_from(self.requests)))

    def _begin(self, request: BeginRequest) -> None:
        memory, real = self.memory.begin(request), self.real.begin(request)
        same(memory, real)
        # A run that extends what it was never granted has no fence.
        if memory.outcome is BeginOutcome.RUN and memory.fence and real.fence:
            pair = (memory.fence, real.fence)
            self.fences[f"{request.lock}{request.token}"] = pair
            # Fences of both stores grow together: sorting by one sorts by the other.
            seen = self.granted.setdefault(request.lock, set())
            seen.add(pair)
            assert [real for _, real in sorted(seen)] == sorted(real for _, real in seen)

    @rule(
        owner=owners,
        token=st.one_of(st.none(), tokens),
        generation=generations,
        claim=maybe_claim,
        lock=maybe_lock,
        until=untils,
        claim_action=st.sampled_from(ClaimAction),
        claim_ttl=ttls,
        crashed=st.booleans(),
        copies_expected=st.booleans(),
    )
    def end(self, owner: str, token: str | None, generation: int, **options: Any) -> None:
        request = EndRequest(owner, token and f"{owner}{token}", generation, finished_ttl=40.0, task_id="late", **options)
        same(self.memory.end(request), self.real.end(request))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), claim_action=st.sampled_from(ClaimAction), crashed=st.booleans(), copies_expected=st.booleans())
    def end_one(self, data: st.DataObject, claim_action: ClaimAction, crashed: bool, copies_expected: bool) -> None:
        """End what was begun (or an attempt of it), with all that it named."""
        begun = data.draw(st.sampled_from(self.requests))
        request = EndRequest(begun.owner, begun.token, begun.generation, begun.claim, begun.until, claim_action, begun.claim_ttl, begun.lock)
        request = replace(request, crashed=crashed, copies_expected=copies_expected, finished_ttl=40.0)
        same(self.memory.end(request), self.real.end(request))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.requests), min_size=1, max_size=4))
        pairs = [self._extensions(begun) for begun in chosen]
        for memory, real in zip(self.memory.extend([one for one, _ in pairs]), self.real.extend([other for _, other in pairs]), strict=True):
            same(memory, real)

    def _extensions(self, begun: BeginRequest) -> tuple[ExtendRequest, ExtendRequest]:
        memory, real = self.fences.get(f"{begun.lock}{begun.token}", (None, None))
        claim = begun.claim if begun.until == "executed" else None
        memory_request = ExtendRequest(
            begun.owner,
            begun.token,
            begun.generation,
            begun.task_id,
            "w",
            begun.lease,
            claim,
            begun.lock,
            begun.limit,
            memory,
            0.0 if begun.max_crashes is None else 100.0,
        )
        return memory_request, replace(memory_request, fence=real)

    @rule(seconds=st.sampled_from([10, 20, 30, 100]))
    def advance(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.aged.advance(seconds)

    @rule()
    def sweep(self) -> None:
        assert self.memory.sweep() == self.real.sweep()

    @rule(resource=resources, owner=owners)
    def force_release_claim(self, resource: str, owner: str) -> None:
        assert self.memory.force_release_claim(resource, owner) == self.real.force_release_claim(resource, owner)

    @rule(lock=st.sampled_from(["L1", "L2"]), owner=owners, token=tokens)
    def force_release_slot(self, lock: str, owner: str, token: str) -> None:
        assert self.memory.force_release_slot(lock, owner + token) == self.real.force_release_slot(lock, owner + token)

    @invariant()
    def same_claims(self) -> None:
        memory = {claim.resource: claim for claim in self.memory.list_claims()}
        real = {claim.resource: claim for claim in self.real.list_claims()}
        assert memory.keys() == real.keys()
        for resource, one in memory.items():
            other = real[resource]
            assert (one.owner, one.task_id, one.state) == (other.owner, other.task_id, other.state)
            assert near(one.expires_at - one.since_at, other.expires_at - other.since_at)
            shown = self.real.get_claim(resource)
            assert shown is not None
            assert (shown.owner, shown.task_id, shown.state) == (other.owner, other.task_id, other.state)

    @invariant()
    def same_locks(self) -> None:
        memory = {lock.resource: lock for lock in self.memory.list_locks()}
        real = {lock.resource: lock for lock in self.real.list_locks()}
        assert memory.keys() == real.keys()
        for resource, one in memory.items():
            assert {holder.token: holder.task_id for holder in one.holders} == {holder.token: holder.task_id for holder in real[resource].holders}

    @invariant()
    def nothing_stays_for_ever(self) -> None:
        """Every key but the two indexes, which are swept, expires by itself."""
        for key in self.aged.list_keys():
            if b":index:" not in key:
                assert self.client.pttl(key) != -1, key


def test_both_stores_answer_alike(redis_url: str, redis_client: redis.Redis) -> None:
    """The memory store may stand in for Redis in users' tests, since no story tells them apart."""
    store = RedisStore.from_url(redis_url)
    machine = type("Machine", (SideBySide,), {"client": redis_client, "redis_store": store})
    limits = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=False)
    try:
        run_state_machine_as_test(machine, settings=limits)
    finally:
        store.close()


@pytest.mark.parametrize("one", [None, 1.0])
def test_comparison_can_fail(one: float | None) -> None:
    """The comparison of durations tells different ones apart."""
    assert near(one, one)
    assert not near(one, 20.0)
