"""The asynchronous implementation of `_keras.protocols.DynamicHooks`.

Within an epoch the hooks request nothing of other workers but the number of the next
batch: each worker is at another step. They meet where an epoch begins and ends:

    begin    weights that callbacks have changed are rank 0's
    end      1. all meet, and exchange how many steps they took
             2. all take the servers' weights, which now include all steps
             3. all meet again, so that none continues before all have the weights
             4. statistics (BatchNormalization's) are averaged over the workers, by
                their numbers of steps; Keras sums the state of its metrics
    gate     after the callbacks, if there's another epoch: a late worker may join; it
             gets the others' statistics, rate and place in the data

Before it has joined, a late worker is alone: it can evaluate by itself, but not train.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras import ArrayData, ItemData, own_steps
from kerasdist._tf.marks import OWN_DATA
from kerasdist.ps import enter
from kerasdist.strategies.asynchronous.dynamic_batches import DynamicDataset
from kerasdist.strategies.asynchronous.live_group import WorkersChanged
from kerasdist.strategies.asynchronous.sources import (
    ArraySource,
    DatasetSource,
    ItemSource,
    OwnSource,
    Source,
)
from kerasdist.strategies.asynchronous.weights import SharedTables
from kerasdist.strategies.asynchronous.workers import AsyncWorkers
from kerasdist.strategies.data.auto_shard import own_part
from kerasdist.strategies.data.batch_check import different_batches
from kerasdist.strategies.data.pydataset_exchange import SharedItems
from kerasdist.strategies.options import Options
from kerasdist.strategies.reduce.initial_state import Shared
from kerasdist.strategies.reduce.workers import ReplicaLayout
from kerasdist.strategies.sync.hooks import Distributes, SynchronousHooks

__all__ = ["AsyncHooks"]


class AsyncHooks(SynchronousHooks):
    """The hooks of one strategy.

    Args:
        extended: The strategy's extended object.
        options: The strategy's options.
        workers: The workers, and this worker's replicas.
        shared: The weights that they train.

    Attributes:
        present: The dynamic batches of the current epoch.
        steps_of_all: How many steps all workers took in the last epoch that has ended.
    """

    _workers: AsyncWorkers
    dynamic = True

    def __init__(
        self,
        extended: Distributes,
        options: Options,
        workers: AsyncWorkers,
        shared: SharedTables,
    ) -> None:
        super().__init__(extended, options)
        self._shared = shared
        self.timer.rank = workers.rank
        self.present: DynamicDataset | None = None
        self.steps_of_all = 0
        self._datasets = 0
        self._divided_over = workers.live.ranks
        # Whether the workers' states may differ.
        self._mixed = workers.client.joining
        self._fits = 0
        self._resumed: int | None = None
        self._newest: DynamicDataset | None = None
        self._trained: tuple[Sequence[Any], Any, Sequence[bool]] = ((), None, ())
        self._words = "no data"

    # A step.

    def updating(self, variables: Sequence[Any], touched: Sequence[Any]) -> None:
        """See `KerasHooks.updating`: there must be a table before weights change."""
        values = [getattr(variable, "value", variable) for variable in variables]

        if not self._have_values(values):
            return

        def prepare(_: Any) -> None:
            self._shared.table_of(values, touched)

        if len(self._workers.devices) == 1:
            prepare(None)
        else:
            tf.distribute.get_replica_context().merge_call(prepare)

    def updated(
        self, optimizer: Any, variables: Sequence[Any], touched: Sequence[Any]
    ) -> None:
        """See `KerasHooks.updated`."""
        if self._workers.excluding:
            return
        values = [getattr(variable, "value", variable) for variable in variables]
        if not self._have_values(values):
            self._workers.ops.call(_too_early, [], [tf.int32], [tf.TensorShape([])])
            return
        window = getattr(optimizer, "gradient_accumulation_steps", None)
        steps = own_steps(optimizer) if window else None
        known = [indices for indices in touched if indices is not None]

        def merge(_: Any, *known: Any) -> Any:
            local = iter([self._workers.local(indices)[0] for indices in known])
            own = [None if indices is None else next(local) for indices in touched]

            def exchange() -> Any:
                self._shared.exchange(values, own)
                return tf.constant(0)

            if steps is None:
                return exchange()
            count = self._workers.local(steps)[0]
            ended = tf.equal(count % tf.cast(window, count.dtype), 0)
            return tf.cond(ended, exchange, lambda: tf.constant(0))

        if len(self._workers.devices) == 1:
            merge(None, *known)
        else:
            replica = tf.distribute.get_replica_context()
            replica.merge_call(merge, args=tuple(known))

    def _have_values(self, variables: Sequence[Any]) -> bool:
        """Return whether variables have values: not in the trace that creates them.

        TensorFlow discards that trace, initializes them, and traces again.
        """
        if _tf.executing_eagerly():
            return True
        copies = [self._workers.copies(v)[0] for v in variables]
        with tf.init_scope():
            return all(bool(copy.is_initialized()) for copy in copies)

    def flush_accumulators(self, variables: Sequence[Any]) -> None:
        """See `KerasHooks.flush_accumulators`; over this worker's replicas.

        A window is each worker's own: other workers may have no open one.
        """
        for variable in variables if len(self._workers.devices) > 1 else ():
            parts = self._workers.copies(variable)
            mean: Any = np.mean([np.asarray(p, np.float64) for p in parts], axis=0)
            for part in parts:
                part.assign(tf.cast(mean, part.dtype))

    # Where training begins.

    def has_own_state(self) -> bool:
        """See `KerasHooks.has_own_state`."""
        self.settle()
        return self.consensus.any_of(self._datasets > 1 or self._shared.has_begun)

    def share_state(self, variables: Sequence[Any], root: int) -> Shared:
        """See `KerasHooks.share_state`; then the table takes what rank 0 holds.

        A late worker takes the others' state when it joins them.
        """
        self.settle()
        if self.joining:
            root = 0  # which is this worker itself, until then
        return super().share_state(variables, root)

    def begin_fit(
        self, variables: Sequence[Any], optimizer: Any, sparse: Sequence[bool]
    ) -> None:
        """See `KerasHooks.begin_fit`."""
        self._fits += 1
        self._trained = variables, optimizer, sparse
        steps, self._resumed = self._resumed, None
        if not self._workers.client.joining:
            self._shared.share(variables, optimizer, sparse, steps)

    def steps_of(self, optimizer: Any) -> Any | None:
        """See `DynamicHooks.steps_of`."""
        return self._shared.steps_of(optimizer)

    def resume_at(self, steps: int | None) -> None:
        """See `DynamicHooks.resume_at`."""
        # Only the chief may be able to read the file.
        known = int(self.consensus.of_chief(-1 if steps is None else steps))
        self._resumed = known if known >= 0 else None

    def progress(self) -> tuple[int, int] | None:
        """See `DynamicHooks.progress`."""
        return self._shared.count.progress()

    def settle(self) -> None:
        """Meet; if a worker has taken steps since the last time, all take the weights.

        All workers call it at the same point.
        """
        communicator = self._workers.communicator
        dirty = [np.bool_(self._shared.dirty)]
        if communicator.all_reduce(dirty, "max")[0]:
            self._shared.pull()
            communicator.barrier()

    # Data.

    def deal_arrays(self, data: ArrayData) -> DynamicDataset:
        """See `KerasHooks.deal_arrays`."""
        return self._deal(ArraySource(data, self._agree(data)), data.batch_size)

    def deal_items(self, data: ItemData) -> DynamicDataset:
        """See `KerasHooks.deal_items`."""
        items = SharedItems(self._workers, self.timer, data)
        items.agree()
        return self._deal(ItemSource(data, self._seed()), items.rows or None)

    def deal_dataset(self, dataset: Any, length: int | None) -> DynamicDataset:
        """See `KerasHooks.deal_dataset`."""
        if OWN_DATA.get(dataset) is not None:
            return self._deal(OwnSource(dataset, length), None)
        if length is None:
            known = int(dataset.cardinality())
            length = known if known >= 0 else None
        batch_size = _batch_size(dataset)
        if not self.shards:
            return self._deal(OwnSource(dataset, length), batch_size)
        own = own_part(self._workers, dataset, ReplicaLayout(0, 1, 1))
        if own is not None:
            return self._deal(OwnSource(own, None), batch_size)
        return self._deal(DatasetSource(dataset, length), batch_size)

    def _deal(self, source: Source, batch_size: int | None) -> DynamicDataset:
        parts = [f"batches of {batch_size or 'unknown size'}"]
        if source.length is not None:
            parts.append(f"{source.length} in an epoch")
        if source.is_shared:
            parts.append("dealt out to whichever worker is free")
        else:
            parts.append("each worker's own")
        self._words = ", ".join(parts)
        self._datasets += 1
        self._newest = DynamicDataset(
            self._workers, self._shared, self, source, self._datasets
        )
        return self._newest

    def describe(self) -> str:
        """See `KerasHooks.describe`."""
        job = self._workers.job
        count, replicas = len(job.replicas), sum(job.replicas)
        return (
            f"{count} asynchronous worker(s) with {replicas} replica(s) in all, "
            f"{self._words}"
        )

    # Where an epoch ends.

    def end_epoch(self, statistics: Sequence[Any]) -> None:
        """See `KerasHooks.end_epoch`."""
        steps = 0 if self.present is None else self.present.steps
        evidence = {} if self.present is None else self.present.source.evidence
        every = self._facts({"steps": steps, "evidence": evidence})
        # A worker may be missing in the next collective.
        ranks = self._workers.communicator.ranks
        self._shared.pull()
        self._workers.communicator.barrier()
        _compare(ranks, [facts["evidence"] for facts in every])
        self.steps_of_all = sum(facts["steps"] for facts in every)
        if self.steps_of_all:
            self.consensus.average(statistics, steps / self.steps_of_all)

    def _facts(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
        gathered = self._workers.communicator.all_gather(text)
        return [json.loads(each.tobytes()) for each in gathered]

    def end_batches(self) -> None:
        """See `KerasHooks.end_batches`."""
        if self.present is not None:
            self.present.end_for_all()

    # Late workers.

    @property
    def joining(self) -> bool:
        """See `DynamicHooks.joining`."""
        return self._workers.client.joining

    def admit(self, epoch: int, known: dict[str, Any], statistics: Any) -> None:
        """See `DynamicHooks.admit`."""
        if self.present is None or len(self._workers.client.peers) == 1:
            return
        offset = self._shared.count.offset_of(self._trained[1])
        facts: dict[str, Any] = {"fit": self._fits, "epoch": epoch, "offset": offset}
        facts |= {"data": self.present.facts(), "known": known}
        if self._workers.live.join_barrier(facts):
            self._mixed = True
            self._give(statistics, 1.0)

    def join(self, statistics: Sequence[Any]) -> tuple[int, dict[str, Any]]:
        """See `DynamicHooks.join`."""
        entry = enter(self._workers.client, self._fits)
        self._workers.live.enter(entry.met, entry.ranks)
        facts = entry.facts
        if self._newest is not None:
            self._newest.join(facts["data"])
        self._give(statistics, 0.0)
        self._shared.join(*self._trained, int(facts["offset"]))
        return int(facts["epoch"]), dict(facts["known"])

    def _give(self, statistics: Sequence[Any], weight: float) -> None:
        """Set all to the mean over the workers that have trained."""
        mine = [np.float64(weight)]
        total = float(self._workers.communicator.all_reduce(mine)[0])
        if total:
            self.consensus.average(statistics, weight / total)

    # Evaluation.

    def evaluate(self, call: Callable[[bool], Any], forget: Callable[[], None]) -> Any:
        """See `KerasHooks.evaluate`."""
        live = self._workers.live
        self.settle()
        all_workers = len(self._workers.client.peers)
        while True:
            if live.ranks != self._divided_over:
                # Traced functions have divided the rows over other workers.
                forget()
                self._divided_over = live.ranks
            try:
                with self._workers.collective_scope(), live.strict():
                    return call(self._mixed or live.size < all_workers)
            except (WorkersChanged, tf.errors.OpError):
                if not live.changed:
                    raise


def _too_early() -> list[Any]:
    raise RuntimeError(
        "A step ran in the function that creates its variables: their changes would be "
        "this worker's alone. Build the model and the optimizer before the first step: "
        "`model.build(...)`, `optimizer.build(model.trainable_variables)`."
    )


def _batch_size(dataset: Any) -> int | None:
    try:
        return _tf.static_batch_size(dataset)
    except (IndexError, TypeError, ValueError, tf.errors.OpError):
        return None


def _compare(ranks: tuple[int, ...], evidence: list[dict[str, int]]) -> None:
    by_rank = dict(zip(ranks, evidence, strict=True))
    for place in sorted({place for one in evidence for place in one}):
        found = {rank: one[place] for rank, one in by_rank.items() if place in one}
        first = next(iter(found))
        others = [rank for rank, value in found.items() if value != found[first]]
        if others:
            raise different_batches(others, first)
