"""The state of a running `fit`, from which another process can continue it.

    facts       numbers and texts, as JSON: the place in the data, learning rates, what
                the callbacks have counted
    arrays      numpy arrays that callbacks keep, such as `EarlyStopping`'s weights
    variables   those of the model and its optimizers, which aren't handled here

A process that continues calls `objection` and `apply` before the first step of
its `fit`, when the callbacks have begun.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from kerasdist import _tf
from kerasdist._keras.context import current
from kerasdist._keras.data.arrays import (
    BatchIterator,
    CountedData,
    RepeatableIterator,
    uses_of,
)
from kerasdist._keras.data.epoch_iterators import adapter_of, iterator_of_fit
from kerasdist._keras.data.pydataset import ItemsInOrder, discard_read
from kerasdist._keras.elastic import finished_calls
from kerasdist._keras.elastic.finished_calls import fits_of
from kerasdist._keras.learning_rate import rates_of, set_rates
from kerasdist._keras.protocols import KerasHooks
from kerasdist.collectives.row_exchange import Array
from kerasdist.errors import SnapshotError
from kerasdist.transport.array_file import read_arrays, remove_parts, write_arrays
from kerasdist.transport.framing import Count, from_plain

# The file from which the next start of a script continues a preempted `fit`.

# The form of the facts in a checkpoint, which may be damaged or another program's.

_Numbers = tuple[float, ...]
# Dtype and shape.
_Form = tuple[str, tuple[Count, ...]]

FitPlace = TypedDict(
    "FitPlace",
    {
        "kind": str,
        "pass": Count,
        "batch": Count,
        "step": Count,
        "steps_seen": Count,
        "steps_per_epoch": Count | None,
        "batches": Count | None,
        "order": Count,
        "data": Any,
        "uses": tuple[tuple[Count, ...], ...],
    },
)


class CheckpointFacts(TypedDict):
    """The facts of a preempted `fit`."""

    saved: float
    seed: Count
    fit: Count
    epoch: Count
    place: FitPlace | None
    uses: tuple[tuple[Count, ...], ...]
    orders: Count
    communicator_step: Count
    variables: tuple[tuple[tuple[Count, ...], str], ...]
    rates: _Numbers
    factors: tuple[_Numbers | None, ...]
    callbacks: tuple[tuple[str, dict[str, Any]], ...]
    callback_arrays: tuple[tuple[Count, str, Count], ...]
    data: tuple[Count | None, Count | None]
    steps: Count
    metrics: tuple[_Form, ...]
    arrays: tuple[_Form, ...]


def fault_of(facts: Any) -> str:
    """Return what is wrong with a checkpoint's facts; an empty text if nothing is."""
    try:
        from_plain(facts, CheckpointFacts)
    except (TypeError, ValueError, RecursionError) as error:
        return f"its facts are damaged: {error}"
    return ""


FOLDER_VARIABLE = "KERASDIST_CHECKPOINT_DIR"
_FOLDER = ".kerasdist"


