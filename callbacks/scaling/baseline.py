"""The baseline of scaling: the examples per second of one worker."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from kerasdist.callbacks.scaling.bottleneck import in_seconds
from kerasdist.collectives import Communicator
from kerasdist.strategies.calibration import Alone, measure_alone
from kerasdist.strategies.measure.step_times import StepTimes


class Baseline:
    """The baseline of one `fit`: given, or measured in it.

    Args:
        given: Examples per second, or None.
        calibrate: Whether to measure it.

    Attributes:
        missing: Whether it's still to be measured.
    """

    def __init__(self, given: float | None, calibrate: bool) -> None:
        self._given = given
        self._calibrate = calibrate
        self._alone: Alone | None = None
        self.missing = calibrate

    @staticmethod
    def faults(given: Any, calibrate: Any) -> list[str]:
        """Return the faults of a user's arguments."""
        found = []
        if given is not None and not (
            isinstance(given, Real)
            and not isinstance(given, bool)
            and 0 < float(given) < math.inf
        ):
            found.append(
                "`baseline` must be a positive number of examples per second. "
                f"Received: baseline={given!r}."
            )
        if not isinstance(calibrate, bool):
            found.append(
                f"`calibrate` must be True or False. Received: calibrate={calibrate!r}."
            )
        elif given is not None and calibrate:
            found.append(
                "`baseline` is given, or measured with `calibrate`, but not both. "
                f"Received: baseline={given!r}, calibrate={calibrate!r}."
            )
        return found

    def agree(self, communicator: Communicator) -> None:
        """Take over from the chief whether it's missing: others may have joined later.

        All workers call it; all of them were given `calibrate`.
        """
        if self._calibrate:
            (missing,) = communicator.broadcast([np.int64(self.missing)])
            self.missing = bool(missing)

    def state(self) -> list[Any]:
        """Return, as JSON, whether it's missing, and what was measured."""
        alone = self._alone
        return [self.missing, None if alone is None else dataclasses.asdict(alone)]

    def adopt(self, state: list[Any]) -> None:
        """Take over another worker's state."""
        self.missing, alone = state
        self._alone = None if alone is None else Alone(**alone)

    def measure(self, model: Any) -> str:
        """Measure it; all workers call it, in a `fit` that has taken a measured step.

        Returns:
            The result, in words.
        """
        self.missing = False
        found = measure_alone(model)
        if isinstance(found, str):
            return (
                f"The speed of one worker can't be measured here ({found}): give "
                "`baseline=`."
            )
        self._alone = found
        unit = "worker alone" if found.worker else "device with the whole model"
        return (
            f"One {unit} takes {in_seconds(found.seconds)} for a step on "
            f"{found.rows:,} samples, all zeros."
        )

    def speed(self, times: Sequence[StepTimes]) -> float | None:
        """Return the examples per second of one worker; None if they aren't known.

        Args:
            times: The measurements of all workers. The time between two steps is added
                to the baseline: one worker would need it, too.
        """
        steps = sum(one.steps for one in times)
        if self._alone is None or not steps:
            return self._given
        outside = sum(one.outside for one in times) / steps
        return self._alone.rows / (self._alone.seconds + outside)
