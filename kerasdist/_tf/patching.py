"""Checked wrapping of functions of Keras and TensorFlow, from a table.

Each `Patch` row of a table names functions and their hook. A `Patcher` checks all rows
before it changes anything: each function must exist, with the parameters that its hook
was written for. A function with several hooks gets them in the table's order, so that
the last one is the outermost. In a target

    package.module.Class.name(self, x, ...)

`...` stands for parameters that the hook passes on unchanged, `Class.name=(self, x)`
is the setter of a property, and `{a,b.c}` in a path are alternatives for different
versions: the first one that exists counts. A table is text, with `$NAME` for what
`parse_table` is given under that name, and `name|other` for two functions of one owner
with the same parameters:

    feature
        # A comment.
        module
            hook $PACKAGE.Class.name|other(self, x, ...)
                $PACKAGE.Other.name(self, ...)
            + hook_that_is_added $PACKAGE.module.name
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import string
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kerasdist.errors import KerasDistError

# The first argument of a hook: the function that it replaces.
Original = Callable[..., Any]

_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One hook, and the functions that it wraps.

    Attributes:
        hook: Its name, `"module.function"` in the package of the table. It is called as
            `hook(original, *args, **kwargs)`.
        feature: The feature that needs it: rows of one feature are installed together.
        targets: The functions; see the module's docstring.
        adds: Whether the hook is added as a function that is missing so far. Where the
            function exists, it is left alone.
    """

    hook: str
    feature: str
    targets: tuple[str, ...]
    adds: bool = False


def parse_table(text: str, **names: str) -> tuple[Patch, ...]:
    """Return the rows of a table's text, see above; `names` are those after a "$"."""
    rows: list[Patch] = []
    feature = module = ""
    for line in string.Template(text).substitute(names).splitlines():
        written = " ".join(line.split())
        depth = len(line) - len(line.lstrip())
        if not written or written.startswith("#"):
            continue
        if depth == 0:
            feature = written
        elif depth == 4:
            module = written
        else:
            if depth == 8:
                hook, _, written = written.removeprefix("+ ").partition(" ")
                hook, adds = f"{module}.{hook}", line[8] == "+"
                rows.append(Patch(hook=hook, feature=feature, targets=(), adds=adds))
            path, bracket, rest = written.partition("(")
            above, _, every = path.rpartition(".")
            more = (
                f"{above}.{name.strip()}{bracket}{rest}" for name in every.split("|")
            )
            rows[-1] = replace(rows[-1], targets=(*rows[-1].targets, *more))
    return tuple(rows)


@dataclass(frozen=True, kw_only=True)
class PatchedAttribute:
    """An attribute that holds a function to wrap.

    Attributes:
        owner: The module or the class.
        name: The attribute; with a "=" at its end the setter of that property.
    """

    owner: Any
    name: str

    @property
    def attribute(self) -> str:
        """The name without the "=" of a setter."""
        return self.name.removesuffix("=")

    def read(self) -> Any:
        """Return the current function.

        Raises:
            AttributeError: There is none.
        """
        found = getattr(self.owner, self.attribute)
        return found if self.attribute == self.name else found.fset

    def signature(self) -> inspect.Signature:
        """Return the parameters of the current function.

        If another package has replaced it by one with `*args` and `**kwargs`, they are
        those of the method that the class inherits, if any.

        Raises:
            AttributeError: There is no function.
            TypeError: The attribute isn't a function.
            ValueError: As of `inspect.signature`.
        """
        found = inspect.signature(self.read())
        if self.replaced_by() and _takes_anything(found):
            for base in getattr(self.owner, "__mro__", ())[1:]:
                inherited = vars(base).get(self.attribute)
                if inspect.isfunction(inherited):
                    return inspect.signature(inherited)
        return found

    def replaced_by(self) -> str:
        """Return the module of another package's replacement; empty if none."""
        theirs = str(getattr(self.read(), "__module__", None))
        own = getattr(self.owner, "__module__", getattr(self.owner, "__name__", ""))
        return "" if theirs.split(".")[0] == own.split(".")[0] else theirs

    def function(self) -> Callable[..., Any]:
        """Return what `read` returns, with `signature` as its `inspect.signature`."""
        function: Callable[..., Any] = self.read()
        signature = self.signature()
        if signature == inspect.signature(function):
            return function
        known = functools.partial(function)
        functools.update_wrapper(known, function)
        known.__signature__ = signature  # type: ignore[attr-defined]
        return known

    def write(self, function: Any) -> None:
        """Set the function."""
        if self.attribute != self.name:
            function = getattr(self.owner, self.attribute).setter(function)
        setattr(self.owner, self.attribute, function)

    def own(self) -> Any:
        """Return what `restore` takes: the owner's own attribute, if it has one."""
        return vars(self.owner).get(self.attribute, _ABSENT)

    def restore(self, own: Any) -> None:
        """Put back what `own` returned."""
        if own is _ABSENT:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, own)


class Wrapped(functools.partial):  # type: ignore[type-arg]
    """A function with a hook around it, which adds no frame of its own to tracebacks.

    Used as the function that it wraps: as a method too, for `inspect.signature`, and
    for pickle, which finds it by its name.
    """

    # AutoGraph converts neither Keras nor TensorFlow, and no hook of theirs either.
    autograph_info__ = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        return self.__qualname__  # type: ignore[attr-defined]


def wrap(original: Original, hook: Callable[..., Any]) -> Wrapped:
    """Return `original` with a hook around it."""
    wrapped = Wrapped(hook, original)
    functools.update_wrapper(wrapped, original)
    # Keras inspects a layer's constructor without following `__wrapped__`.
    wrapped.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return wrapped


