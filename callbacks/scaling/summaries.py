"""The event files of TensorBoard: figures, texts and the layout.

All values of a run at one step are one summary: TensorFlow's writer is called once for
it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.custom_scalar import summary as custom_scalar
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb

from kerasdist.callbacks.scaling.charts import layout, place

# A histogram has a bucket per staleness, up to this many.
_MOST_BUCKETS = 30
_MOST_READS = 10_000


class Summaries:
    """A run's event file, with the layout of its page, and those of runs below it.

    Args:
        folder: The folder of the run's file.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}
        self._write("", custom_scalar.pb(layout()), 0)
        self.flush()

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        texts: Mapping[str, str] | None = None,
        histograms: Mapping[str, Mapping[int, int]] | None = None,
    ) -> None:
        """Write the values of one step.

        Args:
            step: Its number.
            scalars: Numbers by name, see `charts.place`.
            texts: Markdown by tag.
            histograms: By tag the count of each number.
        """
        runs: dict[str, list[Any]] = {}
        for name, value in scalars.items():
            run, tag = place(name)
            runs.setdefault(run, []).append(scalar_pb(tag, value))
        more = [text_pb(tag, text) for tag, text in (texts or {}).items()]
        for tag, counts in (histograms or {}).items():
            more.append(histogram_pb(tag, _values(counts), _MOST_BUCKETS))
        if more:
            runs.setdefault("", []).extend(more)
        for run, parts in runs.items():
            whole = summary_pb2.Summary()
            for part in parts:
                whole.MergeFrom(part)
            self._write(run, whole, step)

    def flush(self) -> None:
        """Write everything to disk."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()

    def _write(self, run: str, summary: Any, step: int) -> None:
        # On the host, and outside of whatever strategy is in scope.
        with tf.init_scope(), tf.device("/CPU:0"):
            writer = self._writers.get(run)
            if writer is None:
                folder = os.path.join(self._folder, run) if run else self._folder
                writer = self._writers[run] = tf.summary.create_file_writer(folder)
            with writer.as_default():
                tf.summary.experimental.write_raw_pb(
                    summary.SerializeToString(), step=step
                )


def _values(counts: Mapping[int, int]) -> Any:
    """Return each number as often as its count; in proportion, if that is too much."""
    total = sum(counts.values())
    scale = min(1.0, _MOST_READS / total) if total else 1.0
    return np.repeat(
        np.array(list(counts), np.float64),
        [max(1, round(count * scale)) for count in counts.values()],
    )
