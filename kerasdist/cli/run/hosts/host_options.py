"""The options of `kerasdist run` for several hosts."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence

from kerasdist.cli.run.hosts.places import Host, parse_hostfile, parse_hosts

WITH_VALUE = ("-H", "--hosts", "--hostfile", "--ssh", "--python", "-x")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The settings of a job on several hosts.

    Attributes:
        hosts: The hosts, in the order of their workers.
        ssh: The command that connects.
        python: The path of Python there.
        exported: The variables that `-x` names, and their values.
    """

    hosts: tuple[Host, ...]
    ssh: tuple[str, ...]
    python: str
    exported: Mapping[str, str]

    @property
    def slots(self) -> int:
        """The number of workers for which there is room."""
        return sum(host.slots for host in self.hosts)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to those of `run`."""
    parser.add_argument(
        "-H",
        "--hosts",
        metavar="HOST[:SLOTS],...",
        help="hosts that ssh reaches without a password, each with its number of "
        "workers (default of SLOTS: 1)",
    )
    parser.add_argument(
        "--hostfile",
        metavar="FILE",
        help="a file with a host in each line, as `host slots=2`",
    )
    parser.add_argument(
        "--ssh",
        metavar="COMMAND",
        help="with hosts: the command that connects, with its options (default: ssh)",
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="with hosts: the path of Python there (default: that of this one)",
    )
    parser.add_argument(
        "-x",
        dest="exported",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="with hosts: a variable for the workers. Those of kerasdist, TensorFlow, "
        "Keras and Python (KERASDIST_*, TF_*, KERAS_*, PYTHON* and the like) are "
        "passed on without it",
    )


def read_options(
    arguments: argparse.Namespace, faults: list[str]
) -> HostOptions | None:
    """Return the settings; None if no hosts are given.

    Args:
        arguments: The parsed arguments.
        faults: Takes a message about each value that can't be used.
    """
    if arguments.hosts is None and arguments.hostfile is None:
        given = {"--ssh": arguments.ssh, "--python": arguments.python}
        given["-x"] = arguments.exported[0] if arguments.exported else None
        faults += [
            f"{name} is an option for jobs on several hosts. Received: {name} {text} "
            "without -H or --hostfile"
            for name, text in given.items()
            if text is not None
        ]
        return None
    hosts: list[Host] = []
    if arguments.hosts is not None and arguments.hostfile is not None:
        faults.append("-H and --hostfile can't be used together")
    elif arguments.hosts is not None:
        hosts = parse_hosts(arguments.hosts, faults)
    else:
        try:
            with open(arguments.hostfile, encoding="utf-8") as file:
                hosts = parse_hostfile(arguments.hostfile, file.read(), faults)
        except (OSError, UnicodeDecodeError) as error:
            faults.append(
                "--hostfile must be a text file. Received: --hostfile "
                f"{shlex.quote(arguments.hostfile)}: {error}"
            )
    if arguments.bind == "cores":
        faults.append("--bind cores isn't possible with several hosts")
    ssh = tuple(shlex.split(arguments.ssh or "ssh"))
    if not ssh or shutil.which(ssh[0]) is None:
        faults.append(
            f"there is no command {arguments.ssh or 'ssh'!r}. On Debian and Ubuntu: "
            "apt-get install openssh-client"
        )
    return HostOptions(
        hosts=tuple(hosts),
        ssh=ssh,
        python=arguments.python or sys.executable,
        exported=_exported(arguments.exported, faults),
    )


def _exported(texts: Sequence[str], faults: list[str]) -> Mapping[str, str]:
    exported = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in os.environ):
            faults.append(
                "-x must be the name of a variable that is set, or NAME=VALUE. "
                f"Received: -x {shlex.quote(text)}"
            )
        else:
            exported[name] = value if equals else os.environ[name]
    return exported
