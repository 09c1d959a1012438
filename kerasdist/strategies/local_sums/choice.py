"""The choice of where replicas and workers add their gradients, and what is said of it.

one worker, several GPUs       on the GPUs, by NCCL
several workers                each worker's GPUs by NCCL, then through host memory
several workers, "native"      over all GPUs, by NCCL
devices of the CPU             in host memory, where they are anyway
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import tensorflow as tf

_LOG = logging.getLogger("kerasdist")
_CHOICES = ("auto", "device", "host")
_NATIVE = (
    " transport='native' lets NCCL transfer them between GPUs; neither the job's "
    "secret nor TLS protects NCCL and TensorFlow's servers, which "
    "KERASDIST_ALLOW_OPEN_SERVERS=1 accepts."
)


def check_reduction(option: str) -> None:
    """Check the argument `local_reduction`.

    Raises:
        ValueError: It's another one.
    """
    if option not in _CHOICES:
        raise ValueError(
            "`local_reduction` must be 'auto', 'device' or 'host'. Received: "
            f"local_reduction={option!r}."
        )


def sums_on_devices(option: str, devices: Sequence[str]) -> bool:
    """Return whether a worker's replicas are added on their devices.

    Args:
        option: The argument `local_reduction`.
        devices: Canonical names of the worker's devices, one per replica.

    Raises:
        ValueError: The devices are of two kinds, which can't be added on them.
    """
    kinds = {name.rpartition(":")[0] for name in devices}
    if len(devices) == 1 or option == "host":
        return False
    if option == "auto":
        return len(kinds) == 1 and _are_gpus(devices)
    if len(kinds) > 1:
        raise ValueError(
            "Gradients can be added on devices of one kind only. Received: "
            f"local_reduction='device' with devices={list(devices)}. Use 'host', or "
            "GPUs alone."
        )
    return True


def communication_hint(device: str) -> str:
    """Return the implementation of TensorFlow's collectives for a kind of device.

    NCCL needs a physical GPU for each device; parts of one use TensorFlow's ring.
    """
    if ":GPU:" not in device:
        return "ring"
    physical = tf.config.list_physical_devices("GPU")
    logical = [d for d in tf.config.list_logical_devices("GPU") if _is_here(d.name)]
    return "ring" if len(physical) < len(logical) else "nccl"


def report(
    devices: Sequence[str],
    *,
    size: int,
    asked: str,
    transport: str,
    on_devices: bool,
    has_nccl: bool = True,
) -> None:
    """Log how gradients of GPUs are added. Nothing is logged for CPUs.

    Args:
        devices: Canonical names of this worker's devices.
        size: The number of workers.
        asked: The transport that the user has asked for.
        transport: The one between the workers; "none" for one worker.
        on_devices: Whether the worker's replicas are added on their devices.
        has_nccl: Whether transport="native" would be possible.
    """
    if not _are_gpus(devices) or transport == "native":
        return
    if size > 1 and asked == "auto":
        advice = _NATIVE if has_nccl else ""
        _LOG.warning(
            "kerasdist: the GPUs of %d workers exchange gradients through host memory "
            "(transport=%r, chosen by 'auto').%s Pass transport=%r to keep host memory "
            "without this warning.",
            size,
            transport,
            advice,
            transport,
        )
    if len(devices) == 1:
        return
    if on_devices:
        way = (
            "NCCL" if communication_hint(devices[0]) == "nccl" else "TensorFlow's ring"
        )
        _LOG.info(
            "kerasdist: %d GPUs of this worker add dense gradients by %s; those of "
            "embeddings (IndexedSlices) pass through host memory",
            len(devices),
            way,
        )
    else:
        _LOG.warning(
            "kerasdist: %d GPUs of this worker add gradients in host memory. Expected "
            "a RingStrategy that isn't elastic, with local_reduction='auto' and GPUs "
            "alone, to add them by NCCL.",
            len(devices),
        )


def report_servers(devices: Sequence[str]) -> None:
    """Log that the gradients of GPUs pass through host memory on the way to servers."""
    if _are_gpus(devices):
        _LOG.info(
            "kerasdist: parameter servers hold the weights in host memory: the "
            "gradients of GPUs pass through it"
        )


def _are_gpus(devices: Sequence[str]) -> bool:
    return all(":GPU:" in name for name in devices)


def _is_here(name: str) -> bool:
    job = tf.DeviceSpec.from_string(name)
    mine = tf.DeviceSpec.from_string(tf.config.list_logical_devices("CPU")[0].name)
    return (job.job, job.task) == (mine.job, mine.task)
