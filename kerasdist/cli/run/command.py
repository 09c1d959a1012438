"""The command `kerasdist run`: a job on this machine that leaves nothing behind."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.util
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from kerasdist.cli.allocator import ALLOCATORS, find_allocator, preloading
from kerasdist.cli.console import print_line
from kerasdist.cli.run.cores import cores_in_order, shares
from kerasdist.cli.run.elastic import options as elastic_options
from kerasdist.cli.run.function.files import FunctionFiles
from kerasdist.cli.run.hosts import options as host_options
from kerasdist.cli.run.hosts.check import HostsError, on_hosts
from kerasdist.cli.run.job import JobSpec
from kerasdist.cli.run.nodes import options as node_options
from kerasdist.cli.run.nodes.rendezvous import RendezvousError, meeting
from kerasdist.cli.run.processes import (
    ENDING_SIGNALS,
    GROW_SIGNAL,
    adopt_orphans,
    descendants,
    kill_all,
)
from kerasdist.cli.run.supervisor import JobSupervisor
from kerasdist.transport.log import background_log
from kerasdist.transport.log.default_handler import format_fault, level_fault
from kerasdist.transport.tls.credentials import tls_fault
from kerasdist.transport.wire.secret import secret_fault

__all__ = ["add_parser", "split"]

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


# With less of it free, a disk is full: files take it in blocks.
_FULL_BYTES = 4096
# An interpreter's name, which other launchers want before the script.
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
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
    elastic_options.add_options(parser)
    host_options.add_options(parser)
    node_options.add_options(parser)
    parser.set_defaults(
        parser=parser, handler=lambda arguments: _run(parser, arguments)
    )


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split `run ...` into its options, and the script with its arguments.

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
        i += 2 if arguments[i] in _WITH_VALUE else 1
    return arguments[:i], arguments[i:]


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Check everything, then start."""
    function = FunctionFiles.take_from(os.environ)
    faults: list[str] = []
    hosts = host_options.read_options(arguments, faults)
    if arguments.size is None and hosts is None:
        faults.append("-n, the number of workers, is missing")
    default = "1" if hosts is None else str(max(hosts.slots, 1))
    size = _number("-n", arguments.size or default, 1, faults)
    servers = _number("--ps", arguments.servers, 0, faults)
    number = functools.partial(_number, faults=faults)
    nodes = node_options.read_options(arguments, number, faults)
    count = 1 if nodes is None else nodes.count
    elastic = elastic_options.read_options(arguments, count * size, number, faults)
    if nodes is not None and elastic is not None and elastic.grows:
        faults.append("--max-workers isn't possible with --nnodes")
    most = elastic.max_workers if elastic is not None and elastic.grows else size
    if hosts is not None and hosts.hosts and most > hosts.slots:
        faults.append(
            f"the hosts have room for {hosts.slots} workers. Received: {most} workers. "
            "Expected at most as many as the hosts' SLOTS in all"
        )
    command = _command(arguments, faults)
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
                placed = undo.enter_context(on_hosts(hosts, most, servers, command))
        except HostsError as error:
            if function is not None:
                function.refuse(error.faults)
                return 2
            names = ",".join(host.target for host in hosts.hosts) if hosts else ""
            print_line(f"the hosts can't be used. Received: {names}")
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
            environ={**os.environ, **(hosts.exported if hosts else {})},
            elastic=elastic,
            hosts=placed,
            part=part,
            function=function,
        )
        return _launch(arguments, job)


def _number(option: str, text: str, least: int, faults: list[str]) -> int:
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


def _command(arguments: argparse.Namespace, faults: list[str]) -> tuple[str, ...]:
    """Return the script or module and its arguments; check that it exists."""
    script: list[str] = arguments.script
    if script[:1] == ["-m"]:
        if len(script) < 2:
            faults.append("-m must be followed by the name of a module")
        elif not _module_exists(script[1]):
            faults.append(
                f"there is no module {script[1]!r} that can be run. Received: -m "
                f"{shlex.quote(script[1])}"
            )
        return tuple(script)
    if not script:
        faults.append("expected a script, or -m and a module")
        return ()
    if len(script) > 1 and _PYTHON.fullmatch(Path(script[0]).name):
        # `kerasdist run -n 2 python train.py`, as with mpirun. Our own Python runs it.
        script = script[1:]
        if script[0] == "-m":
            return _command(argparse.Namespace(script=script), faults)
    path = Path(script[0])
    if path.is_dir():
        if not (path / "__main__.py").exists():
            faults.append(f"{script[0]} is a folder without a __main__.py")
    elif not path.exists():
        faults.append(
            f"there is no script {script[0]!r} (in {os.getcwd()}). Expected the path "
            "of a Python file"
        )
    elif not os.access(path, os.R_OK):
        faults.append(f"the script {script[0]!r} can't be read")
    # With a name like "-x.py" Python would see an option.
    return (str(path) if not script[0].startswith("-") else f"./{path}", *script[1:])


def _module_exists(name: str) -> bool:
    """Return whether `python -m name` will find it, without importing any of it."""
    first, *rest = name.split(".")
    if not all(part.isidentifier() for part in (first, *rest)):
        return False
    # `python -m` looks in the current folder first.
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(first)
        found = first
        for part in (*rest, "__main__"):
            if spec is None:
                return False
            if spec.submodule_search_locations is None:
                return part == "__main__"
            found = f"{found}.{part}"
            spec = importlib.machinery.PathFinder.find_spec(
                found, list(spec.submodule_search_locations)
            )
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]
    return spec is not None


