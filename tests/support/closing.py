"""A `with` statement for what has a method `close`, also after a failure."""

import contextlib
from typing import Any


class Closing(contextlib.AbstractContextManager[Any]):
    def __exit__(self, *_: object) -> None:
        self.close()
