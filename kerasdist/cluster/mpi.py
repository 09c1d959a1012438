"""This process's place by the environment that MPI's launchers give it.

`mpirun` tells each process its rank and the number of processes, but no addresses:
only MPI itself can connect them.

    OMPI_COMM_WORLD_RANK, _SIZE     mpirun of Open MPI
    PMI_RANK, PMI_SIZE              mpirun of MPICH and Intel MPI, and srun --mpi=pmi2
    PMIX_RANK                       launchers of PMIx; the number isn't in a variable

`mpirun` starts its daemons on other nodes with `srun` if Slurm manages them, so its
processes there have the variables of a step of daemons, too: then `mpirun` counts. For
processes that `srun` itself starts, with any `--mpi=`, Slurm's variables count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kerasdist.cluster.slurm import is_in_job, is_step

MPI_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
)


def read_process(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this process's rank and the number of processes; None if not MPI's.

    Raises:
        ValueError: The variables hold no such numbers.
    """
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _numbers(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if "PMI_SIZE" not in environ or "PMI_RANK" not in environ:
        return None
    # Which mpirun of MPICH and Intel MPI sets, and Slurm doesn't.
    by_mpirun = "MPI_LOCALNRANKS" in environ
    if not by_mpirun and is_step(environ):
        return None
    return _numbers(environ, "PMI_RANK", "PMI_SIZE")


def has_pmix_rank(environ: Mapping[str, str]) -> bool:
    """Return whether this may be one of several processes that PMIx started.

    Inside of a job of Slurm, Slurm's variables tell that.
    """
    return "PMIX_RANK" in environ and not is_in_job(environ)


def _numbers(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    texts = environ.get(rank, ""), environ.get(size, "")
    if all(re.fullmatch("[0-9]{1,9}", text) for text in texts):
        numbers = int(texts[0]), int(texts[1])
        if numbers[0] < numbers[1]:
            return numbers
    raise ValueError(
        f"{rank} is no rank of {size} processes. Expected 0 <= {rank} < {size}, as "
        "`mpirun` sets them for each process."
    )
