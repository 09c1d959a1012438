"""Steps of training, evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src import backend, tree

from kerasdist._keras.context import current, is_timed, setting
from kerasdist._keras.data.arrays import (
    BatchIterable,
    BatchIterator,
    RepeatableIterator,
)
from kerasdist._keras.data.epoch_iterators import first_item
from kerasdist._keras.elastic.evaluation import (
    renew_prediction,
    repeated,
    test_function,
)
from kerasdist._keras.elastic.finished_calls import refuse_newcomer
from kerasdist._keras.elastic.step import ElasticStep
from kerasdist._keras.global_batch.gradients import TapeGradients, are_unseen
from kerasdist._keras.global_batch.step_state import StepState
from kerasdist._keras.placement.layers import placer_of
from kerasdist._keras.placement.trainer import begun_with_batch, plan_for_data
from kerasdist._keras.preemption import StepAlone
from kerasdist._keras.protocols import (
    KerasHooks,
    StepTimer,
    current_hooks,
    hooks_of,
    timer_of,
    translating,
)
from kerasdist._keras.shared_state import statistics_of
from kerasdist._keras.training.logs import keeping
from kerasdist._keras.training.optimizers import adopt_model
from kerasdist._keras.unscoped_models import (
    build_by_step,
    can_be_called,
    has_own_step,
    is_unbuilt,
    make_compiled,
)
from kerasdist._tf.patching import Original
from kerasdist._tf.variables import LAST_LOGS

# A train function that counts its steps, and measures them on request.


class InstrumentedStep:
    """A train function in up to three kinds: without clocks, counting, and measuring.

    Graphs of training always count their steps, which costs one operation, so that most
    steps run the same graph whether or not they are measured. Another graph also
    measures its steps; it is traced on the first request.

    This is a hot path (a step can take 1 ms): it uses no context managers.

    Args:
        trainer: The model.
        make: Makes the function.
        timer: Measures steps of training; None for any other steps.
        single: Whether a call is one step, whatever `steps_per_execution`.
    """

    def __init__(
        self,
        trainer: Any,
        make: Callable[[], Callable[[Any], Any]],
        timer: StepTimer | None,
        *,
        single: bool = False,
    ) -> None:
        self._trainer = trainer
        self._make = make
        self._timer = timer
        self._single = single
        self._made: dict[bool | None, Callable[[Any], Any]] = {}
        # Those of other variants, see `trace_for`.
        self._variants: dict[Any, dict[bool | None, Callable[[Any], Any]]] = {}

    def __call__(self, iterator: Any) -> Any:
        """Take steps on the batches of an iterator."""
        timer = self._timer
        # XLA can't compile an operation that reads a clock, so such a step has none
        # inside. It compiles for so long that there is only one graph.
        compiled = self._trainer.jit_compile is True
        if timer is None or not (timer.running or timer.asked):
            kind = None if timer is None else False
            # A function that measures does as well, and may have been compiled.
            plain = self._made.get(kind) or self._made.get(compiled)
            return (plain or self._get(kind))(iterator)
        timed = timer.enter(always=compiled)
        try:
            logs = (self._made.get(timed) or self._get(timed))(iterator)
        except BaseException:
            timer.leave(0)  # above all where the data have ended
            raise
        several = timed and not self._single
        timer.leave(int(self._trainer.steps_per_execution) if several else 1)
        return logs

    def trace_for(self, variant: Any) -> None:
        """Call functions from now on that are traced for a variant of the step."""
        self._made = self._variants.setdefault(variant, {})

    def drop_other_variants(self) -> None:
        """Release the functions of variants that aren't called any more."""
        self._variants.clear()

    def _get(self, kind: bool | None) -> Callable[[Any], Any]:
        if kind not in self._made:
            with setting(making=kind):
                self._made[kind] = self._make()
        return self._made[kind]


def reduce_per_replica(
    original: Original, values: Any, strategy: Any, reduction: str
) -> Any:
    """Replace `reduce_per_replica`: concatenate predictions of all workers, too."""
    result = original(values, strategy, reduction)
    hooks = hooks_of(strategy)
    if hooks is None or reduction != "concat":
        return result
    return tree.map_structure(hooks.data.gather_outputs, result)


