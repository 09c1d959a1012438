import pytest

from places import ROOT, SCRIPTS_PATH
from ways import find, names_on
from workers import Workers

GRADIENT, BATCH, FAILURE = (
    names_on((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
    for name in ("gradient", "batch", "failure")
)
SCRIPT = f"""
import json, os, sys
sys.path[:0] = os.environ["TESTS"].split(os.pathsep)
import keras
import numpy as np
import kerasdist
from ways import track

rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
path = os.path.join(sys.argv[1], str(rank))
track(path, {[*BATCH, *GRADIENT]!r})
with kerasdist.RingStrategy(transport="tcp").scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
x = np.ones((8, 2), "float32")
model.fit(x, x[:, :1], batch_size=4, verbose=0)
with open(path) as file:
    print("RESULT", json.dumps(file.read().splitlines()))
"""


@pytest.mark.parametrize("names", [GRADIENT, BATCH, FAILURE])
def test_a_way_is_short_and_leads_through_functions_that_are_there(names):
    assert 2 < len(names) <= 12
    assert all(callable(find(name)[1]) for name in names)
    modules = {getattr(find(name)[1], "__module__", None) for name in names}
    assert len(modules) <= 6


def test_the_ways_of_a_gradient_and_a_batch(tmp_path):
    """Functions of a gradient call each other; those of a batch follow each other."""
    for worker in Workers(
        SCRIPT, 2, args=[str(tmp_path)], env={"TESTS": SCRIPTS_PATH}
    ).run():
        begun = [x.removeprefix("begin ") for x in worker.result if "begin" in x]
        assert [name for name in dict.fromkeys(begun) if name in BATCH] == BATCH
        nested = "\n".join(f"begin {name}" for name in GRADIENT)
        assert nested in "\n".join(worker.result)
