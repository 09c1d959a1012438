"""What a strategy does in Keras's place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from kerasdist.transport.liveness.announcements import Announcements

__all__ = [
    "DynamicHooks",
    "KerasHooks",
    "StepTimer",
    "current_hooks",
    "dealing_hooks",
    "hooks_of",
    "timer_of",
    "translating",
]


class StepTimer(Protocol):
    """Measures steps of training; see `strategies.measure.step_clock`.

    Attributes:
        running: Whether somebody wants to know.
        asked: Whether somebody wants to know it of the next call, and then no longer.
        marks: Whether the inside of a step is measured that runs, or is being traced,
            in whichever thread.
    """

    running: bool
    asked: bool
    marks: bool

    def enter(self, *, always: bool = False) -> bool:
        """Keras calls the function that takes steps; is this call measured?"""

    def leave(self, executions: int) -> None:
        """It has returned; it takes so many steps at a time, 0 if it has failed."""

    def step(self, run: Callable[[Any], Any], data: Any) -> Any:
        """Count one step on this worker's part of a batch, in cross-replica context.

        Measure it too, if the call is measured.
        """

    def exchange(
        self, gradients: Sequence[Any], reduce: Callable[[Sequence[Any]], list[Any]]
    ) -> list[Any]:
        """Reduce gradients, in replica context; return what `reduce` does.

        `reduce` is given tensors that the last thing it does must wait for.
        """

    def waited(
        self, seconds: float, *, others: bool = False, between: bool = False
    ) -> None:
        """Count seconds of waiting outside of graphs: for data, or for other workers.

        They count in a step, or if they are known to be `between` two steps.
        """


class KerasHooks(Protocol):
    """The hooks of one strategy; found as `extended.keras_hooks`.

    Attributes:
        rank: This worker's rank.
        shards: Whether data are the same on all workers, and each takes its part.
        deals: Whether workers don't wait for each other inside an epoch, whose batches
            are dealt out: then it's a `DynamicHooks`.
        timer: Measures steps of training.
    """

    rank: int
    shards: bool
    dynamic: bool
    timer: StepTimer

    @property
    def replicas(self) -> int:
        """Number of replicas that take a step together."""

    @property
    def local_replicas(self) -> int:
        """Number of this worker's replicas."""

    @property
    def workers(self) -> int:
        """Number of workers."""

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
        """In the last step of gradient accumulation reduce what has come together."""

    def sum_over_replicas(self, tensors: Sequence[Any]) -> list[Any]:
        """Sum each tensor over all replicas, in replica context."""

    def replica(self) -> int:
        """Number of the replica that is being traced, over all workers."""

    def own_rows(self, batch: Any) -> Any:
        """This worker's rows of a global batch: per replica, if it has several."""

    def gather_outputs(self, output: Any) -> Any:
        """Concatenate all workers' outputs along the first dimension."""

    def order_of_epochs(self) -> Callable[[int, int], Any]:
        """A function of (length, epoch): an order that all workers agree on."""

    def distribute_arrays(self, data: Any) -> Any:
        """Return what iterates over this worker's parts of an `ArrayData`."""

    def distribute_items(self, data: Any) -> Any | None:
        """Return what iterates over this worker's parts of an `ItemData`'s items.

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
        """Return what iterates over this worker's parts of a `tf.data.Dataset`.

        And its number of batches, the same on all workers; None if not known.
        `generator` is the plain one that it reads, if it's one; `is_items` says that it
        reads a PyDataset.
        """

    def adopt(self, variable: Any, value: Any) -> Any:
        """Make TensorFlow's variable of a Keras variable the strategy's; return it.

        It was created outside of the scope. All workers call it alike.
        """

    def unwrap(self, data: Any) -> Any:
        """What a step is given of an element of a distributed dataset."""

    def split(self, data: Any) -> tuple[Any, Any, Any]:
        """A step's batch, its number of rows, and that of the global batch if known.

        A batch that counts as none may have a row all the same, to compute with.
        """

    def tell(self, kind: str, line: str) -> None:
        """Tell the user a line, on the chief, once of each kind of thing."""

    @property
    def announcements(self) -> Announcements | None:
        """What the chief tells the others outside of collectives; None: it can't."""

    def any_of(self, flag: bool) -> bool:
        """Whether the flag is set on any worker."""

    def of_chief(self, number: float, root: int = 0) -> float:
        """The chief's number, or that of another rank."""

    def texts(self, text: str) -> dict[int, str]:
        """Each worker's text by its rank: those that are lost leave gaps."""

    def average(self, variables: Sequence[Any]) -> None:
        """Set each variable to its mean over all replicas."""

    def flush_accumulators(self, variables: Sequence[Any]) -> None:
        """In the midst of gradient accumulation: `average`, where steps are in step."""

    def local_step(self) -> contextlib.AbstractContextManager[None]:
        """A step of training stands inside."""

    def collective_scope(self) -> contextlib.AbstractContextManager[None]:
        """A step of an evaluation or prediction stands inside."""

    def updating(self, variables: Sequence[Any], touched: Sequence[Any]) -> None:
        """An optimizer is about to update variables, see `updated`."""

    def updated(
        self, optimizer: Any, variables: Sequence[Any], touched: Sequence[Any]
    ) -> None:
        """An optimizer has updated variables, in replica context.

        `touched` has for each of them indices of all rows that may have changed, or
        None if they aren't known.
        """

    def has_own_state(self) -> bool:
        """Whether all but weights may differ between workers; all workers ask."""

    def begin_fit(
        self, variables: Sequence[Any], optimizer: Any, sparse: Sequence[bool]
    ) -> None:
        """All workers are about to train these variables with this optimizer.

        `sparse` says of each whether few of its rows change in a step.
        """

    def evaluate(self, call: Callable[[bool], Any], forget: Callable[[], None]) -> Any:
        """Evaluate or predict on all workers.

        `call` does it; it is told whether to divide the data anew, and may be called
        again. `forget` drops what was traced for other workers.
        """

    def check_state(
        self, variables: Sequence[tuple[str, Any]], parts: Sequence[tuple[str, Any]]
    ) -> None:
        """Check that all replicas hold the same values, or take the chief's.

        `parts` are what replicas may have parts of: they take the mean.
        """

    def share_state(self, variables: Sequence[Any], root: int) -> Any:
        """Give all workers a rank's values; see `reduce.initial_state.Shared`."""

    def describe(self) -> str:
        """The workers and their replicas, for the start-up line."""

    def failure(self, error: Exception) -> Exception | None:
        """What ended the job and made TensorFlow raise `error`, or None."""


