"""The devices of a distribution's mesh, by worker.

Devices are numbered over all workers, as in Keras on JAX: if each worker has two,
worker 1 has "cpu:2" and "cpu:3". Keras's objects are read here, and nothing is changed.
"""

from __future__ import annotations

import collections
from typing import Any

import keras
import tensorflow as tf


def global_names(local: list[str], size: int) -> list[str]:
    """Return the names of all workers' devices.

    Args:
        local: This worker's, such as `["gpu:0", "gpu:1"]`: of one type, from 0.
        size: The number of workers; all have as many devices as this one.
    """
    kinds = [name.partition(":")[0] for name in local]
    return [
        f"{kind}:{worker * len(local) + number}"
        for worker in range(size)
        for number, kind in enumerate(kinds)
    ]


def check_kind(distribution: Any) -> None:
    """Check that a distribution divides nothing but the batch.

    Raises:
        TypeError: It is neither a `DataParallel` nor a `ModelParallel`.
        ValueError: Its mesh has another axis than the batch's of a size above 1.
    """
    known = keras.distribution.DataParallel, keras.distribution.ModelParallel
    if not isinstance(distribution, known):
        raise TypeError(
            "On TensorFlow a distribution must be a `keras.distribution.DataParallel`, "
            "or a `ModelParallel` that divides the batch alone. Received: "
            f"{distribution!r} of type {type(distribution).__name__}. Use "
            "`keras.distribution.DataParallel()`, or None for no distribution."
        )
    mesh = distribution.device_mesh
    batch = distribution.batch_dim_name
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    others = {name: size for name, size in sizes.items() if name != batch and size > 1}
    if others:
        raise ValueError(
            "On TensorFlow a distribution can divide the batch, but not the variables: "
            f"each device has the whole model. Received: {distribution!r}, whose mesh "
            f"has the axes {sizes}; that of the batch is {batch!r}. Expected the size "
            f"1 for {sorted(others)}. Give the batch's axis all devices, with the same "
            "numbers; for a model that doesn't fit on one device use "
            "`kerasdist.ModelParallelStrategy`, which divides it by layers, or "
            "`kerasdist.layers.ShardedDense` and `ShardedEmbedding`."
        )


def local_devices(distribution: Any, rank: int, size: int) -> list[str]:
    """Return this worker's devices in a distribution's mesh, as TensorFlow names them.

    Args:
        distribution: One that `check_kind` accepts.
        rank: This worker's rank.
        size: The number of workers; all have as many devices as this one.

    Raises:
        ValueError: A device doesn't exist, or a worker has none.
    """
    names = [str(name) for name in distribution.device_mesh.devices.flatten()]
    found = collections.defaultdict(list)
    faults = []
    for name in names:
        kind, _, number = name.upper().partition(":")
        count = len(tf.config.list_logical_devices(kind))
        if not number.isdecimal() or int(number) >= count * size:
            faults.append(f"{name!r} doesn't exist")
        elif names.count(name) > 1:
            faults.append(f"{name!r} is given twice")
        else:
            worker, index = divmod(int(number), count)
            found[worker].append(f"{kind}:{index}")
    if not faults:
        faults = [f"worker {one} has none" for one in range(size) if one not in found]
    if faults:
        every = global_names(_default_names(), size)
        raise ValueError(
            "A mesh must be made of the workers' devices, with one or more of each "
            f"worker: {'; '.join(dict.fromkeys(faults))}. Received: devices={names}; "
            f"the number of workers is {size}, with {every}. Start as many workers as "
            "the mesh needs, `kerasdist run -n 8 train.py`, or make several devices of "
            "a CPU with `tf.config.set_logical_device_configuration` before anything "
            "else runs; `keras.distribution.list_devices()` returns all that there are."
        )
    return found[rank]


def _default_names() -> list[str]:
    """Return this worker's devices of the default type, as Keras names them."""
    devices = tf.config.list_logical_devices()
    others = [one for one in devices if one.device_type != "CPU"]
    return [
        f"{one.device_type.lower()}:{one.name.rpartition(':')[2]}"
        for one in others or devices
    ]
