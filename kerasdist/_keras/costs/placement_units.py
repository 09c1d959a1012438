"""The layers of a model that are placed on a device as a whole.

Built-in layers are, with all layers in them (MultiHeadAttention, Bidirectional, RNNs).
Models, and custom layers that consist of other layers, are divided; the weights that
such a layer has itself are placed by its own path.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

_MARK = re.compile(r"kerasdist_unit_(\d+)x")
_marking = threading.Lock()


def goes_whole(layer: Any) -> bool:
    """Return whether a layer is placed as a whole."""
    if isinstance(layer, keras.Model):
        return False
    built_in = type(layer).__module__.partition(".")[0] == "keras"
    return built_in or not layer._layers


class Units:
    """The layers of a model that are placed as a whole, numbered.

    Args:
        model: The model.

    Attributes:
        layers: The layers by number.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._numbers: dict[int, int] = {}
        self.layers: list[Any] = []

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Let calls of layers mark the operations that they make, in this thread."""
        original = keras.Layer.__call__
        me = threading.get_ident()
        inside = False

        @functools.wraps(original)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if threading.get_ident() != me or inside or not goes_whole(layer):
                return original(layer, *args, **kwargs)
            inside = True
            try:
                with tf.name_scope(f"kerasdist_unit_{self._number(layer)}x"):
                    return original(layer, *args, **kwargs)
            finally:
                inside = False

        with _marking:
            keras.Layer.__call__ = call
            try:
                yield
            finally:
                keras.Layer.__call__ = original

    def of(self, name: str) -> int | None:
        """Return the number of the layer that made an operation of this name."""
        marks = _MARK.findall(name)
        return int(marks[-1]) if marks else None

    def variables(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the variables of each layer, each variable once.

        A layer that only contains others, and has no variables, isn't yielded.
        """
        seen: set[int] = set()
        for layer, _ in self._walk():
            whole = goes_whole(layer)
            variables = layer.variables if whole else _own_variables(layer)
            own = [v for v in variables if id(v) not in seen]
            seen.update(map(id, own))
            if own or id(layer) in self._numbers:
                yield self._number(layer), own

    def paths(self) -> list[str]:
        """Return the path of each layer, by number."""
        paths = {id(layer): path for layer, path in self._walk()}
        return [paths.get(id(layer)) or layer.name for layer in self.layers]

    def _number(self, layer: Any) -> int:
        if id(layer) not in self._numbers:
            self._numbers[id(layer)] = len(self.layers)
            self.layers.append(layer)
        return self._numbers[id(layer)]

    def _walk(self) -> Iterator[tuple[Any, str]]:
        """Yield all layers that may have variables, each once, and their paths."""
        seen: set[int] = set()

        def walk(layer: Any, path: str) -> Iterator[tuple[Any, str]]:
            if id(layer) in seen or isinstance(layer, keras.layers.InputLayer):
                return
            seen.add(id(layer))
            yield layer, path
            if not goes_whole(layer):
                above = _prefix(layer, path)
                for child in layer._layers:
                    yield from walk(child, child.path or f"{above}{child.name}")

        yield from walk(self._model, self._model.path or self._model.name)


def _prefix(layer: Any, path: str) -> str:
    """Return the beginning of the paths of a layer's children.

    Only layers with a `build` of their own know their path; those of their siblings
    begin alike. A functional model's name isn't a part of them.
    """
    for child in layer._layers:
        if child.path and child.path.endswith(child.name):
            return str(child.path.removesuffix(child.name))
    return "" if hasattr(layer, "_inputs_struct") else f"{path}/"


def _own_variables(layer: Any) -> list[Any]:
    """Return the variables of a layer itself, without those of the layers in it."""
    seeds = [generator.state for generator in layer._seed_generators]
    return [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]