class DynamicHooks(KerasHooks, Protocol):
    """The hooks of a strategy whose workers don't wait for each other in an epoch.

    Attributes:
        steps_of_all: How many steps all workers took in the epoch that was ended last.
        joining: Whether this worker has come later, and hasn't joined the others.
    """

    steps_of_all: int

    @property
    def joining(self) -> bool: ...

    def let_in(self, epoch: int, known: dict[str, Any], statistics: Any) -> None:
        """Another epoch follows: let others join who have come meanwhile.

        Args:
            epoch: Its number.
            known: What they are told of the trainer.
            statistics: As in `end_epoch`: they get all workers'.
        """

    def join(self, statistics: Sequence[Any]) -> tuple[int, dict[str, Any]]:
        """Join the others; return the epoch that begins, and what they know."""

    def deal_arrays(self, data: Any) -> Any:
        """Return what deals out batches of arrays: see `DynamicDataset`."""

    def deal_items(self, data: Any) -> Any:
        """The same for a PyDataset."""

    def deal_dataset(self, dataset: Any, length: int | None) -> Any:
        """The same for a `tf.data.Dataset`."""

    def steps_of(self, optimizer: Any) -> Any | None:
        """Number of steps by all workers, int64; None: the optimizer's own count."""

    def resume_at(self, steps: int | None) -> None:
        """Before `begin_fit`, on all workers: the chief's is where the count goes on.

        None: the count is what it was, or an optimizer's own if that is new.
        """

    def progress(self) -> tuple[int, int] | None:
        """How many steps, in all and of this epoch, are in this worker's weights.

        None: not known, there's no optimizer that `fit` trains with.
        """

    def end_batches(self) -> None:
        """Let the epoch end for all workers: one of them wants to stop."""

    def end_epoch(self, statistics: Sequence[Any]) -> None:
        """Meet at the end of an epoch of training.

        Then all have the same weights, and the same `statistics`.
        """


def hooks_of(strategy: Any) -> KerasHooks | None:
    """The hooks of a strategy; None for one that isn't ours."""
    extended = getattr(strategy, "extended", None)
    hooks: KerasHooks | None = getattr(extended, "keras_hooks", None)
    return hooks


def timer_of(strategy: Any) -> StepTimer | None:
    """What measures a strategy's steps of training; None for one that isn't ours."""
    timer: StepTimer | None = getattr(
        getattr(strategy, "extended", None), "timer", None
    )
    return timer


def dealing_hooks(strategy: Any) -> DynamicHooks | None:
    """The hooks of a strategy that deals out batches; None for any other."""
    hooks: Any = hooks_of(strategy)
    return hooks if hooks is not None and hooks.dynamic else None


def current_hooks() -> KerasHooks | None:
    """The hooks of the strategy in scope."""
    return hooks_of(tf.distribute.get_strategy())


@contextlib.contextmanager
def translating(hooks: KerasHooks) -> Iterator[None]:
    """TensorFlow reports an exception inside a graph as text: raise the real one."""
    try:
        yield
    except tf.errors.OpError as error:
        failure = hooks.failure(error)
        if failure is None:
            raise
        raise failure from error
