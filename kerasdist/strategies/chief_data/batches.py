"""Batches of `train_on_batch` and the like: the same on all, or the chief's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist.collectives import Communicator
from kerasdist.strategies.chief_data.choice import DataChoice
from kerasdist.strategies.chief_data.comparison.content import Content, batch_of
from kerasdist.strategies.chief_data.comparison.fingerprint import hash_text
from kerasdist.strategies.chief_data.encoding import decode, encode, pack, unpack
from kerasdist.strategies.chief_data.transfer import size_of
from kerasdist.strategies.data.messages import used, with_remedies


def settle_batch(
    communicator: Communicator,
    choice: DataChoice,
    data: Any,
    log_once: Callable[[str, str], None],
) -> Any:
    """Return a global batch that all workers hold: if theirs differ, the chief's.

    Args:
        communicator: The communicator of all workers, which call this together.
        choice: Decides whose data are used.
        data: This worker's batch, a nest of arrays, or of values that
            NumPy converts to arrays.
        log_once: Logs a line on the chief, given the kind of data and a line.

    Raises:
        ValueError: They differ, and the chief's can't be used. All workers raise it.
    """
    content = Content([batch_of(data)])
    if choice.mode != "chief" and _is_same(communicator, content):
        return data
    why = choice.of_chief(
        communicator,
        "batches",
        content,
        different=lambda others, _: with_remedies(
            "All workers must be given the same global batch, of which each takes its "
            "rows",
            f"batches of ranks {others} differ from rank {communicator.ranks[0]}'s",
        ),
    )
    if not why:
        return data
    leaves = [encode(leaf) for leaf in tf.nest.flatten(data)]
    packed = pack({}, leaves) if communicator.rank == 0 else np.zeros(0, np.uint8)
    _, chiefs = unpack(communicator.all_gather(packed)[0])
    cost = f"rank 0 sends {size_of(chiefs) / 1e6:.3g} MB in each step"
    log_once("batches", used("batches", why, cost))
    return tf.nest.pack_sequence_as(data, [decode(leaf) for leaf in chiefs])


def _is_same(communicator: Communicator, content: Content) -> bool:
    """Return whether all workers hold the same; one small collective."""
    mine = hash_text("".join([content.form, *content.digests()]).encode()) >> 1
    most = communicator.all_reduce([np.array([mine, -mine], np.int64)], "max")[0]
    return bool(most[0] == -most[1])
