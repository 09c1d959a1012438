"""A `with` statement for what has a method `close`."""

from __future__ import annotations

from typing import TypeVar

_Self = TypeVar("_Self")


class Closing:
    """Closed at the end of a `with` statement, also after a failure."""

    def close(self) -> None:
        """End what this holds."""
        raise NotImplementedError

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
