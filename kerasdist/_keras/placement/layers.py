"""Layers on devices: which layer is being called, built or made a variable of."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf
from keras.src.backend.common.name_scope import current_path

__all__ = [
    "LayerFacts",
    "LayerPlacer",
    "call_layer",
    "called_layer",
    "calling",
    "calls_now",
    "device_of_variable",
    "export_model",
    "init_layer",
    "init_variable",
    "initialize_variable",
    "layers_of",
    "move",
    "own_variables",
    "placer_of",
    "prepare",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What decides where a layer is.

    Attributes:
        paths: The names by which it's known: by where it was built, as its variables'
            paths begin, and by where it's called from.
        stage: The device of the stage that it was made in, or None.
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
    """Says where layers are; found as `extended.layer_placer`."""

    @property
    def stage(self) -> str | None:
        """The device of the `strategy.stage` that this thread is in, or None."""

    def wish(self, layer: LayerFacts) -> str | None:
        """Where the placement says that a layer belongs; None if it doesn't say."""

    def device_of(self, layer: LayerFacts) -> str | None:
        """The device of a layer; None: each operation is where its input is."""

    def variable_device(
        self, path: str, called: tuple[str, ...], device: str | None
    ) -> str:
        """The device of a variable that is about to be made.

        Args:
            path: The path of its layer, empty if it has none.
            called: Paths of the layer that is being called; may be none.
            device: The device of that layer, or None.
        """

    def recording(
        self, kind: str, rows: int | None, optimizer: str
    ) -> contextlib.AbstractContextManager[Any]:
        """The first step of its kind runs inside.

        Args:
            kind: "train", "test" or "predict".
            rows: Rows of a batch, if they are known.
            optimizer: The name of the model's optimizer.
        """

    def check(self, layers: Iterable[LayerFacts]) -> None:
        """A model is about to be used, of which these are all layers.

        Raises:
            ValueError: A pattern has matched none of the layers of any model.
        """


class _Calls(threading.local):
    """What is going on in this thread.

    Attributes:
        stack: The layers that are being called, each with its paths and device.
        device: Where the variable goes that is being made, or None.
        exporting: Whether calls are for a file that holds no devices.
        unchecked: A model whose layers aren't all known before it's called.
    """

    def __init__(self) -> None:
        self.stack: list[tuple[tuple[str, ...], str | None]] = []
        self.device: str | None = None
        self.unchecked: Any = None
        self.exporting = False


_calls = _Calls()

# Where a layer belongs that was made in a stage. Written past Keras's `__setattr__`,
# which would track it.
_STAGE = "_kerasdist_stage"
# Of a variable that has no value yet. It can't be a key: it has no hash.
_WISH = "_kerasdist_device"


def placer_of(strategy: Any) -> LayerPlacer | None:
    """What places layers in a strategy; None in one that doesn't."""
    extended = getattr(strategy, "extended", None)
    placer: LayerPlacer | None = getattr(extended, "layer_placer", None)
    return placer


def called_layer() -> str | None:
    """The path of the layer that is being called in this thread; None if none is."""
    return _calls.stack[-1][0][-1] if _calls.stack else None


def device_of_variable() -> str | None:
    """Where the variable goes that Keras is making in this thread; None if none."""
    return _calls.device


def init_layer(original: Callable[..., Any], layer: Any) -> None:
    """In place of `Layer._initialize_tracker`, which `Layer.__init__` calls.

    A layer that is made in a stage belongs there. Not in place of `Layer.__init__`,
    whose arguments Keras looks at.
    """
    placer = placer_of(tf.distribute.get_strategy())
    if placer is not None and placer.stage is not None:
        layer.__dict__.setdefault(_STAGE, placer.stage)
    original(layer)


