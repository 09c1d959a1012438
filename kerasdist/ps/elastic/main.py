"""The process of a parameter server of an elastic job: its output, and its end."""

from __future__ import annotations

import logging

from kerasdist.cluster import Cluster
from kerasdist.errors import ServerLost, WorkerLost
from kerasdist.ps.elastic.server import ElasticServer
from kerasdist.ps.server.loads import Load, share_in_words
from kerasdist.ps.settings import ServerSettings
from kerasdist.transport.liveness.final_error import hand_over_final_error
from kerasdist.transport.liveness.launcher_pipe import ServerReporter
from kerasdist.transport.log import background_log
from kerasdist.transport.timeouts import Timeouts

_FLUSH_SECONDS = 1.0


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
    count = len(cluster.servers)
    name = f"kerasdist: server {cluster.task_index} of {count} ({cluster.address})"
    shown = [""]

    def split(loads: list[Load], index: int) -> None:
        share = share_in_words(loads, index)
        if share != shown[0]:
            shown[0] = share
            _log_line(f"{name} gets of each worker and step: {share}.")

    server = ElasticServer(
        cluster, settings, min_workers, timeouts=timeouts, on_split=split
    )
    _log_line(
        f"{name} serves {cluster.size} worker(s), mode={settings.mode!r}, elastic."
    )
    try:
        stats = server.serve()
    except (WorkerLost, ServerLost):
        # It may end before the lost task does.
        ServerReporter(cluster.task_index).gave_up()
        raise
    _log_line(
        f"{name} has finished: {stats['epochs']:,} epochs, {stats['requests']:,} "
        f"requests, {stats['bytes_received']:,} bytes received, "
        f"{stats['bytes_sent']:,} sent."
    )
    background_log.flush(_FLUSH_SECONDS)


def _log_line(text: str) -> None:
    # Some of it is written while a worker waits for its reply.
    background_log.log(logging.INFO, "%s", text)
