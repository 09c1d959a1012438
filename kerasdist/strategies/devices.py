"""Devices by the names that users write."""

from __future__ import annotations

from collections.abc import Sequence

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
    known = [device.name for device in tf.config.list_logical_devices()]
    if devices is None:
        gpus = [name for name in known if ":GPU:" in name]
        devices = gpus or ["CPU:0"]
    if isinstance(devices, str) or not devices:
        raise ValueError(
            "`devices` must be a list of device names, at least one. "
            f"Received: devices={devices!r}. For one device write ['CPU:0']."
        )
    short = {name.split("/device:")[-1] for name in known}
    faults, names = [], []
    for device in devices:
        try:
            name = _tf.canonical_device(device)
        except (ValueError, TypeError, AttributeError):
            faults.append(f"{device!r} isn't a device name")
            continue
        if name.split("/device:")[-1] not in short:
            faults.append(f"{device!r} doesn't exist")
        elif name in names:
            faults.append(f"{device!r} is given twice")
        names.append(name)
    if faults:
        raise ValueError(
            f"`devices` can't be used: {'; '.join(faults)}. "
            f"Received: devices={list(devices)!r}; this worker has {sorted(short)}. "
            "Several devices can be made of one CPU with "
            "`tf.config.set_logical_device_configuration` before anything else runs."
        )
    return names


def known_devices() -> list[str]:
    """Full names of all devices that this process can use, others' among them."""
    return [device.name for device in tf.config.list_logical_devices()]


def resolve_devices(devices: Sequence[str], argument: str) -> list[str]:
    """Return the canonical name of each device; names may occur several times.

    Args:
        devices: Names as TensorFlow writes them.
        argument: What they were given as, for messages.

    Raises:
        ValueError: Some don't exist; all of them are named.
    """
    known = [_tf.canonical_device(name) for name in known_devices()]
    faults, names = [], []
    for device in devices:
        try:
            name = _tf.canonical_device(device)
        except (ValueError, TypeError, AttributeError):
            faults.append(f"{device!r} isn't a device name")
            continue
        if name not in known:
            faults.append(f"{device!r} doesn't exist")
        names.append(name)
    if faults:
        raise ValueError(
            f"`{argument}` can't be used: {'; '.join(dict.fromkeys(faults))}. "
            f"Received: {argument}={list(devices)!r}; there are {known}. "
            "Several devices can be made of one CPU with "
            "`tf.config.set_logical_device_configuration` before anything else runs."
        )
    return names
