"""`enable_keras_distribution`: `keras.distribution` has an effect on TensorFlow."""

from __future__ import annotations

from kerasdist import _keras
from kerasdist.strategies.distribution.owner import StrategyOwner
from kerasdist.strategies.options import check_installed
from kerasdist.strategies.sync.strategy import DataParallelStrategy


def enable_keras_distribution(strategy: DataParallelStrategy | None = None) -> None:
    """Let `keras.distribution` train on all workers of a job.

        import keras
        import kerasdist

        kerasdist.enable_keras_distribution()
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        model = build_model()
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=256)  # that of the global batch

    Call it once, before `keras.distribution` is used; until a distribution is set
    nothing else changes. Each worker runs the same script, with the same data, and
    the numbers are those of one process. Without it a distribution has no effect on
    TensorFlow: each worker trains a model of its own.

    A distribution that is set begins the scope of its strategy in this thread;
    `set_distribution(None)`, or the end of `with distribution.scope():`, ends it. The
    strategy stays, and is used again by the next distribution of the same devices.

    Args:
        strategy: A `RingStrategy` or `ParameterServerStrategy` for all distributions,
            if it should have other options than the default. By default a
            `RingStrategy` is created when a distribution is first set, on the devices
            of its mesh.

    Raises:
        TypeError: `strategy` is no such strategy.
        ValueError: Another strategy has been given before, or Keras's backend isn't
            TensorFlow.
        IncompatibleVersionError: As of `RingStrategy`.

    After an error nothing has changed.
    """
    if strategy is not None and not isinstance(strategy, DataParallelStrategy):
        raise TypeError(
            "`strategy` must be one whose workers divide the batch. Received: "
            f"strategy={strategy!r} of type {type(strategy).__name__}. Expected a "
            "RingStrategy or a ParameterServerStrategy, or None."
        )
    check_installed()
    before = _keras.distribution_owner()
    if isinstance(before, StrategyOwner):
        if strategy is None or strategy is before.given:
            return
        raise ValueError(
            "`keras.distribution` has been enabled already, and takes a strategy only "
            f"at the first call. Received: strategy={strategy!r}; before: "
            f"{before.given!r}. Call `enable_keras_distribution` once."
        )
    _keras.set_distribution_owner(StrategyOwner(strategy))
    _keras.install("distribution")
