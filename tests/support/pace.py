"""The pace of this machine: bounds on time grow with how slow it is.

A test's bound is far above what is usual where it was written. How much slower a
machine is, because of its processor or of other work on it, is measured once, at the
start of the session.
"""

import os
import time

_VARIABLE = "TESTS_SLOWNESS"
# Seconds that `_work` takes on an idle core of the machine that bounds were chosen on.
_USUAL = 0.055
_REPETITIONS = 5
# Other work may begin later, and tests run at the same time.
_MARGIN = 2.0


def calibrate() -> None:
    """Measures for this process and those that it starts, if no other one has."""
    if _VARIABLE not in os.environ:
        # A mean: what counts is the share of a core that is left.
        begin = time.perf_counter()
        for _ in range(_REPETITIONS):
            _work()
        taken = (time.perf_counter() - begin) / _REPETITIONS
        os.environ[_VARIABLE] = f"{max(1.0, taken / _USUAL):.2f}"


def slowness() -> float:
    """How many times as long as usual things take here, at least 1."""
    return float(os.environ.get(_VARIABLE, "1"))


def bound(seconds: float) -> float:
    """The bound for what takes much less than some seconds on the usual machine."""
    return seconds * _MARGIN * slowness()


def _work() -> int:
    return sum(i * i % 7 for i in range(1_000_000))
