"""Whether the workers' data are the same, and the choice of the chief's if they differ.

    1. all      hashes of the data are gathered
    2.          equal on all workers           each uses its own
    3.          data="same"                    an error
    4. content  shared rows, or the same targets with other inputs
                                               the chief's
    5. origin   drawn from the same            the chief's
                from different parts           an error
    6.          unknown                        an error; a plain generator: the chief's

All workers reach the same result, because they decide by facts gathered from all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist.collectives import Communicator, gather_json
from kerasdist.strategies.data.comparison import (
    ITS_OWN,
    Content,
    Hashes,
    Origin,
    digest_of,
    hash_text,
)
from kerasdist.strategies.data.encoding import Encoded, encode, size_of
from kerasdist.strategies.reduce.workers import Workers

# Messages for users about data that differ between the workers.

_SEED = (
    "If each worker's data are its own part, give the strategy shard='off'. If all "
    "workers should have the same data, seed what makes them "
    "(`keras.utils.set_random_seed` with the same number on all workers, before the "
    "data are made)"
)
REMEDIES = f"{_SEED}, or give the strategy data='chief': then the chief's are used."
_ELASTIC_REMEDIES = (
    f"{_SEED}. With elastic=True the chief's data can't be used on all workers: "
    "the chief may be lost."
)


def with_remedies(what: str, received: str) -> ValueError:
    """Return an error about data that differ.

    Args:
        what: The fault, without a full stop.
        received: The facts that were found.
    """
    return ValueError(f"{what}. Received: {received}. {REMEDIES}")


def _own_parts(name: str, how: str) -> ValueError:
    """Return the error about data that are each worker's own part."""
    return with_remedies(
        f"The workers were given different {name}, which look like each worker's own "
        "part of the data; without shard='off' all workers must be given all data, of "
        "which each takes its rows",
        how,
    )


def in_elastic_job(error: ValueError) -> ValueError:
    """Return an error about data that differ with the remedies of an elastic job."""
    text = str(error)
    if REMEDIES not in text:
        return error
    return type(error)(text.replace(REMEDIES, _ELASTIC_REMEDIES))


# The check that all workers read the same global batches in the same order.
#
# Every worker takes its rows of each global batch of a dataset. If the workers'
# datasets are shuffled differently, some samples are used twice and others never,
# without any sign. So the first batches of each iteration carry a checksum, and the
# step that uses one compares it over the workers.

CHECKSUM = "kerasdist_checksum"
# A different order shows in the first batches, or almost never.
_CHECKED = 2


class SameBatches:
    """The check of one strategy.

    A worker that has joined an elastic job is wrong by itself: if only such workers
    read other batches than those that were there before, these continue. What compares
    the training data when a worker joins doesn't compare those of evaluations.

    Args:
        workers: The workers that compare.
        explain: Returns the error that is raised in place of one.
    """

    def __init__(
        self,
        workers: Workers,
        explain: Callable[[ValueError], ValueError] = lambda error: error,
    ) -> None:
        self._workers = workers
        self._explain = explain

    def wrap(self, index: Any, batch: Any, part: Any) -> Any:
        """Return a dataset's element: the part, and the batch's checksum or 0."""
        return {CHECKSUM: self.checksum(index, lambda: batch), "batch": part}

    def checksum(self, index: Any, batch: Callable[[], Any]) -> Any:
        """Return the checksum of the batch with an index in its pass, or 0.

        Args:
            index: A scalar int64 tensor.
            batch: Returns the batch, inside a graph. Only a batch with a checksum is
                made by it.
        """

        def of_batch() -> Any:
            flat = _tensors_of(batch())
            return tf.ensure_shape(tf.numpy_function(checksum_of, flat, tf.int64), [])

        return tf.cond(index < _CHECKED, of_batch, lambda: tf.constant(0, tf.int64))

    def compare(self, checksum: Any) -> None:
        """Compare a step's checksum over the workers, unless it's 0.

        Raises:
            ValueError: It differs. In a graph TensorFlow raises an error of its
                own with this text, and `Workers.fault` is this one.
        """
        ops = self._workers.ops

        def compare() -> Any:
            return ops.call(self._compare, [checksum], [checksum])

        tf.cond(checksum != 0, compare, lambda: [checksum])

    def _compare(self, checksum: Any) -> list[Any]:
        communicator = self._workers.communicator
        joined = getattr(communicator, "has_joined", False)
        mine = np.array([checksum, joined], np.int64)
        every = [tuple(each) for each in communicator.all_gather(mine)]
        old = [number for number, later in every if not later]
        right = (old or [number for number, _ in every])[0]
        if any(number != right for number in old) or int(checksum) != right:
            named = list(zip(communicator.ranks, every, strict=True))
            wrong = [rank for rank, (number, _) in named if number != right]
            first = next(rank for rank, (number, _) in named if number == right)
            self._workers.fault = self._explain(different_batches(wrong, first))
            raise self._workers.fault
        return [np.int64(checksum)]


