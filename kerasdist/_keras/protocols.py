"""The hooks through which a strategy takes part in Keras's training.

`KerasHooks` has one object for each role. Methods are described where they are
implemented: in `kerasdist.strategies`, in the module that the role's docstring names.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import tensorflow as tf

from kerasdist._tf.variables import facets_of
from kerasdist.collectives import Communicator

if TYPE_CHECKING:  # elastic jobs alone spend the time that these imports take
    from kerasdist.collectives.elastic.communicator import ElasticCommunicator


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

    def repeated(self, seconds: float) -> None:
        """Count seconds after which a step was begun again, without the pause."""


class WorkerHooks(Protocol):
    """The workers and their replicas; see `strategies.reduce.workers.Workers`."""

    @property
    def job(self) -> Any: ...
    @property
    def communicator(self) -> Communicator: ...
    @property
    def rank(self) -> int: ...
    @property
    def replicas(self) -> int: ...
    @property
    def local_replicas(self) -> int: ...
    def current_replica(self) -> int: ...
    def local_step(self) -> contextlib.AbstractContextManager[None]: ...
    def collective_scope(self) -> contextlib.AbstractContextManager[None]: ...
    def failure(self, error: Exception) -> Exception | None: ...


class ConsensusHooks(Protocol):
    """The agreement of all workers; see `strategies.reduce.consensus.Consensus`."""

    def any_of(self, flag: bool) -> bool: ...
    def of_chief(self, number: float, root: int = 0) -> float: ...
    def facts(self, value: Any) -> dict[int, Any]: ...
    def average(self, variables: Sequence[Any]) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientHooks:
    """Functions for gradients, in replica context.

    Attributes:
        reduce: See `strategies.reduce.gradients.reduce_gradients`.
        end_window: See `strategies.reduce.gradients.end_window`.
        sum_over_replicas: Sums each of a list of tensors over all replicas.
        memories: What wasn't sent of earlier gradients, a
            `strategies.reduce.compressed.Memories`.
        check: Raises an error if an optimizer doesn't fit to how gradients are reduced.
        save, load: See `strategies.reduce.compressed.save_kept` and `load_kept`; None
            if nothing is kept.
        words: What is special about it, for the start-up line; empty if nothing is.
    """

    reduce: Callable[..., list[Any]]
    end_window: Callable[..., list[Any]]
    sum_over_replicas: Callable[[Sequence[Any]], list[Any]]
    memories: Any
    check: Callable[[Any], None]
    save: Callable[[Sequence[Any], Path], None] | None = None
    load: Callable[[Sequence[Any], Path], bool] | None = None
    words: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateHooks:
    """Functions by which all workers get the same state; all call them alike.

    Attributes:
        adopt: Wraps TensorFlow's variable of a Keras variable, created outside of the
            scope, in one of the strategy; is given both.
        check: See `strategies.reduce.consensus.check_state`.
        share: See `strategies.reduce.initial_state.share_state`.
        give: See `strategies.reduce.initial_state.give_state`.
        sum_over_workers: Sums each of a list of host tensors over the workers, in
            graphs, too.
    """

    adopt: Callable[[Any, Any], Any]
    check: Callable[..., None]
    share: Callable[[Sequence[Any], int], Any]
    give: Callable[[Sequence[Any], bool], None]
    sum_over_workers: Callable[[Sequence[Any]], list[Any]]


class DataDivision(Protocol):
    """The iterables over the data that Keras is given, by their kinds."""

    def distribute_arrays(self, data: Any) -> Any: ...
    def distribute_items(self, data: Any) -> Any | None: ...
    def distribute_dataset(
        self, dataset: Any, length: int | None, source: Any = None
    ) -> tuple[Any, int | None]: ...


class DataHooks(DataDivision, Protocol):
    """The division of data among workers; see `strategies.sync.data`.

    Attributes:
        shards: Whether data are the same on all workers, and each takes its part.
        orders: How many seeds of orders were drawn since the script has set its seed.
        length_unknown: Whether the end of the newest data shows only when they end.
    """

    shards: bool
    orders: int

    @property
    def length_unknown(self) -> bool: ...

    def order_of_epochs(self) -> Callable[[int, int], Any]: ...
    def describe(self) -> str: ...
    def own_rows(self, batch: Any) -> Any: ...
    def unwrap(self, data: Any) -> Any: ...
    def split(self, data: Any) -> tuple[Any, Any, Any]: ...
    def fill_if_empty(self, batch: Any) -> Any: ...
    def gather_outputs(self, output: Any) -> Any: ...
    def end_epoch(self) -> None:
        """End an epoch of `fit`; all workers call it."""


class AsyncDataHooks(DataDivision, Protocol):
    """Batches for the first worker that is free; see `AsyncExtended`."""

    def describe(self) -> str: ...
    def end_batches(self) -> None: ...


class AsyncWeightHooks(Protocol):
    """The weights at the servers; see `strategies.asynchronous.tables`."""

    def begin_fit(
        self, variables: Sequence[Any], optimizer: Any, sparse: Sequence[bool]
    ) -> None: ...
    def sharing(
        self, optimizer: Any, variables: Sequence[Any], touched: Sequence[Any]
    ) -> contextlib.AbstractContextManager[None]: ...
    def average_own(self, variables: Sequence[Any]) -> None: ...
    def steps_of(self, optimizer: Any) -> Any | None: ...
    def resume_at(self, steps: int | None) -> None: ...
    def progress(self) -> tuple[int, int] | None: ...


class AsyncHooks(Protocol):
    """The epochs of asynchronous workers; see `AsyncExtended`."""

    steps_of_all: int

    @property
    def data(self) -> AsyncDataHooks: ...
    @property
    def weights(self) -> AsyncWeightHooks: ...
    @property
    def joining(self) -> bool: ...
    @property
    def in_pass(self) -> bool: ...
    def has_own_state(self) -> bool: ...
    def end_epoch(self, statistics: Sequence[Any]) -> None: ...
    def admit(self, epoch: int, known: dict[str, Any], statistics: Any) -> None: ...
    def join(self, statistics: Sequence[Any]) -> tuple[int, dict[str, Any]]: ...
    def evaluate(
        self, call: Callable[[bool], Any], retrace: Callable[[], None]
    ) -> Any: ...


class LocalHooks(Protocol):
    """Steps of one worker, and averages; see `strategies.local_steps`."""

    def step(self, rows: Any) -> contextlib.AbstractContextManager[None]: ...
    def begin_steps(self, trainer: Any) -> None: ...
    def end_steps(self, trainer: Any) -> None: ...
    def end_epoch(self, trainer: Any) -> None: ...


# Changes of membership: workers that are lost, or join, during a call of Keras.
#
# `WorkerHooks` has the present workers' ranks and replicas at any time. Collectives
# outside of sections are repeated by themselves after a change.
ElasticHooks: TypeAlias = "ElasticCommunicator"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KerasHooks:
    """The hooks of one strategy, by their roles; found by `hooks_of`.

    Attributes:
        workers: The workers and their replicas.
        timer: Measures steps of training.
        log_once: Logs a line on the chief, once for each kind; is given both.
        consensus: The agreement of all workers.
        state: The state that all have in common.
        gradients: Their reduction.
        data: The division of data.
        dynamic: The epochs of asynchronous workers; None if they are synchronous.
        elastic: Changes of membership; None if the workers stay the same.
        local: Steps of each worker by itself; None if gradients are reduced.
        norms: The `strategies.reduce.gradients.GradientNormMeter`; None where a
            step doesn't update by the mean gradient of all replicas.
        checkpoint: The `elastic.training_state.CheckpointFile` of an elastic job;
            else None.
        tune: Makes a train function that is tuned from one that isn't, for a model; see
            `strategies.tuning.Tuner`. None: nothing is tuned.
    """

    workers: WorkerHooks
    timer: StepTimer
    log_once: Callable[[str, str], None]
    consensus: ConsensusHooks
    state: StateHooks
    gradients: GradientHooks
    data: DataHooks
    dynamic: AsyncHooks | None = None
    elastic: ElasticHooks | None = None
    local: LocalHooks | None = None
    norms: Any = None
    checkpoint: Any = None
    tune: Callable[[Any, Any], Callable[[Any], Any]] | None = None

    @property
    def updates_alike(self) -> bool:
        """Whether several replicas update their weights by the same gradients."""
        several = self.elastic is not None or self.workers.replicas > 1
        return several and self.dynamic is None and self.local is None


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


def dynamic_hooks(strategy: Any) -> AsyncHooks | None:
    """Return the hooks of a strategy with dynamic batches; None for any other."""
    hooks = hooks_of(strategy)
    return None if hooks is None else hooks.dynamic


def current_hooks() -> KerasHooks | None:
    """Return the hooks of the strategy in scope."""
    return hooks_of(tf.distribute.get_strategy())


@contextlib.contextmanager
def translating(find: Callable[[Exception], Exception | None]) -> Iterator[None]:
    """Raise the job's failure in place of TensorFlow's error from inside a graph.

    Args:
        find: Returns the failure behind such an error; None if there is none.
    """
    try:
        yield
    except tf.errors.OpError as error:
        failure = find(error)
        if failure is None:
            raise
        try:
            raise failure from error
        finally:
            del failure  # whose traceback holds this frame
