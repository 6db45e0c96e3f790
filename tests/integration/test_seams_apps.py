"""The guard beside everything else that an app may be: other base classes, other plugins, several apps, several processes."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from celery import Celery, Task, shared_task
from celery.app.utils import bugreport

from celery_guard import ConfigurationError, Guard, GuardedTask, Unique, WithoutOverlapping
from celery_guard.stores.memory import MemoryStore
from tests.services.seams import catching, deliver, held, memory_app, run

ROOT = Path(__file__).parents[2]


class Context(Task):
    """What Flask's documentation shows: enter a context, run the body, and do not call super()."""

    abstract = True
    entered: ClassVar[list[str]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.entered.append("in")
        try:
            return self.run(*args, **kwargs)
        finally:
            self.entered.append("out")


class Cooperative(Task):
    """The same with super()."""

    abstract = True
    entered = Context.entered

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.entered.append("in")
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self.entered.append("out")


def _own_call() -> type[GuardedTask]:
    class Own(GuardedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            Context.entered.append("in")
            result = super().__call__(*args, **kwargs)
            Context.entered.append("out")
            return result

    return Own


BASES = {
    "context first": lambda: type("Base", (Context, GuardedTask), {"abstract": True}),
    "context last": lambda: type("Base", (GuardedTask, Context), {"abstract": True}),
    "cooperative first": lambda: type("Base", (Cooperative, GuardedTask), {"abstract": True}),
    "own __call__": _own_call,
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("through", ["base", "task_cls"])
def test_other_call_runs_inside_the_guard(base, through):
    """A __call__ of another base class runs, inside the guard, on whichever side of ours it stands and whether or not it calls super()."""
    cls = BASES[base]()
    app = memory_app() if through == "base" else memory_app(task_cls=cls)
    app.task_cls = cls if through == "task_cls" else app.task_cls
    Context.entered.clear()

    @app.task(bind=True, name="t", unique=True, without_overlapping=True, **({"base": cls} if through == "base" else {}))
    def body(self: Any) -> Any:
        return self.guard.key, list(Context.entered), self.request.called_directly, len(held(app))

    key, entered, directly, holds = run(app, body).value
    assert key.startswith("t:")
    assert (entered, Context.entered, directly, holds) == (["in"], ["in", "out"], False, 2)
    assert held(app) == []


@pytest.mark.parametrize("base", [*BASES, "plain"])
def test_body_that_calls_its_own_task(base):
    """self() in a body is a plain call: one run, one lock, also below a __call__ of another class."""
    app = memory_app()

    @app.task(base=BASES[base]() if base in BASES else GuardedTask, bind=True, name="t", without_overlapping=True)
    def body(self: Any, depth: int = 0) -> Any:
        return [self.guard.fence, *self(depth + 1)] if depth < 3 else []

    fences = run(app, body).value
    assert len(fences) == 3
    assert set(fences) == {fences[0]} != {None}
    assert held(app) == []


def test_body_that_calls_another_guarded_task():
    """Calling another guarded task like a function takes nothing of its, and its self.guard is the caller's run."""
    app = memory_app()

    @app.task(base=GuardedTask, bind=True, name="inner", unique=True, without_overlapping=True)
    def inner(self: Any) -> Any:
        return self.guard.key, len(held(app))

    @app.task(base=GuardedTask, bind=True, name="outer", without_overlapping=True)
    def outer(self: Any) -> Any:
        return [self.guard.key, *inner()]

    key, seen, holds = run(app, outer).value
    assert key.startswith("outer:")
    assert (seen, holds) == (key, 1)
    assert inner() == (None, 0)


def test_decorator_without_wraps():
    """A bound body whose signature a decorator hides has a key by what is left of it, instead of an error."""
    app = memory_app()

    def careless(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    @app.task(base=GuardedTask, bind=True, name="t", unique=True)
    @careless
    def body(self: Any, x: int) -> int:
        return x

    assert body.claim_key((1,), {}) != body.claim_key((2,), {})
    assert run(app, body, 5).value == 5


@pytest.mark.parametrize("signature", ["star", "keyword_only", "mutable", "untyped"])
def test_signatures_of_all_kinds(signature):
    """*args, keyword-only, mutable defaults and typing=False: equal calls are duplicates, others are not, and they run."""
    app = memory_app()

    def star(*args: Any, **kwargs: Any) -> Any:
        return [list(args), kwargs]

    def keyword_only(*args: Any, x: Any = 1) -> Any:
        return [list(args), x]

    def mutable(*args: Any, seen: list[Any] = []) -> Any:  # noqa: B006
        seen.append(1)
        return list(args)

    body = {"star": star, "keyword_only": keyword_only, "mutable": mutable, "untyped": star}[signature]
    task = app.task(base=GuardedTask, name="t", unique=True, typing=signature != "untyped")(body)
    with catching() as sent:
        results = [task.delay(1), task.delay(1), task.delay(2)]
    assert [result.duplicate for result in results] == [False, True, False]
    assert [deliver(app, message).state for message in sent] == [None, None]
    assert not task.delay(1).duplicate


def test_class_tasks_and_inherited_options():
    """Options come down from abstract bases; None or False in a subclass takes them away, another value replaces them."""
    app = memory_app()

    class Base(GuardedTask):
        abstract = True
        unique = Unique(key="k", ttl=100)
        without_overlapping = 2

        def run(self, x: int = 0) -> int:
            return x

    variants: dict[str, dict[str, Any]] = {
        "same": {},
        "none": {"unique": None},
        "false": {"unique": False, "without_overlapping": False},
        "other": {"unique": Unique(ttl=5), "without_overlapping": WithoutOverlapping(limit=7)},
    }
    made = {name: app.register_task(type(name, (Base,), {"name": name, **own})()) for name, own in variants.items()}
    options = {name: task.guard_options for name, task in made.items()}
    assert (options["same"].unique.ttl, options["same"].without_overlapping.limit) == (100, 2)
    assert (options["none"].unique, options["none"].without_overlapping.limit) == (None, 2)
    assert not options["false"]
    assert (options["other"].unique.ttl, options["other"].without_overlapping.limit) == (5, 7)
    assert made["none"].claim_key((1,), {}) is None
    assert [run(app, task, 4).value for task in made.values()] == [4, 4, 4, 4]
    assert held(app) == []


def test_subclass_of_a_registered_task():
    """A class derived from one that is in use has its own options and keys."""
    app = memory_app()

    class First(GuardedTask):
        name = "first"
        unique = True

        def run(self, x: int) -> int:
            return x

    class Second(First):
        name = "second"
        unique = None
        without_overlapping = True

    first, second = app.register_task(First()), app.register_task(Second())
    assert (first.claim_key((1,), {}) or "").startswith("first:")
    assert second.claim_key((1,), {}) is None
    assert (second.lock_key((1,), {}) or "").startswith("second:")


def test_annotations_set_options():
    """task_annotations may set options; a wrong one is a ConfigurationError like any other."""
    app = memory_app(task_annotations={"t": {"unique": 77}, "wrong": {"unique": -1}})
    app.task(base=GuardedTask, name="t")(_nothing)
    app.finalize()
    assert app.tasks["t"].guard_options.unique.ttl == 77
    with pytest.raises(ConfigurationError, match="wrong"):
        memory_app(task_annotations={"wrong": {"unique": -1}}).task(base=GuardedTask, name="wrong", lazy=False)(_nothing)


def _nothing(x: Any = None) -> None:
    """Do nothing."""


def test_task_cls_of_the_app():
    """Celery(task_cls=GuardedTask): every task takes options, Celery's own are left alone, app.Task is a base."""
    app: Any = Celery("seams", broker="memory://", backend="cache+memory://", set_as_current=False, task_cls=GuardedTask)
    app.conf.guard_store_backend = "memory"
    guarded = app.task(name="guarded", unique=True)(_nothing)
    plain = app.task(name="plain")(_nothing)

    class Own(app.Task):  # type: ignore[misc]
        name = "own"
        unique = True

        def run(self, x: Any = None) -> None:
            """Nothing."""

    own = app.register_task(Own())
    app.finalize()
    with catching() as sent:
        results = [task.delay(1) for task in (guarded, guarded, plain, plain, own, own)]
    assert [result.duplicate for result in results] == [False, True, False, False, False, True]
    assert all(deliver(app, message).state is None for message in sent)
    assert held(app) == []
    assert app.tasks["celery.backend_cleanup"].guard_options.unique is None


def test_shared_task_in_two_apps():
    """shared_task: each app has its own task, guard and store."""
    one, two = memory_app("one"), memory_app("two", guard_key_prefix="other")
    shared_task(base=GuardedTask, name="shared", unique=True)(_nothing)
    for app in (one, two):
        app.finalize()
        with catching() as sent:
            assert [app.tasks["shared"].delay(1).duplicate for _ in range(2)] == [False, True]
        assert len(sent) == 1
        assert len(held(app)) == 1
    assert Guard(one) is not Guard(two)
    assert Guard(one).store is not Guard(two).store


@pytest.mark.parametrize("autofinalize", [True, False])
def test_finalization(autofinalize):
    """An app that is finalized late, or only on command, is guarded from its first dispatch on."""
    app: Any = Celery("seams", broker="memory://", backend="cache+memory://", set_as_current=False, autofinalize=autofinalize)
    app.conf.guard_store_backend = "memory"
    task = app.task(base=GuardedTask, name="t", unique=True)(_nothing)
    if not autofinalize:
        app.finalize()
    with catching() as sent:
        assert [task.delay(1).duplicate for _ in range(2)] == [False, True]
    assert len(sent) == 1


def test_installed_once_by_many_threads():
    """Threads that use a new app at the same moment install one guard: installed twice, a dispatch would be its own duplicate."""
    for _ in range(50):
        app = memory_app()
        barrier = threading.Barrier(8)
        guards: list[Guard] = []

        def install(app: Any = app, barrier: Any = barrier, guards: Any = guards) -> None:
            barrier.wait(5)
            guards.append(Guard(app))

        threads = [threading.Thread(target=install) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(guard) for guard in guards}) == 1


def test_fifty_threads_dispatch_through_one_guard():
    """50 threads: one message for each key, and every caller gets its id."""
    app = memory_app()
    task = app.task(base=GuardedTask, name="t", unique=True)(_nothing)
    app.finalize()
    ids: list[tuple[int, str]] = []

    def dispatch() -> None:
        ids.extend((key, task.delay(key).id) for key in range(10))

    with catching() as sent:
        threads = [threading.Thread(target=dispatch) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(sent) == 10
    assert len(ids) == 500
    assert len(set(ids)) == 10


# --------------------------------------------------------------------------- other plugins


def test_send_task_takes_its_arguments_by_position():
    """app.send_task(name, args, kwargs, countdown, eta, task_id) as Celery has it."""
    app = memory_app()
    app.task(base=GuardedTask, name="t", unique=Unique(ttl=60))(_nothing)
    app.finalize()
    with catching() as sent:
        result = app.send_task("t", [1], {}, 10, None, "my-id")
    assert (result.id, sent[0].id) == ("my-id", "my-id")
    assert sent[0].headers["eta"] is not None
    (claim,) = Guard(app).store.list_claims()
    assert claim.expires_at - claim.since_at == pytest.approx(70, abs=1)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("where", ["app", "class"])
def test_plugin_that_wraps_send_task(order, where, monkeypatch):
    """Another plugin's wrapper of send_task, on the app or its class, before or after ours: both see each dispatch once."""
    app = memory_app()
    seen: list[str] = []

    def wrap() -> None:
        target = app if where == "app" else type(app)
        original = target.send_task

        def send_task(*args: Any, **kwargs: Any) -> Any:
            seen.append(args[0] if where == "app" else args[1])
            return original(*args, **kwargs)

        monkeypatch.setattr(target, "send_task", send_task)

    if order == "before":
        wrap()
    task = app.task(base=GuardedTask, name="t", unique=True)(_nothing)
    app.finalize()
    if order == "after":
        wrap()
    with catching() as sent:
        assert [task.delay(1).duplicate for _ in range(2)] == [False, True]
    assert len(sent) == 1
    assert set(seen) == {"t"}
    assert deliver(app, sent[0]).state is None
    assert held(app) == []


def test_plugin_that_wraps_the_class_of_a_task():
    """What APMs do when a tracer is built: put a wrapper over type(task).__call__; Task.apply_async is wrapped, too."""
    app = memory_app()
    app.task(base=GuardedTask, name="t", unique=True, without_overlapping=True)(_nothing)
    app.finalize()
    task = app.tasks["t"]
    calls: list[str] = []
    inner, dispatch = type(task).__call__, type(task).apply_async

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("run")
        return inner(self, *args, **kwargs)

    def apply_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("dispatch")
        kwargs["headers"] = {**(kwargs.get("headers") or {}), "trace": "1"}
        return dispatch(self, *args, **kwargs)

    type(task).__call__, type(task).apply_async = call, apply_async
    with catching() as sent:
        task.delay(1)
    assert deliver(app, sent[0]).state is None
    assert calls == ["dispatch", "run"]
    assert sent[0].headers["trace"] == "1"
    assert held(app) == []


@pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")
@pytest.mark.parametrize("hook", ["on_failure", "after_return", "on_success", "on_retry"])
def test_hooks_without_super_and_with_faults(hook):
    """Hooks that do not call super(), or raise, leave nothing held."""
    app = memory_app()

    def fails(self: Any, *args: Any) -> None:
        raise RuntimeError(hook)

    base = type("Base", (GuardedTask,), {"abstract": True, hook: fails})

    @app.task(base=base, bind=True, name="t", unique=True, without_overlapping=True, max_retries=1)
    def body(self: Any) -> None:
        if hook == "on_retry":
            raise self.retry(countdown=0)
        if hook != "on_success":
            raise ValueError

    with catching() as sent:
        body.delay()
        for message in sent:  # grows by the retry
            with suppress(RuntimeError):
                deliver(app, message)
    assert held(app) == []


# ----------------------------------------------------------------------------- processes


def test_app_survives_pickling():
    """An app with a guard can be pickled as ever; the copy gets a guard of its own."""
    app = memory_app()
    app.task(base=GuardedTask, name="t", unique=True)(_nothing)
    app.finalize()
    copy = pickle.loads(pickle.dumps(app))
    assert "send_task" not in vars(copy)
    assert Guard(copy) is not Guard(app)
    assert Guard(copy).settings == Guard(app).settings


def _child(url: str, key: int, results: Any) -> None:
    app = memory_app(guard_store_backend=url)
    task = app.task(base=GuardedTask, name="t", unique=True)(_nothing)
    app.finalize()
    results.put((Guard(app).backlog._thread is None, task.delay(key).duplicate))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_a_process_that_used_the_store(method, redis_url):
    """multiprocessing from a process that dispatched: the children see the claims and share neither connections nor threads."""
    app = memory_app(guard_store_backend=redis_url)
    task = app.task(base=GuardedTask, name="t", unique=True)(_nothing)
    app.finalize()
    assert not task.delay(0).duplicate
    context = multiprocessing.get_context(method)
    results = context.Queue()
    children = [context.Process(target=_child, args=(redis_url, key, results)) for key in (0, 1, 1)]
    for child in children:
        child.start()
    seen = [results.get(timeout=30) for _ in children]
    for child in children:
        child.join(30)
    assert sorted(duplicate for _, duplicate in seen) == [False, True, True]
    assert all(own for own, _ in seen)
    assert task.delay(0).duplicate
    Guard(app).close()


def test_forked_child_has_its_own_eager_store(monkeypatch):
    """The eager store's mutex may be held by a thread that the child does not have."""
    app = memory_app(guard_eager=True)
    guard = Guard(app)
    before = guard.eager_store
    guard.forget()
    assert isinstance(guard.eager_store, MemoryStore)
    assert guard.eager_store is not before


def _python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *flags, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_quiet_exit(redis_url):
    """A process that dispatched and ran, and simply ends, leaves no warning and no traceback; close() may be called at any time, twice."""
    done = _python(
        f"""
        from celery_guard import Guard, GuardedTask
        from tests.services.seams import memory_app, run
        app = memory_app(guard_store_backend={redis_url!r}, guard_eager=True)
        @app.task(base=GuardedTask, name="t", unique=True, without_overlapping=True)
        def t(x): return x
        assert run(app, t, 1).value == 1 == t.apply((1,)).get()
        guard = Guard(app)
        guard.close(); guard.close()
        assert run(app, t, 2).value == 2
        guard.release_later("r", "o")
        """,
        "-X",
        "dev",
        "-W",
        "error",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_stays():
    """Thousands of dispatches and runs keep nothing: no request, run or claim is left in the process."""
    done = _python(
        """
        import gc, tracemalloc
        from celery_guard import Guard, GuardedTask
        from celery_guard.run import Run
        from celery_guard.dispatch import Message
        from tests.services.seams import catching, deliver, memory_app
        app = memory_app()
        @app.task(base=GuardedTask, name="t", unique=True, without_overlapping=True, ignore_result=True)
        def t(x): return x
        app.finalize()
        sends = type(app).send_task
        def rounds(start, number):
            for x in range(start, start + number):
                with catching() as sent:
                    t.delay(x % 50)
                deliver(app, sent[0])
                with app.connection_for_write() as connection:
                    connection.default_channel.queue_purge(app.conf.task_default_queue)
        rounds(0, 300)
        gc.collect(); tracemalloc.start()
        rounds(300, 200); gc.collect()
        first = tracemalloc.get_traced_memory()[0]
        rounds(500, 2000); gc.collect()
        second = tracemalloc.get_traced_memory()[0]
        print(second - first, sum(isinstance(o, (Run, Message)) for o in gc.get_objects()), len(Guard(app).heartbeat))
        """
    )
    assert done.returncode == 0, done.stderr
    grown, objects, beating = map(int, done.stdout.split())
    assert (objects, beating) == (0, 0)
    assert grown < 200_000


def test_report_shows_no_password():
    """celery report and a look at the settings mask the store's password."""
    app = memory_app(
        guard_store_backend="redis://user:hunter2@localhost:1/0",
        guard_store_transport_options={"password": "hunter2", "username": "u"},
    )
    Guard(app)
    assert "hunter2" not in bugreport(app)
    assert "hunter2" not in str(app.conf.humanize(with_defaults=False))
    assert "hunter2" not in repr(Guard(app).settings.redacted())
    assert "hunter2" not in Guard(app).store.address
    assert "hunter2" not in repr(Guard(app).store)
