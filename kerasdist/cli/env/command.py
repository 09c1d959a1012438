"""The command `kerasdist env`: collects the parts of the report and prints them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

from kerasdist.cli.allocator import ALLOCATORS, find_allocator
from kerasdist.cli.env import machine, software
from kerasdist.cli.env.variables import hide_secrets, shown_variables
from kerasdist.cluster import resolve
from kerasdist.errors import ClusterError
from kerasdist.placement.sizes import counted, human_bytes

_TENSORFLOW_SECONDS = 60.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `env` to the command line."""
    parser = commands.add_parser(
        "env",
        help="print what a report of a bug needs",
        description="Print versions, machine, limits, network, GPUs, launcher and "
        "environment variables, with secrets hidden, for a report of a bug. A part "
        "that can't be read contains the reason. The exit code is 0.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--no-tensorflow",
        action="store_true",
        help="don't import TensorFlow, which takes seconds, to list its devices",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of text"
    )
    parser.set_defaults(parser=parser, handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    seconds = 0.0 if arguments.no_tensorflow else _TENSORFLOW_SECONDS
    found = report(os.environ, seconds)
    if arguments.document is not None:
        arguments.document.update(found)
    else:
        for name, part in found.items():
            _print(name, part)
    return 0


def report(environ: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Return the report, by part.

    Args:
        environ: The environment.
        seconds: How long TensorFlow may take to list its devices; 0: it isn't asked.
    """
    parts: dict[str, Callable[[], Any]] = {
        "versions": software.versions,
        "extras": software.extras,
        "system": machine.system,
        "memory": machine.memory,
        "control_group": machine.control_group,
        "limits": machine.limits,
        "network": machine.network,
        "allocator": lambda: _allocator(environ),
        "launcher": lambda: _launcher(environ),
        "variables": lambda: shown_variables(environ),
        "gpus": lambda: software.gpus(seconds),
    }
    found = {}
    for name, read in parts.items():
        try:
            found[name] = read()
        except Exception as error:
            # Whatever it is: the rest of the report is needed all the more.
            reason = f"{type(error).__name__}: {error}"
            found[name] = {"unreadable": reason}
    shown: dict[str, Any] = hide_secrets(found, environ)
    return shown


def _allocator(environ: Mapping[str, str]) -> dict[str, str]:
    preload = environ.get("LD_PRELOAD", "")
    loaded = [name for name in ALLOCATORS if f"lib{name}." in preload]
    return {
        "loaded": loaded[0] if loaded else "that of the C library",
        "installed": find_allocator() or "none",
    }


def _launcher(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what started this process, and its place in the job."""
    found: dict[str, Any] = {}
    signs = {
        "kerasdist run": "KERASDIST_REPORT_FD",
        "Slurm": "SLURM_JOB_ID",
        "Open MPI": "OMPI_COMM_WORLD_SIZE",
        "MPI (PMI)": "PMI_SIZE",
        "PMIx": "PMIX_RANK",
        "Kubernetes": "KUBERNETES_SERVICE_HOST",
        "Ray": "RAY_JOB_ID",
    }
    found["signs of"] = [name for name, sign in signs.items() if sign in environ]
    try:
        place = resolve(environ=environ)
    except ClusterError as error:
        # What was received is among the variables.
        text = str(error).partition("\nReceived: ")[0]
        return {**found, "place": {"unreadable": text}}
    who = f"{place.task_type} {place.task_index}"
    rank = f"server of {counted(place.size, 'worker')}"
    if place.rank is not None:
        rank = f"rank {place.rank} of {place.size}"
    settings = "no settings" if place.source == "none" else place.source
    return {**found, "place": f"{rank} ({who}), by {settings}"}


def _print(name: str, part: Any, indent: str = "") -> None:
    """Print a part as lines of `name: value`, those inside of it indented."""
    name = name.replace("control_group", "control group")
    if isinstance(part, dict):
        if set(part) == {"unreadable"}:
            print(f"{indent}{name}: can't be read: {part['unreadable']}")
            return
        print(f"{indent}{name}:{'' if part else ' none'}")
        for key, value in part.items():
            _print(key, value, f"{indent}  ")
        return
    if isinstance(part, list):
        part = ", ".join(map(str, part)) or "none"
    elif name.endswith("_bytes"):
        name, part = name.removesuffix("_bytes").replace("_", " "), human_bytes(part)
    print(f"{indent}{name}: {part}")
