"""Resource keys: templates, lists, callables and all arguments."""

from __future__ import annotations

import inspect
import re
import time
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.serialization import dumps, loads

from celery_guard.errors import KeyDerivationError
from celery_guard.keys import MAX_KEY_BYTES, KeyDeriver, redis_key
from celery_guard.options import KeySpec


def body(a: Any, b: Any = 1) -> None: ...


def keyword_only(a: Any, *, b: Any = 1) -> None: ...


def positional_only(a: Any, b: Any = 1, /) -> None: ...


def variable(a: Any, *rest: Any, **more: Any) -> None: ...


def nothing() -> None: ...


def deriver(spec: KeySpec, function: Callable[..., Any] = body, **options: Any) -> KeyDeriver:
    return KeyDeriver(**{"task": "shop.t", "option": "unique", "spec": spec, "signature": inspect.signature(function), **options})


def key(spec: KeySpec, *args: Any, **kwargs: Any) -> str:
    """The key of a call of body(a, b=1), without the task's name."""
    resource = deriver(spec).derive(args, kwargs)
    assert resource.startswith("shop.t:")
    return resource.removeprefix("shop.t:")


class Colour(Enum):
    RED = "red"


ONE = uuid.UUID(int=1)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.text("1-:.,%'eT None", max_size=4)
typed = st.uuids() | st.dates() | st.datetimes(timezones=st.none() | st.just(UTC)) | st.decimals() | st.binary() | st.lists(st.integers(), max_size=2)
values = scalars | typed | typed.map(str) | st.text("ab", min_size=190, max_size=220)


def identity(value: Any) -> Any:
    """Python's own equality, with the kind; -0.0 equals 0.0."""
    is_nan = isinstance(value, float | Decimal) and Decimal(value).is_nan()
    return (type(value), "nan" if is_nan else value)


class TestArguments:
    """How calls are bound."""

    @pytest.mark.parametrize("spec", [None, "x:{a}:{b}", ["a", "b"], lambda a, b: f"{a}/{b}"])
    def test_one_call_written_in_many_ways(self, spec: KeySpec) -> None:
        """f(1, b=2), f(1, 2) and f(a=1, b=2) are one key, and a default counts like a given value."""
        made = deriver(spec)
        assert made.derive((1, 2), None) == made.derive([1], {"b": 2}) == made.derive(None, {"b": 2, "a": 1})
        assert made.derive((1,), {}) == made.derive((1, 1), None) == made.derive((1,), {"b": 1})
        assert made.derive((1,), {}) != made.derive((1, 2), {})

    @pytest.mark.parametrize("function", [keyword_only, positional_only])
    def test_kinds_of_parameters(self, function: Callable[..., Any]) -> None:
        """Keyword-only and positional-only parameters are bound with their defaults."""
        made = deriver(None, function)
        two = made.derive((1,), {"b": 2}) if function is keyword_only else made.derive((1, 2), {})
        assert made.derive((1,), {}) != two
        assert made.derive((1,), {}) == deriver(None).derive((1, 1), {})

    def test_variable_parameters(self) -> None:
        """*args and **kwargs belong to the key, and a template reads into them."""
        made = deriver(None, variable)
        keys = [made.derive(args, kwargs) for args, kwargs in [((1,), {}), ((1, 2), {}), ((1, 2, 3), {}), ((1,), {"x": 2}), ((1,), {"y": 2})]]
        assert len(set(keys)) == 5
        assert made.derive((1,), {"x": 2, "y": 3}) == made.derive((), {"y": 3, "a": 1, "x": 2})
        assert deriver("t:{more[tenant]}:{rest[0]}", variable).derive((1, 5), {"tenant": "x"}) == "shop.t:t:x:5"

    @pytest.mark.parametrize(
        ("function", "args", "kwargs", "reason"),
        [
            (body, (), {}, "missing a required argument: 'a'"),
            (body, (1, 2, 3), {}, "too many positional"),
            (body, (1,), {"a": 2}, "multiple values for argument 'a'"),
            (body, (1,), {"c": 2}, "unexpected keyword argument 'c'"),
            (keyword_only, (1, 2), {}, "too many positional"),
            (positional_only, (), {"a": 1}, "'a'"),
            (variable, (), {"x": 1}, "missing a required argument: 'a'"),
        ],
    )
    def test_call_that_does_not_fit(self, function: Callable[..., Any], args: Any, kwargs: Any, reason: str) -> None:
        """A call that the body could not take is told as such, without the values."""
        with pytest.raises(KeyDerivationError, match=re.escape(reason)) as caught:
            deriver("{a}", function).derive(args, kwargs)
        assert "does not fit" in caught.value.message
        assert (caught.value.task, caught.value.argument) == ("shop.t", None)

    def test_task_without_parameters(self) -> None:
        """A task without arguments has one key."""
        assert deriver(None, nothing).derive((), {}) == deriver(None, nothing).derive(None, None)

    def test_all_arguments_are_hashed(self) -> None:
        """Arguments do not appear in the store; the hash is pinned because it is part of the key format, version 1."""
        assert re.fullmatch("[0-9a-f]{32}", key(None, "secret"))
        assert key(None, "secret", b=None) == "a76f81b83cfd07e00f60f1e13a4bea2a"

    def test_order_of_parameters_does_not_count(self) -> None:
        """A new version that only reorders its parameters keeps its all-argument keys."""

        def reordered(b: Any = 1, a: Any = None) -> None: ...

        assert deriver(None, reordered).derive((), {"a": 5, "b": 6}) == deriver(None).derive((5, 6), {})

    @pytest.mark.parametrize("spec", [None, "{a}", ["a"]])
    def test_large_argument(self, spec: KeySpec) -> None:
        """A 5 MB string costs no noticeable time and its key stays small."""
        big = "x" * 5_000_000
        started = time.perf_counter()
        made = key(spec, big)
        assert time.perf_counter() - started < 5
        assert len(made) <= MAX_KEY_BYTES
        assert made != key(spec, big + "x")


