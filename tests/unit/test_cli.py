"""The commands of ``celery -A app guard``, run in this process on a store in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import click
import pytest
from celery import Celery
from celery.bin.base import CLIContext
from celery.signals import user_preload_options
from click.testing import CliRunner, Result

from celery_guard import Guard, GuardedTask, Unique, WithoutOverlapping
from celery_guard.cli import guard as guard_group
from celery_guard.cli import output, releasing
from celery_guard.decisions import BeginRequest, ClaimRequest
from celery_guard.errors import StoreUnavailable
from celery_guard.stores.memory import MemoryStore

Call = Callable[..., Result]


@pytest.fixture
def app() -> Celery:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.guard_store_backend = "memory"

    @app.task(name="shop.rebuild", base=GuardedTask, unique=Unique(key="product:{product_id}"), without_overlapping=WithoutOverlapping(key="tenant:{tenant}"))
    def rebuild(product_id, tenant="x"):
        return product_id

    @app.task(name="shop.loud", base=GuardedTask, unique=Unique(key="{a}", on_conflict="raise"))
    def loud(a):
        return a

    @app.task(name="shop.picky", base=GuardedTask, without_overlapping=WithoutOverlapping(key="{a}", on_conflict="raise", limit=2))
    def picky(a):
        return a

    @app.task(name="shop.skipping", base=GuardedTask, bind=True, autoretry_for=(OSError,), without_overlapping=WithoutOverlapping(on_conflict="skip"))
    def skipping(self, a, b=None):
        return a

    @app.task(name="shop.plain")
    def plain():
        return None

    @app.task(name="shop.bare", base=GuardedTask)
    def bare():
        return None

    return app


@pytest.fixture
def store(app: Celery) -> Any:
    return Guard(app).store


@pytest.fixture
def call(app: Celery) -> Call:
    def invoke(*words: str, **options: Any) -> Result:
        context = CLIContext(app=app, no_color=False, workdir=None)
        return CliRunner().invoke(guard_group, words, obj=context, catch_exceptions=False, **options)

    return invoke


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a person could be asked."""
    monkeypatch.setattr(releasing, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))


def take_slot(store: Any, lock: str, token: str = "token", task_id: str = "job", limit: int = 1, lease: float = 30.0) -> None:
    store.begin(BeginRequest(owner=f"of-{token}", token=token, generation=0, task_id=task_id, worker="celery@host:1", lease=lease, lock=lock, limit=limit))


def take_claim(store: Any, resource: str, owner: str = "owner", task_id: str = "job", ttl: float = 60.0) -> None:
    store.claim(ClaimRequest(resource, owner, task_id, ttl))


def tokens(store: Any, lock: str) -> list[str]:
    info = store.get_lock(lock)
    return [holder.token for holder in info.holders] if info else []


# ------------------------------------------------------------------------------ the group


def test_entry_point_imports_only_click() -> None:
    """Every celery command imports the entry point: it must not load a store, a sub-command, Redis or SQL."""
    script = "import sys, celery_guard; before = set(sys.modules); import celery_guard.cli; print(sorted(set(sys.modules) - before), 'redis' in sys.modules)"
    text = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    ours = [name for name in text.split("'") if name.startswith(("celery_guard", "redis", "sqlalchemy", "rich"))]
    assert ours == ["celery_guard.cli"]
    assert text.rstrip().endswith("False")


def test_help_lists_commands_and_exit_codes(call: Call) -> None:
    """The help of the group and of each command documents the exit codes."""
    shown = call("--help").stdout
    assert [word for word in ("claims", "config", "explain", "locks") if f"  {word} " in shown] == ["claims", "config", "explain", "locks"]
    for words in ([], ["locks", "list"], ["locks", "release"], ["claims", "show"], ["explain"], ["config"]):
        result = call(*words, "--help")
        assert result.exit_code == 0
        assert "3  the lock store is away" in result.stdout


