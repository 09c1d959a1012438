"""One process of one column: `player.py COLUMN CONTROL [RANK]`.

A client of a job, which takes orders of `run.py`; its server, if `TF_CONFIG` says so;
or one of those that copy memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import serve

# From a number of bytes to a call that moves them, there and back.
Prepare = Callable[[int], Callable[[], Any]]


def copy() -> Prepare:
    """As many bytes as are pushed, and as many as are pulled, copied once each."""

    def prepare(size: int) -> Callable[[], Any]:
        pushed = np.full(size // 4, 1.0, np.float32)
        pulled = np.full(size // 4, 2.0, np.float32)
        at_server, at_client = np.zeros_like(pushed), np.zeros_like(pulled)

        def call() -> None:
            np.copyto(at_server, pushed)
            np.copyto(at_client, pulled)

        return call

    return prepare


def client(transport: str) -> tuple[int, Prepare, Callable[[], None]]:
    """The rank of a client, its calls, and what ends them."""
    from kerasdist.cluster import resolve
    from kerasdist.parameter_server import (
        ParameterServer,
        ServerSettings,
        Variable,
        connect_servers,
    )

    place, settings = resolve(), ServerSettings(mode="async")
    if place.task_type == "ps":
        ParameterServer(place, settings).serve()
        sys.exit()
    chosen = "tcp" if transport == "tcp" else "auto"
    job = connect_servers(place, settings, transport=chosen)
    if job.connections.transports != [transport]:
        raise RuntimeError(f"Not {transport}, but {job.connections.transports}.")

    def prepare(size: int) -> Callable[[], Any]:
        delta = np.full(size // 4, 1.0, np.float32)
        variable = Variable(name="weights", shape=delta.shape)
        opened = job.open_table([variable], [np.zeros_like(delta)])

        def call() -> None:
            value = opened.push_pull([delta]).values[0]
            # Nobody takes anything away: each value is the number of pushes so far.
            if value is None or value[-1] < opened.clock:
                raise RuntimeError(f"{transport} doesn't add {size} bytes.")

        return call

    return job.rank, prepare, job.close


def main() -> None:
    name, control, *more = sys.argv[1:]
    calls: dict[int, Callable[[], Any]] = {}
    if name == "memcpy":
        rank, prepare, close = int(more[0]), copy(), lambda: None
    else:
        rank, prepare, close = client(name)

    def answer(order: dict[str, Any]) -> Any:
        if order["do"] == "prepare":
            calls[order["bytes"]] = prepare(order["bytes"])
            return None
        call = calls[order["bytes"]]
        cpu, began = time.process_time(), time.monotonic()
        for _ in range(order["calls"]):
            call()
        ended = time.monotonic()
        # All processes of a host have the same monotonic clock.
        return {"began": began, "ended": ended, "cpu": time.process_time() - cpu}

    serve(control, rank, answer)
    close()


if __name__ == "__main__":
    main()
