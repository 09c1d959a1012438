"""Gradients as a step's tapes return them: those of the global batch.

What a script or an optimizer of its own does with gradients (clip them, take their
signs, move the weights by them and differentiate again) then has the numbers of one
process. Of N rows a replica has n; its loss is multiplied by n / N *before* the
backward pass, so that what flows backward is what one process has for these rows, and
the replicas' gradients are summed:

    WHOLE   summed: the same on all replicas. Of variables of the strategy.
    PART    this replica's part of the sum: of inputs and other tensors; of variables in
            Keras's own step, which gives them to `apply` unseen, where they are summed,
            for several steps at once if gradients are accumulated
    RAW     not from a tape, or from one that wasn't asked for the loss of a step: the
            gradient of a mean over this replica's rows

`apply` finds in the graph which of these a gradient was computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.context import current, is_timed, setting
from kerasdist._keras.global_batch.losses import part_of, terms_of
from kerasdist._keras.unscoped_models import copies_of, has_own_step
from kerasdist._tf.gradient_placement import move_to_device_of
from kerasdist._tf.patching import Original
from kerasdist._tf.tensor_origins import reached, sources_of
from kerasdist._tf.variables import StrategyExtensions, current_facets, is_distributed

RAW, PART, WHOLE = "raw", "part", "whole"


class TapeGradients:
    """The gradients that the tapes of one replica's step have returned so far.

    Args:
        direct: Whether gradients go from the tape to Keras's own `apply` unseen.
    """

    def __init__(self, *, direct: bool) -> None:
        self.direct = direct
        self._graph = _graph()
        self._kinds: dict[Any, str] = {}
        # What isn't in this graph, but in that of a branch or loop, or in none, with
        # the tensors, whose identity counts.
        self._elsewhere: list[tuple[Any, str]] = []
        self._begun = False

    def begin(self) -> bool:
        """Return whether the first gradients of the step are about to be reduced."""
        first, self._begun = not self._begun, True
        return first

    @property
    def is_here(self) -> bool:
        """Whether the step's own graph is traced, not that of a branch or loop."""
        return _graph() is self._graph

    def add(self, gradients: Sequence[Any], kind: str) -> None:
        """Note what a tape returns."""
        for each in gradients:
            if each is None:
                continue
            tensor = each.values if isinstance(each, tf.IndexedSlices) else each
            if self._graph is None or tensor.graph is not self._graph:
                self._elsewhere.append((tensor, kind))
            else:
                self._kinds[tensor.name] = kind

    def kind_of(self, gradient: Any, first: str = WHOLE) -> str:
        """Return of which kind the gradients are that one is computed from.

        Args:
            gradient: A tensor or IndexedSlices.
            first: The kind that counts if there are several; and where a graph
                doesn't tell, if there is one of it at all.
        """
        if isinstance(gradient, tf.IndexedSlices):
            gradient = gradient.values
        for tensor, kind in self._elsewhere:
            if tensor is gradient:
                return kind
        found = {kind for _, kind in self._elsewhere}
        if not found and self._kinds:
            found = self._behind(gradient)
        second = PART if first == WHOLE else WHOLE
        return first if first in found else second if second in found else RAW

    def _behind(self, gradient: Any) -> set[str]:
        def kind_of(tensor: Any) -> str | None:
            eager = isinstance(tensor, tf.__internal__.EagerTensor)
            known = not eager and tensor.graph is self._graph
            return self._kinds.get(tensor.name) if known else None

        every = reached(
            [tf.convert_to_tensor(gradient)],
            lambda tensor: () if kind_of(tensor) else sources_of(tensor),
        )
        return {kind for tensor in every if (kind := kind_of(tensor)) is not None}


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def gradient(
    original: Original,
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    **more: Any,
) -> Any:
    """Replace `tf.GradientTape.gradient`: return gradients of the global batch."""
    if tf.distribute.in_cross_replica_context():
        # A single-process loop in the scope: only replicas have handles.
        return original(tape, target, copies_of(sources), output_gradients, **more)
    if current.merge is not None:
        original = _merged(original, current.merge)
    kinds, taken = current.kinds, current.taken
    targets = tf.nest.flatten(target)
    if (
        kinds is None
        or taken is None
        or current.reduced
        or not all(isinstance(one, tf.Tensor) for one in targets)
    ):
        return original(tape, target, sources, output_gradients, **more)
    flat = tf.nest.flatten(sources)
    ours = [_is_shared(source) for source in flat]
    if output_gradients is None:
        terms, weights = [], []
        for one in targets:
            for term, slope, degree in terms_of(kinds, one):
                terms.append(term)
                weights.append(slope * tf.cast(part_of(degree), term.dtype))
        target, output_gradients = terms, weights
    else:
        given = tf.nest.flatten(output_gradients)
        if any(ours):
            given = [
                each
                if each is None or taken.kind_of(each, PART) == PART
                else weighted(tf.convert_to_tensor(each), current.share)
                for each in given
            ]
        target, output_gradients = targets, given
    # Gradient functions may use tapes, as recomputation does: theirs are parts.
    with setting(taken=None):
        found = original(tape, target, sources, output_gradients, **more)
    gradients = tf.nest.flatten(found)
    places = [i for i, mine in enumerate(ours) if mine and gradients[i] is not None]
    mine = [gradients[i] for i in places]
    recording = _tf.is_recording()
    hooks = current.hooks
    if hooks is None or not mine or (taken.direct and not recording):
        taken.add(gradients, PART)
        return found
    if hooks.workers.local_replicas > 1 and not taken.is_here:
        # A merge call can't be in a branch or a loop.
        taken.add(gradients, PART)
        return found
    reduced = _summed(mine, [flat[i] for i in places], recording)
    for place, whole in zip(places, reduced, strict=True):
        gradients[place] = whole
    taken.add([g for g, our in zip(gradients, ours, strict=True) if not our], PART)
    taken.add(reduced, WHOLE)
    for whole in reduced:
        kinds.set_constant(whole)
        if current.state is not None:
            current.state.kinds.set_constant(whole)
    return tf.nest.pack_sequence_as(sources, gradients)


