"""The context of the step that this thread traces: the facts that hooks need."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.global_batch.loss_kinds import LossKinds
from kerasdist._keras.protocols import KerasHooks


class StepContext(threading.local):
    """The facts about the current step, per thread.

    Attributes:
        hooks: The hooks of the strategy that runs a Keras step here; None outside.
        rows: The replica's number of rows inside a Keras step, else None.
        total: The global batch's number of rows, if known without communication.
        kinds: The kinds of the step's losses, if there are several replicas.
        state: The `global_batch.step_state.StepState` of a step, if there are several
            replicas.
        taken: The `global_batch.gradients.TapeGradients` of that step.
        merge: Makes one process's gradients of those of micro-batches, which a tape
            returns; None without micro-batches.
        written: Called with each variable that a micro-batch assigns; or None.
        reduced: Whether gradients have been reduced already.
        window: Whether gradients will be reduced once for several steps.
        late: Takes a reduction of gradients, and the update with its result, that are
            to run at the end of the replica's step; returns whether that's possible.
            None: both run where they are.
        scale: The factor of gradients before they are clipped.
        in_compile_loss: Whether CompileLoss records its parts.
        fitting: 1 inside `fit`, 2 if it prints.
        data_pending: Whether `fit` has not been given its training data yet.
        epoch: The number of the epoch of `fit`, as callbacks know it.
        epochs: The number of epochs that `fit` was called with.
        callbacks: The callbacks of `fit`.
        begun: The numbers that they had at its first step.
        admission: Of a worker that has joined, before its first step: the steps until
            the members next ask for workers that want to join, and between two
            questions; else None.
        resumed: Called once, before the first step of a `fit` that is continued, also
            by a worker that has joined.
        resumption: The `preemption.Resumption` of a `fit`, if its job can be
            preempted; else None.
        joined: Whether this worker has joined others during this `fit`.
        evaluating: Whether this is inside `evaluate` or `predict`.
        local: Whether each worker is meant to train models of its own.
        training: Whether the function being made takes steps of training.
        base_rate: Whether rates are read and set before they are scaled.
        iterator: A weak reference to the newest epoch iterator other than those of
            `evaluate` and `predict`: at the beginning of `fit` that of its data; None
            if there was none.
        making: Whether the function being made measures its steps, or only counts
            them; None: they aren't steps of training.
        timed: Whether a measured step runs, or is being traced.
        compiled: Whether that step is compiled by XLA.
        building: Whether steps are traced for the variables that they create, and
            update nothing.
        readers: Readers that read data ahead and must be closed; None outside of
            `fit`, `evaluate` and `predict`.
        writing: Whether the chief writes a file here, and has announced that.
        following: Whether a checkpoint that the chief has written is recorded here.
        after_batch: Whether callbacks are called at the end of a batch of `fit`.
        succession: The `chief_failover.ChiefFailover` of a `fit` in which the
            chief may be lost; else None.
        calls: The layers that are being called with a placement, outer first, each with
            its paths and device.
        variable_device: The device of the variable that is being created there, or
            None.
        unchecked: A placed model whose layers aren't all known before it's called.
        exporting: Whether calls are for a file that holds no devices.
        next_rows: The rows of a batch of the next loop of a placed model, or None.
        next_batch: The specification of that batch, if a placement is planned by it; or
            None.
        parts: The number of parts into which the batch of a model's call is divided.
        marks: The `placement.micro_batches.Marks` in the graph that is being made.
        part: The rows of the part that a model is being called on, or None.
        rematerializing: Whether activations are recomputed.
        seeds: The seeds that the running segment of layers, whose activations are
            recomputed, has drawn or draws; None outside.
        second_run: Whether that segment is in its second run.
        drawn: How many seeds it has taken in its second run.
        replace_callbacks: Called by an outermost `fit` with its trainer and the
            callbacks that it was given; returns those that it has. None: as given.
    """

    hooks: KerasHooks | None = None
    rows: Any = None
    total: Any = None
    kinds: LossKinds | None = None
    state: Any = None
    taken: Any = None
    merge: Callable[[Any], Any] | None = None
    written: Callable[[Any], None] | None = None
    reduced: bool = False
    window: bool = False
    late: Callable[[Callable[..., Any], Callable[[Any], Any]], bool] | None = None
    scale: int = 1
    in_compile_loss: bool = False
    fitting: int = 0
    data_pending: bool = False
    epoch: int = 0
    epochs: int = 1
    callbacks: Any = ()
    begun: Any = ()
    admission: Any = None
    resumed: Callable[[], None] | None = None
    resumption: Any = None
    joined: bool = False
    evaluating: bool = False
    local: bool = False
    training: bool = False
    base_rate: bool = False
    iterator: weakref.ref[Any] | None = None
    making: bool | None = None
    timed: bool = False
    compiled: bool = False
    building: bool = False
    readers: set[Any] | None = None
    writing: bool = False
    following: bool = False
    after_batch: bool = False
    succession: Any = None
    calls: tuple[tuple[tuple[str, ...], str | None], ...] = ()
    variable_device: str | None = None
    unchecked: Any = None
    exporting: bool = False
    next_rows: int | None = None
    next_batch: Any = None
    parts: int = 1
    marks: Any = None
    part: Any = None
    rematerializing: bool = False
    seeds: list[Any] | None = None
    second_run: bool = False
    drawn: int = 0
    replace_callbacks: Callable[[Any, list[Any]], list[Any]] | None = None
    _summed: tuple[Any, Any] | None = None

    @property
    def share(self) -> Any:
        """The replica's rows divided by those of the global batch: float32, scalar.

        See `total_rows`.
        """
        if self.hooks is None:
            return 1.0
        rows = tf.cast(self.rows, tf.float32)
        return tf.math.divide_no_nan(rows, self.total_rows)

    @property
    def total_rows(self) -> Any:
        """Number of rows of the global batch: float32, scalar.

        Where the data don't determine it (each worker's own, `train_on_batch`), it
        costs a collective per step.
        """
        if self.total is not None:
            return tf.cast(self.total, tf.float32)
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if self._summed is None or self._summed[0] is not graph:
            rows = tf.cast(self.rows, tf.float32)
            if self.hooks is None or self.hooks.workers.replicas == 1:
                return rows
            self._summed = (graph, self.hooks.gradients.sum_over_replicas([rows])[0])
        return self._summed[1]

    def of(self, hooks: KerasHooks, rows: Any, total: Any) -> Any:
        """Set the facts of one replica's step for the length of a `with` block."""
        return setting(
            hooks=hooks,
            rows=rows,
            total=total,
            kinds=LossKinds(rows) if hooks.workers.replicas > 1 else None,
            timed=self.timed or hooks.timer.marks,
            _summed=None,
        )


current = StepContext()


def setting(**values: Any) -> contextlib.AbstractContextManager[None]:
    """Set facts for the length of a `with` block."""
    return _tf.replaced(current, **values)


def is_timed() -> bool:
    """Return whether the inside of the running or traced step is measured."""
    return current.timed and not current.compiled
