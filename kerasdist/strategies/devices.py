"""Devices by the names that users write, and their memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist.placement.plan import Device, parse_bytes

Limits = Mapping[str, "int | str"] | Sequence["int | str"] | int | str | None


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
    check_list(devices)
    here = sorted({_local(name) for name in known})
    names, faults = _canonical(devices, lambda name: _local(name) in here)
    given: set[str] = set()
    for device, name in zip(devices, names, strict=True):
        if name in given and _local(name) in here:
            faults.append(f"{device!r} is given twice")
        given.add(name)
    _refuse(faults, "devices", devices, f"this worker has {here}")
    return [name for name in names if name]


def check_list(devices: Sequence[str]) -> None:
    """Check that `devices` is a list.

    Raises:
        ValueError: It's one name, or empty.
    """
    if isinstance(devices, str) or not devices:
        raise ValueError(
            "`devices` must be a list of device names, at least one. "
            f"Received: devices={devices!r}. For one device write ['CPU:0']."
        )


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


def _local(name: str) -> str:
    """Return the part of a full name that all workers' devices share."""
    return name.split("/device:")[-1]


# Devices with their memory, for a plan.


def find_devices(
    names: Sequence[str] | None = None, memory_limits: Limits = None
) -> tuple[Device, ...]:
    """Return devices with their memory.

    Args:
        names: See `kerasdist.plan`.
        memory_limits: See `kerasdist.plan`.

    Raises:
        ValueError: A device doesn't exist and its memory isn't given, or a limit is
            wrong.
    """
    here = [_short(name) for name in known_devices()]
    if names is None:
        gpus = [name for name in here if name.startswith("GPU:")]
        shown = gpus or [name for name in here if name.startswith("CPU:")]
    else:
        check_list(names)
        shown = [_short(name) for name in names]
    if len(set(shown)) < len(shown):
        raise ValueError(
            f"`devices` must be different ones. Received: devices={list(names or ())}."
        )
    given = _given(shown, memory_limits)
    unknown = [n for n in shown if n not in here and n not in given]
    if unknown:
        raise ValueError(
            f"There is no device {', '.join(unknown)} here. Received: devices="
            f"{list(names or ())}; expected some of {here}, or `memory_limits=` for "
            "devices of another machine."
        )
    memory = given if set(shown) <= set(given) else {**_reported(shown), **given}
    return tuple(
        Device(name=n, memory_limit=memory[n][0], found=memory[n][1]) for n in shown
    )


def _short(name: str) -> str:
    """Return a short name, such as "GPU:0" for "/device:GPU:0"; with its job, if any.

    Raises:
        ValueError: It isn't a device's name.
    """
    try:
        found = tf.DeviceSpec.from_string(name)
    except (ValueError, AttributeError):
        found = tf.DeviceSpec()
    if found.device_index is None:
        raise ValueError(
            f"A device must be named as in TensorFlow. Received: {name!r}; expected "
            "for instance 'GPU:0' or '/job:worker/task:1/device:GPU:0'."
        )
    short = f"{found.device_type}:{found.device_index}"
    if found.job in (None, "localhost"):
        return short
    return f"/job:{found.job}/task:{found.task or 0}/device:{short}"


def _given(names: Sequence[str], limits: Limits) -> dict[str, tuple[int, str]]:
    """Return the limits that the caller gave, by device, as `_reported`."""
    if limits is None:
        return {}
    if isinstance(limits, Mapping):
        found = {_short(name): limit for name, limit in limits.items()}
        if strange := sorted(set(found) - set(names)):
            raise ValueError(
                f"`memory_limits` names devices that aren't planned for: {strange}. "
                f"Received: memory_limits={limits!r}; expected some of {list(names)}."
            )
    elif isinstance(limits, int | str):
        found = {name: limits for name in names}
    else:
        if len(limits) != len(names):
            raise ValueError(
                "`memory_limits` must be one size for all devices, or one for each. "
                f"Received: {len(limits)} sizes for {len(names)} devices."
            )
        found = dict(zip(names, limits, strict=True))
    return {name: (_bytes(limit), "as given") for name, limit in found.items()}


def _bytes(limit: Any) -> int:
    if isinstance(limit, str):
        return parse_bytes(limit)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(
            "A memory limit must be a number of bytes above 0, or a text like '16GB'. "
            f"Received: {limit!r}."
        )
    return limit


def _reported(names: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Return what devices report: bytes, and the source of that number."""
    found = _configured()
    memory = _tf.device_memory()
    cpus = [n for n in names if n.startswith("CPU:") and n not in found]
    machine, where = _machine()
    for name in cpus:
        part = "" if len(cpus) == 1 else f", one of {len(cpus)} equal parts"
        found[name] = machine // len(cpus), f"{where}{part}"
    for name in names:
        if name not in found:
            found[name] = memory.get(name, machine), "what TensorFlow may allocate"
    return found


def _configured() -> dict[str, tuple[int, str]]:
    """Return logical devices whose memory `LogicalDeviceConfiguration` limits."""
    found = {}
    count: dict[str, int] = {}
    for physical in tf.config.list_physical_devices():
        kind = physical.device_type
        parts = tf.config.get_logical_device_configuration(physical) or [None]
        for part in parts:
            index = count.get(kind, 0)
            count[kind] = index + 1
            limit = getattr(part, "memory_limit", None)
            if limit:
                # TensorFlow's limits are in MiB.
                words = "the logical device's memory_limit"
                found[f"{kind}:{index}"] = int(limit * 2**20), words
    return found


def _machine() -> tuple[int, str]:
    """Return the machine's memory, or this process's control group's limit of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):
            continue  # there's no such file, or it contains "max"
        if limit < total:
            return limit, f"the control group's limit ({path})"
    return total, "the machine's memory"
