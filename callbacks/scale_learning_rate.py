"""The callback that scales the learning rate, `ScaleLearningRate`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kerasdist import _keras
from kerasdist._keras import learning_rate
from kerasdist._keras.data.epoch_iterators import batch_size_of_fit, batches_of_fit
from kerasdist._keras.learning_rate import steps_of
from kerasdist._keras.protocols import KerasHooks
from kerasdist._keras.shared_state import JobCallback
from kerasdist.callbacks.job_view import (
    JobView,
    check_arguments,
    is_number,
    is_whole,
)
from kerasdist.prediction.noise import GradientNorms, add_norms, noise_of
from kerasdist.transport import log

# The factor by the growth of the batch; that of "adascale" is measured.
RULES: dict[str, Callable[[float], float]] = {
    "linear": float,
    "sqrt": math.sqrt,
    "none": lambda growth: 1.0,
    "adascale": lambda growth: 1.0,
}
_WARMUP_EPOCHS = 5
# Batches after which all workers agree on the gain.
_AGREE = 10
# The steps over which it's averaged, times the number of replicas (Johnson et al.).
_AVERAGED = 1000


class ScaleLearningRate(JobCallback):
    """Scales the learning rate with the global batch, after a warm-up.

    A learning rate is tuned for a batch size. On several replicas the global batch is
    usually larger, in the same number of epochs there are fewer steps, and each of them
    should be longer. This callback multiplies the optimizer's rate by a factor that
    depends on the growth of the global batch; it rises from 1, step by step, while the
    warm-up lasts:

        rate(step) = base rate * (1 + (factor - 1) * min(step / warm-up steps, 1))

    The optimizer keeps its base rate, a number or a `LearningRateSchedule`. The base
    rate is saved with the model, so a saved model is that of one process, and restored
    training continues from it. Reading `optimizer.learning_rate` gives the rate of the
    next step, base rate times factor.
    `LearningRateScheduler` and `ReduceLROnPlateau` read and set the base rate, in
    whatever order the callbacks are given. Where your own callback sets
    `optimizer.learning_rate`, that is the rate of the next step; set
    `base_learning_rate` to the rate that one worker would use.

    Over several calls of `fit`, and when training is resumed (`BackupAndRestore`,
    `initial_epoch=`), the warm-up continues where it was; if the number of workers has
    changed meanwhile, towards the new target.

    With `"adascale"` (Johnson et al., "AdaScale SGD", 2020) the factor is how many
    steps of the batch that the rate was tuned for a step is worth. It's measured in
    each step, and all workers agree on it every 10 batches. It's near k where gradients
    are mostly noise, as late in training, and near 1 where they agree. Training is as
    far as one of `gained_steps` steps with that batch; a schedule counts the steps
    that were taken.

    Args:
        rule: How the factor depends on k, the growth of the batch: `"linear"`, k, for
            SGD (Goyal et al., "Accurate, large minibatch SGD", 2017); `"sqrt"`, the
            square root of k, for Adam and other adaptive optimizers (Krizhevsky, "One
            weird trick for parallelizing convolutional neural networks", 2014);
            `"none"`, 1; `"adascale"`, for SGD, the gain that the noise of the gradients
            shows, between 1 and k: see below.
        warmup_epochs: Epochs until the rate reaches its target; 0 for none. Fractions
            are allowed. A factor below 1 needs no warm-up and has none, and neither
            does `"adascale"`.
        warmup_steps: The same in steps, instead of `warmup_epochs`.
        base_batch_size: The batch size that the rate was tuned for: k is the global
            batch size divided by it. By default that is one replica's share of the
            global batch, so k is the number of replicas that take a step together:
            1 with `ParameterServerStrategy(mode="async")` and one device per worker.
        batch_size: The global batch size, where `base_batch_size` needs it and it can't
            be read from the data (a dataset that is distributed already).
        verbose: Whether the chief logs a line at the beginning of each `fit`: 1 or 0.

    Attributes:
        factor: The factor of the rate after the warm-up; None before `fit`. With
            `"adascale"` the present one.
        gained_steps: The sum over the steps of this `fit` of what each is worth, with
            `"adascale"`.
        steps: Number of steps of the warm-up; None before `fit`.

    Raises:
        ValueError: An argument is wrong.

    Example:
    ```python
    strategy = kerasdist.RingStrategy()
    with strategy.scope():
        model = build_model()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(
        x, y,
        batch_size=64 * strategy.num_replicas_in_sync,
        epochs=90,
        callbacks=[kerasdist.callbacks.ScaleLearningRate(warmup_epochs=5)],
    )
    ```
    """

    def __init__(
        self,
        rule: str = "linear",
        warmup_epochs: float = _WARMUP_EPOCHS,
        *,
        warmup_steps: int | None = None,
        base_batch_size: int | None = None,
        batch_size: int | None = None,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        right = {
            f"rule={rule!r}; expected one of {tuple(RULES)}": rule in tuple(RULES),
            f"warmup_epochs={warmup_epochs!r}; expected 0 or more epochs": (
                is_number(warmup_epochs) and warmup_epochs >= 0
            ),
            f"warmup_steps={warmup_steps!r}; expected 0 or more steps": (
                warmup_steps is None or is_whole(warmup_steps, 0)
            ),
            f"warmup_epochs={warmup_epochs!r} and warmup_steps={warmup_steps!r}; "
            "expected one of them": (
                warmup_steps is None or warmup_epochs == _WARMUP_EPOCHS
            ),
            f"batch_size={batch_size!r} without `base_batch_size`, the batch size that "
            "the rate was tuned for": batch_size is None or base_batch_size is not None,
        }
        sizes = {"base_batch_size": base_batch_size, "batch_size": batch_size}
        for name, size in sizes.items():
            text = f"{name}={size!r}; expected a positive number of rows"
            right[text] = size is None or is_whole(size, 1)
        right[
            f"rule='adascale' with warmup_steps={warmup_steps!r}; expected no warm-up"
        ] = rule != "adascale" or not warmup_steps
        check_arguments("ScaleLearningRate", right)
        self.rule = rule
        self.warmup_epochs = warmup_epochs
        self.warmup_steps = warmup_steps
        self.base_batch_size = base_batch_size
        self.batch_size = batch_size
        self.verbose = verbose
        self.factor: float | None = None
        self.steps: int | None = None
        self.gained_steps = 0.0
        self._growth = ""
        # The growth of the batch, if the gain is measured; and the last steps' norms.
        self._measured: float | None = None
        self._norms: list[GradientNorms] = []
        self._calls = 0
        self._begun = False
        self._restored = 0
        # Before `fit` begins, also where no strategy of kerasdist has done it.
        _keras.install("learning_rate")

    @property
    def base_learning_rate(self) -> float:
        """The rate before it's multiplied; of a schedule its present value."""
        return learning_rate.base_rate(self._optimizers()[0])

    @base_learning_rate.setter
    def base_learning_rate(self, rate: float) -> None:
        for optimizer in self._optimizers():
            learning_rate.set_base_rate(optimizer, rate)

    def set_model(self, model: Any) -> None:
        """Prepare the optimizers, before `fit` makes its train function."""
        super().set_model(model)
        self._job = JobView(model)
        for optimizer in self._optimizers():
            if learning_rate.scaling_of(optimizer) is None:
                learning_rate.make_scaling(optimizer)
                # A function that was traced before doesn't scale.
                model.train_function = None
        hooks = self._job.hooks
        meter = None if hooks is None else hooks.norms
        if self.rule == "adascale" and meter is not None and not meter.always:
            # Nor does it measure.
            meter.always = True
            model.train_function = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Compute the factor, which must be the same on all ranks.

        Raises:
            ValueError: The batch size or the length of an epoch isn't known, or the
                ranks' arguments differ.
        """
        hooks = self._job.hooks
        growth = self._find_growth(hooks)
        self._begin_measuring(hooks, growth)
        self.factor = RULES[self.rule](growth)
        self.steps = self._find_steps()
        self._begun = False
        self._restored = 0
        if hooks is None:
            return
        texts = hooks.consensus.facts(
            f"factor {self._measured or self.factor:.12g} and {self.steps} steps of "
            "warm-up"
        )
        if len(set(texts.values())) > 1:
            which = "; ".join(f"{each} on rank {rank}" for rank, each in texts.items())
            raise ValueError(
                "`ScaleLearningRate` must be given the same arguments and data on all "
                f"ranks. Received: {which}. Leave out the condition on the rank, and "
                "use arrays and batches of the same length on all ranks."
            )

    def resumed_after(self, batches: int) -> None:
        """See `JobCallback.resumed_after`."""
        hooks = self._job.hooks
        # Perhaps only the chief can read the file.
        self._restored = (
            batches if hooks is None else int(hooks.consensus.of_chief(batches))
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin the warm-up: only now it's known where training is resumed."""
        if self._begun or self.factor is None or self.steps is None:
            return
        self._begun = True
        behind = 0
        for optimizer in self._optimizers():
            scaling = learning_rate.make_scaling(optimizer)
            taken = int(steps_of(optimizer).numpy())
            _, steps, shift = scaling.values
            last = (taken + shift, steps) if steps else None
            behind = taken
            if self.warmup_steps is None:
                behind = steps_behind(
                    taken, epoch, self._restored, self._per_epoch(), last, self.steps
                )
            scaling.set(self.factor, self.steps, behind - taken)
        if self.verbose and self._job.is_chief:
            log.info("%s", self._line(behind))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Agree on the gain of the last steps, now and then."""
        if self._measured is None:
            return
        self._calls += 1
        if self._calls > _AGREE:
            self._calls = 1
            self._agree()

    def on_train_end(self, logs: Any = None) -> None:
        """Add the last steps, and measure no more."""
        if self._measured is None:
            return
        self._agree()
        self._measured = None
        hooks = self._job.hooks
        if hooks is not None:
            hooks.norms.always = False

    def _begin_measuring(self, hooks: KerasHooks | None, growth: float) -> None:
        """Decide whether the gain is measured; raise ValueError if it can't be."""
        self._measured, self.gained_steps = None, 0.0
        self._norms, self._calls = [], 0
        if self.rule != "adascale" or growth == 1 or hooks is None:
            return
        strategy = self.model.distribute_strategy
        # A worker that is to join an elastic job is alone until then.
        replicas = strategy.num_replicas_in_sync
        if hooks.norms is None or replicas < 2:
            raise ValueError(
                "`ScaleLearningRate(rule='adascale')` compares the gradients of at "
                "least two replicas with their mean, by which each step updates. "
                f"Received: {replicas} replica(s) of {type(strategy).__name__}. Use "
                "`rule='linear'`, or a synchronous strategy without `local_steps` and "
                "without a compressor that keeps a rest."
            )
        windows = [each.gradient_accumulation_steps for each in self._optimizers()]
        if any(windows):
            raise ValueError(
                "`ScaleLearningRate(rule='adascale')` needs an update in each step. "
                f"Received: gradient_accumulation_steps={windows}. Use "
                "`rule='linear'`, or leave out the accumulation."
            )
        self._job.take_norms()  # also those of an earlier `fit`
        self._measured = growth

    def _agree(self) -> None:
        """Set the factor to the gain of the last steps, on all workers."""
        hooks = self._job.hooks
        if hooks is None or self._measured is None:
            return
        mine = np.array(self._job.take_norms())
        every = hooks.workers.communicator.all_gather(mine)
        new = [GradientNorms(*map(float, row)) for row in every]
        replicas, steps = hooks.workers.replicas, new[0].steps
        self.gained_steps += steps * (self.factor or 1.0)
        kept = max(1 - replicas / _AVERAGED, 0.0) ** steps
        self._norms = add_norms(self._norms, new, kept)
        noise = noise_of(self._norms, replicas)
        if noise is None:
            return
        # Batches may be of different sizes: their mean, as it is in the noise.
        batch = self._norms[0].steps / self._norms[0].per_row
        self.factor = noise.gain(batch, batch / self._measured)
        for optimizer in self._optimizers():
            learning_rate.make_scaling(optimizer).set(self.factor, 0, 0)

    def _optimizers(self) -> list[Any]:
        found = learning_rate.leaves_of(self.model)
        if not found:
            raise ValueError(
                "`ScaleLearningRate` needs a model that was compiled with one of "
                f"Keras's optimizers. Received: optimizer={self.model.optimizer!r}; if "
                "it chooses others by variable, build the model before `fit`."
            )
        return found

    def _per_epoch(self) -> int | None:
        steps = (self.params or {}).get("steps", batches_of_fit())
        if steps is None:
            return None
        strategy = self.model.distribute_strategy
        hooks = self._job.hooks
        if hooks is not None and hooks.dynamic and not hooks.data.shards:
            # Each worker has this many of its own, and the steps of all are counted.
            return int(steps) * int(strategy.size)
        return int(steps)

    def _find_steps(self) -> int:
        """Return the number of steps of the warm-up."""
        if self.factor is None or self.factor <= 1:
            return 0
        if self.warmup_steps is not None:
            return int(self.warmup_steps)
        if not self.warmup_epochs:
            return 0
        per_epoch = self._per_epoch()
        if per_epoch is None:
            raise ValueError(
                "The number of steps in `warmup_epochs` is unknown, because the data "
                f"have no known length. Received: warmup_epochs={self.warmup_epochs}. "
                "Give `warmup_steps=` instead, or `steps_per_epoch=` to `fit`."
            )
        return round(self.warmup_epochs * per_epoch)

    def _find_growth(self, hooks: KerasHooks | None) -> float:
        """Return the global batch size divided by the one the rate was tuned for."""
        strategy = self.model.distribute_strategy
        if self.base_batch_size is None:
            replicas = 1
            if hooks is not None and hooks.dynamic:
                # Each step is one worker's.
                replicas = len(strategy.extended.worker_devices)
            elif strategy is not None:
                replicas = strategy.num_replicas_in_sync
            self._growth = f"{replicas} replica(s)"
            return float(replicas)
        size = self.batch_size
        if size is None:
            size = batch_size_of_fit()
            if size is not None and hooks is not None and not hooks.data.shards:
                # Each worker's own batches: together they are the global batch.
                size *= 1 if hooks.dynamic else strategy.size
        if size is None:
            raise ValueError(
                "The global batch size isn't known from the data. Received: "
                f"base_batch_size={self.base_batch_size}. Give the callback "
                "`batch_size=` too."
            )
        self._growth = f"global batch {size} instead of {self.base_batch_size}"
        return size / self.base_batch_size

    def _line(self, behind: int) -> str:
        optimizers = self._optimizers()
        factor, steps = self.factor or 1, self.steps
        texts, targets = [], []
        for optimizer in optimizers:
            base = learning_rate.base_rate(optimizer)
            schedule = learning_rate.schedule_of(optimizer)
            text = f"{base:g}"
            if schedule is not None:
                name = getattr(schedule, "__name__", type(schedule).__name__)
                text = f"{name} (now {base:g})"
            texts.append(text + (f" ({optimizer.name})" if optimizers[1:] else ""))
            targets.append(f"{base * factor:g}")
        line = (
            f"kerasdist: learning rate {', '.join(texts)} x {factor:g} (rule "
            f"{self.rule!r}, {self._growth}) = {', '.join(targets)}, "
            f"{steps} step(s) of warm-up"
        )
        if steps and behind:
            line += f", {min(behind, steps)} of them behind"
        return line


def steps_behind(
    taken: int,
    epoch: int,
    batches: int,
    per_epoch: int | None,
    last: tuple[int, int] | None,
    steps: int,
) -> int:
    """Return the number of steps of the warm-up that were taken before `fit` begins.

    Args:
        taken: Number of steps that the optimizer has taken.
        epoch: Number of the epoch that begins.
        batches: Number of steps that were taken in it before training was interrupted.
        per_epoch: Number of steps per epoch, if it's known.
        last: Number of steps of the warm-up taken at the end of an earlier `fit` of
            this process, and the length of its warm-up; None: there was no such `fit`.
        steps: Number of steps of the warm-up now.
    """
    if last is not None:
        behind, of = last
        return round(min(behind / of, 1.0) * steps)
    if not epoch or not per_epoch or taken - batches == epoch * per_epoch:
        return taken
    # The optimizer took another number of steps per epoch, with other workers, or some
    # of them more than once: the epochs count.
    before = max(taken - batches, 0) / epoch
    part = min(batches / before, 1.0) if before else 0.0
    return round((epoch + part) * per_epoch)