DIFFERENT_BATCHES = (
    "The workers read different global batches: each takes its own rows of every "
    "batch, or its own batches, so all datasets must yield the same batches in the "
    "same order"
)


def different_batches(others: list[int], first: int) -> ValueError:
    """Return the error that these ranks' batches differ from those of `first`."""
    how = f"ranks {others} differ from rank {first}"
    return with_remedies(DIFFERENT_BATCHES, how)


def checksum_of_batch(batch: Any) -> int:
    """Return the checksum of a batch, eagerly."""
    return int(checksum_of(*(tensor.numpy() for tensor in _tensors_of(batch))))


def _tensors_of(batch: Any) -> list[Any]:
    return [
        tensor
        for tensor in tf.nest.flatten(batch, expand_composites=True)
        if tensor is not None and tensor.dtype not in (tf.resource, tf.variant)
    ]


def checksum_of(*arrays: Any) -> Any:
    """Return a checksum of arrays, never 0."""
    digest = digest_of([encode(array) for array in arrays])
    return np.int64((hash_text(digest.encode()) >> 1) | 1)


# Evidence from rows' hashes that two workers hold the same data.
#
# A worker holds a part of something: a part of its own, or the same data as all others
# in another order, or split in another way. Rows that several workers hold show which:
#
# | what the workers hold | rows of one that another one holds, too |
# | --- | --- |
# | the same rows in another order | all |
# | random splits of the same rows | about as many as the part is of the whole |
# | shards | none, but for rows that are in the data more than once |
#
# How often a row has a second copy by chance is measured within one worker's data: rows
# of a shard have a copy in another shard about as often as in their own. Only a number
# clearly above that is evidence.

# How many rows of a worker are looked up in the others' data.
_LOOKED_UP = 4096
# The smallest part of a worker's rows that must be found; more if rows repeat.
_LEAST = 0.05
_LEAST_FOUND = 3


@dataclass(frozen=True)
class Sample:
    """A sample of a worker's rows.

    Attributes:
        hashes: Their hashes.
        repeated: The part of them that has a copy among the worker's other rows.
    """

    hashes: Hashes
    repeated: float


def count_known(known: Hashes, hashes: Hashes) -> int:
    """Return how many rows are among known ones, which are sorted."""
    if not len(known):
        return 0
    places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return int((known[places] == hashes).sum())


def sample_rows(hashes: Hashes) -> Sample:
    """Return rows from all over a worker's data."""
    rows = len(hashes)
    if not rows:
        return Sample(hashes, 0.0)
    chosen = np.linspace(0, rows - 1, min(rows, _LOOKED_UP)).astype(np.int64)
    known, counts = np.unique(hashes, return_counts=True)
    sample = hashes[chosen]
    repeated = counts[np.searchsorted(known, sample)] > 1
    return Sample(sample, float(repeated.mean()))


