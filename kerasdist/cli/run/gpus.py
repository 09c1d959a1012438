"""The division of GPUs among workers: pure functions of names and numbers."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import shlex
from collections.abc import Mapping, Sequence

from kerasdist.cli.console import print_line
from kerasdist.cli.run.hosts.find_gpus import VARIABLE
from kerasdist.placement.plan import counted

# The option `--gpus` of `kerasdist run`.

WITH_VALUE = ("--gpus",)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option to those of `run`."""
    parser.add_argument(
        "--gpus",
        metavar="auto|N|all|none",
        default="auto",
        help="the GPUs of each worker: 'auto': its share of those of its host; N: this "
        "many of them; 'all': each worker sees all of them; 'none': none. Servers have "
        "none, unless 'all' is given (default: auto)",
    )


def check_option(arguments: argparse.Namespace, faults: list[str]) -> None:
    """Check the option's value.

    Args:
        arguments: The parsed arguments.
        faults: Takes a message about a value that can't be used.
    """
    text = arguments.gpus
    if text in ("auto", "all", "none") or (text.isdecimal() and text.isascii()):
        return
    faults.append(
        "--gpus must be 'auto', 'all', 'none' or a number >= 0. Received: --gpus "
        f"{shlex.quote(text)}"
    )


# The division of the GPUs of all hosts of a job, and the lines about it.


def is_divided(option: str) -> bool:
    """Return whether a value of `--gpus` needs the hosts' GPUs to be found."""
    return option not in ("all", "none", "0")


def divide_all(
    option: str,
    found: Mapping[str, tuple[Sequence[str], str]],
    workers: Mapping[str, int],
    faults: list[str],
) -> dict[str, Division]:
    """Divide the GPUs of each host among its workers, and tell the user.

    Args:
        option: The value of `--gpus`, which has been checked.
        found: By host, "" for this one, what `find_gpus` returns there.
        workers: The largest number of workers of each host.
        faults: Takes a message about each host where that isn't possible.
    """
    divisions = {}
    for host, count in workers.items():
        names, reason = found.get(host, ((), ""))
        if reason and option != "auto":
            faults.append(
                f"{host or 'this host'} can't list its GPUs: {reason}. Received: "
                f"--gpus {option}. Expected a working nvidia-smi, or "
                "CUDA_VISIBLE_DEVICES with the GPUs of the job"
            )
            continue
        if reason:
            print_line(
                f"the GPUs of {host or 'this host'} aren't divided among the workers: "
                f"{reason}. Set CUDA_VISIBLE_DEVICES, or --gpus all or none",
                logging.WARNING,
            )
        divisions[host] = divide(option, names, count, faults, host)
    text = in_words(list(divisions.values()))
    if text and not faults:
        print_line(text)
    return divisions


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
