"""A view of a job: its model's strategy and optimizer, as the callback reads them."""

from __future__ import annotations

from typing import Any

import keras

from kerasdist._keras.optimizer.global_step import steps_of
from kerasdist._keras.optimizer.learning_rate import leaves_of
from kerasdist._keras.protocols import dynamic_hooks, hooks_of, stage_clock_of, timer_of
from kerasdist.collectives import Communicator
from kerasdist.strategies.measure.stages import StageTimes
from kerasdist.strategies.parameter_server import ParameterServerStrategy

# Reads that are staler are counted as this.
_STALEST = 63


class JobView:
    """One model's job, as this worker sees it.

    Args:
        model: Compiled, with a strategy of kerasdist.

    Attributes:
        clock: Measures this worker's steps, see `strategies.measure.step_clock`.
        communicator: Between the workers.
        in_step: Whether all workers take each step together.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._strategy = model.distribute_strategy
        clock: Any = timer_of(self._strategy)
        self.clock = clock
        self.communicator: Communicator = clock.communicator
        self.in_step = dynamic_hooks(self._strategy) is None
        self._stage_clock = stage_clock_of(self._strategy)
        self._is_one_model = hooks_of(self._strategy) is None
        self._reads: dict[int, int] = {}

    @staticmethod
    def is_measured(model: Any) -> bool:
        """Return whether a model's strategy is one of kerasdist's."""
        return timer_of(model.distribute_strategy) is not None

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes the files."""
        return bool(self.clock.rank == 0)

    @property
    def steps_per_call(self) -> int:
        """The number of steps in one execution of a graph."""
        return int(self._model.steps_per_execution)

    @property
    def devices(self) -> int:
        """The number of devices that hold a single worker's model."""
        return len(self._strategy.devices) if self._is_one_model else 1

    def between_devices(self) -> float:
        """Return the bytes that a single worker's step moves between devices."""
        if self.devices == 1:
            return 0.0
        steps = self._strategy.placement_report().steps
        return float((steps["train"].bytes_moved if "train" in steps else 0) or 0)

    def take_stages(self) -> StageTimes | None:
        """Return the times of this worker's stages since the last call."""
        return None if self._stage_clock is None else self._stage_clock.take()

    def take_reads(self) -> list[float]:
        """Return this worker's reads of weights since the last call.

        Returns:
            64 counts of reads, by the number of steps that they lagged; the last one
            includes all that lagged more. Empty where reads aren't counted.
        """
        has_servers = isinstance(self._strategy, ParameterServerStrategy)
        now = self._strategy.staleness if has_servers else {}
        before, self._reads = self._reads, dict(now)
        counts = [0.0] * (_STALEST + 1)
        for lag, count in self._reads.items():
            counts[min(lag, _STALEST)] += count - before.get(lag, 0)
        return counts if now else []

    def happened(self) -> list[Any]:
        """Return the strategy's events: workers lost, and the like."""
        if not isinstance(self._strategy, ParameterServerStrategy):
            return []
        return list(self._strategy.events)

    def steps_taken(self) -> int:
        """Return the optimizer's steps, of all workers: the step of a figure."""
        optimizers = leaves_of(self._model)
        if self.in_step or not optimizers:
            return int(self._model.optimizer.iterations)
        return int(steps_of(optimizers[0]))

    def rate(self) -> float | None:
        """Return the learning rate; None if there's no single one."""
        try:
            rate = self._model.optimizer.learning_rate
            return float(keras.ops.convert_to_numpy(rate))
        except (AttributeError, TypeError, ValueError):
            return None
