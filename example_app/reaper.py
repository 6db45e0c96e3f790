"""Clean up after a process that can no longer do it itself.

Run as a script (``python -S -E -s reaper.py``) by ``example_app.processes``, with a pipe from the
process that it serves as standard input. Each line of it is an order::

    +P <pid> <start time>    a process group to end
    -P <pid>                 it has ended
    +D <path>                a directory to remove
    -D <path>                it was removed

The end of the pipe means that the writer is gone, SIGKILL included: end every group, remove every
directory, exit. Imports nothing but the standard library, so that starting it is cheap.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

GRACE = 2.0  # seconds between SIGTERM and SIGKILL


def start_time(pid: int) -> str | None:
    """When the process began, in a form that tells it from a later one with the same pid.

    Returns:
        The kernel's start time; ``"0"`` where there is no ``/proc`` and the process exists; None
        if it does not exist or is a zombie.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except PermissionError:
            return "0"
        except OSError:
            return None
        return "0"
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else fields[19]


class Estate:
    """What is left behind: process groups by pid of their leader, and directories."""

    def __init__(self) -> None:
        self.groups: dict[int, str] = {}
        self.directories: set[str] = set()

    def obey(self, line: str) -> None:
        """Carry out one order of the pipe; an unknown or broken line is ignored."""
        order, _, rest = line.rstrip("\n").partition(" ")
        with contextlib.suppress(ValueError):
            if order == "+P":
                pid, _, began = rest.partition(" ")
                self.groups[int(pid)] = began
            elif order == "-P":
                self.groups.pop(int(rest), None)
            elif order == "+D":
                self.directories.add(rest)
            elif order == "-D":
                self.directories.discard(rest)

    def signal_groups(self, number: int) -> bool:
        """Send a signal to every group; returns whether any still had a member."""
        alive = [pid for pid, began in self.groups.items() if self._signal_group(pid, began, number)]
        return bool(alive)

    @staticmethod
    def _signal_group(pid: int, began: str, number: int) -> bool:
        now = start_time(pid)
        if now is not None and now != began:
            return False  # the pid was given to a stranger
        try:
            # A dead leader does not end its group: the children of a killed worker live on in it.
            os.killpg(pid, number)
        except OSError:
            return False
        return True

    def settle(self) -> None:
        """End all groups, then remove all directories."""
        if self.signal_groups(signal.SIGTERM):
            deadline = time.monotonic() + GRACE
            while self.signal_groups(0) and time.monotonic() < deadline:
                time.sleep(0.02)
            self.signal_groups(signal.SIGKILL)
        for directory in self.directories:
            for _ in range(5):
                shutil.rmtree(directory, ignore_errors=True)
                if not Path(directory).exists():
                    break
                time.sleep(0.1)  # a dying process may still write into it


def main(orders: Iterable[str] = sys.stdin) -> None:
    """Follow the orders until their writer is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the estate outlives it
    estate = Estate()
    for line in orders:
        estate.obey(line)
    estate.settle()


if __name__ == "__main__":
    main()
