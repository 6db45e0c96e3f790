"""The ``guard_*`` settings: where they may be written, and what is refused."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_guard.config import SETTINGS, Settings
from celery_guard.errors import ConfigurationError
from celery_guard.options import MAX_DURATION

STORE = "redis://localhost:6379/2"


@contextmanager
def refused(*words: str) -> Iterator[pytest.ExceptionInfo[ConfigurationError]]:
    """Expect one problem for each of ``words``, which its text contains, in that order."""
    with pytest.raises(ConfigurationError) as caught:
        yield caught
    problems = caught.value.problems
    assert len(problems) == len(words), problems
    for problem, word in zip(problems, words, strict=True):
        assert word in problem


def read(**settings: Any) -> Settings:
    """Read settings through a Celery app."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(settings)
    return Settings.from_conf(app.conf)


# ------------------------------------------------------------------------------------- sources


def attributes(app: Celery) -> None:
    app.conf.guard_store_backend = STORE
    app.conf.guard_lease = 60


def update(app: Celery) -> None:
    app.conf.update(guard_store_backend=STORE, guard_lease=60)


def update_of_read_configuration(app: Celery) -> None:
    assert app.conf.task_acks_late is False
    app.conf.update(guard_store_backend=STORE, guard_lease=60)


def a_dict(app: Celery) -> None:
    app.config_from_object({"guard_store_backend": STORE, "guard_lease": 60})


def an_object(app: Celery) -> None:
    app.config_from_object(types.SimpleNamespace(guard_store_backend=STORE, guard_lease=60, unrelated=1))


def a_class(app: Celery) -> None:
    app.config_from_object(type("Config", (), {"guard_store_backend": STORE, "guard_lease": 60}))


def an_object_then_attributes(app: Celery) -> None:
    app.config_from_object({"guard_store_backend": "memory", "guard_lease": 60})
    app.conf.guard_store_backend = STORE


def django(app: Celery) -> None:
    app.config_from_object(types.SimpleNamespace(CELERY_GUARD_STORE_BACKEND=STORE, CELERY_GUARD_LEASE=60, DEBUG=True), namespace="CELERY")


def other_namespace(app: Celery) -> None:
    app.config_from_object({"SHOP_GUARD_STORE_BACKEND": STORE, "SHOP_GUARD_LEASE": 60}, namespace="SHOP")


def lower_namespace(app: Celery) -> None:
    app.config_from_object({"shop_guard_store_backend": STORE, "shop_guard_lease": 60}, namespace="shop")


def namespace_and_update(app: Celery) -> None:
    app.config_from_object({"CELERY_GUARD_STORE_BACKEND": STORE}, namespace="CELERY")
    app.conf.update(guard_lease=60)


@pytest.mark.parametrize(
    "source",
    [
        attributes,
        update,
        update_of_read_configuration,
        a_dict,
        an_object,
        a_class,
        an_object_then_attributes,
        django,
        other_namespace,
        lower_namespace,
        namespace_and_update,
    ],
)
def test_every_source_of_celery_works(source: Callable[[Celery], None]) -> None:
    """Settings are read from wherever Celery reads its own, and what is not set has its default."""
    app = Celery("shop", set_as_current=False)
    source(app)
    assert Settings.from_conf(app.conf) == Settings(store_backend=STORE, lease=60.0)


def test_changes_of_the_constructor() -> None:
    """Settings may be given to ``Celery()`` itself."""
    app = Celery("shop", set_as_current=False, changes={"guard_store_backend": STORE, "guard_lease": 60})
    assert Settings.from_conf(app.conf).lease == 60


def test_a_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration module is read by name, and functions that it imports or defines are no settings."""
    lines = ["import os as guard_os", f"guard_store_backend = {STORE!r}", "guard_lease = 60", "def guard_of(name):", "    return name"]
    (tmp_path / "guard_settings_by_name.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    app = Celery("shop", set_as_current=False)
    app.config_from_object("guard_settings_by_name")
    assert Settings.from_conf(app.conf) == Settings(store_backend=STORE, lease=60.0)


def test_the_environment_names_a_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CELERY_CONFIG_MODULE works for guard settings too."""
    (tmp_path / "guard_settings_of_environment.py").write_text(f"guard_store_backend = {STORE!r}\nguard_lease = 60\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CELERY_CONFIG_MODULE", "guard_settings_of_environment")
    app = Celery("shop", set_as_current=False, loader="celery.loaders.default:Loader")
    assert Settings.from_conf(app.conf) == Settings(store_backend=STORE, lease=60.0)


