"""An earlier strategy of this process, which the same servers have served."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Protocol

from kerasdist.cluster import Cluster
from kerasdist.errors import ClusterError, ServerLost, StartupError
from kerasdist.transport import Timeouts

__all__ = ["EarlierStrategy"]

# Seconds to wait for servers that have served another strategy of this process.
_AGAIN_SECONDS = 20.0


class Closable(Protocol):
    """A worker's part in a job."""

    @property
    def closed(self) -> bool:
        """Whether it has left the job."""


# The newest worker's connection of this process to the servers at these addresses.
_served: dict[tuple[str, ...], weakref.ref[Closable]] = {}


class EarlierStrategy:
    """An earlier strategy of this process that the same servers have served.

    Args:
        place: This task's place in the cluster.

    Raises:
        ClusterError: There is one, and it isn't closed.
    """

    def __init__(self, place: Cluster) -> None:
        self._servers = place.servers
        self._ended = place.servers in _served
        client = _served[place.servers]() if self._ended else None
        if client is not None and not client.closed:
            raise self._error("is open")

    def limited(self, timeouts: Timeouts) -> Timeouts:
        """Return short time-outs for servers that have ended, but may be restarted."""
        if not self._ended:
            return timeouts
        startup = min(timeouts.startup, _AGAIN_SECONDS)
        return dataclasses.replace(timeouts, startup=startup)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Explain why no server answers any more."""
        try:
            yield
        except (StartupError, ServerLost) as error:
            if self._ended:
                raise self._error("was closed, so they have ended") from error
            raise

    def note(self, client: Closable) -> None:
        """Record that a strategy has been connected."""
        if self._servers:
            _served[self._servers] = weakref.ref(client)

    def _error(self, state: str) -> ClusterError:
        return ClusterError(
            "A job's servers serve one strategy, and end with it. Received: another "
            f"ParameterServerStrategy with the servers {list(self._servers)}; the "
            f"one that this script created before {state}. Create one, and let all "
            "models be created in its scope, also one after the other; for another "
            "`mode` start another job."
        )