def _merged(original: Original, merge: Callable[[Any], Any]) -> Callable[..., Any]:
    def gradient(*args: Any, **more: Any) -> Any:
        # Gradient functions may use tapes: theirs are of one micro-batch.
        with setting(merge=None):
            found = original(*args, **more)
        return tf.nest.map_structure(merge, found)

    return gradient


def _is_shared(source: Any) -> bool:
    """Return whether all replicas have a source: a variable of the strategy.

    A `tf.Variable` that isn't may have a value for each row of a replica.
    """
    return isinstance(source, keras.Variable) or is_distributed(source)


def _summed(gradients: list[Any], sources: list[Any], recording: bool) -> list[Any]:
    """Sum gradients over the replicas; another tape can differentiate the sums."""
    facets, taken = current_facets(), current.taken
    reduce = facets.hooks.gradients.reduce

    def summed(some: Sequence[Any]) -> list[Any]:
        return exchange(
            *(facets, reduce, some, current.share),
            step=taken.begin(),
            owners=sources,
        )

    if not recording:
        return summed(gradients)
    dense = [tf.convert_to_tensor(each) for each in gradients]
    there = tf.cast(current.rows > 0, tf.float32)
    return summed_differentiably(summed, dense, there)


def summed_differentiably(
    total: Callable[[Sequence[Any]], list[Any]], tensors: Sequence[Any], there: Any
) -> list[Any]:
    """Return the replicas' sums of tensors, which a tape can differentiate.

    Args:
        total: Sums a list of tensors over the replicas.
        tensors: Those of this replica.
        there: 1 if it has rows, else 0; a scalar.
    """
    hooks = current.hooks

    @tf.custom_gradient
    def summed(*mine: Any) -> Any:
        def backward(*upstream: Any) -> Any:
            # Each replica's gradients are in the sums of all.
            parts = [weighted(each, there) for each in upstream]
            return hooks.gradients.sum_over_replicas(parts)  # type: ignore[union-attr]

        return total(list(mine)), backward

    return list(summed(*tensors))


def weighted(gradient: Any, weight: Any) -> Any:
    """Multiply a gradient by a number; 0 gives zeros, also of NaN."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _tf.weighted(gradient.values, weight)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return _tf.weighted(gradient, weight)


def are_unseen(trainer: Any) -> bool:
    """Return whether gradients go from the tape to Keras's own `apply` at once."""
    given = trainer.optimizer
    theirs = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer
    return not has_own_step(trainer) and all(
        any(getattr(type(given), name, None) is getattr(each, name) for each in theirs)
        for name in ("apply", "apply_gradients")
    )


def exchange(
    facets: StrategyExtensions,
    reduce: Callable[..., list[Any]],
    gradients: Sequence[Any],
    *args: Any,
    **options: Any,
) -> list[Any]:
    """Reduce gradients; with a placement they return to the devices they are from."""
    with _tf.outside_of_xla():
        if is_timed():
            reduced = facets.timer.exchange(
                gradients,
                lambda after: reduce(gradients, *args, after=after, **options),
            )
        else:
            reduced = reduce(gradients, *args, **options)
        if facets.places_gradients:
            reduced = [
                move_to_device_of(*pair)
                for pair in zip(reduced, gradients, strict=True)
            ]
        return reduced
