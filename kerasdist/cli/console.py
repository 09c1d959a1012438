"""The JSON document, the parsers, and the launcher's own lines, for all commands."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from kerasdist._version import __version__
from kerasdist.transport import log

# `--json`: one JSON document on standard output, whatever happens.


@contextlib.contextmanager
def json_document(command: str) -> Iterator[dict[str, Any]]:
    """Print one JSON document on standard output after the block.

    What is printed inside the block, by a user's script or by libraries, goes to
    standard error. An exception that ends the block is described in the document, and
    raised: messages on standard error and the exit code are those without `--json`.

    Args:
        command: The name of the command, for the document.

    Yields:
        The document, with the keys that all documents have: the command adds its own,
        and sets "ok".
    """
    document: dict[str, Any] = {
        "command": command,
        "kerasdist": __version__,
        "ok": False,
        "error": None,
    }
    try:
        with output_to_errors():
            yield document
    except BaseException as error:
        document["ok"] = False
        text = error.message if isinstance(error, UsageError) else str(error)
        # An exit code alone says nothing about the error.
        if not (type(error) is SystemExit and isinstance(error.code, int)):
            document["error"] = {"type": type(error).__name__, "message": text}
        raise
    finally:
        # A number that JSON doesn't have is a fault here, not in who reads it.
        print(json.dumps(document, indent=2, allow_nan=False), flush=True)


@contextlib.contextmanager
def output_to_errors() -> Iterator[None]:
    """Redirect standard output to standard error, also that of libraries in C."""
    sys.stdout.flush()
    with output_to(2), contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        finally:
            sys.stderr.flush()


@contextlib.contextmanager
def output_to(descriptor: int) -> Iterator[None]:
    """Let what is written to descriptor 1, also by children, go to another one."""
    kept = os.dup(1)
    try:
        os.dup2(descriptor, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


# The parser of the command line, whose errors other code can read.


class UsageError(SystemExit):
    """The arguments can't be used; ends the process with code 2.

    Attributes:
        message: What is wrong with them.
    """

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


class Parser(argparse.ArgumentParser):
    """Prints the usage and the message, as `ArgumentParser` does, and keeps the latter.

    Parsers of commands are of the same class.
    """

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message on standard error.

        Raises:
            UsageError: Always.
        """
        self.print_usage(sys.stderr)
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise UsageError(message)


# The commands that run a script, which isn't an argument that the parser knows.
WITH_SCRIPT = ("run", "bench", "predict", "advise")
# An option's names, and the other arguments of `add_argument`.
Option = tuple[tuple[str, ...], dict[str, Any]]


def options_of(text: str, **settings: dict[str, Any]) -> tuple[Option, ...]:
    """Return the options that a text describes, as a command's help does.

    Args:
        text: Of each option a line with its names, perhaps with a word for its value,
            and indented lines about it. One without a word or choices is a switch. A
            name without dashes is that of an argument, which is no option.
        settings: Further arguments of `add_argument`, by the option's first name, with
            `_` for each dash inside of it.
    """
    found: dict[str, list[str]] = {}
    for line in filter(None, text.strip().splitlines()):
        if line.startswith(" "):
            found[list(found)[-1]].append(line.strip())
        else:
            found[line] = []
    options = []
    for line, about in found.items():
        words = line.split()
        given = settings.pop(words[0].lstrip("-").replace("-", "_"), {})
        if words[1:] and not words[-1].startswith("-"):
            given = {"metavar": words.pop(), **given}
        elif words[0].startswith("-") and "choices" not in given:
            given = {"action": "store_true", **given}
        options.append((tuple(words), {**given, "help": " ".join(about) or None}))
    if settings:
        raise ValueError(f"There are no such options. Received: {sorted(settings)}.")
    return tuple(options)


def json_option(text: str) -> Option:
    """Return the option that replaces a command's output by a JSON document."""
    about = f"print one JSON document instead of {text}"
    return ("--json",), {"action": "store_true", "help": about}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command of `kerasdist`.

    Attributes:
        name: Its name.
        handler: Runs it: from the parsed arguments to the exit code.
        help: Its line in the list of all commands.
        description: The text of its own help.
        epilog: The lines below the options, as those of a terminal; then the
            description's lines are kept as they are, too.
        usage: The line above them; None: argparse's own.
        options: Its options.
    """

    name: str
    handler: Callable[[argparse.Namespace], int]
    help: str
    description: str
    epilog: str | None = None
    usage: str | None = None
    options: tuple[Option, ...] = ()

    def add_to(
        self, commands: argparse._SubParsersAction[argparse.ArgumentParser]
    ) -> None:
        """Add it to the command line."""
        parser = commands.add_parser(
            self.name,
            help=self.help,
            description=self.description,
            epilog=self.epilog,
            usage=self.usage,
            formatter_class=argparse.RawDescriptionHelpFormatter
            if self.epilog
            else argparse.HelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(parser=parser, handler=self.handler)
        for names, settings in self.options:
            parser.add_argument(*names, **settings)


def names_of(
    options: Iterable[argparse.Action], *, with_value: bool = False
) -> list[str]:
    """Return the names of options; perhaps only of those that a value follows."""
    some = (each for each in options if each.nargs != 0 or not with_value)
    return [name for each in some for name in each.option_strings]


def must_be(option: str, what: str, received: object, more: str = "") -> str:
    """Return the message about an option's value that can't be used.

    Args:
        option: The option.
        what: What is expected.
        received: The value.
        more: What follows it.
    """
    value = shlex.quote(str(received))
    return f"{option} must be {what}. Received: {option} {value}{more}"


def read_by(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the type of an option from a function whose errors are for the user."""

    def value_of(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value_of


def several(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return the type of an option whose value has several parts, with commas."""
    return lambda text: tuple(read(part) for part in text.split(",") if part)


def above_zero(read: Callable[[str], float], what: str) -> Callable[[str], Any]:
    """Return the type of an option whose value is a number above 0.

    Args:
        read: Reads the number, as `int` does.
        what: What it is, for messages.
    """

    def value_of(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < (number := read(text)) < math.inf:
                return number
        raise argparse.ArgumentTypeError(f"must be {what} above 0. Received: {text!r}")

    return value_of


# The launcher's own lines.

_LOG = logging.getLogger("kerasdist.run")


def print_line(text: str, level: int = logging.INFO) -> None:
    """Log a line to the user, after all that are to be written soon."""
    log.flush(None)
    log.log(level, "kerasdist run: %s", text, logger=_LOG)


def print_line_soon(text: str, level: int = logging.INFO) -> None:
    """Log a line while a job is watched: a reader that has stopped delays nothing."""
    log.log_in_background(level, "kerasdist run: %s", text, logger=_LOG)
