"""Agreement of the workers outside of graphs: on small numbers, and on the state."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist.collectives import gather_json
from kerasdist.collectives.fused_buffer import in_buckets
from kerasdist.collectives.row_exchange import Array
from kerasdist.errors import CollectiveError, CollectiveMismatch
from kerasdist.placement.plan import counted
from kerasdist.strategies.reduce.workers import Workers

_SMALL_BYTES = 1 << 16
# This many bytes of values are given at once, or one variable if it has more.
_MOST_BYTES = 64 << 20
# Sums of a fingerprint. A prime: rows in another order are in other sums.
_COLUMNS = 1021


class Consensus:
    """The agreement of one strategy's workers on numbers, texts and variables.

    All workers call each method at the same point.

    Args:
        workers: The workers that agree.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def any_of(self, flag: bool) -> bool:
        """Return whether the flag is set on any worker."""
        communicator = self._workers.communicator
        return bool(communicator.all_reduce([np.bool_(flag)], "max")[0])

    def any_at(self, place: str, flag: bool) -> bool:
        """Return whether the flag is set on any worker, and all are at this place.

        Args:
            place: The place in the script, in words.
            flag: This worker's flag.

        Raises:
            CollectiveMismatch: A worker is at another place.
        """
        every = self.facts(f"{int(flag)}{place}")
        places = {rank: text[1:] for rank, text in every.items()}
        if len(set(places.values())) > 1:
            where = "; ".join(f"rank {rank} {at}" for rank, at in places.items())
            raise CollectiveMismatch(
                f"Ranks are at different places of the script. Received: {where}. All "
                "ranks begin and end the same passes over distributed datasets, and "
                "call `fit`, `evaluate` and `predict` in the same order, outside of "
                "these passes: ranks of mode='async' take different numbers of steps."
            )
        return any(text[0] == "1" for text in every.values())

    def common_seed(self) -> int:
        """Return a random seed, with which all workers shuffle datasets alike."""
        mine = np.int64(secrets.randbits(31))
        return int(self._workers.communicator.broadcast([mine])[0])

    def longest(self, length: int | None) -> int | None:
        """Return the largest of the workers' lengths; None if one isn't known."""
        mine = np.int64(-1 if length is None else length)
        every = [int(n[0]) for n in self._workers.communicator.all_gather(mine)]
        return None if min(every) < 0 else max(every)

    def of_chief(self, number: float, root: int = 0) -> float:
        """Return the chief's number, or that of another rank."""
        given = self._workers.communicator.broadcast([np.float64(number)], root)
        return float(given[0])

    def facts(self, value: Any) -> dict[int, Any]:
        """Return each worker's value, JSON, by its rank; lost workers are missing."""
        every = gather_json(self._workers.communicator, [self._workers.rank, value])
        return {int(rank): theirs for rank, theirs in every}

    def average(self, variables: Sequence[Any], share: float | None = None) -> None:
        """Set each variable to its mean over all replicas of all workers.

        Args:
            variables: The variables.
            share: The total weight of this worker's replicas, out of 1 for all
                workers; None: every replica has the same weight.
        """
        workers = self._workers
        if not variables or workers.is_alone:
            return
        local = workers.local_replicas
        weight = None if share is None else share / local
        sums = []
        for variable in variables:
            wide = np.float64 if variable.dtype == tf.float64 else np.float32
            parts = [np.asarray(part, wide) for part in workers.copies(variable)]
            sums.append(np.sum(parts, axis=0) if local > 1 else parts[0])
        totals = workers.communicator.all_reduce(sums, scale=weight)
        replicas = 1 if share is not None else workers.replicas
        for variable, total in zip(variables, totals, strict=True):
            mean = total / total.dtype.type(replicas)
            for part in workers.copies(variable):
                part.assign(tf.cast(mean, part.dtype))


