"""Cluster settings from the environment that a scheduler gives a task: Slurm, or MPI.

Slurm's variables list the nodes of a step and the number of tasks on each. The
distribution determines which rank runs where, and the job's number the ports, so all
ranks compute the same list without communicating.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

# This process's place by the environment that MPI's launchers give it.
#
# `mpirun` tells each process its rank and the number of processes, but no addresses:
# only MPI itself can connect them.
#
#     OMPI_COMM_WORLD_RANK, _SIZE     mpirun of Open MPI
#     PMI_RANK, PMI_SIZE              mpirun of MPICH and Intel MPI, and srun --mpi=pmi2
#     PMIX_RANK                       launchers of PMIx; the number isn't in a variable
#
# `mpirun` starts its daemons on other nodes with `srun` if Slurm manages them, so its
# processes there have the variables of a step of daemons, too: then `mpirun` counts.
# For processes that `srun` itself starts, with any `--mpi=`, Slurm's variables count.

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


_T = TypeVar("_T")

# Steps that Slurm makes by itself (batch, extern, interactive) have numbers from
# here on: their tasks weren't started by `srun`.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_MOST_HOSTS = 65536
# Ports: 156 slots of 64 from 20000 on, below the range from which the kernel takes
# ports for outgoing connections (32768 on).
_FIRST_PORT = 20000
_SLOTS = 156
_SLOT_PORTS = 64


def is_step_task(environ: Mapping[str, str]) -> bool:
    """Return whether `srun` started this process as one of several tasks.

    In a plain batch script SLURM_PROCID is set as well, but there is only one
    process: the script itself.
    """
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return is_step(environ) and tasks is not None and tasks > 1


def is_step(environ: Mapping[str, str]) -> bool:
    """Return whether `srun` started this process, maybe as the only one."""
    step = _number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step < _FIRST_SPECIAL_STEP and "SLURM_PROCID" in environ


def is_in_job(environ: Mapping[str, str]) -> bool:
    """Return whether this process belongs to a job of Slurm, in whatever way."""
    return _text(environ, "SLURM_JOB_ID", "SLURM_JOBID") is not None or is_step(environ)


def read_step(
    environ: Mapping[str, str],
) -> tuple[tuple[str, ...], int | None, list[str]]:
    """Find the addresses of all tasks of this step, and this one's rank.

    Args:
        environ: The environment of a task of a step (`is_step_task` holds).

    Returns:
        Addresses by rank, this process's rank, and all faults. With faults the
        addresses are empty and the rank is None.
    """
    faults: list[str] = []
    hosts = _expanded(
        environ, ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), expand_hostlist, faults
    )
    counts = _expanded(
        environ,
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        expand_tasks_per_node,
        faults,
    )
    size = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    rank = _number(environ, "SLURM_PROCID")
    if size is None or rank is None or rank >= size:
        faults.append(
            "SLURM_PROCID is no rank of this step. Received: SLURM_PROCID="
            f"{environ.get('SLURM_PROCID')!r}, {size} tasks."
        )
    base = _base_port(environ, max(counts, default=1), faults)
    if faults or size is None or rank is None or base is None:
        return (), None, faults
    if len(hosts) != len(counts) or sum(counts) != size:
        faults.append(
            f"Slurm's lists don't fit together. Received: {len(hosts)} nodes in "
            f"SLURM_STEP_NODELIST, {len(counts)} nodes and {sum(counts)} tasks in "
            f"SLURM_STEP_TASKS_PER_NODE, {size} in SLURM_STEP_NUM_TASKS. A "
            "heterogeneous job needs TF_CONFIG."
        )
        return (), None, faults
    placed = _layout(environ, counts, faults)
    if faults:
        return (), None, faults
    faults += _check_own_place(environ, placed[rank], rank)
    if faults:
        return (), None, faults
    workers = tuple(f"{hosts[node]}:{base + local}" for node, local in placed)
    return workers, rank, []


def _expanded(
    environ: Mapping[str, str],
    names: tuple[str, ...],
    expand: Callable[[str], list[_T]],
    faults: list[str],
) -> list[_T]:
    """Expand the first of these variables that is set."""
    text = _text(environ, *names)
    if text is None:
        faults.append(
            f"{names[0]} isn't set, although this process is a task of a Slurm step. "
            "Is the environment handed on? Expected `srun --export=ALL`."
        )
        return []
    try:
        return expand(text)
    except ValueError as error:
        faults.append(f"{names[0]} can't be read: {error}. Received: {text!r}.")
        return []


def expand_hostlist(text: str) -> list[str]:
    """Expand Slurm's short form: `"n[01-02,7],gpu5"` -> n01, n02, n7, gpu5.

    A name may have several brackets. The order is kept.

    Raises:
        ValueError: It can't be read, or stands for more than 65,536 hosts.
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[,\[\]]", text.strip()):
        if part == ",":
            continue
        if part in "[]":
            raise ValueError("its brackets don't match")
        names = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[]+", part):
            ends = _expand_ranges(piece[1:-1]) if piece[0] == "[" else [piece]
            if len(hosts) + len(names) * len(ends) > _MOST_HOSTS:
                raise ValueError(f"it stands for more than {_MOST_HOSTS} hosts")
            names = [name + end for name in names for end in ends]
        hosts += names
    if not hosts:
        raise ValueError("it names no host")
    return hosts


