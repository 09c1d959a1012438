"""The division of the GPUs of all hosts of a job, and the lines about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kerasdist.cli.console import print_line
from kerasdist.cli.run.gpus.division import Division, divide, in_words


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
