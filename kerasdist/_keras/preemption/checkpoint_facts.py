"""The form of the facts in a checkpoint, which may be damaged or another program's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def fault_of(facts: Any) -> str:
    """Return what is wrong with a checkpoint's facts; an empty text if nothing is."""
    return _fault(facts, _FACTS, "facts")


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _count_or_none(value: Any) -> bool:
    return value is None or _count(value)


def _number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _shape(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _list_of(*forms: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return whether a value is a list of lists of these forms."""

    def check(value: Any) -> bool:
        return isinstance(value, list) and all(
            isinstance(each, list)
            and len(each) == len(forms)
            and all(form(part) for form, part in zip(forms, each, strict=True))
            for each in value
        )

    return check


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _factors(value: Any) -> bool:
    return isinstance(value, list) and all(
        each is None or _numbers(each) for each in value
    )


def _pair(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(map(_count_or_none, value))
    )


def _state(value: Any) -> bool:
    return isinstance(value, dict)


def _anything(value: Any) -> bool:
    return True


def _place(value: Any) -> bool:
    return value is None or not _fault(value, _PLACE, "place")


_PLACE: Mapping[str, Callable[[Any], bool]] = {
    "kind": _text,
    "pass": _count,
    "batch": _count,
    "step": _count,
    "steps_seen": _count,
    "steps_per_epoch": _count_or_none,
    "batches": _count_or_none,
    "order": _count,
    "data": _anything,
    "uses": _counts,
}
_FACTS: Mapping[str, Callable[[Any], bool]] = {
    "saved": _number,
    "seed": _count,
    "fit": _count,
    "epoch": _count,
    "place": _place,
    "uses": _counts,
    "orders": _count,
    "communicator_step": _count,
    "variables": _list_of(_shape, _text),
    "rates": _numbers,
    "factors": _factors,
    "callbacks": _list_of(_text, _state),
    "callback_arrays": _list_of(_count, _text, _count),
    "data": _pair,
    "steps": _count,
    "metrics": _list_of(_text, _shape),
    "arrays": _list_of(_text, _shape),
}


def _fault(facts: Any, form: Mapping[str, Callable[[Any], bool]], what: str) -> str:
    if not isinstance(facts, dict):
        return f"its {what} are {type(facts).__name__}"
    for name, is_right in form.items():
        if name not in facts:
            return f"its {what} have no {name!r}"
        if not is_right(facts[name]):
            return f"its {what} have an unexpected {name!r}: {facts[name]!r:.80}"
    return ""
