"""The `tf.distribute` extended object of asynchronous workers.

It has two views of the same workers, see `strategies.asynchronous.live_group`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.data.arrays import ArrayData, LoopData
from kerasdist._keras.data.pydataset import GeneratorFacts, ItemData
from kerasdist._keras.protocols import KerasHooks, StepTimer
from kerasdist._tf.variables import OWN_DATA
from kerasdist.collectives import gather_json
from kerasdist.parameter_server import ServerClient
from kerasdist.placement.plan import counted
from kerasdist.strategies.asynchronous.dynamic_batches import (
    ArraySource,
    AsyncBatches,
    AsyncDataset,
    DatasetSource,
    ItemSource,
    OwnSource,
    Source,
)
from kerasdist.strategies.asynchronous.live_group import (
    AsyncWorkers,
    LiveJob,
    WorkersChanged,
)
from kerasdist.strategies.asynchronous.tables import SharedTables
from kerasdist.strategies.data.batch_split import for_replicas, split_part
from kerasdist.strategies.data.choice import different_batches
from kerasdist.strategies.data.own_rows import own_part
from kerasdist.strategies.data.pydataset_exchange import compare_items
from kerasdist.strategies.measure.step_clock import StepClock
from kerasdist.strategies.options import Options
from kerasdist.strategies.reduce.consensus import Consensus
from kerasdist.strategies.reduce.workers import ReplicaLayout
from kerasdist.strategies.sync.data import SynchronousData
from kerasdist.strategies.sync.extended import SynchronousExtended

# Custom loops over the data that asynchronous workers train on.
#
#     for batch in loop: train(batch)                       outside of a `tf.function`
#     train(iterator)              it calls `next`; one trace serves all passes
#     for batch in loop: ...       in a `tf.function`
#
# All workers begin and end a pass together; there they meet. Between these two nothing
# has an order over the workers, since each takes other numbers of batches. So a
# reduction outside of a step is over this worker's replicas until its pass has ended.
#
# A worker that leaves a pass before its end, with `break`, can't meet the others there,
# since an error may have ended it: it does that before its next collective.


class AsyncLoop(LoopData, _tf.DistributedIterable):
    """The iterable of a custom loop.

    Args:
        dynamic: The dataset's dynamic batches.
        dataset: The dataset.
    """

    def __init__(self, dynamic: AsyncDataset, dataset: Any) -> None:
        self.dataset = dataset
        self._dynamic = dynamic
        self._workers = dynamic.workers
        # The pass that is open.
        self._batches: AsyncBatches | None = None
        self._number = 0
        self._spec: Any = None
        self._in_graphs = LoopIterator(self, None)

    @property
    def element_spec(self) -> Any:
        """The specification of a replica's batch, of any number of rows."""
        if self._spec is None:
            spec = getattr(self.dataset, "element_spec", None)
            if spec is None or self._dynamic.source.is_distributed:
                example = _tf.select_replica(0, self._dynamic.example())
                spec = tf.nest.map_structure(tf.type_spec_from_value, example)
            self._spec = tf.nest.map_structure(_of_any_rows, spec)
        return self._spec

    def __iter__(self) -> Iterator[Any]:
        if tf.executing_eagerly():
            return LoopIterator(self, self.begin())

        def begin() -> list[Any]:
            self.begin()
            return [np.int32(0)]

        self._workers.ops.call(begin, [], [tf.TensorSpec([], tf.int32)])
        return self._in_graphs

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Call a function with each batch of a pass, in a `tf.function`.

        TensorFlow makes this of a `for` statement there.

        Args:
            initial_state: A structure of tensors.
            reduce_func: Takes the state and a batch; returns the next state.
        """
        iterator: Any = iter(self)

        def body(more: Any, state: Any) -> tuple[Any, Any]:
            del more
            found = iterator.get_next_as_optional()
            present = found.has_value()
            return present, tf.cond(
                present, lambda: reduce_func(state, found.get_value()), lambda: state
            )

        return tf.while_loop(
            lambda more, _: more,
            body,
            (tf.constant(True), initial_state),
            parallel_iterations=1,
        )[1]

    def begin(self) -> AsyncBatches:
        """Begin a pass; all workers call it at the same place of the script."""
        if self._batches is not None:
            self.leave(self._batches)
        batches = self._batches = self._dynamic.begin_epoch()
        self._number += 1
        self._workers.passes.add(self)
        return batches

    def take(self) -> Any | None:
        """Return the next batch of the pass that is open, None at its end.

        At the end the workers have met, and have the same weights.
        """
        batches = self._batches
        if batches is None:
            return None
        for batch in batches:
            # Keras's steps get the number of rows, a user's steps don't.
            return split_part(batch)[0]
        batches.close()
        self._batches = None
        self._workers.passes.discard(self)
        self._meet(self._number)
        return None

    def leave(self, batches: AsyncBatches | None) -> None:
        """Leave a pass before its end, if it's the one that is open. Doesn't wait."""
        if batches is None or batches is not self._batches:
            return
        batches.close(wait=False)
        self._batches = None
        self._workers.passes.discard(self)
        number = self._number
        self._workers.live.owed.append(lambda: self._meet(number))

    def _meet(self, number: int) -> None:
        self._dynamic.weights.pull_if_dirty(f"ends pass {number} of {self._dynamic}")

    def next_in_graph(self, *, required: bool = False) -> tuple[Any, Any]:
        """Return whether there's another batch, and the batch, in a graph.

        Args:
            required: Whether it raises OutOfRangeError at the end.
        """
        devices = self._workers.devices
        spec = self.element_spec
        flat = tf.nest.flatten(spec, expand_composites=True)

        def take() -> list[Any]:
            batch = self.take()
            if batch is None and required:
                raise StopIteration
            if batch is None:
                return [np.bool_(False), *self._nothing()]
            leaves = []
            for index in range(len(devices)):
                part = _tf.select_replica(index, batch)
                tf.nest.assert_same_structure(spec, part, expand_composites=True)
                leaves += tf.nest.flatten(part, expand_composites=True)
            return [np.bool_(True), *[leaf.numpy() for leaf in leaves]]

        more, *leaves = self._workers.ops.call(
            take, [], [tf.TensorSpec([], tf.bool), *flat * len(devices)]
        )

        def part(index: int) -> Any:
            mine = leaves[index * len(flat) : (index + 1) * len(flat)]
            mine = [tf.identity(leaf) for leaf in mine]
            return tf.nest.pack_sequence_as(spec, mine, expand_composites=True)

        return more, for_replicas(devices, part)

    def _nothing(self) -> list[Any]:
        """Return arrays in the place of a batch that isn't there."""
        flat = tf.nest.flatten(self.element_spec, expand_composites=True)
        return [
            np.zeros([size or 0 for size in each.shape], each.dtype.as_numpy_dtype)
            for each in flat
        ] * len(self._workers.devices)


