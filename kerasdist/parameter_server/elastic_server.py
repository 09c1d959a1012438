"""A parameter server of an elastic job.

The workers agree on their members by themselves (`kerasdist.collectives.elastic`). For
each epoch they connect to the servers as for a job of its own. A server holds nothing
between two steps, so a lost one is replaced by the others.

It serves each epoch as a job of its own, with a `ParameterServer` at the same listener.
`kerasdist.parameter_server.elastic_link` has the protocol. It decides nothing: if a
worker is lost, the epoch has failed, and the server waits for the next one. The jobs of
all strategies of a script are served, at once or one after the other.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from typing import Any

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.collectives.elastic.groups import elastic_timeouts
from kerasdist.parameter_server.elastic_link import (
    PURPOSE,
    EpochAnswer,
    EpochRequest,
    EpochServers,
    agreed,
)
from kerasdist.parameter_server.layout import ServerSettings
from kerasdist.parameter_server.server.handler import Load, share_in_words
from kerasdist.parameter_server.server.registration import (
    LOOK_SECONDS,
    ServerTask,
    different_settings,
)
from kerasdist.parameter_server.server.server import (
    ParameterServer,
    log_line,
    name_of,
    serve_logged,
)
from kerasdist.transport.base import Connection
from kerasdist.transport.deadline import Deadline, Timeouts, in_daemon
from kerasdist.transport.liveness.failure_protocol import hand_over_final_error
from kerasdist.transport.liveness.heartbeat import Heartbeat
from kerasdist.transport.rendezvous.dial import answer, refuse

# The process of a parameter server of an elastic job: its output, and its end.


def run_elastic_server(
    cluster: Cluster,
    settings: ServerSettings,
    min_workers: int,
    timeouts: Timeouts | None = None,
) -> None:
    """Run a server of an elastic job until the job is over.

    It logs the number of its workers, its part of a step when that has changed, and
    at the end the traffic.

    Args:
        cluster: The job; this process is one of its `servers`.
        settings: The job's settings; the workers' must be the same.
        min_workers: The smallest number of workers that continue.
        timeouts: The time limit of each phase.

    Raises:
        KerasDistError: As `ElasticServer` and its `serve`.
    """
    hand_over_final_error()
    name = name_of(cluster)
    shown = [""]

    def split(loads: list[Load], index: int) -> None:
        share = share_in_words(loads, index)
        if share != shown[0]:
            shown[0] = share
            log_line(f"{name} gets of each worker and step: {share}.")

    server = ElasticServer(
        cluster, settings, min_workers, timeouts=timeouts, on_split=split
    )
    log_line(
        f"{name} serves {cluster.size} worker(s), mode={settings.mode!r}, elastic."
    )
    serve_logged(cluster, server)


_JOIN_SECONDS = 10.0
# For connecting the members of an epoch.
_LEAST_SECONDS, _MOST_SECONDS = 0.1, 1e6


class ElasticServer(ServerTask):
    """One server of elastic jobs: serves epoch after epoch until all workers left.

    Args:
        cluster: The job; this process is one of its `servers`.
        settings: The job's settings; the workers' must be the same.
        min_workers: The smallest number of workers that continue; the same as theirs.
        timeouts: The time limit of each phase. With no worker for `startup` seconds the
            server ends.
        on_split: Called with the loads of the servers of an epoch, and this one's index
            among them, when the epoch's first step is finished.

    Attributes:
        index: Index among the job's servers.
        address: Its address.

    Raises:
        As `ParameterServer`.

    From the constructor on it listens; `serve` handles requests. `close` ends both.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: ServerSettings,
        min_workers: int,
        *,
        timeouts: Timeouts | None = None,
        on_split: Callable[[list[Load], int], None] | None = None,
    ) -> None:
        super().__init__(cluster, elastic_timeouts(timeouts or Timeouts()))
        self._cluster = cluster
        self._settings = settings
        self._agreed = agreed(settings, min_workers)
        self._on_split = on_split
        # The present one of each job; the one that began last.
        self._epochs: dict[int, _Epoch] = {}
        self._latest: _Epoch | None = None
        # Of those that are replaced by a later one, until their threads have ended.
        self._replaced: list[Future[None]] = []
        self._totals: collections.Counter[str] = collections.Counter()
        # Questions about a job's next epoch: rank, connection and request.
        self._questions: list[tuple[int, Connection, EpochRequest]] = []
        # Processes that have closed a strategy, and may create another one.
        self._staying: set[Hashable] = set()
        self._arrivals = itertools.count()
        self._listen()
        # After all that may fail: it has a thread.
        self._heartbeat = Heartbeat(
            f"kerasdist-watch server {self.index}",
            self._timeouts,
            on_frame=lambda key, frame: None,
            on_end=lambda key, reason: self._staying.discard(key),
        )

    def _stats(self) -> dict[str, Any]:
        return {name: self._totals[name] for name in ("epochs", "requests")}

    def _serve(self) -> None:
        """Serve until all workers have left, or none has connected for too long.

        Raises:
            StartupError: Not all workers have connected at the start.
            CollectiveError: The last epoch has failed, and no worker has finished.
        """
        patience = Deadline(self._timeouts.startup)
        while not self._stop.is_set():
            for arrival in self._take(PURPOSE, EpochRequest, LOOK_SECONDS, self._stop):
                self._receive(*arrival)
                patience = Deadline(self._timeouts.startup)
            self._drop_ended()
            latest = self._latest
            served = any(not each.serving.done() for each in self._epochs.values())
            if self._questions or served:
                patience = Deadline(self._timeouts.startup)
            elif latest is not None and self._is_last(latest, patience):
                return
            elif latest is None and patience.expired:
                raise errors.StartupError(
                    f"No worker connected to server {self.index} ({self.address}) "
                    f"within {patience.seconds:g} s. Are they running (look at their "
                    "output first), and can they reach this address?",
                    dict.fromkeys(range(self._cluster.size), "it never connected"),
                )
        raise errors.TransportClosed("This server was closed.")

    def _is_last(self, epoch: _Epoch, patience: Deadline) -> bool:
        """Return whether the jobs are over, after an epoch that has ended.

        Raises:
            KerasDistError: The job is over, and no worker has finished.
        """
        error = epoch.serving.exception()
        if error is None:
            return not self._staying
        if not patience.expired:
            return False
        if epoch.has_finished:
            return True
        raise error

    def close(self) -> None:
        """Close all connections and threads. Can be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._stop.set()
        self._listener.pending.interrupt()
        self._heartbeat.close()
        for epoch in self._epochs.values():
            self._replace(epoch)
        self._epochs.clear()
        wait(self._replaced, _JOIN_SECONDS)
        for _, connection, _ in self._questions:
            connection.close()
        self._questions.clear()
        self._listener.release()

    # Requests.

    def _receive(
        self, rank: int, connection: Connection, request: EpochRequest
    ) -> None:
        what, number = request.request, request.epoch
        if request.settings != self._agreed:
            theirs, mine = request.settings, self._agreed
            refuse(connection, different_settings(self.index, rank, theirs, mine))
            return
        present = self._epochs.get(request.job)
        if what == "stay":
            key = next(self._arrivals)
            answer(connection, EpochAnswer())
            self._staying.add(key)
            self._heartbeat.add(key, connection)
        elif what == "ask" and present is not None and present.number == number:
            _answer(connection, present.layout)
        elif (
            present is not None
            and not present.serving.done()
            and number <= present.number
        ):
            refuse(
                connection,
                f"Epoch {number} of the job has ended. Received: epoch={number} from "
                f"rank {rank}. Expected a later one than epoch {present.number}, which "
                f"server {self.index} ({self.address}) serves. Wait for the next one.",
                final=False,
            )
        elif what == "ready":
            _answer(connection)
        elif what == "ask":
            self._questions.append((rank, connection, request))
        else:
            self._begin(connection, request)

    def _begin(self, connection: Connection, request: EpochRequest) -> None:
        try:
            epoch = self._epoch_of(request)
        except (errors.ProtocolError, ValueError) as error:
            refuse(connection, str(error))
            return
        # Those of other jobs that have ended aren't needed any longer.
        for job, other in list(self._epochs.items()):
            if job == request.job or other.serving.done():
                self._replace(self._epochs.pop(job))
        self._epochs[request.job] = self._latest = epoch
        _answer(connection)
        # They are answered or refused now, or wait for a later epoch.
        waiting, self._questions = self._questions, []
        for question in waiting:
            self._receive(*question)

    def _epoch_of(self, request: EpochRequest) -> _Epoch:
        workers = request.workers
        layout = request.layout or EpochServers((), "")
        # The session's name has shown that all tasks have the same workers and servers.
        if self.index not in layout.servers:
            raise errors.ProtocolError(
                f"An epoch is damaged. Received: {request!r:.500}."
            )
        index = layout.servers.index(self.index)
        cluster = dataclasses.replace(
            self._cluster,
            size=len(workers),
            workers=workers,
            servers=tuple(self._cluster.servers[each] for each in layout.servers),
            task_index=index,
        )
        startup = min(max(request.seconds, _LEAST_SECONDS), _MOST_SECONDS)
        server = ParameterServer(
            cluster,
            self._settings,
            timeouts=dataclasses.replace(self._timeouts, startup=startup),
            session=layout.session,
            once=True,
            traffic=self._traffic,
        )
        server.handler.logs = False
        on_split = self._on_split
        if on_split is not None:
            server.handler.on_split = lambda loads: on_split(loads, index)
        name = f"kerasdist-epoch {request.epoch}"
        serving = in_daemon(name, self._serve_epoch, server)
        return _Epoch(request.epoch, layout, server, serving)

    def _serve_epoch(self, server: ParameterServer) -> None:
        try:
            server.serve()
        finally:
            requests = int(server.handler.stats()["requests"])
            with self._lock:
                self._totals.update(epochs=1, requests=requests)

    def _replace(self, epoch: _Epoch) -> None:
        """End an epoch soon, for a later one."""
        name = f"kerasdist-epoch {epoch.number} ends"
        closing = in_daemon(name, epoch.server.close)
        ending = (*self._replaced, epoch.serving, closing)
        self._replaced = [each for each in ending if not each.done()]

    def _drop_ended(self) -> None:
        for each in [each for each in self._questions if each[1].ended]:
            self._questions.remove(each)
            each[1].close()


def _answer(connection: Connection, layout: EpochServers | None = None) -> None:
    with connection:
        answer(connection, EpochAnswer(layout=layout))


@dataclasses.dataclass(frozen=True, eq=False)
class _Epoch:
    """An epoch.

    Attributes:
        number: Its number.
        layout: Its servers.
        server: Serves it, in a thread of its own.
        serving: Done when it has ended: all members have left, or with an error.
    """

    number: int
    layout: EpochServers
    server: ParameterServer
    serving: Future[None]

    @property
    def has_finished(self) -> bool:
        """Whether a member has finished the job."""
        workers = self.server.handler.membership.workers
        return any(worker.state == "finished" for worker in workers)
