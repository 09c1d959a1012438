"""The pages that follow a gradient, a batch and a failure through the functions."""

from __future__ import annotations

import itertools
import signal

import pytest

from launching import launcher_in
from places import ROOT, SCRIPTS_PATH
from ways import find, names_on
from workers import Workers

GRADIENT, BATCH, FAILURE = (
    names_on((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
    for name in ("gradient", "batch", "failure")
)
MODEL = """
import json, os, sys
sys.path[:0] = os.environ["TESTS"].split(os.pathsep)
import keras
import numpy as np
import kerasdist
from ways import find, track

with kerasdist.RingStrategy(transport="tcp").scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=EAGERLY)

def fit(*callbacks):
    x = np.ones((8, 2), "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=callbacks)
"""


@pytest.mark.parametrize("names", [GRADIENT, BATCH, FAILURE])
def test_a_way_is_short_and_leads_through_functions_that_are_there(names):
    assert 2 < len(names) <= 12
    assert all(callable(find(name)[1]) for name in names)
    modules = {getattr(find(name)[1], "__module__", None) for name in names}
    assert len(modules) <= 6


STACK = f"""
names = {GRADIENT!r}
functions = {{find(name)[1].__code__: name for name in names}}
transport, exchange = find(names[-1])
stacks = []

def noting(*args, **kwargs):
    frame, stack = sys._getframe(1), [names[-1]]
    while frame is not None:
        stack.append(functions.get(frame.f_code))
        frame = frame.f_back
    stacks.append([name for name in reversed(stack) if name])
    return exchange(*args, **kwargs)

class Note(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        transport.exchange = noting

    def on_train_batch_end(self, batch, logs=None):
        transport.exchange = exchange

fit(Note())
print("RESULT", json.dumps([each for each in stacks if each[0] == names[0]]))
"""


def test_the_way_of_a_gradient():
    script = MODEL.replace("EAGERLY", "True") + STACK
    with Workers(script, 2, env={"TESTS": SCRIPTS_PATH}) as workers:
        for worker in workers.succeed():
            assert worker.result
            assert all(stack == GRADIENT for stack in worker.result)


TRACK_ROWS = f"""
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
path = os.path.join(sys.argv[1], str(rank))
track(path, {BATCH!r})

"""
ROWS = """
fit()
with open(path) as file:
    print("RESULT", json.dumps(file.read().splitlines()))
"""


def test_the_way_of_a_batch(tmp_path):
    """Each function is first called after the one before it on the page."""
    script = MODEL.replace("EAGERLY", "False") + ROWS
    script = script.replace("with", TRACK_ROWS + "with", 1)
    env = {"TESTS": SCRIPTS_PATH}
    with Workers(script, 2, args=[str(tmp_path)], env=env) as workers:
        for worker in workers.succeed():
            begun = [x.removeprefix("begin ") for x in worker.result if "begin" in x]
            assert list(dict.fromkeys(begun)) == BATCH


KILL = """
class Kill(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if rank == 1 and batch == 1:
            os.kill(os.getpid(), signal.SIGKILL)

fit(Kill())
"""
# A busy machine may need longer than the launcher waits for rank 0's own error.
TRACK = (
    "from ways import track; track('way', {names}); "
    "from kerasdist.cli.run import supervisor; supervisor.LET_THEM_FAIL = 40"
)


@pytest.mark.soak
def test_the_way_of_a_failure(tmp_path):
    """A function ends only when the one before it on the page has begun."""
    script = MODEL.replace("EAGERLY", "False") + KILL
    script = script.replace("with", f"track('way', {FAILURE[:5]})\n\nwith", 1)
    with launcher_in(tmp_path) as launcher:
        launcher.env |= {"PYTHONPATH": SCRIPTS_PATH, "TESTS": SCRIPTS_PATH}
        before = TRACK.format(names=FAILURE[5:])
        code, _, err = launcher.run("-n", 2, "script.py", script=script, before=before)
        way = (tmp_path / "way").read_text().splitlines()
    assert code == 128 + signal.SIGKILL, err
    assert "rank 1 was ended by signal SIGKILL" in err
    assert "WorkerLost: Rank 1" in err
    last = {line: number for number, line in enumerate(way)}
    for first, second in itertools.pairwise(FAILURE):
        assert last[f"begin {first}"] < last[f"end {second}"], (first, second)
