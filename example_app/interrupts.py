"""Signals that end the demo, as an exception at a moment when nothing is half started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "Interrupts"]


class Interrupted(BaseException):
    """A signal asked us to stop; ``number`` is the signal's. Not an Exception, so that nothing swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupts:
    """Turns SIGINT, SIGTERM and SIGHUP into ``Interrupted``, once: what comes while cleaning up is ignored."""

    def __init__(self) -> None:
        self._held_back = False
        self._pending: int | None = None
        self._done = False

    def install(self) -> None:
        """Take the signals of this process; one that it was started to ignore (nohup) stays ignored."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._held_back:
            self._pending = self._pending or number
        elif not self._done:
            self._done = True
            raise Interrupted(number)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Let a process start and be registered before a signal is heard."""
        self._held_back = True
        try:
            yield
        finally:
            self._held_back = False
            if self._pending is not None and not self._done:
                self._done = True
                raise Interrupted(self._pending)
