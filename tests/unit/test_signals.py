"""Public signals."""

from __future__ import annotations

from typing import Any

import pytest

from celery_guard import signals


def test_every_signal_has_the_name_of_its_decision() -> None:
    """One name for one decision: variable, signal and table agree, and the public list is complete."""
    assert sorted([*signals.SIGNALS, "SIGNALS"]) == sorted(signals.__all__)
    for name, signal in signals.SIGNALS.items():
        assert getattr(signals, name) is signal
        assert vars(signal)["name"] == name


@pytest.mark.parametrize("name", sorted(signals.SIGNALS))
def test_common_data_is_declared(name: str) -> None:
    """Every signal carries task id, resource key, lock key and decision."""
    assert vars(signals.SIGNALS[name])["providing_args"] >= {"task_id", "key", "lock", "decision"}


def test_receivers_are_called_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    """A signal reaches its receivers as one of Celery's, and a receiver that raises stops nobody."""
    seen: list[Any] = []

    def broken(**kwargs: Any) -> None:
        raise RuntimeError("broken receiver")

    def receiver(sender: Any, task_id: str, **kwargs: Any) -> None:
        seen.append((sender, task_id, kwargs["key"]))

    signals.lock_lost.connect(broken)
    signals.lock_lost.connect(receiver)
    try:
        signals.lock_lost.send(sender="shop.f", task_id="id", key="shop.f:1", lock="guard:1:{shop.f:1}:slots", decision="lock_lost", fence=1, duration=2.0)
    finally:
        signals.lock_lost.disconnect(broken)
        signals.lock_lost.disconnect(receiver)
    assert seen == [("shop.f", "id", "shop.f:1")]
    assert "broken receiver" in caplog.text
