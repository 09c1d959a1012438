"""Communication that tunes itself: `RingStrategy(tune=True)`.

    constructor       the transport, where there are two        measured on the link
    first call        the link, and the pieces of a ring        measured on the link
    calls 1 to 3      as given                                  traced, timed twice
    3 calls each      other sizes of buckets, compressors       traced, timed twice
    until call 20     the two fastest, and as given, in turns   timed
    all others        the one with the smallest median

These calls are steps of training like all others, whose numbers are those of any
division into buckets. Which sizes are tried is computed: from the link and the time of
a step as given, by the model of a step below. What was found is written to a file,
which the next run of the same model on as many workers reads in place of measuring.

The model (`kerasdist.prediction`): a collective of b bytes takes latency + b x time per
byte (benchmarks/growth). A third of a step's computing is the forward pass; then
gradients are ready one after the other, by their bytes, from the last layer to the
first. Buckets are sent in this order:

    computing  | forward | bucket 0 | bucket 1 | bucket 2 |
    wire                            | 0 .... | 1 .... |   | 2 .... |
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from kerasdist import _tf
from kerasdist._keras.data.epoch_iterators import batch_size_of_fit
from kerasdist._keras.elastic.training_state import checkpoint_folder
from kerasdist.collectives import Communicator
from kerasdist.collectives.connect import Job
from kerasdist.collectives.fused_buffer import in_buckets
from kerasdist.compression import Compressor, compressor_of
from kerasdist.prediction.profile import (
    LARGE_BYTES,
    HostLink,
    all_reduces_of,
    seconds_of_all_reduce,
)
from kerasdist.prediction.simulation import arrivals
from kerasdist.strategies.reduce.consensus import Consensus
from kerasdist.strategies.reduce.workers import Workers
from kerasdist.transport.array_file import read_arrays, write_arrays

# Sizes of buckets, in bytes, of which the most promising are tried.
SIZES = tuple(int(mb * 1e6) for mb in (0.5, 1, 2, 4, 8, 16, 32, 64, 1000))
# How many sizes are tried beside the given one, and the calls of each that are timed.
_TRIED = 2
_TIMED = 2
_MOST_CALLS = 20
# Parts of a step that another size, and another compressor, have to save.
_GAIN = 0.02
_COMPRESSION_GAIN = 0.05
# Sizes of pieces that are measured.
_PIECES = (128 << 10, 512 << 10, 2 << 20)


def measure_and_set_pieces(communicator: Communicator) -> HostLink:
    """Measure an all-reduce, and set the fastest size of pieces; all ranks call it."""
    latency = seconds_of_all_reduce(communicator, 4)
    given = communicator.piece_bytes
    found = {}
    for size in _PIECES if given else (0,):
        communicator.piece_bytes = size
        found[size] = seconds_of_all_reduce(communicator, LARGE_BYTES)
    best = min(found, key=lambda size: found[size])
    if found[given] <= found[best] * (1 + _GAIN):
        best = given
    communicator.piece_bytes = best
    return HostLink(latency, max(found[best] - latency, 0.0) / LARGE_BYTES)


def faster_job(first: Job, connect_second: Callable[[], Job]) -> Job:
    """Return the faster one of two jobs of the same workers; the other one is closed.

    Args:
        first: A job.
        connect_second: Connects the same workers in another way.

    Raises:
        As `collectives.connect`. Then both are closed.
    """
    jobs = [first]
    try:
        jobs.append(connect_second())
        taken = [seconds_of_all_reduce(job.communicator, LARGE_BYTES) for job in jobs]
        # The ranks of either have one number; of both they may have two.
        agreed = jobs[0].communicator.broadcast([np.array(taken)])[0]
    except BaseException as error:
        for job in jobs:
            job.close(error)
        raise
    kept = int(np.argmin(agreed))
    jobs[1 - kept].close()
    return jobs[kept]


# The model of a step.


def predicted_step(
    sizes: Sequence[int], limit: int, compute: float, link: HostLink
) -> float:
    """Return the seconds of a step until the last bucket has arrived.

    Args:
        sizes: Bytes of each gradient, from the first layer to the last.
        limit: The size of buckets, in bytes.
        compute: Seconds of the forward and the backward pass.
        link: The time of an all-reduce.
    """
    buckets = in_buckets(sizes, limit)
    messages = all_reduces_of([sum(sizes[i] for i in bucket) for bucket in buckets])
    seconds = [link.seconds(message.size) for message in messages]
    return float(max([compute, *arrivals(compute, messages, seconds)]))


def compute_of(sizes: Sequence[int], limit: int, step: float, link: HostLink) -> float:
    """Return the seconds of computing in a step for which the model gives its time."""
    low, high = 0.0, step
    for _ in range(50):
        middle = (low + high) / 2
        if predicted_step(sizes, limit, middle, link) < step:
            low = middle
        else:
            high = middle
    return low


def sizes_to_try(
    sizes: Sequence[int], given: int, step: float, link: HostLink
) -> list[int]:
    """Return the sizes of buckets that are tried, the most promising one first.

    Args:
        sizes: See `predicted_step`.
        given: The size with which a step was measured.
        step: The seconds of that step.
        link: The link.
    """
    compute = compute_of(sizes, given, step, link)
    # Of sizes that give the same buckets one is tried.
    by_buckets = {str(in_buckets(sizes, limit)): limit for limit in SIZES}
    by_buckets.pop(str(in_buckets(sizes, given)), None)
    order = sorted(
        by_buckets.values(),
        key=lambda limit: predicted_step(sizes, limit, compute, link),
    )
    return order[:_TRIED]


# The search, and the steps of training in which it happens.


class Choice(NamedTuple):
    """The traits with which a step is traced."""

    bucket_size: int
    compressor: Compressor | None


# What is called next, its seconds, and those of all calls at the end, the kept choice's
# first.
Search = Generator[Choice, float, dict[Choice, list[float]]]


def search(
    sizes: Sequence[int],
    given: Choice,
    link: HostLink,
    compressors: Sequence[Compressor],
) -> Search:
    """Yield the choice of each call, and receive the seconds that the call took.

    The call in which the given choice is traced has been before. With it they are
    `_MOST_CALLS` at most.

    Args:
        sizes: See `predicted_step`.
        given: What the strategy was given.
        link: The link.
        compressors: Those that may be used in place of none.

    Returns:
        The seconds of all timed calls of each choice. The first one is to be kept.
    """
    taken: dict[Choice, list[float]] = {given: []}

    def middle(choice: Choice) -> float:
        return median(taken[choice])

    def calls_of(choice: Choice) -> Generator[Choice, float, None]:
        if choice not in taken:
            taken[choice] = []
            yield choice  # traced
        for _ in range(_TIMED):
            taken[choice].append((yield choice))

    yield from calls_of(given)
    # The minimum, since the first steps of a process are slow.
    for size in sizes_to_try(sizes, given.bucket_size, min(taken[given]), link):
        yield from calls_of(given._replace(bucket_size=size))
    best = min(taken, key=middle)
    for compressor in compressors:
        yield from calls_of(best._replace(compressor=compressor))
    # Two calls differ by chance: in turns whatever else the machine and the network do
    # meets all alike, and a call that it makes slow or fast doesn't change a median.
    rivals = dict.fromkeys([*sorted(taken, key=middle)[:2], given])
    left = _MOST_CALLS - (1 + _TIMED) * len(taken)
    for _ in range(left // len(rivals) if len(rivals) > 1 else 0):
        for choice in rivals:
            taken[choice].append((yield choice))

    def cost(choice: Choice) -> float:
        # What is given stays, and numbers are those of one process, if not much is won.
        gain = 0.0 if choice == given else _GAIN
        gain += 0.0 if choice.compressor is given.compressor else _COMPRESSION_GAIN
        return middle(choice) / (1 - gain)

    return {choice: taken[choice] for choice in sorted(taken, key=cost)}


class Tuner:
    """Tunes the steps of a strategy's models.

    Args:
        workers: The workers, of which the steps take what they are traced with.
        log_once: Logs a line on the chief, given its kind.
        compressors: The names of those that may be used in place of none.
    """

    def __init__(
        self,
        workers: Workers,
        log_once: Callable[[str, str], None],
        compressors: Sequence[str] = (),
    ) -> None:
        self.workers = workers
        self.log_once = log_once
        self.compressors = {name: compressor_of(name) for name in compressors}
        self.given = Choice(workers.bucket_size, workers.memories.compressor)
        self._link: HostLink | None = None

    def __call__(self, trainer: Any, calls: Any) -> Callable[[Any], Any]:
        """Return a train function that is tuned in its first steps.

        Args:
            trainer: The model.
            calls: Its train function, an `InstrumentedStep`.
        """
        if trainer.jit_compile is not True:
            return TunedStep(self, trainer, calls)
        self.log_once(
            "tuning",
            "kerasdist: tune=True has no effect on steps that are compiled "
            "(`jit_compile=True`), which would be compiled for each size of buckets.",
        )
        return calls

    def link(self) -> HostLink:
        """Return the link, which is measured once; all workers call it."""
        if self._link is None:
            self._link = measure_and_set_pieces(self.workers.communicator)
        return self._link

    def name_of(self, compressor: Compressor | None) -> str | None:
        """Return the name of one that may be used; None for the given one."""
        return next((n for n, c in self.compressors.items() if c is compressor), None)

    def file_of(self, trainer: Any) -> Path:
        """Return the file of what was found for a model, on this host."""
        job: Any = self.workers.job
        facts = [
            [[list(v.shape), v.dtype] for v in trainer.trainable_variables],
            [list(job.replicas), job.transport, batch_size_of_fit()],
            [*map(repr, self.given), sorted(self.compressors)],
        ]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        return checkpoint_folder() / f"tuned-{digest}.npz"


class TunedStep:
    """A train function that tries sizes of buckets and compressors, then keeps one.

    All workers take the same number of steps, so that they change alike.

    Args:
        tuner: The tuner of the strategy.
        trainer: The model.
        calls: Its train function.
    """

    def __init__(self, tuner: Tuner, trainer: Any, calls: Any) -> None:
        self._tuner = tuner
        self._workers = tuner.workers
        self._trainer = trainer
        self._calls = calls
        self._choice = tuner.given
        self._search: Search | None = None
        self._begun = False
        self._number = 0
        calls.trace_for(self._choice)

    def __call__(self, iterator: Any) -> Any:
        """Take steps on the batches of an iterator."""
        # Another model of the strategy, and another graph of this one, may have been
        # traced in between.
        self._workers.bucket_size, self._workers.memories.compressor = self._choice
        if self._search is None and self._begun:
            return self._calls(iterator)
        begin = time.perf_counter()
        logs = self._calls(iterator)
        mine = np.float64(time.perf_counter() - begin)
        self._number += 1
        if not self._begun:
            self._begun = True
            self._begin()  # the model is built now
        elif self._search is not None:
            agreed = self._workers.communicator.all_reduce([mine], "max")[0]
            self._go_on(self._search, float(agreed))
        return logs

    def _begin(self) -> None:
        tuner, path = self._tuner, self._tuner.file_of(self._trainer)
        mine = None
        if self._workers.rank == 0:
            mine = read_known(path, self._tuner.compressors)
        known = Consensus(self._workers).facts(mine).get(0)
        sizes = [_tf.bytes_of(v.value) for v in self._trainer.trainable_variables]
        if known is not None:
            name = known["compression"]
            compressor = tuner.compressors[name] if name else tuner.given.compressor
            if self._workers.communicator.piece_bytes and known["piece_bytes"]:
                self._workers.communicator.piece_bytes = known["piece_bytes"]
            self._take(Choice(known["bucket_size"], compressor))
            tuner.log_once(
                f"tuned {path}",
                f"kerasdist: {_in_words(known)}, as {path} has it from an earlier run. "
                "Remove the file to measure again.",
            )
            return
        compressors = [c for c in tuner.compressors.values() if c is not None]
        self._search = search(sizes, tuner.given, tuner.link(), compressors)
        self._take(next(self._search))

    def _go_on(self, searching: Search, seconds: float) -> None:
        try:
            self._take(searching.send(seconds))
        except StopIteration as end:
            self._search = None
            self._take(next(iter(end.value)))
            self._tell(end.value)

    def _take(self, choice: Choice) -> None:
        if choice != self._choice:
            self._choice = choice
            self._calls.trace_for(choice)

    def _tell(self, taken: dict[Choice, list[float]]) -> None:
        """Write what was found to the log and to the file, on the chief."""
        tuner, workers = self._tuner, self._workers
        self._calls.drop_other_variants()
        if workers.rank:
            return
        link, path = tuner.link(), tuner.file_of(self._trainer)
        facts = {
            "bucket_size": self._choice.bucket_size,
            "compression": tuner.name_of(self._choice.compressor),
            "piece_bytes": workers.communicator.piece_bytes,
            "latency_s": link.latency,
            "s_per_byte": link.byte,
            "steps_s": [
                [choice.bucket_size, repr(choice.compressor), seconds]
                for choice, seconds in taken.items()
            ],
        }
        where = f"written to {path}"
        try:
            write_arrays(path, facts, [])
        except OSError as error:
            where = f"{path} can't be written ({error.strerror or error})"
        before, after = median(taken[tuner.given]), median(taken[self._choice])
        tuner.log_once(
            f"tuned {path}",
            f"kerasdist: tuned in {self._number} steps: {_in_words(facts)}; "
            f"{after * 1e3:.3g} ms instead of {before * 1e3:.3g}; {where}.",
        )


def read_known(path: Path, compressors: Collection[str]) -> dict[str, Any] | None:
    """Return the facts of a file that has what is needed; else None."""
    try:
        known, _ = read_arrays(path)
        size, pieces = known["bucket_size"], known["piece_bytes"]
        fits = type(size) is int and size > 0 and pieces in (0, *_PIECES)
        return known if fits and known["compression"] in (None, *compressors) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _in_words(facts: dict[str, Any]) -> str:
    words = [f"bucket_size={facts['bucket_size']:_}"]
    if facts["compression"]:
        words.append(f"compression={facts['compression']!r}")
    if facts["piece_bytes"]:
        words.append(f"pieces of {facts['piece_bytes'] >> 10} KiB")
    return ", ".join(words)
