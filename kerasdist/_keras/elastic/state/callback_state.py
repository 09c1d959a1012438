"""The state of callbacks in a running `fit`, from which another process can continue.

Of most callbacks it is what has changed since the first step: so paths, ranks and other
settings, which may differ between workers, stay those of each worker.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

# Attributes of callbacks that aren't numbers of the training.
_OWN = frozenset({"model", "params", "validation_data", "_model", "_params"})
_NOT_PLAIN = object()


def numbers_of(callbacks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the attributes of callbacks that JSON has."""
    return [numbers_of_one(callback) for callback in callbacks]


def changed(callbacks: Sequence[Any], begun: Sequence[Any]) -> list[list[Any]]:
    """Return the class of each callback, and what another process needs of it.

    Args:
        callbacks: The callbacks.
        begun: Their `numbers_of` at the first step.
    """
    found = []
    for index, callback in enumerate(callbacks):
        if hasattr(callback, "_state_for_newcomers"):
            state = callback._state_for_newcomers()
        else:
            before = begun[index] if index < len(begun) else {}
            state = {
                name: value
                for name, value in numbers_of_one(callback).items()
                if name not in before or not _same(value, before[name])
            }
            if hasattr(callback, "_set_monitor_op"):
                # A setting, whose sign Keras changes at the first end of an epoch in
                # each process, when it finds out which values are good.
                state.pop("min_delta", None)
        found.append([type(callback).__name__, state])
    return found


def adopt(
    callbacks: Sequence[Any],
    states: Sequence[Sequence[Any]],
    *,
    again: bool = False,
) -> None:
    """Give callbacks what `changed` has returned for the same ones elsewhere.

    Args:
        callbacks: The callbacks.
        states: Their states.
        again: Whether they have adopted them before, and were called since.
    """
    for callback, (_, state) in zip(callbacks, states, strict=True):
        if not hasattr(callback, "_adopt_state"):
            # A copy: the callback may change lists, and adopts its state again.
            vars(callback).update(copy.deepcopy(state))
        elif not again:
            callback._adopt_state(state)


def unfit(callback: Any, state: dict[str, Any]) -> str:
    """Return an attribute that has a value of another type here; empty if none has."""
    if hasattr(callback, "_adopt_state"):
        return ""  # it has a form of its own
    for name, value in state.items():
        mine = vars(callback).get(name)
        if None not in (mine, value) and _type(mine) is not _type(value):
            return f"{name!r}: {value!r:.80} in place of {mine!r:.80}"
    return ""


def _type(value: Any) -> type:
    value = value.item() if isinstance(value, np.generic) else value
    return float if isinstance(value, (bool, int)) else type(value)


def arrays_of(callbacks: Sequence[Any]) -> list[tuple[int, str, list[Any]]]:
    """Return the arrays that callbacks keep: callback's index, attribute, arrays."""
    return [
        (index, name, value)
        for index, callback in enumerate(callbacks)
        for name, value in vars(callback).items()
        if isinstance(value, list) and _are_arrays(value)
    ]


def _are_arrays(values: list[Any]) -> bool:
    # Of a variable without dimensions Keras returns one of numpy's numbers.
    return any(isinstance(each, np.ndarray) for each in values) and all(
        isinstance(each, (np.ndarray, np.generic)) for each in values
    )


def numbers_of_one(callback: Any) -> dict[str, Any]:
    """Return the attributes of a callback that JSON has."""
    plain = {
        name: _plain(value)
        for name, value in vars(callback).items()
        if name not in _OWN
    }
    return {name: value for name, value in plain.items() if value is not _NOT_PLAIN}


def plain(value: Any) -> Any:
    """Return a value as JSON has it; None if it doesn't."""
    found = _plain(value)
    return None if found is _NOT_PLAIN else found


def _plain(value: Any) -> Any:
    """Return a copy of a value as JSON has it, numpy's numbers as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        items = {key: _plain(each) for key, each in value.items()}
        return _NOT_PLAIN if _has_other(items.values()) else items
    if isinstance(value, list):
        parts = [_plain(each) for each in value]
        return _NOT_PLAIN if _has_other(parts) else parts
    return _NOT_PLAIN


def _has_other(values: Any) -> bool:
    return any(each is _NOT_PLAIN for each in values)


def _same(one: Any, other: Any) -> bool:
    # NaN isn't equal to itself.
    return type(one) is type(other) and repr(one) == repr(other)
