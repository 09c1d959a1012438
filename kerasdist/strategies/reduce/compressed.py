"""Sums of gradients by a compressor: its memories, and the gradients that it gets.

Each replica compresses its own gradients, on its device, and keeps the memory of its
own: `kerasdist.compression` has what happens in between. Gradients of whole numbers, of
shapes that aren't known, and those that no variable belongs to are sent as they are.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._tf.tensor_origins import factors_of
from kerasdist.compression.contract import Compressor, Memory, OuterProducts
from kerasdist.transport.array_file import read_arrays, write_arrays


class Memories:
    """The memories of one worker's replicas, by variable; they end with these.

    Args:
        compressor: What they are for.

    Attributes:
        compressor: The same; one without a memory may take its place.
    """

    def __init__(self, compressor: Compressor | None) -> None:
        self.compressor = compressor
        # The graph that was traced last, and bytes of its gradients.
        self._graph: weakref.ref[Any] | None = None
        self._bytes = (0, 0)
        self._kept: dict[tuple[int, int], tuple[Any, tuple[Any, ...]]] = {}

    def of(
        self, owners: Sequence[Any], replica: int, device: str
    ) -> list[tuple[Any, ...]]:
        """Return the variables of the memory of each gradient.

        Args:
            owners: The Keras variables, or TensorFlow's, that the gradients are of.
            replica: The number of the replica on this worker.
            device: Where new ones are made.
        """
        keys = [(id(owner), replica) for owner in owners]
        known = [key in self._kept for key in keys]
        if self.compressor is not None and not all(known):
            first = self.compressor.init([tuple(owner.shape) for owner in owners])
            for key, owner, there, arrays in zip(
                keys, owners, known, first, strict=True
            ):
                if not there:
                    made = tuple(
                        _tf.own_variable(array, tf.float32, device) for array in arrays
                    )
                    self._kept[key] = weakref.ref(owner, self._forget(key)), made
        return [self._kept[key][1] for key in keys]

    def has(self, owner: Any) -> bool:
        """Return whether something is kept of a variable's gradients."""
        return bool(self._kept.get((id(owner), 0), (None, ()))[1])

    def _forget(self, key: tuple[int, int]) -> Callable[[Any], None]:
        kept = weakref.ref(self)

        def forget(_: Any) -> None:
            memories = kept()
            if memories is not None:
                memories._kept.pop(key, None)

        return forget

    @property
    def variables(self) -> list[Any]:
        """All variables, in the order in which they were made."""
        return [each for _, made in self._kept.values() for each in made]

    def note_bytes(self, before: int, after: Any) -> None:
        """Note the bytes of the gradients that a step sums, and those that are sent.

        A step may sum them in several parts.
        """
        graph = tf.compat.v1.get_default_graph()
        is_same = self._graph is not None and self._graph() is graph
        known = self._bytes if is_same else (0, 0)
        # Of factors the bytes may depend on the rows of a batch.
        found = tf.get_static_value(after) if tf.is_tensor(after) else after
        self._graph = None if found is None else weakref.ref(graph)
        self._bytes = known[0] + before, known[1] + int(found or 0)

    def figures(self) -> dict[str, float]:
        """Return the bytes of a step, if they are known, and the norm of the rest.

        Returns:
            "bytes_before" and "bytes_after", of one replica; "unsent_norm": of what the
            replicas of this worker have not sent yet.
        """
        compressor = self.compressor
        if compressor is None or self._graph is None:
            return {}
        before, after = map(float, self._bytes)
        found = {"bytes_before": before, "bytes_after": after}
        if compressor.has_memory:
            rests = [compressor.unsent(made) for _, made in self._kept.values()]
            squares = [tf.reduce_sum(rest**2) for rest in rests if rest is not None]
            found["unsent_norm"] = math.sqrt(sum(map(float, squares)))
        return found

    def restart(self, kept: Sequence[Any]) -> None:
        """Go on with other workers; eagerly.

        Args:
            kept: The variables whose values are those before the next step. Others were
                made in a step that is repeated, and begin again.
        """
        if self.compressor is None:
            return
        known = {id(variable) for variable in kept}
        for owner, made in self._kept.values():
            values = self.compressor.restart([each.numpy() for each in made])
            if any(id(each) not in known for each in made):
                (values,) = self.compressor.init([tuple(owner().shape)])
            for variable, value in zip(made, values, strict=True):
                variable.assign(value)


