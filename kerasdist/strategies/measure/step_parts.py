"""The parts of one step, from its clocks and the communicator's spans."""

from __future__ import annotations

from kerasdist.collectives.ops import Array
from kerasdist.strategies.measure.communication import Work
from kerasdist.strategies.measure.counters import (
    BEGIN,
    END,
    GRADIENTS,
    MEASURED,
    READY,
    REDUCED,
    UPDATES,
)


def parts_of_a_step(
    sums: Array, spans: Work, *, inside: float | None, met: float, in_turn: bool
) -> dict[str, float]:
    """Return the times and bytes of one step, on average, by the names of `StepTimes`.

    Args:
        sums: The sums of the measured steps, see `measure.counters`; at least one step.
        spans: The communication in them.
        inside: Seconds inside of their calls, if those are several steps each.
        met: Seconds in them of waiting for other workers before a step began.
        in_turn: Whether waiting is for other workers, and not for servers at work.

    Returns:
        Seconds and bytes of a step, by the names in `step_times.PARTS`.
    """
    steps = sums[MEASURED]
    begin, ready, end, gradients, reduced = (
        float(sums[slot]) for slot in (BEGIN, READY, END, GRADIENTS, REDUCED)
    )
    running, exchange = end - ready, max(reduced - gradients, 0.0)
    # Where the next batch is fetched within an execution, the fetch's end counts.
    waiting = (ready - begin if inside is None else inside - running) - met
    if sums[UPDATES] == steps:
        compute, update = gradients - ready, end - reduced
    else:
        # With several optimizers in one step, or none, the rest can't be divided.
        compute, update = running - exchange, 0.0
    servers = min(spans.seconds("push_pull"), update or running)
    if update:
        update -= servers
    else:
        compute -= servers
    exchange += servers
    packing = spans.share("pack") * exchange
    late = min(spans.late, exchange - packing) if in_turn else 0.0
    found = {
        "input": max(waiting, 0.0),
        "compute": max(compute, 0.0),
        "pack": packing,
        "exchange": exchange - packing,
        "update": max(update, 0.0),
        "late": late,
        "sent": spans.sent,
        "collectives": spans.count,
        "reduced": spans.reduced,
        "communicating": spans.communicating,
    }
    return {name: float(value / steps) for name, value in found.items()}
