"""A worker that joins a job in the midst of a call of `fit`.

    members     steps ── any applicants? ── no ─ steps ...
                              └ yes: admit ── give ──────── steps, for the new layout
    newcomer    imports, builds, `fit` ── join ── take ──── the same steps

The newcomer runs the script from its beginning, and is alone until its `fit` takes its
first step. There it gets the state of the members: all variables, the place in the
epoch, and what the callbacks have counted.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kerasdist._keras.context import current
from kerasdist._keras.data.batches import RepeatableIterator
from kerasdist._keras.elastic.departure import Departure
from kerasdist._keras.optimizer.learning_rate import (
    base_rate,
    leaves_of,
    scaling_of,
    schedule_of,
    set_base_rate,
)
from kerasdist._keras.protocols import ElasticHooks, KerasHooks
from kerasdist.errors import ClusterError

__all__ = ["Admission", "count_fit", "join"]

# Seconds between two questions whether a worker wants to join.
_SECONDS = 1.0
_MOST_STEPS = 1000
# Attributes of callbacks that aren't numbers of the training.
_OWN = frozenset({"model", "params", "validation_data", "_model", "_params"})

_fits: weakref.WeakKeyDictionary[KerasHooks, int] = weakref.WeakKeyDictionary()


def count_fit(hooks: KerasHooks) -> None:
    """Count a call of `fit` of the strategy's models in this process."""
    _fits[hooks] = _fits.get(hooks, 0) + 1


class Admission:
    """The members' part: they admit workers between two steps.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        elastic: Their changes of membership.
        state: Returns the variables that a newcomer gets.
    """

    def __init__(
        self,
        trainer: Any,
        hooks: KerasHooks,
        elastic: ElasticHooks,
        state: Callable[[], Sequence[Any]],
    ) -> None:
        self._trainer = trainer
        self._hooks = hooks
        self._elastic = elastic
        self._state = state
        self._departure = Departure(hooks)
        # Steps until the next question, the same on all members.
        self._left = 1
        self._steps = 1
        self._asked = time.monotonic()

    def poll(self, iterator: Any, step: int) -> bool:
        """Admit workers if it's time to; all members call it before each step.

        Args:
            iterator: The iterator of the step.
            step: The number of the step in the epoch.

        Returns:
            Whether workers have joined just now; also on those.
        """
        if current.admission is not None:
            # The members have counted this step already.
            self._left, self._steps = current.admission
            current.admission = None
            return current.joined
        self._left -= 1
        if self._left:
            return False
        now = time.monotonic()
        pace = (now - self._asked) / self._steps
        self._asked = now
        # Step by step: the first one may have been much faster than the others.
        most = min(2 * self._steps, _MOST_STEPS)
        wished = int(np.clip(_SECONDS / max(pace, 1e-6), 1, most))
        self._steps = int(self._hooks.consensus.of_chief(wished))
        self._left = self._steps
        joining, leaving = self._elastic.ask()
        if leaving:
            self._departure.run()
            return False
        return joining and self._elastic.admit() and self._give(iterator, step)

    def _give(self, iterator: Any, step: int) -> bool:
        """Give newcomers the state; return whether they have taken it."""
        place = None
        if isinstance(iterator, RepeatableIterator) and _counts_epochs():
            place = iterator.position()
        facts = {
            "fit": _fits.get(self._hooks),
            "epoch": current.epoch,
            "step": step,
            "place": place,
            "polls": [self._left, self._steps],
            "communicator_step": self._hooks.workers.communicator.step,
            "variables": _form(self._state()),
            "rates": [base_rate(each) for each in _settable(self._trainer)],
            "factors": [_factor(each) for each in leaves_of(self._trainer)],
            "callbacks": _numbers(current.callbacks),
        }
        self._hooks.consensus.texts(json.dumps(facts))
        # The newcomers' objections; then they leave, and the others continue.
        answers = self._hooks.consensus.texts("")
        if any(answers.values()):
            return False
        self._hooks.state.give(self._state(), False)
        _share_arrays(self._hooks, current.callbacks)
        # `fit` keeps the iterator of its evaluations. Making one is a collective,
        # which the newcomers begin with.
        self._trainer._eval_epoch_iterator = None
        return True


def join(
    trainer: Any,
    hooks: KerasHooks,
    elastic: ElasticHooks,
    callbacks: Sequence[Any],
    state: Sequence[Any],
) -> None:
    """Join the members in their present call of `fit`, before this one's first step.

    Raises:
        ClusterError: The job's training can't be continued from its middle, or it isn't
            at this call of `fit`.
        CollectiveError: The members didn't admit this worker in time.
    """
    trainer.reset_metrics()
    elastic.join()
    texts = hooks.consensus.texts("")
    if not texts[0]:
        raise ClusterError(
            "All workers that had the state of the training were lost while this one "
            "joined. Start the job again."
        )
    facts = json.loads(texts[0])
    objection = _objection(facts, hooks, state, callbacks)
    answers = hooks.consensus.texts(objection)
    refused = next((text for text in answers.values() if text), "")
    if refused:
        raise ClusterError(
            f"This worker can't join the job. Received: {refused}. Start it with the "
            "same script as the others, or without `--restarts`."
        )
    hooks.state.give(state, True)
    _share_arrays(hooks, callbacks)
    for optimizer, rate in zip(_settable(trainer), facts["rates"], strict=True):
        set_base_rate(optimizer, rate)
    for optimizer, factor in zip(leaves_of(trainer), facts["factors"], strict=True):
        scaling = scaling_of(optimizer)
        if scaling is not None and factor is not None:
            scaling.set(*factor)
    for callback, numbers in zip(callbacks, facts["callbacks"], strict=True):
        vars(callback).update(numbers[1])
    hooks.workers.communicator.step = facts["communicator_step"]
    trainer._initial_epoch = current.epoch = facts["epoch"]
    current.joined = True
    current.first_step = facts["step"]
    current.admission = facts["polls"]
    _skip_reset(trainer)
    _resume(facts["step"], facts["place"])