# The file with what all replicas keep.
#
# It has sums over the replicas, so that nothing is lost if the next job has others:
# then each begins with an equal part. All that a compressor keeps adds up so, or is the
# same on all ranks and begins again.


def save_kept(workers: Any, variables: Sequence[Any], path: Path) -> None:
    """Write what all replicas keep of the gradients of variables, on the chief.

    All workers call it alike, eagerly.

    Args:
        workers: The `Workers`.
        variables: The variables that are trained.
        path: The file.

    Raises:
        OSError: It can't be written.
    """
    memories = workers.memories
    # Not of what is never compressed, such as tables of embeddings.
    numbers = [n for n, each in enumerate(variables) if memories.has(each)]
    some = [variables[n] for n in numbers]
    totals = [np.zeros_like(each) for each in _flat(_begun(memories, some))]
    for replica in _senders(workers):
        made = _flat(memories.of(some, replica, workers.devices[replica]))
        for total, each in zip(totals, made, strict=True):
            total += each.numpy()
    totals = workers.communicator.all_reduce(totals) if totals else []
    if workers.rank == 0:
        facts = {"compressor": repr(memories.compressor), "variables": numbers}
        write_arrays(path, facts, totals)


def load_kept(workers: Any, variables: Sequence[Any], path: Path) -> bool:
    """Let all replicas begin with what the chief reads from a file of `save_kept`.

    All workers call it alike, eagerly.

    Args:
        workers: The `Workers`.
        variables: The variables that are trained.
        path: The file, which the chief alone needs.

    Returns:
        Whether there is such a file, of this compressor and these variables.
    """
    memories, communicator = workers.memories, workers.communicator
    # Whether there is something in the file, by variable.
    mask = np.zeros(len(variables), np.int8)
    arrays: list[Any] = []
    if workers.rank == 0:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            facts, arrays = read_arrays(path)
            some = [variables[n] for n in facts["variables"]]
            shapes = [each.shape for each in _flat(_begun(memories, some))]
            is_same = facts["compressor"] == repr(memories.compressor)
            if is_same and [each.shape for each in arrays] == shapes:
                mask[facts["variables"]] = 1
    mask = communicator.broadcast([mask])[0]
    if not mask.any():
        return False
    some = [each for each, there in zip(variables, mask, strict=True) if there]
    begun = _begun(memories, some)
    if workers.rank:
        arrays = [np.asarray(each) for each in _flat(begun)]
    count = communicator.all_reduce([np.float32(len(_senders(workers)))])[0]
    given = iter(communicator.broadcast(arrays))
    values = [
        memories.compressor.restart([next(given) / count for _ in parts])
        for parts in begun
    ]
    for replica, device in enumerate(workers.devices):
        made = _flat(memories.of(some, replica, device))
        for variable, value in zip(made, _flat(values), strict=True):
            variable.assign(value)
    return True


def _begun(memories: Memories, variables: Sequence[Any]) -> Memory:
    compressor = memories.compressor
    if compressor is None:
        return []
    return compressor.init([tuple(variable.shape) for variable in variables])


def _flat(parts: Sequence[Sequence[Any]]) -> list[Any]:
    return [each for some in parts for each in some]


def _senders(workers: Any) -> list[int]:
    """Return the replicas of this worker that keep something of their own."""
    return [r for r in range(workers.local_replicas) if workers.sends(r)]


