"""The options of `kerasdist run` for a launcher on each host."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
from collections.abc import Callable

from kerasdist.cluster.address import address_fault

WITH_VALUE = (
    *("--nnodes", "--node-rank", "--node_rank", "--rendezvous", "--rdzv-endpoint"),
    *("--rdzv_endpoint", "--secret-file", "--start-timeout"),
)
_SECONDS = 600


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The settings of one launcher of several.

    Attributes:
        count: The number of launchers.
        rank: The number of this one; None: the order of their arrival decides.
        rendezvous: The address at which the first one listens.
        seconds: How long it waits for the others.
        only_looks: Whether there will be no job, as in `kerasdist doctor`: then the
            launchers exchange their versions, too, and those that are here at the end
            of the time go on without the others.
    """

    count: int
    rank: int | None
    rendezvous: str
    seconds: int
    only_looks: bool = False


def add_options(parser: argparse.ArgumentParser, seconds: int = _SECONDS) -> None:
    """Add the options to those of `run`, or of another command.

    Args:
        parser: The command's.
        seconds: How long it waits for other hosts by default.
    """
    parser.set_defaults(start_seconds=seconds)
    parser.add_argument(
        "--nnodes",
        metavar="K",
        help="number of hosts, on each of which this command is started, with the same "
        "--rendezvous and secret, in any order",
    )
    parser.add_argument(
        "--node-rank",
        "--node_rank",
        dest="node_rank",
        metavar="I",
        help="with --nnodes: the number of this host, from 0 on, which orders the "
        "workers (default: the host of --rendezvous is 0, the others as they arrive)",
    )
    parser.add_argument(
        "--rendezvous",
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        dest="rendezvous",
        metavar="HOST:PORT",
        help="with --nnodes: a free port of host 0, which all hosts reach",
    )
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="a file with the job's secret, the same on all hosts, in the place of the "
        "variable KERASDIST_SECRET",
    )
    parser.add_argument(
        "--start-timeout",
        metavar="S",
        help=f"with --nnodes: seconds to wait for other hosts (default: {seconds})",
    )


def read_options(
    arguments: argparse.Namespace,
    number: Callable[[str, str, int], int],
    faults: list[str],
) -> NodeOptions | None:
    """Return the settings; None without `--nnodes`. Sets the secret of `--secret-file`.

    Args:
        arguments: The parsed arguments.
        number: Returns an option's number, from its name, its text and its minimum.
        faults: Takes a message about each value that can't be used.
    """
    if arguments.secret_file is not None:
        _read_secret(arguments.secret_file, faults)
    given = {
        "--node-rank": arguments.node_rank,
        "--rendezvous": arguments.rendezvous,
        "--start-timeout": arguments.start_timeout,
    }
    if arguments.nnodes is None:
        faults += [
            f"{name} is an option for several hosts. Received: {name} {text} without "
            "--nnodes"
            for name, text in given.items()
            if text is not None
        ]
        return None
    nnodes = arguments.nnodes
    least, colon, most = nnodes.partition(":")
    if colon and least.isdigit() and most.isdigit():
        faults.append(
            "--nnodes must be one number: the addresses of hosts that come later can't "
            f"be known. Received: --nnodes {nnodes}. Start {most} hosts with --nnodes "
            f"{most} --elastic --min-workers M: the job continues without those that "
            "are lost while at least M workers are left"
        )
        nnodes = most
    count = number("--nnodes", nnodes, 1)
    rank = None
    if arguments.node_rank is not None:
        rank = number("--node-rank", arguments.node_rank, 0)
        if rank >= count:
            faults.append(
                "--node-rank must be less than --nnodes. Received: --node-rank "
                f"{rank} and --nnodes {count}"
            )
    fault = (
        "it is missing"
        if arguments.rendezvous is None
        else address_fault(arguments.rendezvous)
    )
    if fault:
        faults.append(
            "--rendezvous must be the address of host 0, with a free port, as a:29400. "
            f"Received: {arguments.rendezvous!r}: {fault}"
        )
    if arguments.hosts is not None or arguments.hostfile is not None:
        faults.append(
            "--nnodes and -H, or --hostfile, can't be used together. Received: both. "
            "Expected -H where ssh reaches the hosts from this one, else --nnodes on "
            "each of them"
        )
    if count > 1 and not os.environ.get("KERASDIST_SECRET"):
        faults.append(
            "several hosts need a secret: set KERASDIST_SECRET, or --secret-file, to "
            "the same random text on all of them, for example the output of `openssl "
            "rand -hex 32`"
        )
    return NodeOptions(
        count=count,
        rank=rank,
        rendezvous=arguments.rendezvous or "",
        seconds=number(
            "--start-timeout",
            arguments.start_timeout or str(arguments.start_seconds),
            1,
        ),
    )


def _read_secret(path: str, faults: list[str]) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        faults.append(
            "--secret-file must be a text file. Received: --secret-file "
            f"{shlex.quote(path)}: {error}"
        )
        return
    if not text:
        faults.append(f"--secret-file {shlex.quote(path)} is empty")
    os.environ["KERASDIST_SECRET"] = text
