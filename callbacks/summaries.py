"""Writes figures, texts and the layout where TensorBoard reads them.

All values of one step are one summary: TensorFlow's writer is called once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.custom_scalar import summary as custom_scalar
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb

from kerasdist.callbacks.layout import layout

__all__ = ["Summaries"]

# A histogram has a bucket per staleness, up to as many.
_MOST_BUCKETS = 30
_MOST_READS = 10_000


class Summaries:
    """An event file, with the layout of its page.

    Args:
        folder: Where the file is made.
    """

    def __init__(self, folder: str) -> None:
        self._writer = tf.summary.create_file_writer(folder)
        self._write(custom_scalar.pb(layout()), 0)
        self._writer.flush()

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        texts: Mapping[str, str] | None = None,
        histograms: Mapping[str, Mapping[int, int]] | None = None,
    ) -> None:
        """Write what belongs to one step.

        Args:
            step: Its number.
            scalars: Numbers by tag.
            texts: Markdown by tag.
            histograms: By tag how often each number was seen.
        """
        parts = [scalar_pb(tag, value) for tag, value in scalars.items()]
        parts += [text_pb(tag, text) for tag, text in (texts or {}).items()]
        for tag, counts in (histograms or {}).items():
            parts.append(histogram_pb(tag, _values(counts), _MOST_BUCKETS))
        whole = summary_pb2.Summary()
        for part in parts:
            whole.MergeFrom(part)
        self._write(whole, step)

    def flush(self) -> None:
        """Let everything be on disk."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, summary: Any, step: int) -> None:
        # On the host, and outside of whatever strategy is in scope.
        with tf.init_scope(), tf.device("/CPU:0"), self._writer.as_default():
            tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=step)


def _values(counts: Mapping[int, int]) -> Any:
    """The numbers as often as they were seen; so often, if that is too much."""
    total = sum(counts.values())
    scale = min(1.0, _MOST_READS / total) if total else 1.0
    return np.repeat(
        np.array(list(counts), np.float64),
        [max(1, round(count * scale)) for count in counts.values()],
    )
