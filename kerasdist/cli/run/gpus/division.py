"""The division of GPUs among workers: pure functions of names and numbers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from kerasdist.cli.run.gpus.find import VARIABLE
from kerasdist.placement.advice import counted

# What CUDA reads as no GPU.
_NONE = "-1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """The GPUs of the workers of one host.

    Attributes:
        host: The host's name in messages; empty: this one.
        found: The GPUs that the host has for the job.
        shares: The GPUs of each of its workers, in their order; None: the tasks see
            what they see without a launcher.
    """

    host: str = ""
    found: tuple[str, ...] = ()
    shares: tuple[tuple[str, ...], ...] | None = None

    def environ(self, worker: int | None) -> dict[str, str]:
        """Return the variable of a task.

        Args:
            worker: The worker's index on its host; None: a server.
        """
        if self.shares is None:
            return {}
        names = () if worker is None else self.shares[worker]
        return {VARIABLE: ",".join(names) or _NONE}


def divide(
    option: str, found: Sequence[str], workers: int, faults: list[str], host: str = ""
) -> Division:
    """Divide a host's GPUs.

    Args:
        option: The value of `--gpus`, which has been checked.
        found: The host's GPUs.
        workers: The largest number of its workers.
        faults: Takes a message if that isn't possible.
        host: The host's name in messages; empty: this one.
    """
    count = len(found)
    here = f"{host} has" if host else "this host has"
    have = f"{here} {counted(count, 'GPU')} for {counted(workers, 'worker')}"
    names = tuple(found)
    if option == "all" or (option == "auto" and not found) or not workers:
        return Division(host=host, found=names)
    if option in ("none", "0"):
        return Division(host=host, found=names, shares=((),) * workers)
    if option == "auto" and count < workers:
        # Two processes on one GPU each take all of its memory.
        faults.append(
            f"{have}. Expected at least one for each worker. Start {count} of them "
            "there, or hide the GPUs with --gpus none, or let the workers share them "
            "with --gpus all (TF_FORCE_GPU_ALLOW_GROWTH=true lets several processes "
            "share the memory of one)"
        )
        return Division(host=host, found=names)
    parts = any(name.startswith("MIG") for name in found)
    if parts and option not in ("auto", "1"):
        faults.append(
            f"{here} parts of GPUs (MIG), of which CUDA gives a process only one. "
            f"Received: --gpus {option}. Expected --gpus 1 or --gpus auto"
        )
        return Division(host=host, found=names)
    if option != "auto" and count < workers * int(option):
        faults.append(
            f"{have}, which isn't enough. Received: --gpus {option}. Expected "
            f"{workers * int(option)} GPUs or more there, fewer workers, or --gpus auto"
        )
        return Division(host=host, found=names)
    if option == "auto" and not parts:
        bounds = [rank * count // workers for rank in range(workers + 1)]
    elif option == "auto":
        bounds = list(range(workers + 1))
    else:
        bounds = [rank * int(option) for rank in range(workers + 1)]
    shares = tuple(names[first:last] for first, last in itertools.pairwise(bounds))
    return Division(host=host, found=names, shares=shares)


def in_words(divisions: Sequence[Division]) -> str:
    """Return the line for the user; empty if nothing is divided.

    Args:
        divisions: That of each host.
    """
    texts: dict[str, list[str]] = {}
    for each in divisions:
        if each.shares is not None and each.found:
            texts.setdefault(_of_host(each), []).append(each.host)
    parts = [
        f"{', '.join(filter(None, hosts))}: {text}" if any(hosts) else text
        for text, hosts in texts.items()
    ]
    return "; ".join(parts)


def _of_host(division: Division) -> str:
    shares = division.shares or ()
    used = sum(map(len, shares))
    all_of_them = len(division.found)
    gpus = counted(all_of_them, "GPU")
    if not used:
        return f"no worker uses the {gpus}"
    most, least = max(map(len, shares)), min(map(len, shares))
    each = f"{least} each" if most == least else f"{least} or {most} each"
    rest = "" if used == all_of_them else f"; {all_of_them - used} not used"
    return f"{gpus} for {counted(len(shares), 'worker')}, {each}{rest}"
