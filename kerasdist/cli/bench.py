"""The command `kerasdist bench`: a script's first `fit`, measured, then the end."""

from __future__ import annotations

import argparse

from kerasdist.cli.console import Command, must_be, options_of
from kerasdist.cli.run import command as run

_DESCRIPTION = """\
Run a training script up to its first `fit`, take some steps of that, and print what one
step costs by parts (input, compute, packing, communication, waiting, update), how that
compares with one worker alone, and what limits the job. The script isn't changed, and
what follows in it isn't run. The other options are those of `kerasdist run`."""
_EPILOG = """\
examples:
  kerasdist bench train.py
  kerasdist bench -n 4 --steps 500 train.py --batch-size 256"""

_OPTIONS = options_of(
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


COMMAND = Command(
    name="bench",
    handler=_bench,
    options=(*_OPTIONS, *run.OPTIONS),
    help="measure what a step of a script costs, by parts",
    description=_DESCRIPTION,
    epilog=_EPILOG,
    usage="kerasdist bench [-n N | -H HOSTS] [--steps S] [options of run] [--] "
    "(script.py | -m module) [args ...]",
)
