"""The log folder and environment of a job, and the fork of its supervisor."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from types import FrameType

from kerasdist.cli.console import print_line
from kerasdist.cli.env import find_allocator, preloading
from kerasdist.cli.run.processes import (
    ENDING_SIGNALS,
    GROW_SIGNAL,
    adopt_orphans,
    descendants,
    kill_all,
)
from kerasdist.cli.run.spawn import cores_in_order, shares
from kerasdist.cli.run.supervisor import JobSupervisor
from kerasdist.cli.run.task_processes import JobSpec
from kerasdist.transport import log

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
        while script[:1] == ["-u"]:
            environ["PYTHONUNBUFFERED"] = "1"
            script = script[1:]
        if script[:1] == ["-m"] or not script:
            return check_command(script, environ, faults)
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


# With less of it free, a disk is full: files take it in blocks.
_FULL_BYTES = 4096


def launch(arguments: argparse.Namespace, job: JobSpec) -> int:
    """Make the job's log folder and environment, run the job, and tidy up.

    Args:
        arguments: The options, which have been checked.
        job: The job; its environment is that of the user.

    Returns:
        The exit code. Nothing of the job runs any more.
    """
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
    if log_dir is not None and _is_full(log_dir):
        print_line(
            f"the disk of {shlex.quote(str(log_dir))} is full: the others' output may "
            "be missing, and they may have failed for that reason (OSError: No space "
            "left on device). Make room, or name another folder with --log-dir",
            logging.WARNING,
        )
    if temporary and log_dir is not None and code == 0:
        shutil.rmtree(log_dir, ignore_errors=True)
    return code


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _FULL_BYTES
    except OSError:  # the job has removed it
        return False


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
                log.flush(None)  # as `sys.exit` would
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
