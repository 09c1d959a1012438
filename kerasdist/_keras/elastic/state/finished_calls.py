"""The finished calls of `fit` and `evaluate`, for workers that join in a later one.

    members     fit 1 ─ evaluate ─ fit 2: steps ........... steps, with the newcomer
    newcomer                       fit 1 ─ evaluate ─ fit 2: joins
                                   └ the members' results ┘

The members keep the results and give them to a process that asks. It trains nothing
before it has joined: its weights aren't those of the job, so that all other calls of
Keras that compute with them are refused.
"""

from __future__ import annotations

import json
import time
import weakref
from typing import Any

from kerasdist._keras.context import current
from kerasdist._keras.data.uses import uses_of
from kerasdist._keras.elastic.state import callback_state
from kerasdist._keras.protocols import ElasticHooks, KerasHooks
from kerasdist.errors import ClusterError

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
    if hooks not in _calls:
        _calls[hooks] = FinishedCalls(elastic)
    return _calls[hooks]


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


def result_of_fit() -> Any:
    """Return the result of the present `fit`, for `FinishedCalls.finish`."""
    return callback_state.changed(current.callbacks, current.begun)


def _refusal(received: str) -> ClusterError:
    return ClusterError(
        f"This worker can't join the job. Received: {received}. A worker that joins "
        "gets the results of `fit` and `evaluate` that the others have finished, and "
        "must reach the present `fit` by them: start it with the same script as the "
        "others, or without `--restarts`."
    )
