"""The `kerasdist` command: what it does stands in the modules of its commands.

Each of them is a `kerasdist.cli.console.Command`. The parsed arguments have further
attributes for its handler: `parser`, its own; `script`, the command line of what it
runs; `commands`, all parsers; `document`, which it fills if it has an option `--json`,
and prints only without that.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Any

from kerasdist._version import __version__
from kerasdist.cli import advise, completion, doctor, env, plan_command, predict
from kerasdist.cli.console import WITH_SCRIPT, Parser, json_document, names_of
from kerasdist.cli.run import command as run

__all__ = ["main"]


_COMMANDS = (
    *(run.COMMAND, predict.BENCH_COMMAND, predict.COMMAND, advise.COMMAND),
    *(doctor.COMMAND, plan_command.COMMAND, env.COMMAND, completion.COMMAND),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: The arguments, `sys.argv[1:]` by default.

    Raises:
        SystemExit: The arguments can't be used (code 2), or only help was requested
            (code 0).
    """
    parser: argparse.ArgumentParser = Parser(
        prog="kerasdist",
        description="Train Keras 3 models on many workers.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for each in _COMMANDS:
        each.add_to(commands)
    options = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if options and options[0] in WITH_SCRIPT:
        # argparse has no public list of them; other tools read this one, too.
        known_options = commands.choices[options[0]]._actions
        with_value = names_of(known_options, with_value=True)
        options, command = run.split(options, with_value)
    try:
        with contextlib.ExitStack() as stack:
            # Also of help, and after the document: not when the interpreter ends.
            stack.callback(lambda: sys.stdout.flush())
            document: dict[str, Any] = {}
            # Also if other options are wrong.
            if "--json" in options and not {"-h", "--help"} & set(options):
                document = stack.enter_context(json_document(options[0]))
            known = argparse.Namespace(
                script=command, document=document, commands=commands
            )
            arguments, unknown = parser.parse_known_args(options, known)
            if unknown:
                # With the usage of the command that was given, not of `kerasdist`.
                arguments.parser.error(f"unrecognized arguments: {shlex.join(unknown)}")
            code: int = arguments.handler(arguments)
            document["ok"] = code == 0
            return code
    except BrokenPipeError:
        # The reader has enough, as `head` has. At its end Python writes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
