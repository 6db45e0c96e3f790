"""``celery -A app guard …`` as operators type it: a real process, a real server, no worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_guard import Guard
from celery_guard.decisions import BeginRequest, ClaimRequest
from example_app.services import ROOT
from tests.services import wait_until
from tests.services.app import AppEnvironment

GUARDED = "tests.services.guarded"
PRELOADED = """
import click
from celery import signals
from tests.services.guarded import app
app.user_options["preload"].add(click.Option(("--ini",)))

@signals.user_preload_options.connect
def told(options, **_):
    with open("told", "a") as file:
        file.write(f"{options['ini']}\\n")
"""

Celery = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(app_environment: AppEnvironment) -> dict[str, str]:
    variables = {**os.environ, **app_environment.variables(), "PYTHONPATH": str(ROOT)}
    for name in ("FORCE_COLOR", "NO_COLOR", "PYTEST_CURRENT_TEST"):
        variables.pop(name, None)
    return variables


@pytest.fixture
def celery(environment: dict[str, str], tmp_path: Path) -> Celery:
    """Run a celery command with its output in pipes; it must not end with a traceback."""

    def run(*words: str, app: str | None = GUARDED, **more: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "celery", *(["-A", app] if app else []), *words]
        done = subprocess.run(
            argv, capture_output=True, text=True, env={**environment, **more}, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=100, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


@pytest.fixture
def store(app_factory: Any) -> Any:
    store = Guard(app_factory(GUARDED)).store
    yield store
    store.close()


def take(store: Any, resource: str, name: str = "first", limit: int = 1) -> None:
    """Claim a resource and hold a slot of the lock of the same name."""
    store.claim(ClaimRequest(resource, name, f"task-{name}", 60))
    store.begin(BeginRequest(owner=f"lock-{name}", token=name, generation=0, task_id=f"task-{name}", worker="celery@w:1", lease=60, lock=resource, limit=limit))


@pytest.mark.parametrize("where", ["--ini x locks list", "locks --ini x list", "locks list --ini x"])
def test_preload_options(celery: Celery, tmp_path: Path, where: str) -> None:
    """An app's own preload option may stand before and after the sub-command, and is told once with its value."""
    (tmp_path / "preloaded.py").write_text(PRELOADED)
    done = celery("guard", *where.split(), app="preloaded", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "told").read_text().split() == ["x"]


def test_celery_itself_is_not_disturbed(celery: Celery) -> None:
    """The plugin shows up in Celery's help and loads no sub-command and no store for that."""
    done = celery("--help", app=None)
    assert done.returncode == 0
    assert "guard" in done.stdout
    done = celery("guard", "--help", PYTHONVERBOSE="1")
    assert "Usage:" in done.stdout
    assert "import 'celery_guard.cli'" in done.stderr
    # Redis itself may be loaded: Celery does so for the app's broker.
    loaded = [
        line for line in done.stderr.splitlines() if line.startswith(("import 'sqlalchemy", "import 'celery_guard.stores.redis", "import 'celery_guard.cli."))
    ]
    assert loaded == []


def test_lists_and_shows_in_pipes(celery: Celery, store: Any) -> None:
    """Data goes to stdout without escape codes and nothing to stderr; JSON parses; no worker is needed."""
    take(store, "locked:1")
    for group in ("locks", "claims"):
        for words in (["list"], ["show", "locked:1"]):
            plain = celery("guard", group, *words)
            assert plain.returncode == 0
            assert plain.stderr == ""
            assert "\x1b" not in plain.stdout
            assert plain.stdout.splitlines()[1].startswith("locked:1 ")
    (lock,) = json.loads(celery("guard", "locks", "list", "--json").stdout)
    assert (lock["key"], lock["holders"][0]["token"]) == ("locked:1", "first")
    (claim,) = json.loads(celery("guard", "claims", "list", "--json").stdout)
    assert (claim["key"], claim["state"], claim["owner"]) == ("locked:1", "queued", "first")


