"""The command `kerasdist predict`: what more workers would take, before they exist."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kerasdist.cli.console import (
    above_zero,
    add_command,
    json_option,
    option,
    output_to,
    read_by,
)
from kerasdist.cli.run import command as run
from kerasdist.prediction import report
from kerasdist.prediction.profile import Profile, parse_link
from kerasdist.prediction.simulation import Setup, predict

_COMPRESSORS = ("fp16", "bf16", "powersgd", "topk")
_DESCRIPTION = """\
Run a training script up to its first `fit`, measure some steps of one worker, and
simulate the same steps with other numbers of workers: the time of a step, examples per
second, the scaling efficiency, and what limits the job. Each worker takes as many rows
as the measured one, so that the global batch grows with the number of workers. The
script isn't changed, and what follows its first `fit` isn't run. The other options are
those of `kerasdist run`."""
_EPILOG = """\
examples:
  kerasdist predict --workers 2,8,64 --network 10G train.py
  kerasdist predict -H alpha,beta --workers 8,64 train.py     # measures the network
  kerasdist predict --workers 8 --network 1G --compression powersgd train.py"""
_integer = above_zero(int, "an integer")
_OPTIONS = (
    option(
        "--workers N,N",
        "numbers of workers (default: 2,4,8,16)",
        type=lambda text: [_integer(part) for part in text.split(",") if part],
        default=[2, 4, 8, 16],
    ),
    option(
        "--per-host N", "workers of each host (default: 1)", type=_integer, default=1
    ),
    option(
        "--strategy",
        "sync and async are those of parameter servers (default: ring)",
        choices=("ring", "sync", "async"),
        default="ring",
    ),
    option(
        "--local-steps N",
        "as that argument of RingStrategy (default: 1)",
        type=_integer,
        default=1,
    ),
    option(
        "--compression",
        "as that argument of RingStrategy (default: the script's)",
        choices=_COMPRESSORS,
        default="",
    ),
    option(
        "--price P",
        "of a worker's hour: adds the cost of an epoch",
        type=above_zero(float, "a number"),
    ),
    option(
        "--plot FILE",
        "draw examples/s and ms per step into this file, for instance .svg",
        type=Path,
    ),
    json_option("the table, in seconds"),
)
# Of a measured step and simulated machines.
MEASURING_OPTIONS = (
    option(
        "--network LINK",
        "bits per second between hosts, as 10G, or with a latency, as 1G,2ms; or "
        "loopback (default: the measured one, with -H)",
        type=read_by(parse_link),
    ),
    option(
        "--servers N",
        "parameter servers, each on a host of its own (default: 1)",
        dest="simulated_servers",
        type=_integer,
        default=1,
    ),
    option(
        "--steps S",
        "number of steps to measure, fewer if `fit` has fewer (default: 100)",
        type=_integer,
        default=100,
    ),
    option(
        "--profile FILE",
        "JSON with the measured step: written, or with no script read",
        type=Path,
    ),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `predict` to the command line."""
    add_command(
        commands,
        "predict",
        _predict,
        (*_OPTIONS, *MEASURING_OPTIONS, *run.OPTIONS),
        help="simulate a script's steps with other numbers of workers",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="kerasdist predict [--workers N,N] [--network LINK] [options] "
        "[options of run] [--] (script.py | -m module) [args ...]",
    )


def _predict(arguments: argparse.Namespace) -> int:
    profile, code = _profile(arguments)
    if profile is None:
        return code
    link = arguments.network or profile.link
    if link is None:
        raise SystemExit(
            "kerasdist predict doesn't know the network. Received: no --network, and "
            "the measured workers were on one host. Give its bits per second, as "
            "--network 10G, or two hosts to measure it, as -H alpha,beta."
        )
    setup = Setup(
        link=link,
        strategy=arguments.strategy,
        servers=arguments.simulated_servers,
        per_host=arguments.per_host,
        local_steps=arguments.local_steps,
    )
    found = {n: predict(profile, setup, n) for n in sorted(set(arguments.workers))}
    arguments.document |= report.to_json(profile, found, arguments.price)
    if not arguments.json:
        print(report.to_text(profile, setup, found, arguments.price))
    if arguments.plot is not None:
        report.draw(arguments.plot, found)
    return 0


