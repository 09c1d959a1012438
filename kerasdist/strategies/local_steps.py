"""Local steps: workers train by themselves, and average their weights now and then.

    worker 0   step step step step ─┐          ┌─ step step step step ─┐
    worker 1   step step step step ─┼─ average ┼─ step step step step ─┼─ average ...
    worker 2   step step step step ─┘          └─ step step step step ─┘

With plain averages it is local SGD (Stich, ICLR 2019), with an outer optimizer DiLoCo
(Douillard et al., 2023): the mean change of the weights is the gradient of that one.
Each worker counts by the rows that it has trained on since the last average.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist.strategies.options import Options, StrategyJob, check_positive
from kerasdist.strategies.reduce.consensus import Consensus
from kerasdist.strategies.reduce.initial_state import share_state
from kerasdist.strategies.reduce.workers import Workers
from kerasdist.strategies.sync.extended import SynchronousExtended

# Of DiLoCo's outer optimizer.
_RATE, _MOMENTUM = 0.7, 0.9


class LocalSteps:
    """The interval between averages of all workers' weights, and their use.

    Args:
        steps: Steps of training between two averages.
        outer: The optimizer whose gradient is the mean change of the weights since the
            last average: None: the average is taken as it is; "nesterov": DiLoCo's, SGD
            with a rate of 0.7 and Nesterov's momentum of 0.9; or a
            `keras.optimizers.SGD` with a constant rate.

    Raises:
        ValueError: An argument is wrong.
    """

    def __init__(self, steps: int, outer: Any = None) -> None:
        must = "The number of local steps must be a positive integer"
        check_positive(must, "steps", steps)
        if outer == "nesterov":
            outer = keras.optimizers.SGD(_RATE, momentum=_MOMENTUM, nesterov=True)
        if outer is not None and (
            type(outer) is not keras.optimizers.SGD
            or not isinstance(outer.get_config()["learning_rate"], float)
        ):
            raise ValueError(
                "The outer optimizer must be None, 'nesterov', or a "
                "`keras.optimizers.SGD` with a constant learning rate. Received: "
                f"outer={outer!r}."
            )
        self.steps = steps
        self.outer = outer

    @property
    def _takes_average(self) -> bool:
        """Whether the average is taken as it is."""
        outer = self.outer
        if outer is None:
            return True
        return float(outer.learning_rate) == 1.0 and not outer.momentum

    def __repr__(self) -> str:
        more = "" if self.outer is None else f", outer={self.outer!r}"
        return f"LocalSteps({self.steps}{more})"


def local_steps_of(given: object) -> LocalSteps | None:
    """Return what the argument `local_steps` of a strategy stands for.

    Args:
        given: A number of steps, `LocalSteps`, or None.

    Raises:
        ValueError: It is something else.
    """
    if given is None or isinstance(given, LocalSteps):
        return given
    if isinstance(given, int):
        return LocalSteps(given)
    raise ValueError(
        "`local_steps` must be a number of steps, `kerasdist.LocalSteps(...)`, or "
        f"None. Received: local_steps={given!r}."
    )


class LocalWorkers(Workers):
    """See `Workers`; in a step of training each worker is alone."""

    _stepping = False

    @property
    def acts_alone(self) -> bool:
        """See `Workers.acts_alone`."""
        return self._stepping or self.excluding

    def current_replica(self) -> int:
        """See `Workers.current_replica`; each replica has its own also in a step."""
        first = sum(self.job.replicas[: self.communicator.rank])
        return first + _tf.local_replica_id()

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Run or trace a step of this worker alone in the block."""
        return _tf.replaced(self, _stepping=True)


