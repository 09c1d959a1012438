"""A `with` statement for what has a method `close`."""

from __future__ import annotations

import contextlib
from typing import Any


class Closing(contextlib.AbstractContextManager[Any]):
    """Closed at the end of a `with` statement, also after a failure."""

    def __exit__(self, *_: object) -> None:
        self.close()
