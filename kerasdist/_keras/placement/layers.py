"""Layers on devices: the hooks in which layers are called, built, and get variables."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf
from keras.src.backend.common.name_scope import current_path

from kerasdist import _tf
from kerasdist._keras.context import current, setting
from kerasdist._tf.patching import Original
from kerasdist._tf.variables import STAGE, VARIABLE_DEVICE, facets_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """The facts that determine a layer's device.

    Attributes:
        paths: The names by which it's known: from where it was built, as in its
            variables' paths, and from where it's called.
        stage: The device of the stage that it was created in, or None.
        parent: The device of the layer that calls it, or None.
        own: Devices of the layer's own variables; those with most bytes first.
        inner: Devices of the variables of all layers inside of it.
        is_leaf: Whether there's no layer inside of it.
    """

    paths: tuple[str, ...]
    stage: str | None
    parent: str | None
    own: tuple[str, ...]
    inner: frozenset[str]
    is_leaf: bool


class LayerPlacer(Protocol):
    """The devices of layers; found by `placer_of`.

    Attributes:
        micro_batches: Into how many parts a replica's batch is divided.
    """

    micro_batches: int

    @property
    def devices(self) -> Sequence[str]:
        """All devices by full name; the first is for layers without a pattern."""

    def staging(self, device: str) -> contextlib.AbstractContextManager[None]:
        """Assign layers and variables created in the block to a device.

        Raises:
            ValueError: There's no such device, or it isn't one of `devices`.
        """

    @property
    def stage(self) -> str | None:
        """The device of the `strategy.stage` that this thread is in, or None."""

    @property
    def needs_plan(self) -> bool:
        """Whether the placement must be planned before a model is used."""

    def wish(self, layer: LayerFacts) -> str | None:
        """Return a layer's device in the placement; None if that doesn't define it."""

    def device_of(self, layer: LayerFacts) -> str | None:
        """Return a layer's device; None: each operation is where its input is."""

    def variable_device(
        self, path: str, called: tuple[str, ...], device: str | None
    ) -> str:
        """Return the device of a variable that is about to be created.

        Args:
            path: The path of its layer, empty if it has none.
            called: Paths of the layer that is being called; may be none.
            device: The device of that layer, or None.
        """

    def recording(
        self, kind: str, rows: int | None, optimizer: str
    ) -> contextlib.AbstractContextManager[Any]:
        """Record the first step of its kind, which runs inside of the block.

        Args:
            kind: "train", "test" or "predict".
            rows: Rows of a batch, if they are known.
            optimizer: The name of the model's optimizer.
        """

    def check(self, layers: Iterable[LayerFacts]) -> None:
        """Check the placement of a model that is about to be used.

        Raises:
            ValueError: A pattern has matched none of the layers of any model.
        """


def placer_of(strategy: Any) -> LayerPlacer | None:
    """Return the placer of a strategy; None if it has none."""
    placer: LayerPlacer | None = facets_of(strategy).placer
    return placer


def init_layer(original: Original, layer: Any) -> None:
    """Replace `Layer._initialize_tracker`: a layer belongs to the stage it's made in.

    `Layer.__init__`, which calls it, isn't wrapped: Keras inspects its arguments.
    """
    placer = placer_of(tf.distribute.get_strategy())
    if placer is not None:
        _note_stage(layer, placer)
    original(layer)


def _note_stage(layer: Any, placer: LayerPlacer) -> None:
    if placer.stage is not None and STAGE.get(layer) is None:
        STAGE.set(layer, placer.stage)


