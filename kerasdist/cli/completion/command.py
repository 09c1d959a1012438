"""The command `kerasdist completion`: prints a shell's script."""

from __future__ import annotations

import argparse

from kerasdist.cli.completion.grammar import read_commands
from kerasdist.cli.completion.scripts import SHELLS, script_for

_EPILOG = """\
examples:
  source <(kerasdist completion bash)         in ~/.bashrc
  source <(kerasdist completion zsh)          in ~/.zshrc
  kerasdist completion fish | source          in ~/.config/fish/config.fish"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `completion` to the command line, after all others."""
    parser = commands.add_parser(
        "completion",
        help="print a script by which a shell completes kerasdist's words",
        description="Print a script by which bash, zsh or fish completes commands, "
        "options and their values.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(
        parser=parser, handler=lambda arguments: _run(arguments, commands)
    )


def _run(
    arguments: argparse.Namespace,
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> int:
    # What `add_parser` of each command was given as `help`.
    helps = {each.dest: each.help or "" for each in commands._choices_actions}
    found = read_commands(commands.choices, helps)
    print(script_for(arguments.shell, found), end="")
    return 0
