"""Who is alive, and what every rank hears when one isn't.

    C: rank 0          W: every other rank          one connection between C and W

    1. both ways, every `heartbeat_interval`: HEARTBEAT, in whose header is the
       sender's collective; C adds the numbers of all ranks' collectives
    2. W -> C  GOODBYE  I close; my script ended well, or with this error
       C -> W  GOODBYE  the same, passed on for another rank
    3. W -> C  FAILURE  I saw this error; or: I suspect that this rank is lost
    4. C       decides what the job's first failure was: the first error that it
               saw or was told of. A suspicion counts only if nothing better has
               come `_VERDICT_SECONDS` later.
    5. C -> W  FAILURE  the job's first failure, for everybody, the reporter too
    6. both ways  NOTICE   an announcement, see `announcements`
    7. a connection that ends without GOODBYE, or is silent for `heartbeat`
       seconds: C (or, of C itself, every W) holds that the other side is lost, and
       tells it so (5. or 3.), since it may be frozen and wake up later

So the chief decides, and all ranks that it can reach raise the same error: without
this a dead worker would be blamed on its neighbours, whose connections close as they
give up. A rank that the chief can't reach (a network that lets packets through in one
direction only) names the chief, and is named by the others.
A suspicion is a broken data connection: the other side has died (7. is on its
way), or has given up over a third rank (3. is on its way), or has left (2.).
One thread per session does all of it; other threads only leave messages. It never
calls into TensorFlow, so a long step can't stop it.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kerasdist import errors
from kerasdist.transport.base import Peer
from kerasdist.transport.connection import Connection
from kerasdist.transport.liveness.announcements import Announcements
from kerasdist.transport.liveness.failure_protocol import decode, encode
from kerasdist.transport.liveness.heartbeat import Frame, Heartbeat
from kerasdist.transport.liveness.launcher_pipe import Reporter
from kerasdist.transport.log import background_log
from kerasdist.transport.timeouts import Timeouts
from kerasdist.transport.wire.framing import Call, FrameType, unexpected
from kerasdist.transport.wire.messages import from_places, to_json, to_places

__all__ = ["SessionSupervisor"]

# How long the chief waits for something better than a suspicion.
_VERDICT_SECONDS = 2.0


class SessionSupervisor:
    """The supervisor of a session's control connections, see `failures.Supervisor`.

    Args:
        rank: This worker's rank.
        peers: All workers, by rank.
        controls: The chief's connection to each other rank, or another rank's
            to the chief. Owned from now on.
        timeouts: `heartbeat` is used.
        on_failure: Called once, from the supervisor's thread or a reporter's,
            with the job's first failure: ends the waits of this rank.
        reporter: Tells the launcher of the failure, before this rank can end of it.

    Attributes:
        announcements: What the chief tells the others outside of collectives.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        controls: Mapping[int, Connection],
        timeouts: Timeouts,
        on_failure: Callable[[errors.CollectiveError], None],
        reporter: Reporter | None = None,
    ) -> None:
        self.step = 0
        self.call = Call(0)
        self._rank = rank
        self._peers = tuple(peers)
        self._timeouts = timeouts
        self._on_failure = on_failure
        self._reporter = reporter
        self._changed = threading.Condition()  # holds an RLock
        self._failure: errors.CollectiveError | None = None
        self._departed: dict[int, str] = {}
        # Those of them whose scripts ended well.
        self._finished: set[int] = set()
        self._suspicions: list[tuple[float, errors.WorkerLost]] = []
        # The number of the collective that each rank was last heard to be in.
        self._places: dict[int, int] = {}
        self._ending = False
        # Of whom more may be heard.
        self._open = set(controls)
        self.announcements = Announcements(
            rank,
            self._send_notice,
            lambda: self.call.sequence,
            self._chief_is_gone,
            timeouts.collective,
        )
        self._heartbeat = Heartbeat(
            f"kerasdist-supervisor rank {rank}",
            timeouts,
            self._on_frame,
            self._ended,
            beat=self._beat,
            tick=self._judge,
            on_crash=self._crashed,
        )
        for other, connection in controls.items():
            self._heartbeat.add(other, connection)

    # For communicators, from any thread.

    @property
    def failure(self) -> errors.CollectiveError | None:
        """The first failure of the job, as far as this rank knows."""
        with self._changed:
            return self._failure

    def absent(self, call: Call) -> list[Peer] | None:
        """Return the ranks that haven't come to `call`, as last heard."""
        with self._changed:
            return [
                self._peers[rank]
                for rank, place in sorted(self._places.items())
                if rank != self._rank and place < call.sequence
            ]

    def report(
        self, error: errors.CollectiveError, *, wait: bool = True
    ) -> errors.CollectiveError:
        """See `Supervisor.report`: the chief says which was the first."""
        if self._rank != 0:
            self._post(FrameType.FAILURE, encode(error))
            if wait:
                self._await_verdict()
        return self._fail(error)

    def explain(self, peer: Peer, seen: str) -> errors.CollectiveError:
        """Find out why `peer` can't be heard any more, and tell everybody."""
        lost = errors.WorkerLost(peer.rank, peer.address, self.step, seen)
        if self._rank == 0:
            self._suspect(lost)
        else:
            self._post(FrameType.FAILURE, encode(lost, suspected=True))
        self._await_verdict()
        with self._changed:
            if self._failure is None and self._departed:
                # Nobody left to decide. Who left is the cause; the peer may have
                # given up because of that.
                gone = peer.rank if peer.rank in self._departed else min(self._departed)
                host, why = self._peers[gone].address, self._departed[gone]
                lost = errors.WorkerLost(gone, host, self.step, why)
        return self._fail(lost)

    def await_end(self, rank: int | None = None) -> errors.CollectiveError | None:
        """Wait until the job has ended here.

        That takes as long as it takes, but a rank that is lost ends it in time.

        Args:
            rank: It also ends when this rank has left, after a script that ended well.

        Returns:
            The job's first failure; None: that rank has left, or this one has closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._failure is not None or self._ending or rank in self._finished
                )
            )
            return None if rank in self._finished else self._failure

    def _send_notice(self, value: dict[str, Any], rank: int | None) -> None:
        payload = json.dumps(value).encode()
        if rank is None:
            self._post(FrameType.NOTICE, payload)
        else:
            self._heartbeat.post(rank, FrameType.NOTICE, payload, self.call)

    def _chief_is_gone(self) -> str | None:
        """Why the chief announces nothing any more; None: it may."""
        with self._changed:
            if self._failure is not None:
                raise copy.copy(
                    self._failure
                )  # see `collectives.failures.copy_to_raise`
            if self._ending:
                return "this worker has left the job"
            return (
                "it has left the job" if 0 in self._finished else self._departed.get(0)
            )

    def close(self, error: BaseException | None = None) -> None:
        """Say goodbye and end the thread and the connections. Can be called twice.

        Args:
            error: What ended this rank's script, if it ended badly: the others
                then fail at once instead of at their next collective.
        """
        reason = "it closed its strategy while others still needed it"
        if error is not None:
            shown = f"its script ended with {type(error).__name__}: {error}"
            reason = shown[:1000].rstrip(". \n")
        with self._changed:
            if self._ending:
                return
            # A script that ends because the job has failed isn't the cause.
            failed = error is not None and self._failure is None
            farewell = {"rank": self._rank, "failed": failed, "reason": reason}
            self._post(FrameType.GOODBYE, json.dumps(farewell).encode())
            self._ending = True
            self._changed.notify_all()
        self._heartbeat.close()

    # Deciding.

    def _fail(self, error: errors.CollectiveError) -> errors.CollectiveError:
        """Record the first failure and end this rank's waits; return the first.

        If this is the chief, tell everybody.
        """
        with self._changed:
            if self._failure is not None:
                return self._failure
            self._failure = error
            if self._rank == 0:
                # Before anybody here knows of it, and says goodbye because of it, or
                # ends the process: the others must hear the cause first.
                self._post(FrameType.FAILURE, encode(error))
            if self._reporter is not None:
                self._reporter.failed(error)
            self._changed.notify_all()
        self._on_failure(error)
        if self._rank == 0:
            background_log.log(logging.ERROR, "kerasdist: %s", error)
        return error

    def _suspect(self, lost: errors.WorkerLost) -> None:
        """The chief's: decide on this when nothing better has come in a moment."""
        with self._changed:
            self._suspicions.append((time.monotonic() + _VERDICT_SECONDS, lost))
        self._heartbeat.wake()

    def _judge(self, now: float) -> float:
        """The chief's: decide on suspicions that are due; return when the next is."""
        with self._changed:
            due = [
                lost
                for at, lost in self._suspicions
                if at <= now or lost.rank in self._departed
            ]
            departed = dict(self._departed)
        if due:
            lost = due[0]
            why = departed.get(lost.rank, lost.reason)
            self._fail(errors.WorkerLost(lost.rank, lost.host, lost.step, why))
            with self._changed:
                self._suspicions.clear()
        with self._changed:
            return min((at for at, _ in self._suspicions), default=math.inf)

    def _await_verdict(self) -> None:
        """Wait for the job's first failure, or until nobody is left to name it.

        It comes in any case: the chief answers, or is found to be lost.
        """
        seconds = self._timeouts.heartbeat + 2 * _VERDICT_SECONDS
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self._ending or not self._open,
                seconds,
            )

    def _lost(self, rank: int, reason: str) -> None:
        host = self._peers[rank].address
        lost = errors.WorkerLost(rank, host, self.step, reason)
        if self._rank != 0:
            # The chief may be frozen and wake up later: by then the others' connections
            # have ended, and it would blame one of them.
            self._post(FrameType.FAILURE, encode(lost))
        self._fail(lost)

    # The thread.

    def _post(self, kind: FrameType, payload: bytes, skip: int | None = None) -> None:
        self._heartbeat.broadcast(kind, payload, self.call, skip)

    def _crashed(self, error: Exception) -> None:
        self._fail(
            errors.CollectiveError(
                f"Supervising the workers failed: {type(error).__name__}: {error}"
            )
        )

    def _beat(self) -> tuple[bytes, Call]:
        with self._changed:
            self._places[self._rank] = self.call.sequence
            if self._rank != 0:
                return b"", self.call
            places = [self._places.get(rank, 0) for rank in range(len(self._peers))]
        return from_places(places), self.call

    def _ended(self, rank: Any, reason: str) -> None:
        with self._changed:
            left = rank in self._departed or self._ending
        if not left:
            self._lost(rank, reason)
        with self._changed:
            self._open.discard(rank)
            self._changed.notify_all()

    def _on_frame(self, rank: Any, frame: Frame) -> None:
        kind, call, payload = frame
        if kind is FrameType.HEARTBEAT:
            self._note_places(rank, call, payload)
        elif kind is FrameType.FAILURE:
            error, suspected = decode(payload)
            if suspected and self._rank == 0 and isinstance(error, errors.WorkerLost):
                self._suspect(error)
                return
            self._fail(error)
        elif kind is FrameType.GOODBYE:
            self._note_goodbye(rank, payload)
        elif kind is FrameType.NOTICE:
            self.announcements.receive(rank, to_json(payload))
        else:
            raise unexpected(kind)

    def _note_places(self, rank: int, call: Call, payload: bytes) -> None:
        if self._rank == 0:
            places = {rank: call.sequence}
        else:
            places = dict(enumerate(to_places(payload, len(self._peers))))
        with self._changed:
            self._places |= places

    def _note_goodbye(self, rank: int, payload: bytes) -> None:
        said = to_json(payload)
        gone, reason, failed = said.get("rank"), said.get("reason"), said.get("failed")
        if not (isinstance(gone, int) and 0 <= gone < len(self._peers)) or (
            self._rank == 0 and gone != rank
        ):
            raise errors.ProtocolError(f"A goodbye is damaged. Received: {said!r}.")
        with self._changed:
            self._departed[gone] = str(reason)
            if not failed:
                self._finished.add(gone)
            self._changed.notify_all()
        if self._rank == 0:
            self._post(FrameType.GOODBYE, payload, skip=rank)
        # Of another rank's bad end the chief's word is on its way.
        if failed and gone == rank:
            self._lost(gone, str(reason))
