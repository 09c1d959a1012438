"""The finished calls of `fit` and `evaluate`, for workers that join in a later one.

    members     fit 1 ─ evaluate ─ fit 2: steps ........... steps, with the newcomer
    newcomer                       fit 1 ─ evaluate ─ fit 2: joins
                                   └ the members' results ┘

The members keep the results and give them to a process that asks. It trains nothing
before it has joined: its weights aren't those of the job, so that all other calls of
Keras that compute with them are refused.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from kerasdist._keras.data.arrays import uses_of
from kerasdist._keras.protocols import ElasticHooks, KerasHooks
from kerasdist.errors import ClusterError

# The state of callbacks in a running `fit`, from which another process can continue.
#
# Of most callbacks it is what has changed since the first step: so paths, ranks and
# other settings, which may differ between workers, stay those of each worker.

# Attributes of callbacks that aren't numbers of the training.
_OWN = frozenset({"model", "params", "validation_data", "_model", "_params"})


def changed(callbacks: Sequence[Any], begun: Sequence[Any]) -> list[list[Any]]:
    """Return the class of each callback, and what another process needs of it.

    Args:
        callbacks: The callbacks.
        begun: The `numbers_of_one` of each at the first step.
    """
    found = []
    for index, callback in enumerate(callbacks):
        if hasattr(callback, "_state_for_newcomers"):
            state = callback._state_for_newcomers()
        else:
            before = begun[index] if index < len(begun) else {}
            state = {
                name: value
                for name, value in numbers_of_one(callback).items()
                if name not in before or not _same(value, before[name])
            }
            if hasattr(callback, "_set_monitor_op"):
                # A setting, whose sign Keras changes at the first end of an epoch in
                # each process, when it finds out which values are good.
                state.pop("min_delta", None)
        found.append([type(callback).__name__, state])
    return found


def adopt(
    callbacks: Sequence[Any],
    states: Sequence[Sequence[Any]],
    *,
    again: bool = False,
) -> None:
    """Give callbacks what `changed` has returned for the same ones elsewhere.

    Args:
        callbacks: The callbacks.
        states: Their states.
        again: Whether they have adopted them before, and were called since.
    """
    for callback, (_, state) in zip(callbacks, states, strict=True):
        if not hasattr(callback, "_adopt_state"):
            # A copy: the callback may change lists, and adopts its state again.
            vars(callback).update(copy.deepcopy(state))
        elif state and not again:
            callback._adopt_state(state)


def unfit(callback: Any, state: dict[str, Any]) -> str:
    """Return an attribute that has a value of another type here; empty if none has."""
    if hasattr(callback, "_adopt_state"):
        return ""  # it has a form of its own
    for name, value in state.items():
        mine = vars(callback).get(name)
        if None not in (mine, value) and _type(mine) is not _type(value):
            return f"{name!r}: {value!r:.80} in place of {mine!r:.80}"
    return ""


def _type(value: Any) -> type:
    value = value.item() if isinstance(value, np.generic) else value
    return float if isinstance(value, (bool, int)) else type(value)


def arrays_of(callbacks: Sequence[Any]) -> list[tuple[int, str, list[Any]]]:
    """Return the arrays that callbacks keep: callback's index, attribute, arrays."""
    return [
        (index, name, value)
        for index, callback in enumerate(callbacks)
        for name, value in vars(callback).items()
        if isinstance(value, list) and _are_arrays(value)
    ]


def _are_arrays(values: list[Any]) -> bool:
    # Of a variable without dimensions Keras returns one of numpy's numbers.
    return any(isinstance(each, np.ndarray) for each in values) and all(
        isinstance(each, (np.ndarray, np.generic)) for each in values
    )


def numbers_of_one(callback: Any) -> dict[str, Any]:
    """Return the attributes of a callback that JSON has."""
    found = {}
    for name, value in vars(callback).items():
        if name not in _OWN:
            with contextlib.suppress(TypeError):
                found[name] = _plain(value)
    return found


def plain(value: Any) -> Any:
    """Return a value as JSON has it; None if it doesn't."""
    try:
        return _plain(value)
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    """Return a copy of a value as JSON has it, numpy's numbers as Python's.

    Raises:
        TypeError: JSON doesn't have it, or a part of it.
    """
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    raise TypeError(f"JSON has no {type(value).__name__}.")


