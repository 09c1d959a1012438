"""One rank's state given to all ranks, before the first step of `fit`.

1. all ranks exchange a hash of each variable
2. the root sends the values of those that differ; nothing else is sent
3. all exchange the hashes again, which must be the root's
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kerasdist.strategies.reduce.consensus import digests_of, give_values
from kerasdist.strategies.reduce.workers import Workers


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The result of sharing the state.

    Attributes:
        workers: Number of ranks that hold the same state now.
        variables: Number of variables.
        differed: Number of those that differed, on any rank.
        size: Bytes of those, which the root sent.
        seconds: Duration, including the hashes.
    """

    workers: int
    variables: int
    differed: int
    size: int
    seconds: float


def share_state(workers: Workers, variables: Sequence[Any], root: int) -> Shared:
    """Give all ranks the root's values; all ranks call it at the same point.

    Args:
        workers: The workers that reduce together.
        variables: TensorFlow's variables, in the same order on all ranks.
        root: The rank whose values count; of several local replicas, the first one's.

    Raises:
        ValueError: There is no such rank, or the ranks' variables are different ones.
            All ranks raise it, and their values haven't changed.
        CollectiveError: They still hold different values.
    """
    begin = time.perf_counter()
    communicator = workers.communicator
    size = communicator.size
    if not 0 <= root < size:
        raise ValueError(
            "There is no such rank to take the initial state from. Received: "
            f"root={root}; expected 0 to {size - 1}."
        )
    copies = [workers.copies(each) for each in variables if size > 1]
    _check_form(communicator, copies)
    mine = digests_of(copies)
    every = communicator.all_gather(mine)
    differing = [
        i
        for i in range(len(copies))
        if any(not np.array_equal(theirs[i], every[root][i]) for theirs in every)
    ]
    total = give_values(workers, [copies[i] for i in differing], root)
    return Shared(
        workers=size,
        variables=len(variables),
        differed=len(differing),
        size=total,
        seconds=time.perf_counter() - begin,
    )


def give_state(workers: Workers, variables: Sequence[Any], newcomer: bool) -> None:
    """Give rank 0's values to newcomers; all ranks call it at the same point.

    Ranks may change meanwhile, as members may be lost.

    A broadcast is a reduction in an elastic job, which moves the values over all links
    at once. Parts from each old member, gathered, take as long: of 64 MB 0.07 s between
    2 workers of one machine with 2 cores, 0.15 to 0.24 s between 4.

    Args:
        workers: The workers that reduce together.
        variables: TensorFlow's variables, in the same order on all ranks.
        newcomer: Whether this worker is one.

    Raises:
        CollectiveError: A newcomer holds other values after all.
    """
    copies = [workers.copies(each) for each in variables]
    give_values(workers, copies, 0, takes=newcomer)


def _check_form(communicator: Any, copies: Sequence[Sequence[Any]]) -> None:
    """Check that all ranks have variables of the same shapes and dtypes."""
    form = [(tuple(parts[0].shape), parts[0].dtype.name) for parts in copies]
    digest = hashlib.sha256(repr(form).encode()).digest()
    facts = np.frombuffer(digest + len(form).to_bytes(8, "big"), np.uint8)
    every = communicator.all_gather(facts)
    if all(np.array_equal(theirs, facts) for theirs in every):
        return
    counts = [int.from_bytes(theirs[32:].tobytes(), "big") for theirs in every]
    raise ValueError(
        "The workers hold different variables, so one can't give the others its "
        f"values. Received: {counts} variables, by rank"
        f"{', of different shapes' if len(set(counts)) == 1 else ''}. All ranks must "
        "build and compile the same model."
    )