def call_layer(original: Original, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `Layer.__call__`: build and run a layer on its device."""
    placer = placer_of(tf.distribute.get_strategy())
    if placer is None or current.exporting:
        return original(layer, *args, **kwargs)
    if not layer.built:
        _note_stage(layer, placer)
    facts = _facts(layer)
    device = placer.device_of(facts)
    calls = (*current.calls, (facts.paths, device))
    place = tf.device(device) if device else contextlib.nullcontext()
    try:
        with setting(calls=calls), place:
            return original(layer, *args, **kwargs)
    finally:
        if layer is current.unchecked:
            current.unchecked = None
            placer.check(facts for _, facts, _ in layers_of(layer, placer))


def export_model(original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `Model.export`: the exported model runs on the device that loads it."""
    with setting(exporting=True):
        return original(model, *args, **kwargs)


def init_variable(original: Original, variable: Any, *args: Any, **kwargs: Any) -> None:
    """Replace `Variable.__init__`: choose the variable's device when it's created."""
    placer = placer_of(tf.distribute.get_strategy())
    if placer is None:
        original(variable, *args, **kwargs)
        return
    paths, device = current.calls[-1] if current.calls else ((), None)
    wish = placer.variable_device(current_path(), paths, device)
    with setting(variable_device=wish):
        original(variable, *args, **kwargs)
    if variable._value is None:
        VARIABLE_DEVICE.set(variable, wish)  # Keras gives it a value later


def initialize_variable(
    original: Original, variable: Any, *args: Any, **kwargs: Any
) -> None:
    """Replace `Variable._initialize`: likewise for a value that is given later."""
    wish = VARIABLE_DEVICE.pop(variable)
    with setting(variable_device=wish) if wish else contextlib.nullcontext():
        original(variable, *args, **kwargs)


def prepare(trainer: Any, placer: LayerPlacer) -> None:
    """Put a model's variables on their devices, and check the placement.

    Layers that were built by themselves, before their model, don't know their path
    until then; nor do variables that layers create before they are built, such as the
    states of dropout's random numbers.
    """
    built = getattr(getattr(trainer, "optimizer", None), "built", False)
    layers = list(layers_of(trainer, placer))
    for layer, _, device in layers:
        if device is None:
            continue
        for variable in own_variables(layer):
            # Made outside of the scope: an optimizer's variables couldn't be beside it.
            foreign = getattr(variable.value, "_distribute_strategy", None) is None
            # A variable that an optimizer was built for must stay the same object.
            if (foreign or variable.value.device != device) and not (
                built and variable.trainable
            ):
                with trainer.distribute_strategy.scope():
                    move(variable, device)
    if all(layer.built for layer, _, _ in layers):
        placer.check(facts for _, facts, _ in layers)
    else:
        current.unchecked = trainer


def layers_of(
    root: Any, placer: LayerPlacer
) -> Iterator[tuple[Any, LayerFacts, str | None]]:
    """Yield all layers of a model in the order of calls, outer before inner.

    Each is yielded with its device in the placement, or None.
    """

    def walk(
        layer: Any, above: str, parent: str | None
    ) -> Iterator[tuple[Any, LayerFacts, str | None]]:
        facts = _facts(layer, above, parent)
        wish = placer.wish(facts)
        yield layer, facts, wish
        for inner in _inside(layer):
            yield from walk(inner, facts.paths[-1], wish)

    return walk(root, "", None)


def own_variables(layer: Any) -> list[Any]:
    """Return a layer's own variables with a value, without inner layers'."""
    seeds = [generator.state for generator in layer._seed_generators]
    own = [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]
    return [variable for variable in own if variable._value is not None]


def move(variable: Any, device: str) -> None:
    """Put a variable on another device: a new one gets its value."""
    value = variable.value.read_value()
    with tf.init_scope(), setting(variable_device=device):
        variable._initialize(value)


def _inside(layer: Any) -> list[Any]:
    return list(layer._flatten_layers(include_self=False, recursive=False))


def _facts(
    layer: Any, above: str | None = None, parent: str | None = None
) -> LayerFacts:
    """Return a layer's facts; by default for a call by the innermost current layer."""
    if above is None:
        paths, parent = current.calls[-1] if current.calls else (("",), None)
        above = paths[-1]
    built_in = layer._parent_path if layer._parent_path is not None else current_path()
    inside = _inside(layer)
    own = _devices([*layer._trainable_variables, *layer._non_trainable_variables])
    return LayerFacts(
        paths=tuple(
            dict.fromkeys(
                f"{base}/{layer.name}" if base else layer.name
                for base in (built_in, above)
            )
        ),
        stage=STAGE.get(layer),
        parent=parent,
        own=own,
        inner=frozenset(_devices(layer.weights) if inside else own),
        is_leaf=not inside,
    )


def _devices(variables: Sequence[Any]) -> tuple[str, ...]:
    sizes: dict[str, int] = {}
    for variable in variables:
        if variable._value is not None:
            device, size = variable._value.device, _tf.bytes_of(variable._value)
            sizes[device] = sizes.get(device, 0) + size
    return tuple(sorted(sizes, key=lambda device: -sizes[device]))
