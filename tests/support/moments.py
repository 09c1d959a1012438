"""Signals that a worker sends itself at moments of its run, for tests of losses.

    faults = [Fault(rank=0, at="on_train_batch_begin", number=3)]
    with Workers(SCRIPT, 3, env={"FAULTS": dumps(faults)}) as job: ...

and in the script, before the strategy is created:

    import moments
    moments.install()

A moment is a name, and how often it has happened: the methods of Keras's callbacks, a
"collective" that begins, and what a script reports itself by `happen`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

_CALLBACKS = (
    *("on_train_begin", "on_train_end", "on_train_batch_begin", "on_train_batch_end"),
    *("on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end"),
    *("on_test_batch_begin", "on_test_batch_end", "on_predict_begin"),
    *("on_predict_batch_begin", "on_predict_batch_end"),
)
_COLLECTIVES = ("all_reduce", "all_gather", "exchange_rows", "broadcast", "barrier")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A signal that a worker sends itself.

    `rank` is the worker's at the start, `at` the name of the moment, `number` how often
    it has happened then, this time included. `after`: how many collectives begin after
    the moment and before the signal; with 0 it's sent at once, with 1 at the beginning
    of the next collective. `delay`: seconds from there on, while the worker continues.
    """

    rank: int
    at: str
    number: int = 1
    after: int = 0
    delay: float = 0.0
    signum: int = signal.SIGKILL


def dumps(faults: Sequence[Fault]) -> str:
    return json.dumps([dataclasses.asdict(fault) for fault in faults])


class Moments:
    def __init__(self, faults: Sequence[Fault], rank: int) -> None:
        self._waiting = [fault for fault in faults if fault.rank == rank]
        # Each with the number of collectives that remain.
        self._counting: list[tuple[Fault, int]] = []
        self.counts: Counter[str] = Counter()

    def happen(self, name: str) -> None:
        self.counts[name] += 1
        if name == "collective":
            self._counting = [(fault, rest - 1) for fault, rest in self._counting]
        for fault in list(self._waiting):
            if (fault.at, fault.number) == (name, self.counts[name]):
                self._waiting.remove(fault)
                self._counting.append((fault, fault.after))
        for fault, rest in self._counting:
            if rest <= 0:
                self._send(fault)
        self._counting = [each for each in self._counting if each[1] > 0]

    def _send(self, fault: Fault) -> None:
        kill = functools.partial(os.kill, os.getpid(), fault.signum)
        if not fault.delay:
            kill()
            return
        timer = threading.Timer(fault.delay, kill)
        timer.daemon = True
        timer.start()


_installed: list[Moments] = []


def happen(name: str) -> None:
    for moments in _installed:
        moments.happen(name)


def install() -> Moments:
    """Follow the moments of this process; the faults are those of `FAULTS`."""
    import keras

    from kerasdist.collectives.elastic.communicator import ElasticCommunicator

    faults = [Fault(**each) for each in json.loads(os.environ.get("FAULTS", "[]"))]
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    moments = Moments(faults, rank)
    _installed.append(moments)
    for name in _CALLBACKS:
        _report(keras.callbacks.CallbackList, name, name)
    for name in _COLLECTIVES:
        _report(ElasticCommunicator, name, "collective")
    return moments


def _report(owner: Any, name: str, moment: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        happen(moment)
        return original(*args, **kwargs)

    setattr(owner, name, call)
