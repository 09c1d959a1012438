"""Cluster settings: this process's rank and its peers' addresses, parsed and validated.

No socket is opened and no name is resolved here, but in `address`. All faults that
the text of the settings alone shows are gathered into one `ClusterError`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from kerasdist.cluster.address import address_fault
from kerasdist.cluster.schedulers import (
    MPI_VARIABLES,
    has_pmix_rank,
    is_step_task,
    read_process,
    read_step,
)
from kerasdist.cluster.tf_config import TASK_TYPES, load_json, read_task
from kerasdist.errors import ClusterError

__all__ = ["Cluster", "resolve"]

_MOST_SHOWN = 1000  # characters of the settings in an error message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """This process's place among the workers of its job.

    Attributes:
        rank: This worker's index, the chief first, then the workers in their
            order. None for a server, which is no worker. An evaluator isn't part
            of the training job: it is rank 0 of a job of one.
        size: Number of workers. Without cluster settings, and for an evaluator: 1.
        workers: `"host:port"` by rank. Empty when there are no cluster settings,
            when they name no other process, for an evaluator, and where only MPI
            knows the others (`needs_mpi`).
        servers: `"host:port"` of the parameter servers, by index.
        task_type: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`. (TensorFlow 1's
            `"master"` is read as `"chief"`.)
        task_index: Index among the tasks of that type; for a server, its index in
            `servers`.
        source: The origin of the settings: `"TF_CONFIG"`, `"Slurm"`, `"MPI"`, `"PMIx"`
            (rank and size are known to MPI alone, and 0 of 1 here), `"cluster
            resolver"` (an object passed as `cluster`), `"cluster argument"` (a
            dictionary passed as `cluster`), or `"none"`.

    Raises:
        ClusterError: The values don't fit together.
    """

    rank: int | None
    size: int
    workers: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    task_type: str = "worker"
    task_index: int = 0
    source: str = "none"

    def __post_init__(self) -> None:
        faults = []
        if self.size < 1:
            faults.append("There is no worker. Expected size >= 1.")
        if self.workers and len(self.workers) != self.size:
            faults.append("Expected as many addresses in `workers` as `size`.")
        if self.size > 1 and not self.workers and self.source != "MPI":
            faults.append("Expected the workers' addresses, since there are several.")
        if self.task_type not in TASK_TYPES:
            faults.append(f"The task type is unknown. Expected one of {TASK_TYPES}.")
        if (self.rank is None) != (self.task_type == "ps"):
            faults.append("Expected rank=None for a 'ps' task, and only for that.")
        elif self.rank is not None and not 0 <= self.rank < self.size:
            faults.append(f"The rank is out of range. Expected 0..{self.size - 1}.")
        elif self.rank is None and not 0 <= self.task_index < len(self.servers):
            faults.append("Expected task_index to be a place in `servers`.")
        for address in (*self.workers, *self.servers):
            fault = address_fault(address)
            if fault is not None:
                faults.append(f"An address {fault}: {address!r}.")
        if faults:
            raise ClusterError(_message("The cluster", faults, f"{self!r}"))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files that are written once per job.

        True for rank 0, hence also for a worker alone and for an evaluator.
        """
        return self.rank == 0

    @property
    def needs_mpi(self) -> bool:
        """Whether only MPI can connect this process with the others of its job."""
        return self.source in ("MPI", "PMIx") and not self.workers

    @property
    def address(self) -> str | None:
        """This process's own `"host:port"`; None if it has none."""
        if self.rank is None:
            return self.servers[self.task_index]
        return self.workers[self.rank] if self.workers else None


def resolve(cluster: Any = None, environ: Mapping[str, str] | None = None) -> Cluster:
    """Find this process's rank and its peers' addresses.

    The first of these that is given is used: `cluster`, the environment variable
    `TF_CONFIG` (unless it is empty or `{}`), MPI's variables if `mpirun` started this
    process as one of several, Slurm's if `srun` did, else one worker alone.

    Settings with a task but without a cluster, as some operators write them for a
    job of one, are one worker alone if the task is the first of its type.

    Args:
        cluster: A `tf.distribute.cluster_resolver.ClusterResolver`, or any object
            with `cluster_spec().as_dict()`, `task_type` and `task_id`; or a
            dictionary of TF_CONFIG's shape; or a `Cluster`, returned as it is.
        environ: The environment, `os.environ` by default.

    Raises:
        ClusterError: The settings are wrong; the message has all their faults.
            Nothing was acquired.
    """
    if environ is None:
        environ = os.environ
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, Mapping):
        return _from_tf_config(cluster, "`cluster`", repr(cluster), "cluster argument")
    if cluster is not None:
        return _from_resolver(cluster)
    text = environ.get("TF_CONFIG", "")
    if text.strip():
        received = f"TF_CONFIG={text!r}"
        settings, faults = load_json(text, "TF_CONFIG")
        if faults:
            raise ClusterError(_message("TF_CONFIG", faults, received))
        if settings != {}:
            return _from_tf_config(settings, "TF_CONFIG", received, "TF_CONFIG")
    found = _from_mpi(environ)
    if found is not None:
        return found
    if is_step_task(environ):
        return _from_slurm(environ)
    return Cluster(rank=0, size=1)


