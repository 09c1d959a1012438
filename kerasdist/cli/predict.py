"""The commands that measure a step: `kerasdist predict`, and `kerasdist bench`.

`predict` simulates what more workers would take, before they exist; `bench` prints what
the measured ones take, by parts.
"""

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
    Command,
    above_zero,
    json_option,
    must_be,
    options_of,
    output_to,
    read_by,
    several,
)
from kerasdist.cli.run import command as run
from kerasdist.prediction import report
from kerasdist.prediction.profile import Profile, parse_link
from kerasdist.prediction.simulation import Setup, predict
from kerasdist.transport.framing import from_plain, to_object

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
_count = {"type": _integer, "default": 1}
_OPTIONS = (
    *options_of(
        """
--workers N,N
    numbers of workers (default: 2,4,8,16)
--per-host N
    workers of each host (default: 1)
--strategy
    sync and async are those of parameter servers (default: ring)
--local-steps N
    as that argument of RingStrategy (default: 1)
--compression
    as that argument of RingStrategy (default: the script's)
--price P
    of a worker's hour: adds the cost of an epoch
--plot FILE
    draw examples/s and ms per step into this file, for instance .svg
""",
        workers={"type": several(_integer), "default": (2, 4, 8, 16)},
        per_host=_count,
        strategy={"choices": ("ring", "sync", "async"), "default": "ring"},
        local_steps=_count,
        compression={"choices": _COMPRESSORS, "default": ""},
        price={"type": above_zero(float, "a number")},
        plot={"type": Path},
    ),
    json_option("the table, in seconds"),
)
# Of a measured step and simulated machines.
MEASURING_OPTIONS = options_of(
    """
--network LINK
    bits per second between hosts, as 10G, or with a latency, as 1G,2ms; or loopback
    (default: the measured one, with -H)
--servers N
    parameter servers, each on a host of its own (default: 1)
--steps S
    number of steps to measure, fewer if `fit` has fewer (default: 100)
--profile FILE
    JSON with the measured step: written, or with no script read
""",
    network={"type": read_by(parse_link)},
    servers={"dest": "simulated_servers", **_count},
    steps={"type": _integer, "default": 100},
    profile={"type": Path},
)


