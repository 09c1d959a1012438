"""The assignment of cores to workers: pure functions, and one look at the machine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


def shares(cores: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Divide cores among workers, in order.

    Args:
        cores: At least one core, neighbours next to each other.
        size: Number of workers.

    Returns:
        One tuple per rank. With enough cores they are disjoint, use all, and differ
        by at most one core; with fewer cores than workers each worker has one, and
        the workers are spread evenly.
    """
    count = len(cores)
    bounds = [rank * count // size for rank in range(size + 1)]
    return [
        tuple(cores[first : max(first + 1, last)])
        for first, last in itertools.pairwise(bounds)
    ]


def thread_variables(cores: int) -> dict[str, str]:
    """Return the environment that gives a worker as many threads as cores.

    One more thread runs operations: a collective waits in one of them while the
    others compute.

    Args:
        cores: Number of the worker's cores, at least 1.
    """
    cores = max(1, cores)
    return {
        "TF_NUM_INTRAOP_THREADS": str(cores),
        "TF_NUM_INTEROP_THREADS": str(cores + 1),
        "OMP_NUM_THREADS": str(cores),
    }


def cores_in_order(read: Callable[[str], str] | None = None) -> list[int]:
    """Return the cores this process may use, those of one physical core together.

    The kernel often numbers the second hardware threads of all cores after all
    first ones: by number alone, two workers would get halves of the same cores.

    Args:
        read: From a path to the file's text; reads the file by default.
    """

    def place(core: int) -> tuple[int, int, int]:
        try:
            package = int(read_text(_TOPOLOGY.format(core, "physical_package_id")))
            physical = int(read_text(_TOPOLOGY.format(core, "core_id")))
        except (OSError, ValueError):  # no /sys in this container: by number
            return 0, 0, core
        return package, physical, core

    read_text = read if read is not None else _read
    return sorted(os.sched_getaffinity(0), key=place)


def _read(path: str) -> str:
    return Path(path).read_text(encoding="ascii")