def _from_tf_config(settings: object, name: str, received: str, source: str) -> Cluster:
    if not isinstance(settings, Mapping):
        fault = (
            f"{name} is a {type(settings).__name__}. Expected a dictionary with "
            "'cluster' and 'task'."
        )
        raise ClusterError(_message(name, [fault], received))
    task, faults = read_task(settings.get("cluster"), settings.get("task"))
    if faults:
        raise ClusterError(_message(name, faults, received))
    return Cluster(**task, source=source)


def _from_resolver(resolver: Any) -> Cluster:
    name = f"The cluster resolver ({type(resolver).__name__})"
    try:
        # First the cluster: Slurm's resolver only knows its task afterwards.
        jobs = resolver.cluster_spec().as_dict()
        task_type, index = resolver.task_type, resolver.task_id
    except AttributeError as error:
        hint = ""
        if isinstance(resolver, str):
            hint = " (For TF_CONFIG's text use json.loads(text).)"
        raise ClusterError(
            "`cluster` is of a type that can't be used. Received: cluster="
            f"{_shortened(repr(resolver))} of type {type(resolver).__name__} "
            f"({error}). Expected a tf.distribute.cluster_resolver.ClusterResolver, a "
            f"dictionary of TF_CONFIG's shape, or None to use the environment.{hint}"
        ) from error
    except Exception as error:
        # A resolver may fail in any way (a JSON error, a service that doesn't
        # respond); to the user each means that the cluster isn't known.
        raise ClusterError(
            f"{name} failed: {type(error).__name__}: {error}. Received: cluster="
            f"{_shortened(repr(resolver))}."
        ) from error
    task = {}
    if task_type not in (None, ""):
        task["type"] = task_type
    if index is not None:
        task["index"] = index
    # Some resolvers always know an index, but no type: that isn't a task.
    found, faults = read_task(jobs, task if "type" in task else None)
    if faults:
        received = f"cluster={jobs!r}, task_type={task_type!r}, task_id={index!r}"
        raise ClusterError(_message(name, faults, received))
    return Cluster(**found, source="cluster resolver")


def _from_mpi(environ: Mapping[str, str]) -> Cluster | None:
    """Return the place by MPI's variables; None if there are none."""
    try:
        found = read_process(environ)
    except ValueError as error:
        received = ", ".join(
            f"{name}={environ[name]!r}" for name in MPI_VARIABLES if name in environ
        )
        raise ClusterError(
            _message("MPI's environment", [str(error)], received)
        ) from None
    if found is None:
        if has_pmix_rank(environ):
            return Cluster(rank=0, size=1, source="PMIx")
        return None
    rank, size = found
    if size == 1:
        return Cluster(rank=0, size=1)
    return Cluster(rank=rank, size=size, task_index=rank, source="MPI")


def _from_slurm(environ: Mapping[str, str]) -> Cluster:
    workers, rank, faults = read_step(environ)
    if rank is None:
        received = ", ".join(
            f"{name}={value!r}"
            for name, value in sorted(environ.items())
            if name.startswith(("SLURM_STEP", "SLURM_PROCID", "SLURM_NTASKS"))
        )
        raise ClusterError(_message("Slurm's environment", faults, received))
    return Cluster(
        rank=rank, size=len(workers), workers=workers, task_index=rank, source="Slurm"
    )


def _message(name: str, faults: list[str], received: str) -> str:
    """Put all faults into one message."""
    shown = f"Received: {_shortened(received)}"
    if len(faults) == 1:
        return f"{name} can't be used. {faults[0]}\n{shown}"
    lines = [f"  {number}. {fault}" for number, fault in enumerate(faults, 1)]
    return "\n".join(
        [f"{name} can't be used, for {len(faults)} reasons:", *lines, shown]
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
