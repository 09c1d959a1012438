"""The chief's batches on all workers, read ahead.

1. chief   a thread reads batches ahead
2. all     between two steps: the chief sends all batches that are ready, at least
           one, to all workers in one collective
3. all     each worker keeps its replicas' rows of a batch, and takes a step

The end of the data is sent like a batch, and so is an exception of the chief's
data: all workers raise it. Collectives run on the thread of Keras's loop, where
those of all workers are in the same order.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras import BatchIterable, BatchIterator, StepTimer, close_at_end
from kerasdist.collectives.row_exchange import equal_part
from kerasdist.strategies.chief_data.encoding import (
    Encoded,
    decode,
    encode,
    pack,
    size_of,
    unpack,
)
from kerasdist.strategies.data.batch_split import slice_rows, with_facts
from kerasdist.strategies.reduce.workers import Workers

# Batches that are kept ready.
_AHEAD = 8
# After this many bytes no further batch is added to a collective.
_AT_ONCE = 8 << 20
# Seconds between two checks for the end of a thread, and until it is abandoned.
_POLL, _PATIENCE = 0.1, 5.0


class ChiefFeed(BatchIterable):
    """The iterable for Keras in place of the chief's data; each iteration is a pass.

    Args:
        workers: The connected workers.
        timer: Measures steps, and what they wait for.
        passes: Returns an iterable over the batches of the next pass, and reads none
            of them yet; only the chief calls it.
        structure: A nest like a batch.
        example: A batch for its shapes; None if there is none.

    Attributes:
        length: Number of batches of a pass; None: unknown.
        rows: Number of rows of a batch; 0: unknown.
    """

    length: int | None = None
    rows = 0

    def __init__(
        self,
        workers: Workers,
        timer: StepTimer,
        passes: Callable[[], Iterable[Any]],
        structure: Any,
        example: Any,
    ) -> None:
        self.workers, self.timer = workers, timer
        self.passes = passes
        self.structure = structure
        self._example = example
        self.reader: _Reader | None = None

    def __iter__(self) -> FeedIterator:
        return FeedIterator(self)

    def example(self) -> Any | None:
        """See `BatchIterable.example`."""
        return self._example

    def close(self) -> None:
        """End the thread that reads ahead."""
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()


class FeedIterator(BatchIterator):
    """One pass."""

    def __init__(self, feed: ChiefFeed) -> None:
        self._feed = feed
        self._reader: _Reader | None = None
        # A dataset that is shuffled again in each pass counts its iterators.
        chief = feed.workers.communicator.rank == 0
        self._batches = feed.passes() if chief else ()
        self._waiting: deque[tuple[str, str, list[Encoded]]] = deque()
        self._ended: BaseException | None = None

    def at_least_one(self) -> FeedIterator:
        """See `BatchIterator.at_least_one`.

        Raises:
            StopIteration: There is none.
            Exception: The error of the chief's data.
        """
        if self._ended is not None:
            raise self._ended
        if not self._waiting:
            self._exchange()
        kind, text, _ = self._waiting[0]
        if kind == "batch":
            return self
        self._waiting.clear()
        self._ended = StopIteration()
        if kind == "error":
            self._ended = RuntimeError(
                "The chief's data, which are used on all workers, have ended with an "
                f"error. Received: {text}. Rank 0 shows where it was raised."
            )
            if self._reader is not None and self._reader.error is not None:
                self._ended = self._reader.error
        self._feed.close()
        raise self._ended

    def __next__(self) -> Any:
        self.at_least_one()
        _, _, leaves = self._waiting.popleft()
        return own_rows_of(self._feed.workers, self._feed.structure, leaves)

    def _exchange(self) -> None:
        feed = self._feed
        communicator = feed.workers.communicator
        timer = feed.timer
        begin = time.time()
        packed = np.zeros(0, np.uint8)
        if communicator.rank == 0:
            if self._reader is None:
                # Read only when the first batch is needed: Keras makes more iterators
                # than it uses.
                feed.close()
                self._reader = feed.reader = _Reader(self._batches)
            packed = _pack(self._reader.ready())
        read = time.time()
        every = communicator.all_gather(packed)
        timer.waited(read - begin)
        timer.waited(time.time() - read, others=True)
        self._waiting.extend(_unpack(every[0]))


class _Reader:
    """A thread that reads batches ahead.

    Args:
        batches: The iterable of batches.

    Attributes:
        error: The error that it raised.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.error: BaseException | None = None
        self._batches = batches
        self._ready: queue.Queue[tuple[str, str, list[Encoded]]] = queue.Queue(_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._read, name="kerasdist-chief-data", daemon=True
        )
        self._thread.start()
        close_at_end(self)

    def ready(self) -> list[tuple[str, str, list[Encoded]]]:
        """Wait for a batch; return it with all others that are ready."""
        found = [self._ready.get()]
        size = size_of(found[0][2])
        while size < _AT_ONCE:
            try:
                found.append(self._ready.get_nowait())
            except queue.Empty:
                break
            size += size_of(found[-1][2])
        return found

    def close(self) -> None:
        """End the thread; one that waits for a batch is abandoned after a while."""
        self._closed.set()
        end = time.monotonic() + _PATIENCE
        while self._thread.is_alive() and time.monotonic() < end:
            self._thread.join(_POLL)
        close_at_end(self, keep=False)

    def _read(self) -> None:
        try:
            for batch in self._batches:
                leaves = [encode(leaf) for leaf in tf.nest.flatten(batch)]
                if not self._put(("batch", "", leaves)):
                    return
        except Exception as error:
            self.error = error
            text = str(error).strip() or "no message"
            self._put(("error", f"{type(error).__name__}: {text.splitlines()[0]}", []))
        else:
            self._put(("end", "", []))
        finally:
            end = getattr(self._batches, "close", None)
            if end is not None:
                end()

    def _put(self, record: tuple[str, str, list[Encoded]]) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(record, timeout=_POLL)
            except queue.Full:
                continue
            return True
        return False


