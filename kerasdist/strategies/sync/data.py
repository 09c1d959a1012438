"""The division of Keras's data among the workers; see `_keras.protocols.DataHooks`."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.data.arrays import ArrayData, random_seed
from kerasdist._keras.data.pydataset import ItemData
from kerasdist._keras.protocols import StepTimer
from kerasdist._tf.row_pipelines import RowPipeline, row_pipeline
from kerasdist._tf.variables import OWN_DATA, WHOLE_DATA
from kerasdist.collectives.row_exchange import equal_part
from kerasdist.placement.plan import counted
from kerasdist.strategies.data.batch_split import (
    ArrayEpochs,
    count_rows,
    epoch_order,
    fill_if_empty,
    for_replicas,
    map_tensors,
    part_of_batch,
    slice_dataset,
    split_part,
    with_facts,
)
from kerasdist.strategies.data.chief_data import (
    PeekedDataset,
    verify_or_adopt_arrays,
    verify_or_adopt_batch,
    verify_or_adopt_dataset,
)
from kerasdist.strategies.data.choice import CHECKSUM, DataChoice, SameBatches
from kerasdist.strategies.data.encoding import Encoded, decode, encode
from kerasdist.strategies.data.own_rows import (
    OwnRows,
    PerWorkerDataset,
    is_by_file,
    own_part,
)
from kerasdist.strategies.data.pydataset_exchange import SharedItems
from kerasdist.strategies.options import Options
from kerasdist.strategies.reduce.consensus import Consensus
from kerasdist.strategies.reduce.workers import Workers

# The part of the start-up line about the data, as far as known without reading.


@dataclass(frozen=True, kw_only=True)
class GivenData:
    """The known facts about the data that `fit` was given.

    Attributes:
        batch_size: Rows of a global batch; None: unknown.
        batches: Number of global batches in an epoch; None: unknown or endless.
        endless: Whether the data never end.
        samples: Number of samples in an epoch, if it's known exactly.
        division: How the data are divided, unless by rows.
    """

    batch_size: int | None = None
    batches: int | None = None
    endless: bool = False
    samples: int | None = None
    division: str = ""


def describe(given: GivenData | None, replicas: Sequence[int], rank: int) -> str:
    """Describe how a job and its data are divided.

    Args:
        given: The data; None: nothing is known about them.
        replicas: Number of replicas of each worker.
        rank: The worker that prints it.
    """
    total = sum(replicas)
    workers = counted(len(replicas), "worker")
    parts = [f"{workers} with {counted(total, 'replica')} in all"]
    if given is None:
        return parts[0]
    batch = given.batch_size
    if batch is None:
        parts.append("global batch unknown")
    else:
        low, more = divmod(batch * replicas[rank], total)
        parts.append(f"global batch {batch}")
        parts.append(f"per worker {low}{f'-{low + 1}' if more else ''}")
    parts += _amount(given, replicas, rank)
    if given.division:
        parts.append(given.division)
    elif batch is not None:
        rows = batch if given.samples is None else min(batch, given.samples)
        idle = [
            r
            for r in range(len(replicas))
            if len(replicas) > 1 and not _rows_of(rows, replicas, r)
        ]
        if idle:
            parts.append(
                f"ranks {idle} never get a row (batches of {rows} rows for {total} "
                "replicas: use a larger batch size or fewer workers)"
            )
        elif rows < total:
            parts.append(f"only {rows} of {total} replicas get rows in any batch")
    return ", ".join(parts)


def _amount(given: GivenData, replicas: Sequence[int], rank: int) -> list[str]:
    """Describe how many samples there are, and how many are this worker's."""
    batch = given.batch_size
    if given.endless:
        return ["batches without end"]
    if given.samples is not None and batch is not None:
        full, rest = divmod(given.samples, batch)
        own = full * _rows_of(batch, replicas, rank) + _rows_of(rest, replicas, rank)
        return [f"{given.samples} samples", f"{own} of them here"]
    if given.batches is None:
        return ["number of samples unknown"]
    parts = [f"{given.batches} batch(es)"]
    if batch is not None:
        # The last batch may be smaller.
        own = given.batches * _rows_of(batch, replicas, rank)
        parts.append(f"about {given.batches * batch} samples")
        parts.append(f"about {own} of them here")
    return parts


def _rows_of(rows: int, replicas: Sequence[int], rank: int) -> int:
    """Return how many rows of a global batch belong to a worker."""
    first, total = sum(replicas[:rank]), sum(replicas)
    last = equal_part(rows, total, first + replicas[rank] - 1)
    return last.stop - equal_part(rows, total, first).start


# Datasets in `tf.distribute`: this worker's parts of global batches.


