"""Lua scripts of the Redis store and the bytes that call them.

A script is one verb; what several verbs need is put in front of it (files that begin with an
underscore). Calls are packed here and not by redis-py, whose generic path costs the caller three
times the CPU of the round trip itself. This module does no I/O beyond reading its own files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources

__all__ = ["SCRIPTS", "Script", "milliseconds", "pack", "text"]

#: Longest duration that is sent, some 3,000 years: the server refuses an expiry beyond its integers.
_LONGEST_MS = 10**14

_PARTS = {
    "claim": ("_clock", "_claims"),
    "release_claim": ("_clock", "_claims"),
    "begin": ("_clock", "_claims", "_runs", "_slots"),
    "end": ("_clock", "_claims", "_runs", "_slots"),
    "extend": ("_clock", "_claims", "_runs", "_slots", "_retake"),
    "index_page": ("_clock",),
    "show_claims": ("_clock", "_claims"),
    "show_locks": ("_clock",),
    "drop_slot": ("_clock", "_slots"),
    "sweep": ("_clock",),
}


def pack(parts: Sequence[str]) -> bytes:
    """Encode arguments the way the server reads them, without the count in front."""
    packed = []
    for part in parts:
        data = part.encode()
        packed.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(packed)


@dataclass(frozen=True, slots=True)
class Script:
    """One Lua script, ready to be called by its hash or by its text."""

    name: str
    source: str
    _by_hash: bytes = field(init=False, repr=False)
    _by_text: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "_by_hash", pack(("EVALSHA", sha)))
        object.__setattr__(self, "_by_text", pack(("EVAL", self.source)))

    def call(self, keys: Sequence[str], args: Sequence[str]) -> tuple[bytes, bytes]:
        """Pack one call twice: by hash, and by text for a server that does not know the hash.

        The second needs no right to SCRIPT LOAD, and loads the script as well.
        """
        tail = pack((str(len(keys)), *keys, *args))
        count = b"*%d\r\n" % (3 + len(keys) + len(args))
        return count + self._by_hash + tail, count + self._by_text + tail


def milliseconds(seconds: float) -> str:
    """Turn a duration into the whole milliseconds, at least one, that scripts take."""
    return str(min(max(round(seconds * 1000), 1), _LONGEST_MS))


def text(value: bytes) -> str:
    """Turn what the server sent back into the text that was stored."""
    return value.decode()


def _load(name: str, parts: Sequence[str]) -> Script:
    folder = resources.files(__package__) / "lua"
    return Script(name, "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in (*parts, name)))


SCRIPTS = {name: _load(name, parts) for name, parts in _PARTS.items()}
