"""The process of a parameter server: its output, and its reports to the launcher."""

from __future__ import annotations

import collections
import logging
from typing import Any

from kerasdist.cluster import Cluster
from kerasdist.errors import ServerLost, WorkerLost
from kerasdist.ps.layout import Layout, ServerSettings
from kerasdist.ps.server.batch_queue import Load, loads_of, share_in_words
from kerasdist.ps.server.server import ParameterServer
from kerasdist.transport.deadline import Timeouts
from kerasdist.transport.liveness.failure_protocol import hand_over_final_error
from kerasdist.transport.liveness.launcher_pipe import ServerReporter
from kerasdist.transport.log import background_log

_FLUSH_SECONDS = 1.0


def run_server(
    cluster: Cluster, settings: ServerSettings, timeouts: Timeouts | None = None
) -> None:
    """Run a server of a job until the job is over.

    It logs the number of its workers, its part of each table when that is opened
    (with "sync" its part of a step, when the first one is finished), and at the end the
    traffic and the staleness of the weights that were read.

    Args:
        cluster: The job; this process is one of its `servers`.
        settings: The job's settings; the workers' must be the same.
        timeouts: The time limit of each phase.

    Raises:
        KerasDistError: As `ParameterServer` and its `serve`.
    """
    hand_over_final_error()
    count = len(cluster.servers)
    name = f"kerasdist: server {cluster.task_index} of {count} ({cluster.address})"

    def opened(layout: Layout) -> None:
        share = share_in_words(loads_of(layout), cluster.task_index)
        _log_line(f"{name} holds {share}; variables: {len(layout.variables):,}.")

    def split(loads: list[Load]) -> None:
        share = share_in_words(loads, cluster.task_index)
        _log_line(f"{name} gets of each worker and step: {share}.")

    launcher = ServerReporter(cluster.task_index)

    def started() -> None:
        patience = settings.restart_timeout if settings.restartable else 0.0
        launcher.begun(patience)

    tolerant = settings.mode == "async"
    server = ParameterServer(
        cluster,
        settings,
        timeouts=timeouts,
        on_table=opened,
        on_start=started if tolerant else None,
    )
    server.handler.on_split = split
    if tolerant:
        members = server.handler.membership
        # Before it is reported to any worker, which then ends.
        members.on_failure.insert(0, launcher.failed)
        members.on_event.insert(
            0, lambda event: launcher.happened(event.kind, event.rank, event.reason)
        )
    _log_line(f"{name} serves {cluster.size} worker(s), mode={settings.mode!r}.")
    for served in server.handler.tables.tables.values():  # those of a snapshot
        opened(served.layout)
    try:
        stats = server.serve()
    except (WorkerLost, ServerLost):
        # It may end before the lost task does.
        launcher.gave_up()
        raise
    _log_line(
        f"{name} has finished: {stats['requests']:,} requests, "
        f"{stats['bytes_received']:,} bytes received, {stats['bytes_sent']:,} sent"
        f"{_staleness_in_words(stats['tables'])}."
    )
    background_log.flush(_FLUSH_SECONDS)


def _staleness_in_words(tables: list[dict[str, Any]]) -> str:
    """Return the staleness of all reads as text; "" if there was none."""
    counts: collections.Counter[int] = collections.Counter()
    for table in tables:
        for observed in table["observed"].values():
            counts.update({int(steps): n for steps, n in observed.items()})
    reads = counts.total()
    if not reads:
        return ""
    mean = sum(steps * n for steps, n in counts.items()) / reads
    return (
        f"; staleness of {reads:,} reads: {mean:.2f} steps in the mean, {max(counts)} "
        "at most"
    )


def _log_line(text: str) -> None:
    # Some of it is written while a worker waits for its reply.
    background_log.log(logging.INFO, "%s", text)
