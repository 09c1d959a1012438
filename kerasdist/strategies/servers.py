"""The connection of this process to its servers, which all its strategies share.

Servers stay until the workers' processes end. When a strategy is closed, others don't
wait for this worker any longer; the next one of the script uses the same connection:

    strategy 1   connects ── trains ── close: left 1
    strategy 2                                use 2 ── trains ── end of the process
    servers      serve ................................................ end

A strategy with other settings ends those before it. The worker leaves, naming the new
settings, and connects again; the servers begin again when all workers have left.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

from kerasdist.cluster import Cluster
from kerasdist.errors import ClusterError, ServerLost, StartupError
from kerasdist.parameter_server import Event, ServerClient, ServerSettings
from kerasdist.parameter_server.membership import Successor
from kerasdist.transport import Timeouts
from kerasdist.transport.log import log_in_background

# The events of other workers, recorded and logged.


class EventLog:
    """Records events of workers, and reports them in the log, since the others go on.

    Args:
        events: The list to append to.
    """

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def __call__(self, event: Event) -> None:
        """Record an event."""
        self._events.append(event)
        _log_event(event)


def _log_event(event: Event) -> None:
    if event.kind == "lost":
        log_in_background(
            logging.WARNING,
            "kerasdist: rank %d (%s) was lost at step %d: %s. The others go on.",
            event.rank,
            event.address,
            event.clock,
            event.reason,
        )
    elif event.kind == "joined":
        log_in_background(
            logging.WARNING,
            "kerasdist: rank %d (%s) is waiting; it joins at the end of an epoch.",
            event.rank,
            event.address,
        )


# Seconds to wait for servers in place of those that an error of this process ended.
_AGAIN_SECONDS = 20.0

# By the servers' addresses.
_clients: dict[tuple[str, ...], SharedClient] = {}
# Whether these serve elastic strategies.
_elastic: dict[tuple[str, ...], bool] = {}


class SharedClient:
    """The connection of one process to its servers. Made by `SharedClient.get`.

    Args:
        client: The connection.
        kept: The settings of all strategies that use it, by their names.
        part: How often the script has continued with other settings.
        events: The events of other workers, which the connection appends to.

    Attributes:
        client: As given.
        events: As given.
    """

    def __init__(
        self,
        client: ServerClient,
        kept: dict[str, Any],
        part: int,
        events: list[Event],
    ) -> None:
        self.client = client
        self.events = events
        self._kept = kept
        self._part = part

    @classmethod
    def get(
        cls,
        place: Cluster,
        settings: ServerSettings,
        kept: dict[str, Any],
        timeouts: Timeouts,
        connect: Callable[[list[Event], Timeouts, int], ServerClient],
    ) -> SharedClient:
        """Return the connection for another strategy; connect for the first one.

        Args:
            place: This task's place in the cluster.
            settings: The servers' settings.
            kept: Other settings, see the class.
            timeouts: How long each phase may take.
            connect: Connects, given a list for events, the time-outs and the part of
                the script, see the class.

        Raises:
            ClusterError: An error closed an earlier strategy, and no other servers were
                started since.
        """
        kept = {**dataclasses.asdict(settings), **dataclasses.asdict(timeouts), **kept}
        found = _clients.get(place.servers)
        part = 0
        if found is not None and not found.client.closed and found._kept != kept:
            part = found._part + 1
            found.client.close(
                successor=Successor(settings=settings, timeouts=timeouts)
            )
            found = None
        if found is not None and found.client.closed:
            # Its servers have ended, but may have been started again.
            startup = min(timeouts.startup, _AGAIN_SECONDS)
            timeouts = dataclasses.replace(timeouts, startup=startup)
        if found is None or found.client.closed:
            events: list[Event] = []
            try:
                client = connect(events, timeouts, part)
            except (StartupError, ServerLost) as error:
                if found is None:
                    raise
                raise ClusterError(
                    "An error closed an earlier strategy of this script, and so ended "
                    "the job's servers. Received: another ParameterServerStrategy with "
                    f"the servers {list(place.servers)}; no new ones were found within "
                    f"{timeouts.startup:g} s. Start the job again."
                ) from error
            found = cls(client, kept, part, events)
            if place.servers:
                _clients[place.servers] = found
            return found
        found.client.use_again()
        return found

    def leaving(self) -> Callable[[BaseException | None], None]:
        """Return what a strategy calls at its end, with the error that ended it."""
        client, use = self.client, self.client.use

        def leave(error: BaseException | None = None) -> None:
            if error is not None or not client.cluster.servers:
                client.close(error)
            else:
                client.leave(use)

        return leave


def note_elastic(place: Cluster, *, elastic: bool) -> None:
    """Note whether this process uses its servers for elastic strategies.

    Raises:
        ClusterError: Another strategy of this process uses them for the other kind.
    """
    if place.servers and _elastic.setdefault(place.servers, elastic) != elastic:
        raise ClusterError(
            "A job's servers serve either elastic strategies or others. Received: "
            f"another ParameterServerStrategy with elastic={elastic} and the servers "
            f"{list(place.servers)}; the one before has elastic={not elastic}. Create "
            "all with the same `elastic`, or start another job."
        )


# A forked child isn't the worker.
os.register_at_fork(after_in_child=_clients.clear)
