"""`kerasdist.plan`: a placement of layers on devices, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.costs.describe import describe
from kerasdist.placement.costs import Run
from kerasdist.placement.plan import Device, Plan, make_plan
from kerasdist.placement.table import parse_bytes

__all__ = ["Limits", "find_devices", "plan"]

Limits = Mapping[str, "int | str"] | Sequence["int | str"] | int | str | None


def plan(
    model_fn: Callable[[], Any],
    devices: Sequence[str] | None = None,
    *,
    batch_size: int,
    optimizer: Any = None,
    micro_batches: int = 1,
    memory_limits: Limits = None,
    rematerialize: bool = False,
    inputs: Any = None,
) -> Plan:
    """Plan which layer goes to which device, and what each device will hold.

    Nothing is trained and no weights are allocated: the model is built from shapes.
    The plan is the division with the fastest slowest device that fits into the memory
    of every device.

        plan = kerasdist.plan(
            build_model, ["GPU:0", "GPU:1"], batch_size=256, optimizer="adam"
        )
        print(plan)
        strategy = kerasdist.ModelParallelStrategy(placement=plan.placement)

    Args:
        model_fn: Returns the model; takes no arguments. It's called once, or twice if
            it calls the model on data.
        devices: Names as in TensorFlow, in the order in which the layers pass through
            them; by default all logical GPUs, or else all logical CPUs. Devices of
            other machines can be planned for if their memory limits are given.
        batch_size: Rows of a batch (of one replica).
        optimizer: A Keras optimizer or its name. By default the one that the model was
            compiled with; without one there are no slots.
        micro_batches: The number of parts into which a batch is divided.
        memory_limits: Bytes for the model on each device, as numbers or like "16GB":
            one for all, a list, or a mapping from device names. By default what the
            device reports: the limit of a logical device, a GPU's memory, or for each
            CPU device an equal part of the machine's memory (or of its control group's
            limit, if that is less).
        rematerialize: Whether activations are recomputed in the backward pass.
        inputs: The inputs of the model, if it doesn't define them itself (a
            subclassed model that isn't built): shapes without the batch or
            `keras.Input`s, in the structure of `call`'s argument.

    Returns:
        The plan: `placement` (from layer path to device), `layers`, `devices`, `fits`;
        `str(plan)` is a table of the layers and one of the devices.

    Raises:
        ValueError: An argument is wrong, or the model can't be built from shapes.
        PlanError: Nothing fits. The message has the figures, and what would fit.
    """
    run = Run(
        batch_size=batch_size,
        micro_batches=micro_batches,
        rematerialize=bool(rematerialize),
    )
    found = find_devices(devices, memory_limits)
    # At least 2 rows: a single row could be mistaken for a dimension to broadcast.
    model = describe(model_fn, max(2, run.part_rows), optimizer, inputs)
    return make_plan(model, run, found)


def find_devices(
    names: Sequence[str] | None = None, memory_limits: Limits = None
) -> tuple[Device, ...]:
    """Return devices with their memory.

    Args:
        names: See `plan`.
        memory_limits: See `plan`.

    Raises:
        ValueError: A device doesn't exist and its memory isn't given, or a limit is
            wrong.
    """
    if isinstance(names, str):
        raise ValueError(
            f"`devices` must be a list of names. Received: devices={names!r}; expected "
            f"for instance [{names!r}]."
        )
    here = [_short(device.name) for device in tf.config.list_logical_devices()]
    if names is None:
        shown = [n for n in here if n.startswith("GPU:")] or [
            n for n in here if n.startswith("CPU:")
        ]
    else:
        shown = [_short(name) for name in names]
    if not shown:
        raise ValueError(
            "A plan needs a device. Received: devices=[]; expected names like 'GPU:0'."
        )
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
    reported = _reported(shown) if set(shown) - set(given) else {}
    return tuple(
        Device(name=n, memory_limit=given[n], found="as given")
        if n in given
        else Device(name=n, memory_limit=reported[n][0], found=reported[n][1])
        for n in shown
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


def _given(names: Sequence[str], limits: Limits) -> dict[str, int]:
    """Return the limits that the caller gave, by device."""
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
    return {name: _bytes(limit) for name, limit in found.items()}


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
