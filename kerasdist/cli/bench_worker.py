"""A worker of `kerasdist bench`: the user's script, with its first `fit` measured.

    python -m kerasdist.cli.bench_worker STEPS (script.py | -m module) [args ...]

The figures are those of `ScalingTensorBoard`, which replaces the script's own one, if
any. After the steps every worker ends as a script does, by `SystemExit`.

Standard output is for the result, which the chief writes. What the script prints, the
progress bar of Keras too, goes to standard error.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
from typing import Any, NoReturn

from kerasdist._keras.context import setting
from kerasdist._keras.training.state import JobCallback
from kerasdist.callbacks import ScalingTensorBoard, bottleneck
from kerasdist.callbacks.job_view import JobView
from kerasdist.cli.console import output_to_errors


class _Limit(JobCallback):
    """Ends the process after some steps of a `fit`, when the figures have been logged.

    It stands in front of the board, which then hasn't counted the step that isn't run.

    Args:
        board: Measures the same `fit`.
        steps: Number of steps.
    """

    def __init__(self, board: ScalingTensorBoard, steps: int) -> None:
        super().__init__()
        self._board, self._steps = board, steps
        self._left = self._epochs = 0
        self._in_step = True

    def on_train_begin(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_begin`."""
        del logs
        job = JobView(self.model)
        self._in_step = job.in_step
        self._left = -(-self._steps // job.steps_per_call)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_epoch_begin`."""
        del epoch, logs
        self._epochs += 1
        # Asynchronous workers exchange their figures at the end of an epoch.
        if self._epochs > 1 and not self._in_step:
            self._end()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_batch_begin`."""
        del batch, logs
        if self._left == 0 and self._in_step:
            self._end()
        self._left -= 1

    def on_train_end(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_end`."""
        del logs
        self._end()

    def _end(self) -> None:
        self._board.on_train_end()
        raise SystemExit(0)


def main() -> None:
    """Run the script.

    Raises:
        SystemExit: The first `fit` has been measured; or, with a text, there was none.
    """
    steps, *command = sys.argv[1:]
    with contextlib.ExitStack() as undo:
        folder = undo.enter_context(
            tempfile.TemporaryDirectory(prefix="kerasdist-bench-")
        )
        board = ScalingTensorBoard(folder, calibrate=True, verbose=0)
        # Also after an error, which ends `fit`: for the steps before it.
        undo.callback(_print_result, board)
        run_first_fit("bench", command, [_Limit(board, int(steps)), board])


def run_first_fit(name: str, command: list[str], callbacks: list[Any]) -> NoReturn:
    """Run a script whose first `fit` has more callbacks, which end the process.

    What the script prints goes to standard error.

    Args:
        name: The command's name, for the error.
        command: The script or module, and its arguments.
        callbacks: They replace a `ScalingTensorBoard` of the script.

    Raises:
        SystemExit: By a callback; or, with a text, there was no `fit`.
    """

    def added(trainer: Any, given: list[Any]) -> list[Any]:
        del trainer
        own = [one for one in given if not isinstance(one, ScalingTensorBoard)]
        return [*own, *callbacks]

    with output_to_errors(), setting(replace_callbacks=added):
        _run(command)
    raise SystemExit(
        f"kerasdist {name} found nothing to measure. The script ended without a call "
        "of `model.fit` under a strategy of kerasdist. Build and compile the model in "
        "`with kerasdist.RingStrategy().scope():`, and train it by `fit`."
    )


def _print_result(board: ScalingTensorBoard) -> None:
    """Write the report to standard output, on the chief."""
    if board.figures is None or board.verdict is None:
        return
    print(file=sys.stderr)  # a progress bar's line hasn't ended
    try:
        print(bottleneck.to_text(board.figures, board.verdict), flush=True)
    except BrokenPipeError:
        # Its reader has enough. At its end Python writes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _run(command: list[str]) -> None:
    """Run a script or module as Python itself does."""
    if command[0] == "-m":
        # The current folder stands in sys.path already.
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    path = command[0]
    sys.argv = command
    if not os.path.isdir(path):  # runpy itself adds a folder
        sys.path[0] = os.path.dirname(os.path.abspath(path))
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main()
