"""Options: what users write on a task, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from datetime import timedelta
from typing import Any

import pytest

from celery_guard.errors import ConfigurationError
from celery_guard.options import LATER_NAMES, OPTION_NAMES, Backoff, GuardOptions, Unique, WithoutOverlapping, resolve, seconds, shown

#: Wrong fields come from people, so the tests write them where a type checker would stop them.
unique: Any = Unique
without_overlapping: Any = WithoutOverlapping
backoff: Any = Backoff


def refused(*words: str, own: tuple[str, ...] = (), **attributes: Any) -> tuple[str, ...]:
    """Bind a task that must be refused with one problem for each of ``words``, which its text contains."""
    with pytest.raises(ConfigurationError) as caught:
        resolve("shop.rebuild", attributes, own)
    problems = tuple(caught.value.problems)
    assert len(problems) == len(words), problems
    for problem, word in zip(problems, words, strict=True):
        assert problem.startswith("task 'shop.rebuild': ")
        assert word in problem
        assert problem in str(caught.value)
    return problems


# ------------------------------------------------------------------------------- shorthands


def by_tenant(tenant: int) -> int:
    return tenant


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (False, None),
        (True, Unique()),
        (60, Unique(ttl=60)),
        (1.5, Unique(ttl=1.5)),
        (timedelta(minutes=2), Unique(ttl=120)),
        ("product:{product_id}", Unique(key="product:{product_id}")),
        (["a", "b"], Unique(key=("a", "b"))),
        ([], Unique(key=())),
        (by_tenant, Unique(key=by_tenant)),
        (Unique(until="expired", ttl=5), Unique(until="expired", ttl=5)),
    ],
)
def test_shorthands_of_unique(value: Any, expected: Unique | None) -> None:
    """True, a key or a ttl stand for the option with that field."""
    assert resolve("t", {"unique": value}) == GuardOptions(unique=expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (False, None),
        (True, WithoutOverlapping()),
        (3, WithoutOverlapping(limit=3)),
        ("tenant:{tenant_id}", WithoutOverlapping(key="tenant:{tenant_id}")),
        (("a",), WithoutOverlapping(key=["a"])),
        (by_tenant, WithoutOverlapping(key=by_tenant)),
    ],
)
def test_shorthands_of_without_overlapping(value: Any, expected: WithoutOverlapping | None) -> None:
    """True, a key or a number of slots stand for the option with that field."""
    assert resolve("t", {"without_overlapping": value}) == GuardOptions(without_overlapping=expected)


def test_task_without_options_is_falsy() -> None:
    """Options of a task that uses none are false, warnings or not."""
    assert not resolve("t", {})
    assert not GuardOptions(warnings=("text",))
    assert resolve("t", {"unique": True})
    assert resolve("t", {"without_overlapping": True})


def test_durations_become_seconds() -> None:
    """Numbers and timedeltas are the same option, and the properties are floats."""
    option = WithoutOverlapping(lease=timedelta(minutes=1), max_hold=timedelta(hours=1), give_up_after=90, delay=[timedelta(seconds=2), 4])
    assert option == WithoutOverlapping(lease=60, max_hold=3600.0, give_up_after=timedelta(seconds=90), delay=Backoff([2, 4]))
    assert (option.lease_seconds, option.max_hold_seconds, option.give_up_after_seconds) == (60.0, 3600.0, 90.0)
    assert option.backoff.delays == (2.0, 4.0)
    assert Unique(ttl=timedelta(days=1)).ttl_seconds == 86400.0
    bare = WithoutOverlapping()
    assert (bare.lease_seconds, bare.max_hold_seconds, bare.give_up_after_seconds) == (30.0, None, None)
    assert bare.backoff.delays == (1.0, 2.0, 5.0, 10.0, 30.0)


@pytest.mark.parametrize("value", [True, "3", None, float("nan"), float("inf"), 10**400, timedelta.max, [1]])
def test_no_duration(value: Any) -> None:
    """What is no finite number of seconds below ten years is no duration; True is no number."""
    with pytest.raises(ValueError, match="must be a number of seconds"):
        seconds(value)


# ------------------------------------------------------------------------- wrong single values


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (unique(ttl=0), "Unique.ttl=0: must be greater than 0 seconds"),
        (unique(ttl=-5), "Unique.ttl=-5: must be greater than 0 seconds"),
        (unique(ttl="1h"), "Unique.ttl='1h': must be a number of seconds or a timedelta; write for example ttl=30"),
        (unique(ttl=None), "Unique.ttl=None: must be a number of seconds"),
        (unique(ttl=True), "Unique.ttl=True: must be a number of seconds"),
        (unique(until="execute"), "Unique.until='execute': must be one of 'executed', 'executing', 'expired'; did you mean 'executed'?"),
        (unique(on_conflict="drop"), "Unique.on_conflict='drop': must be one of 'skip', 'raise'"),
        (unique(on_conflict=["skip"]), "Unique.on_conflict=['skip']: must be one of"),
        (unique(key=""), "Unique.key='': is empty; write a template"),
        (unique(key=5), "Unique.key=5: must be a template string"),
        (unique(key=["a", 1]), "Unique.key=['a', 1]: must be a template string"),
        (unique(key={"a"}), "Unique.key={'a'}: must be a template string"),
        (unique(key=b"a"), "Unique.key=b'a': must be a template string"),
        (unique(key=int), "Unique.key=<class 'int'>: must be a template string"),
        (unique(shared="no"), "Unique.shared='no': must be True or False"),
        (unique(tll=3), "Unique.tll=3: unknown field; did you mean 'ttl'?"),
        (unique(colour=3), "Unique.colour=3: unknown field; known are key, until, ttl, on_conflict, shared"),
        (unique("k", "executed", 3, "skip", False, 9), "Unique: one value too many, 9"),
        (unique("k", key="q"), "Unique.key='q': is given twice"),
    ],
)
def test_wrong_values_of_unique(option: Unique, words: str) -> None:
    """The constructor takes anything; binding the task names option, field, value and remedy."""
    (problem,) = refused(words, unique=option)
    assert "option unique: " in problem


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (without_overlapping(limit=0), "WithoutOverlapping.limit=0: must be a whole number of at least 1"),
        (without_overlapping(limit=True), "WithoutOverlapping.limit=True: must be a whole number"),
        (without_overlapping(limit=1.5), "WithoutOverlapping.limit=1.5: must be a whole number"),
        (without_overlapping(lease=2.9), "WithoutOverlapping.lease=2.9: must be at least 3 seconds"),
        (without_overlapping(max_hold=0), "WithoutOverlapping.max_hold=0: must be greater than 0 seconds"),
        (without_overlapping(max_hold=29), "WithoutOverlapping.max_hold=29: is shorter than lease=30; raise it, or shorten the lease"),
        (without_overlapping(give_up_after=0), "WithoutOverlapping.give_up_after=0: must be greater than 0 seconds"),
        (without_overlapping(on_conflict="queue"), "did you mean 'requeue'?"),
        (without_overlapping(on_lost="stop"), "WithoutOverlapping.on_lost='stop': must be one of 'log', 'abort'"),
        (without_overlapping(shared=1), "WithoutOverlapping.shared=1: must be True or False"),
        (without_overlapping(delay=[]), "WithoutOverlapping.delay: Backoff.stages=[]: must be a list of at least one delay"),
        (without_overlapping(delay=None), "WithoutOverlapping.delay: Backoff.stages=None: must be a list"),
        (without_overlapping(delay=backoff([1], jiter=1)), "WithoutOverlapping.delay: Backoff.jiter=1: unknown field; did you mean 'jitter'?"),
        (without_overlapping(delay=[0, 5]), "a delay of 0 sends the message round without a pause"),
        (without_overlapping(leese=60), "WithoutOverlapping.leese=60: unknown field; did you mean 'lease'?"),
    ],
)
def test_wrong_values_of_without_overlapping(option: WithoutOverlapping, words: str) -> None:
    """The constructor takes anything; binding the task names option, field, value and remedy."""
    (problem,) = refused(words, without_overlapping=option)
    assert "option without_overlapping: " in problem


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (backoff([1, -1]), "Backoff.stages=-1: must be at least 0 seconds"),
        (backoff("5"), "Backoff.stages='5': must be a list"),
        (backoff(True), "Backoff.stages=True: must be a list"),
        (backoff([1, "2"]), "Backoff.stages='2': must be a number of seconds"),
        (backoff([1], jitter=1.1), "Backoff.jitter=1.1: must be a fraction from 0 to 1"),
        (backoff([1], jitter=float("nan")), "Backoff.jitter=nan: must be a fraction"),
        (backoff([1], jitter=True), "Backoff.jitter=True: must be a fraction"),
    ],
)
def test_wrong_values_of_backoff(option: Backoff, words: str) -> None:
    """A wrong Backoff is told where it is used."""
    assert len(option.problems) == 1
    refused(words, without_overlapping=WithoutOverlapping(delay=option))


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"unique": Unique}, "option unique=<class 'celery_guard.options.Unique'>: must be Unique(...), True, a key or a ttl"),
        ({"unique": {"ttl": 5}}, "option unique={'ttl': 5}: must be Unique(...)"),
        ({"unique": WithoutOverlapping()}, "option unique=WithoutOverlapping(): must be Unique(...)"),
        ({"unique": 0}, "Unique.ttl=0: must be greater than 0"),
        ({"without_overlapping": 0}, "WithoutOverlapping.limit=0: must be a whole number"),
        ({"without_overlapping": 2.5}, "option without_overlapping=2.5: must be WithoutOverlapping(...)"),
        ({"without_overlapping": [WithoutOverlapping(), WithoutOverlapping()]}, "several locks on one task are not part of this version"),
    ],
)
def test_wrong_shorthands(attributes: dict[str, Any], words: str) -> None:
    """A value that stands for no option is refused; a number that is no valid field is not taken for "off"."""
    refused(words, **attributes)


# --------------------------------------------------------------- later versions, typing errors


@pytest.mark.parametrize(
    "attributes",
    [
        *({"unique": unique(on_conflict=value)} for value in ("replace", "rerun", "join")),
        *({"without_overlapping": without_overlapping(on_conflict=value)} for value in ("park", "wait")),
        {"unique": unique(debounce=5)},
        {"unique": unique(max_wait=5)},
        {"without_overlapping": without_overlapping(wait_for=5)},
        *({name: "value"} for name in LATER_NAMES),
    ],
    ids=str,
)
def test_later_options_are_refused(attributes: dict[str, Any]) -> None:
    """What a later version brings is never ignored: the task would run without it."""
    refused("is not part of this version", **attributes)


@pytest.mark.parametrize("name", LATER_NAMES)
def test_later_options_may_be_off(name: str) -> None:
    """None and False are no use of an option."""
    assert resolve("t", {name: None}) == resolve("t", {name: False}) == GuardOptions()


@pytest.mark.parametrize(
    ("name", "meant"), [("uniqe", "unique"), ("unqiue", "unique"), ("without_overlaping", "without_overlapping"), ("witout_overlapping", "without_overlapping")]
)
def test_mistyped_options_are_found(name: str, meant: str) -> None:
    """Celery turns unknown task options into attributes: one that nearly is an option is an error."""
    refused(f"unknown option {name!r}; did you mean {meant!r}?", own=("queue", name, "max_retries"))


def test_foreign_attributes_are_left_alone() -> None:
    """Attributes that resemble no option belong to the task's author."""
    assert resolve("t", {}, own=("queue", "rate_limit", "tenant", "throttled", "lock", *OPTION_NAMES)) == GuardOptions()


