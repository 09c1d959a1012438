"""Hooks of `keras.distribution`, which on TensorFlow has no effect of its own.

    set_distribution, scope()     begin and end the scope of a strategy
    list_devices, DataParallel()  see the devices of all workers

They ask the `DistributionOwner`, if there is one. The script sees a single process that
has all devices: Keras itself would divide the data once more otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import keras

from kerasdist._tf.patching import Original

# The name under which Keras keeps the distribution, for each thread.
_ATTRIBUTE = "distribution"


class DistributionOwner(Protocol):
    """The strategies' side of `keras.distribution`."""

    def devices(self, local: list[str]) -> list[str]:
        """Return the names of all workers' devices, from those of this worker."""

    def begin(self, distribution: Any) -> None:
        """Begin the scope of a distribution's strategy; of None: end it.

        Raises:
            ValueError: The distribution can't be used. Nothing has changed.
        """

    def initialize(
        self, addresses: str | None, num_processes: int | None, process_id: int | None
    ) -> None:
        """Take the cluster from the arguments of `keras.distribution.initialize`."""


# The owner in this process, whom the hooks ask; None if there is none.
owner: DistributionOwner | None = None


def set_global_attribute(original: Original, name: str, value: Any) -> Any:
    """Replace Keras's function of that name: a distribution begins a scope.

    All that sets a distribution calls it, also functions that a script has imported by
    name before this hook was installed.

    Raises:
        ValueError: See `DistributionOwner.begin`.
    """
    if name == _ATTRIBUTE and owner is not None:
        owner.begin(value)
    return original(name, value)


def list_devices(
    original: Callable[..., list[str]], device_type: str | None
) -> list[str]:
    """Replace `list_devices`: those of all workers, as in Keras on JAX."""
    local = original(device_type)
    return local if owner is None else owner.devices(local)


# Added to the TensorFlow backend, which doesn't have them.


def get_device_count(device_type: str | None = None) -> int:
    """Count the devices of `list_devices`."""
    return len(keras.distribution.list_devices(device_type))


def initialize(
    job_addresses: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Take the cluster from the arguments.

    Raises:
        ClusterError: They are no cluster.
        RuntimeError: The workers are connected already.
    """
    if owner is not None:
        owner.initialize(job_addresses, num_processes, process_id)


def num_processes() -> int:
    """Return 1: the strategy divides the data, and Keras doesn't."""
    return 1


def process_id() -> int:
    """Return 0, see `num_processes`."""
    return 0


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Return the tensor: all of it is on each device.

    Raises:
        ValueError: Its layout divides it along an axis other than that of the batch.
    """
    mesh = getattr(layout, "device_mesh", None)
    if mesh is None:
        return tensor
    batch = getattr(keras.distribution.distribution(), "batch_dim_name", None)
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    divided = [
        axis for axis in layout.axes if axis not in (None, batch) and sizes[axis] > 1
    ]
    if divided:
        raise ValueError(
            "On TensorFlow a tensor can't be divided among the devices of a mesh. "
            f"Received: layout={layout!r}, which divides along {divided}. Expected "
            "axes of the mesh of size 1, or None. Leave the layout out of the "
            "`LayoutMap`; to spread a model over devices use "
            "`kerasdist.ModelParallelStrategy`."
        )
    return tensor