class TestTemplates:
    """Readable keys."""

    @pytest.mark.parametrize(
        ("template", "a", "expected"),
        [
            ("product:{a}", 42, "product:42"),
            ("product:{a}", "42", "product:'42'"),
            ("product:{a}", -7, "product:-7"),
            ("product:{a}", True, "product:True"),
            ("product:{a}", "True", "product:'True'"),
            ("product:{a}", None, "product:None"),
            ("product:{a}", "None", "product:'None'"),
            ("product:{a}", 1.0, "product:1.0"),
            ("product:{a}", -0.0, "product:0.0"),
            ("product:{a}", 1e22, "product:1e+22"),
            ("product:{a}", "1e+22", "product:'1e+22'"),
            ("product:{a}", "", "product:''"),
            ("product:{a}", "shoe-10.5_é", "product:shoe-10.5_é"),
            ("product:{a}", "a:b c\n%'{}", "product:a%3Ab%20c%0A%25%27%7B%7D"),
            ("product:{a}", "\u202e\ud800", "product:%E2%80%AE%ED%A0%80"),
            ("product:{a}", ONE, "product:00000000-0000-0000-0000-000000000001"),
            ("product:{a}", str(ONE), "product:'00000000-0000-0000-0000-000000000001'"),
            ("day:{a}", date(2026, 3, 1), "day:2026-03-01"),
            ("day:{a}", "2026-03-01", "day:'2026-03-01'"),
            ("at:{a}", datetime(2026, 3, 1, 13, 5, tzinfo=timezone(timedelta(hours=1))), "at:20260301T120500Z"),
            ("at:{a}", datetime(2026, 3, 1, 13, 5, 0, 7), "at:20260301T130500.000007"),  # noqa: DTZ001 - naive on purpose
            ("c:{a}", Colour.RED, "c:red"),
            ("{a.id}", SimpleNamespace(id=3), "3"),
            ("{a.id}", {"id": 3}, "3"),
            ("{a[id]}", {"id": 3}, "3"),
            ("{a[0]}", {0: "x"}, "x"),
            ("{a[0]}", {"0": "x"}, "x"),
            ("{a[1]}", ["x", "y"], "y"),
            ("{a[-1]}", ("x", "y"), "y"),
            ("{a.lines[0].sku}", SimpleNamespace(lines=[{"sku": "s1"}]), "s1"),
            ("{{{a}}}", 1, "%7B1%7D"),
            ("a b\t%{a}", 1, "a%20b%09%251"),
            ("{a}-{b}", -1, "%2D1-1"),
            ("{a}:{b}", "x:y", "x%3Ay:1"),
            ("{a},{b}:{a}", "x", "x,1:x"),
            ("everything", 1, "everything"),
        ],
    )
    def test_rendering(self, template: str, a: Any, expected: str) -> None:
        """Values are readable, each kind is told from each other, and nothing can break out of its place."""
        assert key(template, a) == expected

    @pytest.mark.parametrize("value", [[1], {"a": 1}, b"x", Decimal("1.5"), timedelta(1), {1}, 10**4000])
    def test_other_values_are_hashed(self, value: Any) -> None:
        """What is not a short scalar stands as a hash that no string can imitate."""
        made = key("x:{a}", value)
        assert re.fullmatch("x:hash'[0-9a-f]{32}'", made)
        assert key("x:{a}", made.removeprefix("x:")) != made

    @pytest.mark.parametrize("template", ["{a}:{b}", "x{a}-{b}y", "{a}.{b}", "{a}by_{b}", "{b}/{a}/{b}", "{a},{{{b}"])
    @given(first=values, second=values, third=values, fourth=values)
    @example(first="x:y", second="z", third="x", fourth="y:z")
    @example(first="1", second=1, third=1, fourth="1")
    @example(first=-1, second=-1, third="-1", fourth=-1)
    @example(first=1.5, second=0, third=1, fourth=5.0)
    @example(first="", second="", third="''", fourth="")
    def test_different_calls_have_different_keys(self, template: str, first: Any, second: Any, third: Any, fourth: Any) -> None:
        """No two different pairs of values share a key, whatever they contain."""
        same = identity(first) == identity(third) and identity(second) == identity(fourth)
        assert (key(template, first, second) == key(template, third, fourth)) == same

    @given(a=values, b=values)
    @example(a="\ud83d\ude00", b=1)
    def test_key_survives_the_serializer(self, a: Any, b: Any) -> None:
        """A template renders the arguments of the dispatch and those of the JSON message alike."""
        content_type, encoding, message = dumps([a, b], serializer="json")
        again = loads(message, content_type, encoding, accept=[content_type])
        for spec in ("{a}:{b}", None, ["b", "a"]):
            assert key(spec, a, b) == key(spec, *again)

    @given(a=st.text(), b=st.text(st.characters(exclude_categories=()), min_size=0, max_size=400), task=st.text(min_size=1, max_size=20))
    def test_keys_are_short_and_clean(self, a: str, b: str, task: str) -> None:
        """At most 200 bytes, printable UTF-8 without spaces, and no brace that could end or open a hash tag."""
        for spec in ("{a}:{b}", ["a", "b"], lambda a, b: a + b, None, "lit {{}} é" * 40 + "{a}"):
            resource = deriver(spec, task=task).derive((a, b), {})
            made = resource.partition(":")[2]
            assert 0 < len(made.encode()) <= MAX_KEY_BYTES
            assert resource.isprintable()
            assert not re.search(r"[\s{}]", resource)

    @given(tail=st.text("xyz", max_size=3), other=st.text("xyz", max_size=3))
    def test_long_keys_keep_their_beginning(self, tail: str, other: str) -> None:
        """A key over 200 bytes keeps a readable beginning and differs wherever the whole differs."""
        made = key("{a}/{b}", "é" * 150 + tail, "end")
        assert made.startswith("é" * 70)
        assert re.search("long'[0-9a-f]{32}'$", made)
        assert (made == key("{a}/{b}", "é" * 150 + other, "end")) == (tail == other)

    def test_cut_leaves_no_half_escape(self) -> None:
        """The readable beginning ends with a whole character or escape."""
        for length in range(50, 60):
            assert not re.search("%[0-9A-F]?long'", key("{a}", "y" * (length % 3) + " " * 120))


