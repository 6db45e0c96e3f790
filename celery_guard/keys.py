"""Resource keys: how the calls of a task are named in the store.

``KeyDeriver`` makes the resource key of one option of one task. It is compiled once, when the task
is bound, because it runs at every dispatch. What makes two values the same is decided in
``canonical``; this module decides how they are written:

- all arguments (``key=None``): a hash, so arguments do not appear in the store;
- a template or a list of names: readable text in which every value can be told from every other
  (``42`` is the int, ``'42'`` the string; what is not a short scalar becomes ``hash'...'``);
- a callable: its return value, written like a template; text keeps its colons.

Values never contain a colon or a character that separates two fields, so no two calls share a
rendered key. Spaces, control characters, ``%``, ``'``, ``{`` and ``}`` are percent-escaped: a key can be typed in
a shell, and it cannot break out of the Redis Cluster hash tag.
This module imports no Celery, Redis, clock or random.
"""

from __future__ import annotations

import difflib
import inspect
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery_guard.canonical import MAX_DECIMAL_BITS, Unkeyable, canonical, digest, encoded, plain, reduce, text_bytes
from celery_guard.errors import ConfigurationError, KeyDerivationError
from celery_guard.options import KeySpec

__all__ = ["MAX_KEY_BYTES", "KeyDeriver", "canonical", "canonical_arguments", "redis_key"]

#: Longest key, without the task's name; a longer one is cut and carries a hash of the whole.
MAX_KEY_BYTES = 200
#: Strings of more characters are rendered as their beginning and a hash.
MAX_TEXT = 200
_HEAD_CHARS = 40

_ALWAYS_ESCAPED = r"%'{}\s"
_IN_LITERALS = re.compile(f"[{_ALWAYS_ESCAPED}]")
_PATH = re.compile(r"(?P<name>[^.\[\]]+)(?P<steps>(?:\.[^.\[\]]+|\[[^\[\]]+\])*)")
_STEP = re.compile(r"\.(?P<attribute>[^.\[\]]+)|\[(?P<index>[^\[\]]+)\]")
#: Strings that read like another kind of value are quoted.
_LOOKS_TYPED = re.compile(
    r"-?(?:\d+(?:\.\d+)?(?:e[+-]\d+)?|inf)|nan|True|False|None|"
    r"\d{4}-\d\d-\d\d|\d{8}T\d{6}(?:\.\d{6})?Z?|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    re.ASCII,
)


def redis_key(prefix: str, resource: str, kind: str) -> str:
    """Name a Redis key of a resource; the braces keep all of them in one Cluster slot.

    Args:
        prefix: First part of every key of this installation.
        resource: What ``KeyDeriver.derive`` returned; it holds no braces.
        kind: What the key stores, for example ``"claim"``.
    """
    return f"{prefix}:1:{{{resource}}}:{kind}"