class LocalTraining:
    """The averages of one strategy; its hooks in Keras's steps and epochs.

    All workers take the same number of steps: those without rows take them with zeros.

    Args:
        workers: The workers.
        options: The argument of the strategy.
    """

    def __init__(self, workers: LocalWorkers, options: LocalSteps) -> None:
        self._workers = workers
        self._consensus = Consensus(workers)
        self._options = options
        self._steps = 0
        # Whether a step was taken since the last end of an epoch.
        self._differs = False
        # The weights after the last average; the outer momentum, and whose it is.
        self._before: list[np.ndarray[Any, Any]] = []
        self._velocity: list[Any] = []
        self._owners: list[weakref.ref[Any]] = []
        self._rows = _tf.own_variable(0.0, tf.float64, workers.devices[0])

    @contextlib.contextmanager
    def step(self, rows: Any) -> Iterator[None]:
        """Run or trace a step of a replica, given its rows, in the block."""
        self._rows.assign_add(tf.cast(rows, tf.float64))
        with self._workers.alone():
            yield

    def begin_steps(self, trainer: Any) -> None:
        """Note the weights before the first of some steps.

        Raises:
            ValueError: Several steps are one call, and no average is at its end.
        """
        several = int(trainer.steps_per_execution)
        if self._options.steps % several:
            raise ValueError(
                "Weights are averaged after calls of the step's function. Received: "
                f"local_steps={self._options.steps} with steps_per_execution="
                f"{several}. Make the first one a multiple of the second."
            )
        if not self._options._takes_average and not self._steps:
            self._before = [_value(v) for v in trainer.trainable_variables]

    def end_steps(self, trainer: Any) -> None:
        """Count steps that were taken, and average if it is time."""
        self._steps += int(trainer.steps_per_execution)
        self._differs = True
        if self._steps >= self._options.steps:
            self._average(trainer)

    def end_epoch(self, trainer: Any) -> None:
        """Give all workers the same weights, and the same state of the optimizer."""
        if not self._differs:
            return
        self._differs = False
        if self._steps:
            self._average(trainer)
        moments: list[Any] = []
        others: list[Any] = []
        for variable in getattr(trainer.optimizer, "variables", ()):
            value = variable.value
            is_moment = value.shape.rank and value.dtype.is_floating
            (moments if is_moment else others).append(value)
        self._consensus.average(moments)
        # The number of steps, the scale of a loss.
        share_state(self._workers, others, 0)

    def _average(self, trainer: Any) -> None:
        self._steps = 0
        variables = trainer.trainable_variables
        rows = np.asarray(self._rows.numpy())
        self._rows.assign(0.0)
        total = float(self._workers.communicator.all_reduce([rows])[0])
        if not total:
            return
        self._consensus.average([v.value for v in variables], float(rows) / total)
        if self._options._takes_average:
            return
        outer = self._options.outer
        rate, momentum = float(outer.learning_rate), float(outer.momentum)
        known = [owner() for owner in self._owners]
        if len(known) != len(variables) or any(
            mine is not theirs for mine, theirs in zip(known, variables, strict=True)
        ):
            self._owners = [weakref.ref(variable) for variable in variables]
            self._velocity = [0.0] * len(variables)
        for i, (variable, before) in enumerate(
            zip(variables, self._before, strict=True)
        ):
            change = rate * (_value(variable) - before)
            if momentum:
                velocity = momentum * self._velocity[i] + change
                self._velocity[i] = velocity
                change = momentum * velocity + change if outer.nesterov else velocity
            for copy in self._workers.copies(variable.value):
                copy.assign(tf.cast(before + change, copy.dtype))


def _value(variable: Any) -> np.ndarray[Any, Any]:
    value = np.asarray(_tf.local_results(variable.value)[0])
    return value if value.dtype == np.float64 else value.astype(np.float32)


class LocalExtended(SynchronousExtended):
    """Replicas of this worker, which averages its weights with the other workers.

    Args:
        container: The strategy.
        devices: Canonical names of this worker's devices, one per replica.
        job: The connected workers.
        options: The strategy's options.
        local_steps: How often weights are averaged.
        more: See `SynchronousExtended`.
    """

    workers_class = LocalWorkers
    workers: LocalWorkers
    updates_by_mean = False

    def __init__(
        self,
        container: Any,
        devices: Sequence[str],
        job: StrategyJob,
        options: Options,
        *,
        local_steps: LocalSteps,
        **more: Any,
    ) -> None:
        self._local_steps = local_steps
        super().__init__(container, devices, job, options, **more)

    def _gradients_in_words(self, options: Options) -> str:
        steps = self._local_steps.steps
        return f"weights averaged every {steps} steps" if steps > 1 else "local steps"

    def _make_local(self) -> LocalTraining | None:
        workers = self.workers
        alone = workers.communicator.size == 1
        if alone and self._local_steps._takes_average:
            return None  # the average of one worker's weights is what they are
        return LocalTraining(workers, self._local_steps)
