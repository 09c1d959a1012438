"""The failure detector's contract, and the format of failures in messages."""

from __future__ import annotations

import json
from typing import Any, Protocol

from kerasdist import errors
from kerasdist.transport.base import Peer
from kerasdist.transport.wire.framing import Call

_MOST_CHARACTERS = 4000


class Supervisor(Protocol):
    """Knows the state of all ranks of a job, of which one connection shows only a part.

    Attributes:
        step: This rank's step, for messages; set by the strategy.
        call: The collective this rank is in, or was in last; set by the
            communicator.
    """

    step: int
    call: Call

    @property
    def failure(self) -> errors.CollectiveError | None:
        """The first failure of the job that this rank knows of, or None."""

    def report(
        self, error: errors.CollectiveError, *, wait: bool = True
    ) -> errors.CollectiveError:
        """Report an error of this rank to all ranks; return the job's first one.

        Args:
            error: The error.
            wait: Whether to wait until the ranks agree on the first error.
        """

    def explain(self, peer: Peer, seen: str) -> errors.CollectiveError:
        """Find out why `peer` can't be reached any more, and report it to all ranks."""

    def absent(self, call: Call) -> list[Peer] | None:
        """Return the ranks that haven't joined `call`; None if that isn't known."""

    def close(self) -> None:
        """Send a goodbye and end. Can be called twice."""


class Unsupervised:
    """Takes every broken connection for a lost rank; for tests without a session.

    Ranks in one process may share one: then they agree on the first failure.
    """

    def __init__(self) -> None:
        self.step = 0
        self.call = Call(0)
        self._failure: errors.CollectiveError | None = None

    @property
    def failure(self) -> errors.CollectiveError | None:
        """See `Supervisor.failure`."""
        return self._failure

    def report(
        self, error: errors.CollectiveError, *, wait: bool = True
    ) -> errors.CollectiveError:
        """See `Supervisor.report`."""
        self._failure = self._failure or error
        return self._failure

    def explain(self, peer: Peer, seen: str) -> errors.CollectiveError:
        """See `Supervisor.explain`."""
        return self.report(errors.WorkerLost(peer.rank, peer.address, self.step, seen))

    def absent(self, call: Call) -> list[Peer] | None:
        """See `Supervisor.absent`."""
        return None

    def close(self) -> None:
        """See `Supervisor.close`."""


def encode(error: errors.CollectiveError, *, suspected: bool = False) -> bytes:
    """Return a failure as bytes: its class's name and its arguments.

    Args:
        error: The failure.
        suspected: Whether another failure may be the cause: the chief then waits
            a moment for it.
    """
    args: tuple[Any, ...]
    if isinstance(error, errors.WorkerLost):
        reason = error.reason[:_MOST_CHARACTERS]
        args = (error.rank, error.host, error.step, reason, error.others_go_on)
    elif isinstance(error, errors.ServerLost):
        reason = error.reason[:_MOST_CHARACTERS]
        args = (error.index, error.address, error.step, reason, error.held_weights)
    else:
        args = (str(error)[:_MOST_CHARACTERS],)
    value = {"error": type(error).__name__, "args": args, "suspected": suspected}
    return json.dumps(value).encode()


def decode(payload: bytes | str) -> tuple[errors.CollectiveError, bool]:
    """Return the arguments of `encode`; other bytes are a plain, certain failure."""
    try:
        value = json.loads(payload)
        kind, args = getattr(errors, value["error"]), value["args"]
        if issubclass(kind, (errors.WorkerLost, errors.ServerLost)):
            index, address, step, reason, *more = args
            lost = kind(
                *(int(index), str(address), int(step), str(reason)),
                *(flag is True for flag in more),
            )
            return lost, value["suspected"] is True
        if issubclass(kind, errors.CollectiveError):
            return kind(str(args[0])), value["suspected"] is True
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    except (OverflowError, RecursionError):  # Infinity, or very many brackets
        pass
    if isinstance(payload, bytes):
        payload = payload.decode("utf-8", "replace")
    return errors.CollectiveError(payload[:_MOST_CHARACTERS]), False