def test_a_pickled_app_keeps_them() -> None:
    """An app that travels to a spawned process has the same settings."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(guard_store_backend=STORE, guard_lease=60)
    assert Settings.from_conf(pickle.loads(pickle.dumps(app)).conf) == Settings(store_backend=STORE, lease=60.0)


# -------------------------------------------------------------------------------- declaration


def test_table_and_class_agree() -> None:
    """Every setting has a line in the table with type and description, and its default passes its own check."""
    settings = Settings(store_backend=STORE)
    assert [setting.name for setting in SETTINGS] == list(settings.redacted())
    assert [setting.name for setting in SETTINGS if setting.required] == ["guard_store_backend"]
    for setting in SETTINGS:
        assert setting.name == "guard_" + setting.attribute
        assert setting.type
        assert setting.description.endswith((".", ")"))
        assert "\n" not in setting.description
        if not setting.required:
            assert getattr(settings, setting.attribute) == setting.default
            assert setting.check(setting.default) == setting.default


def test_units_are_declared() -> None:
    """Durations, and only they, have a unit, and take a timedelta as well as a number."""
    for setting in SETTINGS:
        assert (setting.unit == "seconds") == isinstance(setting.default, float)
        if setting.unit:
            assert getattr(read(guard_store_backend="memory", **{setting.name: timedelta(minutes=5)}), setting.attribute) == 300.0


def test_settings_are_values() -> None:
    """Settings are hashable, copied and pickled."""
    settings = read(guard_store_backend=STORE, guard_store_transport_options={"health_check_interval": 30})
    for again in (pickle.loads(pickle.dumps(settings)), copy.copy(settings)):
        assert again == settings
        assert hash(again) == hash(settings)


def test_transport_options_are_not_shared() -> None:
    """Two apps with default options do not share one dict, and the table's default stays empty."""
    first, second = Settings(store_backend="memory"), Settings(store_backend="memory")
    assert first.store_transport_options is not second.store_transport_options
    assert next(setting.default for setting in SETTINGS if setting.attribute == "store_transport_options") == {}


# ------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize("settings", [{}, {"guard_store_backend": None}, {"guard_store_backend": ""}])
def test_the_store_must_be_named(settings: dict[str, Any]) -> None:
    """Without a store nothing is guarded, so its absence is an error that says what to write."""
    with refused('setting guard_store_backend is missing: write for example guard_store_backend = "redis://localhost:6379/2"'):
        read(**settings)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("guard_store_backend", "redis://:a#b@h:6379/0", "raw #; percent-encode"),
        ("guard_store_backend", ["redis://a", "redis://b"], "(Redlock) are not part of this version"),
        ("guard_key_prefix", "", "must be a text of 1 to 64 characters"),
        ("guard_key_prefix", "a{b}", "without spaces and braces"),
        ("guard_key_prefix", None, "must be a text"),
        ("guard_store_connect_timeout", 0, "must be more than 0 seconds"),
        ("guard_store_timeout", "5", "must be a number of seconds or a timedelta"),
        ("guard_store_timeout", None, "must be a number of seconds"),
        ("guard_store_retries", -1, "must be a whole number of at least 0"),
        ("guard_store_retries", True, "must be a whole number"),
        ("guard_store_max_connections", 0, "must be a whole number of at least 1, or None"),
        ("guard_store_transport_options", [], "must be a dict of keyword arguments for redis-py"),
        ("guard_store_transport_options", {1: 2}, "must be a dict"),
        ("guard_store_transport_options", {"socket_timeout": 90}, "must not contain 'socket_timeout' (use guard_store_timeout)"),
        ("guard_store_transport_options", {"decode_responses": True}, "must not contain 'decode_responses'"),
        ("guard_on_store_error", "dispach", "must be one of 'raise', 'dispatch'; did you mean 'dispatch'?"),
        ("guard_on_store_error", None, "must be one of"),
        ("guard_on_store_error_at_execution", "raise", "must be one of 'requeue', 'run'"),
        ("guard_eager", "false", "must be True or False; a text from the environment has to be converted"),
        ("guard_eager", 1, "must be True or False"),
        ("guard_lease", 2.9, "must be at least 3 seconds"),
        ("guard_lease", 0, "must be at least 3 seconds"),
        ("guard_uncertain_ttl", -1, "must be more than 0 seconds"),
        ("guard_max_crashes", 0, "must be a whole number of at least 1, or None"),
        ("guard_crash_memory", float("inf"), "must be a number of seconds of at most ten years"),
        ("guard_finished_ttl", MAX_DURATION * 2, "at most ten years"),
        ("guard_sweep_interval", 0.5, "must be at least 1 seconds"),
        ("guard_startup_checks", None, "must be True or False"),
    ],
)
def test_wrong_values(name: str, value: Any, words: str) -> None:
    """A wrong value is refused, with setting, value and remedy."""
    with refused(words) as caught:
        read(**{"guard_store_backend": STORE, name: value})
    assert caught.value.problems[0].startswith(f"setting {name}=")


