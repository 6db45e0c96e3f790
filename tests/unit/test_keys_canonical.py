"""The canonical form: one for each value, before and after its trip through a serializer."""

from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys
import uuid
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal, localcontext
from enum import Enum, IntEnum, StrEnum
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.serialization import dumps, loads

from celery_guard.canonical import MAX_DEPTH, canonical, plain
from celery_guard.errors import KeyDerivationError


class Level(IntEnum):
    HIGH = 1


class Name(StrEnum):
    A = "x"


class Colour(Enum):
    RED = 1
    BLUE = "b"
    ODD = complex(0, 1)


class Labelled(str, Enum):  # noqa: UP042 - StrEnum would not take the tuple
    A = ("x", "a label")

    def __new__(cls, text: str, label: str) -> Labelled:
        member = str.__new__(cls, text)
        member._value_ = (text, label)
        return member

    def __repr__(self) -> str:  # Enum's own fails: it hands the tuple to str's
        return self._name_


@dataclasses.dataclass
class Placed:
    order: int
    tags: Any = ()


@dataclasses.dataclass
class Cancelled:
    order: int
    tags: Any = ()


class Jsonable:
    def __json__(self) -> Any:
        return {"j": (1, 2)}


class Broken:
    def __json__(self) -> Any:
        raise ZeroDivisionError("no")


class Day(date, Enum):
    FIRST = (2026, 3, 1)


Point = namedtuple("Point", "x y")  # noqa: PYI024 - the plain kind is what is under test


def trip(value: Any, serializer: str) -> Any:
    content_type, encoding, body = dumps(value, serializer=serializer)
    return loads(body, content_type, encoding, accept=[content_type])


offsets = st.integers(-86_399, 86_399).map(lambda seconds: timezone(timedelta(seconds=seconds)))
zones = st.none() | offsets | st.sampled_from([UTC, ZoneInfo("Europe/Berlin"), ZoneInfo("America/St_Johns")])
any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates too
json_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | any_text
    | st.binary()
    | st.uuids()
    | st.decimals()
    | st.dates()
    | st.times(timezones=zones)
    | st.datetimes(timezones=zones)
    | st.sampled_from([Level.HIGH, Name.A, Labelled.A, Day.FIRST, Jsonable()])
)
json_keys = any_text | st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([Level.HIGH, Name.A])
json_values = st.recursive(
    json_scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(json_keys, inner) | st.builds(Point, inner, inner),
    max_leaves=12,
)
hashables = st.integers() | st.text() | st.binary() | st.dates() | st.sampled_from([Colour.RED, Colour.BLUE])
pickle_values = st.recursive(
    json_scalars | st.timedeltas() | st.sampled_from([Colour.RED, Colour.BLUE]) | st.sets(hashables) | st.frozensets(hashables) | st.binary().map(bytearray),
    lambda inner: st.lists(inner) | st.dictionaries(json_keys | st.binary() | st.tuples(st.integers()), inner) | st.builds(Placed, st.integers(), inner),
    max_leaves=12,
)


def form(value: Any) -> bytes | None:
    """The canonical form, or None for the one thing that the strategies make and that has none: a map with two keys that JSON makes one."""
    try:
        return canonical(value)
    except KeyDerivationError as exc:
        if "two keys" not in exc.message:
            raise
        return None


@given(json_values)
@example("\ud83d\ude00")  # a surrogate pair comes back as one character
@example([0.0, -0.0, math.nan, math.inf, -math.inf])
@example({"__type__": "uuid", "__value__": {"hex": "0" * 32}})  # comes back as a UUID
@example(datetime.max.replace(tzinfo=timezone(timedelta(hours=-5))))
def test_json_trip(value: Any) -> None:
    """The key that the worker would derive from a JSON message is the key of the dispatch."""
    before = form(value)
    if before is not None:
        assert canonical(trip(value, "json")) == before


@given(pickle_values)
def test_pickle_trip(value: Any) -> None:
    """The key that the worker would derive from a pickled message is the key of the dispatch."""
    before = form(value)
    if before is not None:
        assert canonical(trip(value, "pickle")) == before


@given(json_values, json_values)
def test_encodings_delimit_themselves(left: Any, right: Any) -> None:
    """No encoding is the beginning of a different one, so a sequence of them can be read in one way only."""
    a, b = form(left), form(right)
    if a is not None and b is not None:
        assert a == b or not (a.startswith(b) or b.startswith(a))


