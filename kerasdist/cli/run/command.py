"""The command `kerasdist run`: a job on this machine that leaves nothing behind."""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from kerasdist.cli.console import Command, must_be, print_line
from kerasdist.cli.env import find_allocator, preloading
from kerasdist.cli.run import options
from kerasdist.cli.run.hosts.places import HostsError, on_hosts
from kerasdist.cli.run.hosts.probe import find_gpus
from kerasdist.cli.run.job_spec import (
    FunctionFiles,
    JobSpec,
    cores_in_order,
    divide_all,
    shares,
)
from kerasdist.cli.run.nodes import LocalPart, RendezvousError, alone, meeting
from kerasdist.cli.run.options import read_number
from kerasdist.cli.run.supervisor import run_supervised
from kerasdist.placement.plan import counted
from kerasdist.transport.handshake import secret_fault
from kerasdist.transport.log import format_fault, level_fault
from kerasdist.transport.tls import tls_fault

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

# They say how a job is started.
OPTIONS = options.ALL_OPTIONS


def split(
    arguments: list[str], with_value: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Split `run ...` into its options, and the script with its arguments.

    `with_value` are the options that a value follows.

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
        i += 2 if arguments[i] in with_value else 1
    return arguments[:i], arguments[i:]


# The script or module that a job runs.

# An interpreter's name, which other launchers want before the script.
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")


def check_command(
    script: Sequence[str], environ: MutableMapping[str, str], faults: list[str]
) -> tuple[str, ...]:
    """Return the script or module and its arguments; check that it exists.

    Args:
        script: What follows the options; an interpreter may stand in front.
        environ: Gets what the interpreter's options mean.
        faults: Takes a message about each thing that can't be used.
    """
    script = list(script)
    if len(script) > 1 and _PYTHON.fullmatch(Path(script[0]).name):
        # `kerasdist run -n 2 python train.py`, as with mpirun. Our own Python runs it.
        del script[0]
        while script[:1] == ["-u"]:
            environ["PYTHONUNBUFFERED"] = "1"
            del script[0]
    if not script:
        faults.append("expected a script, or -m and a module")
        return ()
    if script[0] == "-m":
        if len(script) < 2:
            faults.append("-m must be followed by the name of a module")
        elif not _module_exists(script[1]):
            faults.append(
                f"there is no module {script[1]!r} that can be run. Received: -m "
                f"{shlex.quote(script[1])}"
            )
        return tuple(script)
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


def checked_command(
    arguments: argparse.Namespace, faults: list[str]
) -> tuple[str, ...]:
    """Return the command's script as `check_command`; end if there are faults.

    Raises:
        UsageError: There are.
    """
    command = check_command(arguments.script, os.environ, faults)
    if faults:
        arguments.parser.error("\n  ".join(faults))
    return command


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


def start_first_fit(arguments: argparse.Namespace, *words: str) -> int:
    """Start a job that measures a first `fit`, by default of one worker.

    Args:
        arguments: As `start` has them.
        *words: Those of `kerasdist.cli.first_fit`.
    """
    if arguments.size is None and not (arguments.hosts or arguments.hostfile):
        arguments.size = "1"
    arguments.script = ["-m", "kerasdist.cli.first_fit", *words]
    return start(arguments)


def start(arguments: argparse.Namespace) -> int:
    """Check everything, then run the job; return the exit code."""
    function = FunctionFiles.take_from(os.environ)
    faults: list[str] = []
    environ = dict(os.environ)
    hosts = options.read_hosts(arguments, faults)
    if arguments.size is None and hosts is None:
        faults.append("-n, the number of workers, is missing")
    default = "1" if hosts is None else str(max(hosts.slots, 1))
    size = read_number("-n", arguments.size or default, 1, faults)
    servers = read_number("--ps", arguments.servers, 0, faults)
    nodes = options.read_nodes(arguments, faults)
    count = 1 if nodes is None else nodes.count
    elastic = options.read_elastic(arguments, count * size, faults)
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
    _check_settings(arguments, log_dir, faults, uses_tls=hosts is None)
    finds_gpus = arguments.gpus not in ("all", "none", "0")
    gpus = {}
    if not faults and hosts is None:
        found = {"": find_gpus(environ)} if finds_gpus else {}
        gpus = divide_all(arguments.gpus, found, {"": most}, faults)
    if faults:
        if function is not None:
            return function.refuse(faults)
        arguments.parser.error("\n  ".join(faults))
    with contextlib.ExitStack() as undo:
        try:
            placed = None
            if nodes is not None:
                secret = os.environ.get("KERASDIST_SECRET", "").encode()
                part = undo.enter_context(meeting(nodes, size, servers, secret))
            elif hosts is not None:
                placed = undo.enter_context(
                    on_hosts(hosts, most, servers, command, finds_gpus=finds_gpus)
                )
                gpus = divide_all(
                    arguments.gpus, placed.gpus, placed.workers_by_host(), faults
                )
                if faults:
                    raise HostsError(faults)
                part = LocalPart(cluster=placed.cluster)
            else:
                part = undo.enter_context(alone(most, servers))
        except HostsError as error:
            if function is not None:
                return function.refuse(error.faults)
            names = ",".join(host.target for host in hosts.hosts) if hosts else ""
            print_line(f"the hosts can't be used. Received: {names}", logging.ERROR)
            for fault in error.faults:
                print_line(fault, logging.ERROR)
            return 2
        except RendezvousError as error:
            print_line(str(error), logging.ERROR)
            return 1
        except OSError as error:
            print_line(f"the workers can't be run: {error}", logging.ERROR)
            return 1
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        others = size + servers > 1 or part.first["worker"] > 0
        temporary = log_dir is None and arguments.output == "chief" and others
        if temporary:
            log_dir = Path(tempfile.mkdtemp(prefix="kerasdist-run-"))
        elif log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        if os.environ.get("TF_CONFIG", "").strip() not in ("", "{}"):
            print_line(
                "TF_CONFIG is set, and is replaced: `kerasdist run` starts a job of "
                "its own on this machine",
                logging.WARNING,
            )
        environ.update(hosts.exported if hosts else {})
        environ.update(elastic.environ if elastic else {})
        if not arguments.tensorflow_log:
            environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
        job = JobSpec(
            size=size,
            servers=servers,
            command=command,
            log_dir=log_dir,
            tagged=arguments.output == "all" and others,
            quiet=not arguments.tensorflow_log
            and environ["TF_CPP_MIN_LOG_LEVEL"] != "0",
            cores=_divided_cores(most) if arguments.bind == "cores" else (),
            gpus=gpus,
            environ=environ | _allocator(arguments.malloc, environ),
            elastic=elastic,
            hosts=placed,
            part=part,
            function=function,
            secret=os.environ.get("KERASDIST_SECRET") or secrets.token_hex(32),
            group=os.getpgrp(),
        )
        code = _run(job)
        if temporary and log_dir is not None and code == 0:
            shutil.rmtree(log_dir, ignore_errors=True)
        return code


def _check_settings(
    arguments: argparse.Namespace,
    log_dir: Path | None,
    faults: list[str],
    *,
    uses_tls: bool,
) -> None:
    """Check what is the same for jobs on one host and on several.

    Args:
        arguments: The parsed arguments.
        log_dir: The folder of `--log-dir`.
        faults: Takes a message about each thing that can't be used.
        uses_tls: Whether this process's certificates are the tasks': of tasks on other
            hosts each checks its own files.
    """
    if log_dir is not None:
        existing = next((p for p in (log_dir, *log_dir.parents) if p.exists()), log_dir)
        if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
            what = "a folder in which files can be made"
            faults.append(must_be("--log-dir", what, log_dir))
    malloc = arguments.malloc
    if malloc not in ("none", "auto") and not (
        os.sep in malloc and os.access(malloc, os.R_OK)
    ):
        what = "'none', 'auto' or the path of a shared library that can be read"
        faults.append(must_be("--malloc", what, malloc))
    weak = (
        *(secret_fault(os.environ), level_fault(os.environ), format_fault(os.environ)),
        tls_fault(os.environ) if uses_tls else None,
    )
    faults += [each for each in weak if each is not None]
    if not sys.executable:
        faults.append("it is unknown where Python is (sys.executable is empty)")
    options.check_gpus(arguments.gpus, faults)


def _divided_cores(workers: int) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each worker."""
    available = cores_in_order()
    if len(available) < workers:
        print_line(
            f"{workers} workers share {len(available)} cores: each has one core and "
            "one thread, several have the same",
            logging.WARNING,
        )
    return tuple(shares(available, workers))


def _allocator(malloc: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which workers use the allocator of `--malloc`."""
    library = find_allocator() if malloc == "auto" else malloc
    if library is None:
        print_line(
            "--malloc auto: no allocator is installed, workers use the C library's. On "
            "Debian and Ubuntu: apt-get install libjemalloc2",
            logging.WARNING,
        )
    if library in (None, "none"):
        return {}
    found = preloading(library, environ)
    print_line(f"workers allocate with {found['LD_PRELOAD'].partition(':')[0]}")
    return found


# With less of it free, a disk is full: files take it in blocks.
_FULL_BYTES = 4096


def _run(job: JobSpec) -> int:
    """Run a job, and tell where its logs are; return the exit code.

    When this returns, nothing of the job runs any more.
    """
    logs = [log for task in job.tasks if (log := job.log(task)) is not None]
    if logs:
        rest = "" if len(logs) == 1 else f" ... {logs[-1].name}"
        print_line(f"the others' output goes to {shlex.quote(str(logs[0]))}{rest}")
    code = run_supervised(job)
    if job.log_dir is not None and _is_full(job.log_dir):
        print_line(
            f"the disk of {shlex.quote(str(job.log_dir))} is full: the others' output "
            "may be missing, and they may have failed for that reason (OSError: No "
            "space left on device). Make room, or name another folder with --log-dir",
            logging.WARNING,
        )
    return code


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _FULL_BYTES
    except OSError:  # the job has removed it
        return False


COMMAND = Command(
    name="run",
    handler=start,
    options=OPTIONS,
    help="start workers on this machine or others",
    description=_DESCRIPTION,
    epilog=_EPILOG,
    usage="kerasdist run (-n N | -H HOSTS) [options] [--] "
    "(script.py | -m module) [args ...]",
)
