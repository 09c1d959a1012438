"""`kerasdist.plan`: a placement of layers on devices, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kerasdist._keras.costs.describe import describe
from kerasdist.placement.partition import Run
from kerasdist.placement.plan import Plan, make_plan
from kerasdist.strategies.devices import Limits, find_devices


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