def are_alike(found: int, sample: int, repeated: float) -> bool:
    """Return whether a worker's rows are also another one's, and not by chance.

    Args:
        found: How many of the rows that were looked up the other worker holds.
        sample: How many rows were looked up.
        repeated: The larger one of both workers', see `Sample`.
    """
    if not sample or not found:
        return False
    part = found / sample
    if part < 0.5 and found < _LEAST_FOUND:
        return False
    return part >= _LEAST + 2.0 * repeated


def is_telling(hashes: Hashes) -> bool:
    """Return whether unrelated parts of data wouldn't share the order of these rows.

    Labels in a random order are such rows; sorted, periodic or constant ones aren't,
    nor are numbers that all differ, which may be a grid.
    """
    known, ids = np.unique(hashes, return_inverse=True)
    if len(known) < 2 or len(known) > 0.5 * len(hashes):
        return False
    # Numbered by first appearance, so that the names of the labels don't matter.
    first = np.full(len(known), len(ids))
    np.minimum.at(first, ids, np.arange(len(ids)))
    ids = np.argsort(np.argsort(first))[ids]
    kept = ids[:65536].astype(np.uint16 if len(known) > 256 else np.uint8)
    # A run, a period or a stair compresses to a few bytes.
    return len(zlib.compress(kept.tobytes(), 9)) >= 40 + 0.02 * len(kept)


# The evidence that was found for earlier data: shared rows, or only shared targets.
_ROWS, _TARGETS = "rows", "targets"
# A random part with this many rows would share a row with the others.
_FEW = 50
# Fewer rows than this may be names of classes, or the sizes of an image.
_LEAST_ROWS = 8


