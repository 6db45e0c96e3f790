"""Work that must reach the store although the thread that found out must not wait for it.

A worker's main process learns that a child died inside its event loop: a blocking call there would
stop the whole worker. And a claim whose release failed is released when the store is back. One
daemon thread per process, started by the first item; an item is tried until it succeeds or grows
too old (by then its lease or ttl has ended the matter).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from celery_guard.errors import StoreUnavailable

__all__ = ["Backlog"]

logger = logging.getLogger("celery_guard")

FIRST_PAUSE = 0.2
LONGEST_PAUSE = 5.0


class Backlog:
    """A queue of store calls with a thread of its own.

    Args:
        patience: Seconds after which an item that keeps failing is dropped.
        limit: Most items to hold; beyond it the oldest are dropped (their leases end by themselves).
        monotonic: Clock (seconds).
    """

    def __init__(self, patience: float = 600.0, limit: int = 10_000, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._monotonic = monotonic
        self._items: deque[tuple[float, Callable[[], Any]]] = deque(maxlen=limit)
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._busy = False

    def put(self, call: Callable[[], Any]) -> None:
        """Hand over a call; never blocks. It is repeated while it raises StoreUnavailable."""
        with self._changed:
            self._items.append((self._monotonic() + self._patience, call))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._loop, name="celery_guard-backlog", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until everything is done; False if that takes longer than ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._items and not self._busy, timeout)

    def __len__(self) -> int:
        return len(self._items) + self._busy

    def _loop(self) -> None:
        pause = FIRST_PAUSE
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._items))
                deadline, call = self._items.popleft()
                self._busy = True
            failed = False
            try:
                call()
            except StoreUnavailable as exc:
                failed = True
                if self._monotonic() >= deadline:
                    logger.error("celery_guard: given up, the lease ends it: %s", exc)
            except Exception:
                logger.exception("celery_guard: a call of the backlog failed")
            with self._changed:
                if failed and self._monotonic() < deadline:
                    self._items.appendleft((deadline, call))
                self._busy = False
                self._changed.notify_all()
                if failed:
                    # The server is away for all items alike: wait, but not for new items.
                    end = self._monotonic() + pause
                    while (left := end - self._monotonic()) > 0:
                        self._changed.wait(left)
            pause = min(pause * 2, LONGEST_PAUSE) if failed else FIRST_PAUSE