def _predict(arguments: argparse.Namespace) -> int:
    faults: list[str] = []
    path, read = arguments.plot, not arguments.script
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        faults.append(
            "--plot needs matplotlib. Received: --plot "
            f"{shlex.quote(str(path))}. Install it: pip install matplotlib"
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
    hosts = arguments.hosts or arguments.hostfile
    if arguments.compression and (read or hosts or arguments.size not in (None, "1")):
        faults.append(
            "--compression is for a step that one worker measures now. Received: "
            f"--compression {arguments.compression} with "
            f"{'no script' if read else 'several workers'}. Give it to the script's "
            "strategy, or measure with one worker"
        )
    check_folder("--plot", path, faults)
    profiles = read_profiles(arguments, faults)
    if profiles is None:
        if arguments.network is None and not hosts:
            faults.append(
                "--network is missing. Received: workers on this host alone. Give its "
                "bits per second, as --network 10G, or hosts to measure it, as -H "
                "alpha,beta"
            )
        command = run.checked_command(arguments, faults)
        compressions = [arguments.compression]
        profiles = measure(arguments, command, compressions=compressions)
        write_profiles(arguments.profile, profiles)
    profile = profiles[min(profiles)]
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
    if path is not None:
        report.draw(path, found)
    return 0


# What `predict` and `advise` measure, and keep in the file of `--profile`.


def read_profiles(
    arguments: argparse.Namespace, faults: list[str]
) -> dict[str, Profile] | None:
    """Return what the file of `--profile` has; None if a script is to be measured.

    Args:
        arguments: The parsed arguments.
        faults: Takes a message if the file can't be used. If it has any, the file isn't
            read.
    """
    path = arguments.profile
    check_folder("--profile", path, faults)
    if arguments.script or path is None or faults:
        return None
    try:
        value: Any = json.loads(path.read_text("utf-8"))
        # `advise` compares others with gradients as they are.
        names = value if value and arguments.command == "predict" else ("", *value)
        return {name: from_plain(value[name], Profile) for name in names}
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"a file that `kerasdist {arguments.command}` has written"
        faults.append(must_be("--profile", what, path, f": {error}"))
        return None


def write_profiles(path: Path | None, profiles: Mapping[str, Profile]) -> None:
    """Write the file of `--profile`, if it's given."""
    if path is not None:
        document = {name: to_object(each) for name, each in profiles.items()}
        path.write_text(json.dumps(document) + "\n", "utf-8")


def check_folder(option: str, path: Path | None, faults: list[str]) -> None:
    """Check that the folder exists in which an option's file is to be written."""
    if path is not None and not path.absolute().parent.is_dir():
        faults.append(must_be(option, "a file in a folder that exists", path))


def measure(
    arguments: argparse.Namespace, command: Sequence[str], **order: Any
) -> dict[str, Profile]:
    """Measure a step of a script.

    Args:
        arguments: With the options of `kerasdist run`; without any it's one worker.
        command: The script, see `check_command`.
        order: Further ones of the `ProfilerOrder`.

    Returns:
        The profiles, by the names of compressors.

    Raises:
        SystemExit: Measuring has failed; the reason has been printed.
    """
    order |= {"command": arguments.command, "steps": arguments.steps}
    text = json.dumps(order)
    with tempfile.TemporaryFile() as file:
        with output_to(file.fileno()):
            code = run.start_first_fit(arguments, "profile", text, *command)
        file.seek(0)
        lines = [line for line in file if line.startswith(b"{")]
    if code or not lines:
        raise SystemExit(code or 1)
    found: dict[str, Profile] = from_plain(json.loads(lines[-1]), dict[str, Profile])
    return found


COMMAND = Command(
    name="predict",
    handler=_predict,
    options=(*_OPTIONS, *MEASURING_OPTIONS, *run.OPTIONS),
    help="simulate a script's steps with other numbers of workers",
    description=_DESCRIPTION,
    epilog=_EPILOG,
    usage="kerasdist predict [--workers N,N] [--network LINK] [options] "
    "[options of run] [--] (script.py | -m module) [args ...]",
)


# `kerasdist bench`: a script's first `fit`, measured, then the end.

_BENCH_DESCRIPTION = """\
Run a training script up to its first `fit`, take some steps of that, and print what one
step costs by parts (input, compute, packing, communication, waiting, update), how that
compares with one worker alone, and what limits the job. The script isn't changed, and
what follows in it isn't run. The other options are those of `kerasdist run`."""
_BENCH_EPILOG = """\
examples:
  kerasdist bench train.py
  kerasdist bench -n 4 --steps 500 train.py --batch-size 256"""

_BENCH_OPTIONS = options_of(
    """
--steps S
    number of steps to take, fewer if `fit` has fewer; with asynchronous workers, whose
    numbers of steps differ, it's one epoch (default: 200)
""",
    steps={"default": "200"},
)


def _bench(arguments: argparse.Namespace) -> int:
    faults: list[str] = []
    if not (arguments.steps.isdecimal() and int(arguments.steps) >= 20):
        what = "an integer >= 20, because the first steps are slower"
        faults.append(must_be("--steps", what, arguments.steps))
    command = run.checked_command(arguments, faults)
    return run.start_first_fit(arguments, "bench", arguments.steps, *command)


BENCH_COMMAND = Command(
    name="bench",
    handler=_bench,
    options=(*_BENCH_OPTIONS, *run.OPTIONS),
    help="measure what a step of a script costs, by parts",
    description=_BENCH_DESCRIPTION,
    epilog=_BENCH_EPILOG,
    usage="kerasdist bench [-n N | -H HOSTS] [--steps S] [options of run] [--] "
    "(script.py | -m module) [args ...]",
)
