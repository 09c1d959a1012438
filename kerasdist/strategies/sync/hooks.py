"""The synchronous strategies' implementation of `_keras.protocols.KerasHooks`."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras import ArrayData, ItemData, OncePrinter, is_timed, random_seed
from kerasdist._tf.marks import OWN_DATA
from kerasdist.strategies.chief_data.arrays import settle_arrays
from kerasdist.strategies.chief_data.batches import settle_batch
from kerasdist.strategies.chief_data.choice import DataChoice
from kerasdist.strategies.chief_data.datasets import settle_dataset
from kerasdist.strategies.chief_data.items import ChiefItems
from kerasdist.strategies.data.array_epochs import ArrayEpochs
from kerasdist.strategies.data.batch_check import CHECKSUM, SameBatches
from kerasdist.strategies.data.batch_split import (
    count_rows,
    fill_if_empty,
    part_of_batch,
    slice_dataset,
    split_part,
    with_facts,
)
from kerasdist.strategies.data.per_worker import PerWorkerDataset
from kerasdist.strategies.data.pydataset_exchange import share_items
from kerasdist.strategies.data.shuffle import epoch_order
from kerasdist.strategies.data.startup_message import GivenData, describe
from kerasdist.strategies.measure.step_clock import StepClock
from kerasdist.strategies.options import Options
from kerasdist.strategies.reduce.accumulation import end_window
from kerasdist.strategies.reduce.consensus import Consensus, check_state
from kerasdist.strategies.reduce.gradients import reduce_gradients
from kerasdist.strategies.reduce.initial_state import Shared, share_state
from kerasdist.strategies.reduce.replicas import sum_over_replicas
from kerasdist.strategies.reduce.workers import Workers

__all__ = ["SynchronousHooks"]


class Distributes(Protocol):
    """The part of a strategy's extended object that its hooks use."""

    @property
    def workers(self) -> Workers:
        """The connected workers, and this worker's replicas."""

    def adopt(self, keras_variable: Any, variable: Any) -> Any:
        """Wrap a variable of this process in a distributed one; return that."""

    def distribute_parts(self, dataset: Any) -> Any:
        """Distribute a dataset of parts: one element per local replica in turn."""

    def distribute_own(self, dataset: Any, options: Any = None) -> Any | None:
        """Distribute this worker's part of a dataset that isn't divided by rows."""


