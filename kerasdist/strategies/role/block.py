"""Strategies as context managers: the end of the block leaves the job."""

from __future__ import annotations

import contextlib
import logging
from types import TracebackType
from typing import Any, TypeVar

import tensorflow as tf

_LOG = logging.getLogger("kerasdist")
_Self = TypeVar("_Self", bound="BlockStrategy")


class BlockStrategy(tf.distribute.Strategy):
    """A strategy that may be used in a `with` statement.

    Subclasses define `_leave`.
    """

    _scope_used = False

    def close(self) -> None:
        """Leave the job. Can be called twice."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        """Leave the job; report to the others the error that ended this worker's part.

        Can be called twice.
        """
        raise NotImplementedError

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """See `tf.distribute.Strategy.scope`."""
        self._scope_used = True
        return super().scope()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None and not self._scope_used:
            _LOG.warning(
                "kerasdist: a `with` block of a strategy has ended, and no model was "
                "created in the strategy's scope. Received: no call of "
                "`strategy.scope()`. Expected one, since `with strategy:` isn't the "
                "scope: models that are created outside of it are trained by each "
                "worker for itself. Write `with strategy.scope():` around their "
                "creation."
            )
        # As at a script's end, `sys.exit()` isn't a failure.
        self._leave(None if isinstance(error, SystemExit) else error)
