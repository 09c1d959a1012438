"""The devices of a distribution's mesh, by worker, and the meshes that are refused.

The objects are Keras's own. Nothing is installed in this process.
"""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
from keras.src.distribution import distribution_lib

from kerasdist.strategies.distribution import (
    check_kind,
    global_names,
    local_devices,
)

DeviceMesh = keras.distribution.DeviceMesh
NAMES = {"num_processes": lambda: 1, "process_id": lambda: 0}


@pytest.fixture(autouse=True)
def _as_enabled(monkeypatch):
    # Keras 3.14 calls them, and its TensorFlow backend doesn't have them.
    for name, function in NAMES.items():
        monkeypatch.setattr(
            distribution_lib.distribution_lib, name, function, raising=False
        )


def parallel(*devices):
    return keras.distribution.DataParallel(devices=list(devices))


def sharded(shape, names=("batch", "model")):
    devices = [f"cpu:{i}" for i in range(int(np.prod(shape)))]
    layouts = keras.distribution.LayoutMap(DeviceMesh(shape, names, devices))
    layouts[".*kernel"] = (None, "model")
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def test_devices_are_numbered_over_all_workers():
    assert global_names(["gpu:0", "gpu:1"], 2) == ["gpu:0", "gpu:1", "gpu:2", "gpu:3"]
    assert global_names(["cpu:0"], 1) == ["cpu:0"]
    assert global_names([], 3) == []


def test_each_worker_gets_its_own():
    mesh = parallel("cpu:1", "cpu:0")
    assert local_devices(mesh, 0, 2) == ["CPU:0"]
    assert local_devices(mesh, 1, 2) == ["CPU:0"]


@pytest.mark.parametrize(
    ("devices", "size", "fault"),
    [
        (["cpu:0", "cpu:1"], 1, "'cpu:1' doesn't exist"),
        (["cpu:0", "cpu:0"], 1, "'cpu:0' is given twice"),
        (["tpu:0"], 1, "'tpu:0' doesn't exist"),
        (["/device:CPU:0"], 1, "'/device:CPU:0' doesn't exist"),
        (["cpu:1"], 2, "worker 0 has none"),
    ],
)
def test_a_mesh_of_other_devices_is_refused(devices, size, fault):
    with pytest.raises(ValueError, match=f"one or more of each worker: {fault}\\."):
        local_devices(parallel(*devices), 0, size)


def test_a_mesh_that_divides_the_batch_alone_can_be_used():
    check_kind(parallel("cpu:0", "cpu:1"))
    check_kind(sharded((2, 1)))
    check_kind(sharded((1, 2), ("model", "batch")))


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_one_that_divides_variables_is_refused(shape):
    message = "Expected the size 1 for ['model']. Give the batch's axis all devices"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_kind(sharded(shape))


def test_another_kind_of_distribution_is_refused():
    mesh = DeviceMesh((1,), ["batch"], ["cpu:0"])
    with pytest.raises(TypeError, match="or None for no distribution"):
        check_kind(distribution_lib.Distribution(mesh, "batch"))
