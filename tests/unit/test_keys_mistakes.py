"""Keys that are refused, and the arguments as people see them."""

from __future__ import annotations

import inspect
import pickle
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from celery_guard.errors import ConfigurationError, KeyDerivationError
from celery_guard.keys import KeyDeriver, canonical_arguments
from celery_guard.options import KeySpec

ONE = uuid.UUID(int=1)


def body(a: Any, b: Any = 1) -> None: ...


def variable(a: Any, *rest: Any, **more: Any) -> None: ...


def deriver(spec: KeySpec, function: Callable[..., Any] = body, *, shared: bool = False) -> KeyDeriver:
    return KeyDeriver(task="shop.t", option="unique", spec=spec, signature=inspect.signature(function), shared=shared)


class TestMistakes:
    """What is refused, when, and with which words."""

    @pytest.mark.parametrize(
        ("spec", "reason"),
        [
            ("{zzz}:{b}", "unknown argument 'zzz'; the task's arguments are: product, b"),
            ("{produt}", "did you mean 'product'?"),
            (["produt"], "did you mean 'product'?"),
            ("{product", "is not a template"),
            ("product}", "is not a template"),
            ("{}", "names no argument"),
            ("{0}", "names no argument"),
            ("{product..x}", "names no argument"),
            ("{product!r}", "conversion or format spec"),
            ("{product:>10}", "conversion or format spec"),
            ("{product:{b}}", "conversion or format spec"),
            ("{product.__class__}", "only public attributes"),
            ("{product.x._y}", "only public attributes"),
            ("{product}{b}", "does not separate 'product' from 'b'"),
            ("{product}x{b}", "does not separate"),
            ("{product} {b}", "does not separate"),
            ("{product}{{{b}", "does not separate"),
            ("product", "is one key for all calls; for the value of that argument write '{product}'"),
            ("", "is empty"),
            (lambda x: x, "cannot be called with the task's arguments (product, b)"),
        ],
    )
    def test_configuration(self, spec: KeySpec, reason: str) -> None:
        """A key that cannot work is refused when the task is bound, naming task, option, value and remedy."""

        def task(product: Any, b: Any) -> None: ...

        with pytest.raises(ConfigurationError) as caught:
            deriver(spec, task)
        assert reason in caught.value.message
        assert caught.value.message.startswith("task 'shop.t': option unique: key=")

    def test_coroutine_function(self) -> None:
        """A coroutine function cannot make a key."""

        async def later(a: Any, b: Any) -> str:
            return "x"

        with pytest.raises(ConfigurationError, match="coroutine"):
            deriver(later)

    def test_shared_without_a_name(self) -> None:
        """key=[] with shared=True would be one key for unrelated tasks."""
        with pytest.raises(ConfigurationError, match="all tasks with shared=True"):
            deriver([], shared=True)

    def test_all_problems_at_once(self) -> None:
        """Every problem of a template is told in one error."""
        with pytest.raises(ConfigurationError) as caught:
            deriver("{x!r}{a._b}{c}")
        assert len(caught.value.problems) == 4

    @pytest.mark.parametrize(
        ("spec", "a", "path", "reason"),
        [
            (None, object(), "a", "no canonical form"),
            (None, {"items": [1, object()]}, "a[items][1]", "no canonical form"),
            ("{a}", [object()], "a[0]", "no canonical form"),
            ("{a.items[3]}", SimpleNamespace(items=[1, 2, 3, object()]), "a.items[3]", "no canonical form"),
            ("{a.lines}", SimpleNamespace(lines=[{"x": object()}]), "a.lines[0][x]", "no canonical form"),
            ("{a.id}", SimpleNamespace(), "a.id", "no readable '.id' (AttributeError)"),
            ("{a[id]}", {}, "a[id]", "no readable '[id]' (KeyError)"),
            ("{a[2]}", [1], "a[2]", "IndexError"),
            ("{a.upper}", "x", "a.upper", "no canonical form"),
        ],
    )
    def test_value_without_a_key(self, spec: KeySpec, a: Any, path: str, reason: str) -> None:
        """A value that gives no key is named by its path, with the remedy; the value itself is not shown; the error can be pickled."""
        with pytest.raises(KeyDerivationError) as caught:
            deriver(spec).derive((a,), {})
        error = caught.value
        assert (error.task, error.argument) == ("shop.t", path)
        assert reason in error.message
        assert "unique a key=" in error.message
        assert "0x" not in error.message
        assert pickle.loads(pickle.dumps(error)) == error

    def test_unused_arguments_need_no_form(self) -> None:
        """Only the arguments that the key names must have a form."""
        assert deriver("{b}").derive((object(), 2), {}) == "shop.t:2"

    def test_stack_nearly_full(self) -> None:
        """Running out of stack inside a value is a key error, not a crash of the dispatch."""

        class Endless:
            def __json__(self) -> Any:
                return self.__json__()

        with pytest.raises(KeyDerivationError, match="too deeply"):
            deriver(None).derive((Endless(),), {})


class TestExplain:
    """Arguments for people."""

    def test_bound_arguments(self) -> None:
        """Defaults are applied and values are shown as data, by parameter."""
        signature = inspect.signature(variable)
        shown = canonical_arguments(signature, (ONE, (1, b"red")), {"x": {1: {2}}})
        assert shown == {"a": str(ONE), "rest": [[1, "red"]], "more": {"x": {"1": [2]}}}
        assert canonical_arguments(inspect.signature(body), (5,), None) == {"a": 5, "b": 1}

    @pytest.mark.parametrize(("args", "argument", "reason"), [(([object()],), "a[0]", "no canonical form"), ((), None, "does not fit")])
    def test_errors(self, args: Any, argument: str | None, reason: str) -> None:
        """What has no form is named by its path, here too."""
        with pytest.raises(KeyDerivationError, match=reason) as caught:
            canonical_arguments(inspect.signature(body), args, {})
        assert caught.value.argument == argument