def _same(one: Any, other: Any) -> bool:
    # NaN isn't equal to itself.
    return type(one) is type(other) and repr(one) == repr(other)


_POLL_SECONDS = 0.2
# Questions without an answer until the job has ended.
_MOST_SILENT = 10
# An answer about the job has one frame, which also has other facts.
_MOST_BYTES = 500_000

_calls: weakref.WeakKeyDictionary[KerasHooks, FinishedCalls] = (
    weakref.WeakKeyDictionary()
)


def calls_of(hooks: KerasHooks, elastic: ElasticHooks) -> FinishedCalls:
    """Return the calls of the models of a strategy."""
    return _calls.setdefault(hooks, FinishedCalls(elastic))


def fits_of(hooks: KerasHooks) -> int:
    """Return the number of the present call of `fit`, from 1."""
    return _calls[hooks].fits if hooks in _calls else 0


def refuse_newcomer(hooks: KerasHooks, call: str) -> None:
    """Refuse a call of Keras for a worker that hasn't joined yet.

    Raises:
        ClusterError: It hasn't.
    """
    if hooks.elastic is not None and hooks.elastic.joining:
        raise _refusal(f"`{call}` before it has joined, with weights of its own")


class FinishedCalls:
    """The calls of `fit` and `evaluate` of one strategy's models in this process.

    Args:
        elastic: The strategy's changes of membership.

    Attributes:
        fits: The number of calls of `fit` that have begun.
    """

    def __init__(self, elastic: ElasticHooks) -> None:
        self.fits = 0
        self._elastic = elastic
        self._results: list[dict[str, Any]] = []
        self._size = 0

    def begin_fit(self) -> None:
        """Note that this worker, a member, is about to take the first step of `fit`."""
        self._elastic.publish("calls", self._results)
        self._elastic.publish("place", None)
        self._elastic.publish("fit", self.fits)

    def finish(self, kind: str, hooks: KerasHooks, result: Any) -> None:
        """Keep the result of a call that has just ended.

        Args:
            kind: "fit" or "evaluate".
            hooks: The strategy's hooks.
            result: Numbers as JSON has them.
        """
        found = {
            "kind": kind,
            "result": result,
            "orders": hooks.data.orders,
            "uses": uses_of(hooks).counts(),
        }
        size = len(json.dumps(found))
        if self._size + size > _MOST_BYTES:
            found["result"] = None
        else:
            self._size += size
        self._results = [*self._results, found]
        self._elastic.publish("fit", 0)
        self._elastic.publish("calls", self._results)

    def find(self, kind: str, hooks: KerasHooks) -> Any:
        """Return the members' result of the call that this worker, a newcomer, is at.

        It waits until the members have finished it, or, if it is a `fit`, until they
        are in it.

        Returns:
            The result; None: join them in this call.

        Raises:
            ClusterError: The members called something else, or their result isn't
                known, or they have ended.
        """
        number = len(self._results)
        silent = 0
        while True:
            facts = self._elastic.facts_of_members()
            if facts is None:
                silent += 1
                if silent == _MOST_SILENT:
                    raise _refusal("no member that answers: the job has ended")
                time.sleep(_POLL_SECONDS)
                continue
            silent = 0
            known = facts.get("calls", [])
            if len(known) > number:
                break
            if kind == "fit" and facts.get("fit") == self.fits:
                return None
            time.sleep(_POLL_SECONDS)
        found = known[number]
        if found["kind"] != kind:
            raise _refusal(
                f"a call of `{kind}`, where the others called `{found['kind']}`"
            )
        if found["result"] is None:
            raise _refusal(
                f"a call of `{kind}` that the others have finished, and whose result "
                "they couldn't keep"
            )
        self._results = known[: number + 1]
        self._size += len(json.dumps(found))
        hooks.data.orders = found["orders"]
        uses_of(hooks).catch_up(found["uses"])
        return found["result"]


def _refusal(received: str) -> ClusterError:
    return ClusterError(
        f"This worker can't join the job. Received: {received}. A worker that joins "
        "gets the results of `fit` and `evaluate` that the others have finished, and "
        "must reach the present `fit` by them: start it with the same script as the "
        "others, or without `--restarts`."
    )
