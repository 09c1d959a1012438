"""The options of `kerasdist run` for elastic jobs."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable

from kerasdist.cluster.tf_config import grace_seconds
from kerasdist.errors import ClusterError

WITH_VALUE = ("--min-workers", "--max-workers", "--restarts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """The settings of an elastic job.

    Attributes:
        min_workers: The smallest number of workers that go on.
        restarts: How many times workers are started again, all of them together.
        grace: Seconds from SIGTERM to SIGKILL.
        size: The number of workers with which the job starts.
        max_workers: The number of workers to which it may grow.
    """

    min_workers: int
    restarts: int
    grace: float
    size: int
    max_workers: int

    @property
    def grows(self) -> bool:
        """Whether workers may be added to the job."""
        return self.max_workers > self.size

    @property
    def environ(self) -> dict[str, str]:
        """The variables by which the strategy of a task knows the settings."""
        environ = {
            "KERASDIST_ELASTIC": "1",
            "KERASDIST_MIN_WORKERS": str(self.min_workers),
        }
        if self.grows:
            environ["KERASDIST_START_WORKERS"] = str(self.size)
        return environ


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to those of `run`."""
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="a worker that is lost doesn't end the job: the others go on, and the "
        "exit code is 0 if one of them finishes",
    )
    parser.add_argument(
        "--min-workers",
        metavar="M",
        help="with --elastic: the smallest number of workers that go on (default: 1)",
    )
    parser.add_argument(
        "--max-workers",
        metavar="M",
        help="with --elastic: the number of workers to which the job may grow; SIGUSR1 "
        "to the launcher adds one (default: N)",
    )
    parser.add_argument(
        "--restarts",
        metavar="R",
        help="with --elastic: how many times lost workers are started again, all of "
        "them together; the first time after 1 s, then 2 s, 4 s and so on (default: "
        "0). A worker that was sent SIGTERM isn't started again",
    )


def read_options(
    arguments: argparse.Namespace,
    size: int,
    number: Callable[[str, str, int], int],
    faults: list[str],
) -> ElasticOptions | None:
    """Return the settings; None without `--elastic`.

    Args:
        arguments: The parsed arguments.
        size: Number of workers.
        number: Returns an option's number, from its name, its text and its minimum.
        faults: Takes a message about each value that can't be used.
    """
    given = {
        "--min-workers": arguments.min_workers,
        "--max-workers": arguments.max_workers,
        "--restarts": arguments.restarts,
    }
    if not arguments.elastic:
        faults += [
            f"{name} is an option of elastic jobs. Received: {name} {text} without "
            "--elastic. Expected both or neither"
            for name, text in given.items()
            if text is not None
        ]
        return None
    least = number("--min-workers", given["--min-workers"] or "1", 1)
    if least > size:
        faults.append(
            "--min-workers must be at most the number of workers. Received: "
            f"--min-workers {least} and -n {size}"
        )
    most = number("--max-workers", given["--max-workers"] or str(size), 1)
    if most < size:
        faults.append(
            "--max-workers must be at least the number of workers. Received: "
            f"--max-workers {most} and -n {size}"
        )
    restarts = number("--restarts", given["--restarts"] or "0", 0)
    grace = 0.0
    try:
        grace = grace_seconds(os.environ)
    except ClusterError as error:
        faults.append(str(error))
    return ElasticOptions(
        min_workers=least,
        restarts=restarts,
        grace=grace,
        size=size,
        max_workers=max(most, size),
    )
