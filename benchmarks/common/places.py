"""The environment of a process that is measured, and its place in a job."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ROOT", "cluster_env", "free_ports", "quiet_env"]

ROOT = Path(__file__).resolve().parents[2]


def quiet_env(threads: int | None = 1) -> dict[str, str]:
    """The environment of a process that is measured: no job around it, no GPU."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name != "TF_CONFIG" and not name.startswith(("KERASDIST_", "SLURM_"))
    }
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env |= {
        "CUDA_VISIBLE_DEVICES": "-1",
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if threads is not None:
        env |= {
            "OMP_NUM_THREADS": str(threads),
            "TF_NUM_INTRAOP_THREADS": str(threads),
            "TF_NUM_INTEROP_THREADS": "2",
        }
    return env


def cluster_env(
    workers: Sequence[str],
    index: int,
    secret: str,
    *,
    servers: Sequence[str] = (),
    kind: str = "worker",
) -> dict[str, str]:
    """The settings by which a task of kerasdist (or TensorFlow) finds its job."""
    cluster = {"worker": list(workers)}
    if servers:
        cluster["ps"] = list(servers)
    task = {"type": kind, "index": index}
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
        "KERASDIST_SECRET": secret,
        "KERASDIST_ALLOW_OPEN_SERVERS": "1",
    }


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago: for peers that can't be given a socket."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
