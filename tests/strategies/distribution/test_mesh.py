"""The devices of a distribution's mesh, by worker, and the meshes that are refused.

The objects are Keras's own. Nothing is installed in this process.
"""

import keras
import pytest
from keras.src.distribution import distribution_lib

from kerasdist.strategies.distribution import check_kind, local_devices

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


def test_another_kind_of_distribution_is_refused():
    mesh = DeviceMesh((1,), ["batch"], ["cpu:0"])
    with pytest.raises(TypeError, match="or None for no distribution"):
        check_kind(distribution_lib.Distribution(mesh, "batch"))