def test_none_switches_off() -> None:
    """None means no limit where the description says so."""
    settings = read(guard_store_backend=STORE, guard_max_crashes=None, guard_store_max_connections=None)
    assert settings.max_crashes is None
    assert settings.store_max_connections is None


def test_all_problems_come_at_once() -> None:
    """One error tells everything that is wrong with the settings."""
    with refused("guard_store_backend is missing", "guard_eager='x'", "guard_lease=1", "unknown setting guard_leese"):
        read(guard_lease=1, guard_eager="x", guard_leese=5)


# -------------------------------------------------------------------------------- other spellings


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("guard_leese", "unknown setting guard_leese; did you mean guard_lease?"),
        ("guard_redis_url", "unknown setting guard_redis_url; remove it"),
        ("GUARD_LEASE", "setting GUARD_LEASE is not read; write guard_lease"),
        ("Guard_Lease", "setting Guard_Lease is not read; write guard_lease"),
        ("CELERY_GUARD_LEASE", "setting CELERY_GUARD_LEASE is not read; write guard_lease"),
        ("celery_guard_lease", "setting celery_guard_lease is not read; write guard_lease"),
        ("CELERY_GUARD_LEESE", "unknown setting CELERY_GUARD_LEESE; did you mean guard_lease?"),
        ("guard_failed_jobs_backend", "setting guard_failed_jobs_backend is not part of this version"),
    ],
)
def test_dead_spellings_without_namespace(key: str, words: str) -> None:
    """A name that Celery would silently not read, or that is none of ours, is an error that says what to write."""
    with refused(words):
        read(**{"guard_store_backend": STORE, key: 60})


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("CELERY_GUARD_LEESE", "unknown setting CELERY_GUARD_LEESE; did you mean CELERY_GUARD_LEASE?"),
        ("CELERY_GUARD_COLOUR", "unknown setting CELERY_GUARD_COLOUR; remove it"),
        ("GUARD_LEASE", "setting GUARD_LEASE is not read; write CELERY_GUARD_LEASE"),
        ("GUARD_LEESE", "unknown setting GUARD_LEESE; did you mean CELERY_GUARD_LEASE?"),
        ("celery_guard_lease", "setting celery_guard_lease is not read; write CELERY_GUARD_LEASE"),
        ("guard_colour", "unknown setting guard_colour; remove it"),
        ("CELERY_GUARD_FAILED_JOBS_BACKEND", "setting CELERY_GUARD_FAILED_JOBS_BACKEND is not part of this version"),
    ],
)
def test_dead_spellings_with_namespace(key: str, words: str) -> None:
    """With a namespace the remedy has the namespace."""
    app = Celery("shop", set_as_current=False)
    app.config_from_object({"CELERY_GUARD_STORE_BACKEND": STORE, key: 60}, namespace="CELERY")
    with refused(words):
        Settings.from_conf(app.conf)


def test_a_forgotten_namespace() -> None:
    """Names with the prefix of a namespace that nobody declared are told, as is the missing store."""
    app = Celery("shop", set_as_current=False)
    app.config_from_object({"CELERY_GUARD_STORE_BACKEND": STORE})
    with refused("guard_store_backend is missing", "setting CELERY_GUARD_STORE_BACKEND is not read; write guard_store_backend"):
        Settings.from_conf(app.conf)


def test_foreign_names_of_a_shared_settings_module_pass() -> None:
    """With a namespace, GUARD_… and GUARDIAN_… of another library are not ours to judge."""
    app = Celery("shop", set_as_current=False)
    app.config_from_object({"CELERY_GUARD_STORE_BACKEND": STORE, "GUARD_API_HOSTS": [], "GUARDIAN_RAISE_403": True, "ANONYMOUS_USER": None}, namespace="CELERY")
    assert Settings.from_conf(app.conf).store_backend == STORE