def test_release(celery: Celery, store: Any) -> None:
    """Dry run changes nothing, no terminal needs --yes, --yes releases, a second release finds nothing."""
    take(store, "k")
    for group, held in (("locks", store.get_lock), ("claims", store.get_claim)):
        before = held("k")
        assert celery("guard", group, "release", "k", "--dry-run").returncode == 0
        assert celery("guard", group, "release", "k").returncode == 2
        assert held("k") == before
        assert celery("guard", group, "release", "k", "--yes").returncode == 0
        assert held("k") is None
        done = celery("guard", group, "release", "k", "--yes")
        assert done.returncode == 1
        assert "nobody holds" in done.stderr


@pytest.mark.parametrize("group", ["locks", "claims"])
def test_holder_that_changes_while_the_question_is_open(environment: dict[str, str], store: Any, tmp_path: Path, group: str) -> None:
    """Only who was shown is released: who came while the question was open keeps what it has."""
    take(store, "k")
    ours, theirs = os.openpty()
    output = tmp_path / "output"
    try:
        with output.open("w") as file:
            argv = [sys.executable, "-m", "celery", "-A", GUARDED, "guard", group, "release", "k"]
            process = subprocess.Popen(argv, stdin=theirs, stdout=file, stderr=file, env=environment, cwd=tmp_path)
        with process:
            try:
                wait_until(lambda: "Release?" in output.read_text() or process.poll() is not None, 60)
                assert store.force_release_slot("k", "first")
                assert store.force_release_claim("k", "first")
                take(store, "k", "second")
                os.write(ours, b"y\n")
                assert process.wait(60) == 1
            finally:
                process.kill()
    finally:
        os.close(ours)
        os.close(theirs)
    text = output.read_text()
    assert "task-first" in text
    assert "changed meanwhile" in text
    assert "nothing was released" in text
    assert "task-second" in text
    assert [holder.token for holder in store.get_lock("k").holders] == ["second"]
    assert store.get_claim("k").owner == "second"


def test_explain_names_the_keys_that_are_in_redis(celery: Celery, store: Any, redis_url: str) -> None:
    """What explain derives and names is what dispatch and worker use."""
    free = json.loads(celery("guard", "explain", "both", "job-1", "how=ok", "--json").stdout)
    assert free["unique"]["claim"] is None
    claim, lock = free["unique"]["key"], free["without_overlapping"]["key"]
    assert claim == lock == "both:job-1"
    take(store, claim)
    data = json.loads(celery("guard", "explain", "both", "job-1", "--json").stdout)
    assert data["unique"]["claim"]["task_id"] == "task-first"
    assert data["without_overlapping"]["lock"]["holders"][0]["task_id"] == "task-first"
    with redis.Redis.from_url(redis_url) as client:
        names = [*data["unique"]["redis_keys"], *data["without_overlapping"]["redis_keys"]]
        assert client.exists(*names) == len(names) == 4


def test_store_away(celery: Celery) -> None:
    """Exit code 3 and a message without password or traceback."""
    conf = json.dumps({"guard_store_backend": "redis://:sekret@127.0.0.1:1/0"})
    for words in (["locks", "list"], ["claims", "release", "k", "--yes"], ["explain", "both", "1"]):
        done = celery("guard", *words, CELERY_GUARD_TEST_CONF=conf)
        assert done.returncode == 3
        assert "127.0.0.1:1" in done.stderr
        assert "sekret" not in done.stdout + done.stderr
    done = celery("guard", "config", CELERY_GUARD_TEST_CONF=conf)
    assert done.returncode == 0
    assert "sekret" not in done.stdout + done.stderr


def test_without_app_or_setting(celery: Celery) -> None:
    """A missing setting is told with its remedy; without -A that is mentioned too."""
    done = celery("guard", "locks", "list", CELERY_GUARD_TEST_CONF=json.dumps({"guard_store_backend": None}))
    assert done.returncode == 2
    assert "guard_store_backend is missing" in done.stderr
    assert "-A YOUR_APP" not in done.stderr
    done = celery("guard", "locks", "list", app=None)
    assert done.returncode == 2
    assert "-A YOUR_APP" in done.stderr