def _launch(arguments: argparse.Namespace, job: JobSpec) -> int:
    """Make the job's log folder and environment, run the job, and tidy up."""
    others = any(not task.is_chief for task in job.tasks)
    log_dir = job.log_dir
    temporary = log_dir is None and arguments.output == "chief" and others
    if temporary:
        log_dir = Path(tempfile.mkdtemp(prefix="kerasdist-run-"))
    elif log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    cores: tuple[tuple[int, ...], ...] = ()
    if arguments.bind == "cores":
        available = cores_in_order()
        most = len(job.all_tasks) - job.servers
        cores = tuple(shares(available, most))
        if len(available) < most:
            print_line(
                f"{most} workers share {len(available)} cores: each has one core and "
                "one thread, several have the same",
                logging.WARNING,
            )
    if os.environ.get("TF_CONFIG", "").strip() not in ("", "{}"):
        print_line(
            "TF_CONFIG is set, and is replaced: `kerasdist run` starts a job of its "
            "own on this machine",
            logging.WARNING,
        )
    environ = dict(job.environ)
    if job.elastic is not None:
        environ.update(job.elastic.environ)
    if not arguments.tensorflow_log:
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    quiet = not arguments.tensorflow_log and environ["TF_CPP_MIN_LOG_LEVEL"] != "0"
    library = find_allocator() if arguments.malloc == "auto" else arguments.malloc
    if library is None:
        print_line(
            "--malloc auto: no allocator is installed, workers use the C library's. On "
            "Debian and Ubuntu: apt-get install libjemalloc2",
            logging.WARNING,
        )
    elif library != "none":
        environ.update(preloading(library, environ))
        print_line(f"workers allocate with {environ['LD_PRELOAD'].partition(':')[0]}")
    job = dataclasses.replace(
        job,
        log_dir=log_dir,
        tagged=arguments.output == "all" and others,
        cores=cores,
        environ=environ,
        quiet=quiet,
    )
    logs = [log for task in job.tasks if (log := job.log(task)) is not None]
    if logs:
        rest = "" if len(logs) == 1 else f" ... {logs[-1].name}"
        print_line(f"the others' output goes to {shlex.quote(str(logs[0]))}{rest}")
    code = _supervised(job)
    if log_dir is not None and shutil.disk_usage(log_dir).free < _FULL_BYTES:
        print_line(
            f"the disk of {shlex.quote(str(log_dir))} is full: the others' output may "
            "be missing, and they may have failed for that reason (OSError: No space "
            "left on device). Make room, or name another folder with --log-dir"
        )
    if temporary and log_dir is not None and code == 0:
        shutil.rmtree(log_dir, ignore_errors=True)
    return code


def _supervised(job: JobSpec) -> int:
    """Fork the supervisor, forward signals to it, and return the exit code.

    When this returns, nothing of the job runs any more.
    """
    secret = os.environ.get("KERASDIST_SECRET") or secrets.token_hex(32)
    group = os.getpgrp()
    others = frozenset(descendants(os.getpid()))  # not part of the job
    sys.stdout.flush()
    sys.stderr.flush()
    # Until both processes have their handlers no signal may be lost.
    forwarded: tuple[signal.Signals, ...] = ENDING_SIGNALS
    if job.elastic is not None and job.elastic.grows:
        forwarded = (*forwarded, GROW_SIGNAL)
    blocked = frozenset({*forwarded, signal.SIGCHLD})
    unblock = blocked - signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    life_read, life_write = os.pipe()
    with adopt_orphans():
        supervisor = os.fork()
        if supervisor == 0:
            # Leave by os._exit only: no code of the caller may run twice.
            code = 1
            try:
                os.close(life_write)
                os.setpgid(0, 0)
                code = JobSupervisor(job, life_read, group, secret).run(unblock)
            except BaseException:  # the user must see all of them
                sys.excepthook(*sys.exc_info())
            finally:
                background_log.flush(None)  # as `sys.exit` would
                with contextlib.suppress(OSError):
                    sys.stderr.flush()
                os._exit(code)
        os.close(life_read)
        try:
            with _forwarding_signals(supervisor, forwarded, unblock) as received:
                _, status = os.waitpid(supervisor, 0)
        finally:
            os.close(life_write)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            # It was killed; its adopted children are ours now.
            kill_all(2.0, others)
            print_line(
                f"the supervisor of the workers was ended by signal {-code}",
                logging.ERROR,
            )
            return 128 - code
    if code != 0 and received:
        return 128 + received[0]
    return code


@contextlib.contextmanager
def _forwarding_signals(
    supervisor: int,
    forwarded: Sequence[signal.Signals],
    unblock: frozenset[signal.Signals],
) -> Iterator[list[int]]:
    """Forward signals to the supervisor, inside the block.

    Yields:
        The signals received that end the job, in order.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if number in ENDING_SIGNALS:
            received.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, number)

    before = {}
    for number in forwarded:
        # A signal that `nohup` or a shell's `&` ignores stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, unblock)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
