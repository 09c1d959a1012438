"""The parser of the command line, whose errors other code can read."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


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
