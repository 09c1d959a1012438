"""The options by which a job continues without workers that are lost."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import NoReturn

from kerasdist.cluster.tf_config import grace_seconds
from kerasdist.errors import ClusterError

ELASTIC_VARIABLE = "KERASDIST_ELASTIC"
LEAST_VARIABLE = "KERASDIST_MIN_WORKERS"
START_VARIABLE = "KERASDIST_START_WORKERS"


@dataclasses.dataclass(frozen=True)
class Elasticity:
    """The bounds within which the workers of a job may change, and the time for it.

    Attributes:
        min_workers: The smallest number of workers that continue.
        grace: Seconds from SIGTERM until the platform kills a process.
        start_workers: The number of workers with which the job starts; None: all.
    """

    min_workers: int = 1
    grace: float = 30.0
    start_workers: int | None = None


def elasticity(
    elastic: bool | None,
    min_workers: int | None,
    size: int,
    environ: Mapping[str, str] | None = None,
    *,
    start_workers: int | None = None,
) -> Elasticity | None:
    """Return the bounds of an elastic job; None if the job isn't elastic.

    Args:
        elastic: Whether it is; None: by `KERASDIST_ELASTIC`, "1" or "0".
        min_workers: See `Elasticity`; None: `KERASDIST_MIN_WORKERS`, else 1.
        size: The number of workers of the cluster.
        environ: The environment; the process's by default.
        start_workers: See `Elasticity`; None: `KERASDIST_START_WORKERS`, else all.

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
        if start_workers is not None:
            raise ValueError(
                "Only an elastic job starts with fewer workers. Received: "
                f"start_workers={start_workers!r} without elastic=True."
            )
        return None
    least = _number("min_workers", min_workers, LEAST_VARIABLE, environ)
    start = _number("start_workers", start_workers, START_VARIABLE, environ)
    least = 1 if least is None else least
    if not 1 <= least <= size:
        raise ValueError(
            "`min_workers` must be at least 1, and at most the number of workers. "
            f"Received: min_workers={least}, with {size} workers."
        )
    if start is not None and not least <= start <= size:
        raise ValueError(
            "`start_workers` must be at least `min_workers`, and at most the number of "
            f"workers. Received: start_workers={start}, with min_workers={least} and "
            f"{size} workers."
        )
    return Elasticity(least, grace_seconds(environ), start)


def _number(
    name: str, given: int | None, variable: str, environ: Mapping[str, str]
) -> int | None:
    """Return a number of workers, by an argument, or else by a variable."""
    if given is None:
        text = environ.get(variable, "")
        if text and not text.isdecimal():
            raise ClusterError(
                f"The variable {variable} must be a number of workers. "
                f"Received: {text!r}."
            )
        return int(text) if text else None
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(
            f"`{name}` must be a number of workers. Received: {name}={given!r}."
        )
    return given


def refuse_asynchronous(elastic: bool | None) -> None:
    """Refuse elastic jobs, for asynchronous servers.

    Args:
        elastic: See `elasticity`.

    Raises:
        ClusterError: The job is elastic, by the argument or by `KERASDIST_ELASTIC`.
    """
    by_environment = elastic is None and os.environ.get(ELASTIC_VARIABLE) == "1"
    if not (elastic is True or by_environment):
        return
    given = f"{ELASTIC_VARIABLE}='1'" if by_environment else "elastic=True"
    raise ClusterError(
        "An asynchronous ParameterServerStrategy can't be elastic: its workers "
        f"continue without a lost one anyhow. Received: mode='async' with {given}. "
        "Use mode='sync', or leave that out."
    )


def refuse_option(reason: str) -> NoReturn:
    """Refuse an option with which an elastic job can't continue with fewer workers.

    Args:
        reason: The option and why.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        "An elastic job continues without workers that are lost, which isn't possible "
        f"with every option. Received: elastic=True with {reason}. Leave that out, or "
        "pass elastic=False."
    )