def test_unknown_command_is_proposed(call: Call) -> None:
    """A misspelt command ends with usage error and the nearest name, in each group."""
    assert "did you mean 'locks'?" in call("lock").stderr
    result = call("locks", "relese")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "did you mean 'release'?" in result.stderr
    assert "there are: list, release, show" in call("locks", "zzz").stderr


@pytest.mark.parametrize("words", ["--ini x locks list", "locks --ini x list", "locks list --ini x", "--ini y locks list --ini x", "config --ini x"])
@pytest.mark.parametrize("required", [False, True])
def test_preload_options_are_taken_anywhere_and_told_once(app: Celery, call: Call, words: str, required: bool) -> None:
    """An app's own preload option may stand at every place; the app hears of it once, with its value."""
    app.user_options["preload"].add(click.Option(("--ini",), required=required))
    heard: list[Any] = []

    def receive(options, **_):
        heard.append(options)

    user_preload_options.connect(receive)
    try:
        result = call(*words.split())
    finally:
        user_preload_options.disconnect(receive)
    assert result.exit_code == 0
    assert heard == [{"ini": "x"}]


def test_missing_required_preload_option_is_a_usage_error(app: Celery, call: Call) -> None:
    """A preload option that the app requires is required of the command."""
    app.user_options["preload"].add(click.Option(("--ini",), required=True))
    result = call("locks", "list")
    assert result.exit_code == 2
    assert "--ini" in result.stderr


# ------------------------------------------------------------------------------------ lists


def test_locks_list(call: Call, store: Any) -> None:
    """One line for each holder, with key, task, worker, times in UTC and fence; no token."""
    take_slot(store, "shop.rebuild:tenant:x", limit=2)
    take_slot(store, "shop.rebuild:tenant:x", token="secret2", task_id="job2", limit=2)
    heading, *rows = call("locks", "list").stdout.splitlines()
    assert heading.split("  ")[0] == "KEY"
    assert [row.split()[:4] for row in rows] == [["shop.rebuild:tenant:x", "2", task, "celery@host:1"] for task in ("job", "job2")]
    assert all(row.split()[4].endswith("Z") for row in rows)
    assert [row.split()[-1] for row in rows] == [str(holder.fence) for holder in store.get_lock("shop.rebuild:tenant:x").holders]
    assert "secret2" not in "".join(rows)


def test_locks_list_json(call: Call, store: Any) -> None:
    """--json prints one document, an empty list included."""
    assert json.loads(call("locks", "list", "--json").stdout) == []
    take_slot(store, "shop.rebuild:tenant:x")
    (lock,) = json.loads(call("locks", "list", "--json").stdout)
    (holder,) = lock["holders"]
    assert (lock["key"], lock["fence"]) == ("shop.rebuild:tenant:x", holder["fence"])
    assert (holder["task_id"], holder["worker"], holder["token"]) == ("job", "celery@host:1", "token")
    assert holder["since"] < holder["expires"]


def test_claims_list_and_json(call: Call, store: Any) -> None:
    """The claims with state and task id."""
    take_claim(store, "shop.loud:1")
    assert call("claims", "list").stdout.splitlines()[1].split()[:3] == ["shop.loud:1", "queued", "job"]
    (claim,) = json.loads(call("claims", "list", "--json").stdout)
    assert {name: claim[name] for name in ("key", "state", "task_id", "owner")} == {"key": "shop.loud:1", "state": "queued", "task_id": "job", "owner": "owner"}


def test_lists_are_filtered_by_task_and_text(call: Call, store: Any) -> None:
    """--task takes exactly one task's keys; --match looks into key, task id and worker."""
    for number, key in enumerate(("shop.loud:1", "shop.loud2:1", "other:shop.loud:1", "a%3Ab:1")):
        take_claim(store, key, task_id=f"id-{number}", ttl=60 + number)
    take_slot(store, "shop.picky:1", task_id="needle")

    def keys(*words: str) -> list[str]:
        return [item["key"] for item in json.loads(call(*words, "--json").stdout)]

    assert keys("claims", "list", "--task", "shop.loud") == ["shop.loud:1"]
    assert keys("claims", "list", "--task", "a:b") == ["a%3Ab:1"]
    assert keys("claims", "list", "--match", "loud2") == ["shop.loud2:1"]
    assert keys("claims", "list", "--match", "id-2") == ["other:shop.loud:1"]
    assert keys("locks", "list", "--match", "needle") == keys("locks", "list", "--match", "celery@host") == ["shop.picky:1"]
    assert keys("locks", "list", "--match", "nothing") == []