class DataChoice:
    """The choices of one strategy.

    Args:
        mode: "auto", "same" or "chief".
        log_once: Logs a line on the chief, given the kind of data and a line.
        explain: Returns the error that is raised in place of one.

    Attributes:
        mode, explain: The arguments.
    """

    def __init__(
        self,
        mode: str,
        log_once: Callable[[str, str], None],
        explain: Callable[[ValueError], ValueError] = lambda error: error,
    ) -> None:
        self.mode, self.explain = mode, explain
        self._log_once = log_once
        # The rows that this worker has held so far, where the workers' data differed:
        # whole ones, and their x.
        nothing = np.zeros(0, np.uint64)
        self._seen: Sequence[Hashes] = (nothing, nothing)
        self._proved = ""

    def of_chief(
        self,
        communicator: Communicator,
        name: str,
        content: Content,
        *,
        length: int | None = None,
        settings: str = "",
        origin: Callable[[], Origin] | None = None,
        different: str | ValueError,
        strange: bool = False,
    ) -> str:
        """Return why the chief's data are used; empty: each worker's own.

        Args:
            communicator: The communicator of the workers that compare.
            name: A noun for the data, in the plural.
            content: The data.
            length: The length of the data, if `content` is only the beginning.
            settings: Other facts that must be the same on all workers, in words.
            origin: Returns the data's origin.
            different: The error for data="same", or for equal data with other settings
                or lengths; or its first sentence, without a full stop.
            strange: Whether the chief's are used also if nothing is known.

        Raises:
            ValueError: They can't be used. All workers raise it.
        """
        if self.mode == "chief":
            return "data='chief'"
        x, rest = content.digests()
        mine = {"form": content.form, "x": x, "rest": rest, "length": length}
        every = gather_json(communicator, mine | {"settings": settings})
        ranks = communicator.ranks
        others = [r for r, each in zip(ranks, every, strict=True) if each != every[0]]
        if not others:
            return ""
        same_data = len({(theirs["x"], theirs["rest"]) for theirs in every}) == 1
        if self.mode == "same" or same_data:
            if isinstance(different, str):
                how = f"{name} of ranks {others} differ from rank {ranks[0]}'s"
                for rank, theirs in zip(ranks, every, strict=True):
                    how += f"; rank {rank}: {theirs['settings']}" if settings else ""
                different = with_remedies(different, how)
            raise self.explain(different)
        forms = [theirs["form"] for theirs in every if theirs["form"]]
        if any(form != forms[0] for form in forms):
            named = zip(ranks, every, strict=True)
            raise with_remedies(
                f"The workers were given {name} of different forms",
                "; ".join(f"rank {rank}: {theirs['form']}" for rank, theirs in named),
            )
        made_from = None if origin is None else origin()
        if made_from is not None:
            _check_shards(communicator, name, made_from)
        why, found = self._by_content(communicator, content, every)
        if not why and made_from is not None:
            first = Content(content.batches[:1]).rows
            why = _by_origin(communicator, name, made_from, first, found)
        if not why:
            why = self._by_earlier(communicator, content.rows)
        if why:
            return why
        if strange:
            return "they aren't known to be the same on all workers"
        raise with_remedies(
            f"The workers were given different {name}, and it isn't known whether they "
            "are each worker's own part, or should be the same",
            found,
        )

    def tell(
        self,
        name: str,
        why: str,
        leaves: Sequence[Encoded],
        cost: str = "rank 0 reads all and sends {:.3g} MB in each step",
    ) -> None:
        """Tell the user that the chief's data are used.

        Args:
            name: A noun for the data, in the plural.
            why: The reason.
            leaves: The tensors that are sent.
            cost: What that costs, with a place for the megabytes.
        """
        self._log_once(
            name,
            f"kerasdist: the chief's {name} are used on all workers ({why}); "
            f"{cost.format(size_of(leaves) / 1e6)}. With the same seed on all workers "
            "(keras.utils.set_random_seed) each reads its own.",
        )

    def _by_content(
        self, communicator: Communicator, content: Content, every: list[Any]
    ) -> tuple[str, str]:
        """Return why the rows show that the data are the same, and the evidence."""
        x, rest = content.row_hashes()
        whole = x if len(rest) != len(x) else x * np.uint64(3) + rest
        present = np.unique(whole), np.unique(x)
        order = str(hash_text(np.sort(whole).tobytes()))
        same_rest = len({theirs["rest"] for theirs in every}) == 1 and len(rest) > 0
        telling = same_rest and is_telling(rest)
        orders = gather_json(communicator, [order, telling])
        if len({order for order, _ in orders}) == 1:
            self._remember(present, _ROWS)
            return "the same rows in another order", ""
        kind = 0 if len(rest) else 1
        equal = [order == orders[0][0] for order, _ in orders]

        held = np.union1d(self._seen[kind], present[kind])
        alike, found = _all_alike(communicator, whole, held, equal)
        if alike:
            self._remember(present, _ROWS)
            return "they hold the same rows, in part or in another order", found
        if all(telling for _, telling in orders):
            self._remember(present, _TARGETS)
            return "the same targets, of other inputs", found
        return "", found

    def _remember(self, rows: Sequence[Hashes], what: str) -> None:
        """Remember rows of data that were found to be the same, and the evidence."""
        self._seen = list(map(np.union1d, self._seen, rows))
        self._proved = _TARGETS if _TARGETS in (what, self._proved) else _ROWS

    def _by_earlier(self, communicator: Communicator, rows: int) -> str:
        """Return why the evidence of earlier data shows that these are the same.

        The script divides, orders or changes its data at random: a few rows need not be
        among those that others hold, nor need any changed ones.
        """
        most = max(int(n[0]) for n in communicator.all_gather(np.int64(rows)))
        if self._proved == _TARGETS or (self._proved == _ROWS and most < _FEW):
            return "as the data before, which were the same in another form"
        return ""


def _check_shards(communicator: Communicator, name: str, origin: Origin) -> None:
    """Refuse datasets of which each worker takes a different shard.

    Raises:
        ValueError: They are such datasets. All workers raise it.
    """
    every = gather_json(communicator, origin.shards)
    if any(shards != every[0] for shards in every):
        named = zip(communicator.ranks, every, strict=True)
        how = [f"rank {rank}: {_all(shards)}" for rank, shards in named]
        raise _own_parts(name, f"a `shard` in the pipeline, {'; '.join(how)}")