class LoopIterator(_tf.DistributedIterator):
    """An iterator over one pass of a loop; in graphs over the pass that is open.

    Args:
        loop: The loop.
        batches: The pass; None in graphs.
    """

    def __init__(self, loop: AsyncLoop, batches: AsyncBatches | None) -> None:
        self._loop = loop
        self._batches = batches

    def __iter__(self) -> LoopIterator:
        return self

    def __next__(self) -> Any:
        if not tf.executing_eagerly():
            return self._loop.next_in_graph(required=True)[1]
        batch = self._loop.take()
        if batch is None:
            raise StopIteration
        return batch

    def get_next(self) -> Any:
        """Return the next batch; OutOfRangeError (StopIteration outside of a graph)."""
        return next(self)

    def get_next_as_optional(self) -> _tf.OptionalBatch:
        """Return the next batch, or the fact that there is none."""
        if not tf.executing_eagerly():
            return _tf.OptionalBatch(*self._loop.next_in_graph())
        batch = self._loop.take()
        return _tf.OptionalBatch(tf.constant(batch is not None), batch)

    @property
    def element_spec(self) -> Any:
        """See `AsyncLoop.element_spec`."""
        return self._loop.element_spec

    def __tf_tracing_type__(self, context: Any) -> Any:
        # A function isn't traced again for each pass.
        return _tf.SameForAll(self._loop._in_graphs)

    def __del__(self) -> None:
        # `break`, or an error in the loop. Nothing may wait here.
        with contextlib.suppress(AttributeError):
            self._loop.leave(self._batches)


