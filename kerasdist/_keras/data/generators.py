"""The variables that a generator's code can access: the origin of its batches."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any


class GeneratorFacts:
    """The variables and names that a function, or a running generator, can access.

    A generator that has ended exposes nothing: inspect it before it is read.

    Args:
        function: A function, a method, or a generator.

    Attributes:
        variables: The arguments (for a function the default values), free variables and
            globals that its code names, each with its name.
        names: All names in its code, including attributes.
    """

    def __init__(self, function: Any) -> None:
        self.variables: list[tuple[str, Any]] = list(_variables(function))
        code = _code_of(function)
        self.names: frozenset[str] = frozenset(() if code is None else code.co_names)


def _code_of(function: Any) -> types.CodeType | None:
    if isinstance(function, types.GeneratorType):
        return function.gi_code
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    code = _code_of(function)
    if code is None:
        return
    if isinstance(function, types.GeneratorType):
        frame = function.gi_frame
        if frame is None:
            return
        known: Mapping[str, Any] = frame.f_locals
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name in (*given, *code.co_freevars):
            # The argument of a generator expression is its iterator.
            if name in known and name != ".0":
                yield name, known[name]
        everywhere = frame.f_globals
    else:
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType):
            yield "self", owner
        function = getattr(function, "__func__", function)
        cells = function.__closure__ or ()
        for name, cell in zip(code.co_freevars, cells, strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:
                continue  # it is empty
        defaults = function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount]
        yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
        everywhere = function.__globals__
    for name in code.co_names:
        if name in everywhere:
            yield name, everywhere[name]