def checkpoint_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the absolute path of the folder of what the next run continues with."""
    environ = os.environ if environ is None else environ
    return Path(environ.get(FOLDER_VARIABLE) or _FOLDER).absolute()


class CheckpointFile:
    """The checkpoint of one strategy of this script, with these arguments.

    Args:
        name: The name of the strategy's job, whatever its workers.
        environ: The environment with the folder; the process's by default.

    Attributes:
        path: The absolute path.
    """

    def __init__(self, name: str, environ: Mapping[str, str] | None = None) -> None:
        folder = checkpoint_folder(environ)
        command = [os.path.abspath(sys.argv[0]), *sys.argv[1:], name]
        digest = hashlib.sha256(json.dumps(command).encode()).hexdigest()[:16]
        self.path = folder / f"preempted-{digest}.npz"

    def facts(self) -> dict[str, Any] | None:
        """Return the facts; None without a file.

        Raises:
            SnapshotError: It is damaged, or of another version.
        """
        found = self.read(facts_only=True)
        return None if found is None else found[0]

    def read(
        self, *, facts_only: bool = False
    ) -> tuple[dict[str, Any], list[Array]] | None:
        """Return the facts and the arrays, or none of these; None without a file.

        Raises:
            SnapshotError: It is damaged, or of another version.
        """
        try:
            found = read_arrays(self.path, facts_only=facts_only)
            if fault := fault_of(found[0]):
                raise ValueError(fault)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self.unusable(f"it can't be read ({error})") from error
        return found

    def unusable(self, why: str) -> SnapshotError:
        """Return the error for a checkpoint from which `fit` can't continue."""
        return SnapshotError(
            "The checkpoint of a preempted job can't be used. Received: "
            f"{self.path}: {why}. Expected the checkpoint of the same script with the "
            "same model, callbacks and data. Undo the change to continue, or remove "
            "the file to begin from scratch."
        )

    def write(self, facts: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        """Write the file, in the place of an earlier one.

        Raises:
            OSError: It can't be written; an earlier one is unchanged.
        """
        write_arrays(self.path, {**facts, "saved": time.time()}, arrays)

    def remove(self) -> None:
        """Remove the file, and what killed writers left of it.

        Raises:
            OSError: It can't be removed.
        """
        self.path.unlink(missing_ok=True)
        remove_parts(self.path)


# The place of a running `fit` in its data, from which another process can continue.
#
#     data      pass 1     pass 2       the number of a pass is that of its order
#     members   x x x x x  x x x . .    x: a batch that is used up
#     another              - - - . .    -: a batch that is skipped
#
# A `tf.data.Dataset` and a `PyDataset` are read up to the place. Each worker's own data
# have no place in common: a worker that joins begins with its own in the next epoch.


class DataPlace:
    """The place in the training data of the present call of `fit`.

    Args:
        hooks: The hooks of the model's strategy.

    Raises:
        RuntimeError: `fit` has no data.
    """

    def __init__(self, hooks: KerasHooks) -> None:
        epoch = iterator_of_fit()
        if epoch is None:
            raise RuntimeError("`fit` has no data iterator.")
        self._epoch = epoch
        self._uses = uses_of(hooks)
        # Where another process continues: Keras's generator of an epoch's steps, and
        # the step that it has yielded last.
        self._steps: Any = None
        self._reached: Any = None
        self._facts: dict[str, Any] = {}

    def facts(self, iterator: Any, step: int) -> dict[str, Any]:
        """Return the facts about the place, as JSON.

        Args:
            iterator: The iterator of the step.
            step: The number of the next step in the epoch.
        """
        known = isinstance(iterator, RepeatableIterator)
        data = self._epoch._distributed_dataset
        use = data.use if isinstance(data, CountedData) else None
        items = self._items()
        return {
            "kind": _kind(iterator),
            "pass": iterator.number if known else 0,
            "batch": iterator.taken if known else 0,
            "step": step,
            "steps_seen": self._epoch._steps_seen,
            "steps_per_epoch": self._epoch.steps_per_epoch,
            "batches": self._epoch._num_batches,
            "order": 0 if items is None else items.number,
            "data": self._uses.index(use),
            "uses": self._uses.counts(),
        }

    def move_to(self, facts: dict[str, Any]) -> str:
        """Move to the place of other processes; it may be called again with later ones.

        Args:
            facts: Those of `facts` there.

        Returns:
            Why that isn't possible; an empty text if it is.
        """
        if facts["steps_per_epoch"] != self._epoch.steps_per_epoch:
            return "another `steps_per_epoch` than the others'"
        if len(facts["uses"]) != len(self._uses.counts()):
            return "other data than the others'"
        self._facts = facts
        number = facts["pass"]
        if self._reached is None or number != getattr(self.iterator, "number", number):
            self._begin_epoch()
        batches = self.iterator
        if facts["kind"] != _kind(batches):
            return "data that are divided in another way than the others'"
        if isinstance(batches, RepeatableIterator):
            if batches.number != number:
                return "data that were used more often than the others'"
            batches.skip(facts["batch"])
        elif not (isinstance(batches, BatchIterator) and batches.pause(True)):
            return "data whose place in an epoch can't be continued from"
        return ""

    def resume(self) -> None:
        """Let the next epoch of `fit` begin at the place of the last `move_to`."""
        self._uses.catch_up(self._facts["uses"])
        self._epoch._enumerate_iterator = self._rest

    @property
    def iterator(self) -> Any:
        """The iterator that `move_to` has moved; None before."""
        return None if self._reached is None else self._reached[2]

    def _items(self) -> ItemsInOrder | None:
        items = getattr(adapter_of(self._epoch), "py_dataset", None)
        return items if isinstance(items, ItemsInOrder) else None

    def _begin_epoch(self) -> None:
        """Begin the epoch of the place, at its first step."""
        epoch, facts = self._epoch, self._facts
        if self._steps is not None:
            epoch.data_adapter.on_epoch_end()
            discard_read(adapter_of(epoch))
        uses = [list(counts) for counts in facts["uses"]]
        if facts["data"] is not None:
            # Keras's generator, below, begins one pass, and one epoch.
            mine = uses[facts["data"]]
            mine[0], mine[1] = facts["pass"] - 1, mine[1] - 1
        self._uses.catch_up(uses)
        items = self._items()
        if items is not None:
            items.turn_to(facts["order"])
        if isinstance(epoch._distributed_dataset, CountedData):
            epoch._distributed_dataset.turn_to(facts["pass"])
        epoch._num_batches = facts["batches"]
        epoch._current_iterator = None
        self._steps = epoch._enumerate_iterator()
        self._reached = next(self._steps)

    def _rest(self) -> Iterator[Any]:
        """Yield the steps from the place on, as Keras's generator does."""
        epoch, facts = self._epoch, self._facts
        del epoch._enumerate_iterator
        while self._reached[0] < facts["step"]:
            self._reached = next(self._steps, None)
            if self._reached is None:
                return
        epoch._steps_seen = facts["steps_seen"]
        batches = self.iterator
        yield self._reached
        yield from self._steps
        if isinstance(batches, BatchIterator):
            batches.pause(False)


def _kind(batches: Any) -> str:
    known = isinstance(batches, RepeatableIterator)
    return batches.kind if known else type(batches).__name__


def collect(
    trainer: Any,
    hooks: KerasHooks,
    variables: Sequence[Any],
    iterator: Any,
    step: int,
) -> dict[str, Any]:
    """Return the facts about the present call of `fit`, between two steps.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        variables: The variables that belong to the state.
        iterator: The iterator of the step; None: the last epoch has ended.
        step: The number of the next step in the epoch.
    """
    place = None if iterator is None else DataPlace(hooks).facts(iterator, step)
    return {
        "fit": fits_of(hooks),
        "epoch": current.epoch,
        "place": place,
        "uses": uses_of(hooks).counts(),
        "orders": hooks.data.orders,
        "communicator_step": hooks.workers.communicator.step,
        "variables": _form(variables),
        **rates_of(trainer),
        "callbacks": finished_calls.changed(current.callbacks, current.begun),
    }


def objection(
    facts: dict[str, Any],
    hooks: KerasHooks,
    variables: Sequence[Any],
    callbacks: Sequence[Any],
) -> str:
    """Return why this worker can't continue; an empty text if it can.

    Args:
        facts: Those of `collect`.
        hooks: The hooks of the strategy of this worker's model.
        variables: The variables here.
        callbacks: The callbacks of this worker's `fit`.
    """
    mine = fits_of(hooks)
    if facts["fit"] != mine:
        return (
            f"call {facts['fit']} of `fit` at the others, which was call {mine} when "
            "this worker asked: started again, it may join"
        )
    if facts["variables"] != _form(variables):
        return "a model with other variables than the others'"
    names = [state[0] for state in facts["callbacks"]]
    if names != [type(callback).__name__ for callback in callbacks]:
        return "other callbacks than the others'"
    return ""


def apply(
    trainer: Any,
    hooks: KerasHooks,
    callbacks: Sequence[Any],
    facts: dict[str, Any],
    place: DataPlace | None,
    variables: Sequence[Any],
) -> None:
    """Continue from facts to which there's no objection.

    They are from within a step. So the beginnings of the epoch and of the step, of
    which `fit` calls the callbacks next, have been counted in them: before the step,
    their effects are undone.

    Args:
        trainer: The model. The others are in the midst of an epoch, and all of them
            communicate in its reset of metrics: `fit` skips that of the first epoch.
        hooks: The hooks of its strategy.
        callbacks: The callbacks of its `fit`, which have begun.
        facts: Those of `collect`.
        place: It has moved to the place of the facts; None: they are from the end of
            the last epoch, and nothing is trained.
        variables: The variables that belong to the state, and have its values.
    """
    _apply_counts(trainer, callbacks, facts)
    hooks.data.orders = facts["orders"]
    hooks.workers.communicator.step = facts["communicator_step"]
    if place is None:
        uses_of(hooks).catch_up(facts["uses"])
        leave_out_epochs(trainer)
        return
    values = [
        (copy, copy.read_value())
        for variable in variables
        for copy in _tf.local_results(variable)
    ]

    def undo_begins() -> None:
        for variable, value in values:
            variable.assign(value)
        _apply_counts(trainer, callbacks, facts, again=True)

    current.resumed = undo_begins
    trainer._initial_epoch = current.epoch = facts["epoch"]
    current.joined = True
    _skip_reset(trainer)
    place.resume()


def leave_out_epochs(trainer: Any) -> None:
    """Let `fit` train nothing, as if a backup had been restored at its end."""
    trainer._initial_epoch = current.epochs
    current.joined = True


def _apply_counts(
    trainer: Any,
    callbacks: Sequence[Any],
    facts: dict[str, Any],
    *,
    again: bool = False,
) -> None:
    """Set the learning rates, and what the callbacks have counted."""
    set_rates(trainer, facts)
    finished_calls.adopt(callbacks, facts["callbacks"], again=again)


def _form(variables: Sequence[Any]) -> list[Any]:
    return [[list(v.shape), v.dtype.name] for v in variables]


def _skip_reset(trainer: Any) -> None:
    """Leave out the reset of metrics at the begin of the next epoch."""
    own = vars(trainer)

    def reset_metrics() -> None:
        own.pop("reset_metrics", None)

    own["reset_metrics"] = reset_metrics