def canonical_arguments(signature: inspect.Signature, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Bind the arguments of a call, apply the defaults and describe them for people.

    Returns:
        JSON-able values by parameter name, in the order of the signature; nothing is redacted.

    Raises:
        KeyDerivationError: If the call does not fit the signature or a value has no canonical form.
    """
    binder = _Binder(signature)
    described: dict[str, Any] = {}
    name = ""
    try:
        for name, value in zip(binder.names, binder.bind(args or (), kwargs or {}), strict=True):
            encoded(value)  # finds the path of a value at fault
            described[name] = plain(value)
    except Unkeyable as exc:
        path = name + exc.path
        raise KeyDerivationError(f"argument {path!r} {exc.reason}" if path else exc.reason, argument=path or None) from exc.cause
    return described


class KeyDeriver:
    """Makes the resource key of one option of one task.

    Args:
        task: Name of the task.
        option: Name of the option, for messages (``"unique"``).
        spec: What identifies the work (see ``KeySpec``).
        signature: Parameters of the task's body, without ``self``.
        shared: True: the key is not scoped to the task's name.

    Raises:
        ConfigurationError: If the spec cannot work with this signature; with every problem found.
    """

    def __init__(self, *, task: str, option: str, spec: KeySpec, signature: inspect.Signature, shared: bool = False) -> None:
        self.task = task
        self.option = option
        self._binder = _Binder(signature)
        # A colon in the name would let task "a:b" with key "c" meet task "a" with key "b:c".
        self._scope = "" if shared else _escaped(task, _value_pattern("")) + ":"
        problems: list[str] = []
        if spec is None:
            order = sorted((encoded(name), position, name) for position, name in enumerate(self._binder.names))
            self._make: Callable[[Sequence[Any]], str] = _AllArguments(order)
        elif isinstance(spec, str):
            self._make = _Template.parsed(spec, self._binder, problems)
        elif callable(spec):
            self._make = _Called(spec, self._binder, problems)
        else:
            if shared and not spec:
                problems.append("names no argument, so all tasks with shared=True and key=[] would share one key; write a name, key='warehouse-api'")
            self._make = _Template.listed(spec, self._binder, problems)
        if problems:
            shown = spec if isinstance(spec, str | Sequence) else getattr(spec, "__qualname__", type(spec).__qualname__)
            raise ConfigurationError.of([f"task {task!r}: option {option}: key={shown!r} {problem}" for problem in problems])

    def derive(self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> str:
        """Make the resource key of one call.

        Args:
            args: Positional arguments as given to ``apply_async``; None: none.
            kwargs: Keyword arguments; None: none.

        Returns:
            ``"<task>:<key>"``, or ``"<key>"`` with ``shared``; the key has at most ``MAX_KEY_BYTES`` bytes.

        Raises:
            KeyDerivationError: If the call does not fit the signature, or a value that the key needs
                has no canonical form or cannot be read.
        """
        try:
            return self._scope + self._make(self._binder.bind(args or (), kwargs or {}))
        except Unkeyable as exc:
            path = exc.path or None
            what = f"argument {path!r} {exc.reason}" if path else exc.reason
            remedy = "" if path is None else f"; give {self.option} a key= over arguments that identify the work, for example key=['order_id']"
            raise KeyDerivationError(f"task {self.task!r}: no key for {self.option}: {what}{remedy}", task=self.task, argument=path) from exc.cause
        except RecursionError:
            raise KeyDerivationError(f"task {self.task!r}: no key for {self.option}: an argument is nested too deeply", task=self.task) from None


class _Binder:
    """Binds calls to a signature: values in the order of the parameters, defaults applied."""

    _MISSING = object()

    def __init__(self, signature: inspect.Signature) -> None:
        self._signature = signature
        parameters = list(signature.parameters.values())
        self.kinds = [parameter.kind for parameter in parameters]
        self.names = [parameter.name for parameter in parameters]
        self.open = any(kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) for kind in self.kinds)
        # Signature.bind costs more than the rest of a key together, so ordinary signatures are bound by hand.
        self._by_hand = not self.open and inspect.Parameter.POSITIONAL_ONLY not in self.kinds
        self._positional = sum(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in self.kinds)
        self._index = {name: position for position, name in enumerate(self.names)}
        self._defaults = [self._MISSING if parameter.default is inspect.Parameter.empty else parameter.default for parameter in parameters]
        self._required = [position for position, default in enumerate(self._defaults) if default is self._MISSING]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        given = len(args)
        if not self._by_hand or given > self._positional:
            return self._bind_slowly(args, kwargs)
        values = [*args, *self._defaults[given:]]
        for name, value in kwargs.items():
            position = self._index.get(name, -1)
            if position < given:  # unknown, or given twice
                return self._bind_slowly(args, kwargs)
            values[position] = value
        for position in self._required:
            if values[position] is self._MISSING:
                return self._bind_slowly(args, kwargs)
        return values

    def _bind_slowly(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise Unkeyable(f"the call does not fit the task's parameters ({', '.join(self.names)}): {exc}") from None
        bound.apply_defaults()
        return list(bound.arguments.values())

    def call(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Take bound values apart into positional and keyword arguments."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, kind, value in zip(self.names, self.kinds, values, strict=True):
            if kind is inspect.Parameter.VAR_POSITIONAL:
                args.extend(value)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                kwargs.update(value)
            elif kind is inspect.Parameter.KEYWORD_ONLY:
                kwargs[name] = value
            else:
                args.append(value)
        return args, kwargs

    def position(self, name: str, problems: list[str]) -> int:
        if name in self._index:
            return self._index[name]
        near = difflib.get_close_matches(name, self.names, 1)
        known = ", ".join(self.names) or "none"
        hint = f"did you mean {near[0]!r}?" if near else f"the task's arguments are: {known}"
        problems.append(f"names an unknown argument {name!r}; {hint}")
        return 0


class _AllArguments:
    def __init__(self, order: Iterable[tuple[bytes, int, str]]) -> None:
        self._order = tuple(order)

    def __call__(self, values: Sequence[Any]) -> str:
        parts: list[bytes] = []
        for label, position, name in self._order:
            parts.append(label)
            try:
                parts.append(encoded(values[position]))
            except Unkeyable as exc:
                exc.steps.append(name)
                raise
        return digest(b"".join(parts))


class _Called:
    def __init__(self, function: Callable[..., Any], binder: _Binder, problems: list[str]) -> None:
        self._function = function
        self._binder = binder
        self._name = getattr(function, "__qualname__", type(function).__qualname__)
        if inspect.iscoroutinefunction(function):
            problems.append("is a coroutine function; a key is made without an event loop, use a plain function")
        try:
            signature = None if binder.open else inspect.signature(function)
        except (TypeError, ValueError):  # some builtins tell no signature; the first call will show
            signature = None
        if signature is not None:
            args, kwargs = binder.call(binder.names)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as exc:
                problems.append(f"cannot be called with the task's arguments ({', '.join(binder.names)}): {exc}")

    def __call__(self, values: Sequence[Any]) -> str:
        args, kwargs = self._binder.call(values)
        try:
            made = self._function(*args, **kwargs)
        except Exception as exc:
            raise Unkeyable(f"the key function {self._name} raised {type(exc).__name__}: {exc}", cause=exc) from exc
        if made is None:
            raise Unkeyable(f"the key function {self._name} returned None, which would give all calls one key; return what identifies the work")
        try:
            return _shortened(_rendered(made, _IN_LITERALS))
        except Unkeyable as exc:
            raise Unkeyable(f"what the key function {self._name} returned{exc.path and ' at ' + exc.path} {exc.reason}", cause=exc.cause) from None


@dataclass(frozen=True, slots=True)
class _Field:
    """One ``{...}`` of a template: the literal before it, and where its value is found."""

    literal: str
    position: int
    name: str
    steps: tuple[tuple[str, bool, str], ...] = ()  # (as written, is an attribute, name)


class _Template:
    def __init__(self, fields: Sequence[_Field], tail: str, problems: list[str]) -> None:
        self._tail = _escaped(tail, _IN_LITERALS)
        gaps = [field.literal for field in fields[1:]]
        for left, right, gap in zip(fields, fields[1:], gaps, strict=False):
            if not _separators(gap):
                problems.append(f"does not separate {left.name!r} from {right.name!r}, so ('1', '23') and ('12', '3') would be one key; put ':' between them")
        self._pattern = _value_pattern("".join(gaps))
        self._fields = tuple((_escaped(field.literal, _IN_LITERALS), field) for field in fields)

    @classmethod
    def listed(cls, names: Sequence[str], binder: _Binder, problems: list[str]) -> _Template:
        fields = [_Field(f",{name}=" if number else f"{name}=", binder.position(name, problems), name) for number, name in enumerate(names)]
        return cls(fields, "" if fields else "*", problems)

    @classmethod
    def parsed(cls, template: str, binder: _Binder, problems: list[str]) -> _Template:
        fields: list[_Field] = []
        literal = ""
        if not template:
            problems.append("is empty; write a template, [] for one key per task, or None for all arguments")
        if template in binder.names:
            problems.append(f"is one key for all calls; for the value of that argument write '{{{template}}}'")
        try:
            pieces = list(string.Formatter().parse(template))
        except ValueError as exc:
            problems.append(f"is not a template: {exc}; write {{{{ and }}}} for literal braces")
            pieces = []
        for text, path, spec, conversion in pieces:
            literal += text
            if path is None:
                continue
            if spec or conversion:
                problems.append(f"uses a conversion or format spec in {{{path}}}; write the plain argument, or make the key with a callable")
                continue
            fields.append(_parsed_field(literal, path, binder, problems))
            literal = ""
        return cls(fields, literal, problems)

    def __call__(self, values: Sequence[Any]) -> str:
        text = ""
        for literal, field in self._fields:
            value = values[field.position]
            try:
                if field.steps:
                    value = _followed(value, field.steps)
                text += literal + _rendered(value, self._pattern)
            except Unkeyable as exc:
                exc.steps.extend([*(step[0] for step in reversed(field.steps)), field.name])
                raise
        return _shortened(text + self._tail)


def _parsed_field(literal: str, path: str, binder: _Binder, problems: list[str]) -> _Field:
    match = _PATH.fullmatch(path)
    if match is None or not match["name"].isidentifier():
        problems.append(f"has a field {{{path}}} that names no argument; write it like {{order_id}}, {{order.id}} or {{items[0]}}")
        return _Field(literal, 0, path)
    steps = tuple((step[0], step["attribute"] is not None, step["attribute"] or step["index"]) for step in _STEP.finditer(match["steps"]))
    for written, is_attribute, name in steps:
        if is_attribute and (name.startswith("_") or not name.isidentifier()):
            problems.append(f"reads {written!r} in {{{path}}}; only public attributes may be read")
    return _Field(literal, binder.position(match["name"], problems), match["name"], steps)


def _followed(value: Any, steps: tuple[tuple[str, bool, str], ...]) -> Any:
    for written, is_attribute, name in steps:
        try:
            if isinstance(value, Mapping):  # an object may arrive in the worker as a map: {order.id} reads both
                value = value[name] if name in value or not name.isdecimal() else value[int(name)]
            elif is_attribute:
                value = getattr(value, name)
            else:
                value = value[int(name)]
        except Exception as exc:  # properties run the value's own code
            raise Unkeyable(f"has no readable {written!r} ({type(exc).__name__})", cause=exc) from exc
    return value


def _separators(text: str) -> str:
    """The characters of a literal that stay as they are and that no rendered value will contain."""
    return "".join(char for char in text if char.isprintable() and not char.isalnum() and not char.isspace() and char not in "%'{}")


def _value_pattern(gaps: str) -> re.Pattern[str]:
    # The colon is escaped in every template: tasks that share keys then write one value in one way.
    return re.compile(f"[{_ALWAYS_ESCAPED}:{re.escape(_separators(gaps))}]")


def _escaped(text: str, pattern: re.Pattern[str]) -> str:
    """Percent-escape what the pattern finds and what cannot be printed."""
    if text.isprintable() and pattern.search(text) is None:
        return text
    whole = text_bytes(text).decode("utf-8", "surrogatepass")  # one character for a surrogate pair
    return "".join(
        "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass")) if not char.isprintable() or pattern.match(char) else char for char in whole
    )


def _rendered(value: Any, pattern: re.Pattern[str]) -> str:
    """Write a value so that no other value is written alike."""
    kind = type(value)
    tag, payload = ("s", value) if kind is str else reduce(value)
    if tag == "s":
        if len(payload) > MAX_TEXT:
            return f"{_escaped(payload[:_HEAD_CHARS], pattern)}hash'{digest(encoded(payload))}'"
        text = _escaped(payload, pattern)
        return f"'{text}'" if not payload or _LOOKS_TYPED.fullmatch(payload) else text
    if tag in ("n", "T", "F") or (tag == "i" and payload.bit_length() < MAX_DECIMAL_BITS):
        text = str(payload)
    elif tag == "t":
        text = payload.replace("-", "").replace(":", "")
    else:
        text = payload if tag in ("f", "u", "D") else ""
    if _LOOKS_TYPED.fullmatch(text):
        return _escaped(text, pattern)
    return f"hash'{digest(encoded(value))}'"


def _shortened(text: str) -> str:
    if len(text) * 4 <= MAX_KEY_BYTES:  # no character takes more than 4 bytes
        return text
    data = text.encode()
    if len(data) <= MAX_KEY_BYTES:
        return text
    mark = f"long'{digest(data)}'"
    head = data[: MAX_KEY_BYTES - len(mark)].decode("utf-8", "ignore")
    return re.sub("%[0-9A-F]?$", "", head) + mark
