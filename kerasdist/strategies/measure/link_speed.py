"""The speed of the link between the workers when nothing else runs."""

from __future__ import annotations

import numpy as np

from kerasdist.collectives import Communicator
from kerasdist.strategies.measure.communication import SpanSums

# Large enough that the bandwidth matters, not the round trip; on a network of
# 100 Mbit/s it takes a second.
_BYTES = 4 << 20
_TIMES = 3


def link_speed(communicator: Communicator) -> float | None:
    """Measure how many bytes per second a worker sends in an all-reduce.

    All workers call it at the same point.

    Args:
        communicator: The communicator of the workers.

    Returns:
        The best of several results; the same on all workers. None for one worker.
    """
    if communicator.size == 1:
        return None
    buffer = np.zeros(_BYTES // 4, np.float32)
    best = 0.0
    sums = SpanSums(communicator.size)
    communicator.all_reduce([buffer])  # allocates buffers
    for _ in range(_TIMES):
        communicator.barrier()
        communicator.add_recorder(sums)
        try:
            communicator.all_reduce([buffer])
        finally:
            communicator.remove_recorder(sums)
        work = sums.take()
        if work.communicating:
            best = max(best, work.sent / work.communicating)
    return float(communicator.all_reduce([np.float64(best)], "max")[0]) or None