simple = st.recursive(st.none() | st.booleans() | st.integers(-2, 2) | st.text("1,:;[]s", max_size=3), lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@given(simple, simple)
@example(["ab", "c"], ["a", "bc"])
@example([[], []], [[[]]])
@example(1, True)
@example("None", None)
def test_different_values_have_different_forms(left: Any, right: Any) -> None:
    """Two values share a form only if they are of one kind and equal."""
    same = repr(left) == repr(right)  # of these kinds only, repr tells all apart
    assert (canonical(left) == canonical(right)) == same


NAIVE = datetime(2026, 3, 1, 12, 0)  # noqa: DTZ001 - naive on purpose
ONE = uuid.UUID(int=1)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((1, 2), [1, 2]),
        (Point(1, 2), [1, 2]),
        ({1: "x", 2: "z"}, {"1": "x", "2": "z"}),
        ({None: 1, False: 2, 1.5: 3, -7: 4}, {"null": 1, "false": 2, "1.5": 3, "-7": 4}),
        ({"a": 1, "b": 2}, OrderedDict([("b", 2), ("a", 1)])),
        ({1, 2, 3}, frozenset([3, 2, 1])),
        (-0.0, 0.0),
        (math.nan, -math.nan),
        (Decimal("1.10"), Decimal("1.1")),
        (Decimal(100), Decimal("1E+2")),
        (Decimal("-0.00"), Decimal(0)),
        (Level.HIGH, 1),
        (Name.A, "x"),
        (Labelled.A, "x"),
        (Colour.RED, 1),
        (Day.FIRST, date(2026, 3, 1)),
        (Jsonable(), {"j": [1, 2]}),
        (NAIVE.replace(tzinfo=ZoneInfo("Europe/Berlin")), datetime(2026, 3, 1, 11, 0, tzinfo=UTC)),
        (NAIVE.replace(fold=1), NAIVE),
        (b"ab", bytearray(b"ab")),
        (Placed(1, ("a",)), Placed(1, ["a"])),
        ({"__type__": "decimal", "__value__": "1.50"}, Decimal("1.5")),
        ({"__type__": "bytes", "__value__": "ab"}, b"ab"),
    ],
)
def test_same(left: Any, right: Any) -> None:
    """What a serializer makes one, or what is of one kind and equal, has one form."""
    assert canonical(left) == canonical(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, "1"),
        (1, True),
        (1, 1.0),
        (None, "None"),
        ("", None),
        ([], {}),
        ([1], {1}),
        ("ab", b"ab"),
        (ONE, str(ONE)),
        (ONE, ONE.hex),
        (Decimal("1.5"), 1.5),
        (Decimal("NaN"), math.nan),
        (date(2026, 3, 1), "2026-03-01"),
        (date(2026, 3, 1), datetime(2026, 3, 1)),  # noqa: DTZ001 - naive on purpose
        (NAIVE, NAIVE.replace(tzinfo=UTC)),
        (time(1, 2), time(1, 2, tzinfo=UTC)),
        (timedelta(seconds=1), 1_000_000),
        (Placed(1), Cancelled(1)),
        (Placed(1), {"order": 1, "tags": []}),
        ({"a": None}, {}),
        ({"__type__": "nobody knows", "__value__": 1}, 1),
        ({"__type__": "uuid", "__value__": "no fields"}, {"__type__": "uuid", "__value__": "other"}),
        ("\u00e9", "e\u0301"),
    ],
)
def test_distinct(left: Any, right: Any) -> None:
    """Values of different kinds, and different values, are different work."""
    assert canonical(left) != canonical(right)


def test_decimal_does_not_depend_on_the_context() -> None:
    """Long decimals keep every digit, whatever precision the thread has set."""
    one, two = Decimal("0.1234567890123456789012345678901"), Decimal("0.1234567890123456789012345678902")
    with localcontext() as context:
        context.prec = 3
        assert canonical(one) != canonical(two)


def test_huge_int() -> None:
    """An int with more digits than Python prints has a form; as a map's key too."""
    assert canonical(10**5000) != canonical(10**5000 + 1)
    assert canonical({10**5000: 1}) != canonical({10**5000 + 1: 1})


@pytest.mark.parametrize(
    ("make", "path", "reason"),
    [
        (object, None, "type builtins.object"),
        (lambda: {"order": {"items": [1, 2, 3, object()]}}, "[order][items][3]", "no canonical form"),
        (lambda: Placed(1, [object()]), ".tags[0]", "no canonical form"),
        (lambda: {1: "a", "1": "b"}, None, "two keys"),
        (lambda: [{(object(),): 1}], "[0]{key}[0]", "no canonical form"),
        (lambda: {frozenset([lambda: 1])}, "{member}{member}", "no canonical form"),
        (lambda: [Broken()], "[0]", "__json__ raised ZeroDivisionError"),
        (lambda: (x for x in "ab"), None, "generator"),
        (lambda: complex(1), None, "complex"),
        (lambda: [Colour.ODD], "[0].value", "complex"),
        (lambda: Placed, None, "type builtins.type"),
    ],
)
def test_no_form(make: Callable[[], Any], path: str | None, reason: str) -> None:
    """A value without a canonical form is refused with its path; it is never replaced by its repr or hash."""
    with pytest.raises(KeyDerivationError) as caught:
        canonical(make())
    assert caught.value.argument == path
    assert reason in caught.value.message