class Patcher:
    """Installs the hooks of a table.

    Args:
        package: The package that the hooks are in, such as `"kerasdist._keras"`.
        table: The rows.
        refuse: Makes the error to raise, from one line for each thing that is missing
            or different.
    """

    def __init__(
        self,
        package: str,
        table: Sequence[Patch],
        refuse: Callable[[list[str]], KerasDistError],
    ) -> None:
        self._package = package
        self._table = table
        self._refuse = refuse
        self._lock = threading.Lock()
        self._done: list[Patch] = []
        self._before: list[tuple[PatchedAttribute, Any]] = []

    def check(self) -> None:
        """Check that every row fits what is installed. Changes nothing.

        Raises:
            KerasDistError: The error of `refuse`: something is missing or different.
        """
        with self._lock:
            if len(self._done) < len(self._table):
                self._places()

    def install(self, *features: str) -> None:
        """Put hooks in, each once per process.

        Args:
            *features: The features whose hooks are meant; by default all.

        Raises:
            KerasDistError: As `check`. Nothing has changed.
        """
        with self._lock:
            due = [
                row
                for row in self._table
                if row not in self._done and (not features or row.feature in features)
            ]
            if not due:
                return
            places = self._places()
            found = [(row, self._hook(row), places[row]) for row in due]
            for row, hook, targets in found:
                for place in targets:
                    own = place.own()
                    if not row.adds:
                        place.write(wrap(place.function(), hook))
                    elif not hasattr(place.owner, place.name):
                        place.write(hook)
                    else:
                        continue
                    self._before.append((place, own))
                self._done.append(row)

    def uninstall(self) -> None:
        """Take all hooks out, for tests.

        References to a hooked function that were taken elsewhere keep the hook.
        """
        with self._lock:
            while self._before:
                place, own = self._before.pop()
                place.restore(own)
            self._done.clear()

    def _hook(self, row: Patch) -> Callable[..., Any]:
        module, _, name = row.hook.rpartition(".")
        found = importlib.import_module(f"{self._package}.{module}".rstrip("."))
        hook: Callable[..., Any] = getattr(found, name)
        return hook

    def _places(self) -> dict[Patch, list[PatchedAttribute]]:
        places: dict[Patch, list[PatchedAttribute]] = {}
        faults = []
        for row in self._table:
            places[row] = []
            for target in row.targets:
                place = _find(target)
                if place is None:
                    faults.append(f"{_path_of(target)} is missing")
                    continue
                places[row].append(place)
                if not row.adds:
                    faults += _differences(target, place)
        if faults:
            raise self._refuse(list(dict.fromkeys(faults)))
        return places


def _path_of(target: str) -> str:
    return target.partition("(")[0]


def _alternatives(path: str) -> Iterator[str]:
    """Yield the paths that a path with braces stands for."""
    match = re.search(r"\{(.*?)\}", path)
    if match is None:
        yield path
        return
    for choice in match[1].split(","):
        yield from _alternatives(path[: match.start()] + choice + path[match.end() :])


def _find(target: str) -> PatchedAttribute | None:
    """Return the place that a target stands for; None if it doesn't exist."""
    adds = "(" not in target
    for path in _alternatives(_path_of(target)):
        above, _, name = path.rpartition(".")
        owner = _resolve(above)
        place = PatchedAttribute(owner=owner, name=name)
        if owner is not None and (adds or hasattr(owner, place.attribute)):
            return place
    return None


def _resolve(path: str) -> Any:
    """Return a module, or a class in one, by its path; None if it doesn't exist."""
    name, _, rest = path.partition(".")
    try:
        found: Any = importlib.import_module(name)
        for part in filter(None, rest.split(".")):
            name = f"{name}.{part}"
            if hasattr(found, part):
                found = getattr(found, part)
            else:
                found = importlib.import_module(name)
    except (ImportError, AttributeError):
        return None
    return found


def _differences(target: str, place: PatchedAttribute) -> list[str]:
    """Return how a function's parameters differ from those that its target names."""
    wanted = _names(target.partition("(")[2].rstrip(")"))
    try:
        signature = place.signature()
    except (AttributeError, TypeError, ValueError):
        return [f"{_path_of(target)} isn't a function"]
    found = _parameters(signature)
    first = wanted[: wanted.index("...")] if "..." in wanted else wanted
    rest = set(wanted) - {*first, "..."}
    if found[: len(first)] == first and (
        rest <= set(found) if "..." in wanted else len(found) == len(first)
    ):
        return []
    text = (
        f"{_path_of(target)} has the parameters ({', '.join(found)}), expected "
        f"({', '.join(wanted)})"
    )
    module = place.replaced_by()
    if module and _takes_anything(signature):
        text += f" (`{module}` has replaced it, and must use `functools.wraps`)"
    return [text]


def _takes_anything(signature: inspect.Signature) -> bool:
    """Return whether a signature has both `*args` and `**kwargs`."""
    kinds = {one.kind for one in signature.parameters.values()}
    return {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parameters(signature: inspect.Signature) -> list[str]:
    """Return the names of parameters as in a definition, without their defaults."""
    found: list[str] = []
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not any(n[0] == "*" for n in found):
            found.append("*")
        if one.kind is one.VAR_POSITIONAL:
            found.append(f"*{one.name}")
        elif one.kind is one.VAR_KEYWORD:
            found.append(f"**{one.name}")
        else:
            found.append(one.name)
    return found