class TestListsAndScope:
    """Lists of names, one key per task, shared keys, Redis names."""

    def test_list(self) -> None:
        """A list of names gives name=value pairs in its order; values cannot imitate them."""
        assert key(["a"], 5) == "a=5"
        assert key(("b", "a"), 5, "x") == "b=x,a=5"
        assert key(["a", "b"], "1,b=2", 3) == "a=1%2Cb%3D2,b=3"
        assert key(["a"], {"x": 1}).startswith("a=hash'")

    def test_empty_list_is_one_key_per_task(self) -> None:
        """key=[] ignores the arguments; it is not read as "not set"."""
        assert key([], 1) == key([], 2) == "*"
        assert key(None, 1) != key(None, 2)

    def test_scope(self) -> None:
        """Keys of two tasks never meet unless they are shared, even if a task's name has a colon or braces."""
        assert deriver("k:{a}").derive((1,), {}) == "shop.t:k:1"
        assert deriver("k:{a}", shared=True).derive((1,), {}) == "k:1"
        assert deriver("b:{a}", task="x").derive((1,), {}) != deriver("{a}", task="x:b").derive((1,), {})
        assert deriver("{a}", task="{x} y").derive((1,), {}) == "%7Bx%7D%20y:1"

    def test_redis_key(self) -> None:
        """All keys of one resource carry it between the braces of one Cluster hash tag."""
        resource = deriver("k:{a}").derive(("}x{",), {})
        name = redis_key("guard", resource, "claim")
        assert name == "guard:1:{shop.t:k:%7Dx%7B}:claim"
        assert name[name.index("{") + 1 : name.index("}")] == resource