def _objection(
    facts: dict[str, Any],
    hooks: KerasHooks,
    state: Sequence[Any],
    callbacks: Sequence[Any],
) -> str:
    """Return why this worker can't join; an empty text if it can."""
    mine = _fits.get(hooks)
    if facts["fit"] != mine:
        return (
            f"call {facts['fit']} of `fit` at the others, and call {mine} here: a "
            "worker can join in the same call alone"
        )
    if facts["place"] is None or not _counts_epochs():
        return (
            "data whose place in an epoch can't be continued from: use arrays, without "
            "`steps_per_epoch`"
        )
    closed = [
        type(callback).__name__
        for callback in callbacks
        if not getattr(callback, "_takes_newcomers", True)
    ]
    if closed:
        return f"the callbacks {closed}, whose windows of steps have begun"
    if facts["variables"] != _form(state):
        return "a model with other variables than the others'"
    names = [numbers[0] for numbers in facts["callbacks"]]
    if names != [type(callback).__name__ for callback in callbacks]:
        return "other callbacks than the others'"
    return ""


def _counts_epochs() -> bool:
    """Return whether each epoch of `fit` begins with its data's first batch."""
    iterator = None if current.iterator is None else current.iterator()
    return iterator is not None and iterator.steps_per_epoch is None


def _form(variables: Sequence[Any]) -> list[Any]:
    return [[list(v.shape), v.dtype.name] for v in variables]


def _settable(trainer: Any) -> list[Any]:
    return [each for each in leaves_of(trainer) if schedule_of(each) is None]


def _factor(optimizer: Any) -> list[float] | None:
    scaling = scaling_of(optimizer)
    return None if scaling is None else [scaling.target, scaling.steps, scaling.shift]


def _numbers(callbacks: Sequence[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the class and the numbers of each callback."""
    found = []
    for callback in callbacks:
        numbers = {}
        for name, value in vars(callback).items():
            if name in _OWN:
                continue
            plain = _plain(value)
            if plain is not _NOT_PLAIN:
                numbers[name] = plain
        found.append((type(callback).__name__, numbers))
    return found


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, numpy's numbers as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        items = {key: _plain(each) for key, each in value.items()}
        return _NOT_PLAIN if _NOT_PLAIN in items.values() else items
    if isinstance(value, list):
        parts = [_plain(each) for each in value]
        return _NOT_PLAIN if any(each is _NOT_PLAIN for each in parts) else parts
    return _NOT_PLAIN


def _share_arrays(hooks: KerasHooks, callbacks: Sequence[Any]) -> None:
    """Give the newcomers the callbacks' arrays, such as `EarlyStopping`'s weights."""
    elastic: Any = hooks.elastic
    communicator = hooks.workers.communicator
    newcomer = elastic.is_newcomer
    mine = [
        [index, name, [[a.dtype.name, list(a.shape)] for a in value]]
        for index, callback in enumerate(callbacks)
        for name, value in vars(callback).items()
        if isinstance(value, list)
        and value
        and all(isinstance(each, np.ndarray) for each in value)
    ]
    texts = hooks.consensus.texts("" if newcomer else json.dumps(mine))
    for index, name, forms in json.loads(texts[0]):
        callback = callbacks[index]
        given = [np.empty(shape, np.dtype(dtype)) for dtype, shape in forms]
        if not newcomer:
            given = getattr(callback, name)
        given = communicator.broadcast(given, 0)
        if newcomer:
            setattr(callback, name, given)


def _skip_reset(trainer: Any) -> None:
    """Leave out the reset of metrics at the begin of the next epoch.

    All members of a job communicate in it, and they are in the midst of that epoch.
    """
    own = vars(trainer)

    def reset_metrics() -> None:
        own.pop("reset_metrics", None)

    own["reset_metrics"] = reset_metrics


def _resume(step: int, place: dict[str, int]) -> None:
    """Let the epoch iterator of `fit` begin at a step of its next epoch."""
    found = None if current.iterator is None else current.iterator()
    if found is None:
        raise RuntimeError("`fit` has no data iterator.")
    epoch: Any = found

    def rest() -> Iterator[Any]:
        del epoch._enumerate_iterator
        resumed = False
        for begin, end, batches in epoch._enumerate_iterator():
            if not resumed:
                batches.resume(place)
                resumed = True
            if begin >= step:
                yield begin, end, batches

    epoch._enumerate_iterator = rest
