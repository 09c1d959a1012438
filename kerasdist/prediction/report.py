"""Predictions as a table, as JSON, and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kerasdist.placement.plan import counted
from kerasdist.prediction.profile import Profile
from kerasdist.prediction.simulation import Prediction, Setup
from kerasdist.transport.framing import from_plain, to_object

# What was reported of a real system of this size, in single precision (Kurth et al.,
# "Exascale deep learning for climate analytics", SC 2018): another model and network.
_SUMMIT = (27_360, "Reported for 27,360 GPUs of Summit (Kurth et al., 2018): 90.7 %.")


def epoch_of(
    profile: Profile, workers: int, found: Prediction, price: float | None
) -> tuple[float, float | None]:
    """Return an epoch's seconds and, with a worker's price per hour, its cost.

    An epoch has the samples of the measured one; seconds are 0 if these aren't known.
    """
    seconds = profile.steps * profile.rows / found.examples_per_s
    return seconds, None if price is None else workers * price * seconds / 3600


def to_json(
    profile: Profile, predictions: Mapping[int, Prediction], price: float | None
) -> dict[str, Any]:
    """Return what `kerasdist predict --json` prints of predictions, by workers."""
    found: dict[str, Any] = {}
    for workers, prediction in predictions.items():
        seconds, cost = epoch_of(profile, workers, prediction, price)
        each = dataclasses.asdict(prediction) | {"epoch_s": seconds or None}
        found[str(workers)] = each | ({} if cost is None else {"epoch_cost": cost})
    return {"workers": found, "profile": to_object(profile)}


def from_json(value: Any) -> dict[int, Prediction]:
    """Return the predictions in what `to_json` has returned, by workers.

    Raises:
        ValueError: There are none.
    """
    try:
        found: dict[int, Prediction] = from_plain(
            value["workers"], dict[int, Prediction]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"there are no predictions in it: {error!r}") from None
    return found


def to_text(
    profile: Profile,
    setup: Setup,
    predictions: Mapping[int, Prediction],
    price: float | None,
) -> str:
    """Return the table for a terminal."""
    heads = ["workers", "ms per step", "from - to", "examples/s", "efficiency", "limit"]
    if profile.steps:
        heads.append("s per epoch")
        heads += [] if price is None else ["cost"]
    rows = [heads]
    for workers, found in predictions.items():
        row = [
            f"{workers:,}",
            f"{found.step_s * 1e3:.4g}",
            f"{found.low * 1e3:.4g} - {found.high * 1e3:.4g}",
            f"{found.examples_per_s:,.0f}",
            f"{found.efficiency:.1%}",
            found.limit,
        ]
        seconds, cost = epoch_of(profile, workers, found, price)
        if profile.steps:
            row.append(f"{seconds:.4g}")
            row += [] if cost is None else [f"{cost:.4g}"]
        rows.append(row)
    lines = [
        "kerasdist: simulated steps of this job",
        f"  each worker takes {counted(round(profile.rows), 'row')} per step: the "
        "global batch grows with the workers",
        f"  {setup.strategy}, {counted(setup.per_host, 'worker')} per host, link: "
        f"{setup.link.latency * 1e6:.0f} us + {setup.link.byte * 1e9:.3g} ns per byte",
    ]
    lines += aligned(rows)
    if _SUMMIT[0] in predictions:
        lines.append(f"  {_SUMMIT[1]}")
    return "\n".join(lines)


def aligned(rows: list[list[str]]) -> list[str]:
    """Return a table's rows as lines of a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(cells))
    return lines


def draw(path: Path, predictions: Mapping[int, Prediction]) -> None:
    """Draw examples per second and seconds of a step by the number of workers.

    Args:
        path: The file, of a type that matplotlib writes, as .svg.
        predictions: By number of workers.

    Raises:
        ImportError: matplotlib isn't installed.
        OSError, ValueError: The file can't be written, or its type isn't known.
    """
    from matplotlib.figure import Figure

    counts = sorted(predictions)
    found = [predictions[count] for count in counts]
    figure = Figure((9, 4), layout="constrained")
    speed, step = figure.subplots(1, 2)
    ideal = [each.examples_per_s / each.efficiency for each in found]
    speed.plot(counts, ideal, "--", label="no network, no waiting")
    speed.plot(counts, [each.examples_per_s for each in found], "o-", label="simulated")
    speed.set_ylabel("examples/s")
    step.plot(counts, [each.step_s * 1e3 for each in found], "o-", label="simulated")
    low, high = zip(*((each.low * 1e3, each.high * 1e3) for each in found), strict=True)
    step.fill_between(counts, low, high, alpha=0.2)
    step.set_ylabel("ms per step")
    step.set_ylim(bottom=0)
    for axes in (speed, step):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("workers")
        axes.grid(alpha=0.3)
        axes.legend()
    speed.set_yscale("log", base=2)
    figure.savefig(path)