def _expand_ranges(text: str) -> list[str]:
    """Expand what stands in brackets: `"01-03,07"` -> 01, 02, 03, 07."""
    numbers = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        if match is None:
            raise ValueError(f"{part!r} is no number and no range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _MOST_HOSTS:
            raise ValueError(f"the range {part!r} runs backwards, or too far")
        numbers += [
            str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)
        ]
    return numbers


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's short form: `"2(x3),1"` -> 2, 2, 2, 1.

    Raises:
        ValueError: It can't be read.
    """
    counts: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise ValueError(f"{part!r} is no number of tasks like '2' or '2(x3)'")
        times = int(match[2] or 1)
        if len(counts) + times > _MOST_HOSTS:
            raise ValueError(f"it stands for more than {_MOST_HOSTS} hosts")
        counts += [int(match[1])] * times
    return counts


def _layout(
    environ: Mapping[str, str], counts: Sequence[int], faults: list[str]
) -> list[tuple[int, int]]:
    """Return (node, place on that node) of every rank.

    With 3 tasks on node 0 and 2 on node 1:  block   0 0 0 1 1
                                             cyclic  0 1 0 1 0
                                             plane=2 0 0 1 1 0
    """
    # What follows a ':' is about sockets and cores inside a node.
    kind = re.split("[:,]", environ.get("SLURM_DISTRIBUTION", "block").lower())[0]
    kind, _, plane = kind.partition("=")
    if kind in ("", "*", "block"):
        at_once = max(counts)
    elif kind == "cyclic":
        at_once = 1
    elif kind == "plane":
        text = environ.get("SLURM_DIST_PLANESIZE", plane)
        at_once = int(text) if re.fullmatch("[0-9]{1,6}", text) else 0
    else:
        at_once = 0
    if at_once < 1:
        faults.append(
            "It is unknown which rank runs on which node. Received: "
            f"SLURM_DISTRIBUTION={environ.get('SLURM_DISTRIBUTION')!r}. Expected "
            "'block', 'cyclic' or 'plane=N': start the step with "
            "`srun --distribution=block`, or set TF_CONFIG."
        )
        return []
    placed: list[tuple[int, int]] = []
    done = [0] * len(counts)
    while len(placed) < sum(counts):
        for node, count in enumerate(counts):
            for _ in range(min(at_once, count - done[node])):
                placed.append((node, done[node]))
                done[node] += 1
    return placed


def _check_own_place(
    environ: Mapping[str, str], place: tuple[int, int], rank: int
) -> list[str]:
    """Compare the computed layout with Slurm's variables about this very task."""
    for name, expected in zip(("SLURM_NODEID", "SLURM_LOCALID"), place, strict=True):
        given = _number(environ, name)
        if given is not None and given != expected:
            return [
                f"Slurm has laid out the ranks in another way than expected. Received: "
                f"SLURM_PROCID={rank}, {name}={given}, SLURM_DISTRIBUTION="
                f"{environ.get('SLURM_DISTRIBUTION')!r}. Expected {name}={expected}. "
                "Start the step with `srun --distribution=block`, or set TF_CONFIG."
            ]
    return []


def _base_port(environ: Mapping[str, str], most: int, faults: list[str]) -> int | None:
    """Return the port of the first task on every node.

    The number of the job chooses the slot, so that jobs that share a node don't
    meet: two jobs only do if their numbers are 156 apart, or a multiple.
    """
    given = environ.get("KERASDIST_PORT", "")
    if given:
        if re.fullmatch("[0-9]{1,5}", given) and 1 <= int(given) <= 65536 - most:
            return int(given)
        faults.append(
            f"KERASDIST_PORT can't be used. Received: KERASDIST_PORT={given!r}. "
            f"Expected 1..{65536 - most}: the first of {most} ports, one for each task "
            "of a node."
        )
        return None
    job = _number(environ, "SLURM_JOB_ID", "SLURM_JOBID") or 0
    step = _number(environ, "SLURM_STEP_ID", "SLURM_STEPID") or 0
    # 31 is coprime to 156: the steps of one job have slots of their own, too.
    return _FIRST_PORT + (job + 31 * step) % _SLOTS * _SLOT_PORTS


def _text(environ: Mapping[str, str], *names: str) -> str | None:
    """Return the first of these variables that is set and not empty."""
    return next((environ[name] for name in names if environ.get(name)), None)


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables as an integer >= 0, else None."""
    text = _text(environ, *names)
    return int(text) if text and re.fullmatch("[0-9]{1,10}", text) else None
