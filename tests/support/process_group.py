"""The contract of communicators in real processes: one rank per process.

`tests/collectives/test_communicator.py` has its ranks in threads of one process. That
can't be done with what a process has only one of, such as TensorFlow's devices or MPI.
So each process runs the same tests, with a `Group` that runs a rank's work here and
fetches what the others returned:

    run_contract("native", rank, size, make_job, exchange)
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import groups
from closing import Closing
from kerasdist.collectives import Communicator, Job
from places import TESTS

# What looks into the other ranks' memory; `_check_barrier` is in its place.
_DESELECTED = ("test_nobody_leaves_a_barrier_before_all_have_come",)


class ProcessGroup(Closing):
    """This process's rank of a group; stands in for `groups.Group`."""

    def __init__(self, job: Job, exchange: Callable[[bytes], list[bytes]]) -> None:
        self._job = job
        self._exchange = exchange
        self.size = job.communicator.size
        self.communicators = [job.communicator] * self.size

    def run(self, work: Callable[[Communicator], Any], timeout: float = 60.0) -> Any:
        del timeout
        result: Any
        try:
            result = work(self._job.communicator)
            failed = False
        except BaseException as error:
            result, failed = f"{type(error).__name__}: {error}", True
            mine = error
        answers = [
            pickle.loads(part)
            for part in self._exchange(pickle.dumps((failed, result)))
        ]
        if failed:
            raise mine
        for rank, (their_failed, their) in enumerate(answers):
            if their_failed:
                pytest.fail(f"rank {rank}: {their}")
        return [their for _, their in answers]

    def close(self) -> None:
        self._exchange(b"")
        self._job.close()


def run_contract(
    kind: str,
    size: int,
    make_job: Callable[[], Job],
    exchange: Callable[[bytes], list[bytes]],
) -> None:
    groups.KINDS = [(kind, size)]  # type: ignore[misc]
    groups.FURTHER_KINDS = []
    groups.Group = lambda *_: ProcessGroup(make_job(), exchange)  # type: ignore
    with ProcessGroup(make_job(), exchange) as group:
        _check_barrier(group)
    deselect = " and ".join(f"not {name}" for name in _DESELECTED)
    files = ("test_communicator.py", "test_communicator_calls.py")
    contract = [str(TESTS / "collectives" / name) for name in files]
    sys.exit(
        pytest.main([*contract, "-q", "-x", "-p", "no:cacheprovider", "-k", deselect])
    )


def _check_barrier(group: ProcessGroup) -> None:
    def work(communicator: Communicator) -> list[tuple[float, float]]:
        pace = np.random.default_rng(communicator.rank)
        times = []
        for _ in range(30):
            np.ones(pace.integers(1, 100_000)).sum()
            entered = time.monotonic()
            communicator.barrier()
            times.append((entered, time.monotonic()))
        return times

    for turn in zip(*group.run(work), strict=True):
        if max(entered for entered, _ in turn) > min(left for _, left in turn):
            sys.exit(f"A rank left a barrier before all had come: {turn}")
