"""The control connections of a server's workers: frames from them, events to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from typing import Any

from kerasdist import errors
from kerasdist.ps.membership import Event, WorkerRecord
from kerasdist.ps.server.handler import Goodbye, RequestHandler
from kerasdist.transport.connection import Connection
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.liveness.failure_protocol import encode
from kerasdist.transport.liveness.heartbeat import Frame, Heartbeat
from kerasdist.transport.timeouts import Timeouts
from kerasdist.transport.wire.framing import FrameType, unexpected
from kerasdist.transport.wire.messages import to_json

_ANSWER_SECONDS = 5.0


class ControlConnections:
    """Watches the workers' control connections, in a thread of its own.

    Args:
        handler: The server.
        timeouts: The interval and the limit of heartbeats.
        lost: Called with each worker that was lost.
        end: Called when the job has failed, or no worker is left.
    """

    def __init__(
        self,
        handler: RequestHandler,
        timeouts: Timeouts,
        lost: Callable[[WorkerRecord], None],
        end: Callable[[], None],
    ) -> None:
        self._handler = handler
        self._lost = lost
        self._end = end
        name = f"kerasdist-watch server {handler.server}"
        self._heartbeat = Heartbeat(name, timeouts, self._on_frame, self._ended)
        handler.membership.on_event.append(self._announce)
        handler.membership.on_failure.append(self._fail)

    def open(
        self, worker: WorkerRecord, connection: Connection, roster: dict[str, Any]
    ) -> None:
        """Answer a worker's hello, and watch its connection from now on."""
        try:
            deadline = Deadline(_ANSWER_SECONDS)
            connection.write_json(FrameType.ROSTER, roster, deadline)
        except OSError:  # it died since: the heartbeat notices that
            pass
        self._heartbeat.add(_key(worker), connection)

    def last_received(self, worker: WorkerRecord) -> float | None:
        """Return the time of a worker's last frame (monotonic); None: no connection."""
        return self._heartbeat.last_received(_key(worker))

    def close(self) -> None:
        """Send what is still queued, and close the connections."""
        self._heartbeat.close()

    def _on_frame(self, key: Hashable, frame: Frame) -> None:
        kind, _, payload = frame
        if kind is FrameType.HEARTBEAT:
            return
        worker = self._worker(key)
        if kind is FrameType.NOTICE:
            if worker is not None:
                self._pass_on(worker, payload)
            return
        if kind is not FrameType.GOODBYE:
            raise unexpected(kind)
        if worker is not None:
            self._handler.on_goodbye(worker, Goodbye.from_payload(payload))

    def _ended(self, key: Hashable, reason: str) -> None:
        worker = self._worker(key)
        members = self._handler.membership
        if worker is None or not members.lose(worker, reason):
            return
        # It may have been frozen, and wake up later.
        lost = errors.WorkerLost(
            *(worker.rank, worker.address, worker.clock, reason),
            others_go_on=self._handler.settings.mode == "async" and not members.over,
        )
        self._heartbeat.post(key, FrameType.FAILURE, encode(lost))

    def _pass_on(self, sender: WorkerRecord, payload: bytes) -> None:
        """Send a worker's notice to another one, or to all others."""
        notice = to_json(payload)
        to = notice.get("to")
        value = {"from": sender.rank, "value": notice.get("value")}
        for worker in self._handler.membership.workers:
            receives = worker.rank == to if to is not None else worker is not sender
            if worker.state == "live" and receives:
                content = json.dumps(value).encode()
                self._heartbeat.post(_key(worker), FrameType.NOTICE, content)

    def _worker(self, key: Hashable) -> WorkerRecord | None:
        if not isinstance(key, tuple):
            return None
        return self._handler.membership.current(*key)

    def _announce(self, event: Event) -> None:
        members = self._handler.membership
        payload = json.dumps(event.to_json()).encode()
        for worker in members.workers:
            if worker.state == "live" and worker.rank != event.rank:
                self._heartbeat.post(_key(worker), FrameType.EVENT, payload)
        if event.kind == "lost":
            self._lost(members.workers[event.rank])
        if members.over:
            self._end()

    def _fail(self, error: errors.CollectiveError) -> None:
        for worker in self._handler.membership.workers:
            if worker.state in ("live", "lost"):
                self._heartbeat.post(_key(worker), FrameType.FAILURE, encode(error))
        self._end()


def _key(worker: WorkerRecord) -> tuple[int, str]:
    return worker.rank, worker.incarnation
