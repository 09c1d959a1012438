"""The failure detector of a ring: agreement of all ranks on a job's first failure.

    C: rank 0          W: every other rank          one connection between C and W

    1. both ways, every `heartbeat_interval`: HEARTBEAT, in whose header is the
       sender's collective; C reports those of all ranks to a W that waits
    2. W -> C  GOODBYE  W closes; its script ended well, or with this error
       C -> W  GOODBYE  the same, forwarded for another rank
    3. W -> C  FAILURE  an error of W; or W's suspicion that a rank is lost
    4. C       decides on the job's first failure: the first error of its own or
               reported to it. A suspicion counts only if no error was reported
               `DECISION_SECONDS` later.
    5. C -> W  FAILURE  the job's first failure, to all, the reporter too
    6. both ways  NOTICE   an announcement, see `announcements`
    7. a connection that ends without GOODBYE, or is silent for `heartbeat`
       seconds: C (or, of C itself, every W) takes the other side for lost, and
       sends it that (5. or 3.), since it may be frozen and wake up later

So the chief decides, and all ranks that it can reach raise the same error: without
this the neighbours of a dead worker would be named as lost, because their connections
close when they fail. A rank that the chief can't reach (a network that lets packets
through in one direction only) names the chief, and is named by the others.
A suspicion is a broken data connection: the other side has died (7. follows), or has
failed because of a third rank (3. follows), or has left (2.).
One thread per session does all of it; other threads only leave messages. It never
calls into TensorFlow, so a long step can't stop it.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kerasdist import errors
from kerasdist.errors import ProtocolError
from kerasdist.transport import log
from kerasdist.transport.base import Connection, Peer
from kerasdist.transport.deadline import Timeouts
from kerasdist.transport.framing import Call, FrameType, to_json, unexpected
from kerasdist.transport.liveness.announcements import Announcements
from kerasdist.transport.liveness.failure_protocol import Supervisor, decode, encode
from kerasdist.transport.liveness.heartbeat import Frame, Heartbeat
from kerasdist.transport.liveness.launcher_pipe import Reporter

# The collective that each rank of a job is in, by its last heartbeat.
#
#     C: rank 0          W: every other rank
#
#     1. W -> C  HEARTBEAT  in its header is the number of W's collective
#     2. C -> W  HEARTBEAT  if 1. has the number of W's heartbeat before it: the numbers
#                           of all ranks, unless they are those of the last 2.
#
# W needs the others' numbers only when it has waited for a collective until the time is
# over, in which there are at least four heartbeats. So a rank that moves on gets none.
# All numbers are 0 at first. They are compressed: most of them are the same.

# The place of a rank of which nothing is known: not behind any.
_UNKNOWN = 1 << 64


class CollectiveProgress:
    """The number of each rank's collective. Not safe for several threads.

    Args:
        size: The number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._places = [_UNKNOWN] * size
        self._form = struct.Struct(f"!{size}Q")
        # All places as bytes; empty: not made since the last change. And what each rank
        # was sent last.
        self._packed = b""
        self._sent = [b""] * size

    def behind(self, place: int) -> list[int]:
        """Return the ranks that haven't reached a collective, in order."""
        return [rank for rank, known in enumerate(self._places) if known < place]

    def note(self, rank: int, place: int) -> bytes:
        """Note a rank's collective, on the chief; return what must be sent to it.

        Returns:
            An argument of `receive`; empty: nothing needs to be sent.
        """
        if self._places[rank] != place:
            self._places[rank], self._packed = place, b""
            return b""
        if not self._packed:
            # Unknown ones become 0.
            known = (number % _UNKNOWN for number in self._places)
            self._packed = zlib.compress(self._form.pack(*known))
        sent, self._sent[rank] = self._sent[rank], self._packed
        return b"" if sent == self._packed else self._packed

    def receive(self, payload: bytes) -> None:
        """Note what the chief has sent; nothing if that is empty.

        Raises:
            ProtocolError: It's damaged.
        """
        if not payload:
            return
        try:
            # Not more than there must be, even if it is damaged.
            text = zlib.decompressobj().decompress(payload, self._form.size + 1)
            self._places = list(self._form.unpack(text))
        except (zlib.error, struct.error) as error:
            raise ProtocolError(
                f"A heartbeat is damaged. Received: {len(payload)} bytes ({error})."
            ) from None


