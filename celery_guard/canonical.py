"""The canonical form of an argument: the bytes that decide whether two values are the same.

The canonical form of a value is what the worker sees after the message's serializer: values that
kombu's JSON turns into one another (tuple and list, ``{1: x}`` and ``{"1": x}``, an ``IntEnum`` and
its int) have one form, and a value has one form before and after its trip through JSON or pickle.
Otherwise two values share a form only if they are of one kind and equal:

- ``1``, ``1.0``, ``"1"`` and ``True`` are four values; so are None and ``"None"``, a UUID and its text;
- ``-0.0`` is ``0.0``, every NaN is one value, ``Decimal("1.10")`` is ``Decimal("1.1")``;
- aware datetimes count as instants, naive ones as they are written; ``fold`` is lost in JSON and does not count;
- an Enum member is its value; a dataclass or pydantic instance is the name of its class and its fields;
- text is compared by code points, without Unicode normalization.

Values are never passed to ``repr()`` or ``hash()``. This module imports no Celery, Redis, clock or random.

Source: kombu/utils/json.py (kombu 5.7), for what each type looks like when it comes back.
"""

from __future__ import annotations

import dataclasses
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from hashlib import blake2b
from typing import Any
from uuid import UUID

from celery_guard.errors import KeyDerivationError

__all__ = ["Unkeyable", "canonical", "digest", "encoded", "plain", "reduce", "text_bytes"]

#: Deepest nesting of an argument; a value that contains itself is found by it too.
MAX_DEPTH = 100
#: Longer ints are never written in decimal: Python refuses beyond 4300 digits, and it costs quadratic time.
MAX_DECIMAL_BITS = 10_000