def check_state(
    workers: Workers,
    variables: Sequence[tuple[str, Any]],
    parts: Sequence[tuple[str, Any]] = (),
    *,
    log_once: Callable[[str, str], None] = lambda kind, text: None,
    broadcast: bool = False,
    epoch: int | None = None,
) -> None:
    """Check that all workers hold the same values.

    If they differ by rounding alone, all take the chief's, and a line is logged.

    Args:
        workers: The workers that reduce together.
        variables: Names and variables, in the same order on all workers.
        parts: The same for variables of which each replica may have its own part, see
            `strategies.reduce.gradients`: if they differ, all take the mean.
        log_once: Logs a line on the chief, once for each kind; is given both.
        broadcast: Whether all take the chief's values if they differ before the first
            step.
        epoch: The number of the epoch that has ended; None before the first step.

    Raises:
        ValueError: They differ, and `broadcast` is false. All ranks raise it.
    """
    communicator = workers.communicator
    if workers.is_alone or (communicator.size == 1 and epoch is None):
        return
    copies = [workers.copies(variable) for _, variable in variables]
    if epoch is not None and copies and not parts:
        # At an epoch's end it must be quick: one hash for all.
        mine = [_fingerprint(some) for some in zip(*copies, strict=True)]
        every = communicator.all_gather(np.frombuffer(b"".join(mine), np.uint8))
        if len({each.tobytes() for each in every} | {*mine}) == 1:
            return
    table = digests_of(copies if epoch is not None else [each[:1] for each in copies])
    contents = hashlib.sha256()
    for _, part in parts:
        for copy in workers.copies(part):
            contents.update(np.asarray(copy).tobytes())
    both = hashlib.sha256(table.tobytes()).digest() + contents.digest()
    every = communicator.all_gather(np.frombuffer(both, np.uint8))
    if all(np.array_equal(theirs[:32], every[0][:32]) for theirs in every):
        if not all(np.array_equal(theirs, every[0]) for theirs in every):
            Consensus(workers).average([part for _, part in parts])
        return
    counts = [int(c[0]) for c in communicator.all_gather([np.int64(len(table))])]
    if len(set(counts)) == 1 and broadcast and epoch is None:
        every_copy = [workers.copies(each) for _, each in (*variables, *parts)]
        give_values(workers, every_copy)
        return
    if len(set(counts)) > 1:
        what = f"they have {counts} variables, by rank"
    else:
        tables = communicator.all_gather(table)
        found = [
            variables[i]
            for i in range(len(table))
            if any(not np.array_equal(t[i], tables[0][i]) for t in tables)
        ]
        if _take_rounded(workers, found, log_once):
            return
        differing = [name for name, _ in found]
        ranks = [
            rank
            for rank, theirs in zip(communicator.ranks, tables, strict=True)
            if not np.array_equal(theirs, tables[0])
        ]
        what = (
            f"{len(differing)} of {len(table)} variables of ranks {ranks} differ "
            f"from rank {communicator.ranks[0]}'s: {differing[:5]}"
            f"{'...' if len(differing) > 5 else ''}"
        )
    if epoch is not None:
        raise ValueError(
            f"The workers hold different states after epoch {epoch + 1}. Received: "
            f"{what}. Something other than an optimizer has written numbers that "
            "differ between the workers: `assign` in `train_step`, in a layer or in a "
            "callback, of what is made of a worker's own rows, of the time, or of "
            "random numbers. Make them of gradients that a tape returns (those of the "
            "global batch), reduce them with "
            "`tf.distribute.get_replica_context().all_reduce`, or draw random numbers "
            "with the same seed on all workers."
        )
    raise ValueError(
        "The workers would begin to train from different states. "
        f"Received: {what}. Load the same weights on all ranks (a file that only one "
        "of them can read?), don't branch on the rank before `fit`, or let all take "
        "one rank's: give `fit` the callback "
        "`kerasdist.callbacks.BroadcastInitialState()`, or the strategy the argument "
        "initial_state='broadcast'."
    )


# Values that differ by more than this part of a variable's largest value don't differ
# by rounding. Of bfloat16 it's eight units in the last place.
_ROUNDING = 1e-4
_ROUNDING_OF_16_BITS = 2.0**-4


