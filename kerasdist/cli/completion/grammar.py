"""The words that can follow `kerasdist` on the command line, as parsers know them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping

# Their script isn't an argument that the parser knows.
_WITH_SCRIPT = ("run",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a command.

    Attributes:
        names: All its names.
        help: Its description.
        has_value: Whether a word follows it.
        choices: The words that may follow; empty: any.
    """

    names: tuple[str, ...]
    help: str
    has_value: bool
    choices: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command of `kerasdist`.

    Attributes:
        name: Its name.
        help: Its description.
        options: Its options.
        words: The words that may stand without an option; empty: none, or any.
        has_script: Whether a script's name may follow.
        ends: Whether what follows the script belongs to it.
    """

    name: str
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...]
    has_script: bool
    ends: bool


def read_commands(
    parsers: Mapping[str, argparse.ArgumentParser], helps: Mapping[str, str]
) -> list[Command]:
    """Return the commands.

    Args:
        parsers: The parser of each command.
        helps: The description of each command.
    """
    return [
        _read_command(name, parser, helps.get(name, ""))
        for name, parser in parsers.items()
    ]


def _read_command(name: str, parser: argparse.ArgumentParser, text: str) -> Command:
    options: list[Option] = []
    words: list[str] = []
    has_script = name in _WITH_SCRIPT
    # argparse has no public list of them; other tools read this one, too.
    for action in parser._actions:
        choices = tuple(map(str, action.choices or ()))
        if action.option_strings:
            options.append(
                Option(
                    names=tuple(action.option_strings),
                    help=(action.help or "").replace("%%", "%"),
                    has_value=action.nargs != 0,
                    choices=choices,
                )
            )
        else:
            words += choices
            has_script = has_script or not choices
    return Command(
        name=name,
        help=text,
        options=tuple(options),
        words=tuple(words),
        has_script=has_script,
        ends=name in _WITH_SCRIPT,
    )