class SharingExtended(_tf.MirroredExtended):
    """TensorFlow's strategy of local replicas, which share data with other workers.

    Args:
        container: The strategy.
        workers: The connected workers, and this worker's replicas.

    Attributes:
        workers: See above.
    """

    def __init__(self, container: Any, workers: Workers) -> None:
        super().__init__(container, devices=list(workers.devices))
        self.workers = workers

    # How many, and which.

    @property
    def _num_replicas_in_sync(self) -> int:
        return self.workers.replicas

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self.workers.layout.first + int(replica_id)

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return int(replica_id_in_sync_group) - self.workers.layout.first

    # Data: the elements of a dataset are global batches.

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        own = self.distribute_own(dataset, options)
        if own is not None:
            return own
        part = dataset
        if not self.workers.is_alone:
            part = slice_dataset(dataset, self.workers.layout)
        made = self._from_function(lambda _: part, options)
        WHOLE_DATA.set(made, dataset)
        return made

    def distribute_parts(self, dataset: Any, *, complete: bool = True) -> Any:
        """Distribute a dataset of parts: one element per local replica in turn.

        Replicas in host memory need little. TensorFlow's distributed iterator would
        cost one of them more than its own time: it makes a GeneratorDataset, which
        sets glibc's M_TRIM_THRESHOLD, and malloc then returns the pages of each step to
        the system and faults them in again.

        Args:
            dataset: The dataset.
            complete: Whether its last element is for the last replica.
        """
        devices = self.worker_devices
        if devices == (self.workers.host,):
            return dataset
        kinds = {tf.DeviceSpec.from_string(device).device_type for device in devices}
        if complete and kinds == {"CPU"}:
            return _tf.PartsDataset(dataset, devices, self.workers.host)
        return self._from_function(lambda _: dataset, None)

    def distribute_own(self, dataset: Any, options: Any = None) -> Any | None:
        """Distribute this worker's part of a dataset whose policy is FILE or OFF.

        Returns None with another policy, or if there's no other worker.
        """
        if self.workers.communicator.size == 1:
            return None
        own = own_part(self.workers, dataset)
        if own is None:
            return None
        made = self._from_function(lambda _: own, options)
        OWN_DATA.set(made, is_by_file(dataset))
        return made

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        made = self._from_function(dataset_fn, options)
        # A function's dataset is the worker's own, see `data.own_rows`.
        OWN_DATA.set(made, False)
        return made

    def _make_dataset_iterator(self, dataset: Any) -> Any:
        part = slice_dataset(dataset, self.workers.layout)
        return self._make_input_fn_iterator(lambda _: part)

    def _make_input_fn_iterator(
        self, input_fn: Any, replication_mode: Any = None
    ) -> Any:
        del replication_mode  # there's one function per worker in any case
        return _tf.InputFunctionIterator(
            input_fn,
            self._input_workers,
            [self._input_place()],
            self._container_strategy(),
        )

    def _input_place(self) -> Any:
        communicator = self.workers.communicator
        return tf.distribute.InputContext(
            communicator.size, communicator.rank, self.workers.replicas
        )

    def _from_function(self, dataset_fn: Callable[[Any], Any], options: Any) -> Any:
        return _tf.distribute_from_function(
            dataset_fn,
            self._input_workers_with_options(options),
            [self._input_place()],
            self._container_strategy(),
            options,
        )


# Seconds of input for a step that nobody needs to be told of.
_CHEAP = 0.005