def _of_any_rows(spec: Any) -> Any:
    """Return the specification of batches with any number of rows."""
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec


# Dynamic batches of the data that asynchronous workers train on.


class AsyncData:
    """Makes dynamic batches; see `_keras.protocols.AsyncDataHooks`.

    Args:
        workers: The workers that the batches are for.
        weights: The weights that they train.
        timer: Measures steps, and the time of waiting.
        data: The division of data that aren't trained on.

    Attributes:
        workers, weights, timer: See above.
        present: The dataset that the current epoch takes its batches from.
        newest: The dataset that was made last.
        datasets: The number of datasets that were made.
    """

    def __init__(
        self,
        workers: AsyncWorkers,
        weights: SharedTables,
        timer: StepTimer,
        data: SynchronousData,
    ) -> None:
        self.workers, self.weights, self.timer = workers, weights, timer
        self._data = data
        self.present: AsyncDataset | None = None
        self.newest: AsyncDataset | None = None
        self.datasets = 0
        self._words = "no data"

    def distribute_arrays(self, data: ArrayData) -> AsyncDataset:
        """Return dynamic batches of arrays: see `AsyncDataset`."""
        return self._make(ArraySource(data, self._data.agree(data)), data.batch_size)

    def distribute_items(self, data: ItemData) -> AsyncDataset:
        """Return dynamic batches of a PyDataset."""
        form = compare_items(self.workers.communicator, data)
        rows = None if form is None else form.rows or None
        return self._make(ItemSource(data, self._data.seed()), rows)

    def distribute_dataset(
        self, dataset: Any, length: int | None, source: Any = None
    ) -> tuple[AsyncDataset, int | None]:
        """Return dynamic batches of a `tf.data.Dataset`, and their number.

        Raises:
            ValueError: A generator can't be divided.
        """
        replicas = self.workers.replicas
        if isinstance(source, GeneratorFacts) and self._data.shards and replicas > 1:
            raise ValueError(
                "A plain Python generator can't be divided over several replicas: it "
                "isn't known whether each worker's generator yields the same batches "
                f"or its own part of them. Received: a generator, with {replicas} "
                "replicas. Use arrays, a `keras.utils.PyDataset`, or a "
                "`tf.data.Dataset` (`tf.data.Dataset.from_generator`) of global "
                "batches, the same on all workers; or, if each worker's generator "
                "yields its own part, pass shard='off' to the strategy."
            )
        made = self._of_dataset(dataset, length)
        return made, made.length

    def _of_dataset(self, dataset: Any, length: int | None) -> AsyncDataset:
        if OWN_DATA.get(dataset) is not None:
            return self._make(OwnSource(dataset, length), None)
        if length is None:
            known = int(dataset.cardinality())
            length = known if known >= 0 else None
        batch_size = _tf.static_batch_size(dataset)
        if not self._data.shards:
            return self._make(OwnSource(dataset, length), batch_size)
        own = own_part(self.workers, dataset, ReplicaLayout(0, 1, 1))
        if own is not None:
            return self._make(OwnSource(own, None), batch_size)
        return self._make(DatasetSource(dataset, length), batch_size)

    def _make(self, source: Source, batch_size: int | None) -> AsyncDataset:
        parts = [f"batches of {batch_size or 'unknown size'}"]
        if source.length is not None:
            parts.append(f"{source.length} in an epoch")
        shared = "dealt out to whichever worker is free"
        parts.append(shared if source.is_shared else "each worker's own")
        self._words = ", ".join(parts)
        self.datasets += 1
        client = self.workers.client
        client.datasets += 1
        self.newest = AsyncDataset(self, source, client.datasets)
        return self.newest

    def describe(self) -> str:
        """Describe the workers and their data, for the start-up line."""
        job = self.workers.job
        workers = counted(len(job.replicas), "asynchronous worker")
        replicas = counted(sum(job.replicas), "replica")
        return f"{workers} with {replicas} in all, {self._words}"

    def end_batches(self) -> None:
        """End the epoch for all workers, because one of them wants to stop."""
        if self.present is not None:
            self.present.end_for_all()