# Seconds that the chief waits for a report that is better than a suspicion.
DECISION_SECONDS = 2.0


class FailureDetector(Supervisor):
    """The failure detector of a session, see `failure_protocol.Supervisor`.

    Args:
        rank: This worker's rank.
        peers: All workers, by rank.
        controls: The chief's connection to each other rank, or another rank's
            to the chief. Owned from now on.
        timeouts: `heartbeat` is used.
        on_failure: Called once, from the supervisor's thread or a reporter's,
            with the job's first failure: ends the waits of this rank.
        reporter: Reports the failure to the launcher, before this rank ends of it.
        log: Whether the chief logs the failure.

    Attributes:
        announcements: The chief's announcements to the others.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        controls: Mapping[int, Connection],
        timeouts: Timeouts,
        on_failure: Callable[[errors.CollectiveError], None],
        reporter: Reporter | None = None,
        *,
        log: bool = True,
    ) -> None:
        super().__init__()
        self._rank = rank
        self._peers = tuple(peers)
        self._timeouts = timeouts
        self._on_failure = on_failure
        self._reporter = reporter
        self._log = log
        self._changed = threading.Condition()  # holds an RLock
        self._departed: dict[int, str] = {}
        # Those of them whose scripts ended well.
        self._finished: set[int] = set()
        self._suspicions: list[tuple[float, errors.WorkerLost]] = []
        self._places = CollectiveProgress(len(self._peers))
        self._ending = False
        # The ranks whose connections are open.
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
            tick=self._decide,
            on_crash=self._crashed,
        )
        for other, connection in controls.items():
            self._heartbeat.add(other, connection)

    # For communicators, from any thread.

    @property
    def failure(self) -> errors.CollectiveError | None:
        """The first failure of the job that this rank knows of, or None."""
        with self._changed:
            return self._failure

    def absent(self, call: Call) -> list[Peer] | None:
        """Return the ranks that haven't joined `call`, by their last heartbeats.

        Another rank than the chief knows it two intervals after it has joined `call`.
        """
        with self._changed:
            behind = self._places.behind(call.sequence)
        return [self._peers[rank] for rank in behind if rank != self._rank]

    def report(
        self, error: errors.CollectiveError, *, wait: bool = True
    ) -> errors.CollectiveError:
        """See `Supervisor.report`: the chief decides which was the first."""
        if self._rank != 0:
            self._post(FrameType.FAILURE, encode(error))
            if wait:
                self._await_decision()
        return self._fail(error)

    def explain(self, peer: Peer, seen: str) -> errors.CollectiveError:
        """Find out why `peer` can't be reached any more, and report it to all."""
        lost = errors.WorkerLost(peer.rank, peer.address, self.step, seen)
        if self._rank == 0:
            self._suspect(lost)
        else:
            self._post(FrameType.FAILURE, encode(lost, suspected=True))
        self._await_decision()
        with self._changed:
            if self._failure is None and self._departed:
                # No chief is left to decide. A rank that left is the cause; the peer
                # may have failed because of it.
                gone = peer.rank if peer.rank in self._departed else min(self._departed)
                host, why = self._peers[gone].address, self._departed[gone]
                lost = errors.WorkerLost(gone, host, self.step, why)
        return self._fail(lost)

    def abandon(self, error: errors.CollectiveError) -> None:
        """End all waits of this rank with an error; the others aren't informed."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def await_end(self, rank: int | None = None) -> errors.CollectiveError | None:
        """Wait until the job has ended here.

        There is no deadline, but the loss of a rank ends it in time.

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
        """Return why the chief announces nothing any more; None if it may."""
        with self._changed:
            if self._failure is not None:
                raise copy.copy(
                    self._failure
                )  # see `collectives.communicator.copy_to_raise`
            if self._ending:
                return "this worker has left the job"
            return (
                "it has left the job" if 0 in self._finished else self._departed.get(0)
            )

    def close(self, error: BaseException | None = None) -> None:
        """Send a goodbye; end the thread and the connections. Can be called twice.

        Args:
            error: The error that ended this rank's script, if there was one: the others
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
            goodbye = {"rank": self._rank, "failed": failed, "reason": reason}
            self._post(FrameType.GOODBYE, json.dumps(goodbye).encode())
            self._ending = True
            self._changed.notify_all()
        self._heartbeat.close()

    # Deciding.

    def _fail(self, error: errors.CollectiveError) -> errors.CollectiveError:
        """Record the first failure and end this rank's waits; return the first.

        The chief also sends it to all ranks.
        """
        with self._changed:
            if self._failure is not None:
                return self._failure
            self._failure = error
            if self._rank == 0:
                # Before another thread of this process knows of it, and sends a
                # goodbye or ends the process: the others must get the cause first.
                self._post(FrameType.FAILURE, encode(error))
            if self._reporter is not None:
                self._reporter.failed(error)
            self._changed.notify_all()
        self._on_failure(error)
        if self._rank == 0 and self._log:
            log.log_in_background(logging.ERROR, "kerasdist: %s", error)
        return error

    def _suspect(self, lost: errors.WorkerLost) -> None:
        """Note a suspicion, on the chief: it counts if no error is reported soon."""
        with self._changed:
            self._suspicions.append((time.monotonic() + DECISION_SECONDS, lost))
        self._heartbeat.wake()

    def _decide(self, now: float) -> float:
        """Decide on suspicions that are due, on the chief; return when the next is."""
        with self._changed:
            for at, lost in self._suspicions:
                if at <= now or lost.rank in self._departed:
                    why = self._departed.get(lost.rank, lost.reason)
                    self._suspicions.clear()
                    break
            else:
                return min((at for at, _ in self._suspicions), default=math.inf)
        self._fail(errors.WorkerLost(lost.rank, lost.host, lost.step, why))
        return math.inf

    def _await_decision(self) -> None:
        """Wait for the job's first failure, or until no rank is left to decide it.

        The wait ends in any case: the chief replies, or is found to be lost.
        """
        seconds = self._timeouts.heartbeat + 2 * DECISION_SECONDS
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
            # have ended, and it would take one of them for the cause.
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
            self._places.note(self._rank, self.call.sequence)
        return b"", self.call

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
        with self._changed:
            if self._ending:
                # The others' answers to this rank's goodbye: it has left the job.
                return
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
        with self._changed:
            if self._rank != 0:
                self._places.receive(payload)
                return
            changes = self._places.note(rank, call.sequence)
        if changes:
            self._heartbeat.post(rank, FrameType.HEARTBEAT, changes, self.call)

    def _note_goodbye(self, rank: int, payload: bytes) -> None:
        value = to_json(payload)
        left, reason = value.get("rank"), value.get("reason")
        failed = value.get("failed")
        if not (type(left) is int and 0 <= left < len(self._peers)) or (
            self._rank == 0 and left != rank
        ):
            raise errors.ProtocolError(f"A goodbye is damaged. Received: {value!r}.")
        with self._changed:
            self._departed[left] = str(reason)
            if not failed:
                self._finished.add(left)
            self._changed.notify_all()
        if self._rank == 0:
            self._post(FrameType.GOODBYE, payload, skip=rank)
        # The chief reports another rank's failure itself.
        if failed and left == rank:
            self._lost(left, str(reason))
