"""The refusal of processes that MPI started, by strategies that can't use MPI."""

from __future__ import annotations

from kerasdist.cluster import Cluster
from kerasdist.errors import ClusterError


def refuse_mpi(place: Cluster, strategy: str, remedy: str) -> None:
    """Refuse a place among processes that only MPI can connect.

    Without that each of them would train alone.

    Args:
        place: This process's place.
        strategy: The strategy's name.
        remedy: What the user can start the job with.

    Raises:
        ClusterError: It's such a place.
    """
    if place.needs_mpi:
        number = f"{place.size} processes" if place.size > 1 else "processes"
        raise ClusterError(
            f"{strategy} can't connect {number} that were started by MPI. Received: a "
            f"place by {place.source}, without the addresses of the others. Start the "
            f"job with {remedy}."
        )