def _profile(arguments: argparse.Namespace) -> tuple[Profile | None, int]:
    """Return the measured step; None and an exit code if measuring has failed."""
    faults: list[str] = []
    path, read = arguments.profile, not arguments.script
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        faults.append(
            "--plot needs matplotlib. Received: --plot "
            f"{shlex.quote(str(arguments.plot))}. Install it: pip install matplotlib"
        )
    ring = arguments.strategy == "ring"
    for name, number, fits in (
        ("--local-steps", arguments.local_steps, ring),
        ("--per-host", arguments.per_host, ring),
        ("--servers", arguments.simulated_servers, not ring),
    ):
        if number > 1 and not fits:
            faults.append(
                f"{name} has no effect there. Received: {name} {number}, "
                f"--strategy {arguments.strategy}. Expected --strategy "
                f"{'sync or async' if ring else 'ring'}"
            )
    several = arguments.size not in (None, "1") or arguments.hosts or arguments.hostfile
    if arguments.compression and (read or several):
        faults.append(
            "--compression is for a step that one worker measures now. Received: "
            f"--compression {arguments.compression} with "
            f"{'no script' if read else 'several workers'}. Give it to the script's "
            "strategy, or measure with one worker"
        )
    check_folder("--plot", arguments.plot, faults)
    check_folder("--profile", path, faults)
    if read and path is not None and not faults:
        try:
            return Profile.from_json(json.loads(path.read_text("utf-8"))), 0
        except (OSError, ValueError, TypeError) as error:
            faults.append(
                "--profile must be a file that `kerasdist predict` has written. "
                f"Received: --profile {shlex.quote(str(path))}: {error}"
            )
    if arguments.network is None and not (arguments.hosts or arguments.hostfile):
        faults.append(
            "--network is missing. Received: workers on this host alone. Give its bits "
            "per second, as --network 10G, or hosts to measure it, as -H alpha,beta"
        )
    command = run.checked_command(arguments, faults)
    order = {"steps": arguments.steps, "compressions": [arguments.compression]}
    found, code = measure(arguments, command, order)
    if found is None:
        return None, code
    profile = found[min(found)]
    if path is not None:
        path.write_text(json.dumps(profile.to_json()) + "\n", "utf-8")
    return profile, 0


def check_folder(option: str, path: Path | None, faults: list[str]) -> None:
    """Check that the folder exists in which an option's file is to be written."""
    if path is not None and not path.absolute().parent.is_dir():
        faults.append(
            f"{option} must be a file in a folder that exists. Received: {option} "
            f"{shlex.quote(str(path))}"
        )


def measure(
    arguments: argparse.Namespace, command: Sequence[str], order: Mapping[str, Any]
) -> tuple[dict[str, Profile] | None, int]:
    """Measure a step of a script.

    Args:
        arguments: With the options of `kerasdist run`; without any it's one worker.
        command: The script, see `check_command`.
        order: Of the `ProfilerOrder`, without the command's name.

    Returns:
        The profiles, by the names of compressors; None and an exit code if measuring
        has failed.
    """
    text = json.dumps({"command": arguments.command, **order})
    with tempfile.TemporaryFile() as file:
        with output_to(file.fileno()):
            code = run.start_first_fit(arguments, "profile", text, *command)
        file.seek(0)
        lines = [line for line in file if line.startswith(b"{")]
    if code or not lines:
        return None, code or 1
    value: Any = json.loads(lines[-1])
    return {name: Profile.from_json(each) for name, each in value.items()}, 0