def test_lists_are_paged(call: Call, store: Any) -> None:
    """--limit says on stderr how to go on; --after does so; filters reach behind the first page."""
    for number in range(130):
        take_claim(store, f"t:{number}", ttl=60 + number)
    first = call("claims", "list", "--limit", "2", "--json")
    assert [item["key"] for item in json.loads(first.stdout)] == ["t:0", "t:1"]
    assert "--after 't:1'" in first.stderr
    assert [item["key"] for item in json.loads(call("claims", "list", "--limit", "2", "--after", "t:1", "--json").stdout)] == ["t:2", "t:3"]
    last = call("claims", "list", "--match", "t:129", "--json")
    assert [item["key"] for item in json.loads(last.stdout)] == ["t:129"]
    assert last.stderr == ""
    assert len(json.loads(call("claims", "list", "--limit", "1000", "--json").stdout)) == 130


# ------------------------------------------------------------------------ show and release


def test_show(call: Call, store: Any) -> None:
    """show has what release needs; what nobody holds is told with exit code 1."""
    take_slot(store, "k")
    take_claim(store, "c")
    assert call("locks", "show", "k").stdout.split()[-1] == "token"
    assert call("claims", "show", "c").stdout.split()[-1] == "owner"
    assert json.loads(call("locks", "show", "k", "--json").stdout)["holders"][0]["token"] == "token"
    assert json.loads(call("claims", "show", "c", "--json").stdout)["owner"] == "owner"
    for group in ("locks", "claims"):
        for verb in ("show", "release"):
            result = call(group, verb, "none", *(["--yes"] if verb == "release" else []))
            assert (result.exit_code, result.stdout) == (1, "")
            assert "nobody holds" in result.stderr


@pytest.mark.parametrize("group", ["locks", "claims"])
def test_release_asks_a_person_or_refuses(call: Call, store: Any, group: str) -> None:
    """Where nobody can be asked, nothing is released without --yes; the remedy is named."""
    take_slot(store, "k")
    take_claim(store, "k")
    result = call(group, "release", "k", input="y\n")
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert tokens(store, "k") == ["token"]
    assert store.get_claim("k").owner == "owner"


@pytest.mark.parametrize("group", ["locks", "claims"])
def test_release_dry_run(call: Call, store: Any, group: str) -> None:
    """--dry-run shows what would be released and changes nothing, even with --yes."""
    take_slot(store, "k")
    take_claim(store, "k")
    result = call(group, "release", "k", "--dry-run", "--yes")
    assert result.exit_code == 0
    assert result.stdout.startswith("would release")
    assert "task job" in result.stdout
    assert not json.loads(call(group, "release", "k", "--dry-run", "--json").stdout)[0]["released"]
    assert tokens(store, "k") == ["token"]
    assert store.get_claim("k").owner == "owner"


def test_release_lock(call: Call, store: Any) -> None:
    """--yes releases all slots, --token only its own."""
    for name in ("a", "b", "c"):
        take_slot(store, "k", token=name, task_id=f"job-{name}", limit=3)
    result = call("locks", "release", "k", "--token", "b", "--yes")
    assert (result.exit_code, tokens(store, "k")) == (0, ["a", "c"])
    assert "job-b" in result.stdout
    assert call("locks", "release", "k", "--token", "b", "--yes").exit_code == 1
    done = json.loads(call("locks", "release", "k", "--yes", "--json").stdout)
    assert [(item["token"], item["released"]) for item in done] == [("a", True), ("c", True)]
    assert tokens(store, "k") == []