def _by_origin(
    communicator: Communicator, name: str, origin: Origin, least: int, found: str
) -> str:
    """Return why the data's origin decides for the chief's; empty: not known.

    Args:
        communicator: The communicator of the workers that compare.
        name: A noun for the data.
        origin: The data's origin.
        least: Number of rows that a source must have so that a batch can be from it.
        found: The evidence from their rows.

    Raises:
        ValueError: The data are each worker's own part. All workers raise it.
    """
    every = gather_json(
        communicator,
        {
            "numbers": origin.numbers,
            "rows": {
                key: str(hash_text(rows.tobytes())) for key, rows in origin.rows.items()
            },
            "enough": [
                key
                for key, rows in origin.rows.items()
                if key in origin.files
                or len(np.unique(rows)) >= max(least, _LEAST_ROWS)
            ],
        },
    )
    first, ranks = every[0], communicator.ranks
    for rank, theirs in zip(ranks, every, strict=True):
        for key in sorted(first["numbers"].keys() & theirs["numbers"].keys()):
            values = first["numbers"][key], theirs["numbers"][key]
            if values[0] != values[1]:
                how = f"{key}={values[0]} on rank {ranks[0]}"
                how += f" and {values[1]} on rank {rank}"
                if values[0].startswith(ITS_OWN):
                    how = f"their code asks for the worker's place: {key}"
                raise _own_parts(name, f"{how}; {found}")
        if theirs["rows"].keys() != first["rows"].keys():
            return ""
    known = ""
    for key in sorted(first["rows"]):
        if len({theirs["rows"][key] for theirs in every}) > 1:
            rows = origin.rows[key]
            ordered = gather_json(communicator, str(hash_text(np.sort(rows).tobytes())))
            if len(set(ordered)) > 1:
                equal = [each == ordered[0] for each in ordered]
                alike, of = _all_alike(communicator, rows, np.unique(rows), equal)
                if not alike:
                    raise _own_parts(name, f"they are made from {key}: {of}")
        if key in first["enough"]:
            known = known or f"made from the same data, {key.strip()}"
    return known


def _all_alike(
    communicator: Communicator,
    rows: Hashes,
    held: Hashes,
    equal: list[bool],
) -> tuple[bool, str]:
    """Return whether all workers' rows are also the chief's, and the evidence as text.

    Args:
        communicator: The communicator of the workers that compare.
        rows: This worker's rows.
        held: All rows that this worker has held, see `count_known`.
        equal: For each rank, whether its rows are known to be the chief's.
    """
    sample = sample_rows(rows)
    samples = communicator.all_gather(sample.hashes.view(np.int64))
    found = [count_known(held, theirs.view(np.uint64)) for theirs in samples]
    every = communicator.all_gather(np.array([found], np.int64))
    repeated = [
        float(part[0]) for part in communicator.all_gather(np.float64(sample.repeated))
    ]
    of_chief = every[0][0]
    alike = all(
        are_alike(int(of_chief[rank]), len(theirs), max(repeated[0], repeated[rank]))
        for rank, theirs in enumerate(samples)
        if not equal[rank]
    )
    ranks = communicator.ranks
    text = ", ".join(
        f"{int(of_chief[place])} of {len(theirs)} rows of rank {ranks[place]} that "
        f"were looked up are among rank {ranks[0]}'s"
        for place, theirs in enumerate(samples)
        if place > 0
    )
    if max(repeated) > 0.02:
        text += f", and {max(repeated):.0%} of a worker's rows are in its data twice"
    return alike, text


def _all(shards: list[tuple[int, int]]) -> str:
    every = [f"shard(num_shards={n}, index={i})" for n, i in shards]
    return ", ".join(every) or "none"
