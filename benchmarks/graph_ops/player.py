"""One worker of `run.py`: `player.py CONTROL LIBRARY`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import serve, timed

CONTROL, LIBRARY = sys.argv[1:]
RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
CORES = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORES[RANK % len(CORES)]})

import numpy as np
import tensorflow as tf

import kerasdist
from kerasdist.strategies.reduce.graph_ops import CollectiveOps

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
strategy = kerasdist.RingStrategy(devices=["CPU:0"])
workers = strategy.extended.workers
ops = CollectiveOps(workers.communicator, "/cpu:0")
compiled = tf.load_op_library(LIBRARY)


def called(function: Any, value: Any) -> Any:
    result = tf.numpy_function(function, [value], tf.float32)
    result.set_shape(value.shape)
    return result


def barrier(array: Any) -> Any:
    workers.communicator.barrier()
    return array


def operation(way: str, path: str) -> Any:
    """Return what one collective of a way does to a tensor."""
    return {
        "nothing": tf.identity,
        "python": lambda value: called(lambda array: array, value),
        "barrier": lambda value: called(barrier, value),
        "kerasdist": lambda value: ops.all_reduce([value])[0],
        "compiled": lambda value: compiled.sum_of_processes(
            value=value, path=path, rank=RANK, size=workers.size
        ),
    }[way]


def graph(way: str, count: int, path: str) -> Any:
    one = operation(way, path)

    @tf.function(reduce_retracing=False)
    def run(value: Any) -> Any:
        for _ in range(count):
            value = one(value) * 0.5
        return value

    return run


graphs: dict[str, Any] = {}


def answer(order: dict[str, Any]) -> Any:
    way, count, size = order["way"], order["count"], order["bytes"]
    value = tf.ones(size // 4)
    key = f"{way}-{count}-{size}"
    if key not in graphs:
        graphs[key] = graph(way, count, f"{LIBRARY}-{key}")
        found = graphs[key](value).numpy()
        ranks = workers.size if way in ("kerasdist", "compiled") else 1
        if not np.allclose(found, (ranks * 0.5) ** count):
            raise RuntimeError(f"{key} gives {found[:3]}.")
    workers.communicator.barrier()
    return timed(lambda: graphs[key](value), order["calls"], 1)


serve(CONTROL, RANK, answer)