def check_optimizer(compressor: Compressor | None, optimizer: Any) -> None:
    """Check that an optimizer fits to a compressor.

    Raises:
        ValueError: Both have momentum.
    """
    mine = getattr(compressor, "momentum", 0)
    if mine and getattr(optimizer, "momentum", 0):
        raise ValueError(
            "Momentum is applied once: by the compressor before gradients are sent, or "
            f"by the optimizer. Received: {compressor!r} and an optimizer with "
            f"momentum={optimizer.momentum}. Create the optimizer without momentum."
        )


def compressed_sums(
    workers: Any,
    gradients: Sequence[Any],
    owners: Sequence[Any | None],
    weight: Any,
    all_reduce: Callable[[Sequence[Any]], list[Any]],
    all_gather: Callable[[Any], Any],
    *,
    replica: int = 0,
    device: str = "",
    in_host: Callable[[Sequence[Any]], list[Any]] | None = None,
    leads: bool = True,
) -> list[Any]:
    """Sum gradients over all replicas; all of them call it alike.

    Args:
        workers: The `Workers`, of whose `memories` the compressor is.
        gradients: Dense tensors.
        owners: The variable of each gradient, or None.
        weight: Times the gradients it is this replica's part of the sums; 0 gives
            zeros, whatever the gradients hold.
        all_reduce: Sums each of a list of tensors over all replicas.
        all_gather: Concatenates all replicas' tensors along the first axis.
        replica: The number of this replica on this worker.
        device: The replica's device.
        in_host: Sums each of a list of tensors over the replicas of this host, which
            then keep the same memory; None: each replica sends its own.
        leads: Whether this replica sends what they have in common.

    Returns:
        The sums, the same on all replicas.
    """
    compressor, memories = workers.memories.compressor, workers.memories
    parts = [
        _part(compressor, gradient, owner, weight)
        for gradient, owner in zip(gradients, owners, strict=True)
    ]
    chosen = [
        i
        for i, (part, owner) in enumerate(zip(parts, owners, strict=True))
        if part.dtype.is_floating
        and (owner is not None or not compressor.has_memory)
        and (part.shape.is_fully_defined() or not compressor.has_memory)
    ]
    others = [i for i in range(len(parts)) if i not in set(chosen)]
    results: list[Any] = [None] * len(parts)
    if others:
        totals = all_reduce([parts[i] for i in others])
        for i, total in zip(others, totals, strict=True):
            results[i] = total
    if not chosen:
        return results
    given = [parts[i] for i in chosen]
    if in_host is not None:
        given = in_host(given)
    if not leads:
        # Calls are the same on all replicas.
        all_reduce = _of_none(all_reduce, tf.zeros_like)
        all_gather = _of_none(all_gather, lambda tensor: tensor[:0])
    variables: list[tuple[Any, ...]] = [() for _ in chosen]
    if compressor.has_memory:
        variables = memories.of([owners[i] for i in chosen], replica, device)
    before: Memory = [tuple(v.read_value() for v in each) for each in variables]
    sums, after, sent = compressor.reduce(given, before, all_reduce, all_gather)
    memories.note_bytes(sum(map(_tf.bytes_of, given)), sent)
    for kept, values in zip(variables, after, strict=True):
        for variable, value in zip(kept, values, strict=True):
            variable.assign(value)
    for i, total in zip(chosen, sums, strict=True):
        results[i] = total
    return results


def _of_none(function: Callable[[Any], Any], none: Callable[[Any], Any]) -> Any:
    """Return a collective to which this replica adds nothing."""
    return lambda given: function(tf.nest.map_structure(none, given))


def _part(compressor: Compressor, gradient: Any, owner: Any, weight: Any) -> Any:
    """Return a replica's part of a sum: a tensor, or outer products if wanted."""
    if owner is not None and not tf.executing_eagerly():
        # That of a layer on sequences has no known shape.
        gradient.set_shape(owner.shape)
    factors = factors_of(gradient) if compressor.needs_factors else None
    if factors is None:
        return _tf.weighted(gradient, weight)
    left, right = factors
    return OuterProducts(
        _tf.weighted(left, tf.cast(weight > 0, left.dtype)),
        _tf.weighted(right, weight),
    )
