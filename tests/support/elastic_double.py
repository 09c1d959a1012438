"""Changes of membership after which the members are the same, at prescribed points.

For tests of what Keras's side repeats: the job is a real one, whose collectives in
sections end with an error, on all ranks alike.

    double = ElasticDouble(strategy)
    double.begin(fail_at={5})
"""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from kerasdist.collectives.checked import CheckedCommunicator
from kerasdist.strategies.elastic_data import ElasticData
from kerasdist.strategies.options import Options


class ElasticDouble:
    """The changes of membership of one strategy.

    `fail_at`: the numbers of the collectives that fail instead of being run, counted
    from 0 over all sections; a repeated one has another number. `sections`: of each
    section the number of its first collective, and whether it was left with an error.
    """

    def __init__(self, strategy: Any) -> None:
        self.joining = False
        self.epoch = self.finished = self.finished_before = 0
        self.changes: list[Any] = []
        self.begin()
        self._inside = self._failed = False
        facets = strategy.extended.kerasdist
        hooks = facets.hooks
        given = {"initial_state": "check", "shard": "rows", "compression": None}
        data = ElasticData(
            strategy.extended,
            hooks.timer,
            Options(**given, data="same", bucket_size=25_000_000),
            hooks.log_once,
        )
        facets.hooks = dataclasses.replace(hooks, elastic=self, data=data)
        calls = "all_reduce", "all_gather", "exchange_rows", "broadcast", "barrier"
        for name in calls:
            self._count_calls(name)

    def begin(self, fail_at: Collection[int] = ()) -> None:
        self.fail_at = frozenset(fail_at)
        self.count = 0
        self.sections: list[tuple[int, bool]] = []

    def ask(self) -> tuple[bool, bool]:
        return False, False

    is_newcomer = is_fixed = False

    def publish(self, name: str, value: Any) -> None:
        pass

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        if self._inside:
            raise RuntimeError("a section in another one")
        first, failed = self.count, True
        self._inside = True
        try:
            yield
            failed = False
        finally:
            self._inside = False
            self.sections.append((first, failed))

    def has_changed(self, error: BaseException) -> bool:
        del error
        changed, self._failed = self._failed, False
        self.epoch += changed
        return changed

    def _count_calls(self, name: str) -> None:
        original = getattr(CheckedCommunicator, name)

        def call(communicator: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                self.count += 1
                if self._failed or self.count - 1 in self.fail_at:
                    self._failed = True
                    raise RuntimeError("the members have changed")
            return original(communicator, *args, **kwargs)

        setattr(CheckedCommunicator, name, call)
