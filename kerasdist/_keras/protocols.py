"""The hooks through which a strategy takes part in Keras's training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from kerasdist._tf.facets import facets_of
from kerasdist.collectives import Communicator
from kerasdist.transport.liveness.announcements import Announcements

__all__ = [
    "DynamicHooks",
    "KerasHooks",
    "StepTimer",
    "current_hooks",
    "dynamic_hooks",
    "hooks_of",
    "stage_clock_of",
    "timer_of",
    "translating",
]


class StepTimer(Protocol):
    """Measures steps of training; see `strategies.measure.step_clock`.

    Attributes:
        running: Whether steps are measured.
        asked: Whether the next call alone is to be measured.
        marks: Whether the inside of a step is measured that runs, or is being traced,
            in whichever thread.
    """

    running: bool
    asked: bool
    marks: bool

    def enter(self, *, always: bool = False) -> bool:
        """Begin a call of the train function; return whether it is measured."""

    def leave(self, executions: int) -> None:
        """End a call, which has taken this many steps at a time, 0 if it has failed."""

    def step(self, run: Callable[[Any], Any], data: Any) -> Any:
        """Count one step on this worker's part of a batch, in cross-replica context.

        It is measured, too, if the call is measured.
        """

    def exchange(
        self, gradients: Sequence[Any], reduce: Callable[[Sequence[Any]], list[Any]]
    ) -> list[Any]:
        """Reduce gradients, in replica context; return what `reduce` does.

        `reduce` is given tensors that its last operation must wait for.
        """

    def waited(
        self, seconds: float, *, others: bool = False, between: bool = False
    ) -> None:
        """Count seconds of waiting outside of graphs: for data, or for other workers.

        They count in a step, or if they are known to be `between` two steps.
        """


class Job(Protocol):
    """The connection between the workers."""

    @property
    def announcements(self) -> Announcements | None:
        """The chief's announcements outside of collectives; None if unsupported."""


class WorkerHooks(Protocol):
    """The workers and their replicas; see `strategies.reduce.workers`."""

    @property
    def job(self) -> Job: ...

    @property
    def communicator(self) -> Communicator:
        """The communicator between all workers."""

    @property
    def rank(self) -> int:
        """This worker's rank."""

    @property
    def replicas(self) -> int:
        """The number of replicas that take a step together."""

    @property
    def local_replicas(self) -> int:
        """The number of this worker's replicas."""

    def current_replica(self) -> int:
        """Return the number of the replica that is being traced, over all workers."""

    def local_step(self) -> contextlib.AbstractContextManager[None]:
        """Run a step of training in the block."""

    def collective_scope(self) -> contextlib.AbstractContextManager[None]:
        """Run a step of an evaluation or prediction in the block."""


class ConsensusHooks(Protocol):
    """The agreement of all workers; see `strategies.reduce.consensus`."""

    def any_of(self, flag: bool) -> bool:
        """Return whether the flag is set on any worker."""

    def of_chief(self, number: float, root: int = 0) -> float:
        """Return the chief's number, or that of another rank."""

    def texts(self, text: str) -> dict[int, str]:
        """Return each worker's text by its rank; lost workers are missing."""

    def average(self, variables: Sequence[Any]) -> None:
        """Set each variable to its mean over all replicas."""


