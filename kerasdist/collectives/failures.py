"""The translation of a transport's errors into the failure that all ranks raise."""

from __future__ import annotations

import copy

from kerasdist import errors
from kerasdist.transport.base import (
    Aborted,
    CallMismatch,
    Peer,
    PeerClosed,
    PeerSilent,
)
from kerasdist.transport.liveness.failure_protocol import Supervisor
from kerasdist.transport.wire.framing import Call


def copy_to_raise(failure: errors.CollectiveError) -> errors.CollectiveError:
    """Return a copy to raise.

    A raised exception refers to a traceback, and so to all arrays of the frames that
    it passed through: the one that is kept mustn't, and several threads may raise it.
    """
    return copy.copy(failure)


def explain(
    error: BaseException,
    call: Call,
    here: Peer,
    shapes: str,
    supervisor: Supervisor,
    known: errors.CollectiveError | None,
) -> errors.CollectiveError | None:
    """Turn an error into the job's failure, and report it to the others.

    Args:
        error: The error.
        call: The collective in which it occurred.
        here: This rank.
        shapes: The dtypes and shapes of this rank's buffers.
        supervisor: Knows the state of other ranks, and reports to them.
        known: The error that ended this communicator before, or None.

    Returns:
        The failure; None if the error isn't one of the group.
    """
    step = supervisor.step
    if isinstance(error, Aborted):
        return (
            known
            or supervisor.failure
            or errors.TransportClosed(
                f"This communicator was closed during {call}. Create a new strategy "
                "to continue."
            )
        )
    if isinstance(error, PeerClosed):
        return supervisor.explain(error.peer, f"{error}, while {here} was in {call}")
    if isinstance(error, PeerSilent):
        return supervisor.report(_late(error.peer, call, here, supervisor))
    if isinstance(error, CallMismatch):
        return supervisor.report(_mismatch(error, here, shapes, step))
    if isinstance(error, errors.CollectiveError):
        return supervisor.report(error)
    if isinstance(error, errors.ProtocolError):
        return supervisor.report(
            errors.CollectiveError(f"{here} in {call} at step {step}: {error}")
        )
    if isinstance(error, OSError):
        return supervisor.report(
            errors.CollectiveError(
                f"{here} could not continue {call} at step {step}: {error}."
            )
        )
    return None


def _late(
    peer: Peer, call: Call, here: Peer, supervisor: Supervisor
) -> errors.CollectiveTimeout:
    """Name the late ranks: in a ring, not always the neighbour that was silent."""
    absent = supervisor.absent(call)
    where = f"{here} waited at step {supervisor.step}"
    if absent is not None and not absent:
        return errors.CollectiveTimeout(
            f"All ranks joined {call}, but it wasn't done in time; {where} for "
            f"{peer}. Was one of them late, or is the network too slow for these "
            "buffers? Give it more time with `timeout=`."
        )
    names = " and ".join(str(late) for late in absent or [peer])
    return errors.CollectiveTimeout(
        f"{names} didn't join {call} in time; {where}. The process is alive: is it "
        "still busy with work of its own (saving, evaluating)? Give it more time with "
        "`timeout=`, or let all ranks do the same."
    )


def _mismatch(
    error: CallMismatch, here: Peer, shapes: str, step: int
) -> errors.CollectiveMismatch:
    mine, theirs = str(error.mine), str(error.theirs)
    if mine == theirs:
        mine += f" on buffers {shapes}"
        theirs += " on buffers of other dtypes or shapes"
    return errors.CollectiveMismatch(
        f"Ranks called different collectives at step {step}. "
        f"Received: {here}: {mine}; {error.peer}: {theirs}. All ranks must call the "
        "same collectives in the same order on the same shapes: does the script branch "
        "on the rank, or does a model differ?"
    )