def call_layer(
    original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """In place of `Layer.__call__`: what it builds and does is on its device."""
    placer = placer_of(tf.distribute.get_strategy())
    if placer is None or _calls.exporting:
        return original(layer, *args, **kwargs)
    if placer.stage is not None and not layer.built:
        layer.__dict__.setdefault(_STAGE, placer.stage)
    facts = _facts(layer)
    device = placer.device_of(facts)
    _calls.stack.append((facts.paths, device))
    try:
        with tf.device(device) if device else contextlib.nullcontext():
            return original(layer, *args, **kwargs)
    finally:
        _calls.stack.pop()
        if layer is _calls.unchecked:
            _calls.unchecked = None
            placer.check(facts for _, facts, _ in layers_of(layer, placer))


def export_model(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """In place of `Model.export`: what is saved runs where it is loaded."""
    before, _calls.exporting = _calls.exporting, True
    try:
        return original(model, *args, **kwargs)
    finally:
        _calls.exporting = before


def calls_now() -> list[Any]:
    """The layers that are being called in this thread, for `calling`."""
    return list(_calls.stack)


@contextlib.contextmanager
def calling(calls: list[Any]) -> Iterator[None]:
    """Be inside of calls of layers, as when `calls_now` was asked."""
    before, _calls.stack = _calls.stack, list(calls)
    try:
        yield
    finally:
        _calls.stack = before


def init_variable(
    original: Callable[..., Any], variable: Any, *args: Any, **kwargs: Any
) -> None:
    """In place of `Variable.__init__`: its device is chosen where it's made."""
    placer = placer_of(tf.distribute.get_strategy())
    if placer is None:
        original(variable, *args, **kwargs)
        return
    paths, device = _calls.stack[-1] if _calls.stack else ((), None)
    wish = placer.variable_device(current_path(), paths, device)
    with _making(wish):
        original(variable, *args, **kwargs)
    if variable._value is None:
        variable.__dict__[_WISH] = wish  # Keras gives it a value later


def initialize_variable(
    original: Callable[..., Any], variable: Any, *args: Any, **kwargs: Any
) -> None:
    """In place of `Variable._initialize`, which makes TensorFlow's variable."""
    wish = variable.__dict__.pop(_WISH, None)
    with _making(wish) if wish else contextlib.nullcontext():
        original(variable, *args, **kwargs)


def prepare(trainer: Any, placer: LayerPlacer) -> None:
    """Put a model's variables where they belong, and check the placement.

    Variables of layers that were built by themselves, before the model that they are
    a part of, don't know where they belong until then; nor do those that layers make
    before they are built, as the states of dropout's random numbers.
    """
    built = getattr(getattr(trainer, "optimizer", None), "built", False)
    layers = list(layers_of(trainer, placer))
    for layer, _, device in layers:
        if device is None:
            continue
        for variable in own_variables(layer):
            # What an optimizer knows already must stay the variable that it is.
            if variable.value.device != device and not (built and variable.trainable):
                move(variable, device)
    if all(layer.built for layer, _, _ in layers):
        placer.check(facts for _, facts, _ in layers)
    else:
        _calls.unchecked = trainer


def layers_of(
    root: Any, placer: LayerPlacer
) -> Iterator[tuple[Any, LayerFacts, str | None]]:
    """All layers of a model as a call of it finds them, the outer before the inner.

    Each with where the placement says that it belongs, or None.
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
    """A layer's own variables that have a value, without those of layers inside."""
    seeds = [generator.state for generator in layer._seed_generators]
    own = [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]
    return [variable for variable in own if variable._value is not None]


def move(variable: Any, device: str) -> None:
    """Put a variable on another device: its value moves into a new one."""
    value = variable.value.read_value()
    with tf.init_scope(), _making(device):
        variable._initialize(value)


@contextlib.contextmanager
def _making(device: str) -> Iterator[None]:
    before, _calls.device = _calls.device, device
    try:
        yield
    finally:
        _calls.device = before


def _inside(layer: Any) -> list[Any]:
    return list(layer._flatten_layers(include_self=False, recursive=False))


def _facts(
    layer: Any, above: str | None = None, parent: str | None = None
) -> LayerFacts:
    """The facts; by default of a layer that is called by the innermost one."""
    if above is None:
        paths, parent = _calls.stack[-1] if _calls.stack else (("",), None)
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
        stage=layer.__dict__.get(_STAGE),
        parent=parent,
        own=own,
        inner=frozenset(_devices(layer.weights) if inside else own),
        is_leaf=not inside,
    )


def _devices(variables: Sequence[Any]) -> tuple[str, ...]:
    sizes: dict[str, int] = {}
    for variable in variables:
        if variable._value is not None:
            device = variable._value.device
            sizes[device] = sizes.get(device, 0) + _bytes(variable)
    return tuple(sorted(sizes, key=lambda device: -sizes[device]))


def _bytes(variable: Any) -> int:
    value = variable._value
    return int(value.shape.num_elements() or 0) * int(value.dtype.size)
