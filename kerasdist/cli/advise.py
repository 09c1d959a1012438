"""The command `kerasdist advise`: which strategy suits a script and its machines."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from kerasdist.cli.console import (
    Command,
    above_zero,
    json_option,
    options_of,
    read_by,
    several,
)
from kerasdist.cli.predict import (
    MEASURING_OPTIONS,
    measure,
    read_profiles,
    write_profiles,
)
from kerasdist.cli.run import command as run
from kerasdist.placement.plan import counted, parse_bytes
from kerasdist.prediction.advice import Facts, StrategyChoice, advise
from kerasdist.prediction.profile import Profile
from kerasdist.prediction.report import aligned
from kerasdist.prediction.simulation import Setup

# Those that one worker can measure for all.
_COMPRESSIONS = ("", "bf16", "powersgd", "topk")
# From this part of all weights on tables count: what is sent of them is measured by two
# workers.
_TABLES = 0.1
# Choices of the table that is printed, beside those that don't fit.
_MOST = 12
_DESCRIPTION = """\
Run a training script up to its first `fit`, measure some steps of one worker, simulate
the steps of each strategy, and propose one: the line for the script, the command, the
batch size, and by which figure the others were ruled out. Each worker takes as many
rows as the measured one. A choice that changes the numbers of one process (16 bits,
compression, local steps, asynchronous servers) is proposed with --lossy only. The
script isn't changed, and what follows its first `fit` isn't run. The other options are
those of `kerasdist run`: with -H all hosts and the network are measured."""
_EPILOG = """\
examples:
  kerasdist advise --workers 8 --network 10G train.py
  kerasdist advise -H alpha,beta,gamma train.py
  kerasdist advise --workers 8 --network 10G --devices 4 --memory 16GB train.py"""
_integer = above_zero(int, "an integer")
_OPTIONS = (
    *options_of(
        """
--workers N
    the largest number of workers, each on a host of its own (default: those of --speeds
    or -H)
--speeds S,S
    how fast each worker computes, beside the measured one, as 1,1,0.5 (default: alike,
    with -H measured)
--devices N
    devices of a worker, if the model doesn't fit on one (default: 1)
--memory SIZE
    of a device, as 16GB (default: enough)
--lossy
    also propose what changes the numbers of one process