class SynchronousHooks:
    """The hooks of one strategy.

    Args:
        extended: The strategy's extended object.
        options: The strategy's options.
    """

    dynamic = False

    def __init__(self, extended: Distributes, options: Options) -> None:
        workers = extended.workers
        self._extended = extended
        self._workers = workers
        self._orders = itertools.count()
        self._seeding = _tf.seeding()
        self._given: GivenData | None = None
        self._same = SameBatches(workers)
        self._choice = DataChoice(options.data)
        self._broadcast = options.initial_state == "broadcast"
        self.workers = workers
        self.consensus = Consensus(workers)
        self.print_once = OncePrinter(workers.rank)
        self.shards = options.shards
        # With servers, waiting is first of all for the servers.
        self.timer = StepClock(
            workers.devices, workers.communicator, in_turn=not workers.job.has_servers
        )

    def adopt(self, variable: Any, value: Any) -> Any:
        """See `KerasHooks.adopt`."""
        return self._extended.adopt(variable, value)

    def reduce_gradients(
        self, gradients: Sequence[Any], rows: Any, total: Any, linear: bool
    ) -> list[Any]:
        """See `KerasHooks.reduce_gradients`."""

        def reduce(after: Sequence[Any] = ()) -> list[Any]:
            return reduce_gradients(
                self._workers, gradients, rows, total, linear, after, self.print_once
            )

        return self.timer.exchange(gradients, reduce) if is_timed() else reduce()

    def end_window(
        self,
        gradients: Sequence[Any],
        accumulators: Sequence[Any],
        last: Any,
        steps: int,
    ) -> list[Any]:
        """See `KerasHooks.end_window`."""

        def end(after: Sequence[Any] = ()) -> list[Any]:
            with tf.control_dependencies(after):
                return end_window(self._workers, gradients, accumulators, last, steps)

        return self.timer.exchange(gradients, end) if is_timed() else end()

    def fill_if_empty(self, batch: Any) -> Any:
        """See `KerasHooks.fill_if_empty`."""
        return fill_if_empty(batch, count_rows(batch))

    def sum_over_replicas(self, tensors: Sequence[Any]) -> list[Any]:
        """See `KerasHooks.sum_over_replicas`."""
        if self._workers.replicas == 1:
            return list(tensors)
        return sum_over_replicas(self._workers, list(tensors))

    def own_rows(self, batch: Any) -> Any:
        """See `KerasHooks.own_rows`."""
        first, local, replicas = self._workers.data_layout
        if self.shards and self._workers.size > 1:
            batch = self.settle_batch(batch)
        if replicas == 1:
            # Outside of graphs nothing else converts arrays to tensors.
            return tf.nest.map_structure(
                lambda x: tf.convert_to_tensor(x) if isinstance(x, np.ndarray) else x,
                batch,
            )
        batch = tf.nest.map_structure(
            lambda x: None if x is None else tf.convert_to_tensor(x), batch
        )
        rows = count_rows(batch)
        parts = [
            part_of_batch(batch, rows, first + i, replicas, whole=self.shards)
            for i in range(local)
        ]
        return parts[0] if local == 1 else _tf.regroup(parts)

    def settle_batch(self, batch: Any) -> Any:
        """Return a global batch that is the same on all workers."""
        communicator = self._workers.communicator
        return settle_batch(communicator, self._choice, batch, self.print_once)

    def distribute_dataset(
        self,
        dataset: Any,
        length: int | None,
        generator: Any = None,
        *,
        is_items: bool = False,
    ) -> tuple[Any, int | None]:
        """See `KerasHooks.distribute_dataset`."""
        extended = self._extended
        if isinstance(dataset, tf.distribute.DistributedDataset):
            self._given = GivenData(division="distributed already")
            return self._in_step(dataset, length)
        self._given = _known_of(dataset, length)
        if self._workers.replicas == 1:
            return extended.distribute_parts(dataset), length
        if not self.shards:
            self._given = GivenData(division="each worker's own data")
            own = extended.distribute_parts(
                slice_dataset(dataset, *self._workers.data_layout, wrap=_own_part)
            )
            OWN_DATA.set(own, False)
            return self._in_step(own, length)
        own = extended.distribute_own(dataset)
        if own is not None:
            by_file = OWN_DATA.get(own)
            self._given = dataclasses.replace(
                self._given,
                batches=None,
                division="divided by file" if by_file else "each worker's own dataset",
            )
            # This worker's part of the whole isn't known before it's read.
            return self._in_step(own, None)
        workers = self._workers.communicator.size
        # Items have been compared; their reader must not begin before the epoch does.
        if workers == 1 or is_items or self._choice.mode == "same":
            return self._divide(dataset), length
        peeked, feed, length = settle_dataset(
            *(self._workers, self.timer, self._choice, dataset, length),
            *(self.print_once, generator),
        )
        if feed is None:
            return peeked.divided(self._divide), length
        self._given = dataclasses.replace(
            self._given, batches=length, division="the chief's data"
        )
        return feed, length

    def _divide(self, dataset: Any) -> Any:
        """Return the iterable over this worker's parts of global batches."""
        layout = self._workers.layout
        parts = slice_dataset(dataset, *layout, wrap=self._same.wrap)
        return self._extended.distribute_parts(parts)

    def _in_step(self, dataset: Any, length: int | None) -> tuple[Any, int | None]:
        """Let workers whose data end first continue with empty batches."""
        if OWN_DATA.get(dataset) is None or self._workers.communicator.size == 1:
            return dataset, length
        return (
            PerWorkerDataset(self._workers, self.timer, dataset),
            self.consensus.longest(length),
        )

    def unwrap(self, data: Any) -> Any:
        """See `KerasHooks.unwrap`."""
        if not isinstance(data, dict) or CHECKSUM not in data:
            return data
        if self._workers.communicator.size > 1:
            local = self._workers.copies(data[CHECKSUM])
            if _tf.local_replica_id() == 0:
                self._same.compare(local[0])
        return data["batch"]

    def split(self, data: Any) -> tuple[Any, Any, Any]:
        """See `KerasHooks.split`."""
        batch, rows, total = split_part(data)
        return batch, count_rows(batch) if rows is None else rows, total

    def order_of_epochs(self) -> Callable[[int, int], Any]:
        """See `KerasHooks.order_of_epochs`."""
        seed = self._seed()
        return lambda length, epoch: epoch_order(length, 1, True, seed, epoch)

    def flush_accumulators(self, variables: Sequence[Any]) -> None:
        """See `KerasHooks.flush_accumulators`."""
        self.consensus.average(variables)

    def updating(self, variables: Sequence[Any], touched: Sequence[Any]) -> None:
        """See `KerasHooks.updating`."""

    def updated(
        self, optimizer: Any, variables: Sequence[Any], touched: Sequence[Any]
    ) -> None:
        """See `KerasHooks.updated`."""

    def has_own_state(self) -> bool:
        """See `KerasHooks.has_own_state`."""
        return False

    def begin_fit(
        self, variables: Sequence[Any], optimizer: Any, sparse: Sequence[bool]
    ) -> None:
        """See `KerasHooks.begin_fit`."""

    def evaluate(self, call: Callable[[bool], Any], forget: Callable[[], None]) -> Any:
        """See `KerasHooks.evaluate`."""
        del forget
        return call(False)

    def check_state(
        self, variables: Sequence[tuple[str, Any]], parts: Sequence[tuple[str, Any]]
    ) -> None:
        """See `KerasHooks.check_state`."""
        check_state(self._workers, variables, parts, broadcast=self._broadcast)

    def share_state(self, variables: Sequence[Any], root: int) -> Shared:
        """See `KerasHooks.share_state`."""
        return share_state(self._workers, variables, root)

    def describe(self) -> str:
        """See `KerasHooks.describe`."""
        return describe(self._given, self._workers.job.replicas, self._workers.rank)

    def gather_outputs(self, output: Any) -> Any:
        """See `KerasHooks.gather_outputs`."""
        if self._workers.communicator.size == 1 or not self.shards:
            return output
        return self._workers.ops.all_gather(output)

    def failure(self, error: Exception) -> Exception | None:
        """See `KerasHooks.failure`."""
        fault, self._same.fault = self._same.fault, None
        return fault or self._workers.ops.failure(error)

    def distribute_arrays(self, data: ArrayData) -> Any:
        """See `KerasHooks.distribute_arrays`.

        Raises:
            ValueError: The workers were given different data.
        """
        seed = self._agree(data)
        self._given = GivenData(batch_size=data.batch_size, samples=data.samples)
        return ArrayEpochs(self._workers, data, seed, self._extended.distribute_parts)

    def distribute_items(self, data: ItemData) -> Any | None:
        """See `KerasHooks.distribute_items`.

        Raises:
            ValueError: The workers were given different data.
        """
        if self._workers.communicator.size == 1:
            return None
        workers, timer = self._workers, self.timer
        chiefs = ChiefItems(
            workers, timer, self._choice, data, self._seed, self.print_once
        )
        if self._choice.mode == "chief":
            items = chiefs.settle(None)
        else:
            items = share_items(workers, timer, data, self._seed, chiefs.settle)
        if items is not None:
            self._given = GivenData(
                batch_size=items.rows,
                batches=items.length,
                endless=items.length is None,
            )
        return items

    def _agree(self, data: ArrayData) -> int:
        """Make all workers hold the same arrays; return a seed that they agree on."""
        communicator = self._workers.communicator
        settle_arrays(communicator, self._choice, data, self.print_once)
        return self._seed()

    def _seed(self) -> int:
        """Return a seed that all workers agree on, a different one each time.

        After the script has set its seed again, the sequence starts again: models that
        are compared, or folds, begin alike.
        """
        chosen = random_seed()
        seeding = _tf.seeding()
        if seeding is not self._seeding:
            self._seeding, self._orders = seeding, itertools.count()
        number = next(self._orders)
        if chosen is None:
            seed = secrets.randbits(63)
        else:
            # A script that sets a seed gets the same orders in each run.
            words = np.random.SeedSequence([chosen, number]).generate_state(
                1, np.uint64
            )
            seed = int(words[0] >> np.uint64(1))
        communicator = self._workers.communicator
        return int(communicator.broadcast([np.int64(seed)])[0])


def _own_part(index: Any, batch: Any, part: Any) -> Any:
    """Return an element of a worker's own dataset, without facts about others."""
    del index, batch
    mine, rows, _ = split_part(part)
    return mine if rows is None else with_facts(mine, None, rows)


def _known_of(dataset: Any, length: int | None) -> GivenData:
    """Return the known facts about a dataset of global batches, without reading it."""
    try:
        batch_size = _tf.static_batch_size(dataset)
    except (IndexError, TypeError, ValueError, tf.errors.OpError):
        batch_size = None  # its elements aren't batches: an error when they are used
    endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    return GivenData(batch_size=batch_size, batches=length, endless=endless)
