"""The options by which a job continues without workers that are lost."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from kerasdist.cluster.grace import grace_seconds
from kerasdist.errors import ClusterError

__all__ = [
    "ELASTIC_VARIABLE",
    "LEAST_VARIABLE",
    "Elasticity",
    "elasticity",
    "refuse_elastic",
]

ELASTIC_VARIABLE = "KERASDIST_ELASTIC"
LEAST_VARIABLE = "KERASDIST_MIN_WORKERS"


@dataclasses.dataclass(frozen=True)
class Elasticity:
    """The bounds within which the workers of a job may change, and the time for it.

    Attributes:
        min_workers: The smallest number of workers that continue.
        grace: Seconds from SIGTERM until the platform kills a process.
    """

    min_workers: int = 1
    grace: float = 30.0


def elasticity(
    elastic: bool | None,
    min_workers: int | None,
    size: int,
    environ: Mapping[str, str] | None = None,
) -> Elasticity | None:
    """Return the bounds of an elastic job; None if the job isn't elastic.

    Args:
        elastic: Whether it is; None: by `KERASDIST_ELASTIC`, "1" or "0".
        min_workers: See `Elasticity`; None: `KERASDIST_MIN_WORKERS`, else 1.
        size: The number of workers with which the job starts.
        environ: The environment; the process's by default.

    Raises:
        ClusterError: A variable has another value.
        ValueError, TypeError: An argument is wrong.
    """
    environ = os.environ if environ is None else environ
    if elastic is None:
        given = environ.get(ELASTIC_VARIABLE, "") or "0"
        if given not in ("0", "1"):
            raise ClusterError(
                f"The variable {ELASTIC_VARIABLE} must be '0' or '1'. "
                f"Received: {given!r}."
            )
        elastic = given == "1"
    if not isinstance(elastic, bool):
        raise TypeError(
            "`elastic` must be a bool, or None for the environment's setting. "
            f"Received: elastic={elastic!r}."
        )
    if not elastic:
        if min_workers is not None:
            raise ValueError(
                "Only an elastic job continues with fewer workers. Received: "
                f"min_workers={min_workers!r} without elastic=True."
            )
        return None
    if min_workers is None:
        given = environ.get(LEAST_VARIABLE, "") or "1"
        if not given.isdecimal():
            raise ClusterError(
                f"The variable {LEAST_VARIABLE} must be a number of workers. "
                f"Received: {given!r}."
            )
        min_workers = int(given)
    if isinstance(min_workers, bool) or not isinstance(min_workers, int):
        raise TypeError(
            "`min_workers` must be a number of workers. "
            f"Received: min_workers={min_workers!r}."
        )
    if not 1 <= min_workers <= size:
        raise ValueError(
            "`min_workers` must be at least 1, and at most the number of workers. "
            f"Received: min_workers={min_workers}, with {size} workers."
        )
    return Elasticity(min_workers, grace_seconds(environ))


def refuse_elastic(strategy: str) -> None:
    """Refuse the environment of an elastic job, for a strategy that can't be elastic.

    Raises:
        ClusterError: `KERASDIST_ELASTIC` is "1".
    """
    if os.environ.get(ELASTIC_VARIABLE) == "1":
        raise ClusterError(
            f"A {strategy} can't be elastic. Received: {ELASTIC_VARIABLE}='1'. Use "
            "`RingStrategy`, or start the job without `--elastic`."
        )