# The epochs of asynchronous workers.
#
# Within an epoch a worker requests nothing of the others but the number of the next
# batch: each worker is at another step. They meet where an epoch begins and ends:
#
#     begin    weights that callbacks have changed are rank 0's
#     end      1. all meet, and exchange how many steps they took
#              2. all take the servers' weights, which now include all steps
#              3. all meet again, so that none continues before all have the weights
#              4. statistics (BatchNormalization's) are averaged over the workers, by
#                 their numbers of steps; Keras sums the state of its metrics
#     barrier  after the callbacks, if there's another epoch: a late worker may join; it
#              gets the others' statistics, rate and place in the data
#
# Before it has joined, a late worker is alone: it can evaluate by itself, but not
# train.


class AsyncEpochs:
    """The epochs of one strategy; its hooks in Keras's loops.

    Args:
        workers: The workers, and this worker's replicas.
        weights: The weights that they train.
        data: The batches that they train on.

    Attributes:
        weights, data: See above.
        steps_of_all: How many steps all workers took in the last epoch that has ended.
    """

    def __init__(
        self, workers: AsyncWorkers, weights: SharedTables, data: AsyncData
    ) -> None:
        self._workers = workers
        self._consensus = Consensus(workers)
        self.weights = weights
        self.data = data
        self.steps_of_all = 0
        self._divided_over = workers.live.ranks
        # Whether the workers' states may differ.
        self._mixed = workers.client.joining

    def has_own_state(self) -> bool:
        """Take the others' weights; return whether the rest of the state may differ.

        All workers call it.
        """
        self.weights.pull_if_dirty("begins `fit`")
        differs = self.data.datasets > 1 or self.weights.has_begun
        return self._consensus.any_of(differs)

    def end_epoch(self, statistics: Sequence[Any]) -> None:
        """Meet at the end of an epoch of training.

        Afterwards all have the same weights, and the same `statistics`.
        """
        present = self.data.present
        steps = 0 if present is None else present.steps
        evidence = {} if present is None else present.source.evidence
        every = gather_json(
            self._workers.communicator, {"steps": steps, "evidence": evidence}
        )
        # A worker may be missing in the next collective.
        ranks = self._workers.communicator.ranks
        self.weights.pull()
        self._workers.communicator.barrier()
        compare_evidence(ranks, [facts["evidence"] for facts in every])
        self.steps_of_all = sum(facts["steps"] for facts in every)
        if self.steps_of_all:
            self._consensus.average(statistics, steps / self.steps_of_all)

    @property
    def joining(self) -> bool:
        """Whether this worker has started late, and hasn't joined the others."""
        return self._workers.client.joining

    @property
    def in_pass(self) -> bool:
        """Whether a custom loop is in a pass over a distributed dataset."""
        return bool(self._workers.passes)

    def admit(self, epoch: int, known: dict[str, Any], statistics: Any) -> None:
        """Let late workers join before another epoch.

        Args:
            epoch: Its number.
            known: Facts about the trainer for late workers.
            statistics: As in `end_epoch`; late workers get those of the others.
        """
        present = self.data.present
        if present is None or len(self._workers.client.peers) == 1:
            return
        offset, fits = self.weights.offset, self._workers.client.fits
        facts: dict[str, Any] = {"fit": fits, "epoch": epoch, "offset": offset}
        facts |= {"data": present.facts(), "known": known}
        if self._workers.live.join_barrier(facts):
            self._mixed = True
            self._give(statistics, 1.0)

    def join(self, statistics: Sequence[Any]) -> tuple[int, dict[str, Any]]:
        """Join the others; return the epoch that begins, and their facts."""
        facts = self._workers.live.enter()
        if self.data.newest is not None:
            self.data.newest.join(facts["data"])
        self._give(statistics, 0.0)
        self.weights.join(int(facts["offset"]))
        return int(facts["epoch"]), dict(facts["known"])

    def _give(self, statistics: Sequence[Any], weight: float) -> None:
        """Set all to the mean over the workers that have trained."""
        mine = [np.float64(weight)]
        total = float(self._workers.communicator.all_reduce(mine)[0])
        if total:
            self._consensus.average(statistics, weight / total)

    def evaluate(self, call: Callable[[bool], Any], retrace: Callable[[], None]) -> Any:
        """Evaluate or predict on all workers.

        `call` does it; its argument is whether the data must be divided again, and it
        may be called several times. `retrace` drops functions that were traced for
        other workers.
        """
        live = self._workers.live
        self.weights.pull_if_dirty("evaluates or predicts")
        all_workers = len(self._workers.client.peers)
        while True:
            if live.ranks != self._divided_over:
                # Traced functions have divided the rows over other workers.
                retrace()
                self._divided_over = live.ranks
            try:
                with self._workers.collective_scope(), live.strict():
                    return call(self._mixed or live.size < all_workers)
            except (WorkersChanged, tf.errors.OpError):
                if not live.changed:
                    raise