class Unkeyable(Exception):
    """A value has no canonical form.

    Attributes:
        reason: What is wrong with it, to be read after "the value of ...".
        steps: Path from the argument down to the value at fault, innermost first.
        cause: The exception of the value's own code, or None.
    """

    def __init__(self, reason: str, *steps: str, cause: BaseException | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps = list(steps)
        self.cause = cause

    @property
    def path(self) -> str:
        """The path as one would write it in code, ``order.items[3]``; long ones are cut in the middle."""
        steps = self.steps[::-1]
        if len(steps) > 12:
            steps = [*steps[:6], " ... ", *steps[-3:]]
        return "".join(steps)


def canonical(value: Any) -> bytes:
    """Encode a value in its canonical form.

    Args:
        value: Any argument of a task.

    Returns:
        A self-delimiting encoding: no encoding is the beginning of another.

    Raises:
        KeyDerivationError: If the value, or something in it, has no canonical form.
    """
    try:
        return encoded(value)
    except Unkeyable as exc:
        raise KeyDerivationError(f"value{exc.path} {exc.reason}", argument=exc.path or None) from exc.cause


def digest(data: bytes) -> str:
    """BLAKE2b-128 in hex."""
    return blake2b(data, digest_size=16).hexdigest()


def encoded(value: Any) -> bytes:
    """Do the work of ``canonical`` for callers that know where the value comes from.

    Raises:
        Unkeyable: If the value, or something in it, has no canonical form.
    """
    out: list[bytes] = []
    _encode(value, out, 0)
    return b"".join(out)


def text_bytes(text: str) -> bytes:
    """Encode text in UTF-8; surrogate pairs become one character, as JSON makes them."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return joined.encode("utf-8", "surrogatepass")


def _encode(value: Any, out: list[bytes], depth: int) -> None:
    kind = type(value)
    if kind is str:  # the common kinds first: reduce() costs as much as all the rest
        tag, payload = "s", value
    elif kind is int:
        out.append(b"i%x;" % value)
        return
    else:
        tag, payload = reduce(value, depth)
    if tag in ("n", "T", "F"):
        out.append(tag.encode())
    elif tag == "i":
        out.append(b"i%x;" % payload)
    elif tag == "l":
        out.append(b"l%d:" % len(payload))
        for position, item in enumerate(payload):
            try:
                _encode(item, out, depth + 1)
            except Unkeyable as exc:
                exc.steps.append(f"[{position}]")
                raise
    elif tag == "m":
        _encode_map(payload, out, depth, "[{}]")
    elif tag == "o":
        name, members = payload
        out.append(b"o")
        _encode(name, out, depth)
        _encode_map(members, out, depth, ".{}")
    elif tag == "e":
        members = sorted(_encoded_members(payload, depth))
        out.append(b"e%d:" % len(members))
        out.extend(members)
    else:
        data = payload if tag == "x" else text_bytes(payload)
        out.append(b"%s%d:" % (tag.encode(), len(data)))
        out.append(data)


def _encode_map(members: Mapping[Any, Any], out: list[bytes], depth: int, step: str) -> None:
    pairs = sorted(((_encoded_key(key, depth), key, item) for key, item in members.items()), key=lambda pair: pair[0])
    out.append(b"m%d:" % len(pairs))
    before = b""
    for name, key, item in pairs:
        if name == before:
            raise Unkeyable("has two keys that are one after serialization, such as 1 and '1'")
        before = name
        out.append(name)
        try:
            _encode(item, out, depth + 1)
        except Unkeyable as exc:
            exc.steps.append(step.format(_key_label(key)))
            raise


def _encoded_key(key: Any, depth: int) -> bytes:
    text = _json_key(key)
    out: list[bytes] = []
    try:
        _encode(key if text is None else text, out, depth + 1)
    except Unkeyable as exc:
        exc.steps.append("{key}")
        raise
    return b"".join(out)


def _encoded_members(members: Any, depth: int) -> Iterator[bytes]:
    for member in members:
        out: list[bytes] = []
        try:
            _encode(member, out, depth + 1)
        except Unkeyable as exc:
            exc.steps.append("{member}")
            raise
        yield b"".join(out)


def _json_key(key: Any) -> str | None:
    """The text that JSON makes of a map's key, or None where only pickle can carry it."""
    kind = type(key)
    if issubclass(kind, str):
        return str.__str__(key)
    if key is None:
        return "null"
    if kind is bool:
        return "true" if key else "false"
    if issubclass(kind, int) and key.bit_length() < MAX_DECIMAL_BITS:
        return int.__repr__(key)
    if issubclass(kind, float):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(float.__repr__(key), float.__repr__(key))
    return None


def _key_label(key: Any) -> str:
    return _json_key(key) or type(key).__name__


def reduce(value: Any, depth: int = 0) -> tuple[str, Any]:
    """Reduce a value to one of the few kinds that have an encoding.

    Returns:
        A tag and its payload: ``n`` None; ``T``, ``F`` booleans; ``i`` int; ``l`` a list or tuple;
        ``m`` a mapping; ``o`` (class name, mapping); ``e`` the members of a set; ``x`` bytes; and,
        as text, ``f`` float, ``s`` str, ``u`` UUID, ``d`` Decimal, ``D`` date, ``t`` datetime,
        ``h`` time, ``p`` timedelta.

    Raises:
        Unkeyable: If the value has no canonical form.
    """
    if depth > MAX_DEPTH:
        raise Unkeyable(f"is nested deeper than {MAX_DEPTH} levels or contains itself")
    # type() and not isinstance(): a lazy proxy claims to be the class of what it hides.
    kind = type(value)
    if value is None:
        return "n", None
    if kind is bool:
        return ("T" if value else "F"), value
    if issubclass(kind, str):
        return "s", str.__str__(value)
    if issubclass(kind, int):
        return "i", int.__index__(value)
    if issubclass(kind, float):
        return "f", float.__repr__(float.__add__(value, 0.0))  # -0.0 + 0.0 is 0.0
    if issubclass(kind, list | tuple):
        return "l", value
    if issubclass(kind, dict):
        decoded = _decoded_envelope(value)
        return ("m", value) if decoded is None else reduce(decoded, depth + 1)
    return _TYPED[kind](value) if kind in _TYPED else _reduce_object(kind, value, depth)


def _reduce_object(kind: type, value: Any, depth: int) -> tuple[str, Any]:
    if hasattr(kind, "__json__"):  # kombu asks it before it looks at the type
        return reduce(_ask(value, "__json__", value.__json__), depth + 1)
    if _is_lazy_text(kind):
        return "s", _ask(value, "str()", value.__str__)
    for base, describe in _TYPED.items():
        if issubclass(kind, base):
            return describe(value)
    if issubclass(kind, Enum):
        try:
            return reduce(value.value, depth + 1)
        except Unkeyable as exc:
            exc.steps.append(".value")
            raise
    # The class counts: OrderPlaced(id=1) and OrderCancelled(id=1) are not the same work.
    name = f"{kind.__module__}.{kind.__qualname__}"
    if dataclasses.is_dataclass(kind):
        return "o", (name, _ask(value, "its fields", lambda: {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}))
    if hasattr(kind, "model_dump"):
        dumped = _ask(value, "model_dump()", value.model_dump)
        return "o", (name, dumped if isinstance(dumped, dict) else {"root": dumped})
    raise Unkeyable(f"is of type {name}, which has no canonical form")


def _ask(value: Any, what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RecursionError:
        raise
    except Exception as exc:
        raise Unkeyable(f"is of type {type(value).__qualname__}, whose {what} raised {type(exc).__name__}", cause=exc) from exc


def _is_lazy_text(kind: type) -> bool:
    """Tell Django's lazy translations, without importing Django."""
    return any(base.__name__ == "Promise" and base.__module__ == "django.utils.functional" for base in kind.__mro__)


def _datetime(value: datetime) -> tuple[str, str]:
    # Rebuilt from its numbers: subclasses bring their own isoformat() and arithmetic.
    wall = datetime(value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)  # noqa: DTZ001 - the offset is taken off below
    offset = value.utcoffset()
    if offset is None:
        return "t", wall.isoformat()
    try:
        return "t", (wall - offset).isoformat() + "Z"
    except OverflowError:  # within a day of the year 1 or 9999
        return "t", f"{wall.isoformat()}{offset.total_seconds():+}"


def _time(value: time) -> tuple[str, str]:
    wall = time(value.hour, value.minute, value.second, value.microsecond).isoformat()
    offset = value.utcoffset()
    return "h", wall if offset is None else f"{wall}{offset.total_seconds():+}"


def _decimal(value: Decimal) -> tuple[str, str]:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        return "d", {"F": "-Infinity" if sign else "Infinity"}.get(exponent, "NaN")
    # Not normalize(): it rounds to the precision of the thread's decimal context.
    significant = "".join(map(str, digits)).rstrip("0")
    if not significant:
        return "d", "0"
    exponent += len(digits) - len(significant)
    text = f"-{significant}" if sign else significant
    if exponent == 0:
        return "d", text
    if -len(significant) < exponent < 0:
        return "d", f"{text[:exponent]}.{text[exponent:]}"
    return "d", f"{text}E{exponent}"


#: kombu's order: a datetime is a date as well. timedelta and bytearray travel only by pickle.
_TYPED: dict[type, Callable[[Any], tuple[str, Any]]] = {
    datetime: _datetime,
    date: lambda value: ("D", date(value.year, value.month, value.day).isoformat()),
    time: _time,
    Decimal: _decimal,
    UUID: lambda value: ("u", str(UUID(int=value.int))),
    bytes: lambda value: ("x", bytes(value)),
    bytearray: lambda value: ("x", bytes(value)),
    timedelta: lambda value: ("p", str((value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds)),
    set: lambda value: ("e", value),
    frozenset: lambda value: ("e", value),
}

_ENVELOPES: dict[Any, Callable[[Any], Any]] = {
    "bytes": lambda text: text.encode(),
    "base64": lambda text: b64decode(text.encode()),
    "datetime": datetime.fromisoformat,
    "date": lambda text: datetime.fromisoformat(text).date(),
    "time": time.fromisoformat,
    "decimal": Decimal,
    "uuid": lambda fields: UUID(**fields),
}


def _decoded_envelope(value: dict[Any, Any]) -> Any | None:
    """Decode a map that kombu's JSON turns into a typed value on arrival; None for every other map.

    A body that was read with a plain JSON reader and is sent again contains such maps.
    """
    if len(value) != 2 or "__type__" not in value or "__value__" not in value:
        return None
    marker = value["__type__"]
    decode = _ENVELOPES.get(marker) if isinstance(marker, str) else None
    if decode is None:
        return None
    try:
        return decode(value["__value__"])
    except (ValueError, TypeError, ArithmeticError, AttributeError):  # the same failure in the worker's loads(): pickle alone can carry this map, as a map
        return None


def plain(value: Any, depth: int = 0) -> Any:
    """Turn a value into JSON-able data for people: typed values as text, objects as maps.

    Raises:
        Unkeyable: If the value, or something in it, has no canonical form.
    """
    tag, payload = reduce(value, depth)
    if tag == "l":
        return [plain(item, depth + 1) for item in payload]
    if tag == "e":
        return [plain(item, depth + 1) for item in sorted(payload, key=encoded)]
    if tag == "m":
        return {_key_label(key) if _json_key(key) is not None else str(plain(key, depth + 1)): plain(item, depth + 1) for key, item in payload.items()}
    if tag == "o":
        return plain(payload[1], depth + 1)
    if tag == "f":
        return float(payload)
    if tag == "x":
        try:
            return payload.decode()
        except UnicodeDecodeError:
            return payload.hex()
    if tag == "p":
        return f"{int(payload) / 1_000_000}s"
    if tag == "i" and payload.bit_length() >= MAX_DECIMAL_BITS:
        return f"{payload:#x}"
    return payload
