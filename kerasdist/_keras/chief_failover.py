"""The files of callbacks after the loss of the chief, which another worker continues.

    old chief   on_epoch_end: row of epoch 3 ── collective ── on_epoch_end: ✗
    another     on_epoch_end: call 3 kept ───── collective ── on_epoch_end: call 4 kept
                                                                 new chief: writes 4

The other workers keep the calls that only the chief runs. A collective that all have
finished shows that the chief had run those before it. So after its loss the new chief
runs the calls since the last collective with the old chief, perhaps a second time:
writing a file again changes nothing, and a row of a CSV file isn't written twice.

`CSVLogger` then continues the file. `TensorBoard` has run all along without files, for
its counts, and opens new event files in the same folders.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.utils import file_utils

from kerasdist import _tf
from kerasdist._keras.context import current
from kerasdist._keras.protocols import ElasticHooks, KerasHooks
from kerasdist._tf.patching import Original


@dataclasses.dataclass
class _ChiefsCall:
    """A call that is the chief's.

    Attributes:
        number: The number of collectives that had been finished.
        run: Runs it.
    """

    number: int
    run: Callable[[], Any]


class ChiefFailover:
    """The calls of callbacks that the chief runs, in one `fit`, on any worker.

    Args:
        hooks: The hooks of the model's strategy.
        elastic: Its changes of membership.
    """

    def __init__(self, hooks: KerasHooks, elastic: ElasticHooks) -> None:
        self._hooks = hooks
        self._elastic = elastic
        self._epoch = elastic.epoch
        self._joining = elastic.joining
        self._kept: list[_ChiefsCall] = []
        # Those that need more than their calls.
        self._loggers: list[Any] = []
        self._boards: list[Any] = []

    def keep(
        self,
        original: Original,
        callback: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Keep a call that the chief runs, on another worker."""
        self.look()
        method = original.__name__
        call: Callable[[], Any] = lambda: original(callback, *args, **kwargs)  # noqa: E731
        if isinstance(callback, keras.callbacks.TensorBoard):
            _add(self._boards, callback)
            if method == "set_model":
                _open_without_files(callback, call)
            else:
                call()
            if not _writes_only(callback, method):
                return
        elif isinstance(callback, keras.callbacks.CSVLogger):
            _add(self._loggers, callback)
            if method == "on_epoch_end":
                call = functools.partial(_write_row_once, callback, call)
        finished = self._elastic.finished
        self._kept = [each for each in self._kept if each.number >= finished]
        self._kept.append(_ChiefsCall(finished, call))

    def look(self) -> None:
        """Continue the files if this worker has become the chief.

        All workers call it at the same points of a `fit`, outside of sections.
        """
        if self._epoch == self._elastic.epoch:
            return
        self._epoch = self._elastic.epoch
        if self._joining:
            # Calls before it joined, which aren't those of the job.
            self._joining = False
            self._kept.clear()
        before, now = self._elastic.finished_before, self._elastic.finished
        self._kept = [each for each in self._kept if each.number >= before]
        if self._hooks.workers.rank > 0:
            # The new chief runs them now: the next collective shows that it has.
            for each in self._kept:
                each.number = now
            return
        kept, self._kept = self._kept, []
        loggers, self._loggers = self._loggers, []
        boards, self._boards = self._boards, []
        for logger in loggers:
            _continue_rows(logger)
        for board in boards:
            _open_files(board)
        for each in kept:
            each.run()


def take_over() -> None:
    """Continue the chief's files, if this worker has become the chief in a `fit`."""
    if current.succession is not None:
        current.succession.look()


def _add(known: list[Any], callback: Any) -> None:
    if not any(each is callback for each in known):
        known.append(callback)


# CSV files.


def _continue_rows(logger: Any) -> None:
    """Open the file of a `CSVLogger` to append to it, under the header that it has."""
    content = _read(logger.filename)
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        # The chief was lost while it wrote a row.
        with file_utils.File(logger.filename, "wb") as file:
            file.write(whole)
    logger.csv_file = file_utils.File(logger.filename, "a")
    logger.keys = logger.writer = None
    if whole:
        first = whole.decode().splitlines()[:1]
        names = next(csv.reader(first, delimiter=logger.sep))
        logger.keys = names[1:]

        class Dialect(csv.excel):
            delimiter = logger.sep

        logger.writer = csv.DictWriter(logger.csv_file, names, dialect=Dialect)


def _write_row_once(logger: Any, write: Callable[[], Any]) -> None:
    """Write a row that the lost chief may have written."""
    file, text = logger.csv_file, io.StringIO(newline="")
    logger.csv_file = text
    if logger.writer is not None:
        logger.writer.writer = csv.writer(text, logger.writer.writer.dialect)
    try:
        write()
    finally:
        logger.csv_file = file
    logger.writer.writer = csv.writer(file, logger.writer.writer.dialect)
    if not _read(logger.filename).endswith(text.getvalue().encode()):
        file.write(text.getvalue())
        file.flush()


def _read(path: str) -> bytes:
    if not file_utils.exists(path):
        return b""
    with file_utils.File(path, "rb") as file:
        return bytes(file.read())


# Event files.


def flush_board(callback: Any) -> None:
    """Write the events of a `TensorBoard` to disk: a lost chief can't any more."""
    if isinstance(callback, keras.callbacks.TensorBoard):
        for writer in callback._writers.values():
            writer.flush()


def _open_without_files(board: Any, set_model: Callable[[], Any]) -> None:
    with _tf.replaced(board, write_graph=False, embeddings_freq=0):
        set_model()
    board._writers = {
        name: tf.summary.create_noop_writer() for name in ("train", "val")
    }
    board._should_trace = False


def _open_files(board: Any) -> None:
    board._writers = {}
    board._should_trace = board._stop_batch > 0
    # Keras before 3.15 chooses the writer of single steps once, as training begins (and
    # that of an evaluation inside, as it begins), with the step 0.
    chosen = len(board._prev_summary_state)
    for _ in range(chosen):
        board._pop_writer()
    for name in ("_train_writer", "_val_writer")[:chosen]:
        board._push_writer(getattr(board, name), 0)


def _writes_only(board: Any, method: str) -> bool:
    """Return whether a method may be run again: it only writes."""
    if method == "on_test_end":
        return bool(board.update_freq == "epoch")
    return method in ("on_train_batch_end", "on_epoch_end")