def test_cycles_and_depth() -> None:
    """A value that contains itself is refused, quickly and with a short path; nesting up to the limit is fine."""
    loop: list[Any] = []
    loop.append([loop, loop])
    with pytest.raises(KeyDerivationError, match="contains itself") as caught:
        canonical({"a": loop})
    assert caught.value.argument is not None
    assert caught.value.argument.startswith("[a][0][0]")
    assert len(caught.value.argument) < 60
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert canonical(deep)
    with pytest.raises(KeyDerivationError, match="nested deeper"):
        canonical([[deep]])


def test_json_method_that_returns_itself() -> None:
    """An object that reduces to itself ends in an error, not in a hang."""

    class Mirror:
        def __json__(self) -> Any:
            return self

    with pytest.raises(KeyDerivationError, match="contains itself"):
        canonical(Mirror())


def test_pydantic_model() -> None:
    """A pydantic model counts by its class and its fields, not by how they were written."""
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Order", __module__=__name__, id=(int, ...), at=(datetime, NAIVE))
    other = pydantic.create_model("Refund", __module__=__name__, id=(int, ...), at=(datetime, NAIVE))
    assert canonical(model(id="1")) == canonical(model(id=1))
    assert canonical(model(id=1)) != canonical(model(id=2))
    assert canonical(model(id=1)) != canonical(other(id=1))
    assert plain(model(id=1)) == {"id": 1, "at": "2026-03-01T12:00:00"}
    root = pydantic.RootModel[list[int]]
    assert canonical(root([1, 2])) != canonical(root([1, 3]))


def test_lazy_text() -> None:
    """A lazy translation is the text that the serializer sends."""

    class Promise:
        pass

    Promise.__module__ = "django.utils.functional"

    class Lazy(Promise):
        def __str__(self) -> str:
            return "Grüße"

    assert canonical([Lazy()]) == canonical(["Grüße"])


def test_proxy_that_claims_another_class() -> None:
    """A proxy that only claims to be a str has no form of its own; it is refused instead of breaking."""

    class Proxy:
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            return str

    with pytest.raises(KeyDerivationError, match="Proxy"):
        canonical(Proxy())


def test_form_is_the_same_in_every_process() -> None:
    """The form of a set or a map does not depend on the process's hash seed."""
    value = {"s": {"a", "b", "c", "d"}, "m": {"x": 1, "y": frozenset("pqr")}}
    code = "import pickle, sys; from celery_guard.canonical import canonical; sys.stdout.buffer.write(canonical(pickle.load(sys.stdin.buffer)))"
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            input=pickle.dumps(value),
            capture_output=True,
            check=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
        )
        assert out.stdout == canonical(value)


def test_form_is_pinned() -> None:
    """The form is part of the key format, version 1: changing it splits the claims of a rolling deployment."""
    value = [
        None,
        True,
        False,
        -255,
        1.5,
        "é",
        b"\xff",
        {"b": 1, "a": ()},
        {2, 1},
        ONE,
        Decimal("1.50"),
        date(2026, 3, 1),
        NAIVE,
        time(1, 2),
        timedelta(seconds=1),
    ]
    assert canonical(value) == (
        b"l15:nTFi-ff;f3:1.5s2:\xc3\xa9x1:\xffm2:s1:al0:s1:bi1;e2:i1;i2;u36:00000000-0000-0000-0000-000000000001"
        b"d3:1.5D10:2026-03-01t19:2026-03-01T12:00:00h8:01:02:00p7:1000000"
    )


def test_plain() -> None:
    """People see typed values as text and objects as maps, with the keys that JSON makes."""
    value = {1: (Colour.RED, ONE), "s": {2, 1}, "o": Placed(7, b"ok"), "raw": b"\xff", "d": timedelta(minutes=1), (1,): None, "big": 1 << 20_000, "f": 1.5}
    shown = plain(value)
    assert shown.pop("big").startswith("0x1000")
    assert shown == {
        "1": [1, str(ONE)],
        "s": [1, 2],
        "o": {"order": 7, "tags": "ok"},
        "raw": "ff",
        "d": "60.0s",
        "[1]": None,
        "f": 1.5,
    }