def own_rows_of(workers: Workers, structure: Any, leaves: list[Encoded]) -> Any:
    """Return this worker's part of a batch: per replica, if it has several."""
    first, local, replicas = workers.layout
    total = next(leaf.rows for leaf in leaves if leaf.rows is not None)
    parts = []
    for i, device in enumerate(workers.devices[:local]):
        rows = equal_part(total, replicas, first + i)
        count = rows.stop - rows.start
        if not count:  # see `strategies.data.batch_split`
            rows = slice(max(total - 1, 0), total)
        with tf.device(device):
            part = [_part(leaf, rows) for leaf in leaves]
            facts = [tf.constant(total, tf.int64), None]
            if total < replicas:
                facts[1] = tf.constant(count, tf.int64)
        parts.append(with_facts(tf.nest.pack_sequence_as(structure, part), *facts))
    return parts[0] if local == 1 else _tf.regroup(parts)


def _part(leaf: Encoded, rows: slice) -> Any:
    if leaf.kind == "none":
        return None
    if leaf.kind == "dense":
        array = leaf.arrays[0]
        # A copy, so that the rest of the batch can be freed.
        return tf.convert_to_tensor(array[rows].copy() if array.ndim else array)
    return slice_rows(decode(leaf), rows.start, rows.stop)


def _pack(records: list[tuple[str, str, list[Encoded]]]) -> Any:
    facts = [[kind, text, len(leaves)] for kind, text, leaves in records]
    return pack({"records": facts}, [leaf for *_, leaves in records for leaf in leaves])


def _unpack(packed: Any) -> Iterator[tuple[str, str, list[Encoded]]]:
    facts, leaves = unpack(packed)
    following = iter(leaves)
    for kind, text, count in facts["records"]:
        yield kind, text, list(itertools.islice(following, count))