def compare_evidence(ranks: tuple[int, ...], evidence: list[dict[str, int]]) -> None:
    """Raise an error if two of these ranks have noted different batches at a place."""
    by_rank = dict(zip(ranks, evidence, strict=True))
    for place in sorted({place for one in evidence for place in one}):
        found = {rank: one[place] for rank, one in by_rank.items() if place in one}
        first = next(iter(found))
        others = [rank for rank, value in found.items() if value != found[first]]
        if others:
            raise different_batches(others, first)


class AsyncExtended(SynchronousExtended):
    """Replicas of this worker, which shares weights with all other workers.

    Args:
        container: The strategy.
        devices: Canonical names of this worker's devices, one per replica.
        job: This worker's connection to the servers.
        options: What the strategy was asked for.

    Attributes:
        shared: The weights that all workers train.
        dynamic_data: The batches that they train on.
    """

    workers_class = AsyncWorkers
    workers: AsyncWorkers
    updates_by_mean = False
    shared: SharedTables

    def __init__(
        self,
        container: Any,
        devices: Sequence[str],
        job: ServerClient,
        options: Options,
    ) -> None:
        super().__init__(container, devices, LiveJob(job), options)

    def _make_hooks(self, options: Options, timer: StepClock) -> KerasHooks:
        hooks = super()._make_hooks(options, timer)
        workers, self.shared = self.workers, SharedTables(self.workers)
        self.dynamic_data = AsyncData(workers, self.shared, timer, self.data)
        epochs = AsyncEpochs(workers, self.shared, self.dynamic_data)
        return dataclasses.replace(hooks, dynamic=epochs)

    def common_seed(self) -> int:
        """See `SynchronousExtended.common_seed`; server 0 keeps it for joiners."""
        client = self.workers.client
        if not client.joining:
            # A worker whose script sets a seed itself isn't here: the others notice.
            client.communicator.barrier()
        return client.seed

    def first_value(self, value: Any) -> Any:
        """See `SynchronousExtended.first_value`; a step waits for no other worker."""
        workers = self.workers
        numeric = (
            value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool
        )
        if not workers.is_local or not numeric:
            return super().first_value(value)
        if workers.client.joining:
            return value

        def first(mine: Any) -> list[Any]:
            return [workers.client.first_value(mine)]

        return workers.ops.call(first, [value], [value])[0]

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        # Not while the workers evaluate together: see `AsyncWorkers.is_local`.
        with self.workers.local_step():
            return super()._call_for_each_replica(fn, args, kwargs)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if self.workers.is_evaluating:
            return super()._experimental_distribute_dataset(dataset, options)
        return self._loop(dataset)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        made = super()._distribute_datasets_from_function(dataset_fn, options)
        return made if self.workers.is_evaluating else self._loop(made)

    def _loop(self, dataset: Any) -> AsyncLoop:
        dynamic, _ = self.dynamic_data.distribute_dataset(dataset, None)
        return AsyncLoop(dynamic, dataset)