class SynchronousData:
    """The division of all data that a strategy's models are given.

    Args:
        extended: The strategy's extended object.
        timer: Measures steps, and the time of waiting.
        options: The strategy's options.
        log_once: Logs a line on the chief, given its kind.

    Attributes:
        orders: See `DataHooks`.
    """

    # The class of the iterables over arrays.
    array_epochs: Callable[..., Any] = ArrayEpochs
    fill_if_empty = staticmethod(fill_if_empty)
    # The seed of a job that workers may join, for scripts that set none.
    job_seed: int | None = None
    # Whether workers may join one that is alone, which then divides its data.
    may_be_joined = False
    # In place of the option `data`, and of errors about data that differ.
    data_mode: str | None = None
    explain: Callable[[ValueError], ValueError] = staticmethod(lambda error: error)

    def __init__(
        self,
        extended: SharingExtended,
        timer: StepTimer,
        options: Options,
        log_once: Callable[[str, str], None],
    ) -> None:
        workers = extended.workers
        self._extended = extended
        self._workers = workers
        self._timer = timer
        self._log_once = log_once
        self.orders = 0
        self._seeding = _tf.seeding()
        self._given: GivenData | None = None
        self._same = SameBatches(workers, self.explain)
        self._choice = DataChoice(
            self.data_mode or options.data, log_once, self.explain
        )
        self.shards = options.shards

    @property
    def length_unknown(self) -> bool:
        """Whether the end of the data that `fit` was given shows only when they end."""
        given = self._given
        return given is not None and not (
            given.endless or given.batches or given.samples
        )

    def own_rows(self, batch: Any) -> Any:
        """Return this worker's rows of a global batch: per replica if several."""
        layout = self._workers.data_layout
        if self.shards and self._workers.size > 1:
            communicator = self._workers.communicator
            batch = verify_or_adopt_batch(communicator, self._choice, batch)
        if layout.total == 1:
            # Outside of graphs nothing else converts arrays to tensors.
            return tf.nest.map_structure(
                lambda x: tf.convert_to_tensor(x) if isinstance(x, np.ndarray) else x,
                batch,
            )
        batch = map_tensors(tf.convert_to_tensor, batch)
        rows = count_rows(batch)

        def part(local: int) -> Any:
            replica = layout.first + local
            return part_of_batch(batch, rows, replica, layout, whole=self.shards)

        return for_replicas(self._workers.devices, part)

    def distribute_dataset(
        self, dataset: Any, length: int | None, source: Any = None
    ) -> tuple[Any, int | None]:
        """Return the iterable over this worker's parts of a `tf.data.Dataset`.

        Also return its number of batches, the same on all workers; None if not known.
        `source` is what it reads, if that's a plain generator, with its facts, or a
        PyDataset, as `ItemData`.
        """
        if isinstance(dataset, tf.distribute.DistributedDataset):
            self._given = GivenData(division="distributed already")
            return self._in_step(dataset, length)
        self._given = known_of(dataset, length)
        workers = self._workers.communicator.size
        if self._workers.replicas == 1 and not self.may_be_joined:
            return self._extended.distribute_parts(dataset), length
        if not self.shards:
            return self._divide_own(dataset, length)
        own = self._own_part(dataset)
        if own is not None and workers == 1:
            return self._in_step(own, length)
        if own is not None:
            by_file = OWN_DATA.get(own)
            self._given = dataclasses.replace(
                self._given,
                batches=None,
                division="divided by file" if by_file else "each worker's own dataset",
            )
            # This worker's part of the whole isn't known before it's read.
            return self._in_step(own, None)
        # Items have been compared; their reader must not begin before the epoch does.
        if workers == 1 or isinstance(source, ItemData):
            return self._passes(self._divide, dataset), length
        found: RowPipeline | str = "it reads a generator"
        # Which are its own may change at any step of a job that others may join.
        if source is None and not self.may_be_joined:
            found = row_pipeline(dataset)
        rows = None if isinstance(found, str) else found
        divide, whole = self._divide, dataset
        if rows is not None:
            divide, whole = partial(self._divide_rows, rows), rows.windows
        if self._choice.mode == "same":
            return self._passes(divide, whole), length
        peeked = PeekedDataset(self._workers, divide, dataset, rows)
        made, length = verify_or_adopt_dataset(
            peeked, self._timer, self._choice, length, source
        )
        if made is not peeked:
            self._given = dataclasses.replace(
                self._given, batches=length, division="the chief's data"
            )
        elif rows is None:
            self._tell_cost(peeked.seconds, str(found))
        return made, length

    def _divide_own(self, dataset: Any, length: int | None) -> tuple[Any, int | None]:
        """Return the iterable over this worker's own dataset, and its length."""
        self._given = GivenData(division="each worker's own data")
        own = self._extended.distribute_parts(
            slice_dataset(dataset, self._workers.data_layout, wrap=_own_part)
        )
        OWN_DATA.set(own, False)
        return self._in_step(own, length)

    def _own_part(self, dataset: Any) -> Any | None:
        """Return this worker's part of a dataset whose policy is FILE or OFF."""
        return self._extended.distribute_own(dataset)

    def _passes(self, divide: Callable[..., Any], dataset: Any) -> Any:
        """Return the iterable over this worker's parts of a dataset, see `Passes`."""
        return divide(dataset)

    def _divide(self, dataset: Any, compared: bool = False) -> Any:
        """Return this worker's parts of global batches; their comparison is cheap."""
        del compared
        parts = slice_dataset(dataset, self._workers.layout, self._same.wrap)
        return self._extended.distribute_parts(parts)

    def _divide_rows(
        self, rows: RowPipeline, windows: Any, compared: bool = False
    ) -> Any:
        """Return this worker's parts of windows: see `OwnRows.divide`."""
        own = OwnRows(rows, self._workers.layout, self._same)
        return self._extended.distribute_parts(own.divide(windows, compared))

    def _tell_cost(self, seconds: float, why: str) -> None:
        """Say once what it costs that each worker makes all rows."""
        if seconds < _CHEAP:
            return
        workers = self._workers.communicator.size
        self._log_once(
            "rows of datasets",
            f"Each of the {workers} ranks makes all rows of each global batch, "
            f"{seconds * 1e3:.3g} ms of input for a step here, and uses its part of "
            f"them: {why}. A rank makes only its own rows if `map` with a function "
            "without a state is called after `shuffle` and before `batch`; see "
            "docs/how_it_works.md.",
        )

    def _in_step(self, dataset: Any, length: int | None) -> tuple[Any, int | None]:
        """Let workers whose data end first continue with empty batches."""
        alone = self._workers.communicator.size == 1 and not self.may_be_joined
        if OWN_DATA.get(dataset) is None or alone:
            return dataset, length
        return (
            PerWorkerDataset(self._workers, self._timer, dataset),
            Consensus(self._workers).longest(length),
        )

    def unwrap(self, data: Any) -> Any:
        """Return the batch for a step from an element of a distributed dataset."""
        if not isinstance(data, dict) or CHECKSUM not in data:
            return data
        if self._workers.communicator.size > 1:
            local = self._workers.copies(data[CHECKSUM])
            if _tf.local_replica_id() == 0:
                self._same.compare(local[0])
        return data["batch"]

    def split(self, data: Any) -> tuple[Any, Any, Any]:
        """Return a step's batch, its rows, and the global batch's rows if known.

        A batch with 0 rows may contain a row for the computation.
        """
        batch, rows, total = split_part(data)
        return batch, count_rows(batch) if rows is None else rows, total

    def order_of_epochs(self) -> Callable[[int, int], Any]:
        """Return a function of (length, epoch): an order that all workers agree on."""
        seed = self.seed()
        return lambda length, epoch: epoch_order(length, 1, True, seed, epoch)

    def describe(self) -> str:
        """Describe the workers and their data, for the start-up line."""
        return describe(self._given, self._workers.job.replicas, self._workers.rank)

    def end_epoch(self) -> None:
        """See `DataHooks.end_epoch`."""

    def gather_outputs(self, output: Any) -> Any:
        """Concatenate all workers' outputs along the first dimension."""
        communicator, ops = self._workers.communicator, self._workers.ops
        if communicator.size == 1 or not self.shards:
            return output
        if output.dtype != tf.string:
            return ops.all_gather(output)

        def gather(texts: Any) -> list[Any]:
            lengths, octets = map(communicator.all_gather, encode(texts).arrays)
            pairs = zip(lengths, octets, strict=True)
            parts = [decode(Encoded("text", pair)).numpy() for pair in pairs]
            return [np.concatenate(parts)]

        like = tf.TensorSpec([None, *output.shape[1:]], tf.string)
        return ops.call(gather, [output], [like])[0]

    def distribute_arrays(self, data: ArrayData) -> Any:
        """Return the iterable over this worker's parts of an `ArrayData`.

        Raises:
            ValueError: The workers were given different data.
        """
        seed = self.agree(data)
        self._given = GivenData(batch_size=data.batch_size, samples=data.samples)
        distribute = self._extended.distribute_parts
        return self.array_epochs(self._workers, data, seed, distribute)

    def distribute_items(self, data: ItemData) -> Any | None:
        """Return the iterable over this worker's parts of an `ItemData`'s items.

        None if its items can't be exchanged: then all workers read all of them.

        Raises:
            ValueError: The workers were given different data.
        """
        if self._workers.communicator.size == 1:
            return None
        items = SharedItems(self._workers, self._timer, self._choice, data, self.seed)
        found = items.verify_or_adopt()
        if found is items and data.shuffle:
            items.seed = self.seed()
        if found is not None:
            self._given = GivenData(
                batch_size=found.rows,
                batches=found.length,
                endless=found.length is None,
            )
        return found

    def agree(self, data: ArrayData) -> int:
        """Make all workers hold the same arrays; return a seed that they agree on."""
        verify_or_adopt_arrays(self._workers.communicator, self._choice, data)
        return self.seed()

    def seed(self) -> int:
        """Return a seed that all workers agree on, a different one each time.

        After the script has set its seed again, the sequence starts again: models that
        are compared, or folds, begin alike.
        """
        chosen = random_seed()
        seeding = _tf.seeding()
        if seeding is not self._seeding:
            self._seeding, self.orders = seeding, 0
        number = self.orders
        self.orders += 1
        if chosen is None:
            chosen = self.job_seed
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


def known_of(dataset: Any, length: int | None) -> GivenData:
    """Return the known facts about a dataset of global batches, without reading it."""
    endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    return GivenData(
        batch_size=_tf.static_batch_size(dataset), batches=length, endless=endless
    )