class TestCallables:
    """Keys made by the user's function."""

    @pytest.mark.parametrize(
        ("function", "expected"),
        [
            (lambda a, b: f"tenant:{a}", "tenant:5"),
            (lambda a, b: a, "5"),
            (lambda a, b: str(a), "'5'"),
            (lambda a, *_: a, "5"),
            (lambda *args, **kwargs: f"{args}{kwargs}", "(5,%201)%7B%7D"),
            (lambda a, b: "", "''"),
        ],
    )
    def test_result(self, function: Callable[..., Any], expected: str) -> None:
        """The function gets the bound arguments, defaults too; text keeps its colons, other values are told apart from it."""
        assert key(function, 5) == expected

    def test_function_without_a_signature(self) -> None:
        """A builtin that tells no signature is accepted and called."""
        assert key(dict.fromkeys, "x") == key(lambda a, b: {"x": 1}, "x")
        assert key(max, 3, 4) == "4"

    def test_structured_result(self) -> None:
        """A tuple or any other value with a canonical form is hashed."""
        assert key(lambda a, b: (a, b), 1) == key(lambda a, b: [a, b], 1)
        assert key(lambda a, b: (a, b), 1) != key(lambda a, b: (a, b), "1")

    def test_call_with_all_kinds_of_parameters(self) -> None:
        """Positional, variable and keyword-only arguments arrive as in the call of the body."""

        def full(a: Any, *rest: Any, c: Any = 3, **more: Any) -> str:
            return f"{a}-{rest[0]}-{c}-{more['x']}"

        assert deriver(full, full).derive((1, 2), {"x": 4}) == "shop.t:1-2-3-4"

    def test_error_in_the_function(self) -> None:
        """An error in the key function names the function and keeps the cause."""

        def broken(a: Any, b: Any) -> Any:
            return a["missing"]

        with pytest.raises(KeyDerivationError, match="broken raised KeyError") as caught:
            key(broken, {})
        assert isinstance(caught.value.__cause__, KeyError)

    @pytest.mark.parametrize(("made", "reason"), [(None, "returned None"), ([object()], "at [0] is of type builtins.object")])
    def test_useless_result(self, made: Any, reason: str) -> None:
        """None, as from a forgotten return, would give all calls one key: it is refused, like a value without a form."""
        with pytest.raises(KeyDerivationError, match=re.escape(reason)):
            key(lambda a, b: made, 1)
