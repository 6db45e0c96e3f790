"""GuardedTask: the base class that users put under their tasks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from celery import Celery, Task

from celery_guard import hooks
from celery_guard.dispatch import Message, dispatch
from celery_guard.execution import Execution
from celery_guard.guard import Guard
from celery_guard.keys import KeyDeriver
from celery_guard.options import LATER_NAMES, OPTION_NAMES, GuardOptions, KeySpec, Unique, WithoutOverlapping, resolve
from celery_guard.resend import form_of
from celery_guard.result import GuardedResult
from celery_guard.run import NO_RUN, NoRun, Run

__all__ = ["GuardedTask"]


class GuardedTask(Task):  # type: ignore[type-arg]
    """A Celery task with guards.

    Use it as ``@app.task(base=GuardedTask, unique=..., without_overlapping=...)``, as the base of a
    task class, or for every task of an app as ``Celery(..., task_cls=GuardedTask)``.

    Attributes:
        unique: ``Unique(...)``, True, a key or a ttl: identical work is not queued twice.
        without_overlapping: ``WithoutOverlapping(...)``, True, a key or a number of slots: the same
            resource is not worked on by more runs at once.
    """

    abstract = True
    Request = "celery_guard.worker:GuardedRequest"

    unique: ClassVar[Unique | bool | KeySpec | float | None] = None
    without_overlapping: ClassVar[WithoutOverlapping | bool | KeySpec | int | None] = None

    #: The resolved options; empty until the task is bound.
    guard_options: ClassVar[GuardOptions] = GuardOptions()
    _claim_deriver: ClassVar[KeyDeriver | None] = None
    _lock_deriver: ClassVar[KeyDeriver | None] = None
    #: Whether another class beside this one has a ``__call__`` that the body is to be run by.
    _mixed_call: ClassVar[bool] = False

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Resolve and check the options, and install the plugin on the app.

        Raises:
            ConfigurationError: With every problem of this task.
        """
        super().on_bound(app)
        Guard(app)
        hooks.connect()
        app.steps["worker"].add("celery_guard.worker:GuardStep")  # by name: a client need not import the worker
        if inspect.getattr_static(cls, "run") is inspect.getattr_static(Task, "run"):
            return  # a base without a body, for example the app's own Task class
        _put_guard_around_call(cls)
        name = str(cls.name)
        values = {option: getattr(cls, option, None) for option in (*OPTION_NAMES, *LATER_NAMES)}
        cls.guard_options = resolve(name, values, own=_plain_attributes(cls))
        signature = _signature(cls)
        unique, overlap = cls.guard_options.unique, cls.guard_options.without_overlapping
        cls._claim_deriver = cls._lock_deriver = None
        if unique is not None:
            cls._claim_deriver = KeyDeriver(task=name, option="unique", spec=unique.key, signature=signature, shared=unique.shared)
        if overlap is not None:
            cls._lock_deriver = KeyDeriver(task=name, option="without_overlapping", spec=overlap.key, signature=signature, shared=overlap.shared)

    def claim_key(self, args: Any, kwargs: Any) -> str | None:
        """The claim's resource for these arguments; None without ``unique``.

        Raises:
            KeyDerivationError: If an argument has no canonical form.
        """
        return None if self._claim_deriver is None else self._claim_deriver.derive(args, kwargs)

    def lock_key(self, args: Any, kwargs: Any) -> str | None:
        """The lock's resource for these arguments; None without ``without_overlapping``.

        Raises:
            KeyDerivationError: If an argument has no canonical form.
        """
        return None if self._lock_deriver is None else self._lock_deriver.derive(args, kwargs)

    @property
    def guard(self) -> NoRun:
        """This execution's lock: ``key, token, fence, lost, attempt`` and ``check()``."""
        return self.current_run() or NO_RUN

    def current_run(self) -> Run | None:
        """The guarded run in which this code is executing, of whichever task; None outside."""
        # Not only the last: a body that calls its own task is a further request (an empty one in Celery 5.4).
        runs = (getattr(request, "guard_run", None) for request in reversed(self.request_stack.stack))
        run = next((run for run in runs if run is not None), None)
        if run is None:
            worker_task = self.app.current_worker_task
            run = getattr(worker_task.request, "guard_run", None) if worker_task is not None else None
        return run if isinstance(run, Run) else None

    def AsyncResult(self, task_id: str, **kwargs: Any) -> GuardedResult:  # noqa: N802  (Celery's name)
        """The result of a task id, of the type that a dispatch returns."""
        return GuardedResult(task_id, backend=self.backend, task_name=self.name, app=self.app, **kwargs)

    def signature_from_request(self, request: Any = None, args: Any = None, kwargs: Any = None, queue: Any = None, **options: Any) -> Any:
        """Celery's own, which retries and postponements go through, keeping the form of the message too."""
        form = form_of(self, self.request if request is None else request)
        if args is not None:
            form.pop("argsrepr", None)
        if kwargs is not None:
            form.pop("kwargsrepr", None)
        return super().signature_from_request(request, args, kwargs, queue, **{**form, **options})

    def _guarded_dispatch(self, guard: Guard, name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        """Dispatch on behalf of the app's wrapped ``send_task``."""
        return dispatch(self, guard, Message(name, args, kwargs, options))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body: under guard when a worker runs it, plainly when it is called like a function."""
        request = self.request_stack.top
        if request is None or request.called_directly:  # type: ignore[redundant-expr]
            return super().__call__(*args, **kwargs)
        body = super().__call__ if self._mixed_call else self.run
        run = vars(request).get("guard_run")
        if run is None:
            return self._under_guard(request, body, args, kwargs, reached_body=True)
        if run.reached_body:  # the body calls its own task
            return super().__call__(*args, **kwargs)
        run.reached_body = True
        return body(*args, **kwargs)

    def _under_guard(self, request: Any, body: Callable[..., Any], args: Any, kwargs: Any, *, reached_body: bool = False) -> Any:
        if not self.guard_options:
            return body(*args, **kwargs)
        guard = Guard(self.app)
        if request.is_eager and not guard.settings.eager:
            return body(*args, **kwargs)
        execution = Execution(self, guard, request)
        execution.run.reached_body = reached_body
        return execution(body, args, kwargs)


def _plain_attributes(cls: type[GuardedTask]) -> list[str]:
    """Names of the data attributes that the task's author set, where a misspelt option would be."""
    names: list[str] = []
    for base in cls.__mro__:
        if base is GuardedTask:
            break
        names += [
            name
            for name, value in vars(base).items()
            if not name.startswith("_") and not isinstance(value, Callable | staticmethod | classmethod | property) and name not in names  # type: ignore[arg-type]
        ]
    # Looked up without evaluation: reading ``GuardedTask.app`` would bind this base to the current app.
    known = {name for base in GuardedTask.__mro__ for name in vars(base)} - set(OPTION_NAMES)
    return [name for name in names if name not in known]


def _put_guard_around_call(cls: type[GuardedTask]) -> None:
    """See to it that classes with a ``__call__`` of their own run inside the guard, on either side of ours.

    Such a class enters a context and calls ``self.run`` (Flask's documentation): before ours in the
    order of classes it would pass by the guard, behind it it would be passed by.
    """
    bases = cls.__mro__
    behind = bases[bases.index(GuardedTask) + 1 :]
    cls._mixed_call = next(base for base in behind if "__call__" in vars(base)) is not Task
    theirs: Any = cls.__call__
    if theirs is GuardedTask.__call__ or hasattr(theirs, "_celery_guard"):
        return

    @functools.wraps(theirs)
    def __call__(self: GuardedTask, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        request = self.request_stack.top
        if request is None or request.called_directly or "guard_run" in vars(request):  # type: ignore[redundant-expr]
            return theirs(self, *args, **kwargs)
        return self._under_guard(request, functools.partial(theirs, self), args, kwargs)

    __call__._celery_guard = True  # type: ignore[attr-defined]
    cls.__call__ = __call__  # type: ignore[method-assign]


def _signature(cls: type[GuardedTask]) -> inspect.Signature:
    """The signature of the body without ``self``."""
    body = inspect.getattr_static(cls, "run")
    if isinstance(body, staticmethod):
        return inspect.signature(body.__func__)
    signature = inspect.signature(body)
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return signature  # ``*args`` takes self, too: a decorator without functools.wraps
    return signature.replace(parameters=parameters[1:])
