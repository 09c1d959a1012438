"""Jobs that lose workers equal one process: the numeric contract of elastic jobs.

The jobs are those of `cases`. A lost worker is killed by itself, at a collective of the
case; nothing else is told about it.
"""

from __future__ import annotations

import pickle
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs import differences, fail_on, lossy_job
from moments import Fault

from cases import CASES
from places import SCRIPTS_PATH
from workers import Workers

RUN = """
import json, os, pickle, sys
sys.path[:0] = os.environ["TESTS"].split(os.pathsep)
import contextlib
import numpy as np
import tensorflow as tf
import keras
from cases import CASES
path, *names = sys.argv[1:]
if os.environ.get("PLAIN"):
    rank, scope = 0, contextlib.nullcontext
else:
    import moments
    import kerasdist
    at = moments.install()
    strategy = getattr(kerasdist, os.environ["STRATEGY"])(timeout=100)
    rank, scope = strategy.rank, strategy.scope
collected = {}
for name in names:
    if not os.environ.get("PLAIN"):
        moments.happen(name)
        before = at.counts["collective"]
    for key, value in CASES[name](scope).items():
        collected[f"{name}: {key}"] = np.asarray(value)
    keras.backend.clear_session()
    if not os.environ.get("PLAIN"):
        count = at.counts["collective"] - before
        print("RESULT", json.dumps([name, count]), flush=True)
if not os.environ.get("PLAIN"):
    strategy.close()
with open(f"{path}{rank}", "wb") as file:
    pickle.dump(collected, file)
"""
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], dict[str, int]]:
    """The numbers of one process, and how many collectives each case has.

    These are counted with three workers of which none is lost, whose numbers are
    compared, too.
    """
    path = tmp_path_factory.mktemp("undisturbed") / "numbers"
    args = [str(path), *CASES]
    numbers = []
    for size, env in (
        (1, {"PLAIN": "1", "TF_CONFIG": None}),
        (3, {"KERASDIST_ELASTIC": "1", "STRATEGY": "RingStrategy"}),
    ):
        env["TESTS"] = SCRIPTS_PATH
        with Workers(RUN, size, args=args, env=env, deadline=900) as job:
            first, *_ = job.succeed()
        numbers.append(pickle.loads(Path(f"{path}0").read_bytes()))
    plain, ours = numbers
    fail_on(differences(ours, plain))
    return plain, dict(first.results)


# What an elastic job doesn't continue: the rows of a state that each worker has its own
# of, and a loop that is none of Keras's.
NOT_CONTINUED = ("stateful_rows", "slices_in_a_loop")
# What is lost: one worker, the chief, two, all but one.
LOST = {"one": (3, [1]), "chief": (3, [0]), "two": (4, [3, 0]), "most": (3, [2, 0])}


@pytest.mark.soak
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_CONTINUED])
def test_case_with_lost_workers(
    name: str, lost: str, undisturbed: Any, tmp_path: Path
) -> None:
    draw = random.Random(zlib.crc32(f"{name} {lost}".encode()))
    size, ranks = LOST[lost]
    plain, counts = undisturbed
    expected = {k: v for k, v in plain.items() if k.startswith(f"{name}: ")}
    faults = [
        Fault(
            rank=rank,
            at=name,
            after=draw.randint(1, counts[name] - 1),
            delay=draw.choice([0.0, 0.0, 0.002, 0.02]),
        )
        for rank in ranks
    ]
    print(faults)
    ours = lossy_job(RUN, size, faults, tmp_path / "numbers", args=[name])
    fail_on(differences(ours, expected))