def test_a_setting_in_two_spellings() -> None:
    """Celery 5.4 and 5.7 disagree which spelling wins, so two different values are an error; the same value twice is none."""
    app = Celery("shop", set_as_current=False)
    app.config_from_object({"CELERY_GUARD_STORE_BACKEND": STORE, "CELERY_GUARD_LEASE": 30}, namespace="CELERY")
    app.conf.guard_lease = 30
    assert Settings.from_conf(app.conf).lease == 30
    app.conf.guard_lease = 60
    with refused("setting guard_lease is also set as CELERY_GUARD_LEASE, to another value; keep CELERY_GUARD_LEASE"):
        Settings.from_conf(app.conf)
    app.conf.CELERY_GUARD_LEASE = 60
    assert Settings.from_conf(app.conf).lease == 60


def test_a_later_change_is_no_second_spelling() -> None:
    """A setting may be changed under one name as often as one likes."""
    app = Celery("shop", set_as_current=False)
    app.config_from_object({"guard_store_backend": "memory", "guard_lease": 30})
    app.conf.guard_store_backend = STORE
    assert Settings.from_conf(app.conf).lease == 30
    app.conf.update(guard_lease=90)
    assert Settings.from_conf(app.conf) == Settings(store_backend=STORE, lease=90.0)


def test_a_plain_dict_will_do() -> None:
    """Settings can be read from any mapping, keys of other types included."""
    conf: Any = {"guard_store_backend": "memory", 5: 6}
    assert Settings.from_conf(conf) == Settings(store_backend="memory")


# ----------------------------------------------------------------------------------- passwords

PASSWORDS: dict[str, Any] = {
    "guard_store_backend": "redis://shop:s3cret@h:6379/2",
    "guard_store_transport_options": {"password": "s3cret", "health_check_interval": 30},
}


@pytest.mark.parametrize("namespace", ["", "CELERY_"])
def test_reports_of_celery_show_no_password(namespace: str) -> None:
    """``celery report`` and ``inspect conf`` mask what is in our settings, because of how they are named."""
    app = Celery("shop", set_as_current=False, broker="memory://")
    conf = {(namespace + name).upper() if namespace else name: value for name, value in PASSWORDS.items()}
    app.config_from_object(conf, namespace=namespace.rstrip("_") or None)
    assert Settings.from_conf(app.conf).store_backend == PASSWORDS["guard_store_backend"]
    for text in (app.bugreport(), str(app.conf.humanize(with_defaults=True)), str(app.conf.table(with_defaults=True))):
        assert "guard_store_backend" in text.lower()
        assert "@h" in text
        assert "s3cret" not in text


def test_own_output_shows_no_password() -> None:
    """What we show of the settings is masked, the server stays readable."""
    shown = read(**PASSWORDS).redacted()
    assert "s3cret" not in str(shown)
    assert shown["guard_store_backend"] == "redis://shop:********@h:6379/2"
    assert shown["guard_store_transport_options"]["health_check_interval"] == 30


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guard_store_backend", "redis://:s3#cret@h:6379/0"),
        ("guard_store_backend", ["redis://:s3cret@a", "redis://:s3cret@b"]),
        ("guard_store_backend", "redis://h/0?password=s3cret"),
        ("guard_store_backend", "amqp://shop:s3cret@h"),
        ("guard_store_backend", b"redis://:s3cret@h"),
        ("guard_store_transport_options", {"password": "s3cret", "socket_timeout": 1}),
    ],
)
def test_errors_show_no_password(name: str, value: Any) -> None:
    """Error texts end up in logs and error trackers."""
    with pytest.raises(ConfigurationError) as caught:
        read(**{"guard_store_backend": "memory", name: value})
    assert "s3" not in str(caught.value)
    assert "cret" not in str(caught.value.problems)


# ------------------------------------------------------------------------------------ warnings


def test_warnings() -> None:
    """What works, and is more often a mistake than meant, is told and not refused."""
    assert read(guard_store_backend=STORE).warnings() == []
    assert ["within one process only" in text for text in read(guard_store_backend="memory").warnings()] == [True]
    assert ["not shorter than guard_lease=5" in text for text in read(guard_store_backend=STORE, guard_lease=5).warnings()] == [True]