def test_release_claim(call: Call, store: Any) -> None:
    """--owner must be the one that holds it."""
    take_claim(store, "c")
    result = call("claims", "release", "c", "--owner", "other", "--yes")
    assert result.exit_code == 1
    assert "owner owner" in result.stderr
    assert store.get_claim("c") is not None
    assert call("claims", "release", "c", "--owner", "owner", "--yes").exit_code == 0
    assert store.get_claim("c") is None


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, []), ("n\n", 1, ["token"]), ("\n", 1, ["token"]), ("", 1, ["token"])])
def test_release_asks(call: Call, store: Any, at_terminal: None, answer: str, code: int, left: list[str]) -> None:
    """Only a clear yes releases; the question and the risk are on stderr."""
    take_slot(store, "k")
    result = call("locks", "release", "k", input=answer)
    assert result.exit_code == code
    assert tokens(store, "k") == left
    assert "another one may start beside it" in result.stderr
    assert ("released" in result.stdout) is (code == 0)


@pytest.mark.parametrize("group", ["locks", "claims"])
def test_release_of_what_changed_meanwhile(call: Call, store: Any, at_terminal: None, monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """A holder that came after the question was asked keeps it; the command says so and fails."""
    take_slot(store, "k")
    take_claim(store, "k")

    def answer_late(*_: Any, **__: Any) -> bool:
        store.force_release_slot("k", "token")
        store.force_release_claim("k", "owner")
        take_slot(store, "k", token="new", task_id="newcomer")
        take_claim(store, "k", owner="new", task_id="newcomer")
        return True

    monkeypatch.setattr(click, "confirm", answer_late)
    result = call(group, "release", "k")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "changed meanwhile" in result.stderr
    assert "nothing was released" in result.stderr
    assert "newcomer" in result.stderr
    assert tokens(store, "k") == ["new"]
    assert store.get_claim("k").owner == "new"


# ---------------------------------------------------------------------------------- explain


def explained(call: Call, *words: str) -> dict[str, Any]:
    result = call("explain", *words, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert isinstance(data, dict)
    return data


def test_explain_shows_keys_and_options(app: Celery, call: Call) -> None:
    """The keys are those of a dispatch with the same arguments, however they are given."""
    task: Any = app.tasks["shop.rebuild"]
    data = explained(call, "shop.rebuild", "42", "t1")
    for words in (["42", "tenant=t1"], ["--kwargs", '{"product_id": 42, "tenant": "t1"}'], ["tenant=t1", "product_id=42"]):
        assert explained(call, "shop.rebuild", *words) == data
    assert data["arguments"] == {"product_id": 42, "tenant": "t1"}
    assert data["unique"]["key"] == task.claim_key((42, "t1"), {}) == "shop.rebuild:product:42"
    assert data["without_overlapping"]["key"] == task.lock_key((42, "t1"), {})
    assert data["unique"]["options"] == {"key": "product:{product_id}", "until": "executed", "ttl": 3600.0, "on_conflict": "skip", "shared": False}
    assert data["unique"]["redis_keys"] == ["guard:1:{shop.rebuild:product:42}:claim"]
    assert data["unique"]["claim"] is None
    assert "would be sent" in data["unique"]["if_dispatched_now"]
    assert "would run: 0 of 1 slots" in data["without_overlapping"]["if_started_now"]


def test_explain_takes_typed_and_plain_words(call: Call) -> None:
    """JSON is JSON, everything else is text; a word with = that is no name is text too."""
    assert explained(call, "shop.skipping", "[1, null]", "b=true")["arguments"] == {"a": [1, None], "b": True}
    assert explained(call, "shop.skipping", "https://x/?a=b", "text")["arguments"] == {"a": "https://x/?a=b", "b": "text"}
    assert explained(call, "shop.skipping", '"a=b"')["arguments"] == {"a": "a=b", "b": None}
    data = call("explain", "--json", "--", "shop.skipping", "-5")
    assert json.loads(data.stdout)["arguments"] == {"a": -5, "b": None}
    assert json.loads(data.stdout)["without_overlapping"]["options"]["key"] == "all arguments"


def test_explain_tells_who_is_in_the_way(call: Call, store: Any) -> None:
    """With a holder, each on_conflict has its own outcome."""
    take_claim(store, "shop.rebuild:product:42", task_id="first")
    take_slot(store, "shop.rebuild:tenant:x", task_id="runner")
    data = explained(call, "shop.rebuild", "42")
    assert data["unique"]["claim"]["task_id"] == "first"
    assert "task first has claimed the key" in data["unique"]["if_dispatched_now"]
    assert "nothing would be sent" in data["unique"]["if_dispatched_now"]
    assert "by task runner" in data["without_overlapping"]["if_started_now"]
    assert "postponed, first by about 1 s" in data["without_overlapping"]["if_started_now"]
    take_claim(store, "shop.loud:1")
    assert "DuplicateTask" in explained(call, "shop.loud", "1")["unique"]["if_dispatched_now"]
    take_slot(store, "shop.picky:1", token="a", limit=2)
    assert "would run: 1 of 2" in explained(call, "shop.picky", "1")["without_overlapping"]["if_started_now"]
    take_slot(store, "shop.picky:1", token="b", limit=2)
    assert "OverlapRefused" in explained(call, "shop.picky", "1")["without_overlapping"]["if_started_now"]
    take_slot(store, explained(call, "shop.skipping", "1")["without_overlapping"]["key"])
    assert "REVOKED" in explained(call, "shop.skipping", "1")["without_overlapping"]["if_started_now"]


def test_explain_changes_nothing(call: Call, store: Any) -> None:
    """A question takes neither claim nor slot."""
    explained(call, "shop.rebuild", "42")
    assert (store.list_claims(), store.list_locks()) == ([], [])


def test_explain_as_text(call: Call, store: Any) -> None:
    """Without --json the same is told in lines."""
    text = call("explain", "shop.rebuild", "42").stdout
    for line in ("  product_id = 42", "  key: shop.rebuild:product:42", "  in Redis: guard:1:{shop.rebuild:product:42}:claim", '  made of = "tenant:{tenant}"'):
        assert line in text.splitlines()
    assert "without_overlapping: not used" in call("explain", "shop.loud", "1").stdout


def test_explain_of_a_task_without_guard(call: Call) -> None:
    """It says whether a task is guarded, and why not."""
    assert "base class is not GuardedTask" in call("explain", "shop.plain").stdout
    assert "are not set" in call("explain", "shop.bare").stdout
    assert explained(call, "shop.plain")["guarded"] is False


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["shop.rebuidl", "1"], 2, "did you mean 'shop.rebuild'?"),
        (["rebuild", "1"], 2, "did you mean 'shop.rebuild'?"),
        (["zzzzzz"], 2, "shop.bare, shop."),
        (["shop.rebuild"], 1, "product_id"),
        (["shop.rebuild", "1", "nope=2"], 1, "nope"),
        (["shop.rebuild", "--kwargs", "[1]"], 2, "JSON object"),
        (["shop.rebuild", "--kwargs", "{"], 2, "is not JSON"),
        (["shop.rebuild", "--kwargs", '{"tenant": 1}', "tenant=2"], 2, "given twice"),
    ],
)
def test_explain_of_what_cannot_be(call: Call, words: list[str], code: int, text: str) -> None:
    """Wrong names and arguments are told on stderr, with their exit code."""
    result = call("explain", *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in result.stderr


# ------------------------------------------------------------------------- config and errors


def test_config(app: Celery, call: Call) -> None:
    """Values in effect, their defaults, and no password."""
    app.conf.update(
        guard_store_backend="redis://user:sekret@localhost:6379/2", guard_lease=60, guard_store_transport_options={"password": "sekret", "ssl_ca_certs": "x"}
    )
    result = call("config")
    rows = {line.split()[0]: line for line in result.stdout.splitlines()[1:]}
    assert "60.0" in rows["guard_lease"]
    assert "no, it is 30.0" in rows["guard_lease"]
    assert rows["guard_eager"].rstrip().endswith("yes")
    data = {item["name"]: item for item in json.loads(call("config", "--json").stdout)}
    assert (data["guard_lease"]["value"], data["guard_lease"]["default"], data["guard_lease"]["unit"]) == (60.0, 30.0, "seconds")
    assert list(data) == list(rows)
    assert "sekret" not in result.output + json.dumps(data)


def test_settings_at_fault_are_told(app: Celery, call: Call) -> None:
    """A missing or misspelt setting ends every command with exit code 2 and the remedy, not with a traceback."""
    app.conf.guard_leese = 60
    for words in (["config"], ["locks", "list"], ["claims", "list"], ["explain", "shop.plain"]):
        result = call(*words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "did you mean guard_lease?" in result.stderr
    bare = Celery("bare", broker="memory://", set_as_current=False)
    result = CliRunner().invoke(guard_group, ["locks", "list"], obj=CLIContext(app=bare, no_color=False, workdir=None))
    assert result.exit_code == 2
    assert "guard_store_backend is missing" in result.stderr


@pytest.mark.parametrize("words", ["locks list", "locks show k", "locks release k --yes", "claims list", "claims release k --yes"])
def test_store_away(call: Call, store: Any, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Without the store the exit code is 3 and the message that of the store."""
    make_unavailable(monkeypatch)
    result = call(*words.split())
    assert (result.exit_code, result.stdout) == (3, "")
    assert "the store is on holiday" in result.stderr


def test_explain_without_the_store(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys can be told without the store, and are, with exit code 3."""
    make_unavailable(monkeypatch)
    for task in ("shop.rebuild", "shop.picky"):
        result = call("explain", task, "42", "--json")
        assert result.exit_code == 3
        assert 42 in json.loads(result.stdout)["arguments"].values()
    assert "store could not be asked" in call("explain", "shop.rebuild", "42").stdout


def make_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("the store is on holiday")

    for verb in ("get_lock", "get_claim", "list_locks", "list_claims"):
        monkeypatch.setattr(MemoryStore, verb, fail)


# ----------------------------------------------------------------------------------- output


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0s"), (0.4, "0s"), (59.6, "1m0s"), (3599, "59m59s"), (3600, "1h0m"), (90061, "1d1h"), (86400 * 400, "400d0h")]
)
def test_age(seconds: float, text: str) -> None:
    """Two units are enough for people; clocks that differ never show a negative age."""
    assert output.age(seconds) == text


def test_iso_is_utc() -> None:
    """Times are UTC and say so, whatever the machine's zone."""
    assert output.iso(0.5) == "1970-01-01T00:00:00.500Z"


def test_ids_cannot_steer_the_terminal(call: Call, store: Any) -> None:
    """Task ids come from messages: escape codes in them are shown, not sent."""
    take_claim(store, "k", task_id="\x1b[2Jevil\n")
    result = call("claims", "list")
    assert "\x1b" not in result.stdout
    assert "\\x1b[2Jevil\\x0a" in result.stdout
    assert len(result.stdout.splitlines()) == 2


class Terminal:
    """A stdout that says it is one."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.fixture
def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Print a table to a stdout that is a terminal, and return what it got."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")

    def printed(*rows: tuple[object, ...], no_color: bool = False) -> str:
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            output.print_table(("KEY", "N"), rows, no_color=no_color)
        return terminal.text

    return printed


def test_rich_tables_only_on_a_terminal(at_a_terminal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal rich shows headings in bold; NO_COLOR and --no-color turn that off; brackets are no markup."""
    pytest.importorskip("rich")
    text = at_a_terminal(("[red]k[/red]", 1))
    assert "\x1b[1m" in text
    assert "[red]k[/red]" in text
    assert at_a_terminal(("k", 1), no_color=True).split() == ["KEY", "N", "k", "1"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert at_a_terminal(("k", 1)).split() == ["KEY", "N", "k", "1"]


def test_tables_without_rich(at_a_terminal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """rich is an extra: without it there are plain aligned columns."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert at_a_terminal(("long-key", 1), (None, 2)) == "KEY       N\nlong-key  1\n-         2\n"