def _take_rounded(
    workers: Workers,
    variables: Sequence[tuple[str, Any]],
    log_once: Callable[[str, str], None],
) -> bool:
    """Let all take the chief's values where others differ by rounding alone.

    Sums over all elements of a gradient, as a norm or the mean of its squares, are
    computed in another order with other numbers of threads and on other processors;
    GPUs add in any order. So workers that apply the same gradients differ in last bits.

    Returns:
        Whether that was so, the same on all workers. Else nothing has changed.
    """
    copies = [workers.copies(variable) for _, variable in variables]
    # Models that differ on purpose may have other shapes, too: all decide alike.
    kinds = [(tf.as_dtype(each[0].dtype), tuple(each[0].shape)) for each in copies]
    every = Consensus(workers).facts(repr(kinds))
    if len(set(every.values())) > 1 or not all(kind.is_floating for kind, _ in kinds):
        return False
    chiefs = workers.communicator.broadcast([np.asarray(each[0]) for each in copies])
    gap = 0.0
    for own, chief in zip(copies, chiefs, strict=True):
        wide = chief.astype(np.float64)
        # Next to nothing but zeros nothing is small.
        largest = np.max(np.abs(wide), initial=0.0) or np.finfo(np.float64).tiny
        bound = _ROUNDING if chief.itemsize >= 4 else _ROUNDING_OF_16_BITS
        for copy in own:
            mine = np.asarray(copy).astype(np.float64)
            same = (mine == wide) | (np.isnan(mine) & np.isnan(wide))
            with np.errstate(invalid="ignore"):
                part = np.max(np.abs(mine - wide)[~same], initial=0.0) / largest
            gap = max(gap, part if part <= bound else np.inf)
    most = float(workers.communicator.all_reduce([np.float64(gap)], "max")[0])
    if not np.isfinite(most):
        return False
    for own, chief in zip(copies, chiefs, strict=True):
        for copy in own:
            copy.assign(tf.convert_to_tensor(chief, copy.dtype))
    log_once(
        "rounding",
        f"kerasdist: {counted(len(variables), 'variable')} differed between the "
        f"workers by rounding, at most {most:.0e} of their largest value, as "
        "processors, numbers of threads or GPUs add in different orders; all take rank "
        f"{workers.communicator.ranks[0]}'s values then",
    )
    return True


def digest_of(copy: Any) -> bytes:
    """Return a hash of the value of a replica's variable, with its shape and dtype."""
    value = np.asarray(copy)
    digest = hashlib.sha256(f"{value.shape}{value.dtype}".encode())
    # Without a copy of the bytes: embeddings may be large.
    if value.dtype.kind in "OSU":
        digest.update(value.tobytes())
    else:
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return digest.digest()


def _fingerprint(copies: Sequence[Any]) -> bytes:
    """Return a hash of a replica's variables: of a large one, of sums of its bits.

    Each bit is in one sum. Values that differ by chance have other sums.
    """
    digest = hashlib.sha256()
    for copy in copies:
        # Not `copy.numpy()`, which takes five times as long.
        read = tf.raw_ops.ReadVariableOp(resource=copy.handle, dtype=copy.dtype)
        value = read.numpy()
        if not isinstance(value, np.ndarray) or value.dtype.kind in "OSU":
            digest.update(repr(value).encode())
            continue
        bits = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        summed = 0
        if value.nbytes >= _SMALL_BYTES:
            summed = bits.size // (8 * _COLUMNS) * 8 * _COLUMNS
            words = bits[:summed].view(np.uint64).reshape(-1, _COLUMNS)
            digest.update(np.add.reduce(words, 0).data)
        digest.update(bits[summed:].data)
    return digest.digest()


def give_values(
    workers: Workers,
    copies: Sequence[Sequence[Any]],
    root: int = 0,
    *,
    takes: bool = True,
) -> int:
    """Give one rank's values to all; all ranks call it at the same point.

    Args:
        workers: The workers that reduce together.
        copies: Of each variable its copies on this worker, in the same order on all.
        root: The rank; of several local replicas, the first one's values count.
        takes: Whether this worker's variables get them.

    Returns:
        The bytes of the values.

    Raises:
        CollectiveError: A rank holds other values afterwards.
    """
    sizes = [_tf.bytes_of(parts[0]) for parts in copies]
    for group in in_buckets(sizes, _MOST_BYTES):
        values = [np.asarray(copies[i][0]) for i in group]
        # As bytes: a variable may have a dtype that no collective supports.
        octets = [value.reshape(-1).view(np.uint8) for value in values]
        given = workers.communicator.broadcast(octets, root)
        for i, value, part in zip(group, values, given, strict=True):
            theirs = part.view(value.dtype).reshape(value.shape)
            for copy in copies[i] if takes else ():
                copy.assign(tf.convert_to_tensor(theirs, copy.dtype))
    ranks = workers.communicator.ranks
    every = workers.communicator.all_gather(digests_of([each[:1] for each in copies]))
    # In an elastic job ranks may be lost meanwhile.
    named = zip(ranks, every, strict=False)
    wrong = [rank for rank, theirs in named if (theirs != every[root]).any()]
    if wrong:
        raise CollectiveError(
            f"Ranks {wrong} hold other values than rank {ranks[root]} after they "
            "received its values. Does another thread of the script write to the "
            "variables?"
        )
    return sum(sizes)


def digests_of(copies: Sequence[Sequence[Any]]) -> Array:
    """Return a hash of each variable, 32 bytes; if its copies differ, like no other."""
    rows = []
    for parts in copies:
        found = {digest_of(part) for part in parts}
        rows.append(found.pop() if len(found) == 1 else secrets.token_bytes(32))
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), 32)
