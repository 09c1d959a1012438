"""Elastic jobs that lose workers, and what must hold after each of them."""

import pickle
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moments import Fault, dumps
from scripts import with_prelude

from places import SCRIPTS_PATH
from workers import Workers

# What scripts of elastic jobs begin with: their data, and a model for these.
_BEGIN = with_prelude("""
alone = "TF_CONFIG" not in os.environ
me = 0 if alone else int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
random = np.random.default_rng(0)
x = random.normal(size=(250, 8)).astype("float32")
y = x[:, :3].argmax(1)

def classifier(strategy, *first, units=16, metrics=("accuracy",), **more):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((8,)),
            *first,
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(3, activation="softmax"),
        ])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=[*metrics],
                      **more)
    return model

def lists(values):
    return {name: [float(v) for v in each] for name, each in values.items()}

def whole(model):
    return np.concatenate([w.numpy().ravel() for w in model.weights]).tolist()

""")


def elastic_script(script: str) -> str:
    return _BEGIN + script


# Of a process that was frozen: seconds until it ends, once it runs again.
_END = 30.0


def lossy_job(
    script: str,
    size: int,
    faults: Sequence[Fault],
    path: Path,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    deadline: float = 120.0,
    servers: int = 0,
) -> dict[str, Any]:
    """Run a job, of which some workers are lost; return the survivors' numbers.

    The script writes a pickled dictionary of arrays to `f"{sys.argv[1]}{rank}"`, where
    `rank` is the one at the start. All survivors' numbers must be the same bits, and
    the lost ones must not have written any.
    """
    lost = {fault.rank: fault.signum for fault in faults}
    survivors = [rank for rank in range(size) if rank not in lost]
    for rank in range(size):
        Path(f"{path}{rank}").unlink(missing_ok=True)
    strategy = "ParameterServerStrategy" if servers else "RingStrategy"
    variables = {"TESTS": SCRIPTS_PATH, "FAULTS": dumps(faults), "STRATEGY": strategy}
    variables |= {"KERASDIST_ELASTIC": "1", **(env or {})}
    given = {"args": [str(path), *args], "env": variables, "servers": servers}
    with Workers(script, size, **given, deadline=deadline) as job:
        for rank in survivors:
            assert job.wait_one(rank).returncode == 0, f"rank {rank}"
        for rank, signum in lost.items():
            if signum == signal.SIGSTOP:
                # Others have gone on, so it must not finish the job by itself.
                job.kill(rank, signal.SIGCONT)
                assert job.wait_one(rank, _END).returncode != 0, f"rank {rank}"
            else:
                code = job.wait_one(rank, _END).returncode
                assert code == -signum, f"rank {rank} wasn't lost"
            assert not Path(f"{path}{rank}").exists(), f"rank {rank} has finished"
        for server in range(size, size + servers):
            assert job.wait_one(server, _END).returncode == 0, f"server {server - size}"
        for address in job.addresses:
            host, port = address.split(":")
            with socket.socket() as probe:
                assert probe.connect_ex((host, int(port))), f"{address} is open"
        found = [pickle.loads(Path(f"{path}{rank}").read_bytes()) for rank in survivors]
        first = found[0]
        for rank, other in zip(survivors[1:], found[1:], strict=True):
            assert first.keys() == other.keys()
            for key, value in first.items():
                same = np.asarray(value).tobytes() == np.asarray(other[key]).tobytes()
                assert same, f"ranks {survivors[0]} and {rank} differ: {key}"
    return first


def differences(ours: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    if ours.keys() != expected.keys():
        return [f"{sorted(ours)} instead of {sorted(expected)}"]
    faults = []
    for key, value in expected.items():
        try:
            np.testing.assert_allclose(ours[key], value, rtol=1e-5, atol=1e-6)
        except AssertionError as error:
            faults.append(f"{key}: {' '.join(str(error).split())[:300]}")
    return faults


def fail_on(faults: Sequence[str]) -> None:
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)
