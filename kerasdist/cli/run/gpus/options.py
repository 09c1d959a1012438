"""The option `--gpus` of `kerasdist run`."""

from __future__ import annotations

import argparse
import shlex

WITH_VALUE = ("--gpus",)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option to those of `run`."""
    parser.add_argument(
        "--gpus",
        metavar="auto|N|all|none",
        default="auto",
        help="the GPUs of each worker: 'auto': its share of those of its host; N: this "
        "many of them; 'all': each worker sees all of them; 'none': none. Servers have "
        "none, unless 'all' is given (default: auto)",
    )


def check_option(arguments: argparse.Namespace, faults: list[str]) -> None:
    """Check the option's value.

    Args:
        arguments: The parsed arguments.
        faults: Takes a message about a value that can't be used.
    """
    text = arguments.gpus
    if text in ("auto", "all", "none") or (text.isdecimal() and text.isascii()):
        return
    faults.append(
        "--gpus must be 'auto', 'all', 'none' or a number >= 0. Received: --gpus "
        f"{shlex.quote(text)}"
    )
