"""Workers that join a job in the midst of a call of `fit`, or leave it.

    members     steps ── any applicants? ── no ─ steps ...
                              └ yes: admit ── give ──────── steps, for the new layout
    newcomer    imports, builds, `fit` ── join ── take ──── the same steps

The newcomer runs the script from its beginning, and is alone until its `fit` takes its
first step. There it gets the state of the members: all variables, and what
`training_state` has of their `fit`.

    all        ask, about once per second
    all        agree on which leave ── these leave ── the others take the next step
    a leaver   ends its process as the signal (SIGTERM) would have

So no step is repeated, unlike after a loss. If too few workers stay, they write a
checkpoint first: see `preemption`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kerasdist._keras.chief_failover import flush_board
from kerasdist._keras.context import current
from kerasdist._keras.data.arrays import BatchIterator, RepeatableIterator
from kerasdist._keras.data.epoch_iterators import draws_order
from kerasdist._keras.elastic import finished_calls, training_state
from kerasdist._keras.elastic.training_state import DataPlace
from kerasdist._keras.protocols import ElasticHooks, KerasHooks
from kerasdist._keras.shared_state import state_to_give
from kerasdist.errors import ClusterError

if TYPE_CHECKING:
    from kerasdist.collectives.elastic.termination import Leaving

# Seconds between two questions whether a worker wants to join.
POLL_SECONDS = 1.0
_MOST_STEPS = 1000
# How often a newcomer reads the data up to the members' place, before it joins them.
_APPROACHES = 5


class Admission:
    """The members' part: they admit workers between two steps.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        elastic: Their changes of membership.
    """

    def __init__(self, trainer: Any, hooks: KerasHooks, elastic: ElasticHooks) -> None:
        self._trainer = trainer
        self._hooks = hooks
        self._elastic = elastic
        # Steps until the next question, the same on all members.
        self._left = 1
        self._steps = 1
        self._asked = time.monotonic()

    def poll(self, step: Any, iterator: Any, number: int) -> bool:
        """Admit workers if it's time to; all members call it before each step.

        Args:
            step: The `ContinuableStep` that takes the model's steps.
            iterator: The iterator of the step.
            number: The number of the step in the epoch.

        Returns:
            Whether workers have joined just now; also on those.
        """
        if current.admission is not None:
            # The members have counted this step already.
            self._left, self._steps = current.admission
            current.admission = None
            return current.joined
        self._left -= 1
        if not self._left and isinstance(iterator, BatchIterator):
            self._left = 0 if iterator.admits else 1
        if self._left:
            return False
        now = time.monotonic()
        pace = (now - self._asked) / self._steps
        self._asked = now
        # Step by step: the first one may have been much faster than the others.
        most = min(2 * self._steps, _MOST_STEPS)
        wished = int(np.clip(POLL_SECONDS / max(pace, 1e-6), 1, most))
        self._steps = int(self._hooks.consensus.of_chief(wished))
        self._left = self._steps
        # None in a script's own loop over steps.
        if current.iterator is not None:
            place = DataPlace(self._hooks)
            self._elastic.publish("place", place.facts(iterator, number))
            self._elastic.publish("layout", list(self._hooks.workers.job.replicas))
        joining, leaving = self._elastic.ask()
        if leaving:
            depart(self._trainer, self._hooks, step, iterator, number)
            return False
        if not joining or current.iterator is None or not self._elastic.admit():
            return False
        return self._give(iterator, number)

    def _give(self, iterator: Any, number: int) -> bool:
        """Give newcomers the state; return whether they have taken it."""
        hooks = self._hooks
        _forget_evaluations(self._trainer, hooks)
        state = state_to_give(self._trainer)
        facts = training_state.collect(self._trainer, hooks, state, iterator, number)
        facts["polls"] = [self._left, self._steps]
        hooks.consensus.facts(facts)
        if _refusal(hooks, "", iterator):
            # The newcomers leave, and the others continue.
            return False
        hooks.state.give(state_to_give(self._trainer), False)
        _share_arrays(hooks, current.callbacks)
        return True


def _forget_evaluations(trainer: Any, hooks: KerasHooks) -> None:
    """Forget the iterator of `fit`'s evaluations, which is kept for all of them.

    Making one is a collective, which the newcomers begin with.
    """
    iterator = getattr(trainer, "_eval_epoch_iterator", None)
    if iterator is not None and hooks.data.shards and draws_order(iterator):
        hooks.data.orders -= 1  # it is drawn again
    trainer._eval_epoch_iterator = None


def _refusal(hooks: KerasHooks, objection: str, iterator: Any) -> str:
    """Return why newcomers can't join; an empty text if they can. All call it.

    Args:
        hooks: The hooks of the strategy.
        objection: Why this worker can't join; empty if it can, or is a member.
        iterator: The iterator of the next step, whose global batch is compared.
    """
    compares = not objection and isinstance(iterator, RepeatableIterator)
    mine = [objection, iterator.next_checksum() if compares else 0]
    answers = hooks.consensus.facts(mine).values()
    objections = [text for text, _ in answers if text]
    if objections:
        return str(objections[0])
    if len({checksum for _, checksum in answers}) == 1:
        return ""
    return (
        "other data than the others' at the present step. An order that depends on "
        "more than the seeds, and the number of passes over a dataset, can't be "
        "continued"
    )


def join(
    trainer: Any,
    hooks: KerasHooks,
    elastic: ElasticHooks,
    callbacks: Sequence[Any],
    step: Any,
) -> None:
    """Join the members in their present call of `fit`, before this one's first step.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        elastic: Their changes of membership.
        callbacks: The callbacks of its `fit`, which have begun.
        step: The `ContinuableStep` that takes the model's steps, or None.

    Raises:
        ClusterError: The job's training can't be continued from its middle, or it isn't
            at this call of `fit`.
        CollectiveError: The members didn't admit this worker in time.
    """
    trainer.reset_metrics()
    state = state_to_give(trainer)
    place = DataPlace(hooks)
    _approach(place, elastic)
    if step is not None:
        _prepare(place, elastic, step)
    elastic.join()
    facts = hooks.consensus.facts(None)[0]
    if facts is None:
        raise ClusterError(
            "All workers that had the state of the training were lost while this one "
            "joined. Start the job again."
        )
    objection = training_state.objection(facts, hooks, state, callbacks)
    objection = objection or place.move_to(facts["place"])
    refused = _refusal(hooks, objection, place.iterator)
    if refused:
        raise ClusterError(
            f"This worker can't join the job. Received: {refused}. Start it with "
            "the same script as the others, or without `--restarts`."
        )
    hooks.state.give(state, True)
    _share_arrays(hooks, callbacks)
    current.admission = facts["polls"]
    training_state.apply(trainer, hooks, callbacks, facts, place, state)


def _approach(place: DataPlace, elastic: ElasticHooks) -> None:
    """Read the data up to the members' place, while they don't wait for it."""
    for _ in range(_APPROACHES):
        began = time.monotonic()
        facts = (elastic.facts_of_members() or {}).get("place")
        # What can't be continued is refused when the present place is known.
        if facts is None or place.move_to(facts):
            return
        if time.monotonic() - began < POLL_SECONDS:
            return


def _prepare(place: DataPlace, elastic: ElasticHooks, step: Any) -> None:
    """Prepare a step for the layout of the members with this worker as the last one."""
    replicas = (elastic.facts_of_members() or {}).get("layout")
    if replicas and isinstance(place.iterator, RepeatableIterator):
        with elastic.expecting(replicas):
            step.prepare(place.iterator)


def _share_arrays(hooks: KerasHooks, callbacks: Sequence[Any]) -> None:
    """Give the newcomers the callbacks' arrays, such as `EarlyStopping`'s weights."""
    elastic: Any = hooks.elastic
    communicator = hooks.workers.communicator
    newcomer = elastic.is_newcomer
    mine = [
        [index, name, [[a.dtype.name, list(a.shape)] for a in arrays]]
        for index, name, arrays in finished_calls.arrays_of(callbacks)
    ]
    for index, name, forms in hooks.consensus.facts(mine)[0]:
        callback = callbacks[index]
        given = [np.empty(shape, np.dtype(dtype)) for dtype, shape in forms]
        if not newcomer:
            given = getattr(callback, name)
        given = communicator.broadcast(given, 0)
        if newcomer:
            setattr(callback, name, given)


def depart(
    trainer: Any, hooks: KerasHooks, step: Any, iterator: Any, number: int
) -> None:
    """Let the workers leave that want to, this one perhaps among them.

    All call it alike, between two steps.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        step: The `ContinuableStep` that takes the model's steps.
        iterator: The iterator of the next step; None: the last epoch has ended.
        number: The number of that step in the epoch.
    """
    job: Any = hooks.workers.job
    leaving: Leaving | None = getattr(job, "leaving", None)
    if leaving is None:
        return
    leaving.agree()
    if leaving.ids and leaving.ends_job and current.resumption is not None:
        current.resumption.keep(trainer, step, iterator, number)
    if leaving.ids and leaving.change():
        for callback in current.callbacks:
            flush_board(callback)
        job.close()
        leaving.end_process()
