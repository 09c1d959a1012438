"""The command `kerasdist run`: a job on this machine that leaves nothing behind."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kerasdist.cli.console import print_line
from kerasdist.cli.env import ALLOCATORS
from kerasdist.cli.run import gpus as gpu_options
from kerasdist.cli.run import nodes as node_options
from kerasdist.cli.run import task_processes as elastic_options
from kerasdist.cli.run.gpus import divide_all, is_divided
from kerasdist.cli.run.hosts import places as host_options
from kerasdist.cli.run.hosts.check import HostsError, on_hosts
from kerasdist.cli.run.hosts.find_gpus import find_gpus
from kerasdist.cli.run.launch import check_command, launch
from kerasdist.cli.run.nodes import RendezvousError, meeting
from kerasdist.cli.run.task_processes import FunctionFiles, JobSpec
from kerasdist.placement.plan import counted
from kerasdist.transport.credentials import tls_fault
from kerasdist.transport.handshake import secret_fault
from kerasdist.transport.log import format_fault, level_fault

_DESCRIPTION = """\
Start N workers on this machine, or on hosts that ssh reaches, each with a TF_CONFIG and
a port of its own, and one secret for all. When one fails the others are ended, and the
exit code is that of the first that failed. A job with asynchronous parameter servers
continues without a worker that was lost: the exit code is 0 if it finishes, unless that
worker was the chief, or was ended by an error of its own."""
_EPILOG = """\
examples:
  kerasdist run -n 4 train.py --epochs 5
  kerasdist run -n 3 --ps 2 train.py
  kerasdist run -H a:2,b:2 train.py
  kerasdist run -n 4 --bind cores --log-dir logs -m mypackage.train"""


_WITH_VALUE = (
    *(
        "-n",
        "-np",
        "--nproc-per-node",
        "--nproc_per_node",
        "--ps",
        "--log-dir",
        "--output",
        "--bind",
        "--malloc",
    ),
    *gpu_options.WITH_VALUE,
    *elastic_options.WITH_VALUE,
    *host_options.WITH_VALUE,
    *node_options.WITH_VALUE,
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run` to the command line."""
    parser = commands.add_parser(
        "run",
        help="start workers on this machine or others",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="kerasdist run (-n N | -H HOSTS) [options] [--] "
        "(script.py | -m module) [args ...]",
    )
    add_options(parser)
    parser.set_defaults(
        parser=parser, handler=lambda arguments: start(parser, arguments)
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a job is started."""
    parser.add_argument(
        "-n",
        "-np",
        "--nproc-per-node",
        "--nproc_per_node",
        dest="size",
        metavar="N",
        help="number of workers on this machine, or on all hosts of -H (default there: "
        "as many as they have room for)",
    )
    parser.add_argument(
        "--ps",
        dest="servers",
        metavar="M",
        default="0",
        help="number of parameter servers, which run the same script (default: 0)",
    )
    parser.add_argument(
        "--log-dir",
        metavar="D",
        help="folder for the output of ranks 1 to N-1, rank-1.log and so on, and of "
        "servers, ps-0.log and so on (default: a temporary one, which is removed if "
        "the job succeeds)",
    )
    parser.add_argument(
        "--output",
        choices=("chief", "all"),
        default="chief",
        help="'chief': the output of rank 0 passes through, that of the others is "
        "written to the logs. 'all': that of the others is shown as well, each line "
        "with its rank in front, or 'ps' and the server's index (default: chief)",
    )
    parser.add_argument(
        "--bind",
        choices=("none", "cores"),
        default="none",
        help="'cores': each worker gets its share of the cores, and TensorFlow as "
        "many threads (default: none)",
    )
    parser.add_argument(
        "--malloc",
        metavar="none|auto|LIB",
        default="none",
        help="an allocator for the workers, loaded before the C library's: 'auto' "
        f"takes the first installed one of {', '.join(ALLOCATORS)}; or the path of a "
        "shared library (default: none)",
    )
    parser.add_argument(
        "--tensorflow-log",
        action="store_true",
        help="show what TensorFlow writes when it is imported (default: only if "
        "TF_CPP_MIN_LOG_LEVEL is 0)",
    )
    gpu_options.add_options(parser)
    elastic_options.add_options(parser)
    host_options.add_options(parser)
    node_options.add_options(parser)


def split(
    arguments: list[str], with_value: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Split `run ...` into its options, and the script with its arguments.

    `with_value` are more options that a value follows.

    The command begins at the first argument that is no option of ours; a `--` before
    it is left out, and `-m` belongs to it. argparse can't do this: its versions
    differ in which `--` they swallow, and the script's own must stay.
    """
    i = 1
    while i < len(arguments) and arguments[i].startswith("-"):
        if arguments[i] == "--":
            return arguments[:i], arguments[i + 1 :]
        if arguments[i] == "-m":
            break
        i += 2 if arguments[i] in (*_WITH_VALUE, *with_value) else 1
    return arguments[:i], arguments[i:]


def start(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Check everything, then run the job; return the exit code."""
    function = FunctionFiles.take_from(os.environ)
    faults: list[str] = []
    environ = dict(os.environ)
    hosts = host_options.read_options(arguments, faults)
    if arguments.size is None and hosts is None:
        faults.append("-n, the number of workers, is missing")
    default = "1" if hosts is None else str(max(hosts.slots, 1))
    size = read_number("-n", arguments.size or default, 1, faults)
    servers = read_number("--ps", arguments.servers, 0, faults)
    number = functools.partial(read_number, faults=faults)
    nodes = node_options.read_options(arguments, number, faults)
    count = 1 if nodes is None else nodes.count
    elastic = elastic_options.read_options(arguments, count * size, number, faults)
    if nodes is not None and elastic is not None and elastic.grows:
        faults.append("--max-workers isn't possible with --nnodes")
    most = elastic.max_workers if elastic is not None and elastic.grows else size
    if hosts is not None and hosts.hosts and most > hosts.slots:
        faults.append(
            f"the hosts have room for {counted(hosts.slots, 'worker')}. Received: "
            f"{counted(most, 'worker')}. Expected at most as many as the hosts' SLOTS "
            "in all"
        )
    command = check_command(arguments.script, environ, faults)
    log_dir = None if arguments.log_dir is None else Path(arguments.log_dir)
    if log_dir is not None:
        existing = next((p for p in (log_dir, *log_dir.parents) if p.exists()), log_dir)
        if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
            faults.append(
                "--log-dir must be a folder in which files can be made. Received: "
                f"--log-dir {shlex.quote(arguments.log_dir)}"
            )
    if arguments.bind == "cores" and not hasattr(os, "sched_getaffinity"):
        faults.append("--bind cores isn't possible on this system")
    if os.sep in arguments.malloc and not os.access(arguments.malloc, os.R_OK):
        faults.append(
            "--malloc must be 'none', 'auto' or a shared library. Received: --malloc "
            f"{shlex.quote(arguments.malloc)}, which can't be read"
        )
    elif os.sep not in arguments.malloc and arguments.malloc not in ("none", "auto"):
        faults.append(
            "--malloc must be 'none', 'auto' or the path of a shared library. "
            f"Received: --malloc {shlex.quote(arguments.malloc)}"
        )
    if not hasattr(os, "fork"):
        faults.append("kerasdist run needs Linux (os.fork)")
    weak = (
        *(secret_fault(os.environ), level_fault(os.environ), format_fault(os.environ)),
        # Of tasks on other hosts each checks its own files.
        tls_fault(os.environ) if hosts is None else None,
    )
    faults += [each for each in weak if each is not None]
    if not sys.executable:
        faults.append("it is unknown where Python is (sys.executable is empty)")
    gpu_options.check_option(arguments, faults)
    finds_gpus = is_divided(arguments.gpus)
    gpus = {}
    if not faults and hosts is None:
        found = {"": find_gpus(environ)} if finds_gpus else {}
        gpus = divide_all(arguments.gpus, found, {"": most}, faults)
    if faults:
        if function is None:
            parser.error("\n  ".join(faults))
        function.refuse(faults)
        return 2
    with contextlib.ExitStack() as undo:
        try:
            placed = part = None
            if nodes is not None:
                secret = os.environ.get("KERASDIST_SECRET", "").encode()
                part = undo.enter_context(meeting(nodes, size, servers, secret))
            if hosts is not None:
                placed = undo.enter_context(
                    on_hosts(hosts, most, servers, command, finds_gpus=finds_gpus)
                )
                gpus = divide_all(
                    arguments.gpus, placed.gpus, placed.workers_by_host(), faults
                )
                if faults:
                    raise HostsError(faults)
        except HostsError as error:
            if function is not None:
                function.refuse(error.faults)
                return 2
            names = ",".join(host.target for host in hosts.hosts) if hosts else ""
            print_line(f"the hosts can't be used. Received: {names}", logging.ERROR)
            for fault in error.faults:
                print_line(fault, logging.ERROR)
            return 2
        except RendezvousError as error:
            print_line(str(error), logging.ERROR)
            return 1
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        job = JobSpec(
            size=size,
            servers=servers,
            command=command,
            log_dir=log_dir,
            gpus=gpus,
            environ={**environ, **(hosts.exported if hosts else {})},
            elastic=elastic,
            hosts=placed,
            part=part,
            function=function,
        )
        return launch(arguments, job)


def read_number(option: str, text: str, least: int, faults: list[str]) -> int:
    """Return an option's number; `least` if it's wrong."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        faults.append(
            f"{option} must be an integer >= {least}. Received: {option} "
            f"{shlex.quote(text)}"
        )
    return max(number, least)