def test_all_problems_come_at_once() -> None:
    """One error tells everything that is wrong with a task, in the order of options and fields."""
    refused(
        "tll",
        "until",
        "ttl=-1",
        "limit",
        "lease",
        "throttle",
        "uniqe",
        unique=unique(tll=3, until="never", ttl=-1),
        without_overlapping=without_overlapping(limit=0, lease=1),
        throttle="1/s",
        own=("uniqe",),
    )


def test_message_survives_broken_and_long_values() -> None:
    """A value whose repr raises or never ends does not spoil the message."""

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    refused("Unique.shared=<Broken>: must be True or False", unique=unique(shared=Broken()))
    assert len(shown("x" * 10_000)) == 200


# ----------------------------------------------------------------------------------- warnings


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"unique": Unique(ttl=86401)}, "task 'shop.f': option Unique.ttl=86401: is longer than 24 hours"),
        ({"unique": 3_600_000}, "ttl is in seconds"),
        ({"without_overlapping": WithoutOverlapping(lease=30_000)}, "WithoutOverlapping.lease=30000: is longer than an hour"),
        ({"without_overlapping": WithoutOverlapping(on_conflict="skip", give_up_after=60)}, "give_up_after=60: has no effect with on_conflict='skip'"),
        ({"without_overlapping": WithoutOverlapping(delay=[10, 20], give_up_after=5)}, "give_up_after=5: is shorter than the first delay of 10"),
    ],
)
def test_doubtful_values_are_warnings(attributes: dict[str, Any], words: str) -> None:
    """A slip of the unit that is not certain is told, and the task is bound all the same."""
    options = resolve("shop.f", attributes)
    assert options
    (warning,) = options.warnings
    assert words in warning


