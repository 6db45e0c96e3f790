"""Public signals: one for each decision, sent in the process that took it.

Connect as to Celery's own signals::

    from celery_guard import signals

    @signals.lock_lost.connect
    def page_somebody(sender, task_id, key, **kwargs): ...

The sender is the task (object, not name; the name as text where the process does not know the
task). A receiver takes ``**kwargs``, since later versions add data. An exception in a receiver is
logged by Celery and changes nothing.

Every signal carries ``task_id``, ``key`` (what is guarded: the claim's resource key, or the lock's
for a task without ``unique``), ``lock`` (the lock's resource key, if one plays a part),
``decision`` (the name of the signal) and what is listed with it below; a value that is not known is
None. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from celery.utils.dispatch import Signal

__all__ = [
    "SIGNALS",
    "claim_expired_before_start",
    "copy_dropped",
    "copy_postponed",
    "deduplicated",
    "dispatched",
    "duplicate_continues",
    "lock_acquired",
    "lock_expired",
    "lock_lost",
    "lock_released",
    "postponed_overlap",
    "superseded",
]

_COMMON: Final = ("task_id", "key", "lock", "decision")


def _signal(name: str, *data: str) -> Signal:
    return Signal(name=name, providing_args=[*_COMMON, *data])


#: A guarded message was sent. ``ttl``: life of its claim, delay until the ETA included.
dispatched = _signal("dispatched", "ttl")

#: A dispatch found its key claimed and sent nothing. ``task_id``: id that the message would have
#: had. ``holder``: id of the task that holds the claim. ``state``: "queued" or "running".
#: ``age``: since the claim was taken.
deduplicated = _signal("deduplicated", "holder", "state", "age")

#: A duplicate went its way without a claim, since a workflow waits for exactly its message. Data as
#: of ``deduplicated``.
duplicate_continues = _signal("duplicate_continues", "holder", "state", "age")

#: The broker delivered a message a second time while its run goes on: the copy was postponed, and is
#: needed only if that run dies. ``holder``: id of the task.
copy_postponed = _signal("copy_postponed", "holder")

#: The broker delivered a message again that has run to its end, or whose retry runs: the copy was
#: dropped. ``reason``: "copy_finished" or "stale". ``holder``: id of the task.
copy_dropped = _signal("copy_dropped", "reason", "holder")

#: A message ended in the worker without a run, as REVOKED. ``reason``: text. ``holder``: id of the
#: task in its place.
superseded = _signal("superseded", "reason", "holder")

#: A run got its slot. ``fence``: fencing number. ``attempt``: postponements before it. ``waited``:
#: since the first of them.
lock_acquired = _signal("lock_acquired", "fence", "attempt", "waited")

#: A run gave its slot back. ``duration``: how long it was held. ``reason``: "on behalf" if the
#: worker's main process did it for a run that could not, else None.
lock_released = _signal("lock_released", "duration", "reason")

#: A running task lost its slot to another, or to an operator. ``fence``. ``duration``: since it was
#: acquired. ``reason``: "taken".
lock_lost = _signal("lock_lost", "fence", "duration", "reason")

#: The lease of a running task lapsed (or ``max_hold`` ended its renewal): another run may begin.
#: ``fence``. ``duration``: since it was acquired. ``reason``: "max_hold", "unreachable" (the
#: store was, for a whole lease) or "expired" (found at the end of the run).
lock_expired = _signal("lock_expired", "fence", "duration", "reason")

#: A run found no free slot and was postponed; no retry was spent. ``attempt``: from 1.
#: ``delay``: until the next attempt. ``holder``: id of a task that holds a slot.
postponed_overlap = _signal("postponed_overlap", "attempt", "delay", "holder")

#: A message ran although its claim had expired while it waited: its ``ttl`` is too short for the
#: queue.
claim_expired_before_start = _signal("claim_expired_before_start")

#: All signals by the name of their decision.
SIGNALS: Mapping[str, Signal] = MappingProxyType(
    {
        "dispatched": dispatched,
        "deduplicated": deduplicated,
        "duplicate_continues": duplicate_continues,
        "copy_postponed": copy_postponed,
        "copy_dropped": copy_dropped,
        "superseded": superseded,
        "lock_acquired": lock_acquired,
        "lock_released": lock_released,
        "lock_lost": lock_lost,
        "lock_expired": lock_expired,
        "postponed_overlap": postponed_overlap,
        "claim_expired_before_start": claim_expired_before_start,
    }
)
