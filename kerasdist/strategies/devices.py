"""Devices by the names that users write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from kerasdist import _tf

__all__ = ["check_devices", "known_devices", "resolve_devices"]


def check_devices(devices: Sequence[str] | None) -> list[str]:
    """Return the canonical names of this worker's devices.

    Args:
        devices: Names as TensorFlow writes them; None for all GPUs, or the CPU
            where there are none.

    Raises:
        ValueError: A device doesn't exist or is given twice; all faults are named.
    """
    known = known_devices()
    if devices is None:
        gpus = [name for name in known if ":GPU:" in name]
        devices = gpus or ["CPU:0"]
    if isinstance(devices, str) or not devices:
        raise ValueError(
            "`devices` must be a list of device names, at least one. "
            f"Received: devices={devices!r}. For one device write ['CPU:0']."
        )
    here = sorted({_short(name) for name in known})
    names, faults = _canonical(devices, lambda name: _short(name) in here)
    given: set[str] = set()
    for device, name in zip(devices, names, strict=True):
        if name in given and _short(name) in here:
            faults.append(f"{device!r} is given twice")
        given.add(name)
    _refuse(faults, "devices", devices, f"this worker has {here}")
    return [name for name in names if name]


def known_devices() -> list[str]:
    """Return the full names of all devices this process can use, also remote ones."""
    return [device.name for device in tf.config.list_logical_devices()]


def resolve_devices(devices: Sequence[str], argument: str) -> list[str]:
    """Return the canonical name of each device; names may occur several times.

    Args:
        devices: Names as TensorFlow writes them.
        argument: The name of the argument, for messages.

    Raises:
        ValueError: Some don't exist; all of them are named.
    """
    known = [_tf.canonical_device(name) for name in known_devices()]
    names, faults = _canonical(devices, known.__contains__)
    _refuse(faults, argument, devices, f"there are {known}")
    return names


def _canonical(
    devices: Sequence[str], is_there: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    """Return the canonical names, "" for an invalid one, and the faults."""
    names, faults = [], []
    for device in devices:
        try:
            name = _tf.canonical_device(device)
        except (ValueError, TypeError, AttributeError):
            faults.append(f"{device!r} isn't a device name")
            name = ""
        else:
            if not is_there(name):
                faults.append(f"{device!r} doesn't exist")
        names.append(name)
    return names, faults


def _refuse(
    faults: Sequence[str], argument: str, devices: Sequence[str], there: str
) -> None:
    if not faults:
        return
    raise ValueError(
        f"`{argument}` can't be used: {'; '.join(dict.fromkeys(faults))}. "
        f"Received: {argument}={list(devices)!r}; {there}. "
        "Several devices can be made of one CPU with "
        "`tf.config.set_logical_device_configuration` before anything else runs."
    )


def _short(name: str) -> str:
    return name.split("/device:")[-1]