def test_usual_values_do_not_warn() -> None:
    """The defaults, and the values at the border, are nobody's concern."""
    options = resolve("t", {"unique": Unique(ttl=86400), "without_overlapping": WithoutOverlapping(lease=3600, max_hold=3600, delay=5, give_up_after=5)})
    assert options.warnings == ()
    assert resolve("t", {"unique": True, "without_overlapping": WithoutOverlapping(lease=3, max_hold=3)}).warnings == ()


# ----------------------------------------------------------------------------------- as values

OPTIONS = [
    Backoff([1, 2], jitter=0.5),
    Unique(key=["a"], ttl=60, shared=True),
    WithoutOverlapping(key="t:{t}", limit=2, delay=[1, 3], max_hold=timedelta(minutes=5)),
]
every_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: type(option).__name__)


@every_option
def test_options_are_values(option: Any) -> None:
    """Options are frozen, compared by value, hashable, copied and pickled."""
    for again in (pickle.loads(pickle.dumps(option)), copy.copy(option), copy.deepcopy(option), dataclasses.replace(option)):
        assert again == option
        assert hash(again) == hash(option)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(option, dataclasses.fields(option)[-1].name, "other")


@every_option
def test_repr_is_what_was_written(option: Any) -> None:
    """The repr names the fields that differ from their defaults, and evaluates to an equal option."""
    assert eval(repr(option)) == option
    assert repr(Unique()) == "Unique()"
    assert repr(Unique(ttl=60)) == "Unique(ttl=60.0)"


def test_replace_checks_again() -> None:
    """A replaced field is checked as a written one, and a repaired option is in order."""
    assert dataclasses.replace(Unique(ttl=60), ttl=-1).problems == ("Unique.ttl=-1: must be greater than 0 seconds",)
    assert dataclasses.replace(Unique(ttl=-1), ttl=60) == Unique(ttl=60)
    assert dataclasses.replace(Unique(ttl=-1), ttl=60).problems == ()


def test_problems_travel_with_the_option() -> None:
    """An option that was pickled or copied before its task is bound is refused as the original."""
    option = unique(tll=3)
    assert pickle.loads(pickle.dumps(option)).problems == copy.copy(option).problems == option.problems != ()


@pytest.mark.parametrize("cls", [Backoff, Unique, WithoutOverlapping])
def test_signature_is_visible(cls: type[Any]) -> None:
    """Editors and help() show the fields, not ``**kwargs``."""
    assert list(inspect.signature(cls).parameters) == [item.name for item in dataclasses.fields(cls) if item.init]


def test_lists_in_options_are_not_shared() -> None:
    """A list that is changed afterwards does not change the option."""
    names = ["a"]
    option = Unique(key=names)
    names.append("b")
    assert option.key == ("a",)
