import copy
import math
import os
import re
from typing import Any

import keras
import numpy as np
import pytest

from kerasdist._keras.elastic.finished_calls import unfit
from kerasdist._keras.elastic.training_state import CheckpointFile, fault_of
from kerasdist.errors import SnapshotError

PLACE = {
    **{"kind": "batches", "pass": 1, "batch": 3, "step": 3, "steps_seen": 3},
    **{"steps_per_epoch": None, "batches": 8, "order": 0, "data": 0, "uses": [[1]]},
}
FACTS: dict[str, Any] = {
    **{"seed": 5, "fit": 1, "epoch": 2, "place": PLACE, "uses": [[1]], "orders": 1},
    **{"communicator_step": 9, "variables": [[[2], "float32"]], "rates": [0.1]},
    **{"factors": [None, [1.0, 2.0]], "callbacks": [["EarlyStopping", {"wait": 1}]]},
    **{"callback_arrays": [[0, "best_weights", 2]], "data": [8, None], "steps": 3},
    "metrics": [["float32", []]],
}
ODD = ["", "x", None, math.nan, -1, 1.5, [[]], [None], {}, True, [["a", 1]]]


@pytest.fixture
def file(tmp_path):
    return CheckpointFile("job", {"KERASDIST_CHECKPOINT_DIR": str(tmp_path)})


def test_what_was_written_is_read(file):
    file.write(FACTS, [np.arange(2, dtype=np.float32)])
    facts, (array,) = file.read()
    assert {name: facts[name] for name in FACTS} == FACTS
    assert array.tolist() == [0, 1]


@pytest.mark.parametrize("name", [*FACTS, *(f"place.{name}" for name in PLACE)])
def test_missing_and_odd_values_are_named(file, name):
    refused = []
    for odd in [..., *ODD]:
        facts = copy.deepcopy(FACTS)
        inner = facts["place"] if "." in name else facts
        key = name.rpartition(".")[2]
        inner[key] = odd
        if odd is ...:
            del inner[key]
        file.write(facts, [])
        try:
            file.facts()
        except SnapshotError as error:
            refused.append(str(error))
    assert len(refused) >= (1 if name == "place.data" else 4)
    first = name.partition(".")[0]
    named = rf"damaged: ({first}=|(place\.)?{key}(=| is missing|\.))"
    assert all(re.search(named, text) for text in refused)


def test_other_things_in_its_place(file, tmp_path):
    file.path.parent.mkdir(exist_ok=True)
    os.mkfifo(file.path)
    with pytest.raises(SnapshotError, match="isn't a regular file"):
        file.read()
    file.path.unlink()
    file.path.mkdir()
    with pytest.raises(SnapshotError, match="can't be read"):
        file.read()
    file.path.rmdir()
    assert file.read() is None
    assert fault_of([]) == "its facts are damaged: []"


def test_callbacks_keep_the_types_of_what_they_count():
    callback = keras.callbacks.EarlyStopping()
    callback.on_train_begin()
    assert not unfit(callback, {"wait": 3, "best": 0.5, "best_weights": None})
    assert unfit(callback, {"wait": "3"}) == "'wait': '3' in place of 0"
