"""A server's part in the job of a strategy."""

from __future__ import annotations

from kerasdist.errors import ClusterError
from kerasdist.ps.elastic.server import run_elastic_server
from kerasdist.ps.server.server import run_server
from kerasdist.strategies.servers.arguments import Arguments


def serve_job(arguments: Arguments) -> None:
    """Run this task's server until the job is over.

    Raises:
        ClusterError: This task isn't a server.
        KerasDistError: The failure that ended the job.
    """
    place = arguments.place
    if place.rank is not None:
        raise ClusterError(
            "Only parameter servers serve. Received: a task of type "
            f"{place.task_type!r} from {place.source}. Expected one of type 'ps'. Call "
            "`kerasdist.ParameterServerStrategy(...)` in the other tasks."
        )
    if arguments.bounds is None:
        run_server(place, arguments.settings, arguments.timeouts)
    else:
        run_elastic_server(
            place,
            arguments.settings,
            arguments.bounds.min_workers,
            arguments.timeouts,
        )
