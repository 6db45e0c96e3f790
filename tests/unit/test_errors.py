"""Exceptions travel between processes: one that cannot be rebuilt kills a worker."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
from celery.utils.serialization import get_pickleable_exception, get_pickled_exception

from celery_guard import errors

CASES: list[tuple[type[errors.GuardError], dict[str, Any]]] = [
    (errors.GuardError, {}),
    (errors.ConfigurationError, {"problems": ("one", "two")}),
    (errors.KeyDerivationError, {"task": "shop.f", "argument": "order.items[3]"}),
    (errors.DuplicateTask, {"task": "shop.f", "key": "shop.f:1", "task_id": "id", "state": "queued", "age": 1.5}),
    (errors.OverlapRefused, {"task": "shop.f", "key": "shop.f:1", "task_id": None, "limit": 2}),
    (errors.PostponedTooLong, {"task": "shop.f", "key": "shop.f:1", "postponed": 7, "waited": 61.0}),
    (errors.PoisonTask, {"task": "shop.f", "task_id": "id", "crashes": 3}),
    (errors.LockLost, {"task": "shop.f", "key": "shop.f:1", "token": "t"}),
    (errors.StoreUnavailable, {"operation": "claim", "address": "redis://h:6379/2", "uncertain": True}),
]
every_error = pytest.mark.parametrize(("cls", "data"), CASES, ids=lambda value: value.__name__ if isinstance(value, type) else "")


def test_public_list_is_complete() -> None:
    """Every exception class is public, and every public name is covered by the cases here."""
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert defined == set(errors.__all__) == {cls.__name__ for cls, _ in CASES}
    assert all(issubclass(cls, errors.GuardError) for cls, _ in CASES)


@every_error
def test_annotated_data_is_kept(cls: type[errors.GuardError], data: dict[str, Any]) -> None:
    """The data that a class documents is exactly what it takes."""
    own = set(inspect.get_annotations(cls)) - {"_fields"}
    assert own == set(cls._fields) == set(data)


@every_error
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(cls: type[errors.GuardError], data: dict[str, Any], protocol: int) -> None:
    """A pickled error comes back equal, with its text and its data."""
    error = cls("what happened", **data)
    back = pickle.loads(pickle.dumps(error, protocol))
    assert back == error
    assert hash(back) == hash(error)
    assert type(back) is cls
    assert str(back) == back.message == "what happened"
    assert {name: getattr(back, name) for name in data} == data


@every_error
def test_celery_keeps_it(cls: type[errors.GuardError], data: dict[str, Any]) -> None:
    """Celery's own check for exceptions that can be pickled hands over the error itself, not a substitute."""
    error = cls("what happened", **data)
    assert get_pickleable_exception(error) is error
    assert get_pickled_exception(get_pickleable_exception(error)) == error


@every_error
def test_copy_and_bare_construction(cls: type[errors.GuardError], data: dict[str, Any]) -> None:
    """Results rebuild an exception from its class and arguments: that works, and absent data is None."""
    error = cls("what happened", **data)
    assert copy.copy(error) == error
    bare = cls(*error.args)
    assert bare.message == "what happened"
    assert pickle.loads(pickle.dumps(bare)) == bare
    empty = cls()
    assert str(empty) == ""
    assert all(getattr(empty, name) in (None, ()) for name in cls._fields)


def test_different_errors_differ() -> None:
    """Equality covers class, text and data."""
    error = errors.DuplicateTask("a", task="t", key="k", task_id="1", state="queued", age=1.0)
    assert error != errors.DuplicateTask("a", task="t", key="k", task_id="2", state="queued", age=1.0)
    assert error != errors.DuplicateTask("b", task="t", key="k", task_id="1", state="queued", age=1.0)
    assert errors.GuardError("a") != errors.LockLost("a")


def test_unknown_data_is_refused() -> None:
    """A mistyped name of a datum is a mistake of the code that raises."""
    with pytest.raises(TypeError, match="LockLost has no field tokn"):
        errors.LockLost("gone", tokn="x")


def test_subclass_of_a_user_survives() -> None:
    """A subclass without own data is rebuilt as itself."""
    error = TenantBusy("busy", task="t", key="k", limit=1)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is TenantBusy
    assert back == error


class TenantBusy(errors.OverlapRefused):
    pass


def test_several_problems_make_one_error() -> None:
    """All problems are in the data and in the text; one problem stands alone."""
    assert str(errors.ConfigurationError.of(["only one"])) == "only one"
    error = errors.ConfigurationError.of(["first", "second"])
    assert error.problems == ("first", "second")
    assert "first" in str(error)
    assert "second" in str(error)
    assert errors.ConfigurationError("alone").problems == ("alone",)