""",
        workers={"type": _integer},
        speeds={"type": several(above_zero(float, "a number")), "default": ()},
        devices={"type": _integer, "default": 1},
        memory={"type": read_by(parse_bytes)},
    ),
    json_option("the text"),
)


def _advise(arguments: argparse.Namespace) -> int:
    script = list(arguments.script)
    faults: list[str] = []
    profiles = read_profiles(arguments, faults) or _measured(arguments, faults)
    plain = profiles[""]
    speeds = arguments.speeds or plain.speeds
    workers = arguments.workers or len(speeds)
    link = arguments.network or plain.link
    if link is None or workers < 2:
        raise SystemExit(
            "kerasdist advise doesn't know the machines. Received: "
            f"{counted(len(plain.speeds), 'measured worker')}, --workers "
            f"{arguments.workers}, {'no' if link is None else 'a'} link. Give "
            "--workers and --network, or hosts to measure, as -H alpha,beta."
        )
    if arguments.memory is not None and not plain.stages:
        raise SystemExit(
            "kerasdist advise can't compute what the model needs: its layers can't be "
            f"traced by their shapes. Received: --memory {arguments.memory}. Leave it "
            "out; `kerasdist plan` names the fault."
        )
    # With fewer workers the slowest are left out.
    alike = (1.0,) * (workers - len(speeds))
    speeds = tuple(sorted((*speeds, *alike), reverse=True))
    setup = Setup(link=link, servers=arguments.simulated_servers, speeds=speeds)
    facts = Facts(
        profiles=profiles, setup=setup, workers=workers, memory=arguments.memory
    )
    choices = advise(facts, lossy=arguments.lossy)
    command = _command(arguments, choices[0], script, plain.speeds)
    arguments.document |= _to_json(choices, command)
    if not arguments.json:
        print(_to_text(choices, command))
    return 0 if choices[0].predicted else 1


def _measured(arguments: argparse.Namespace, faults: list[str]) -> dict[str, Profile]:
    """Return the steps that are measured now; end if there are faults."""
    hosts = arguments.hosts or arguments.hostfile
    if not hosts and arguments.size not in (None, "1"):
        faults.append(
            "workers of one host share its cores, so that none is measured as it will "
            f"be. Received: -n {arguments.size}. Give --workers, or hosts with -H"
        )
    workers = arguments.workers or len(arguments.speeds)
    if not hosts and (arguments.network is None or workers < 2):
        faults.append(
            "the machines aren't known. Give --workers and --network, or hosts to "
            f"measure, as -H alpha,beta. Received: --workers {arguments.workers}, "
            f"{'no' if arguments.network is None else 'a'} --network, no hosts"
        )
    command = run.checked_command(arguments, faults)
    devices = arguments.devices
    found = measure(arguments, command, compressions=_COMPRESSIONS, devices=devices)
    plain = found[""]
    if not hosts and plain.tables > _TABLES * plain.weights:
        arguments.size = "2"
        pair = measure(arguments, command)
        # Compressors leave tables as they are: what they send isn't known.
        found = {"": dataclasses.replace(plain, messages=pair[""].messages)}
    write_profiles(arguments.profile, found)
    return found


# The advice as JSON and as text.


def _command(
    arguments: argparse.Namespace,
    best: StrategyChoice,
    script: list[str],
    speeds: Sequence[float],
) -> str:
    """Return the command that starts the proposed job, on the fastest hosts."""
    words = ["kerasdist", "run"]
    hosts = arguments.hosts.split(",") if arguments.hosts else []
    if best.workers > 1 and len(hosts) == len(speeds):
        fastest = sorted(range(len(hosts)), key=lambda n: -speeds[n])[: best.workers]
        words += ["-H", ",".join(hosts[n] for n in sorted(fastest))]
        words += best.options.split()[2:]
    else:
        words += best.options.split()
    return shlex.join([*words, *(script or ["train.py"])])


def _to_json(choices: list[StrategyChoice], command: str) -> dict[str, Any]:
    best, *_ = choices
    return {
        "strategy": best.strategy,
        "command": command,
        "workers": best.workers,
        "batch_size": best.batch_size,
        "predicted": best.predicted and dataclasses.asdict(best.predicted),
        "choices": [dataclasses.asdict(choice) for choice in choices],
    }


def _to_text(choices: list[StrategyChoice], command: str) -> str:
    best, *_ = choices
    lines = ["kerasdist: what suits this job"]
    if best.predicted is None:
        lines.append(f"  nothing that was tried: the model {best.verdict}")
    else:
        lines += [
            f"  with {best.strategy}.scope():",
            f"  {command}",
            f"  batch_size={best.batch_size}",
        ]
        if best.workers > 1:
            lines[-1] += (
                f", {best.batch_size // best.workers} rows of each worker; "
                "kerasdist.callbacks.ScaleLearningRate() adapts the learning rate"
            )
    rows = [["strategy", "workers", "examples/s", "verdict"]]
    known: set[str] = set()
    for choice in choices[:_MOST]:
        # One of those that don't fit stands for all.
        if choice.predicted is None and choice.verdict in known:
            continue
        known.add(choice.verdict)
        rows.append(
            [
                choice.strategy.removeprefix("kerasdist."),
                str(choice.workers),
                f"{choice.speed:,.0f}" if choice.predicted else "",
                choice.verdict,
            ]
        )
    return "\n".join([*lines, *aligned(rows)])


COMMAND = Command(
    name="advise",
    handler=_advise,
    options=(*_OPTIONS, *MEASURING_OPTIONS, *run.OPTIONS),
    help="propose a strategy for a script and its machines",
    description=_DESCRIPTION,
    epilog=_EPILOG,
    usage="kerasdist advise [--workers N] [--network LINK] [options] "
    "[options of run] [--] (script.py | -m module) [args ...]",
)
