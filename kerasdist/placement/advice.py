"""Advice for a model that doesn't fit: changes that were found to make it fit.

Each search changes one setting and leaves the others as given: the number of devices,
the batch size, the number of micro-batches, rematerialization, the order of the
devices. Where one alone isn't enough, two together are tried.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence

from kerasdist.placement.costs import ModelCost, Run
from kerasdist.placement.partition import StageCosts

# Numbers, bytes and operations as text, and sizes that users write.

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def counted(number: int, noun: str) -> str:
    """Return a number of things as text, for instance `1 worker` or `2 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def human_bytes(count: float) -> str:
    """Return bytes as text, for instance `1.5 GB`; 1 KB is 1,000 bytes."""
    return "not limited" if math.isinf(count) else f"{_scaled(count)}B"


def human_flops(count: float) -> str:
    """Return operations as text, for instance `1.5 G`."""
    return _scaled(count).rstrip()


def _scaled(count: float) -> str:
    for unit, size in reversed(_UNITS.items()):
        # A number that would be rounded up to a thousand is one of the next unit.
        if unit and count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} "


def parse_bytes(text: str) -> int:
    """Return the bytes that a text like `16GB`, `512 MiB` or `1e9` means.

    Raises:
        ValueError: It's none.
    """
    match = re.fullmatch(
        r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE
    )
    try:
        if match is None:
            raise ValueError
        number, unit, binary = match.groups()
        power = "KMGT".index(unit.upper()) + 1 if unit else 0
        if binary and not power:
            raise ValueError
        size = float(number) * (1024 if binary else 1000) ** power
        if not 1 <= size < 2**63:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"A size must be a number of bytes. Received: {text!r}; expected for "
            "instance '16GB', '512MiB' or '1e9'."
        ) from None
    return int(size)


_MOST_DEVICES = 64
# Orders of devices are tried as long as there are few.
_MOST_ORDERED = 5


def advise(model: ModelCost, run: Run, limits: Sequence[float]) -> tuple[str, ...]:
    """Return the changes that would make a model fit.

    Args:
        model: The model.
        run: How it is to be trained.
        limits: Bytes of each device, in order.

    Returns:
        One sentence for each change that helps, without full stops; empty if none does.
    """
    found: list[str] = []
    if order := _order(model, run, limits):
        found.append(order)
    if devices := _devices(model, run, limits):
        found.append(devices)
    found += _runs(model, run, limits)
    if not found:
        found += _together(model, run, limits)
    found += _too_large(model, limits)
    return tuple(found)


def in_lines(found: Sequence[str]) -> str:
    """Return advice as it is printed, one line each."""
    if not found:
        return (
            f"  - nothing that was tried: up to {_MOST_DEVICES} devices, a batch of "
            "one row, as many micro-batches as rows, rematerialization"
        )
    return "\n".join(f"  - {line}" for line in found)


def run_in_words(run: Run) -> str:
    """Return a run as text, for instance `batch_size=64, micro_batches=4`."""
    text = f"batch_size={run.batch_size}, micro_batches={run.micro_batches}"
    return f"{text}, rematerialize=True" if run.rematerialize else text


def _fits(model: ModelCost, run: Run, limits: Sequence[float]) -> bool:
    return StageCosts(model, run).best(limits) is not None


def _order(model: ModelCost, run: Run, limits: Sequence[float]) -> str | None:
    if len(set(limits)) < 2 or len(limits) > _MOST_ORDERED:
        return None
    costs = StageCosts(model, run)
    for order in itertools.permutations(limits):
        if costs.best(order) is not None:
            shown = ", ".join(map(human_bytes, order))
            return f"the devices in another order, with {shown}"
    return None


def _devices(model: ModelCost, run: Run, limits: Sequence[float]) -> str | None:
    costs = StageCosts(model, run)
    largest = max(limits)

    def enough(count: int) -> bool:
        more = [largest] * (count - len(limits))
        return costs.best([*limits, *more]) is not None

    count = _least(enough, len(limits) + 1, _MOST_DEVICES)
    if count is None:
        return None
    more = count - len(limits)
    what = "device" if more == 1 else "devices"
    return f"{more} more {what} with {human_bytes(largest)} ({count} in all)"


def _runs(model: ModelCost, run: Run, limits: Sequence[float]) -> list[str]:
    found = []
    if rows := _batch(model, run, limits):
        found.append(f"a smaller batch: batch_size={rows} (at most)")
    if parts := _parts(model, run, limits):
        found.append(f"more micro-batches: micro_batches={parts} (at least)")
    if not run.rematerialize:
        again = dataclasses.replace(run, rematerialize=True)
        if _fits(model, again, limits):
            found.append("rematerialize=True")
        elif parts := _parts(model, again, limits):
            found.append(f"rematerialize=True with micro_batches={parts} (at least)")
    return found


def _together(model: ModelCost, run: Run, limits: Sequence[float]) -> list[str]:
    """Return a smaller batch with everything else that saves memory."""
    count = len(limits)
    while count <= _MOST_DEVICES:
        more = [*limits, *[max(limits)] * (count - len(limits))]
        best = dataclasses.replace(run, rematerialize=True)
        if rows := _batch(model, best, more):
            where = f"{count} devices, " if count > len(limits) else ""
            return [f"{where}rematerialize=True and batch_size={rows} (at most)"]
        count *= 2
    return []


def _too_large(model: ModelCost, limits: Sequence[float]) -> list[str]:
    """Return advice about layers that no device of this size can hold."""
    found = []
    for layer in model.layers:
        needed = layer.parameter_bytes + layer.slot_bytes + layer.gradient_bytes
        if needed > max(limits):
            found.append(
                f"nothing while layer {layer.path!r} is whole: its weights, gradients "
                f"and slots alone are {human_bytes(needed)}, the largest device has "
                f"{human_bytes(max(limits))}. Divide it over several devices "
                "(`kerasdist.layers.ShardedDense`, `ShardedEmbedding`)"
            )
    return found


def _batch(model: ModelCost, run: Run, limits: Sequence[float]) -> int | None:
    """Return the largest smaller batch that fits."""
    rows = _least(
        lambda less: _fits(
            model, dataclasses.replace(run, batch_size=run.batch_size - less), limits
        ),
        1,
        run.batch_size - 1,
    )
    return None if rows is None else run.batch_size - rows


def _parts(model: ModelCost, run: Run, limits: Sequence[float]) -> int | None:
    """Return the smallest larger number of micro-batches that fits."""
    return _least(
        lambda parts: _fits(
            model, dataclasses.replace(run, micro_batches=parts), limits
        ),
        run.micro_batches + 1,
        run.batch_size,
    )


def _least(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the least number that is enough, by bisection; None if there's none."""
    if low > high or not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low
