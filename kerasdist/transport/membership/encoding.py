"""The messages of the agreement as bytes: compressed JSON, checked field by field.

Those of a large job name its members several times, which hardly makes them longer.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
import typing
import zlib
from collections.abc import Collection, Iterator
from typing import Any

from kerasdist.errors import ProtocolError
from kerasdist.transport.membership.events import Member, Message
from kerasdist.transport.wire.framing import MAX_CONTROL, to_json

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in typing.get_args(Message)
}
# The fastest: members' names differ little.
_LEVEL = 1


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    value = {"kind": type(message).__name__, "fields": _plain(message)}
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), _LEVEL)


def decode(payload: bytes, tasks: Collection[int] | None = None) -> Message:
    """Return the argument of `encode`.

    Args:
        payload: The bytes.
        tasks: The ids that members may have; None: any.

    Raises:
        ProtocolError: The bytes aren't a message, or more than a control frame has,
            compressed or not; or it's about a member that there can't be.
    """
    value = to_json(_expanded(payload))
    kind = _KINDS.get(str(value.get("kind")))
    if kind is None:
        raise ProtocolError(
            "A message about membership is of no known kind. "
            f"Received: {str(value.get('kind'))[:50]!r}."
        )
    try:
        message: Message = _typed(value.get("fields"), kind)
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(
            f"A message about membership is damaged: {str(error)[:200]}."
        ) from None
    unknown = {each.id for each in _members(message)} - {*(tasks or ())}
    if tasks is not None and unknown:
        raise ProtocolError(
            f"A message about membership names ranks {sorted(unknown)[:10]}, and the "
            f"job has {len(tasks)} tasks."
        )
    return message


def _members(value: Any) -> Iterator[Member]:
    """Yield the members that a message names."""
    if isinstance(value, Member):
        yield value
    elif isinstance(value, (tuple, frozenset)):
        for each in value:
            yield from _members(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _members(getattr(value, field.name))


def _expanded(payload: bytes) -> bytes:
    if len(payload) > MAX_CONTROL:
        raise ProtocolError(
            "A message about membership is too long. "
            f"Received: {len(payload)} bytes, expected at most {MAX_CONTROL}."
        )
    expanding = zlib.decompressobj()
    try:
        text = expanding.decompress(payload, MAX_CONTROL + 1)
    except zlib.error as error:
        raise ProtocolError(
            f"A message about membership is damaged: {error}."
        ) from None
    if len(text) > MAX_CONTROL or not expanding.eof or expanding.unused_data:
        raise ProtocolError(
            "A message about membership is damaged, or too long. "
            f"Received: {len(text)} bytes of text, expected one text of at most "
            f"{MAX_CONTROL}."
        )
    return text


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: records as lists of their fields."""
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, frozenset):
        return [_plain(each) for each in sorted(value)]
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def _typed(value: Any, kind: Any) -> Any:
    """Return the value of a type that `_plain` was given.

    Raises:
        TypeError, ValueError: It isn't of that type.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _typed(value, args[0])
    if kind in (int, bool):
        if type(value) is not kind or (kind is int and not -1 <= value < 1 << 62):
            raise ValueError(f"expected {kind.__name__}, received {value!r}")
        return value
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if not isinstance(value, str) or value not in kind.__members__:
            raise ValueError(f"expected {kind.__name__}, received {value!r}")
        return kind[value]
    if not isinstance(value, list):
        raise ValueError(f"expected a list, received {type(value).__name__}")
    if origin is frozenset:
        return frozenset(_typed(each, args[0]) for each in value)
    if origin is tuple and args[1:] == (...,):
        return tuple(_typed(each, args[0]) for each in value)
    expected = args if origin is tuple else _fields(kind)
    if len(value) != len(expected):
        raise ValueError(f"expected {len(expected)} fields, received {len(value)}")
    parts = tuple(_typed(*pair) for pair in zip(value, expected, strict=True))
    return parts if origin is tuple else kind(*parts)


@functools.cache
def _fields(kind: type[Any]) -> tuple[Any, ...]:
    """Return the types of a record's fields, in order."""
    return tuple(typing.get_type_hints(kind).values())