class KerasHooks(Protocol):
    """The hooks of one strategy; found by `hooks_of`.

    Attributes:
        print_once: Prints a line on the chief, once for each kind; is given both.
        shards: Whether data are the same on all workers, and each takes its part.
        dynamic: Whether workers don't wait for each other within an epoch, whose
            batches go to the first worker that is free: then it's a `DynamicHooks`.
        timer: Measures steps of training.
    """

    shards: bool
    dynamic: bool
    timer: StepTimer
    print_once: Callable[[str, str], None]

    @property
    def workers(self) -> WorkerHooks: ...

    @property
    def consensus(self) -> ConsensusHooks: ...

    def fill_if_empty(self, batch: Any) -> Any:
        """Give a batch without rows one row of zeros, so that a step can run."""

    def reduce_gradients(
        self, gradients: Sequence[Any], rows: Any, total: Any, linear: bool
    ) -> list[Any]:
        """Reduce over all replicas; a mean by rows, or a sum if `rows` is None.

        `total` is the number of rows of all replicas, or None if it isn't known. If
        `linear`, slices of one index may be added up.
        """

    def end_window(
        self,
        gradients: Sequence[Any],
        accumulators: Sequence[Any],
        last: Any,
        steps: int,
    ) -> list[Any]:
        """Reduce accumulated gradients in the last step of gradient accumulation."""

    def sum_over_replicas(self, tensors: Sequence[Any]) -> list[Any]:
        """Sum each tensor over all replicas, in replica context."""

    def own_rows(self, batch: Any) -> Any:
        """Return this worker's rows of a global batch: per replica if several."""

    def gather_outputs(self, output: Any) -> Any:
        """Concatenate all workers' outputs along the first dimension."""

    def order_of_epochs(self) -> Callable[[int, int], Any]:
        """Return a function of (length, epoch): an order that all workers agree on."""

    def distribute_arrays(self, data: Any) -> Any:
        """Return the iterable over this worker's parts of an `ArrayData`."""

    def distribute_items(self, data: Any) -> Any | None:
        """Return the iterable over this worker's parts of an `ItemData`'s items.

        None if its items can't be exchanged: then all workers read all of them.
        """

    def distribute_dataset(
        self,
        dataset: Any,
        length: int | None,
        generator: Any = None,
        *,
        is_items: bool = False,
    ) -> tuple[Any, int | None]:
        """Return the iterable over this worker's parts of a `tf.data.Dataset`.

        Also return its number of batches, the same on all workers; None if not known.
        `generator` is the plain generator that it reads, if any; `is_items` is true if
        it reads a PyDataset.
        """

    def adopt(self, variable: Any, value: Any) -> Any:
        """Let the strategy adopt TensorFlow's variable of a Keras variable; return it.

        It was created outside of the scope. All workers call this alike.
        """

    def unwrap(self, data: Any) -> Any:
        """Return the batch for a step from an element of a distributed dataset."""

    def split(self, data: Any) -> tuple[Any, Any, Any]:
        """Return a step's batch, its rows, and the global batch's rows if known.

        A batch with 0 rows may contain a row for the computation.
        """

    def flush_accumulators(self, variables: Sequence[Any]) -> None:
        """Set open accumulators to their mean, if workers are synchronous."""

    def updating(self, variables: Sequence[Any], touched: Sequence[Any]) -> None:
        """Prepare for an optimizer's update of variables, see `updated`."""

    def updated(
        self, optimizer: Any, variables: Sequence[Any], touched: Sequence[Any]
    ) -> None:
        """Complete an optimizer's update of variables, in replica context.

        `touched` has for each of them indices of all rows that may have changed, or
        None if they aren't known.
        """

    def has_own_state(self) -> bool:
        """Return whether all but weights may differ between workers; all call it."""

    def begin_fit(
        self, variables: Sequence[Any], optimizer: Any, sparse: Sequence[bool]
    ) -> None:
        """Prepare to train these variables with this optimizer, on all workers.

        `sparse` has for each variable whether few of its rows change in a step.
        """

    def evaluate(self, call: Callable[[bool], Any], forget: Callable[[], None]) -> Any:
        """Evaluate or predict on all workers.

        `call` does it; its argument is whether the data must be divided again, and it
        may be called several times. `forget` drops functions traced for other workers.
        """

    def check_state(
        self, variables: Sequence[tuple[str, Any]], parts: Sequence[tuple[str, Any]]
    ) -> None:
        """Check that all replicas hold the same values, or take the chief's.

        `parts` are variables of which replicas may have parts: they take the mean.
        """

    def share_state(self, variables: Sequence[Any], root: int) -> Any:
        """Give all workers a rank's values; see `reduce.initial_state.Shared`."""

    def describe(self) -> str:
        """Describe the workers and their replicas, for the start-up line."""

    def failure(self, error: Exception) -> Exception | None:
        """Return the failure of the job behind TensorFlow's `error`, or None."""


class DynamicHooks(KerasHooks, Protocol):
    """The hooks of an asynchronous strategy.

    Attributes:
        steps_of_all: How many steps all workers took in the last epoch that has ended.
        joining: Whether this worker has started late, and hasn't joined the others.
    """

    steps_of_all: int

    @property
    def joining(self) -> bool: ...

    def admit(self, epoch: int, known: dict[str, Any], statistics: Any) -> None:
        """Let late workers join before another epoch.

        Args:
            epoch: Its number.
            known: Facts about the trainer for late workers.
            statistics: As in `end_epoch`; late workers get those of the others.
        """

    def join(self, statistics: Sequence[Any]) -> tuple[int, dict[str, Any]]:
        """Join the others; return the epoch that begins, and their facts."""

    def deal_arrays(self, data: Any) -> Any:
        """Return dynamic batches of arrays: see `DynamicDataset`."""

    def deal_items(self, data: Any) -> Any:
        """Return dynamic batches of a PyDataset."""

    def deal_dataset(self, dataset: Any, length: int | None) -> Any:
        """Return dynamic batches of a `tf.data.Dataset`."""

    def steps_of(self, optimizer: Any) -> Any | None:
        """Return the steps by all workers, int64; None: the optimizer's own count."""

    def resume_at(self, steps: int | None) -> None:
        """Set the step count before `begin_fit`, on all workers; the chief's counts.

        None: the count stays, or is an optimizer's own if that is new.
        """

    def progress(self) -> tuple[int, int] | None:
        """Return how many steps, in all and of this epoch, are in the weights.

        None if not known, because no `fit` has used an optimizer.
        """

    def end_batches(self) -> None:
        """End the epoch for all workers, because one of them wants to stop."""

    def end_epoch(self, statistics: Sequence[Any]) -> None:
        """Meet at the end of an epoch of training.

        Afterwards all have the same weights, and the same `statistics`.
        """


def hooks_of(strategy: Any) -> KerasHooks | None:
    """Return the hooks of a strategy; None for one that isn't kerasdist's."""
    hooks: KerasHooks | None = facets_of(strategy).hooks
    return hooks


def timer_of(strategy: Any) -> StepTimer | None:
    """Return the step timer of a strategy; None for one that isn't kerasdist's."""
    timer: StepTimer | None = facets_of(strategy).timer
    return timer


def stage_clock_of(strategy: Any) -> Any | None:
    """Return the clock of a strategy's stages; None without a placement."""
    return facets_of(strategy).stage_clock


def dynamic_hooks(strategy: Any) -> DynamicHooks | None:
    """Return the hooks of a strategy with dynamic batches; None for any other."""
    hooks: Any = hooks_of(strategy)
    return hooks if hooks is not None and hooks.dynamic else None


def current_hooks() -> KerasHooks | None:
    """Return the hooks of the strategy in scope."""
    return hooks_of(tf.distribute.get_strategy())


@contextlib.contextmanager
def translating(hooks: KerasHooks) -> Iterator[None]:
    """Raise the job's failure in place of TensorFlow's error from inside a graph."""
    try:
        yield
    except tf.errors.OpError as error:
        failure = hooks.failure(error)
        if failure is None:
            raise
        raise failure from error
