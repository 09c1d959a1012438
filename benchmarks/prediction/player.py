"""One worker that sleeps where others compute: see `run.py`.

python player.py CONTROL RANK WORKERS
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import serve
from kerasdist.cluster import resolve
from kerasdist.collectives import connect
from kerasdist.prediction.profile import measure_link
from kerasdist.prediction.simulation import FORWARD

CONTROL, RANK = sys.argv[1], int(sys.argv[2])
cluster = resolve()
communicator = connect(cluster, transport="tcp", host=str(cluster.rank)).communicator
random = np.random.default_rng(RANK)


def train(steps: int, compute: float, spread: float, buckets: list[int]) -> Any:
    """Take steps; return their seconds, and those of computing alone.

    A step's computing takes `compute` seconds times a log-normal number.
    """
    total = sum(buckets)
    ready: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    arrays = [np.ones(size // 4, np.float32) for size in buckets]
    done = threading.Semaphore(0)

    def send() -> None:
        while (number := ready.get()) is not None:
            communicator.all_reduce([arrays[number]])
            done.release()

    sender = threading.Thread(target=send)
    sender.start()
    computing = []
    communicator.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        begin = time.perf_counter()
        taken = compute * random.lognormal(0, spread)
        known = 0
        for number, size in enumerate(buckets):
            known += size
            at = begin + taken * (FORWARD + (1 - FORWARD) * known / total)
            time.sleep(max(at - time.perf_counter(), 0.0))
            ready.put(number)
        computing.append(time.perf_counter() - begin)
        for _ in buckets:
            done.acquire()
    seconds = (time.perf_counter() - began) / steps
    ready.put(None)
    sender.join()
    return {"seconds": seconds, "compute": computing}


def answer(order: dict[str, Any]) -> Any:
    """Measure the link, or take steps."""
    if order.get("link"):
        return measure_link(communicator)
    return train(**order)


serve(CONTROL, RANK, answer)
