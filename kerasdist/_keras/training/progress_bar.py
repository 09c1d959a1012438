"""The progress bar of a job in which another worker may become the chief."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras.src.callbacks import callback_list, progbar_logger
from keras.src.utils import io_utils


class ChiefProgressBar(progbar_logger.ProgbarLogger):
    """A progress bar that only the present chief shows.

    A new chief shows it from the present step on.

    Args:
        rank: Returns this worker's rank, which may change.
    """

    # As the one that Keras adds: callbacks may be called in the background.
    async_safe = True

    def __init__(self, rank: Callable[[], int]) -> None:
        self._rank = rank
        self._given = 1
        # The number of the epoch whose line wasn't printed.
        self._unseen: int | None = None
        super().__init__()

    @property
    def verbose(self) -> Any:
        """The script's on the chief, else 0."""
        return self._given if self._rank() == 0 else 0

    @verbose.setter
    def verbose(self, value: Any) -> None:
        self._given = value

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_epoch_begin`."""
        self._unseen = None if self.verbose else epoch
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_batch_end`."""
        self._appear()
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_epoch_end`."""
        self._appear()
        super().on_epoch_end(epoch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_test_batch_end`."""
        self._appear()
        super().on_test_batch_end(batch, logs)

    def on_test_end(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_test_end`."""
        self._appear()
        super().on_test_end(logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_predict_batch_end`."""
        self._appear()
        super().on_predict_batch_end(batch, logs)

    def on_predict_end(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_predict_end`."""
        self._appear()
        super().on_predict_end(logs)

    def _appear(self) -> None:
        """Show a bar that was begun before this worker became the chief."""
        if self.progbar is None or self.progbar.verbose == self.verbose:
            return
        self.progbar.verbose = self.verbose
        if self._unseen is not None and self.epochs > 1:
            io_utils.print_msg(f"Epoch {self._unseen + 1}/{self.epochs}")
        self._unseen = None


def show_on_chief(arguments: dict[str, Any], rank: Callable[[], int]) -> bool:
    """Add such a progress bar to the arguments of `fit`, `evaluate` or `predict`.

    Args:
        arguments: The arguments, which are changed.
        rank: Returns this worker's rank.

    Returns:
        Whether this was possible: not if a bar is among the script's own callbacks.
    """
    given = arguments.get("callbacks")
    if arguments.get("verbose", "auto") == 0:
        return True
    if isinstance(given, callback_list.CallbackList):
        # An evaluation in `fit`, with its callbacks.
        return any(isinstance(each, ChiefProgressBar) for each in given.callbacks)
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    found = [each for each in found if each is not None]
    if any(isinstance(each, progbar_logger.ProgbarLogger) for each in found):
        return False
    arguments["callbacks"] = [*found, ChiefProgressBar(rank)]
    return True


def without_bars(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks other than progress bars.

    Those belong to the state of the training, and are the same on all workers. A bar is
    often shown on the chief alone, by `verbose=2 if strategy.is_chief else 0`.
    """
    return [
        each for each in callbacks if not isinstance(each, progbar_logger.ProgbarLogger)
    ]
