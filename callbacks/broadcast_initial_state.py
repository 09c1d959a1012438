"""The callback that gives all ranks one rank's state, `BroadcastInitialState`."""

from __future__ import annotations

import operator
from typing import Any

from kerasdist._keras.protocols import KerasHooks, hooks_of
from kerasdist._keras.shared_state import JobCallback, take_epoch
from kerasdist.placement.plan import human_bytes
from kerasdist.transport import log


class BroadcastInitialState(JobCallback):
    """Gives all workers one rank's state before the first step of each `fit`.

    The state is weights, the optimizers' variables and counters, the state of metrics
    and of seed generators, and the epoch to begin with. It is sent after all callbacks'
    `on_train_begin`, wherever in the list this one is. So weights that only one rank
    could load (a file on its disk, `BackupAndRestore` included) reach all ranks. With
    `ParameterServerStrategy(mode="async")` the servers get them too.

    The ranks compare hashes of their state, only variables that differ are sent, and
    then the ranks compare again. With one worker there's nothing to do.

    Without this callback a strategy refuses to train from different states, unless it
    was made with `initial_state="broadcast"`, which does the same with rank 0.

    Args:
        root: The rank whose state all others receive.
        verbose: Whether the chief logs a line about it: 1 or 0.

    Attributes:
        bytes: Number of bytes that the root sent at the beginning of the last `fit`; 0
            if all had the same state already.
        seconds: The time that this took, with the comparisons.

    Raises:
        TypeError: `root` isn't a whole number.
        ValueError: It's negative; or, in `fit`, there's no such rank.

    Example:
    ```python
    if strategy.rank == 0:
        model.load_weights("pretrained.weights.h5")  # only here
    model.fit(x, y, callbacks=[kerasdist.callbacks.BroadcastInitialState()])
    ```
    """

    shares_state = True

    def __init__(self, root: int = 0, *, verbose: int = 1) -> None:
        super().__init__()
        try:
            self.root = operator.index(root)
        except TypeError:
            raise TypeError(
                f"`root` must be a rank, a whole number. Received: root={root!r}."
            ) from None
        if self.root < 0:
            raise ValueError(
                f"`root` must be a rank, 0 or more. Received: root={root!r}."
            )
        self.verbose = verbose
        self.bytes = 0
        self.seconds = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Check `root`: without a strategy of kerasdist rank 0 is the only worker.

        Raises:
            ValueError: There is no such rank.
        """
        self.bytes, self.seconds = 0, 0.0
        if hooks_of(self.model.distribute_strategy) is None and self.root:
            raise ValueError(
                "There is no such rank to take the initial state from. Received: "
                f"root={self.root}, and there is one worker; expected 0."
            )

    def before_first_step(self, hooks: KerasHooks, variables: list[Any]) -> None:
        """Share the state, see `JobCallback.before_first_step`.

        Raises:
            ValueError: There is no such rank, or the ranks' models differ.
            CollectiveError: See `kerasdist.errors`.
        """
        # A late worker is alone until it joins, and then gets the others' state.
        joining = hooks.dynamic is not None and hooks.dynamic.joining
        done = hooks.state.share(variables, 0 if joining else self.root)
        if done.workers > 1:
            take_epoch(self.model, hooks, self.root)
        self.bytes, self.seconds = done.size, done.seconds
        if not self.verbose or hooks.workers.rank > 0 or done.workers == 1:
            return
        what = f"{done.variables} variables were equal, nothing sent"
        if done.differed:
            what = (
                f"{done.differed} of {done.variables} variables differed, "
                f"{human_bytes(done.size)} sent"
            )
        log.info(
            "%s",
            f"kerasdist: all {done.workers} workers hold the state of rank "
            f"{self.root}: {what}, {done.seconds:.3f} s",
        )
