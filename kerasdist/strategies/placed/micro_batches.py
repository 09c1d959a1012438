"""Micro-batches of a placed model: GPipe's schedule in TensorFlow's executor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasdist import _keras, _tf
from kerasdist._tf.graph import micro_batch_order
from kerasdist.strategies.measure.stages import StageClock


def check_micro_batches(micro_batches: Any) -> int:
    """Return the number of micro-batches.

    Raises:
        ValueError: It isn't a positive integer.
    """
    if (
        not isinstance(micro_batches, int)
        or isinstance(micro_batches, bool)
        or micro_batches < 1
    ):
        raise ValueError(
            "`micro_batches` must be a positive integer: into how many parts each "
            f"batch is divided. Received: micro_batches={micro_batches!r}. Write 1 for "
            "none, or 4 times the number of devices to keep them busy."
        )
    return micro_batches


@contextlib.contextmanager
def in_micro_batches(
    micro_batches: int,
    *,
    rematerialize: bool = False,
    clock: StageClock | None = None,
) -> Iterator[None]:
    """Call models on parts of the batch in a replica's step, in the block.

    The stages then overlap, because a part depends only on itself; and they process the
    parts in order.

    Args:
        micro_batches: The number of parts.
        rematerialize: Whether activations are recomputed instead of kept.
        clock: Measures the stages, if the step is measured.
    """
    graph = None if _tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    first = 0 if graph is None else len(graph.get_operations())
    with (
        _keras.dividing(micro_batches) as marks,
        _keras.rematerializing(rematerialize),
    ):
        yield
    if graph is None:
        return
    micro_batch_order.order_parts(graph, marks.found)
    if clock is not None and _keras.is_timed():
        clock.mark(graph, first, marks.found)