def make_function(
    original: Original, trainer: Any, step_function: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Replace `_make_function`: count a step's rows, and raise the lost worker.

    It makes the train and the test function. `*_on_batch` gets this worker's part of
    the batch; the error after a loss isn't that of a failed operation. With a placement
    a step begins when its batch is there.
    """
    strategy = trainer.distribute_strategy
    hooks = hooks_of(strategy)
    timer = timer_of(strategy) if current.training else None
    if placer_of(strategy) is not None:
        step_function = begun_with_batch(step_function)
    if hooks is None:
        if timer is None:
            return original(trainer, step_function)
        return InstrumentedStep(
            trainer, lambda: original(trainer, step_function), timer
        )

    last, training = keeping(step_function), current.training
    elastic: ElasticStep | None = None
    local = hooks.local if training else None

    def counted(data: Any) -> Any:
        data, rows, total = hooks.data.split(data)
        divided = hooks.workers.replicas > 1
        if local is None:
            return own_step(data, rows, total, divided=divided)
        with local.step(rows):
            return own_step(data, rows, None, divided=divided)

    def own_step(data: Any, rows: Any, total: Any, *, divided: bool) -> Any:
        updates = None if elastic is None else elastic.late_updates()
        facts: dict[str, Any] = {"late": None if updates is None else updates.add}
        several = hooks.workers.replicas > 1
        if several:
            facts["taken"] = TapeGradients(direct=are_unseen(trainer))
            facts["state"] = StepState(trainer, hooks, rows, training=training)
        # A replica without rows runs the step on another's row. Its gradients count for
        # nothing, and the variables that it changed are restored.
        may_be_empty = divided and (tf.get_static_value(rows) or 0) <= 0
        variables = []
        if may_be_empty:
            metrics = [variable.value for variable in trainer.metrics_variables]
            variables = [*metrics, *statistics_of(trainer)]
        before = [variable.read_value() for variable in variables]
        with current.of(hooks, rows, total), setting(**facts):
            logs = step_function(
                hooks.data.fill_if_empty(data) if may_be_empty else data
            )
            if last is not None and (several or may_be_empty):
                last.keep(logs, rows)

        def put_back() -> Any:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            return tf.constant(0)

        if may_be_empty:
            tf.cond(rows > 0, lambda: tf.constant(0), put_back)
        if updates is not None:
            updates.finish()
        return logs

    def make_step() -> Callable[[Any], Any]:
        return make_compiled(trainer, hooks, counted, original)

    def make() -> Callable[[Any], Any]:
        function = make_step()

        def take_steps(iterator: Any) -> Any:
            if isinstance(iterator, RepeatableIterator):
                iterator = iterator.once  # an evaluation begins again after a change
            if isinstance(
                iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)
            ):
                return function(iterator)
            if isinstance(iterator, BatchIterator):
                # Keras's loop over such an iterator needs at least one step.
                return function(iterator.at_least_one())
            # `train_on_batch` and `test_on_batch`: one global batch.
            logs = function(hooks.data.own_rows(batch) for batch in iterator)
            return trainer._get_metrics_result_or_logs(logs)

        return take_steps

    inside = (
        hooks.workers.local_step if current.training else hooks.workers.collective_scope
    )

    def instrumented() -> Callable[[Any], Any]:
        return InstrumentedStep(trainer, make, timer)

    calls = instrumented()
    if hooks.tune is not None and training:
        calls = hooks.tune(trainer, calls)
    if hooks.elastic is not None and not training:
        calls = test_function(trainer, hooks, instrumented)

    def call(iterator: Any) -> Any:
        with translating(hooks.workers.failure), inside():
            if local is None:
                return calls(iterator)
            local.begin_steps(trainer)
            logs = calls(iterator)
            local.end_steps(trainer)
            return logs

    made: Callable[[Any], Any] = call
    if hooks.elastic is not None and training:
        if hooks.elastic.is_fixed:
            made = StepAlone(trainer, hooks, call)
        else:
            made = elastic = ElasticStep(
                trainer,
                hooks,
                hooks.elastic,
                make_step,
                lambda make: InstrumentedStep(trainer, make, timer, single=True),
            )
    if last is not None:
        LAST_LOGS.set(made, last)
    return made


def receive_batch(
    original: Original, trainer: Any, step_function: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Replace `_autoconvert_optionals`: unwrap the batches of kerasdist's datasets.

    It processes every batch; here it also drops the predictions of a replica without
    rows.
    """
    hooks = hooks_of(trainer.distribute_strategy)
    converted = original(trainer, step_function)
    timer = timer_of(trainer.distribute_strategy)
    if timer is None:
        return converted
    # The function being made is of one kind, see `InstrumentedStep`.
    kind = current.making
    facts = {
        "timed": kind is True,
        "compiled": current.compiled or trainer.jit_compile is True,
    }

    def filled(data: Any) -> Any:
        if hooks is not None and hooks.workers.replicas > 1:
            data = hooks.data.unwrap(data)
        if kind is not None:
            with setting(**facts):
                # Each replica may run in a thread of its own.
                timer.marks = is_timed()
                try:
                    return timer.step(converted, data)
                finally:
                    timer.marks = False
        if hooks is None:
            return converted(data)
        if (
            hooks.workers.replicas == 1
            or current.rows is not None
            or not _in_replica(hooks)
        ):
            return converted(data)  # a train or test step, see `make_function`
        data, rows, _ = hooks.data.split(data)
        if (tf.get_static_value(rows) or 0) > 0:
            return converted(data)
        outputs = converted(hooks.data.fill_if_empty(data))
        return tree.map_structure(
            lambda output: (
                output[: tf.maximum(rows, 0)]
                if getattr(output, "shape", None) is not None and len(output.shape)
                else output
            ),
            outputs,
        )

    return filled


def predict_on_batch(original: Original, trainer: Any, x: Any) -> Any:
    """Replace `predict_on_batch`: each worker predicts its part of the batch."""
    hooks = hooks_of(trainer.distribute_strategy)
    if hooks is None:
        return original(trainer, x)

    refuse_newcomer(hooks, "predict_on_batch")

    def call() -> Any:
        renew_prediction(trainer, hooks)
        return original(trainer, hooks.data.own_rows(x))

    with translating(hooks.workers.failure), hooks.workers.collective_scope():
        return repeated(hooks.elastic, call)


def symbolic_build(
    original: Original, trainer: Any, iterator: Any = None, data_batch: Any = None
) -> Any:
    """Replace `_maybe_symbolic_build`: build from one replica's batch, or the step.

    Keras averages the replicas' batches. That would be a collective for the shapes
    alone, and doesn't exist for strings or for unequal parts.
    """
    strategy = trainer.distribute_strategy
    hooks, placer = hooks_of(strategy), placer_of(strategy)
    if placer is not None:
        plan_for_data(trainer, placer, iterator, data_batch)
    elif hooks is None:
        return original(trainer, iterator, data_batch)
    own = has_own_step(trainer)
    made = trainer.test_function if current.evaluating else trainer.train_function
    if own and made is not None:
        return None  # tracing the step has created its variables
    if hooks is not None and (own or not _is_built(trainer)):
        adopt_model(trainer)
    if iterator is not None and hooks is not None:
        if _is_built(trainer) and not (own and is_unbuilt(trainer)):
            return None  # so that a generator's first batch isn't lost

        def local(value: Any) -> Any:
            return strategy.experimental_local_results(value)[0]

        given = iterator._distributed_dataset
        data_batch = given.example() if isinstance(given, BatchIterable) else None
        if data_batch is None:
            data_batch = first_item(iterator)
        for _, _, batches in iterator if data_batch is None else ():
            if isinstance(batches, BatchIterator):
                data_batch = batches.example
            if data_batch is None:
                item = next(batches, None)
                if item is None:
                    return None  # no batch, no step
                batch = tree.map_structure(local, hooks.data.unwrap(item))
                data_batch, _, _ = hooks.data.split(batch)
            break
        if hasattr(given, "restart"):
            # So that `fit` has the order that it has with a model that is built.
            given.restart()
        iterator = None
    elif iterator is not None:
        data_batch = iterator.data_adapter.get_tf_dataset().element_spec
        iterator = None
    if hooks is not None and hooks.workers.replicas > 1:
        _check_batch_size(trainer, data_batch, hooks.workers.replicas)
    return _build(original, trainer, data_batch)


def _check_batch_size(trainer: Any, batch: Any, replicas: int) -> None:
    """Refuse inputs with the batch size of all replicas together, where that matters.

    Raises:
        ValueError: The model's inputs have a batch size other than a replica's, and
            something in the model needs that size.
    """
    model = getattr(trainer, "_functional", None) or trainer
    fixed = {each.shape[0] for each in getattr(model, "_inputs", ())} - {None}
    shapes: list[Any] = [getattr(each, "shape", ()) for each in tree.flatten(batch)]
    rows = next((shape[0] for shape in shapes if len(shape)), None)
    if (
        len(fixed) == 1
        and rows is not None
        and fixed != {rows}
        and not _takes_any_rows(model, rows)
    ):
        raise ValueError(
            "A model is called with the rows of one replica, and inputs of a fixed "
            f"batch size must have that size. Received: {fixed.pop()} in "
            f"`keras.Input`, and a batch with {rows} rows here, with {replicas} "
            "replicas. Write `keras.Input(batch_size=batch_size // "
            "strategy.num_replicas_in_sync)`; `fit` keeps the size of the global "
            "batch. The rows of equal batches stay with their replica, and so do the "
            "states of stateful layers: give `fit` no batch with fewer rows."
        )


def _takes_any_rows(model: Any, rows: int) -> bool:
    """Return whether a model with a fixed batch size computes the same for other rows.

    Keras doesn't check the batch size of its inputs; only layers with a state per row,
    or with a number derived from the batch size, depend on it.
    """
    if any(getattr(layer, "stateful", False) for layer in model._flatten_layers()):
        return False
    inputs = tree.map_structure(
        lambda one: backend.KerasTensor(
            (rows, *one.shape[1:]), dtype=one.dtype, sparse=one.sparse
        ),
        model._inputs_struct,
    )
    try:
        outputs = backend.compute_output_spec(model, inputs)
    except Exception:  # a layer was made for another number of rows
        return False
    return all(one.shape[:1] == (rows,) for one in tree.flatten(outputs))


def _build(original: Original, trainer: Any, batch: Any) -> None:
    """Build all that training needs: by calling the model, else by tracing its step."""
    own = has_own_step(trainer)
    layers = trainer._flatten_layers(include_self=False)
    if own and not (can_be_called(trainer) and all(layer.built for layer in layers)):
        # The step defines all calls and inputs; a `call` may be for something else.
        try:
            build_by_step(trainer, batch)
        except Exception:
            if not can_be_called(trainer):
                raise
            # A step in Python may accept what a graph doesn't.
            original(trainer, None, batch)
        return
    try:
        original(trainer, None, batch)
    except Exception as error:
        try:
            build_by_step(trainer, batch)
        except Exception as second:
            raise (second if own else error) from None
        return
    if own and is_unbuilt(trainer):
        # Builds optimizers that only the step uses.
        build_by_step(trainer, batch)


def _is_built(trainer: Any) -> bool:
    """Return whether nothing is left to be built from a batch's shapes."""
    parts = (
        trainer,
        trainer.optimizer,
        getattr(trainer, "_compile_loss", None),
        getattr(trainer, "_compile_metrics", None),
    )
    return all(part is None or part.built for part in parts)


def new_train_function(trainer: Any) -> Callable[[Any], Any]:
    """Return a newly traced function that takes steps of training on an iterator."""
    with setting(training=True):
        return trainer._make_function(trainer.train_step)


def _in_replica(hooks: KerasHooks) -> bool:
    return current_hooks() is hooks and not tf.distribute.in_cross_replica_context()
